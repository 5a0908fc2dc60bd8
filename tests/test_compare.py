"""Runs side by side: a known difference is found, chance is not, and one run alone says so."""

import random

import pytest

from eagle3kit import compare, plots_acceptance
from eagle3kit.acceptance import from_steps, total


def result(seed: int, chance: float, *, prompts=range(40), depth: int = 3, **params) -> dict:
    """The result.json of a run that served `prompts`, each as hard as its number says."""
    dice, rows = random.Random(seed), []
    for prompt in prompts:
        mine, steps = min(0.95, chance + random.Random(prompt).uniform(-0.3, 0.3)), []
        for _ in range(25):
            accepted = 0
            while accepted < depth and dice.random() < mine:
                accepted += 1
            steps.append(accepted)
        record = from_steps(steps, depth)
        rows.append({"id": f"p{prompt}", "source": "one", "prompt_tokens": 9, "new_tokens": 40, "drafts": record.drafts,
                     "accepted": list(record.accepted)})  # fmt: skip
    whole = total([from_steps([], depth)]) if not rows else total(
        [compare.Acceptance(drafts=row["drafts"], accepted=tuple(row["accepted"])) for row in rows])
    numbers = {"accepted": list(whole.accepted), "drafts": whole.drafts, "acceptance_length": whole.length,
               "acceptance_length_low": whole.length - 0.1, "acceptance_length_high": whole.length + 0.1,
               "by_prompt": rows}  # fmt: skip
    return {"08_acceptance": {"numbers": numbers, "params": params, "provenance": {"machine": {"cores": 2, "gpus": []}}}}


def collected(**runs):
    found, left = compare.collect(runs)
    assert not left
    return found


def test_a_real_difference_is_found_and_its_interval_holds_it():
    runs = collected(small=result(1, 0.4), large=result(2, 0.6))
    (one,), left = compare.differences(runs, resamples=500)
    assert not left and one.exceeds and one.prompts == 40 and one.p < 0.01
    assert (one.first, one.second) == ("large", "small") and one.low <= one.difference <= one.high < 0
    assert one.difference == pytest.approx(one.values[1] - one.values[0]) and one.words.endswith("more than noise")
    assert "large" in compare.headline(runs, [one]) and "longer than small on 40 shared prompts" in compare.headline(runs, [one])


def test_the_same_counts_do_not_differ_at_all():
    runs = collected(a=result(1, 0.5), b=result(1, 0.5))
    (one,), _ = compare.differences(runs, resamples=200)
    assert (one.difference, one.low, one.high, one.p) == (0, 0, 0, 1) and not one.exceeds
    assert "no difference in acceptance length is more than noise" in compare.headline(runs, [one])


def test_chance_is_rarely_taken_for_a_difference_however_many_pairs():
    alarms = 0
    for seed in range(20):
        runs = collected(**{f"r{k}": result(100 * seed + k, 0.5, prompts=range(30)) for k in range(4)})
        found, _ = compare.differences(runs, resamples=300)
        assert len(found) == 6
        alarms += any(one.exceeds for one in found)
    assert alarms <= 4


def test_only_shared_prompts_count_and_too_few_are_said():
    runs = collected(a=result(1, 0.5), b=result(2, 0.5, prompts=range(20, 60)), c=result(3, 0.5, prompts=range(90, 99)))
    found, left = compare.differences(runs, resamples=200)
    assert [(one.first, one.second, one.prompts) for one in found] == [("a", "b", 20)]
    assert left["a and c"].startswith("0 prompts in common, at least 5") and len(left) == 2
    assert "no two of them" in compare.headline(runs, [])


def test_runs_of_other_draft_lengths_are_compared_in_length():
    (one,), _ = compare.differences(collected(k1=result(1, 0.7, depth=1), k5=result(2, 0.7, depth=5)), resamples=300)
    assert one.exceeds and one.difference > 0.5


def test_one_draft_with_one_to_seven_draft_tokens_stands_side_by_side():
    runs = {f"k{k}": result(k, 0.6, depth=k, **{"target.model": "tiny", "acceptance.draft_tokens": k}) for k in range(1, 8)}
    for k, one in enumerate(runs.values()):
        one["08_acceptance"]["numbers"] |= {"speedup": 1.2 - 0.05 * abs(k - 3), "speedup_interval": [1.0, 1.3]}
    runs["other"] = result(9, 0.6, depth=2, **{"target.model": "another", "acceptance.draft_tokens": 2})
    elsewhere = result(9, 0.6, depth=2, **{"target.model": "tiny", "acceptance.draft_tokens": 2})
    elsewhere["08_acceptance"]["provenance"]["machine"]["cores"] = 64
    rows = compare.sweep(collected(**runs, elsewhere=elsewhere))
    assert [(row["run"], row["draft tokens"]) for row in rows] == [(f"k{k}", k) for k in range(1, 8)]
    lengths = [row["acceptance length"] for row in rows]
    assert lengths[0] < lengths[2] < lengths[6] and [row["run"] for row in rows if row["fastest"]] == ["k4"]
    assert all(row["from"] < row["acceptance length"] < row["to"] and 0 < row["last position"] < 1 for row in rows)
    found, left = compare.differences(collected(**runs), resamples=100)
    assert len(found) == 28 and not left and any(one.exceeds for one in found)
    assert compare.sweep(collected(a=result(1, 0.5), b=result(2, 0.5))) == []


def test_one_run_alone_has_nothing_to_be_compared_with():
    runs = collected(only=result(1, 0.5, **{"target.model": "tiny", "dataset.samples": 10}))
    assert compare.differences(runs) == ([], {})
    told = compare.headline(runs, [])
    assert told.startswith("one run served its draft, only: acceptance length ") and "no other to compare it with yet" in told
    assert f"{runs[0].numbers['acceptance_length']:.3f} (" in told and "1,000 drafts)" in told
    (row,) = compare.overview(runs)
    assert (row["run"], row["target"], row["samples"], row["machine"]) == ("only", "tiny", 10, "2 CPU cores")
    assert compare.collect({}) == ([], {}) and compare.headline([], []) == "no run has served its draft yet"


def test_a_run_without_counts_by_prompt_is_shown_and_only_its_pairs_are_refused():
    silent = result(1, 0.5)
    silent["08_acceptance"]["numbers"] |= {"by_prompt": [], "prompts": 43, "drawn_over": "3 waves of 43 prompts"}
    runs = collected(silent=silent, told=result(2, 0.5), third=result(3, 0.5))
    found, left = compare.differences(runs, resamples=200)
    assert [(one.first, one.second) for one in found] == [("third", "told")]
    assert set(left) == {"silent and told", "silent and third"}
    assert all("silent has no counts by prompt" in why for why in left.values())
    first, *others = compare.overview(runs)
    assert (first["run"], first["prompts"], first["interval over"]) == ("silent", 43, "3 waves of 43 prompts")
    assert first["from"] < first["acceptance length"] < first["to"] and {row["interval over"] for row in others} == {"prompts"}
    assert compare.headline(runs[:1], []).startswith("one run served its draft, silent: acceptance length ")
    assert "1 without counts by prompt" in compare.headline(runs[:2], [])


def test_a_run_that_cannot_be_read_is_named_with_the_reason():
    old, broken = result(1, 0.5), result(2, 0.5)
    del old["08_acceptance"]["numbers"]["acceptance_length_low"]
    broken["08_acceptance"]["numbers"]["by_prompt"][3]["accepted"] = [9, 99, 9]
    found, left = compare.collect({"old": old, "broken": broken, "other": {"06_training": {}}, "good": result(3, 0.5)})
    assert [run.name for run in found] == ["good"] and set(left) == {"old", "broken"}
    assert "lacks acceptance_length_low" in left["old"] and "cannot be read" in left["broken"]


def test_the_figure_says_its_numbers(capsys):
    plots_acceptance.lengths(compare.overview(collected(a=result(1, 0.5), b=result(2, 0.5))))
    assert "Served acceptance length: a " in capsys.readouterr().out
    plots_acceptance.lengths([])
    assert "0 runs" in capsys.readouterr().out
