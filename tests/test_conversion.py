"""Conversions: there and back the tensors are the same bytes; what a file does not say is stated or refused."""

import ast
import contextlib
import json
import zipfile
from pathlib import Path

import numpy
import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle3kit import artefacts, conversion, files, inspection, mapping
from eagle3kit.__main__ import main
from eagle3kit.errors import KitError
from eagle3kit.samples import Store, load, open_store

torch.set_num_threads(1)
H = 16


def raw(seed: int, mask: torch.dtype = torch.int64, dtype: torch.dtype = torch.bfloat16) -> dict:
    generator = torch.Generator().manual_seed(seed)
    length = 9 + seed
    states = [torch.randn(length, H, generator=generator).to(dtype) for _ in range(4)]
    ids = torch.randint(500, (length,), generator=generator)
    return {"input_ids": ids, "loss_mask": (torch.arange(length) > 3).to(mask), "hidden_states": states}


def v0(content: dict) -> dict:
    states = content["hidden_states"]
    return {"input_ids": content["input_ids"], "loss_mask": content["loss_mask"],
            "hidden_state": torch.cat(states[:-1], dim=-1), "target": states[-1]}  # fmt: skip


def old_folder(folder: Path, version: int = 1, count: int = 4, **how) -> Path:
    """Files as speculators 0.3 left them: no manifest, no word of layers."""
    folder.mkdir()
    for number in range(count):
        content = raw(number, **how)
        torch.save(content if version else v0(content), folder / f"data_{number}.pt")
    return folder


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of every sample, by file and key, whatever the layout."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.suffix in (".pt", ".safetensors"):
            for key, value in load(path).items():
                for place, tensor in enumerate(value if isinstance(value, list) else [value]):
                    found[f"{path.name} {key} {place}"] = tensor
    return found


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    def bits(tensor: torch.Tensor) -> tuple:
        return tensor.dtype, tensor.shape, tensor.contiguous().view(torch.uint8).numpy().tobytes()

    return one.keys() == other.keys() and all(bits(one[key]) == bits(other[key]) for key in one)


@pytest.mark.parametrize("mask", [torch.int64, torch.bool])
@pytest.mark.parametrize("version, back", [(1, "pt"), (0, "pt-v0")])
@pytest.mark.parametrize("there", ["safetensors", "pt", "pt-v0"])
def test_there_and_back_the_tensors_are_the_same_bytes(tmp_path, version, back, there, mask):
    source = old_folder(tmp_path / "old", version, mask=mask)
    done = conversion.convert(source, tmp_path / "there", there, layers_after=[2, 15, 27])
    assert (done.written, done.stood) == (4, 0) and "captured after [2, 15, 27]" in done.said
    conversion.convert(tmp_path / "there", tmp_path / "back", back)
    assert same(tensors(source), tensors(tmp_path / "back"))
    for name in ("there", "back"):
        report = inspection.inspect([tmp_path / name], read_all=True)
        assert report.code == 0, [fault.line for fault in report.faults]
    kept = open_store(tmp_path / "there")
    assert kept.layout == there and len(kept.read(2).states) == 4
    assert kept.read(2).loss_mask.long().tolist() == raw(2)["loss_mask"].tolist()


def test_what_was_stated_is_recorded_by_vllms_counting(tmp_path):
    source = old_folder(tmp_path / "old")
    conversion.convert(source, tmp_path / "after", "pt", layers_after=[2, 15, 27])
    conversion.convert(source, tmp_path / "entering", "safetensors", layers=[3, 16, 28])
    after, entering = (open_store(tmp_path / name).manifest() for name in ("after", "entering"))
    assert after["layers"] == entering["layers"] == [3, 16, 28] and after["convention"] == entering["convention"]
    assert "id k is the residual stream entering layer k" in after["convention"]
    assert after["converted"]["stated"] == ("layers [3, 16, 28]: stated as captured after [2, 15, 27] (speculators 0.3 and 0.4), "
                                            "so vLLM's ids are one higher")  # fmt: skip
    assert entering["converted"]["stated"].startswith("layers [3, 16, 28] as stated")
    assert after["converted"]["from"] == "data_N.pt v1 (speculators 0.3 to 0.7)" and after["hidden_size"] == H
    assert after["turns"][0] == [[4, 9]] and after["lengths"] == [9, 10, 11, 12]
    again = conversion.convert(tmp_path / "after", tmp_path / "again", "safetensors")
    told = open_store(tmp_path / "again").manifest()
    assert told["layers"] == [3, 16, 28] and "as the manifest of the source names them" in again.said
    assert told["converted"]["earlier"] == after["converted"]


def test_what_is_not_known_is_not_made_up(tmp_path):
    source = old_folder(tmp_path / "old")

    def refused(words: str, to: str = "pt", place: Path = source, **how) -> None:
        with pytest.raises(KitError, match=words):
            conversion.convert(place, tmp_path / "new", to, **how)
        assert not (tmp_path / "new").exists()

    refused("no manifest names the layers of these states.*--layers-after 2,15,27 for files of speculators 0.3 and 0.4")
    refused(r"4 states a token, so 3 auxiliary layers and the last; 4 ids were named", layers=[2, 15, 27, 30])
    refused("must rise without doubles", layers=[15, 2, 27])
    refused("give one", layers=[3, 16, 28], layers_after=[2, 15, 27])
    refused("not to be turned into 'offsets'; choose one of pt, pt-v0, safetensors", to="offsets", layers=[3, 16, 28])
    refused("one sample of a folder; name the folder", place=source / "data_1.pt", layers=[3, 16, 28])
    (tmp_path / "cut.pt").write_bytes((source / "data_1.pt").read_bytes()[:500])
    refused("neither samples nor a mapping that can be read: .*cut.pt cannot be used", place=tmp_path / "cut.pt")
    refused("neither samples nor a mapping", place=tmp_path / "empty" if (tmp_path / "empty").mkdir() is None else source)
    files.write_json(source / "manifest.json", {"layers": [1, 2, 3]})
    refused(r"names layers \[1, 2, 3\], which are not those stated \(\[3, 16, 28\]\)", layers_after=[2, 15, 27])
    (source / "manifest.json").unlink()
    (source / "data_2.pt").rename(source / "data_7.pt")
    refused(r"it is missing, and so are \d more.*Nothing was converted", layers=[3, 16, 28])
    (source / "data_7.pt").rename(source / "data_2.pt")
    content = raw(2)
    torch.save(content | {"loss_mask": content["loss_mask"][1:].clone()}, source / "data_2.pt")
    refused(r"data_2\.pt, key loss_mask: \[10\].*Nothing was converted", layers=[3, 16, 28])
    for place, words in ((source / "inside", "lies in"), (source, "is the source itself")):
        with pytest.raises(KitError, match=words):
            conversion.convert(source, place, "pt", layers=[3, 16, 28])


def test_states_without_a_mask_or_in_8_bits_are_refused(tmp_path):
    from hs_connectors.fp8_utils import quantize_tensor_to_fp8

    folder = tmp_path / "vllm"
    folder.mkdir()
    states = torch.stack(raw(0)["hidden_states"], dim=1)
    save_file({"hidden_states": states, "token_ids": raw(0)["input_ids"]}, folder / "hs_0.safetensors")
    with pytest.raises(KitError, match="no loss mask and no Arrow data set lies beside it"):
        conversion.convert(folder, tmp_path / "new", "pt", layers=[3, 16, 28])
    conversion.convert(old_folder(tmp_path / "old", count=1), tmp_path / "st", "safetensors", layers=[3, 16, 28])
    coarse, scales = quantize_tensor_to_fp8(states)
    path = tmp_path / "st" / "hidden_states" / "hs_0.safetensors"
    save_file({"hidden_states": coarse, "hidden_states_scales": scales, "token_ids": raw(0)["input_ids"]}, path)
    with pytest.raises(KitError, match="8-bit states.*add --lossy"):
        conversion.convert(tmp_path / "st", tmp_path / "new", "pt")
    conversion.convert(tmp_path / "st", tmp_path / "new", "pt", lossy=True)
    wide = torch.stack(Store(tmp_path / "new", "pt").read(0).states, dim=1)
    assert wide.dtype == torch.bfloat16 and torch.allclose(wide.float(), states.float(), rtol=0.1, atol=0.02)


def test_what_is_slightly_off_is_mended(tmp_path):
    """One stacked tensor, a leading dimension of one, tokens as a list: read, and written as they should be."""
    source, good = tmp_path / "odd", raw(0)
    source.mkdir()
    odd = {"input_ids": good["input_ids"].tolist(), "loss_mask": good["loss_mask"][None],
           "hidden_states": torch.stack(good["hidden_states"])}  # fmt: skip
    torch.save(odd, source / "data_0.pt")
    assert inspection.inspect([source]).code == 1
    conversion.convert(source, tmp_path / "new", "pt", layers=[3, 16, 28])
    found = torch.load(tmp_path / "new" / "data_0.pt", weights_only=True)
    assert torch.equal(found["input_ids"], good["input_ids"]) and torch.equal(found["loss_mask"], good["loss_mask"])
    assert all(torch.equal(a, b) for a, b in zip(found["hidden_states"], good["hidden_states"], strict=True))
    assert inspection.inspect([tmp_path / "new"]).code == 0


@pytest.mark.parametrize("to", ["pt-v0", "safetensors"])
def test_a_conversion_that_stops_goes_on(tmp_path, to):
    source = old_folder(tmp_path / "old", count=6)

    def stop_after_three(items, total):
        for number, item in enumerate(items):
            if number == 3:
                raise KeyboardInterrupt
            yield item

    with contextlib.suppress(KeyboardInterrupt):
        conversion.convert(source, tmp_path / "new", to, layers=[3, 16, 28], progress=stop_after_three)
    store = Store(tmp_path / "new", to)
    before = {number: store.path(number).stat().st_mtime_ns for number in range(3)}
    assert not store.path(3).exists() and not list(tmp_path.rglob(".*"))
    found = [fault.found for fault in inspection.inspect([tmp_path / "new"]).faults]
    assert "it is missing, and so are 2 more (numbers 4, 5)" in found
    done = conversion.convert(source, tmp_path / "new", to, layers=[3, 16, 28])
    assert (done.written, done.stood) == (3, 3)
    assert {number: store.path(number).stat().st_mtime_ns for number in range(3)} == before
    assert inspection.inspect([tmp_path / "new"], read_all=True).code == 0
    done = conversion.convert(source, tmp_path / "new", to, layers=[3, 16, 28])
    assert (done.written, done.stood) == (0, 6)
    # Another statement, or another source, is another conversion: what is there is nobody's to remove.
    for how in ({"layers": [4, 17, 29]}, {"layers_after": [2, 15, 27]}):
        with pytest.raises(KitError, match="holds something else already"):
            conversion.convert(source, tmp_path / "new", to, **how)
    torch.save(raw(3), source / "data_3.pt")
    with pytest.raises(KitError, match="holds something else already"):
        conversion.convert(source, tmp_path / "new", to, layers=[3, 16, 28])


# ---- speculators 0.3.0 as a witness

WITNESS = artefacts.Artefact(
    name="speculators", version="0.3.0", file="speculators-0.3.0-py3-none-any.whl", bytes=97281, licence="Apache-2.0",
    sha256="10e67b28fd7a09b3f2a0c522ac0ec5d9f459c4021f7bf7e6b32413e551995f73",
    holds="the version that wrote and read data_N.pt",
)  # fmt: skip


@pytest.fixture(scope="module")
def standardize():
    """Its own `standardize_data_v0` and `_v1`, taken out of the wheel: the rest of that version does not run beside ours."""
    path = artefacts.cache() / "artefacts" / WITNESS.file
    if not path.is_file():
        try:
            artefacts._download(WITNESS, path)
        except KitError as error:
            pytest.skip(f"speculators 0.3.0 could not be fetched: {error}")
    assert files.sha256(path) == WITNESS.sha256
    with zipfile.ZipFile(path) as wheel:
        tree = ast.parse(wheel.read("speculators/train/data.py"))
    wanted = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("standardize_data_v")]
    room: dict = {"torch": torch, "Any": object}
    exec(compile(ast.Module(wanted, []), "data.py", "exec"), room)
    return room["standardize_data_v0"], room["standardize_data_v1"]


def test_speculators_0_3_reads_what_we_write(tmp_path, standardize):
    from_v0, from_v1 = standardize
    source = old_folder(tmp_path / "old")
    conversion.convert(source, tmp_path / "v0", "pt-v0", layers=[3, 16, 28])
    conversion.convert(source, tmp_path / "st", "safetensors", layers=[3, 16, 28])
    conversion.convert(tmp_path / "st", tmp_path / "v1", "pt")
    for number in range(4):
        wanted = from_v1(raw(number))
        for read, folder in ((from_v0, "v0"), (from_v1, "v1")):
            found = read(torch.load(tmp_path / folder / f"data_{number}.pt", weights_only=True))
            assert found.keys() == wanted.keys() and all(torch.equal(found[key], wanted[key]) for key in wanted)
        assert list(wanted["hidden_states"].shape) == [9 + number, 3 * H]


# ---- Mappings

KEPT = torch.tensor([1, 4, 5, 9, 10, 40])


def mapping_folder(folder: Path, convention: str = "offsets") -> Path:
    folder.mkdir()
    t2d = torch.zeros(64, dtype=torch.bool)
    t2d[KEPT] = True
    d2t = KEPT - torch.arange(6) if convention == "offsets" else KEPT.clone()
    for name, tensor in (("t2d", t2d), ("d2t", d2t)):
        torch.save(tensor, folder / f"{name}.pt")
    torch.save({int(token): 3 for token in KEPT}, folder / "token_freq.pt")
    return folder


def test_a_mapping_turns_and_turns_back(tmp_path):
    source = mapping_folder(tmp_path / "theirs", "absolute")
    assert inspection.inspect([source]).code == 1
    done = conversion.convert(source, tmp_path / "ours", "offsets")
    assert done.written == 3 and done.said.startswith("it held absolute: d2t itself equals the 6 places")
    assert torch.equal(mapping.read(tmp_path / "ours" / "d2t.pt", "d2t"), KEPT - torch.arange(6))
    assert inspection.inspect([tmp_path / "ours"]).code == 0
    conversion.convert(tmp_path / "ours", tmp_path / "back", "absolute")
    assert torch.equal(mapping.read(tmp_path / "back" / "d2t.pt", "d2t"), KEPT)
    assert conversion.convert(source, tmp_path / "ours", "offsets").stood == 3
    conversion.convert(tmp_path / "ours", tmp_path / "npy", "npy")
    assert sorted(path.name for path in (tmp_path / "npy").iterdir()) == ["d2t-6.npy", "t2d-6.npy", "token_freq.npy"]
    assert numpy.load(tmp_path / "npy" / "d2t-6.npy").tolist() == [1, 3, 3, 6, 6, 35]
    assert inspection.inspect([tmp_path / "npy"]).code == 0


def test_a_mapping_that_proves_nothing_is_refused(tmp_path):
    source = mapping_folder(tmp_path / "theirs", "absolute")
    (source / "t2d.pt").unlink()
    with pytest.raises(KitError, match="only its t2d can tell; nothing was converted"):
        conversion.convert(source, tmp_path / "new", "offsets")
    torch.save(KEPT.flip(0).clone(), source / "d2t.pt")
    with pytest.raises(KitError, match="rises neither as offsets nor as target ids"):
        conversion.convert(source, tmp_path / "new", "offsets")
    (source / "d2t.pt").unlink()
    with pytest.raises(KitError, match="no d2t, so there is no convention to convert"):
        conversion.convert(source, tmp_path / "new", "offsets")
    assert not (tmp_path / "new").exists()


def test_the_command_line(tmp_path, capsys):
    source = old_folder(tmp_path / "old")
    assert main(["convert", str(source), str(tmp_path / "new"), "--to", "safetensors"]) == 2
    assert "State them: --layers-after" in capsys.readouterr().err
    assert main(["convert", str(source), str(tmp_path / "new"), "--to", "safetensors", "--layers-after", "2,x"]) == 2
    assert "write layer ids with commas" in capsys.readouterr().err
    assert main(["convert", str(source), str(tmp_path / "new"), "--to", "safetensors", "--layers-after", "2,15,27"]) == 0
    assert "4 files written" in capsys.readouterr().out
    assert json.loads((tmp_path / "new" / "manifest.json").read_text())["layers"] == [3, 16, 28]
    assert load_file(tmp_path / "new" / "hidden_states" / "hs_0.safetensors")["hidden_states"].shape == (9, 4, H)
