"""Files that mean harm or are broken: a line each, never a crash, a wait, a run of their code, or a run on memory.

EAGLE3KIT_FUZZ=N changes valid files N times a container instead of two hundred times.
"""

import io
import json
import os
import pickle
import pickletools
import random
import resource
import struct
import tempfile
import zipfile
from pathlib import Path

import numpy
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.configuration import set_hypothesis_home_dir
from safetensors.torch import save

from eagle3kit import contracts, headers, inspection
from eagle3kit.errors import KitError
from eagle3kit.faults import Unreadable
from eagle3kit.samples import load

set_hypothesis_home_dir(Path(tempfile.gettempdir()) / "hypothesis")  # it leaves a folder where it stands otherwise
FUZZ = int(os.environ.get("EAGLE3KIT_FUZZ", 200))


def refusal(path: Path) -> str:
    """The line that says why a file is not read; the same for whoever reads headers or content."""
    with pytest.raises(Unreadable) as caught:
        headers.read(path)
    with pytest.raises(KitError):
        load(path)
    said = str(caught.value)
    assert said.startswith(f"{path} cannot be read: ") and "\n" not in said and len(said) < 700
    assert caught.value.fault.expected and caught.value.fault.found
    return said


def archive(path: Path, data: bytes, *, method: int = zipfile.ZIP_STORED, records: dict[str, bytes] | None = None) -> Path:
    """A zip as torch.save lays it out, with any `data.pkl`."""
    with zipfile.ZipFile(path, "w", method) as made:
        made.writestr("archive/data.pkl", data)
        for name, inside in {"byteorder": b"little", "version": b"3\n", **(records or {})}.items():
            made.writestr(f"archive/{name}", inside)
    return path


class Trap:
    """Unpickled, it calls what it was made with."""

    def __init__(self, what, *arguments):
        self.call = (what, arguments)

    def __reduce__(self):
        return self.call


# ---- Code in pickles


@pytest.mark.parametrize(
    "what, name",
    [(os.system, "os.system"), (eval, "builtins.eval"), (exec, "builtins.exec"), (getattr, "builtins.getattr"),
     (__import__, "builtins.__import__"), (torch.load, "torch.serialization.load"), (numpy.load, "numpy.load")],
)  # fmt: skip
@pytest.mark.parametrize("protocol", [2, 4])
def test_a_pickle_that_wants_to_run_code_is_refused_by_name(tmp_path, what, name, protocol):
    data = pickle.dumps({"input_ids": Trap(what, "x")}, protocol=protocol)
    (tmp_path / "bare.pt").write_bytes(data)
    torch.save({"input_ids": Trap(what, "x")}, tmp_path / "saved.pt")
    for path in (archive(tmp_path / "zipped.pt", data), tmp_path / "bare.pt", tmp_path / "saved.pt"):
        assert f"it wants to run {name}, expected tensors, numbers and text only; it is not a tensor file but a program; " \
               "nothing of it was run" in refusal(path)  # fmt: skip
    report = inspection.inspect([tmp_path])
    assert report.code == 1 and len(report.faults) == 3 and all(name in fault.found for fault in report.faults)


def test_code_hidden_in_what_torch_builds_is_refused_too(tmp_path):
    storage = b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x04tQ"
    hook = b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(" + storage + b"K\x00K\x04\x85K\x01\x85\x89cos\nsystem\ntR."
    assert "it wants to run os.system" in refusal(archive(tmp_path / "a.pt", hook, records={"data/0": bytes(16)}))
    # Called, not only named: a dtype is no function, a tensor no dictionary.
    for data in (b"\x80\x02ctorch\nfloat32\n)R.", b"\x80\x02ccollections\nOrderedDict\nK\x01\x85R.",
                 b"\x80\x02ctorch\nFloatStorage\n)R.", b"\x80\x02K\x01)R."):  # fmt: skip
        assert "makes no sense" in refusal(archive(tmp_path / "b.pt", data))


def test_numpy_objects_are_pickles_and_refused(tmp_path):
    numpy.save(tmp_path / "d2t.npy", numpy.array([{"a": 1}, None], dtype=object), allow_pickle=True)
    assert "an array of Python objects, which is a pickle" in refusal(tmp_path / "d2t.npy")


# ---- Sizes that lie


BOMBS = {
    "a memo of four billion": b"\x80\x02]r\xff\xff\xff\xff.",
    "bytes that are not there": b"\x80\x04\x8e" + struct.pack("<Q", 1 << 60) + b".",
    "text that is not there": b"\x80\x02X" + struct.pack("<I", 0xFFFFFFFF) + b".",
    "a number of two gigabytes": b"\x80\x02\x8b" + struct.pack("<i", 2**31 - 1) + b".",
    "a million million lists": b"\x80\x02]q\x00" + b"(h\x00" * 12 + b"e" * 12 + b".",
    "lists in lists": b"\x80\x02" + b"]" * 30_000 + b"a" * 29_999 + b".",
    "steps without end": b"\x80\x02]" + b"N" * 2_000_001 + b".",
    "no end": b"\x80\x02}",
    "nothing": b"",
    "a list that holds itself": b"\x80\x02]q\x00h\x00a.",
    "one list a thousand times in one a thousand times": b"\x80\x02]q\x00(" + b"K\x01" * 9 + b"e]q\x01(" + b"h\x00" * 1000
    + b"e]q\x02(" + b"h\x01" * 1000 + b"e](" + b"h\x02" * 1000 + b"e.",
    "keys that collide": b"\x80\x02}(" + b"".join(b"\x8a\x10" + (k * (2**61 - 1)).to_bytes(16, "little") + b"K\x00"
                                                  for k in range(1, 1000)) + b"u.",
}  # fmt: skip


@pytest.mark.parametrize("name", BOMBS)
def test_a_pickle_out_of_proportion_is_refused_in_a_moment(tmp_path, name):
    path = archive(tmp_path / "data_0.pt", BOMBS[name])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if name == "a memo of four billion":  # Python's own unpickler reserves 64 GB for it; here it is a list, and no file of ours
        assert contracts.recognise(headers.read(path)) is None
    else:
        with pytest.raises(Unreadable):
            headers.read(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400 << 10  # KiB


def test_zip_bombs_and_directories_that_lie(tmp_path):
    packed = archive(tmp_path / "packed.pt", bytes(50_000_000), method=zipfile.ZIP_DEFLATED)
    assert "record data.pkl is compressed" in refusal(packed)
    large = archive(tmp_path / "large.pt", b"\x80\x02}." + bytes(9 << 20))
    assert "data.pkl of" in refusal(large)
    whole = io.BytesIO()
    torch.save({"x": torch.ones(8)}, whole)
    data = bytearray(whole.getvalue())
    end64 = data.rindex(b"PK\6\6")
    for place, value, words in ((32, 1 << 50, "records in"), (40, 1 << 50, "bytes"), (48, 1 << 50, "outside the file")):
        lying = bytearray(data)
        struct.pack_into("<Q", lying, end64 + place, value)
        (tmp_path / "lying.pt").write_bytes(lying)
        assert "a directory" in (said := refusal(tmp_path / "lying.pt")) and words in said
    (tmp_path / "other.pt").write_bytes(_zip_of({"a.txt": b"hello"}))
    assert "a zip of something else" in refusal(tmp_path / "other.pt")
    two = _zip_of({"a/data.pkl": b"\x80\x02}.", "b/data/0": b""})
    (tmp_path / "two.pt").write_bytes(two)
    assert "more than one archive" in refusal(tmp_path / "two.pt")


def _zip_of(records: dict[str, bytes]) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as inside:
        for name, data in records.items():
            inside.writestr(name, data)
    return made.getvalue()


def test_tensors_that_claim_more_than_their_bytes(tmp_path):
    def tensor(shape: bytes, stride: bytes, numel: bytes = b"K\x04", offset: bytes = b"K\x00") -> bytes:
        storage = b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpu" + numel + b"tQ"
        built = b"(" + storage + offset + shape + stride + b"\x89ccollections\nOrderedDict\n)RtR"
        return b"\x80\x02}X\x01\x00\x00\x00xctorch._utils\n_rebuild_tensor_v2\n" + built + b"s."

    one = (b"K\x04\x85", b"K\x01\x85")
    for data, words in (
        (tensor(*one, numel=b"K\x05"), "key x: 16 bytes in its record, expected 20"),
        (tensor(b"K\x05\x85", b"K\x01\x85"), "key x: a view up to element 5, expected at most 4"),
        (tensor(*one, offset=b"K\x01"), "key x: a view up to element 5"),
        (tensor(b"J\xff\xff\xff\x7f\x85", b"K\x00\x85"), "key x: shape [2147483647] over 16 bytes"),
        (tensor(b"J\xff\xff\xff\xff\x85", b"K\x01\x85"), "makes no sense"),
    ):
        assert words in refusal(archive(tmp_path / "data_0.pt", data, records={"data/0": bytes(16)}))
    assert "no bytes for it (record data/0)" in refusal(archive(tmp_path / "data_0.pt", tensor(*one)))


def safetensors(path: Path, header: object, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def test_safetensors_headers_that_lie(tmp_path):
    good = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    path = tmp_path / "hs_0.safetensors"
    assert len(headers.read(safetensors(path, {"x": good}, bytes(8))).tensors) == 1
    for header, data, words in (
        ({"x": good | {"shape": [1 << 60]}}, bytes(8), "key x: bytes 0 to 8"),
        ({"x": good | {"shape": [2] * 50}}, bytes(8), "key x"),
        ({"x": good, "y": good}, bytes(8), "without gap or overlap"),
        ({"x": good | {"data_offsets": [4, 12]}}, bytes(12), "without gap or overlap"),
        ({"x": good | {"data_offsets": [8, 0]}}, bytes(8), "without gap or overlap"),
        ({"x": good | {"dtype": "F99"}}, bytes(8), "number type 'F99'"),
        ({"x": good | {"dtype": ["F32"]}}, bytes(8), "number type"),
        ({"x": good | {"shape": [-2]}}, bytes(8), "makes no sense"),
        ({"x": good | {"data_offsets": [0, 4, 8]}}, bytes(8), "makes no sense"),
        ({"x": 7}, bytes(8), "makes no sense"),
        (b"{" + b'"a":' * 1 + b"[" * 200_000 + b"]" * 200_000 + b"}", b"", "makes no sense"),
        (b'{"x":1,"x":2}', b"", "makes no sense"),
        ({"x": good}, bytes(7), "it is cut short"),
        ({"x": good}, bytes(9), "it is too long"),
    ):
        assert words in refusal(safetensors(path, header, data))
    assert "its header alone would take" in refusal(safetensors(path, {"x": good}, bytes(8), length=1 << 62))


def test_npy_headers_that_lie(tmp_path):
    path = tmp_path / "d2t.npy"
    for text, words in (
        (b"{'descr': '<i8', 'fortran_order': False, 'shape': (1000000000000,), }\n", "expected 8,000,000,000,0"),
        (b"{'descr': '<i8', 'fortran_order': False, 'shape': (2,) * 99, }\n", "makes no sense"),
        (b"{'descr': [('a', '<i8')], 'fortran_order': False, 'shape': (2,), }\n", "makes no sense"),
        (b"{'descr': '>i8', 'fortran_order': False, 'shape': (2,), }\n", "numbers of type >i8"),
        (b"(" * 9000 + b"\n", "makes no sense"),
    ):
        path.write_bytes(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + bytes(16))
        assert words in refusal(path)


# ---- Files that are no files


def test_links_pipes_devices_and_empty_files_are_a_line_each(tmp_path):
    (tmp_path / "data_0.pt").symlink_to(tmp_path / "data_1.pt")
    (tmp_path / "data_1.pt").symlink_to(tmp_path / "data_0.pt")
    (tmp_path / "data_2.pt").symlink_to(tmp_path / "nowhere.pt")
    os.mkfifo(tmp_path / "data_3.pt")
    (tmp_path / "data_4.pt").symlink_to(os.devnull)
    (tmp_path / "data_5.pt").write_bytes(b"")
    (tmp_path / "data_6.pt").write_text("a letter, not a tensor")
    (tmp_path / "data_7.pt").symlink_to(Path(os.devnull).with_name("zero"))
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "back").symlink_to(tmp_path, target_is_directory=True)
    report = inspection.inspect([tmp_path])
    said = {Path(fault.file).name: fault.line for fault in report.faults}
    words = ("a link that leads to no file", "symbolic links", "nowhere.pt: No such file", "no plain file", "no plain file",
             "it is empty (0 bytes)", "begin with b'a letter'", "no plain file")  # fmt: skip
    for number, word in enumerate(words):
        assert word in said[f"data_{number}.pt"], said
    assert len(report.faults) == 8 and report.code == 1


CONTAINERS = {"pt": "data_0.pt", "safetensors": "hs_0.safetensors", "npy": "d2t.npy", "freq": "token_freq.pt"}


def valid(container: str) -> bytes:
    """A small real file of each container."""
    states = [torch.arange(12.0).reshape(3, 4) + k for k in range(3)]
    ids = torch.tensor([5, 6, 7])
    made = io.BytesIO()
    if container == "pt":
        torch.save({"input_ids": ids, "loss_mask": ids > 5, "hidden_states": states}, made)
    elif container == "freq":
        torch.save({token: token % 7 for token in range(40)}, made)
    elif container == "npy":
        numpy.save(made, ids.numpy())
    else:
        return save({"hidden_states": torch.stack(states, 1), "token_ids": ids})
    return made.getvalue()


@pytest.mark.parametrize("container", CONTAINERS)
def test_a_file_cut_anywhere_is_refused(tmp_path, container):
    whole, path = valid(container), tmp_path / CONTAINERS[container]
    for length in sorted({*range(0, len(whole), max(1, len(whole) // 97)), len(whole) - 1}):
        path.write_bytes(whole[:length])
        with pytest.raises(Unreadable, match=f"{path.name} cannot be read: "):
            headers.read(path)


def changed(data: bytes, seed: int) -> bytes:
    """`data` with a few bytes, lengths or pieces changed, as bad disks and bad people do."""
    rng = random.Random(seed)
    made = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4, 16))):
        at = rng.randrange(len(made)) if made else 0
        how = rng.randrange(8)
        if how == 0 and made:
            made[at] ^= 1 << rng.randrange(8)
        elif how == 1 and made:
            made[at] = rng.randrange(256)
        elif how == 2:
            made[at : at + 4] = struct.pack("<I", rng.choice((0, 1, 0x7FFFFFFF, 0xFFFFFFFF, rng.getrandbits(32))))
        elif how == 3:
            made[at : at + 8] = struct.pack("<Q", rng.choice((0, 1 << 63, rng.getrandbits(64), 1 << 40)))
        elif how == 4:
            del made[at : at + rng.randrange(1, 64)]
        elif how == 5:
            made[at:at] = bytes(rng.randrange(256) for _ in range(rng.randrange(1, 32)))
        elif how == 6:
            begin = rng.randrange(len(made)) if made else 0
            made[at:at] = made[begin : begin + rng.randrange(1, 64)]
        else:  # the pickle's own instructions, where they matter most
            place = made.find(b"\x80\x02")
            if place >= 0:
                made[place + rng.randrange(2, 120)] = rng.choice([ord(op.code) for op in pickletools.opcodes])
    return bytes(made)


def look(path: Path, data: bytes) -> None:
    """Whatever the bytes are: headers and a contract, or one refusal; and what headers accept, the loader reads or refuses."""
    path.write_bytes(data)
    try:
        contracts.recognise(headers.read(path))
    except KitError:
        return
    report = inspection.inspect([path])
    assert report.code in (0, 1, 2) and all(fault.line for fault in report.faults)


QUICK = settings(max_examples=FUZZ, deadline=None, database=None, derandomize=True,
                 suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])  # fmt: skip
SLOWER = settings(QUICK, max_examples=FUZZ // 4)


@pytest.mark.parametrize("container", CONTAINERS)
@QUICK
@given(seed=st.integers(0, 2**62))
def test_no_change_of_a_valid_file_does_more_than_a_line(tmp_path, container, seed):
    look(tmp_path / CONTAINERS[container], changed(valid(container), seed))


@QUICK
@given(data=st.binary(max_size=400), start=st.sampled_from([b"", b"PK\3\4", b"\x93NUMPY\1\0", b"\x80\2", b"\0" * 8 + b"{"]))
def test_no_bytes_do_more_than_a_line(tmp_path, data, start):
    look(tmp_path / "hs_0.any", start + data)


# Whole instructions of a pickle, so that their combinations come further than single bytes would.
PIECES = [
    *(bytes([code]) for code in b"](})eaustbR.QN0\x85\x86\x87\x88\x89\x93\x94"), b"K\x00", b"K\x02", b"K\x04",
    b"J\xff\xff\xff\xff", b"M\xff\xff", b"q\x00", b"q\x01", b"h\x00", b"h\x01",
    b"r\xff\xff\xff\xff", b"j\xff\xff\xff\xff", b"\x8a\x01\x05",
    b"X\x07\x00\x00\x00storage", b"X\x01\x00\x00\x000", b"X\x03\x00\x00\x00cpu", b"X\x09\x00\x00\x00input_ids", b"\x8c\x03d2t",
    b"X\x0d\x00\x00\x00hidden_states", b"ctorch._utils\n_rebuild_tensor_v2\n", b"ctorch._utils\n_rebuild_tensor_v3\n",
    b"ctorch\nFloatStorage\n", b"ctorch\nLongStorage\n", b"ctorch.storage\nUntypedStorage\n", b"ctorch\nfloat32\n",
    b"ccollections\nOrderedDict\n", b"ctorch\nSize\n", b"cos\nsystem\n",
    b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x04tQ",
    b"ctorch._utils\n_rebuild_tensor_v2\n((X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x04tQ"
    b"K\x00K\x02K\x02\x86K\x02K\x01\x86\x89ccollections\nOrderedDict\n)RtR",
]  # fmt: skip


@QUICK
@given(pieces=st.lists(st.sampled_from(PIECES) | st.binary(max_size=2), max_size=60))
def test_no_pickle_in_an_archive_does_more_than_a_line(tmp_path, pieces):
    path = archive(tmp_path / "data_0.pt", b"\x80\x02" + b"".join(pieces) + b".", records={"data/0": bytes(16)})
    look(path, path.read_bytes())


JSON = st.recursive(st.none() | st.booleans() | st.integers(-5, 2**70) | st.floats() | st.text(max_size=5),
                    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
                    max_leaves=6)  # fmt: skip


@pytest.fixture(scope="module")
def beside(tmp_path_factory) -> Path:
    """Two samples with their data set and manifest, and a draft: everything that is told in JSON."""
    from eagle3kit.samples import StatesSample, Store

    home = tmp_path_factory.mktemp("beside")
    rows = [[5, 6, 7], [8, 9, 4, 3]]
    store = Store(home / "samples", "safetensors")
    store.begin(rows, [[0, 1, 1], [0, 0, 1, 1]], {"layers": [2, 4], "hidden_size": 4, "lengths": [3, 4], "tokens": ["a", "b"]})
    for number, row in enumerate(rows):
        store.write(number, StatesSample(torch.tensor(row), torch.ones(len(row)), list(torch.randn(3, len(row), 4))))
    (home / "draft").mkdir()
    (home / "draft" / "model.safetensors").write_bytes(save({"fc.weight": torch.ones(4, 12), "d2t": torch.zeros(3).long()}))
    (home / "draft" / "config.json").write_text(json.dumps(
        {"architectures": ["LlamaForCausalLMEagle3"], "hidden_size": 4, "vocab_size": 9, "draft_vocab_size": 3,
         "eagle_aux_hidden_state_layer_ids": [1, 2, 3], "eagle_config": {}, "target_hidden_size": 4}))  # fmt: skip
    return home


@pytest.mark.parametrize("name", ["samples/manifest.json", "samples/state.json", "draft/config.json"])
@SLOWER
@given(data=st.data())
def test_no_json_beside_the_tensors_does_more_than_a_line(beside, name, data):
    path = beside / name
    whole = path.read_text()
    told = json.loads(whole)
    key = data.draw(st.sampled_from(sorted(told)))
    path.write_text(json.dumps(told | {key: data.draw(JSON)}))
    try:
        assert inspection.inspect([path.parent]).code in (0, 1, 2)
    finally:
        path.write_text(whole)
