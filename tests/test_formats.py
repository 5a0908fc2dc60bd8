"""Verdicts: whole artefacts are usable, and each thing that is wrong is one line that names it."""

import json
from pathlib import Path

import pytest
import tinystates
import torch

from eagle3kit import formats, vocabulary
from eagle3kit.errors import KitError
from eagle3kit.samples import StatesSample, Store

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tinystates.lively_target(tmp_path_factory.mktemp("target") / "tiny")
    model = tinystates.load(folder)
    return folder, model, tinystates.own_answers(model, folder, 3, 16)


@pytest.fixture(params=["pt", "safetensors"])
def store(made, tmp_path, request) -> Store:
    folder, model, samples = made
    return tinystates.fill(Store(tmp_path / "store", request.param), model, folder, samples)


@pytest.fixture
def mapping(made, tmp_path) -> Path:
    counts = vocabulary.count_tokens([(row.input_ids, row.loss_mask) for row in made[2]], 512)
    folder = tmp_path / "mapping"
    vocabulary.write(folder, counts, *vocabulary.build(counts, 64, [0]))
    return folder


def change(store: Store, number: int, **parts) -> None:
    old = store.read(number)
    states = [state.clone() for state in parts.get("states", old.states)]
    store.write(number, StatesSample(parts.get("ids", old.input_ids), parts.get("mask", old.loss_mask), states))


def test_many_samples_are_looked_at_by_processes_with_the_same_verdict(store, monkeypatch):
    change(store, 1, states=[torch.zeros_like(state) for state in store.read(1).states])
    few = formats.verdict_samples("samples", store)
    monkeypatch.setattr(formats, "MANY", 2)
    monkeypatch.setattr(formats.cpu, "cores", lambda: [0, 1])
    many = formats.verdict_samples("samples", store)
    assert many == few and few.word == "BROKEN" and torch.equal(many.counted, few.counted)


def test_whole_samples_are_usable(store, made):
    found = formats.verdict_samples("samples", store)
    tokens = sum(len(row.input_ids) for row in made[2])
    assert found.word == "USABLE" and found.faults == [] and found.files == 3
    assert found.bytes == sum(store.path(number).stat().st_size for number in range(3))
    assert found.summary == f"{tokens:,} tokens, 45 supervised; layers [2, 4, 5] and the last; float32"
    formats.require_usable([found])


def test_faults_of_samples_are_named_one_by_one(store):
    states = store.read(0).states
    nan = [state.clone() for state in states]
    nan[1][2, 3] = float("nan")
    for parts, words in (
        ({"states": states[:3]}, "key hidden_states: 3 states, the manifest says 4"),
        ({"states": [state[:, :32] for state in states]}, "expected width 64"),
        ({"states": nan}, "key hidden_states: NaN or infinite values"),
    ):
        change(store, 0, **parts)
        found = formats.verdict_samples("samples", store)
        (fault,) = found.faults
        assert found.word == "BROKEN" and words in fault, fault
        assert fault.startswith(f"{store.path(0).name}, ") and fault.endswith("run the stage 03_hidden_states again")
        change(store, 0, states=states)
    store.path(1).write_bytes(store.path(1).read_bytes()[:-200])
    store.path(2).unlink()
    found = formats.verdict_samples("samples", store)
    assert len(found.faults) == 2 and "cannot be read" in found.faults[0] and "does not exist" in found.faults[1]
    assert found.files == 3 and found.bytes == store.path(0).stat().st_size


@pytest.mark.parametrize("store", ["pt"], indirect=True)
def test_faults_of_tokens_and_masks(store):
    old = store.read(0)
    for parts, words in (
        ({"ids": old.input_ids.flip(0)}, "key input_ids: other tokens than the manifest says"),
        ({"mask": old.loss_mask * 2}, "key loss_mask: values other than 0 and 1"),
        ({"mask": old.loss_mask * 0}, "key loss_mask: nothing is supervised"),
    ):
        change(store, 0, **parts)
        (fault,) = formats.verdict_samples("samples", store).faults
        assert words in fault
        change(store, 0, ids=old.input_ids, mask=old.loss_mask)


def test_a_whole_mapping_is_usable(store, mapping):
    found = formats.verdict_mapping("mapping", mapping, store)
    assert found.word == "USABLE" and found.files == 3
    assert found.bytes == sum(path.stat().st_size for path in mapping.iterdir())
    assert found.summary.startswith("64 of 512 tokens, offsets up to ")


def test_tokens_are_counted_while_the_samples_are_read(store, mapping):
    counted = formats.verdict_samples("samples", store).counted
    assert int(counted.sum()) == 45
    assert formats.verdict_mapping("mapping", mapping, store, counted) == formats.verdict_mapping("mapping", mapping, store)
    counted[0] += 1
    (fault,) = formats.verdict_mapping("mapping", mapping, store, counted).faults
    assert fault.startswith("token_freq.pt: not the counts of the training samples")
    (fault,) = formats.verdict_mapping("mapping", mapping, store, torch.ones(600, dtype=torch.int64)).faults  # 512 are known
    assert fault.startswith("token_freq.pt: not the counts")


def test_faults_of_a_mapping(store, mapping, made):
    def fault() -> str:
        found = formats.verdict_mapping("mapping", mapping, store)
        (line,) = found.faults
        assert found.word == "BROKEN"
        return line

    whole = {path.name: path.read_bytes() for path in mapping.iterdir()}
    counts, d2t = (torch.load(mapping / f"{name}.pt", weights_only=True) for name in ("token_freq", "d2t"))
    for name, tensor, words in (
        ("d2t", d2t + torch.arange(64), "d2t holds target ids"),
        ("token_freq", counts + 1, "token_freq.pt: not the counts of the training samples"),
        ("token_freq", counts[:-1].clone(), "token_freq.pt: [511] beside t2d [512]"),
        ("token_freq", {"counts": counts}, "token_freq.pt must hold one tensor"),
    ):
        torch.save(tensor, mapping / f"{name}.pt")
        assert words in fault()
        (mapping / f"{name}.pt").write_bytes(whole[f"{name}.pt"])
    for name in whole:
        (mapping / name).unlink()
        assert f"{name} does not exist" in fault()
        (mapping / name).write_bytes(whole[name])
    assert formats.verdict_mapping("mapping", mapping, store).faults == []


def test_broken_artefacts_stop_the_run_with_the_first_faults():
    many = formats.Verdict("samples", 20, 1, "", [f"data_{number}.pt, key x: bad" for number in range(14)])
    with pytest.raises(KitError) as caught:
        formats.require_usable([formats.Verdict("mapping", 3, 1, ""), many])
    said = str(caught.value).splitlines()
    assert said[0].startswith("14 faults, so training would not start") and said[1:] == many.faults[:10]


def test_a_store_without_its_manifest_has_no_verdict(store):
    (store.folder / "manifest.json").write_text(json.dumps({}))
    (store.folder / "manifest.json").unlink()
    with pytest.raises(KitError, match="run the stage 03_hidden_states"):
        formats.verdict_samples("samples", store)
