"""Planted faults, served for real: one draft a fault, all in real vLLM, and the notebook's own comparisons name the fault first.

Each is served on prompts that its target answers alike, so that nothing but the draft differs. Three are mistakes of teaching;
the others are of config or weights. vLLM and the estimate agree on nearly all of them, for both believe the directory: what
tells is the estimate of what was meant.
"""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import planted
import pytest
import tinydraft
import torch
from conftest import REPOSITORY

from eagle3kit import agreement, doubts, predict, residue, suspects
from eagle3kit.acceptance import Acceptance, from_steps, total
from eagle3kit.served import Served

pytestmark = pytest.mark.slow
DEPTH = tinydraft.DEPTH
TAUGHT = {
    "final norm missing in training": {"final_norm": False},
    "loss mask shifted": {"late": 4},
    "vocabulary chosen from other data": {"mapping": planted.other_mapping(256, 1024)},
}
FIRST = {"vocabulary chosen from other data": "vocabulary from other data"}  # what each is called as a suspect, else by its name


@dataclass
class Case:
    """One draft: its directory, how it was trained (None: as the sound one), held-out samples, and what vLLM made of it."""

    folder: Path
    fitted: object
    samples: list
    served: Served


@pytest.fixture(scope="module")
def bed(tmp_path_factory):
    """The target with its sound draft, and every faulty one, served by one process of vLLM."""
    folder = tmp_path_factory.mktemp("planted")
    # Ids from 512 on are never said: with a d2t of target ids, vLLM would look for rows beyond a smaller vocabulary, and stop.
    sound = tinydraft.make(folder / "sound", hidden=128, vocab=1024, said=512, count=10)
    made = {"sound": (sound.draft, sound.fitted, sound.answers())}
    for name, change in planted.FAULTS.items():
        made[name] = (planted.changed(sound, folder / name.replace(" ", "-"), **change), sound.fitted, sound.answers())
    for name, how in TAUGHT.items():
        draft, fitted, store = planted.taught(sound, folder / name.replace(" ", "-"), **how)
        turns = [turn for _, turn in sound.answers()]  # the answers stay where they are, wherever the masks lie
        made[name] = (draft, fitted, [(store.read(n), turn) for n, turn in enumerate(turns)])
    spans = [one.turns[0] for one in sound.samples]
    task = folder / "task.json"
    task.write_text(json.dumps({
        "target": str(sound.target), "depth": DEPTH, "drafts": {name: str(draft) for name, (draft, *_) in made.items()},
        "prompts": [one.input_ids[:start] for one, (start, _) in zip(sound.samples, spans, strict=True)],
        "new_tokens": [end - start for start, end in spans],
    }))  # fmt: skip
    command = [sys.executable, str(REPOSITORY / "tests" / "serve_drafts.py"), str(task)]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    cases = {}
    for name, told in json.loads(task.with_suffix(".served").read_text()).items():
        counted = Acceptance(drafts=told["drafts"], accepted=tuple(told["accepted"]))
        served = Served(told["answers"], [], counted, [from_steps(steps, DEPTH) for steps in told["steps"]], told["steps"])
        assert total(served.records) == counted, "what vLLM counts is what it tells of its requests"
        cases[name] = Case(*made[name], served)
    return sound, cases


def estimate(sound, case: Case) -> predict.Prediction:
    return predict.predict(predict.load_draft(case.folder, torch.float32), case.samples, **sound.known, depth=DEPTH)


def look(sound, case: Case):
    """(prediction, agreement, doubts, suspects): what the notebook does, in its order."""
    prediction = estimate(sound, case)
    agreed = agreement.compare(prediction.records, agreement.inside(case.served, DEPTH), tolerance=agreement.EXACT, resamples=500)
    lengths = [end - start for _, ((start, end),) in case.samples]
    trained = [[r.drafts, *r.accepted] for r in case.fitted.records]
    history = {"history": case.fitted.history, "best_epoch": case.fitted.best_epoch}
    exported = agreement.since_training(trained, prediction, lengths, max(lengths), dtype="float32")
    seen = doubts.look(agreed, exported, prediction, case.samples, taught=doubts.trainers(history), frequencies=sound.frequencies,
                       resamples=500)
    found = []
    if doubts.raised(seen):
        how = {"rope": suspects.rope_of(sound.target), "states": suspects.target_states(sound.target)}
        _, found = suspects.investigate(case.folder, case.samples, **sound.known, depth=DEPTH, dtype=torch.float32, **how,
                                        frequencies=sound.frequencies)  # fmt: skip
    return prediction, agreed, seen, found


def test_a_sound_draft_is_served_as_predicted_step_by_step_and_raises_no_doubt(bed):
    sound, cases = bed
    prediction, agreed, seen, found = look(sound, cases["sound"])
    assert agreed.within and agreed.difference == 0 and prediction.length > 3
    assert agreement.same_walks(prediction.steps, cases["sound"].served.steps) == (10, 10)
    assert doubts.raised(seen) == [] and found == [] and all(doubt.found is not None for doubt in seen)


@pytest.mark.parametrize("name", [*planted.FAULTS, *TAUGHT])
def test_a_planted_fault_lowers_what_is_served_and_is_the_first_suspect(bed, name):
    sound, cases = bed
    case, meant = cases[name], estimate(sound, cases["sound"])
    assert case.served.answers == cases["sound"].served.answers, "a draft changes no answer, however bad it is"
    # Against what was predicted of the draft as it was meant: prompt by prompt, and by more than chance.
    lost = agreement.compare(meant.records, agreement.inside(case.served, DEPTH), tolerance=agreement.EXACT, resamples=500)
    assert lost.difference < -0.1 and lost.rows[-1].high < 0 and not lost.within, lost.words
    prediction, agreed, seen, found = look(sound, case)
    assert doubts.raised(seen), [doubt.seen for doubt in seen]
    assert found[0].name == FIRST.get(name, name) and found[0].named, [(one.name, one.gain, one.named) for one in found]
    if name in planted.FAULTS:
        assert found[0].length == pytest.approx(meant.length, abs=0.01), "undone, the draft is as it was meant"
    assert found[0].confirm and len({one.name for one in found}) == len(found)
    lines = residue.decompose(prediction, case.served.records, steps=case.served.steps, equal=[True] * 10, suspects=found,
                              new_tokens=[len(answer) for answer in case.served.answers])  # fmt: skip
    assert {line.cause for line in lines} == {*residue.CAUSES, ""} and lines[-1].length == case.served.counted.length
