"""Predicted against served, what the difference is made of, and which fault is named when one is planted."""

import random
from dataclasses import replace

import pytest
import tinydraft
import torch
from tinymodel import make_tiny_tokenizer

from eagle3kit import agreement, breakdown, doubts, plots_acceptance, predict, residue, suspects
from eagle3kit.acceptance import Acceptance, from_steps, total
from eagle3kit.errors import KitError
from eagle3kit.samples import StatesSample
from eagle3kit.served import Prompt, Served, drawn_over

DEPTH = tinydraft.DEPTH


@pytest.fixture(scope="module")
def prediction(tiny):
    return predict.predict(predict.load_draft(tiny.draft, torch.float32), tiny.answers(), **tiny.known, depth=DEPTH)


def some_records(seed: int, prompts: int = 24, chance: float = 0.5, same: int | None = None) -> list[Acceptance]:
    """Counts of prompts that differ in difficulty; with `same`, the difficulties are those of that seed."""
    hard, dice, records = random.Random(seed if same is None else same), random.Random(seed), []
    for _ in range(prompts):
        mine = min(0.95, max(0.02, chance + hard.uniform(-0.3, 0.3)))
        steps = []
        for _ in range(30):
            accepted = 0
            while accepted < 3 and dice.random() < mine:
                accepted += 1
            steps.append(accepted)
        records.append(from_steps(steps, 3))
    return records


# ---- The comparison


def test_the_same_counts_agree_to_the_last_digit():
    records = some_records(0)
    found = agreement.compare(records, records, tolerance=0.01, resamples=300)
    assert found.within and found.paired and found.difference == 0
    assert [(row.difference, row.low, row.high, row.p) for row in found.rows] == [(0, 0, 0, 1)] * 4
    assert [row.name for row in found.rows] == ["token 1", "token 2", "token 3", "length"]
    assert "within the tolerance of 0.01" in found.words and "no more than noise" in found.words


def test_a_difference_is_told_from_noise_prompt_by_prompt():
    easy, other = some_records(0, chance=0.6), some_records(1, chance=0.4, same=0)
    found = agreement.compare(easy, other, tolerance=0.05, resamples=400)
    assert not found.within and found.rows[-1].high < 0 and found.rows[-1].p < 0.05
    assert "ABOVE the tolerance" in found.words and "more than noise" in found.words
    chance = agreement.compare(some_records(0), some_records(2, same=0), tolerance=0.05, resamples=400)
    assert chance.rows[-1].low < 0 < chance.rows[-1].high
    # Pairs take out what makes a prompt hard for both.
    apart = agreement.compare(some_records(0), some_records(2, prompts=25, same=0)[:24] + [from_steps([], 3)], tolerance=0.05,
                              resamples=400)
    assert not apart.paired and apart.rows[-1].high - apart.rows[-1].low > chance.rows[-1].high - chance.rows[-1].low


def test_waves_against_prompts_raise_a_doubt_only_beyond_noise():
    few = [some_records(2, prompts=25, same=0)[:24], some_records(3, prompts=25, chance=0.9)[:24]]
    same, far = (agreement.compare(some_records(0), [*waves, from_steps([], 3)], tolerance=0.001, resamples=400) for waves in few)
    assert not same.within and same.noise and not same.raised and same.verdict == "within noise"
    assert not far.within and not far.noise and far.raised and far.verdict == "OUTSIDE tolerance"
    assert doubts._of("length", same).raised is False and doubts._of("length", far).raised is True
    paired = agreement.compare(some_records(0), some_records(2, same=0), tolerance=0.001, resamples=400)
    assert paired.noise and paired.raised, "prompt by prompt a difference beyond the tolerance is looked into"
    assert agreement.compare(some_records(0), some_records(0), tolerance=0.001, resamples=50).verdict == "within tolerance"
    said = agreement.unchecked(told=False, within=not same.raised, again=True, longest=9, temperature=1.0, agreed=same)
    assert "differ by no more than noise, so no cause" in said[-1]


def test_a_true_difference_is_inside_the_interval_about_as_often_as_promised():
    held = 0
    for seed in range(100):
        one, other = some_records(seed, 20), some_records(seed + 1000, 20, same=seed)
        row = agreement.compare(one, other, tolerance=0.05, resamples=200).rows[-1]
        held += row.low <= 0 <= row.high
    assert 86 <= held <= 100


def test_other_depths_and_nothing_drafted_are_refused():
    with pytest.raises(KitError, match=r"different depths: \[2, 3\]"):
        agreement.compare([from_steps([1], 2)], [from_steps([1], 3)], tolerance=0.01)
    with pytest.raises(KitError, match="served counts hold no draft"):
        agreement.compare([from_steps([1], 2)], [from_steps([], 2)], tolerance=0.01)


def test_the_tolerance_is_strict_only_where_nothing_but_the_draft_can_differ():
    assert agreement.tolerance("float32", (24, 24)) == 0.01
    assert agreement.tolerance("float32", (23, 24)) == agreement.tolerance("bfloat16", (24, 24)) == 0.05


# ---- What it is made of


def test_tokens_past_the_end_are_left_out():
    # 1 from the prompt, then 4 + 4 tokens: nine where the answer has seven: the target's last token and one of the draft's.
    assert agreement.trimmed([3, 3], 7, 3) == from_steps([3, 2], 3) and agreement.trimmed([3, 3], 8, 3) == from_steps([3, 3], 3)
    assert agreement.trimmed([3, 3], 9, 3) == from_steps([3, 3], 3)
    assert agreement.trimmed([0], 2, 3) == from_steps([0], 3) and agreement.trimmed([], 1, 3) == from_steps([], 3)


def test_the_way_from_a_trainers_figure_to_the_served_one(prediction, tiny):
    steps = [[step.accepted for step in mine] for mine in prediction.steps]
    lengths = [end - start for _, ((start, end),) in tiny.answers()]
    told = {"steps": steps, "new_tokens": lengths, "equal": [True] * 5 + [False], "start_tokens": 8, "limit": 30,
            "prompt_tokens": [start for _, ((start, _),) in tiny.answers()]}  # fmt: skip
    lines = residue.decompose(prediction, prediction.records, **told)
    causes = {cause.name: cause for cause in lines}
    assert [line.cause for line in lines] == [*sorted((line.cause for line in lines[:-1]), key=residue.CAUSES.index), ""]
    assert {line.cause for line in lines[:-1]} == set(residue.CAUSES), "each is switched off, or said why not"
    assert causes["replay: the prediction"].length == causes["served: vLLM's counters"].length == prediction.length
    assert causes["mean over answers"].length == prediction.everywhere.length
    assert causes["served, cut at the answers' ends"].length == pytest.approx(prediction.length)
    for early, late in (("served, first 8 tokens of answers", "served, after 8 tokens"),
                        ("served, contexts within 30 tokens", "served, contexts past 30 tokens")):  # fmt: skip
        one, other = causes[early], causes[late]
        assert one.drafts + other.drafts == causes["served: vLLM's counters"].drafts and one.drafts and other.drafts
    assert causes["replay, first 8 tokens of answers"].length == causes["served, first 8 tokens of answers"].length
    assert causes["served, prompts with the recorded answer"].length == total(prediction.records[:5]).length
    assert all(line.low <= line.length <= line.high and line.drafts for line in lines if line.length is not None)
    # The prompts are not the target's words: whoever counts them has another figure.
    assert causes["mean over answers and prompts, recorded tokens as the truth"].length < causes["mean over answers"].length
    unknown = {line.cause: line.what for line in residue.decompose(prediction, prediction.records) if line.length is None}
    assert set(unknown) == {"past the end", "positions near the start", "sequence limit", *residue.EXPERIMENTS}
    assert "no comparison raised a doubt" in unknown["norm flags"] and "does not tell" in unknown["past the end"]
    short = residue.decompose(prediction, prediction.records, **{**told, "limit": 1000})
    assert any("nothing to switch off" in line.what for line in short if line.cause == "sequence limit")


def test_where_two_walks_part(prediction):
    steps = next(steps for steps in prediction.steps if len(steps) > 4)
    served = [step.accepted for step in steps]
    assert agreement.first_difference(steps, served) is None
    served[2] = (served[2] + 1) % 4
    assert agreement.first_difference(steps, served) == (2, steps[2].accepted, served[2])
    served = [step.accepted for step in steps][:-1] + [3]
    assert agreement.first_difference(steps, served) is None, "the last draft may be kept past the answer's end"


def test_what_was_not_checked_is_said():
    lines = agreement.unchecked(told=False, within=True, again=False, longest=1234, temperature=0.7)
    assert len(lines) == 5 and "1,234 tokens" in lines[1] and "0.7" in lines[0]
    assert len(agreement.unchecked(told=True, within=False, again=True, longest=9, temperature=1.0)) == 2
    wide = agreement.compare(some_records(0), some_records(2, same=0), tolerance=0.01, resamples=200)
    unseen = max(-wide.rows[-1].low, wide.rows[-1].high)
    lines = agreement.unchecked(told=True, within=False, again=True, longest=9, temperature=1.0, agreed=wide)
    assert len(lines) == 3 and f"by {unseen:.2f} without being told from noise" in lines[2] and "tolerance is 0.01" in lines[2]
    exact = agreement.compare(some_records(0), some_records(0), tolerance=0.01, resamples=200)
    assert len(agreement.unchecked(told=True, within=True, again=True, longest=9, temperature=1.0, agreed=exact)) == 3


def test_where_nothing_is_told_of_single_requests_that_is_what_is_said():
    assert agreement.walk_words((3, 4)).startswith("3 of 4 answers") and "does not tell" in agreement.walk_words((0, 0))
    asked = [Prompt(name, [1] * 9, [], place) for place, name in enumerate(["one", "two", "one"])]
    records = [from_steps([2, 1], 3), from_steps([0], 3), from_steps([3], 3)]
    each = Served([[1]] * 3, [], total(records), records)
    waves = Served([[1]] * 3, [], total(records), [total(records[:2]), records[2]])
    assert drawn_over(asked, each) == "3 prompts" and drawn_over(asked, waves) == "2 waves of 3 prompts, few and so rough"
    (one, two) = breakdown.source_rows(asked, each, resamples=100, seed=0)
    assert (one["source"], one["prompts"], one["drafts"], one["acceptance length"]) == ("one", 2, 3, 3.0)
    assert one["from"] <= 3.0 <= one["to"] and two["from"] is None and two["marginal 1"] == 0
    assert list(breakdown.source_rows(asked, waves, resamples=100, seed=0)[0]) == ["not measured"]


def test_what_no_prediction_can_see_is_left_out(prediction, tiny):
    steps = [[step.accepted for step in mine] for mine in prediction.steps]
    answers = [sample.input_ids[start:end].tolist() for sample, ((start, end),) in tiny.answers()]
    past = [[*mine[:-1], DEPTH] for mine in steps]  # every last draft is kept whole, past the end as it may be
    served = Served(answers, [], None, [from_steps(mine, DEPTH) for mine in past], past)
    assert total(served.records).length > prediction.length and agreement.inside(served, DEPTH) == prediction.records
    assert agreement.same_walks(prediction.steps, served.steps) == (len(steps), len(steps))
    untold = Served(answers, [], None, served.records)
    assert agreement.inside(untold, DEPTH) == served.records and agreement.same_walks(prediction.steps, []) == (0, 0)


def test_an_export_that_is_not_what_was_trained_is_told(prediction):
    trained = [[r.drafts, *r.accepted] for r in prediction.recorded]
    same = agreement.since_training(trained, prediction, [10] * len(trained), 10, dtype="float32")
    assert same.within and same.difference == 0 and same.tolerance == agreement.EXACT
    better = [[drafts, *[drafts] * DEPTH] for drafts, *_ in trained]
    lost = agreement.since_training(better, prediction, [10] * len(trained), 10, dtype="bfloat16")
    assert not lost.within and lost.difference < -agreement.CLOSE
    # Answers that the prediction cuts short are no pair; nor are drafts of another length.
    lengths = [11] + [10] * (len(trained) - 1)
    spoilt = [better[0], *trained[1:]]
    assert agreement.since_training(spoilt, prediction, lengths, 10, dtype="float32").difference == 0
    assert agreement.since_training([row[:-1] for row in trained], prediction, lengths, 10, dtype="float32") is None
    assert agreement.since_training(trained, prediction, [11] * len(trained), 10, dtype="float32") is None


# ---- Reasons to look for a fault


def doubts_of(tiny, prediction, answers=None, **more):
    agreed = agreement.compare(prediction.records, prediction.records, tolerance=agreement.EXACT, resamples=200)
    return doubts.look(agreed, agreed, prediction, answers or tiny.answers(), resamples=200, **more)


def test_a_sound_draft_raises_no_doubt_and_what_cannot_be_compared_is_said(tiny, prediction):
    taught = doubts.trainers({"history": tiny.fitted.history, "best_epoch": tiny.fitted.best_epoch})
    found = doubts_of(tiny, prediction, taught=taught)
    assert len(found) == 5 and doubts.raised(found) == [] and all(one.found is not None for one in found)
    assert found[2].expected == pytest.approx(1 + sum(taught)) and abs(found[2].expected - found[2].found) < found[2].allowed
    short = doubts_of(tiny, prediction, taught=taught[:2])
    assert short[2].found is None and "fewer draft tokens were trained" in short[2].seen
    more = doubts_of(tiny, prediction, taught=taught, held_out=3 * len(prediction.records))[2]
    assert more.found is None and f"of the {3 * len(prediction.records)} turns held out were predicted" in more.seen
    cut = [(s, [(start, end - 9) for start, end in turns]) for s, turns in tiny.answers()]
    assert "answers are cut to acceptance.max_new_tokens" in doubts_of(tiny, prediction, cut, taught=taught)[2].seen
    agreed = agreement.compare(prediction.records, prediction.records, tolerance=agreement.EXACT, resamples=200)
    assert "not compared" in doubts.look(agreed, None, prediction, tiny.answers(), resamples=200)[1].seen


def test_each_doubt_is_raised_by_its_own_fault(tiny, prediction):
    assert "chance may make" in doubts.raised(doubts_of(tiny, prediction, taught=[1.0, 1.0, 1.0]))[0]
    moved = [(StatesSample(s.input_ids, s.loss_mask.roll(-1), s.states), turns) for s, turns in tiny.answers(3)]
    assert doubts.raised(doubts_of(tiny, prediction, moved))[0].startswith("6 of 180 mask values, in 3 samples, are not")
    cut = [(s, [(start, end - 9)]) for s, ((start, end),) in tiny.answers(3)]
    assert not doubts.masks(cut).raised, "an answer that is cut to what is served tells nothing of what comes after"
    poor = replace(prediction, covered=(60, 100))
    assert "60.0% of 100 tokens are inside; 100.0% with 256 of their own" in doubts.raised(doubts_of(tiny, poor))[0]
    # Words that training hardly had are nobody's fault: no vocabulary chosen from it would hold them.
    elsewhere = torch.arange(512).remainder(2)  # training said every other token of all there are
    assert not doubts.raised(doubts_of(tiny, poor, frequencies=elsewhere))


# ---- Planted faults: of states and masks; those of config, weights and teaching are served in test_planted


def investigate(tiny, folder, answers, states):
    rope = suspects.rope_of(tiny.target)
    return suspects.investigate(folder, answers, **tiny.known, depth=DEPTH, dtype=torch.float32, rope=rope, states=states)


def test_states_that_lie_beside_their_tokens_are_found(tiny, prediction):
    def beside(ids, layers):
        *auxiliary, last = tiny.states(ids, layers)
        return [state.roll(1, dims=0) for state in auxiliary] + [last]

    served, found = investigate(tiny, tiny.draft, tiny.answers(4), beside)
    assert served.length < total(prediction.records[:4]).length - 0.1
    assert found[0].name == "tokens and states misaligned" and "after" in found[0].seen


def test_a_shifted_mask_is_found_before_anything_else(tiny):
    answers = [(StatesSample(s.input_ids, s.loss_mask.roll(1), s.states), turns) for s, turns in tiny.answers(3)]
    _, found = investigate(tiny, tiny.draft, answers, None)
    assert found[0].name == "loss mask shifted" and found[0].named and "in 3 samples" in found[0].seen
    assert "not checked: the target's states" in next(one.seen for one in found if one.name == "layers shifted")


def test_a_sound_draft_raises_no_suspicion(tiny):
    served, found = investigate(tiny, tiny.draft, tiny.answers(4), suspects.target_states(tiny.target))
    assert served.length > 2 and not [one.name for one in found if one.named and one.gain > 0.1]
    assert {"layers shifted", "RoPE", "off-policy answers"} - {one.name for one in found} <= {"RoPE"}


def test_the_kits_own_forward_gives_the_states_that_were_recorded(tiny):
    states = suspects.target_states(tiny.target)
    sample = tiny.answers(1)[0][0]
    for mine, other in zip(states(sample.input_ids.tolist(), tinydraft.LAYERS), sample.states, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4)


# ---- Taken apart


def test_every_step_is_in_one_cell_of_source_and_context():
    asked = [Prompt("one", [1] * 60, [], 0), Prompt("two", [1] * 200, [], 1), Prompt("one", [1] * 62, [], 2)]
    steps = [[3, 3, 0], [1, 0], [0, 0]]
    edges = breakdown.context_edges(asked, 20)
    assert edges == [0, 64, 128] and breakdown.bucket(64, edges) == "64 to 127" and breakdown.bucket(500, edges) == "128 and more"
    found = breakdown.cells(asked, steps, edges, depth=3, resamples=100, seed=0)
    assert [(c.source, c.context, c.prompts, c.counts.drafts) for c in found] == [
        ("one", "0 to 63", 2, 2), ("one", "64 to 127", 2, 3), ("two", "128 and more", 1, 2)]  # fmt: skip
    assert total([c.counts for c in found]) == total([from_steps(mine, 3) for mine in steps])
    assert found[2].low is None and found[0].low <= found[0].counts.length <= found[0].high
    with pytest.raises(KitError, match="tells? of single requests"):
        breakdown.cells(asked, steps[:1], edges, depth=3, resamples=100, seed=0)


def test_answers_that_circle_are_flagged():
    assert breakdown.distinct([1, 2, 1, 2, 1], 2) == 0.5 and breakdown.distinct([1]) == 1.0
    prose, loop, short = list(range(60)), [1, 2, 3] * 20, [1] * 10
    assert breakdown.degenerate([prose, loop, short]) == [1]


def test_the_hardest_prompts_come_first():
    records = [from_steps([2] * 10, 3), from_steps([0] * 10, 3), from_steps([0], 3), from_steps([1] * 10, 3)]
    assert breakdown.worst(records, 2) == [1, 3] and breakdown.worst(records, 1, least_drafts=1) == [1]


def test_an_answer_is_told_token_by_token(tiny, prediction):
    for (sample, (turn,)), steps in zip(tiny.answers(), prediction.steps, strict=True):
        ids = sample.input_ids.tolist()
        spans = breakdown.told(ids, turn, steps)
        assert [token for token, kind in spans if kind != "rejected"] == ids[turn[0] : turn[1]]
        assert sum(kind == "kept" for _, kind in spans) == sum(step.accepted for step in steps)
        for place, (token, kind) in enumerate(spans[:-1]):
            if kind == "rejected":
                assert spans[place + 1][1] == "target" and spans[place + 1][0] != token


# ---- Figures


def test_figures_say_their_numbers(prediction, capsys):
    found = agreement.compare(some_records(0), some_records(1, same=0), tolerance=0.05, resamples=200)
    plots_acceptance.differences(found.rows, found.tolerance)
    assert f"length {found.difference:+.3f}" in capsys.readouterr().out
    asked = [Prompt("one", [1] * 60, [], 0), Prompt("two", [1] * 200, [], 1)]
    plots_acceptance.by_source_and_context(breakdown.cells(asked, [[3, 3], [1]], [0, 64, 128], depth=3, resamples=100, seed=0))
    said = capsys.readouterr().out
    assert "one at 0 to 63 tokens 4.00 of 1 drafts" in said and "two at 128 and more tokens 2.00 of 1 drafts" in said
    asked = [Prompt("one", [1] * 9, [], n) for n in range(3)]
    many = breakdown.cells(asked, [[3, 1], [1], [0]], [0], depth=3, resamples=99, seed=0)
    plots_acceptance.by_source_and_context(many)
    assert "tokens 2.25 (1.00 to 3.00) of 4 drafts" in capsys.readouterr().out
    (row,) = breakdown.cell_rows(many)
    assert (row["drafts"], row["marginal 1"], row["marginal 3"]) == (4, 0.75, 0.25) and row["from"] < row["acceptance length"]
    plots_acceptance.by_source_and_context([])
    assert "was not measured" in capsys.readouterr().out


def test_text_marks_whose_each_token_is(capsys, monkeypatch):
    shown = []
    monkeypatch.setattr(plots_acceptance, "display", shown.append)
    words = make_tiny_tokenizer()
    pieces = [(words.decode([token]), kind) for token, kind in ((70, "target"), (71, "kept"), (72, "rejected"), (73, "target"))]
    plots_acceptance.draft_text([*pieces, ("<b>", "target")], "An answer")
    (page,) = shown
    assert page.data.count("<mark>") == 1 and page.data.count("<del>") == 1 and "&lt;b&gt;" in page.data
    assert "1 of 4 tokens came from the draft (25.0" in page.data
