"""Rungs: whose results count, what they foretell, and how that stands beside what was measured."""

import json
from dataclasses import asdict

import pytest

from eagle3kit import rung_rows, rungs
from eagle3kit.params import Params

MACHINE = {"cores": 2, "gpus": []}
DATA, STATES, TRAINING, SERVED = "02_dataset", "03_hidden_states", "06_training", "08_acceptance"


def params(**dataset) -> Params:
    return Params(dataset={"in_flight": 4, **dataset}, hidden_states={"in_flight": 4}, training={"epochs": 2})


def ran(outputs, run, samples, *, length=100, start=5.0, per_token=0.01, taken=0, machine=MACHINE, read=None, **dataset):
    """A run that cost `start` seconds a stage, and `per_token` for each token it did itself; `taken` samples were another's."""
    values = params(samples=samples, **dataset).leaves()
    tokens, mine = samples * length, (samples - taken) * length
    work = {
        "00_machine": ({}, 0),
        DATA: ({"tokens": tokens, "train": samples * 9 // 10, "held_out": samples - samples * 9 // 10,
                "answers_written": samples - taken, "answers_kept": taken, "seconds_answering": mine * per_token,
                "answers_taken": {"small": taken} if taken else {},
                "tokens_per_sample": {"value": length, "low": 0.9 * length, "high": 1.2 * length},
                "sources": {"a": {"used": samples, "usable": 700}, "b": {"used": 0, "usable": 300}}}, mine),
        STATES: ({"tokens": mine, "written": samples - taken, "seconds_extracting": mine * per_token, "bytes": tokens * 10,
                  "taken": {"small": taken} if taken else {}}, mine),
        "05_formats": ({}, tokens),
        TRAINING: ({"tokens_per_second": 1 / per_token}, 2 * tokens * 0.9),
        SERVED: ({"prompts": min(values["acceptance.prompts"], max(1, samples // 10)), "acceptance_length": 1.5}, 0),
    }  # fmt: skip
    for stage, (numbers, done) in work.items():
        place = outputs / run / stage
        place.mkdir(parents=True)
        size = tokens * 10 if stage in (DATA, STATES) else 1000
        (place / "result.json").write_text(json.dumps({
            "run": run, "seconds": start + done * per_token, "numbers": numbers, "params": values,
            "fingerprint": {"params": {"dataset.samples": samples, **(read or {"seed": 0})}, "artefacts": {"./*": [1, size]}},
            "provenance": {"machine": machine}}))  # fmt: skip


def by_stage(found):
    return {one.stage: one for one in found}


def test_a_rung_is_a_run_that_differs_in_samples_alone(tmp_path):
    ran(tmp_path, "ten", 10)
    ran(tmp_path, "all", 1000)
    ran(tmp_path, "elsewhere", 100, machine={"cores": 64, "gpus": []})
    ran(tmp_path, "otherwise", 100, read={"target.dtype": "bfloat16"})
    (tmp_path / "broken" / DATA).mkdir(parents=True)
    found = rungs.collect(tmp_path, params(), MACHINE)
    assert [(rung.run, rung.samples, rung.usable) for rung in found] == [("ten", 10, 1000), ("all", 1000, 1000)]
    assert rungs.next_samples(found[0]) == [100, 1000] and rungs.next_samples(found[1]) == []
    # Only what a stage has read must be the same: another number of epochs leaves the states what they were.
    place = tmp_path / "ten" / TRAINING / "result.json"
    changed = json.loads(place.read_text())
    changed["fingerprint"]["params"]["training.epochs"] = 7
    place.write_text(json.dumps(changed))
    (ten, _) = rungs.collect(tmp_path, params(), MACHINE)
    assert TRAINING not in ten.results and STATES in ten.results


def test_what_grows_is_foretold_from_what_was_timed(tmp_path):
    ran(tmp_path, "ten", 10)
    found = by_stage(rungs.foretell(rungs.collect(tmp_path, params(), MACHINE), 100))
    # 9,000 tokens are new (the rung has 1,000): 5 s of start and 90 s, where the small one took 5 and 10.
    states = found[STATES].seconds
    assert states.value == pytest.approx(95) and states.low == pytest.approx(5 + 80) and states.high == pytest.approx(15 * 11)
    assert found[DATA].seconds.value == pytest.approx(95)
    assert found[TRAINING].seconds.value == pytest.approx(5 + 180)  # all of it: 9,000 of 10,000 tokens, twice
    assert (found["00_machine"].seconds.low, found["00_machine"].seconds.high) == (5, 5)
    # Nothing tells what of the inspection grows: between a start alone and all of it.
    inspected = found["05_formats"].seconds
    assert (inspected.low, inspected.high, inspected.value) == (
        pytest.approx(15), pytest.approx(15 * 12), pytest.approx((15 * 15 * 12) ** 0.5))  # fmt: skip
    assert found[STATES].disk.value == 100_000 and found[STATES].new_disk.value == 90_000
    assert found[TRAINING].disk.value == found[TRAINING].new_disk.value == 1000
    assert all(one.of == ("ten",) and one.samples == 100 for one in found.values())


def test_a_rung_that_filled_no_batch_gives_a_lower_bound_that_knows(tmp_path):
    ran(tmp_path, "two", 2)
    (two,) = rungs.collect(tmp_path, params(), MACHINE)
    low = by_stage(rungs.foretell([two], 20))[STATES].seconds.low
    # 2 of 4 requests at once: the next 18 samples (16 at their shortest) might take half as long each.
    assert low == pytest.approx(5 + 2 * (16 / 2) / 2)


def test_two_rungs_give_a_line_where_nothing_was_timed_by_itself(tmp_path):
    ran(tmp_path, "ten", 10)
    ran(tmp_path, "hundred", 100, taken=10)
    found = by_stage(rungs.foretell(rungs.collect(tmp_path, params(), MACHINE), 1000))
    inspected = found["05_formats"]
    assert inspected.seconds.value == pytest.approx(5 + 1000) and inspected.of == ("ten", "hundred")
    assert inspected.seconds.low == pytest.approx(105) and inspected.seconds.high == pytest.approx(105 * 12)
    # 90 samples were its own, 900 are ahead of the next.
    assert found[STATES].seconds.value == pytest.approx(5 + 900) and found[STATES].new_disk.value == 900_000
    # The number of prompts served has an end.
    assert found[SERVED].seconds.high == pytest.approx(5 * 48 / 10)


def test_a_run_that_took_everything_tells_no_pace(tmp_path):
    ran(tmp_path, "copy", 10, taken=10)
    found = by_stage(rungs.foretell(rungs.collect(tmp_path, params(), MACHINE), 100))
    assert found[STATES].seconds is None and found[DATA].seconds is None and found[TRAINING].seconds is not None
    assert rung_rows.words(list(found.values())).endswith("nothing is known of 02_dataset, 03_hidden_states")
    ran(tmp_path, "first", 8)
    found = by_stage(rungs.foretell(rungs.collect(tmp_path, params(), MACHINE), 100))
    assert found[STATES].seconds.value == pytest.approx(5 + 90), "the pace of the one, less what the other has"


def test_the_forecast_stands_beside_the_measurement(tmp_path):
    ran(tmp_path, "ten", 10)
    told = [asdict(one) for one in rungs.foretell(rungs.collect(tmp_path, params(), MACHINE), 100)]
    told = json.loads(json.dumps(told))  # as result.json has it
    ran(tmp_path, "hundred", 100, taken=10)
    ran(tmp_path, "slow", 101, per_token=1.0, start=500.0)
    _, hundred, slow = rungs.collect(tmp_path, params(), MACHINE)
    held = {row["stage"]: row for row in rung_rows.against(told, hundred)}
    assert held[STATES]["within"] and held[STATES]["off, %"] == pytest.approx(0)
    assert held[STATES]["foretold, MiB"] == held[STATES]["measured, MiB"] == 100_000 / 2**20
    assert held["00_machine"]["within"] is None and not any(row["within"] for row in rung_rows.against(told, slow))
    assert rung_rows.against([], hundred) == []


def test_rows_and_words_say_what_they_are(tmp_path):
    assert rung_rows.words([]).startswith("no smaller rung") and rung_rows.rows([]) == [] and rung_rows.whole([]) is None
    ran(tmp_path, "ten", 10)
    ran(tmp_path, "hundred", 100, taken=10)
    both = rungs.collect(tmp_path, params(), MACHINE)
    found = rungs.foretell(both, 1000)
    *stages, total = rung_rows.rows(found)
    assert total["stage"] == "all of these" and {row["kind"] for row in stages} == {"forecast"}
    assert total["minutes"] == pytest.approx(sum(row["minutes"] for row in stages))
    assert total["minutes, at least"] <= total["minutes"] <= total["minutes, at most"]
    assert rung_rows.words(found).startswith("forecast for 1,000 samples, from ten, hundred: ")
    ladder = rung_rows.ladder(both)
    assert [(row["run"], row["answers taken over"], row["states taken over"], row["taken from"]) for row in ladder] == [
        ("ten", 0, 0, None), ("hundred", 10, 10, "small")]  # fmt: skip


def test_a_number_of_samples_on_the_command_line_names_a_folder(tmp_path):
    file = tmp_path / "p.yaml"
    file.write_text("run: here\ndataset: {samples: 400}\n")
    assert rungs.own_run(file, {"dataset.samples": "10"}) == "here-10"
    assert rungs.own_run(file, {"dataset.samples": "400"}) is None and rungs.own_run(file, {"seed": "1"}) is None
    assert rungs.own_run(file, {"dataset.samples": "10", "run": "mine"}) is None
