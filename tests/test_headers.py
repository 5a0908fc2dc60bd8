"""What headers say is what is in the file, for every container, without its content ever being read."""

import tracemalloc
from collections import Counter, OrderedDict

import numpy
import pytest
import torch
from safetensors.torch import save_file

from eagle3kit import contracts, headers
from eagle3kit.faults import Unreadable
from eagle3kit.samples import load

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
          torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16]  # fmt: skip


def rows(path) -> dict[str, tuple[list[int], str, int]]:
    return {tensor.key: (list(tensor.shape), tensor.dtype, tensor.bytes) for tensor in headers.read(path).tensors}


def told(tensor: torch.Tensor) -> tuple[list[int], str, int]:
    return list(tensor.shape), str(tensor.dtype).removeprefix("torch."), tensor.numel() * tensor.element_size()


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_number_type_of_each_container(tmp_path, dtype):
    tensor = torch.zeros(3, 5).to(dtype)
    torch.save({"x": tensor}, tmp_path / "x.pt")
    assert rows(tmp_path / "x.pt") == {"x": told(tensor)}
    if dtype is not torch.complex64:
        save_file({"x": tensor}, tmp_path / "x.safetensors")
        assert rows(tmp_path / "x.safetensors") == {"x": told(tensor)}
    if dtype not in (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2):
        numpy.save(tmp_path / "x.npy", tensor.numpy())
        assert rows(tmp_path / "x.npy") == {"": told(tensor)}


def test_all_that_torch_save_nests(tmp_path):
    wide = torch.arange(24.0).reshape(4, 6)
    content = {"bare": wide, "list": [wide[1], wide.T, torch.zeros(())], "empty": torch.zeros(0, 7), "pair": (wide[:, ::2], 3),
               "inner": OrderedDict(weight=torch.nn.Parameter(wide)), "text": "words", "size": wide.shape,
               "flags": [True, None, 2.5, -7, 2**40]}  # fmt: skip
    torch.save(content, tmp_path / "all.pt")
    found = rows(tmp_path / "all.pt")
    wanted = {"bare": wide, "list[0]": wide[1], "list[1]": wide.T, "list[2]": torch.zeros(()), "empty": content["empty"],
              "pair[0]": wide[:, ::2], "inner.weight": wide}  # fmt: skip
    assert found == {key: told(tensor) for key, tensor in wanted.items()}
    inside = headers.read(tmp_path / "all.pt").content
    assert inside["text"] == "words" and inside["flags"] == [True, None, 2.5, -7, 2**40] and inside["size"] == (4, 6)
    torch.save(wide, tmp_path / "bare.pt")
    assert rows(tmp_path / "bare.pt") == {"": told(wide)}
    torch.save(torch.nn.Linear(3, 2).state_dict(), tmp_path / "module.pt")
    assert rows(tmp_path / "module.pt") == {"weight": ([2, 3], "float32", 24), "bias": ([2], "float32", 8)}


def test_dictionaries_of_counts_come_whole(tmp_path):
    counts = {token: 7 * token % 5 for token in range(70_000)}
    for made in (counts, Counter(counts), {3: 1}):
        torch.save(made, tmp_path / "token_freq.pt")
        assert headers.read(tmp_path / "token_freq.pt").content == made
        found = contracts.recognise(headers.read(tmp_path / "token_freq.pt"))
        assert found.kind == "token_freq" and found.faults == () and f"{len(made):,} token ids" in found.signature


def test_a_header_costs_no_memory_however_large_the_file(tmp_path):
    states = torch.zeros(64 << 20, dtype=torch.uint8)
    torch.save({"hidden_states": [states]}, tmp_path / "large.pt")
    save_file({"hidden_states": states}, tmp_path / "large.safetensors")
    numpy.save(tmp_path / "large.npy", states.numpy())
    for name in ("large.pt", "large.safetensors", "large.npy"):
        headers.read(tmp_path / name)
        tracemalloc.start()
        (tensor,) = headers.read(tmp_path / name).tensors
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert tensor.bytes == 64 << 20 and peak < 100_000, (name, peak)


def test_a_name_that_says_another_kind_is_refused(tmp_path):
    """speculators opens *.safetensors with one reader and everything else with another."""
    torch.save({"x": torch.ones(2)}, tmp_path / "hs_0.safetensors")
    save_file({"x": torch.ones(2)}, tmp_path / "data_0.pt")
    for name, found, named, ending in (("hs_0.safetensors", "torch zip", "safetensors", ".pt"),
                                       ("data_0.pt", "safetensors", "torch zip", ".safetensors")):  # fmt: skip
        with pytest.raises(Unreadable) as caught:
            headers.read(tmp_path / name)
        assert f"a file of kind {found}, expected {named}, as its name says" in str(caught.value)
        assert str(caught.value).endswith(f"rename it to end in {ending}")
    (tmp_path / "data_0.pt").rename(tmp_path / "data_0.x")
    assert headers.read(tmp_path / "data_0.x").container == "safetensors"


def test_an_old_file_of_torch_has_a_way_out(tmp_path):
    torch.save({"x": torch.ones(2)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(Unreadable, match=r"old\.pt cannot be read: a bare pickle, or a file of torch older than 1\.6.*load it "
                       r"with torch\.load\(weights_only=True\) and save it again"):  # fmt: skip
        headers.read(tmp_path / "old.pt")


# ---- Kimi-K2.5's own shapes

V, D = 163_840, 32_000


@pytest.fixture(scope="module")
def kimi(tmp_path_factory):
    """t2d bool [163840] with 32,000 true, d2t int64 [32000], token_freq int64 [163840], each in both containers."""
    folder = tmp_path_factory.mktemp("kimi")
    kept = torch.randperm(V, generator=torch.Generator().manual_seed(5))[:D].sort().values
    t2d = torch.zeros(V, dtype=torch.bool)
    t2d[kept] = True
    freq = torch.zeros(V, dtype=torch.int64)
    freq[kept] = torch.arange(D) + 1
    tensors = {"t2d": t2d, "d2t": kept - torch.arange(D), "token_freq": freq}
    for kind, tensor in tensors.items():
        torch.save(tensor, folder / f"{kind}.pt")
        numpy.save(folder / (f"{kind}-{D}.npy" if kind != "token_freq" else "token_freq.npy"), tensor.numpy())
    return folder


def test_files_of_kimis_vocabulary_are_what_they_should_be(kimi):
    kinds = {}
    for path in kimi.iterdir():
        found = contracts.recognise(headers.read(path))
        assert found.faults == ()
        kinds.setdefault(found.kind, set()).add(found.signature)
    assert kinds == {"t2d": {f"bool [{V}]"}, "d2t": {f"int64 [{D}]"}, "token_freq": {f"int64 [{V}]"}}
    assert int(load(kimi / "t2d.pt")[""].sum()) == D


def test_a_samples_headers_in_kimis_geometry(tmp_path):
    tokens, hidden = 16, 7168
    states = [torch.zeros(tokens, hidden, dtype=torch.bfloat16) for _ in range(4)]
    row = torch.ones(tokens, dtype=torch.int64)
    torch.save({"input_ids": row, "loss_mask": row.clone(), "hidden_states": states}, tmp_path / "data_12.pt")
    found = contracts.recognise(headers.read(tmp_path / "data_12.pt"))
    assert (found.kind, found.tokens, found.states, found.width, found.faults) == ("sample", 16, 4, 7168, ())
    assert found.signature == "input_ids int64 [T], loss_mask int64 [T], hidden_states 4 × bfloat16 [T, 7168]"
    assert contracts.number(tmp_path / "data_12.pt") == 12 and contracts.number(tmp_path / "other.pt") is None
