"""Inspecting files: what is whole is usable, each planted fault is one line that names file, key, expected and found, and the
files that speculators and vLLM themselves write are known."""

import ast
import itertools
import json
import math
import os
from pathlib import Path

import numpy
import pytest
import tinystates
import torch
from safetensors.torch import load_file, save_file

from eagle3kit import draft, formats, inspection, mapping, vocabulary
from eagle3kit.__main__ import main
from eagle3kit.errors import KitError
from eagle3kit.params import Params
from eagle3kit.samples import StatesSample, Store

torch.set_num_threads(1)
H = 16


def some_sample(seed: int, length: int = 12, states: int = 4) -> StatesSample:
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randn(length, H, generator=generator) for _ in range(states)]
    return StatesSample(torch.randint(500, (length,), generator=generator), (torch.arange(length) > 4).long(), rows)


def fill(store: Store, count: int = 5) -> list[StatesSample]:
    from eagle3kit.hidden_states import token_hash

    rows = [some_sample(seed, 12 + seed) for seed in range(count)]
    tokens = [row.input_ids.tolist() for row in rows]
    store.begin(tokens, [row.loss_mask.tolist() for row in rows],
                {"layers": [2, 4, 5], "hidden_size": H, "lengths": [len(ids) for ids in tokens],
                 "tokens": [token_hash(ids) for ids in tokens]})  # fmt: skip
    for number, row in enumerate(rows):
        store.write(number, row)
    return rows


@pytest.fixture(params=["pt", "pt-v0", "safetensors"])
def store(tmp_path, request) -> Store:
    made = Store(tmp_path / "samples", request.param)
    fill(made)
    return made


def only_fault(path, **how) -> inspection.Fault:
    report = inspection.inspect([path], **how)
    (fault,) = report.faults
    assert report.code == 1 and "BROKEN" in report.verdicts.values()
    assert fault.line.startswith(fault.file) and fault.expected in fault.line and fault.found in fault.line
    return fault


def names(fault: inspection.Fault, file: str, key: str, found: str, expected: str) -> None:
    assert fault.file.endswith(file) and fault.key == key and found in fault.found and expected in fault.expected, fault


# ---- Samples


def test_whole_samples_are_usable_in_every_layout(store):
    report = inspection.inspect([store.folder])
    assert report.faults == [] and report.code == 0
    row = next(row for row in report.rows if row.kind in ("sample", "states"))
    lengths = [12, 13, 14, 15, 16]
    assert (row.files, row.tokens, row.shortest, row.longest) == (5, sum(lengths), 12, 16)
    assert row.bytes == sum(store.path(number).stat().st_size for number in range(5))
    told = {"pt": ("sample", "data_N.pt v1", "hidden_states 4 × float32 [T, 16]"),
            "pt-v0": ("sample", "data_N.pt v0", "hidden_state float32 [T, 48], target float32 [T, 16]"),
            "safetensors": ("states", "hs_N.safetensors", "hidden_states float32 [T, 4, 16]")}[store.layout]  # fmt: skip
    assert row.kind == told[0] and row.contract.startswith(told[1]) and told[2] in row.keys
    assert report.verdicts[told[0]] == "USABLE"
    assert any("5 of 5 samples were looked at" in note for note in report.notes)
    one = inspection.inspect([store.path(3)])
    assert one.code == 0 and one.rows[0].files == 1 and one.rows[0].tokens == 15
    several = inspection.inspect([str(store.path(0)).replace("_0.", "_[13]."), store.path(3)])
    assert several.code == 0 and several.rows[0].files == 2


def test_a_sample_that_is_missing(store):
    store.path(2).unlink()
    store.path(4).unlink()
    fault = only_fault(store.folder)
    names(fault, store.path(2).name, "", "it is missing, and so are 1 more (numbers 4)", "samples 0 to 4")
    assert inspection.inspect([store.path(1)]).code == 0  # nobody asked for the others


def test_a_sample_cut_short_and_one_of_another_kind(store):
    store.path(1).write_bytes(store.path(1).read_bytes()[:-100])
    report = inspection.inspect([store.folder])
    (fault,) = report.faults  # it is not missing as well
    assert fault.file == str(store.path(1)) and "cannot be" in fault.line and report.code == 1
    assert "BROKEN" in report.verdicts.values() and "unreadable" not in report.verdicts


@pytest.mark.parametrize("store", ["pt"], indirect=True)
@pytest.mark.parametrize(
    "change, key, found, expected",
    [
        ({"loss_mask": None}, "loss_mask", "missing (the file has input_ids, hidden_states)", "a tensor"),
        ({"input_ids": [1] * 13}, "input_ids", "a list", "a tensor"),
        ({"input_ids": torch.ones(13)}, "input_ids", "float32", "int64 or int32"),
        ({"loss_mask": torch.ones(12, dtype=torch.int64)}, "loss_mask", "[12]", "[13], one for each of the input_ids"),
        ({"hidden_states": torch.ones(4, 13, H)}, "hidden_states", "one tensor [4, 13, 16]", "a list of tensors [T, H]"),
        ({"hidden_states": None}, "hidden_states", "missing", "a list of tensors"),
    ],
)
def test_faults_that_headers_show(store, change, key, found, expected):
    content = torch.load(store.path(1), weights_only=True) | change
    torch.save({name: value for name, value in content.items() if value is not None}, store.path(1))
    names(only_fault(store.folder), "data_1.pt", key, found, expected)


@pytest.mark.parametrize("store", ["pt"], indirect=True)
def test_faults_of_single_states(store):
    content = torch.load(store.path(1), weights_only=True)
    states = content["hidden_states"]
    for place, made, found, expected in (
        (1, states[1][:-1].clone(), "[12, 16]", "[13, 16]"),
        (2, states[2][:, :8].clone(), "[13, 8]", "[13, 16]"),
        (3, states[3].double(), "float64", "float32 or bfloat16 or float16"),
        (0, states[0][None].clone(), "[1, 13, 16]", "[13, H]"),
        (0, states[0][:, :0].clone(), "[13, 0]", "[13, H]"),
    ):
        torch.save(content | {"hidden_states": [*states[:place], made, *states[place + 1 :]]}, store.path(1))
        fault = only_fault(store.folder)
        names(fault, "data_1.pt", f"hidden_states[{place}]", found, expected)
    torch.save(content | {"hidden_states": [*states[:3], states[3].bfloat16()]}, store.path(1))
    names(only_fault(store.folder), "data_1.pt", "hidden_states", "states of several number types", "one")
    torch.save(content | {"hidden_states": [state[:-1].clone() for state in states]}, store.path(1))
    assert "prefix caching" in inspection.inspect([store.folder]).faults[0].line


def test_a_sample_of_another_trainer_is_known_and_refused(tmp_path):
    content = {"input_ids": torch.arange(9), "loss_mask": torch.ones(9, dtype=torch.int64),
               "aux_hidden_state": torch.randn(1, 9, 48), "hidden_state": torch.randn(1, 9, 16)}  # fmt: skip
    torch.save(content, tmp_path / "data_0.ckpt")
    fault = only_fault(tmp_path)
    names(fault, "data_0.ckpt", "aux_hidden_state", "the layout of SpecForge", "speculators")
    assert "final norm" in fault.causes and "save aux_hidden_state[0] as hidden_state" in fault.way_out


def rewrite(store: Store, number: int, **parts) -> None:
    old = store.read(number)
    states = [state.clone() for state in parts.get("states", old.states)]
    store.write(number, StatesSample(parts.get("ids", old.input_ids), parts.get("mask", old.loss_mask), states))


def test_faults_that_only_the_numbers_show(store):
    states = [state.clone() for state in store.read(3).states]
    last = len(states) - 1

    def bent(place: int, rows: slice | int, value: float | torch.Tensor) -> list[torch.Tensor]:
        made = [state.clone() for state in states]
        made[place][rows] = value
        return made

    for made, key, found, expected in (
        (bent(1, 2, float("nan")), "hidden_states", "NaN or infinite values (state 1, 1 tokens, first token 2)", "finite"),
        (bent(2, 5, float("inf")), "hidden_states", "state 2, 1 tokens, first token 5", "finite"),
        (bent(0, 7, 0.0), "hidden_states[0]", "all zero for 1 of 15 tokens, first token 7", "16 different numbers"),
        (bent(2, slice(None), 3.5), "hidden_states[2]", "one number, 3.5 for 15 of 15 tokens", "16 different numbers"),
        (bent(last, slice(5, 10), states[last][:5]), f"hidden_states[{last}]", "5 of 15 tokens have the state of another", "10%"),
    ):
        rewrite(store, 3, states=made)
        names(only_fault(store.folder), store.path(3).name, key, found, expected)
    rewrite(store, 3, states=states)
    assert inspection.inspect([store.folder]).code == 0


@pytest.mark.parametrize("store", ["pt"], indirect=True)
def test_the_trainer_is_kept_from_what_the_inspector_refuses(store):
    """The gate before training looks through the same rooms."""
    path, content = store.path(1), torch.load(store.path(1), weights_only=True)
    manifest = store.manifest() | {"dtype": "float32"}
    (store.folder / "manifest.json").write_text(json.dumps(manifest))
    assert formats.verdict_samples("samples", store).faults == []
    states = content["hidden_states"]
    zero = torch.cat([torch.zeros(1, H), states[0][1:]])
    again = states[3][:4].repeat(4, 1)[:13].clone()
    for change in ({"hidden_states": [zero, *states[1:]]}, {"hidden_states": [*states[:3], again]},
                   {"hidden_states": [state.double() for state in states]}, {"loss_mask": content["loss_mask"] * 3},
                   {"hidden_states": torch.stack(states)}, {"input_ids": content["input_ids"].float()}):  # fmt: skip
        torch.save(content | change, path)
        refused = inspection.inspect([store.folder], read_all=True).faults
        gate = formats.verdict_samples("samples", store)
        assert refused and gate.word == "BROKEN" and all("data_1.pt" in fault for fault in gate.faults), change


@pytest.mark.parametrize("store", ["pt"], indirect=True)
def test_faults_of_tokens_and_masks(store):
    old = store.read(3)
    for parts, key, found, expected in (
        ({"mask": old.loss_mask * 2}, "loss_mask", "values other than 0 and 1 (2 and 9 more)", "0 and 1"),
        ({"mask": old.loss_mask * 0}, "loss_mask", "nothing is supervised", "at least one 1"),
        ({"ids": old.input_ids.flip(0)}, "input_ids", "other tokens than the manifest says", "those of the manifest"),
    ):
        rewrite(store, 3, **parts)
        names(only_fault(store.folder), "data_3.pt", key, found, expected)
        rewrite(store, 3, ids=old.input_ids, mask=old.loss_mask)
    (store.folder / "manifest.json").unlink()
    rewrite(store, 3, ids=old.input_ids - 1000)
    assert "token id" in only_fault(store.folder).found
    assert any("no manifest names the layers" in note for note in inspection.inspect([store.folder]).notes)


def test_a_manifest_that_says_something_else(store):
    path = store.folder / "manifest.json"
    whole = json.loads(path.read_text())
    for change, words in (({"layers": [2, 4, 5, 6]}, "layers [2, 4, 5, 6] and the last"), ({"hidden_size": 32}, "32, as the "),
                          ({"layers": [2, 4]}, "layers [2, 4] and the last")):  # fmt: skip
        path.write_text(json.dumps(whole | change))
        report = inspection.inspect([store.folder])
        assert len(report.faults) == 5 and all(words in fault.expected for fault in report.faults)
    path.write_text("{")
    names(only_fault(store.folder), "manifest.json", "", "it is not JSON", "what the samples were made from")


@pytest.mark.parametrize("store", ["pt"], indirect=True)
def test_samples_of_two_runs_in_one_folder(store):
    row = some_sample(3, 15, states=3)
    (store.folder / "manifest.json").unlink()
    store.write(3, row)
    names(only_fault(store.folder), "data_3.pt", "hidden_states", "states 3", "4 as in 4 others")


@pytest.mark.parametrize("store", ["safetensors"], indirect=True)
def test_states_beside_another_data_set(store):
    one, other = (load_file(store.path(number)) for number in (1, 2))
    save_file(one | {"token_ids": one["token_ids"].flip(0)}, store.path(1))
    names(only_fault(store.folder), "hs_1.safetensors", "token_ids", "others from place 0 on", "row 1 of the data set")
    save_file(other, store.path(1))
    report = inspection.inspect([store.folder])
    assert any(fault.file.endswith("hs_1.safetensors") and fault.found == "14 tokens" and "13, as row 1" in fault.expected
               for fault in report.faults)  # fmt: skip
    save_file({"hidden_states": one["hidden_states"][:, 0].contiguous(), "token_ids": one["token_ids"]}, store.path(1))
    assert any("[T, states, H]" in fault.expected for fault in inspection.inspect([store.folder]).faults)
    save_file(one, store.path(1))
    for name in ("state.json", "dataset_info.json"):
        (store.folder / name).unlink()
    fault = only_fault(store.folder)  # one for all of them
    names(fault, "hidden_states", "loss_mask", "there is none for 5 files of states", "an Arrow data set one folder up")


@pytest.mark.parametrize("store", ["safetensors"], indirect=True)
def test_a_data_set_that_the_trainer_cannot_read(store):
    path = store.folder / "state.json"
    state = json.loads(path.read_text())
    path.write_text(json.dumps(state | {"_format_type": None}))
    names(only_fault(store.folder), "samples", "_format_type", "None", "torch")
    assert inspection.inspect([store.folder]).verdicts == {"states": "USABLE", "data set": "BROKEN"}
    path.write_text("[]")
    assert "state.json" in only_fault(store.folder).file  # the data set is broken, not missing as well
    path.write_text(json.dumps(state))
    arrow = next(store.folder.glob("*.arrow"))
    whole = arrow.read_bytes()
    arrow.write_bytes(whole[:40])
    assert only_fault(store.folder).file == str(arrow)
    arrow.write_bytes(whole.replace(b"loss_mask", b"loss_\xd2ask"))
    assert "codec" in only_fault(store.folder).found  # a name that is no text
    arrow.unlink()
    names(only_fault(store.folder), arrow.name, "", "it does not exist", "as state.json names it")


@pytest.mark.parametrize("store", ["safetensors"], indirect=True)
@pytest.mark.parametrize(
    "change, key, found, expected",
    [
        (lambda columns: columns.update(mask=columns.pop("loss_mask")), "loss_mask", "missing (there are input_ids", "a column"),
        (lambda columns: columns.pop("seq_len"), "seq_len", "missing (there are input_ids, loss_mask)", "a column"),
        (lambda columns: columns.update(loss_mask=[[str(value) for value in row] for row in columns["loss_mask"]]), "loss_mask",
         "list<item: string>", "a list of whole numbers"),
        (lambda columns: columns.update(seq_len=list(map(str, columns["seq_len"]))), "seq_len", "string", "a whole number"),
        (lambda columns: columns["loss_mask"][3].__setitem__(0, None), "loss_mask", "1 places without a number", "numbers only"),
        (lambda columns: columns["loss_mask"].__setitem__(3, [0] * 15), "loss_mask, row 3", "nothing is supervised",
         "at least one 1"),
    ],
)  # fmt: skip
def test_columns_that_the_trainer_cannot_read(store, change, key, found, expected):
    import datasets

    columns = datasets.load_from_disk(str(store.folder)).to_dict()
    for path in [*store.folder.glob("*.arrow"), *store.folder.glob("*.json")]:
        path.unlink()
    change(columns)
    datasets.Dataset.from_dict(columns).with_format("torch").save_to_disk(str(store.folder))
    names(only_fault(store.folder), "samples", key, found, expected)
    assert inspection.inspect([store.folder]).verdicts == {"states": "USABLE", "data set": "BROKEN"}


@pytest.mark.parametrize("store", ["pt"], indirect=True)
def test_a_mask_of_other_answers_than_the_manifest_names(store):
    path = store.folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"turns": [[[5, 12 + n]] for n in range(5)], "dtype": "float32"}))
    old = store.read(3).loss_mask
    assert inspection.inspect([store.folder]).code == 0
    rewrite(store, 3, mask=torch.cat([old[:1], old[:-1]]))
    names(only_fault(store.folder), "data_3.pt", "loss_mask", "9 supervised, first other at place 5, all of it one token late",
          "10 supervised, the answers")  # fmt: skip
    assert "first other at place 5" in formats.verdict_samples("train", store).faults[0]


def test_names_that_no_trainer_counts(store):
    store.path(4).rename(store.path(4).with_name(store.path(4).name.replace("4", "04")))
    report = inspection.inspect([store.folder])
    assert [fault.found for fault in report.faults] == ["it is missing"]
    assert any("1 samples have no number in their name" in note for note in report.notes)


@pytest.mark.parametrize("store", ["safetensors"], indirect=True)
def test_states_with_the_layers_first(store):
    content = load_file(store.path(1))
    save_file(content | {"hidden_states": content["hidden_states"].transpose(0, 1).contiguous()}, store.path(1))
    fault = only_fault(store.folder)
    names(fault, "hs_1.safetensors", "hidden_states", "[4, 13, 16]", "[13, 4, 16]")
    assert "each other's place" in fault.causes


def test_a_pointer_in_place_of_a_file(store):
    store.path(1).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12345\n")
    fault = only_fault(store.folder)
    names(fault, store.path(1).name, "", "Git LFS's pointer", "the file itself")
    assert "git lfs pull" in fault.way_out


def test_all_reads_every_sample_in_several_processes_and_a_draw_says_what_it_read(tmp_path):
    store = Store(tmp_path / "many", "pt")
    rows = fill(store, 80)
    dead = [state.clone() for state in rows[50].states]
    dead[0][3] = 0.0
    rewrite(store, 50, states=dead)
    drawn = inspection.inspect([store.folder])
    assert drawn.code == 0 and any("16 of 80 samples were looked at (first, last and evenly" in note for note in drawn.notes)
    fault = only_fault(store.folder, read_all=True)
    names(fault, "data_50.pt", "hidden_states[0]", "all zero for 1 of 62 tokens, first token 3", "16 different")
    assert [inspection.draw(range(31)), inspection.draw(range(3))] == [list(range(0, 31, 2)), [0, 1, 2]]


# ---- Mappings, in Kimi-K2.5's true size

V, D = 163_840, 32_000


@pytest.fixture(scope="module")
def whole_mapping() -> dict[str, torch.Tensor]:
    kept = torch.randperm(V, generator=torch.Generator().manual_seed(5))[:D].sort().values
    t2d = torch.zeros(V, dtype=torch.bool)
    t2d[kept] = True
    freq = torch.zeros(V, dtype=torch.int64)
    freq[kept] = torch.arange(D) + 1
    return {"t2d": t2d, "d2t": kept - torch.arange(D), "token_freq": freq}


def write_mapping(folder: Path, container: str, **tensors: torch.Tensor) -> Path:
    folder.mkdir(exist_ok=True)
    for kind, tensor in tensors.items():
        if container == "pt":
            torch.save(tensor, folder / f"{kind}.pt")
        else:
            numpy.save(folder / (f"{kind}.npy" if kind == "token_freq" else f"{kind}-{D}.npy"), tensor.numpy())
    return folder


@pytest.mark.parametrize("container", ["pt", "npy", "one file"])
def test_offsets_are_proven_and_target_ids_are_named(tmp_path, whole_mapping, container):
    absolute = whole_mapping["d2t"] + torch.arange(D)
    if container == "one file":
        torch.save(whole_mapping, tmp_path / "mapping.pt")
    else:
        write_mapping(tmp_path, container, **whole_mapping)
    report = inspection.inspect([tmp_path])
    assert report.code == 0 and set(report.verdicts.values()) == {"USABLE"}
    assert any("arange(32000) + d2t equals the 32,000 places where t2d is true: offsets, proven" in note for note in report.notes)
    if container == "one file":
        torch.save(whole_mapping | {"d2t": absolute}, tmp_path / "mapping.pt")
    else:
        write_mapping(tmp_path, container, d2t=absolute)
    fault = only_fault(tmp_path)
    assert fault.key == "d2t" and "target ids" in fault.found and "proven" in fault.found and "offsets" in fault.expected
    assert "acceptance falls" in fault.causes and "eagle3kit convert" in fault.way_out
    if container == "one file":
        assert inspection.inspect([tmp_path]).verdicts == {"mapping": "BROKEN"}
    else:  # the half that proves it is found beside it
        assert only_fault(next(tmp_path.glob("d2t*"))).found == fault.found


def test_faults_of_mappings(tmp_path, whole_mapping):
    t2d, d2t, freq = whole_mapping.values()
    bent = d2t.clone()
    bent[7] += 1
    other = t2d.roll(1)
    for parts, kind, found, expected in (
        ({"d2t": d2t[:-1].clone()}, "d2t", "31,999 draft tokens, but t2d keeps 32,000", "arange(D) + d2t"),
        ({"d2t": bent}, "d2t", f"d2t[7] is {int(bent[7])}", "arange(D) + d2t"),
        ({"t2d": other}, "d2t", "d2t is of another mapping than t2d", "arange(D) + d2t"),
        ({"d2t": torch.arange(D)}, "d2t", "d2t is arange(D), a placeholder", "arange(D) + d2t"),
        ({"d2t": d2t * 0}, "d2t", "d2t is all zero, as where it is missing", "arange(D) + d2t"),
        ({"d2t": d2t.int()}, "d2t", "int32 [32000]", "int64 [D]"),
        ({"t2d": t2d.long()}, "t2d", "int64 [163840]", "bool [V]"),
        ({"token_freq": torch.cat([freq, freq])}, "token_freq", "327,680 tokens", "163,840"),
        ({"token_freq": freq - 1}, "token_freq", "a count of -1", "at least 0"),
        ({"token_freq": freq * 0}, "token_freq", "nothing was counted", "counts"),
        ({"token_freq": freq.roll(40_000)}, "token_freq", "most frequent tokens", "at least 0.9"),
    ):
        write_mapping(tmp_path, "pt", **(whole_mapping | parts))
        fault = only_fault(tmp_path)
        names(fault, f"{kind}.pt", kind, found, expected)
    torch.save({5: 3, -1: 2}, tmp_path / "token_freq.pt")
    assert only_fault(tmp_path / "token_freq.pt").key == "token_freq[-1]"


def test_a_d2t_alone_is_believed_only_as_far_as_it_proves_itself(tmp_path, whole_mapping):
    d2t = whole_mapping["d2t"]
    torch.save(d2t, tmp_path / "d2t.pt")
    assert any("as offsets all rise: offsets" in note for note in inspection.inspect([tmp_path]).notes)
    torch.save(d2t + torch.arange(D), tmp_path / "d2t.pt")
    fault = only_fault(tmp_path)
    names(fault, "d2t.pt", "d2t", "as offsets no two of the 32,000 kept tokens would be neighbours", "offsets")
    assert "put its t2d beside it" in fault.way_out
    torch.save(torch.tensor([1, 4, 5, 9]), tmp_path / "d2t.pt")  # of so few it may be chance
    report = inspection.inspect([tmp_path])
    assert report.code == 0 and any("only its t2d can tell" in note for note in report.notes)
    torch.save(d2t * 0, tmp_path / "d2t.pt")
    assert any("it is all zero: draft token i is target token i" in note for note in inspection.inspect([tmp_path]).notes)


def test_what_the_targets_vocabulary_tells_of_a_d2t_alone():
    absolute = torch.tensor([1, 4, 5])
    for d2t, vocab, convention in (([1, 3, 3], 6, "offsets"), (absolute, 6, "absolute"), (absolute, 8, "unproven"),
                                   (absolute, 5, "neither"), ([0, 0, 0], 6, "offsets")):  # fmt: skip
        assert mapping.prove(torch.as_tensor(d2t), None, vocab).convention == convention
    (fault,) = mapping.faults(torch.zeros(3, dtype=torch.int64), None, None, {"d2t": "d2t.pt"}, 6)
    assert fault.found == "all zero" and "acceptance collapses" in fault.causes
    assert mapping.faults(torch.zeros(6, dtype=torch.int64), None, None, {"d2t": "d2t.pt"}, 6) == []
    (fault,) = mapping.faults(torch.tensor([1, 3, 3]), None, None, {"d2t": "d2t.pt"}, 5)
    assert fault.found == "it reaches target token 5" and "below 5" in fault.expected


def test_no_neighbours_by_chance_is_counted_right():
    """Against all draws of small sets, counted one by one."""
    for kept, places in ((2, 4), (3, 9), (4, 7), (5, 12)):
        draws = list(itertools.combinations(range(places), kept))
        apart = sum(all(b - a > 1 for a, b in itertools.pairwise(draw)) for draw in draws)
        assert mapping._no_neighbours(kept, places) == pytest.approx(math.log10(apart / len(draws)))
    assert mapping._no_neighbours(5, 8) == -math.inf


def test_counts_that_are_none(tmp_path):
    for content, key, found in (({}, "token_freq", "nothing was counted"), ({"5": 3}, "token_freq[5]", "str -> 3"),
                                ({5: 3.5}, "token_freq[5]", "int -> 3.5"), ({5: 1 << 64}, "token_freq[5]", "int -> 184467")):
        torch.save(content, tmp_path / "token_freq.pt")
        fault = only_fault(tmp_path)
        assert fault.key == key and found in fault.found


def test_truth_values_of_another_field_are_no_t2d(tmp_path):
    numpy.save(tmp_path / "mask.npy", numpy.array([True, False]))
    assert inspection.inspect([tmp_path]).code == 2
    numpy.save(tmp_path / "kept.npy", numpy.arange(512) % 3 == 0)
    report = inspection.inspect([tmp_path])
    assert report.code == 0 and "by its number type" in report.rows[0].contract


# ---- What other programs write


def test_what_speculators_writes_of_a_vocabulary(tmp_path):
    import datasets
    from speculators.train.vocab_mapping import build_vocab_mappings_from_distribution, save_token_frequency_distribution

    rows = {"input_ids": [[1, 4, 5, 4], [7, 4, 1, 9]], "loss_mask": [[0, 1, 1, 1], [1, 1, 0, 1]]}
    save_token_frequency_distribution(datasets.Dataset.from_dict(rows).with_format("torch"), tmp_path / "token_freq.pt")
    counts = torch.load(tmp_path / "token_freq.pt", weights_only=True)
    d2t, t2d = build_vocab_mappings_from_distribution(counts, 4, 12)
    numpy.save(tmp_path / "d2t-4.npy", d2t.numpy())
    numpy.save(tmp_path / "t2d-4.npy", t2d.numpy())
    report = inspection.inspect([tmp_path])
    assert report.code == 0 and {row.kind for row in report.rows} == {"token_freq", "t2d", "d2t"}
    assert any("arange(4) + d2t equals the 4 places" in note for note in report.notes)


@pytest.fixture(scope="module")
def connectors() -> dict[str, object]:
    """The functions with which vLLM's connector and its 8-bit sibling write a file, taken out of their installed sources:
    importing all of vLLM takes longer than all the tests here."""
    import importlib.util

    from hs_connectors import fp8_utils

    sources = {
        "vllm": "distributed/kv_transfer/kv_connector/v1/example_hidden_states_connector.py",
        "hs_connectors": "fp8_hidden_states_connector.py",
    }
    found = {}
    for package, inside in sources.items():
        tree = ast.parse((Path(importlib.util.find_spec(package).origin).parent / inside).read_text())
        (writer,) = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "_write_tensors"]
        writer.decorator_list = []
        room = {"torch": torch, "save_file": save_file, "os": os, **vars(fp8_utils)}
        exec(compile(ast.Module([writer], []), inside, "exec"), room)
        found[package] = room["_write_tensors"]
    return found


def test_what_vllms_connectors_write(tmp_path, connectors):
    class Done:
        def synchronize(self) -> None: ...

    tensors = {"hidden_states": torch.randn(9, 4, 16).bfloat16(), "token_ids": torch.arange(9)}
    for name in ("plain", "coarse"):
        (tmp_path / name).mkdir()
    connectors["vllm"](dict(tensors), Done(), str(tmp_path / "plain" / "cmpl-1.safetensors"), None)
    path = tmp_path / "coarse" / "hs_0.safetensors"
    connectors["hs_connectors"](dict(tensors), Done(), str(path), None)
    report = inspection.inspect([tmp_path], read_all=True)
    assert report.code == 0, [fault.line for fault in report.faults]
    told = {row.contract: row.keys for row in report.rows}
    plain = told["vLLM's connector file"]
    assert "hidden_states bfloat16 [T, 4, 16]" in plain and "token_ids int64 [T]" in plain
    fp8 = told["hs_N.safetensors (speculators 0.5 to 0.9), fp8 with scales"]
    assert "float8_e4m3fn [T, 4, 16]" in fp8 and "hidden_states_scales float32 [T, 1, 1]" in fp8
    content = load_file(path)
    content.pop("hidden_states_scales")
    save_file(content, path)
    names(only_fault(path), "hs_0.safetensors", "hidden_states_scales", "missing", "a tensor")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> tuple[Path, Path]:
    """(target, a draft of it as speculators saves one): eight layers, 64 wide, 512 tokens, of which the draft says 64."""
    home = tmp_path_factory.mktemp("tiny")
    target = tinystates.lively_target(home / "target")
    t2d, d2t = vocabulary.build(torch.arange(512), 64, [0, 1, 2])
    recipe = Params().training
    model = draft.build(target, t2d, d2t, recipe, layer_ids=[2, 4, 5], seed=0)
    model.save_pretrained(home / "draft")
    return target, home / "draft"


@pytest.fixture
def spoilt(tiny, tmp_path):
    """A function that makes a draft directory with tensors or config changed, in either layout."""
    content, config = load_file(tiny[1] / "model.safetensors"), json.loads((tiny[1] / "config.json").read_text())

    def make(tensors: dict | None = None, plain: bool = False, **settings) -> Path:
        folder = tmp_path / "draft"
        folder.mkdir(exist_ok=True)
        made = {key: value for key, value in (content | (tensors or {})).items() if value is not None}
        told = config | settings
        if plain:
            made = {key.replace("layers.0.", "midlayer."): value for key, value in made.items()}
            told = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 64, **config["transformer_layer_config"],
                    **settings}  # fmt: skip
            told["architectures"] = ["LlamaForCausalLMEagle3"]
        save_file(made, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(told))
        return folder

    return make


def test_drafts_of_both_layouts_are_usable(spoilt, tiny):
    for plain, layout in ((False, "speculators"), (True, "LlamaForCausalLMEagle3, midlayer")):
        folder, version = spoilt(plain=plain), f"draft directory ({layout})"
        for path in (folder, folder / "model.safetensors", folder.parent):
            report = inspection.inspect([path], read_all=True)
            assert report.code == 0, [fault.line for fault in report.faults]
            assert [row.contract for row in report.rows] == [version] and "H 64, V 512, D 64" in report.rows[0].keys
            assert any("offsets, proven" in note for note in report.notes)
        assert inspection.inspect([folder], target=str(tiny[0])).code == 0


def test_faults_of_drafts(spoilt):
    tensors = load_file(spoilt() / "model.safetensors")
    d2t = tensors["d2t"]
    nan = tensors["fc.weight"].clone()
    nan[0, 0] = float("nan")
    for change, key, found, expected in (
        ({"tensors": {"d2t": d2t + torch.arange(64)}}, "d2t", "target ids", "offsets"),
        ({"tensors": {"d2t": None}}, "d2t", "missing", "int64 [64]"),
        ({"tensors": {"d2t": d2t.int()}}, "d2t", "int32", "int64"),
        ({"tensors": {"fc.weight": tensors["fc.weight"][:, :128].clone()}}, "fc.weight", "[64, 128]", "[64, 192]"),
        ({"tensors": {"lm_head.weight": tensors["lm_head.weight"][:32].clone()}}, "lm_head.weight", "[32, 64]", "[64, 64]"),
        ({"tensors": {"norm.weight": None}}, "norm.weight", "missing", "a weight of this name"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 4, 5, 8]}, "fc.weight", "[64, 192]", "[64, 256]"),
        ({"eagle_aux_hidden_state_layer_ids": [5, 2, 4]}, "eagle_aux_hidden_state_layer_ids", "[5, 2, 4]", "[2, 4, 5]"),
        ({"tensors": {"fc.weight": nan}}, "fc.weight", "NaN or infinite weights", "finite weights"),
    ):
        fault = only_fault(spoilt(**change), read_all=True)
        assert fault.key == key and found in fault.found and expected in fault.expected, fault
    folder = spoilt(plain=True, tensors={"d2t": None})
    assert "acceptance collapses" in only_fault(folder).causes
    absolute = {"d2t": d2t + torch.arange(64), "t2d": None}  # as offsets it would leave the vocabulary
    fault = only_fault(spoilt(plain=True, tensors=absolute))
    assert "target ids" in fault.found and "less arange(D)" in fault.way_out  # `convert` turns mappings, not drafts
    assert only_fault(spoilt(plain=True, tensors={"d2t": d2t * 0, "t2d": None})).found == "all zero"
    fault = only_fault(spoilt(tensors={"layers.0.mlp.down_proj.weight": None}))
    assert fault.key == "layers.0.mlp.down_proj.weight" and fault.found == "missing"
    (folder / "model.safetensors").unlink()
    assert "it does not exist" in only_fault(folder).found


def test_a_draft_in_several_files(spoilt):
    folder = spoilt(plain=True)
    tensors = load_file(folder / "model.safetensors")
    names_of = {f"model-0000{number}-of-00002.safetensors": list(tensors)[number - 1 :: 2] for number in (1, 2)}
    for name, keys in names_of.items():
        save_file({key: tensors[key] for key in keys}, folder / name)
    (folder / "model.safetensors").unlink()
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {key: name for name, keys in names_of.items() for key in keys}}))
    report = inspection.inspect([folder], read_all=True)
    assert report.code == 0 and "in 2 files" in report.rows[0].keys and report.passed_over == {}
    (folder / "model-00002-of-00002.safetensors").unlink()
    names(only_fault(folder), "model-00002-of-00002.safetensors", "", "it does not exist", "the draft's weights")
    index.write_text(json.dumps({"weight_map": {"fc.weight": "../model.safetensors"}}))
    names(only_fault(folder), "index.json", "weight_map", "it makes no sense", "the file of each weight")


def test_weights_of_a_draft_without_its_config(spoilt):
    folder = spoilt()
    (folder / "config.json").write_text("{")
    fault = only_fault(folder)
    names(fault, "model.safetensors", "", "beside a config.json that is none", "config.json beside it")
    assert inspection.inspect([folder]).verdicts == {"draft": "BROKEN"}
    (folder / "config.json").unlink()
    assert "beside no config.json" in only_fault(folder).found


@pytest.mark.parametrize("change", [{"num_hidden_layers": 10**9}, {"head_dim": "wide"}, {"num_key_value_heads": -1}])
def test_a_config_with_numbers_that_are_none(spoilt, change):
    ((key, value),) = change.items()
    report = inspection.inspect([spoilt(plain=True, **change)])
    assert report.faults[0].key == key and str(value) in report.faults[0].found


# ---- What only the target can tell


def test_the_target_tells_what_headers_cannot(tiny, tmp_path, spoilt):
    target = tiny[0]
    model = tinystates.load(target)
    store = tinystates.fill(Store(tmp_path / "own", "pt"), model, target, tinystates.own_answers(model, target, 3, 16))
    report = inspection.inspect([store.folder], target=str(target))
    assert report.signs and any("target " in note and "8 layers, hidden size 64, vocabulary 512" in note for note in report.notes)
    wrong = [fault for fault in report.faults if fault.key in ("auxiliary layers", "last layer", "final norm", "own tokens")]
    assert wrong == [], [fault.line for fault in wrong]
    rows = [store.read(number) for number in range(3)]
    for number, row in enumerate(rows):  # each auxiliary layer one too early: what speculators 0.3 files are, read as vLLM's
        early = tinystates.states_of(model, row.input_ids.tolist(), [1, 3, 4])
        store.write(number, StatesSample(row.input_ids, row.loss_mask, early))
    report = inspection.inspect([store.folder], target=str(target))
    assert report.code == 1 and any(fault.key == "auxiliary layers" for fault in report.faults)
    other = Store(tmp_path / "other", "pt")
    fill(other)
    assert any(fault.found == "width 16" and "64, the target's" in fault.expected
               for fault in inspection.inspect([other.folder], target=str(target)).faults)  # fmt: skip
    t2d = torch.zeros(512, dtype=torch.bool)
    t2d[10:74] = True
    folder = write_mapping(tmp_path / "mapping", "pt", t2d=t2d, d2t=t2d.nonzero().squeeze(1) - torch.arange(64))
    assert inspection.inspect([folder]).code == 0
    fault = only_fault(folder, target=str(target))
    names(fault, "t2d.pt", "t2d", "3 outside, first ", "every special token")
    torch.save(t2d[:500].clone(), folder / "t2d.pt")
    names(only_fault(folder, target=str(target)), "t2d.pt", "t2d", "500 tokens", "512, the target's")


# ---- Folders, patterns, the command line


def test_other_files_are_passed_over_and_said_so(store, tmp_path):
    (tmp_path / "notes.md").write_text("x")
    torch.save({"step": torch.ones(1)}, tmp_path / "optimizer.pt")
    report = inspection.inspect([tmp_path])
    assert report.code == 0 and report.passed_over[".md"] == report.passed_over[".pt"] == 1
    assert inspection.inspect([tmp_path / "notes.md"]).code == 2
    assert inspection.inspect([tmp_path / "optimizer.pt"]).code == 2
    with pytest.raises(KitError, match="does not exist; name a file"):
        inspection.inspect([tmp_path / "nothing"])
    with pytest.raises(KitError, match="no file has such a name"):
        inspection.inspect([tmp_path / "no*thing.pt"])


def test_the_command_line_says_it_all_and_ends_with_a_code(store, tmp_path, capsys):
    assert main(["inspect", str(store.folder)]) == 0
    said = capsys.readouterr().out
    kind = "states" if store.layout == "safetensors" else "sample"
    assert f"{kind}: USABLE" in said and "70 (12-16)" in said
    store.path(2).unlink()
    assert main(["inspect", str(store.folder)]) == 1
    said = capsys.readouterr().out
    assert f"{kind}: BROKEN" in said and said.count("fault: ") == 1 and f"{store.path(2)} cannot be used: it is missing" in said
    assert main(["inspect", str(store.folder), "--json", "--all"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["exit_code"] == 1 and told["faults"][0]["found"] == "it is missing" and told["verdicts"][kind] == "BROKEN"
    (tmp_path / "notes.md").write_text("x")
    assert main(["inspect", str(tmp_path / "notes.md")]) == 2
    assert "no file of this field" in capsys.readouterr().out
    assert main(["inspect", str(tmp_path / "nothing")]) == 2
    assert "does not exist" in capsys.readouterr().err
