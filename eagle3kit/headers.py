"""What a tensor file holds, told from its header: keys, shapes, number types, bytes. The content is not read.

    torch zip     torch.save's archive (.pt): the directory at its end, and `data.pkl` read by `pickled`, never run
    safetensors   eight bytes of length, JSON, the tensors end to end (github.com/huggingface/safetensors, README "Format")
    npy           numpy's `\\x93NUMPY`, a line that names type and shape, one array (numpy/lib/format.py)

Every number in a header is checked against the size of the file before it is believed, so a hostile one costs no memory: a
file takes a few reads and some tens of kilobytes, whatever its size. Links that lead nowhere, pipes, devices, empty, short
and foreign files are an `Unreadable` each.
"""

import functools
import json
import math
import os
import re
import stat
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3kit import pickled
from eagle3kit.archive import Archive, NotAnArchive
from eagle3kit.faults import Fault, Unreadable

AGAIN = "copy it again, or delete it and run its stage again"
MOST_TENSORS = 100_000
MOST_NESTING = 6
MOST_JSON = 16 << 20
SAFETENSORS = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32", "I16": "int16",
    "I8": "int8", "U8": "uint8", "U16": "uint16", "U32": "uint32", "U64": "uint64", "BOOL": "bool", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2", "C64": "complex64",
}  # fmt: skip
SUFFIXES = {".pt": "torch zip", ".pth": "torch zip", ".ckpt": "torch zip", ".bin": "torch zip", ".safetensors": "safetensors",
            ".npy": "npy"}  # fmt: skip
NUMPY_HEADER = re.compile(
    rb"\{'descr': '([<>|=])([a-zA-Z])(\d*)', 'fortran_order': (True|False), 'shape': \(((?:\d+,? ?)*)\),? ?\}\s*")
NUMPY_KINDS = {"b": "bool", "i": "int", "u": "uint", "f": "float", "c": "complex"}


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a file; `key` is its path in the file, such as `hidden_states[2]`, empty for a file of one tensor."""

    key: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int


@dataclass(frozen=True)
class Headers:
    """What one file holds. `content` nests TensorInfo as the file nests its tensors; for npy it is one TensorInfo. Files with
    equal descriptions share it: it is to be read only."""

    path: Path
    container: str
    size: int
    content: Any

    @property
    def tensors(self) -> tuple[TensorInfo, ...]:
        """All tensors, in the file's order."""
        return tuple(_tensors(self.content))


def read(path: Path | str) -> Headers:
    """The headers of one file, by what its first bytes say; a name that says otherwise is refused.

    Raises:
        Unreadable: missing, no plain file, empty, cut short, a pickle that wants to run code (named), of a kind that is not
            read here, or with a header that its size gives the lie.
    """
    path = Path(path)
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # asked before it is opened: a pipe would wait, a device may act
            raise _refused(path, "it is no plain file", "a tensor file", "name the file itself",
                           "a pipe or device has no header, and reading it may never end")  # fmt: skip
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not path.is_symlink():
            raise Unreadable(Fault(str(path), "", "a tensor file", "it does not exist", "",
                                   "run the stage that makes it")) from None  # fmt: skip
        if path.is_symlink():
            raise _refused(path, f"a link that leads to no file ({os.readlink(path)[-80:]}: {error.strerror})", "a tensor file",
                           "point it at the file, or remove it", "there is nothing to read") from None  # fmt: skip
        raise _refused(path, str(error.strerror or error), "a tensor file", AGAIN) from None
    except ValueError:  # a name with a zero byte
        raise _refused(path, "no file can have this name", "a tensor file", "name the file itself") from None
    try:
        size = os.fstat(descriptor).st_size
        start = os.pread(descriptor, 16, 0)
        if start.startswith(b"PK"):
            found = _torch_zip(descriptor, size, path)
        elif start.startswith(b"\x93NUMPY"):
            found = _npy(descriptor, size, path)
        elif start[8:9] == b"{":
            found = _safetensors(descriptor, size, path)
        else:
            raise _foreign(descriptor, size, path, start)
    except OSError as error:
        raise _refused(path, str(error.strerror or error), "a tensor file", AGAIN) from None
    finally:
        os.close(descriptor)
    named = SUFFIXES.get(path.suffix, found.container)
    if named != found.container:  # whoever goes by the name, and trainers do, opens it with the wrong reader
        way_out = f"rename it to end in {next(suffix for suffix, kind in SUFFIXES.items() if kind == found.container)}"
        raise _refused(path, f"a file of kind {found.container}", f"{named}, as its name says", way_out, "readers go by the name")
    return found


def _refused(path: Path, found: str, expected: str, way_out: str, causes: str = "") -> Unreadable:
    return Unreadable(Fault(str(path), "", expected, found, causes or "it is cut short or not a tensor file", way_out))


def _wants(path: Path, refusal: pickled.Refused) -> Unreadable:
    if refusal.wants:
        return _refused(path, str(refusal), "tensors, numbers and text only", "load it with nothing; get the tensors alone "
                        "from who made it", "it is not a tensor file but a program; nothing of it was run")  # fmt: skip
    return _refused(path, str(refusal), "what torch.save writes of tensors", AGAIN)


def _foreign(descriptor: int, size: int, path: Path, start: bytes) -> Unreadable:
    """Why a file of no known kind is refused: empty, a bare pickle (named if it wants to run something), or unknown."""
    if not size:
        return _refused(path, "it is empty (0 bytes)", "a tensor file", AGAIN, "nothing was written, or the copy failed")
    if start.startswith(b"version ") and b"git-lfs" in os.pread(descriptor, 64, 0):
        return _refused(path, "Git LFS's pointer to it", "the file itself", "run `git lfs pull` where it was cloned",
                        "only the name of the content was copied")  # fmt: skip
    if start[:1] in (b"\x80", b"c", b"("):
        try:
            pickled.describe(os.pread(descriptor, pickled.MOST_BYTES, 0))
        except pickled.Refused as refusal:
            if refusal.wants:
                return _wants(path, refusal)
        way_out = "load it with torch.load(weights_only=True) and save it again"
        return _refused(path, "a bare pickle, or a file of torch older than 1.6", "torch.save's archive", way_out,
                        "it is not a tensor file of today")  # fmt: skip
    return _refused(path, f"{size:,} bytes that begin with {start[:8]!r}", "a torch archive, safetensors or npy", AGAIN)


# ---- torch.save


class _Wrong(Exception):
    """A description that its own numbers give the lie: (key, found, expected)."""


def _torch_zip(descriptor: int, size: int, path: Path) -> Headers:
    try:
        archive = Archive(descriptor, size)
        data = archive.text("data.pkl", pickled.MOST_BYTES)
        if "byteorder" in archive.records and archive.text("byteorder", 64) != b"little":
            raise _refused(path, "numbers in big-endian order", "little-endian", "save it again on a machine of today",
                           "readers of today take them for other numbers")  # fmt: skip
        # Samples of one length have one description, to the byte: it is made out once.
        content, storages = _known_description(data) if len(data) < 1 << 13 else _description(data)
        for key, record, wanted in storages:
            has = archive.records.get(record)
            if has is None:
                raise _Wrong(key, f"no bytes for it (record {record})", "a record for each tensor")
            if has[1] != wanted:
                raise _Wrong(key, f"{has[1]:,} bytes in its record", f"{wanted:,}")
    except NotAnArchive as error:
        raise _refused(path, str(error), "torch.save's archive", AGAIN) from None
    except pickled.Refused as refusal:
        raise _wants(path, refusal) from None
    except _Wrong as error:
        key, found, expected = error.args
        raise Unreadable(Fault(str(path), key, expected, f"key {key}: {found}" if key else found,
                               "its shapes and its bytes do not belong together", AGAIN)) from None  # fmt: skip
    return Headers(path, "torch zip", size, content)


def _description(data: bytes) -> tuple[Any, tuple[tuple[str, str, int], ...]]:
    """(content, a (key, record, bytes) for each tensor) of a data.pkl; Refused or _Wrong."""
    left, storages = [min(MOST_TENSORS, 64 + len(data) // 16)], []  # to describe one takes 60 bytes at least

    def told(key: str, value: Any, depth: int) -> Any:
        if type(value) not in (pickled.Tensor, list, tuple, dict):
            return value
        left[0] -= 1
        if depth > MOST_NESTING or left[0] < 0:  # a list may hold itself, or one list a million times
            raise _Wrong("", f"more than {MOST_NESTING} levels, or one thing many times over", "each tensor once")
        if type(value) is pickled.Tensor:
            storages.append((key, f"data/{value.storage.key}", _storage_bytes(value)))
            return _checked(key, value)
        inside = value.values() if type(value) is dict else value
        if not any(type(inner) in (pickled.Tensor, list, tuple, dict) for inner in inside):
            return value  # numbers and text; a table of counts may have many
        if type(value) is dict:
            return {name: told(f"{key}.{name}" if key else str(name), inner, depth + 1) for name, inner in value.items()}
        return [told(f"{key}[{place}]", inner, depth + 1) for place, inner in enumerate(value)]

    return told("", pickled.describe(data), 0), tuple(storages)


_known_description = functools.lru_cache(maxsize=1024)(_description)


def _storage_bytes(tensor: pickled.Tensor) -> int:
    return tensor.storage.numel * pickled.SIZES.get(tensor.storage.dtype, 1)


def _checked(key: str, tensor: pickled.Tensor) -> TensorInfo:
    """A tensor whose storage is wide enough for what its shape and strides reach."""
    size, wanted, count = pickled.SIZES[tensor.dtype], _storage_bytes(tensor), math.prod(tensor.shape)
    reach = tensor.offset + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride, strict=True)) + 1 if count else 0
    if reach * size > wanted:
        raise _Wrong(key, f"a view up to element {reach:,}", f"at most {wanted // size:,}, all its record holds")
    if count * size > max(wanted, 4096):  # a small record seen again and again (expand) turns large when it is copied
        raise _Wrong(key, f"shape {list(tensor.shape)} over {wanted:,} bytes", "a tensor of its own (clone before saving)")
    return TensorInfo(key, tensor.shape, tensor.dtype, count * size)


# ---- safetensors


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a name stands twice")
    return made


def _safetensors(descriptor: int, size: int, path: Path) -> Headers:
    (length,) = struct.unpack("<Q", os.pread(descriptor, 8, 0))
    if length > size - 8:
        raise _refused(path, f"{size:,} bytes, its header alone would take {length:,}", "a whole safetensors file", AGAIN)
    if length > MOST_JSON:
        raise _refused(path, f"a header of {length:,} bytes", f"at most {MOST_JSON:,}", AGAIN)
    try:
        header = json.loads(os.pread(descriptor, length, 8).decode(), object_pairs_hook=_once)
        header.pop("__metadata__", None)
        rows = sorted((tuple(entry["data_offsets"]), name, entry["dtype"], tuple(entry["shape"]))
                      for name, entry in header.items())  # fmt: skip
        if len(rows) > MOST_TENSORS or any(len(offsets) != 2 for offsets, *_ in rows):
            raise ValueError("too many tensors, or offsets that are no pair")
        if any(type(n) is not int or n < 0 for offsets, _, _, shape in rows for n in (*offsets, *shape)):
            raise ValueError("a size that is no number")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, UnicodeDecodeError) as error:
        raise _refused(path, f"a header that makes no sense ({type(error).__name__})", "a safetensors header", AGAIN) from None
    end, tensors = 0, {}
    for (start, stop), name, kind, shape in rows:
        dtype = SAFETENSORS.get(kind) if isinstance(kind, str) else None
        if dtype is None:
            raise _refused(path, f"key {name}: number type {kind!r}", "one of " + ", ".join(SAFETENSORS), "save it as bfloat16",
                           "no reader of this field takes them")  # fmt: skip
        taken = math.prod(shape) * pickled.SIZES[dtype] if len(shape) <= pickled.MOST_DIMENSIONS else -1
        if start != end or stop - start != taken:
            raise _refused(path, f"key {name}: bytes {start:,} to {stop:,} for {dtype} {list(shape)[:9]}",
                           f"{end:,} to {end + max(taken, 0):,}, without gap or overlap", AGAIN)  # fmt: skip
        tensors[name], end = TensorInfo(name, shape, dtype, taken), stop
    if 8 + length + end != size:
        state = "cut short" if size < 8 + length + end else "too long"
        raise _refused(path, f"{size:,} bytes", f"{8 + length + end:,}, as its header says", AGAIN, f"it is {state}")
    return Headers(path, "safetensors", size, {name: tensors[name] for name in header})


# ---- numpy


def _npy(descriptor: int, size: int, path: Path) -> Headers:
    start = os.pread(descriptor, 12, 0)
    wide = 2 if start[6:7] == b"\x01" else 4
    length = int.from_bytes(start[8 : 8 + wide], "little")
    text = os.pread(descriptor, min(length, 10_000), 8 + wide)
    if b"|O" in text[:200]:
        raise _refused(path, "an array of Python objects, which is a pickle", "numbers", "save it with allow_pickle=False",
                       "it is not a tensor file but a program; nothing of it was run")  # fmt: skip
    fits = NUMPY_HEADER.fullmatch(text) if len(text) == length else None
    if fits is None or len(fits[5]) > 200:
        raise _refused(path, "a header that makes no sense", "type and shape of one plain array", AGAIN)
    order, letter, width = (part.decode() for part in fits.groups()[:3])
    shape = tuple(int(n) for n in fits[5].replace(b",", b" ").split())
    dtype = NUMPY_KINDS.get(letter, letter) + ("" if letter == "b" else str(8 * int(width or 0)))
    if dtype not in pickled.SIZES or order == ">" or len(shape) > pickled.MOST_DIMENSIONS:
        raise _refused(path, f"numbers of type {order}{letter}{width}", "little-endian bool, integers or floats",
                       "save it as int64 or bool", "no reader of this field takes them")  # fmt: skip
    taken = math.prod(shape) * pickled.SIZES[dtype]
    if size != 8 + wide + length + taken:
        raise _refused(path, f"{size:,} bytes", f"{8 + wide + length + taken:,}, as its header says", AGAIN)
    return Headers(path, "npy", size, TensorInfo("", shape, dtype, taken))


def _tensors(content: Any) -> Iterator[TensorInfo]:
    if isinstance(content, TensorInfo):
        yield content
    elif isinstance(content, (list, tuple)):
        for inner in content:
            yield from _tensors(inner)
    elif isinstance(content, dict):
        for inner in content.values():
            yield from _tensors(inner)
