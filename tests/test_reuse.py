"""What another run made is taken by what it was made from, and by nothing else."""

import json
import os
import shutil
from dataclasses import replace

import pytest
import torch

from eagle3kit import hidden_states, reuse
from eagle3kit.conversations import make_sample
from eagle3kit.regenerate import AnswerFile
from eagle3kit.samples import StatesSample, Store

WIDTH, LAYERS, IDENTITY = 8, [1, 2], {"target": "tiny", "revision": None, "files": "f", "vllm": "1", "dtype": "float32"}
SETTINGS = {"target": "tiny", "max_new_tokens": 20}


class Shape:
    """What a manifest says of the target."""

    layers, hidden_size = 4, WIDTH


def rows(*numbers: int) -> list:
    return [make_sample(f"s{n}", "one", [n, n + 1, n + 2, 7], [(1, 3)]) for n in numbers]


def made(folder, samples, layout="pt", identity=IDENTITY, layers=LAYERS) -> tuple[Store, dict]:
    """A store of all `samples`, and its manifest."""
    store, wanted = begun(folder, samples, layout, identity, layers)
    for number, sample in enumerate(samples):
        states = [torch.full((4, WIDTH), float(sum(sample.input_ids) + k)) for k in range(len(layers) + 1)]
        store.write(number, StatesSample(torch.tensor(sample.input_ids), torch.tensor(sample.loss_mask), states))
    return store, wanted


def begun(folder, samples, layout="pt", identity=IDENTITY, layers=LAYERS) -> tuple[Store, dict]:
    store, wanted = Store(folder, layout), hidden_states.manifest(samples, identity, layers, Shape)
    store.begin([s.input_ids for s in samples], [s.loss_mask for s in samples], wanted)
    return store, wanted


@pytest.mark.parametrize("layout", ["pt", "safetensors"])
def test_states_are_linked_wherever_the_same_sample_lies(tmp_path, layout):
    small, _ = made(tmp_path / "ten" / "03_hidden_states" / "train", rows(1, 2, 3), layout)
    made(tmp_path / "held" / "03_hidden_states" / "held_out", rows(9), layout)
    wider = rows(9, 3, 5, 1)
    store, wanted = begun(tmp_path / "all" / "03_hidden_states" / "train", wider, layout)
    folders = sorted(tmp_path.glob("[th]e*/03_hidden_states/*"))
    taken = reuse.states(store, wanted, wider, hidden_states.missing(store, wanted, wider), folders)
    assert taken == {0: "held", 1: "ten", 3: "ten"} and reuse.by_run(taken) == {"held": 1, "ten": 2}
    assert hidden_states.missing(store, wanted, wider) == [2]
    assert os.path.samefile(store.path(1), small.path(2)) and torch.equal(store.read(1).states[0], small.read(2).states[0])
    # The small run may be thrown away, or write the sample anew: what was taken stays as it is.
    shutil.rmtree(small.folder)
    assert store.read(3).input_ids.tolist() == wider[3].input_ids


def test_where_links_are_impossible_it_is_copied(tmp_path, monkeypatch):
    small, _ = made(tmp_path / "a" / "03" / "train", rows(1))
    store, wanted = begun(tmp_path / "b" / "03" / "train", rows(1))

    def never(*_):
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", never)
    assert reuse.states(store, wanted, rows(1), [0], [small.folder]) == {0: "a"}
    assert store.path(0).read_bytes() == small.path(0).read_bytes() and not os.path.samefile(store.path(0), small.path(0))


def test_states_of_anything_else_are_not_taken(tmp_path):
    wider = rows(1, 2)
    store, wanted = begun(tmp_path / "me" / "03" / "train", wider)
    for name, changed in {"dtype": {"dtype": "bfloat16"}, "files": {"files": "g"}, "vllm": {"vllm": "2"}}.items():
        other, _ = made(tmp_path / name / "03" / "train", rows(1), identity=IDENTITY | changed)
        assert reuse.states(store, wanted, wider, [0, 1], [other.folder]) == {}, name
    for name, more in {"layers": {"layers": [1, 3]}, "layout": {"layout": "safetensors"}}.items():
        other, _ = made(tmp_path / name / "03" / "train", rows(1), **more)
        assert reuse.states(store, wanted, wider, [0, 1], [other.folder]) == {}, name
    masked = [replace(sample, turns=((2, 3),), loss_mask=[0, 0, 1, 0]) for sample in rows(1)]
    other, _ = made(tmp_path / "mask" / "03" / "train", masked)
    assert reuse.states(store, wanted, wider, [0, 1], [other.folder]) == {}, "other tokens are supervised"
    # Cut short, missing, of other tokens than its manifest says, no manifest at all: left alone, and nothing is left behind.
    other, _ = made(tmp_path / "torn" / "03" / "train", wider)
    other.path(0).write_bytes(other.path(0).read_bytes()[:-700])
    shutil.copy(made(tmp_path / "x", rows(5))[0].path(0), other.path(1))
    (tmp_path / "bare" / "03" / "train").mkdir(parents=True)
    folders = [other.folder, tmp_path / "bare" / "03" / "train", tmp_path / "gone"]
    assert reuse.states(store, wanted, wider, [0, 1], folders) == {}
    assert [path.name for path in store.folder.iterdir()] == ["manifest.json"]


def test_answers_of_another_run_are_copied_when_they_are_asked_for(tmp_path):
    (tmp_path / "ten" / "02").mkdir(parents=True)
    (tmp_path / "other" / "02").mkdir(parents=True)
    small = AnswerFile(tmp_path / "ten" / "02" / "answers.jsonl", SETTINGS)
    small.add([1, 2], [3, 4])
    small.add([5], [])
    AnswerFile(tmp_path / "other" / "02" / "answers.jsonl", SETTINGS | {"max_new_tokens": 9}).add([8], [8])
    with open(small.path, "ab") as file:
        file.write(b'{"key": "cut')
    found = reuse.Answers([small.path, tmp_path / "other" / "02" / "answers.jsonl"])
    mine = AnswerFile(tmp_path / "answers.jsonl", SETTINGS, found)
    assert mine.has([1, 2]) and mine.has([1, 2]) and mine.has([5]) and not mine.has([8]) and not mine.has([1])
    assert mine.answers == small.answers and dict(found.taken) == {"ten": 2}
    assert AnswerFile(mine.path, SETTINGS).answers == small.answers, "they are this run's own now"


@pytest.mark.parametrize("ids", ["7", [1, -2], [True], ["a"], [1.5]])
def test_an_answer_that_is_no_tokens_is_not_taken(tmp_path, ids):
    (tmp_path / "ten" / "02").mkdir(parents=True)
    mine = AnswerFile(tmp_path / "answers.jsonl", SETTINGS)
    path = tmp_path / "ten" / "02" / "answers.jsonl"
    path.write_text(json.dumps({"key": mine.key([1]), "token_ids": ids}) + "\n")
    found = reuse.Answers([path])
    assert not AnswerFile(mine.path, SETTINGS, found).has([1]) and not found.taken
