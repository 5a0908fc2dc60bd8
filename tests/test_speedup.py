"""Formulas against published figures, figures and intervals, all-reduce shares, and the verdict."""

import json
import math
import re
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from eagle3kit import fabric, figures, speedup, verdict
from eagle3kit.acceptance import Acceptance
from eagle3kit.errors import KitError
from eagle3kit.figures import Figure

ORACLES = json.loads((Path(__file__).parent / "cases" / "oracles.json").read_text())
REGIMES = ORACLES["regime_map_kimi_k26_eagle3_k3_8x_rtx_pro_6000"]
KIMI = ORACLES["kimi_allreduce"]
POOLED = Figure(value=REGIMES["pooled_acceptance_length"], unit="", kind="published", source="pooled over the runs")


def figure(value: float, low: float | None = None, high: float | None = None, kind: str = "measured", unit: str = "") -> Figure:
    return Figure(value=value, low=low, high=high, kind=kind, unit=unit, source="a test")


# ---- Lengths


@pytest.mark.parametrize("row", ORACLES["leviathan"]["rows"], ids=str)
def test_leviathan(row):
    alpha, gamma = row["alpha"], row["gamma"]
    if "speedup" in row:
        assert speedup.leviathan_speedup(alpha, gamma, row["c"]) == pytest.approx(row["speedup"], abs=6e-4)
    else:
        assert speedup.expected_tokens(alpha, gamma) == pytest.approx(row["expected_tokens"], abs=6e-4)
        assert speedup.leviathan_operations(alpha, gamma) == pytest.approx(row["operations"], abs=6e-3)


def test_leviathan_is_the_length_of_equal_conditionals():
    for alpha in (0.0, 0.3, 0.95, 1.0):
        marginal = speedup.marginals([alpha] * 4)
        assert speedup.length(marginal) == pytest.approx(speedup.expected_tokens(alpha, 4))
    assert speedup.expected_tokens(1.0, 5) == 6.0 and speedup.leviathan_operations(1.0, 5) == 1.0
    with pytest.raises(KitError, match=r"1\.2"):
        speedup.expected_tokens(1.2, 3)


@pytest.mark.parametrize("row", ORACLES["acceptance_length_from_marginals"], ids=str)
def test_length_of_marginals(row):
    assert speedup.length(row["marginals"]) == pytest.approx(row["length"], abs=6e-4)
    counted = Acceptance(drafts=100_000, accepted=tuple(round(m * 100_000) for m in row["marginals"]))
    assert counted.length == pytest.approx(speedup.length(row["marginals"]))


def test_conditional_rates_are_not_marginal_ones():
    row = ORACLES["misread_conditional"]
    assert speedup.length(row["rates"]) == pytest.approx(row["as_marginals"], abs=6e-4)
    assert speedup.length(speedup.marginals(row["rates"])) == pytest.approx(row["as_conditionals"], abs=6e-4)
    with pytest.raises(KitError, match="conditional rates: multiply them"):
        speedup.length((0.6, 0.7))
    with pytest.raises(KitError, match=r"shares of 0 to 1.*1\.42"):
        speedup.length((1.42, 0.7))


def test_what_was_served_of_the_fixture():
    row = ORACLES["estimator_fixture"]
    assert speedup.length(row["served_marginals"]) == pytest.approx(row["served_length"], abs=2e-4)
    assert speedup.length(row["speculators_full_acc"]) > row["served_length"]


def test_lengths_by_depth():
    assert speedup.lengths_by_depth((0.7, 0.5, 0.1)) == pytest.approx({1: 1.7, 2: 2.2, 3: 2.3})


# ---- Experts


@pytest.mark.parametrize("row", ORACLES["moe_distinct_experts"]["rows"], ids=str)
def test_distinct_experts(row):
    found = [speedup.distinct_experts(row["experts"], row["active"], tokens) for tokens in row["tokens"]]
    assert found == pytest.approx(row["distinct"], abs=6e-3)


@pytest.mark.parametrize(("experts", "active", "tokens"), [(384, 8, 4), (128, 8, 4), (16, 2, 10)])
def test_distinct_experts_by_drawing_them(experts, active, tokens):
    rng = np.random.default_rng(0)
    seen = [len({int(e) for _ in range(tokens) for e in rng.choice(experts, active, replace=False)}) for _ in range(1500)]
    error = np.std(seen) / len(seen) ** 0.5
    assert abs(np.mean(seen) - speedup.distinct_experts(experts, active, tokens)) < 4 * error


def test_a_verify_step_wakes_more_experts_until_all_are_awake():
    ratios = [speedup.experts_ratio(384, 8, batch, 3) for batch in (1, 8, 128)]
    assert ratios == sorted(ratios, reverse=True) and ratios[0] == pytest.approx(3.88, abs=0.01)
    assert ratios[-1] == pytest.approx(1.07, abs=0.005)
    assert speedup.experts_ratio(8, 8, 1, 3) == 1.0  # all of them always: a dense target
    with pytest.raises(KitError, match="9 active of 8"):
        speedup.distinct_experts(8, 9, 1)


# ---- r


def test_r_of_published_pairs():
    pairs = ORACLES["length_and_speedup_pairs"]["rows"]
    found = {name: speedup.published_ratio(length, gain, pair=name) for name, length, gain in pairs}
    assert {name: round(r.value, 2) for name, r in found.items()} == {
        "gsm8k": 2.22, "math500": 1.95, "mtbench": 1.93, "humaneval": 2.01, "gpqa": 1.87}  # fmt: skip
    assert {r.kind for r in found.values()} == {"published"}
    assert np.median([r.value for r in found.values()]) == pytest.approx(
        ORACLES["length_and_speedup_pairs"]["median_r_kimi_k2"], abs=6e-3
    )
    for _, length, gain in pairs:  # and back again
        r = speedup.published_ratio(length, gain, pair="")
        assert speedup.predicted_speedup(figure(length), r).value == pytest.approx(gain)


def test_a_broken_baseline_is_refused_by_name():
    with pytest.raises(KitError, match=r"r = 0\.92 for scout, batch 8.*baseline is broken"):
        speedup.published_ratio(2.3, 2.5, pair="scout, batch 8")
    with pytest.raises(KitError, match=r"r = 0\.90 for B = 8, K = 3.*baseline is broken"):
        speedup.step_ratio([9.0, 9.01, 8.99], [10.0, 10.01, 9.99], pair="B = 8, K = 3")
    # Rounding, or noise, may reach 1: then nothing is proven.
    assert speedup.published_ratio(1.5, 1.5, pair="").value == 1.0
    assert speedup.published_ratio(1.50, 1.505, pair="").value < 1
    noisy = speedup.step_ratio([9.0, 11.0, 9.5], [9.0, 10.0, 11.0], pair="")
    assert noisy.value < 1 < noisy.high


def test_r_measured_is_a_ratio_of_means_with_its_interval():
    rng = np.random.default_rng(0)
    plain, speculating = rng.normal(10, 0.5, 40), rng.normal(16, 0.8, 60)
    r = speedup.step_ratio(speculating.tolist(), plain.tolist(), pair="B = 1, K = 3")
    assert r.value == pytest.approx(speculating.mean() / plain.mean()) and r.n == 40 and r.kind == "measured"
    spread = r.value * math.hypot(0.05 / 40**0.5, 0.05 / 60**0.5)  # by propagation of errors
    assert r.high - r.low == pytest.approx(2 * 1.96 * spread, rel=0.2)


def test_the_interval_of_r_holds_its_promise():
    rng, held = np.random.default_rng(1), 0
    for _ in range(200):
        r = speedup.step_ratio(rng.normal(16, 2, 25), rng.normal(10, 1, 25), pair="", resamples=300)
        held += r.low <= 1.6 <= r.high
    assert 178 <= held <= 199


def test_pairing_takes_out_what_both_share():
    rng = np.random.default_rng(2)
    slow = rng.uniform(1, 3, 12)  # the machine's mood
    plain, speculating = (10 * slow).tolist(), (17 * slow + rng.normal(0, 0.01, 12)).tolist()
    paired = speedup.step_ratio(speculating, plain, pair="", paired=True)
    loose = speedup.step_ratio(speculating, plain, pair="")
    assert paired.low < 1.7 < paired.high and paired.high - paired.low < (loose.high - loose.low) / 50
    with pytest.raises(KitError, match="3 and 2 timings cannot be paired"):
        figures.ratio_of_means([1, 2, 3], [1, 2], source="x", paired=True)


@pytest.mark.parametrize("timings", [[1.0], [], [1.0, 0.0], [1.0, math.nan], [1.0, -2.0]])
def test_timings_that_give_no_interval_are_refused(timings):
    with pytest.raises(KitError, match="at least two|no positive number"):
        figures.mean(timings, unit="ms", source="steps")


def test_break_even_rate():
    found = speedup.needed_rate(figure(1.6, 1.3, 1.9), 3)
    assert (found.value, found.low, found.high) == pytest.approx((0.2, 0.1, 0.3))
    assert speedup.length([found.value] * 3) == pytest.approx(1.6)  # length = r
    assert speedup.needed_rate(figure(5.0), 3).value > 1  # out of reach
    assert speedup.needed_rate(figure(1.02, 0.98, 1.06), 3).low == 0
    with pytest.raises(KitError, match="0 draft tokens"):
        speedup.needed_rate(figure(1.6), 0)


# ---- Speedup


def test_intervals_of_ratios_as_propagation_and_as_drawing_give_them():
    got = figures.quotient(figure(2.0, 1.9, 2.1), figure(1.6, 1.5, 1.7), unit="x", source="s")
    assert (got.value, got.low, got.high) == pytest.approx((1.25, 1.155, 1.355), abs=2e-3)
    rng = np.random.default_rng(0)
    drawn = np.exp(rng.normal(math.log(2), math.log(2.1 / 2) / 1.96, 50_000) - rng.normal(math.log(1.6), 0.03, 50_000))
    whole = figures.quotient(figure(2.0, 2 * 2 / 2.1, 2.1), figure(1.6, 1.6 * math.exp(-0.0588), 1.6 * math.exp(0.0588)),
                             unit="x", source="s")  # fmt: skip
    assert (whole.low, whole.high) == pytest.approx(np.percentile(drawn, [2.5, 97.5]), rel=5e-3)


def test_one_interval_is_carried_over_and_none_gives_none():
    got = figures.quotient(figure(2.0), figure(1.6, 1.5, 1.7), unit="x", source="s")
    assert (got.low, got.high) == pytest.approx((2 / 1.7, 2 / 1.5))
    assert figures.quotient(figure(2.0), figure(1.6), unit="x", source="s").low is None
    with pytest.raises(KitError, match="above 0"):
        figures.quotient(figure(2.0), figure(0.0), unit="x", source="s")


def test_estimates_and_measurements_are_never_mixed():
    assert speedup.predicted_speedup(figure(2.0), figure(1.6)).kind == "modelled"
    assert figures.kind_of(figure(1), figure(1)) == "measured"
    assert figures.kind_of(figure(1), figure(1, kind="published")) == "modelled"


@pytest.mark.parametrize(("value", "low", "high"), [(1, 2, 3), (3, 1, 2), (math.nan, None, None), (1, 0, None), (math.inf, 1, 2)])
def test_impossible_figures_are_refused(value, low, high):
    with pytest.raises(ValueError, match="no figure"):
        figure(value, low, high)


def test_map_has_a_cell_for_each_ratio():
    ratios = {(8, 0, 3): figure(1.5, 1.4, 1.6), (1, 0, 3): figure(1.2, 1.1, 1.3), (1, 0, 1): figure(1.1)}
    cells = speedup.speedup_map(ratios, {1: figure(1.6), 3: figure(2.1, 2.0, 2.2)})
    assert [(cell.concurrency, cell.draft_tokens) for cell in cells] == [(1, 1), (1, 3), (8, 3)]
    assert [cell.speedup.value for cell in cells] == pytest.approx([1.6 / 1.1, 2.1 / 1.2, 2.1 / 1.5])
    with pytest.raises(KitError, match=r"3 draft tokens.*\[1\]"):
        speedup.speedup_map(ratios, {1: figure(1.6)})


def test_draft_tokens_by_goodput():
    steps = {0: figure(10.0), 1: figure(13.0), 3: figure(20.0)}
    lengths = {1: figure(1.6), 3: figure(2.2)}
    choice = speedup.best_draft_tokens(8, steps, lengths)
    assert choice.draft_tokens == 1 and choice.beyond_noise
    assert {k: round(f.value) for k, f in choice.by_depth.items()} == {0: 800, 1: 985, 3: 880}
    assert choice.by_depth[0].kind == "measured" and choice.by_depth[1].kind == "modelled"
    slower = speedup.best_draft_tokens(8, {0: figure(10.0), 1: figure(17.0)}, lengths)
    assert slower.draft_tokens == 0 and not slower.beyond_noise
    noisy = speedup.best_draft_tokens(8, {0: figure(10.0, 9.0, 11.0), 1: figure(15.0, 13.0, 17.0)}, lengths)
    assert noisy.draft_tokens == 1 and not noisy.beyond_noise
    with pytest.raises(KitError, match="plain step"):
        speedup.best_draft_tokens(8, {1: figure(13.0)}, lengths)


# ---- All-reduce


def test_latency_and_bandwidth_as_published():
    line = fabric.fit(KIMI["alpha_beta_points_bytes_us"])
    assert line.alpha_us == pytest.approx(KIMI["alpha_us"], abs=0.05)
    assert line.beta_us_per_byte == pytest.approx(KIMI["beta_us_per_byte"], rel=1e-3)
    assert line.gb_per_second == pytest.approx(11.9, abs=0.05)
    assert max(map(abs, line.residuals_us)) < 2.5 and sum(line.residuals_us) == pytest.approx(0, abs=1e-9)
    for (size, measured), residual in zip(line.points, line.residuals_us, strict=True):
        assert line.us(size) + residual == pytest.approx(measured)


def test_a_line_through_exact_points_and_what_gives_none():
    line = fabric.fit([(n, 10 + 2e-3 * n) for n in (1024, 4096, 65536)])
    assert (line.alpha_us, line.beta_us_per_byte) == pytest.approx((10, 2e-3))
    assert fabric.fit([(1, 5.0), (2, 5.0)]).gb_per_second is None
    with pytest.raises(KitError, match="at least two message sizes"):
        fabric.fit([(1024, 5.0), (1024, 6.0)])


def test_counts_and_sizes_of_messages():
    assert fabric.all_reduces_per_step(61, split_embedding=False) == 122
    assert fabric.all_reduces_per_step(32) == 65 and fabric.all_reduces_per_step(6) == 13
    assert fabric.message_bytes(1, 0, 7168) == 14336 and fabric.message_bytes(8, 3, 7168) == 458752


@pytest.mark.parametrize(("each_us", "share"), KIMI["microbench_us_to_share"])
def test_share_that_a_microbenchmark_claims(each_us, share):
    step_ms = 1000 / KIMI["ab"]["baseline_tok_s"]
    assert fabric.share_of_step(122, each_us, step_ms) == pytest.approx(share, abs=6e-4)


def published_saving() -> fabric.Saving:
    return fabric.saving_of_rates(KIMI["ab"]["baseline_tok_s"], KIMI["ab"]["custom_allreduce_tok_s"], 122, source="rtx6kpro")


def test_share_that_the_same_pages_a_b_gives():
    saving, ab = published_saving(), KIMI["ab"]
    assert saving.saved_ms == pytest.approx(ab["saved_ms"], abs=6e-4)
    assert saving.share.value == pytest.approx(0.085, abs=6e-4) and saving.share.kind == "published"
    assert saving.saved_us_each == pytest.approx(8.65, abs=6e-3)
    assert saving.cost_share(9.2) == pytest.approx(ab["share_low"], abs=6e-4)
    assert saving.cost_share(11.8) == pytest.approx(ab["share_high"], abs=6e-4)
    predicted = 122 * (56.2 - 11.8) / 1000
    assert predicted == pytest.approx(ab["microbench_predicted_ms"], abs=6e-3) and predicted > 5 * saving.saved_ms


def test_the_storys_share_in_each_reading():
    story = KIMI["story"]
    implied = fabric.implied_us(story["share"], 1000 / story["tok_s"], 122)
    assert implied == pytest.approx(story["implied_us_per_allreduce"], abs=0.05)
    cost, saved = fabric.reread(story["share"], published_saving(), microbenchmark_us=56.2, other_us=11.8, source="the story")
    assert (cost.value, saved.value) == pytest.approx((0.188, 0.079), abs=6e-4)
    assert {cost.kind, saved.kind} == {"modelled"}


def test_three_shares_of_a_straggler():
    # Rank 1 comes late: rank 0 spends 38 of 100 ms in the collective, rank 1 its own 10 of 72.
    shares = fabric.three_shares([38.0, 10.0], [100.0, 72.0], 10.0)
    assert (shares.of_kernel_time.low, shares.of_kernel_time.high) == pytest.approx((10 / 72, 0.38))
    assert shares.without_waiting.value == pytest.approx(10 / 72) and shares.saved is None
    saving = fabric.Saving(usual_ms=figure(3.831, 3.80, 3.86), other_ms=figure(3.543, 3.52, 3.57), count=65)
    saved = fabric.three_shares([1.0], [3.0], None, saving).saved
    assert saved.value == pytest.approx(0.288 / 3.831) and saved.low < saved.value < saved.high and saved.kind == "measured"
    with pytest.raises(KitError, match="each rank needs both"):
        fabric.three_shares([1.0, 2.0], [3.0], None)


def test_a_faster_fabric_raises_r():
    plain, speculating = figure(12.0, 11.9, 12.1), figure(20.0)
    then = fabric.faster_fabric(plain, speculating, [fabric.Traffic(count=122, old_us=20, new_us=5)],
                                [fabric.Traffic(count=122, old_us=22, new_us=5)])  # fmt: skip
    assert (then.plain_ms.value, then.speculating_ms.value) == pytest.approx((10.17, 17.926))
    assert then.r_now.value == pytest.approx(1.667, abs=1e-3) and then.r_then.value == pytest.approx(1.763, abs=1e-3)
    assert then.r_now.kind == "measured" and then.r_then.kind == then.plain_ms.kind == "modelled"
    same = fabric.faster_fabric(plain, speculating, [], [])
    assert same.r_then.value == same.r_now.value
    with pytest.raises(KitError, match="do not fit into a step of 12 ms"):
        fabric.faster_fabric(plain, speculating, [fabric.Traffic(count=122, old_us=100, new_us=5)], [])


# ---- Disk


def test_disk():
    disk, each = ORACLES["disk"], speedup.state_bytes_per_token(3, 7168)
    assert each == disk["kimi_bytes_per_token"]
    assert each * 131072 / 2**30 == pytest.approx(disk["kimi_131072_token_sample_gib"])
    assert each * 2000 * 100_000 / 1e12 == pytest.approx(disk["kimi_100k_samples_of_2k_tokens_tb"], abs=0.05)
    assert speedup.state_bytes_per_token(3, 4096) * 8192 / 1e6 == pytest.approx(disk["llama_8b_8192_tokens_mb"], abs=0.5)


# ---- The verdict


def published_cells(*contexts: str) -> list[speedup.Cell]:
    tokens = {"0": 0, "16k": 16384, "32k": 32768, "64k": 65536}
    return [speedup.published_cell(concurrency, tokens[context], 3, speedup=gain, acceptance_length=POOLED, source="rtx6kpro")
            for context in contexts or tokens for concurrency, gain in zip(REGIMES["concurrency"], REGIMES[context], strict=True)
            if gain is not None]  # fmt: skip


def test_verdict_on_the_published_map():
    found = verdict.judge(published_cells())
    assert found.word == "GO BELOW"
    for concurrency in (1, 2, 4, 8, 16, 32):
        assert found.at(concurrency, 0) == "GO"
    assert found.at(128, 32768) == "NO-GO" and found.at(128, 0) == "NO-GO"
    assert found.below == {0: 128, 16384: 64, 32768: 4, 65536: 4}
    assert {(one.cell.concurrency, one.cell.context) for one in found.exceptions} == {(8, 32768), (16, 32768)}
    assert "GO BELOW" in found.sentence and "not at 128 (0.98x)" in found.sentence and "published" in found.sentence
    with pytest.raises(KitError, match="concurrency 48"):
        found.at(48, 0)
    for one in found.cells:
        assert one.needed_length == pytest.approx(POOLED.value / one.cell.speedup.value)
        assert (one.headroom >= 1) == (one.word == "GO")


def test_verdicts_that_are_the_same_everywhere():
    go = verdict.judge([cell for cell in published_cells("0") if cell.concurrency <= 32])
    assert go.word == "GO" and go.below == {0: None} and go.sentence.startswith("GO:")
    none = verdict.judge([cell for cell in published_cells("32k") if cell.concurrency >= 32])
    assert none.word == "NO-GO" and none.sentence.startswith("NO-GO:") and not none.exceptions
    asked = verdict.judge(published_cells("0"), least_speedup=1.2)
    assert asked.below == {0: 4} and asked.at(4, 0) == "NO-GO"
    with pytest.raises(KitError, match="no cell"):
        verdict.judge([])


def cell(concurrency: int, length: Figure, r: Figure, depth: int = 3) -> speedup.Cell:
    return speedup.Cell(concurrency=concurrency, context=0, draft_tokens=depth, length=length, r=r,
                        speedup=speedup.predicted_speedup(length, r))  # fmt: skip


def test_noise_is_no_go_and_says_so():
    found = verdict.judge([cell(1, figure(2.0, 1.9, 2.1), figure(1.5, 1.4, 1.6)), cell(8, figure(2.0), figure(1.95, 1.8, 2.1))])
    assert (found.at(1, 0), found.at(8, 0)) == ("GO", "WITHIN NOISE") and found.word == "GO BELOW" and found.below == {0: 8}
    assert "within noise" in found.sentence and any("More repeats" in change and "8" in change for change in found.changes)


def test_a_gain_that_noise_hides_is_not_proven():
    found = verdict.judge([cell(1, figure(2.0), figure(1.5, 0.9, 2.5))])
    assert found.word == "NO-GO" and "not proven even at concurrency 1 (1.33x, within noise)" in found.sentence


def test_what_would_change_it_has_numbers():
    cells = [cell(1, figure(2.0), figure(1.6)), cell(8, figure(2.0), figure(2.5)), cell(64, figure(2.0), figure(4.6))]
    changes = " ".join(verdict.judge(cells).changes)
    assert "length of 2.50 with 3 draft tokens, instead of 2.00, would reach 1x at concurrency 8" in changes
    assert re.search(r"concurrency 64 .*no draft can.*4\.60 with 3 draft tokens, where 4 is the most", changes)
    assert "length below 1.60, where 2.00 is counted on, would end it first at concurrency 1" in changes


def test_a_better_draft_may_be_best_with_more_draft_tokens():
    # With one draft token nothing can reach r = 2.4; with three a length of 3.5 of at most 4 would.
    cells = [cell(1, figure(1.5), figure(2.4), depth=1), cell(1, figure(2.0), figure(3.5)),
             cell(8, figure(1.5), figure(2.4), depth=1)]  # fmt: skip
    found = verdict.judge(cells)
    assert [one.cell.draft_tokens for one in found.cells] == [1, 1] and found.word == "NO-GO"
    assert found.changes[0] == ("A length of 3.50 with 3 draft tokens, instead of 2.00, would reach 1x at concurrency 1 and "
                                "context 0")  # fmt: skip
    assert found.changes[1] == ("At concurrency 8 and context 0 no draft can: it would need a length of 2.40 with 1 draft token, "
                                "where 2 is the most there can be")  # fmt: skip
    assert "not even at concurrency 1 (0.62x)" in found.sentence


@pytest.mark.parametrize("seed", range(5))
def test_the_fastest_is_the_choice_by_goodput(seed):
    rng = np.random.default_rng(seed)
    steps = {depth: figure(float(ms)) for depth, ms in zip((0, 1, 2, 3, 5), np.sort(rng.uniform(8, 20, 5)), strict=True)}
    lengths = {depth: figure(speedup.expected_tokens(0.7, depth)) for depth in (1, 2, 3, 5)}
    goodput = speedup.best_draft_tokens(8, steps, lengths).by_depth
    cells = [cell(8, lengths[depth], figure(steps[depth].value / steps[0].value), depth=depth) for depth in lengths]
    [best] = verdict.judge(cells).cells
    assert best.cell.draft_tokens == max(lengths, key=lambda depth: goodput[depth].value)
    assert best.cell.speedup.value == pytest.approx(goodput[best.cell.draft_tokens].value / goodput[0].value)


def test_the_fastest_depth_counts_and_the_cost_is_told():
    cells = [cell(1, figure(2.0), figure(1.6)), cell(1, figure(1.6), figure(1.1), depth=1)]
    found = verdict.judge(cells, cost=verdict.Cost(gpu_hours=1500, disk_gib=10.5, source="planned"))
    assert len(found.cells) == 1 and found.cells[0].cell.draft_tokens == 1
    assert "1,500 GPU-hours and 10.5 GiB (planned)" in found.sentence
    again = json.loads(json.dumps(asdict(found), allow_nan=False))
    assert again["word"] == "GO" and again["cost"]["gpu_hours"] == 1500
