"""A safetensors file of hidden states, written without a copy and published whole; and how a reader waits for it.

The bytes are those of `safetensors.torch.save_file({"hidden_states": [T, states, H], "token_ids": int64 [T]})`, which copies
every tensor into a Python object first, under the interpreter's lock. Here the kernel takes them from where they lie. No torch is
needed to write: the processes that do start in no time (`states_writer`).
"""

import contextlib
import json
import os
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

# safetensors' names (format of its README): little-endian, in the order in which its writer lays tensors out, widest first.
NAMES = {"torch.int64": "I64", "torch.float32": "F32", "torch.bfloat16": "BF16", "torch.float16": "F16"}
PARTIAL, FAILED = ".part", ".failed"
LOOK_S = 1.0  # between two looks at a writer that keeps its reader waiting


def header(tokens: int, shape: Sequence[int], dtype: str, size: int) -> bytes:
    """The file's first bytes: the length of the JSON as uint64, little-endian, then the JSON, filled up with blanks to a
    multiple of 8 bytes. `shape` [T, states, H], `dtype` as torch prints it and `size` in bytes are those of the states.

    5 tokens, states float32 [5, 2, 3] -> token_ids at [0, 40), hidden_states at [40, 160).
    """
    ids = 8 * tokens
    told = {"token_ids": {"dtype": "I64", "shape": [tokens], "data_offsets": [0, ids]},
            "hidden_states": {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [ids, ids + size]}}  # fmt: skip
    text = json.dumps(told, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write(path: str, *contents: "bytes | memoryview", spent: dict[str, float] | None = None) -> int:
    """Publish `contents`, one after the other, as `path`: header, token ids int64 [T], states [T, states, H]; the bytes written.

    The name appears when the file is whole. `spent`: seconds to make, fill and name files are added to it. OSError when it cannot
    be written: nothing is left of it then.
    """
    parts = [part for part in map(memoryview, contents) if part.nbytes]
    draft, size = path + PARTIAL, sum(part.nbytes for part in parts)
    clock = [time.perf_counter()]
    file = os.open(draft, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644)
    try:
        try:
            clock.append(time.perf_counter())
            while parts:
                done = os.writev(file, parts)  # a write may stop short of 2 GiB; the rest follows
                while parts and done >= parts[0].nbytes:
                    done -= parts.pop(0).nbytes
                if parts:
                    parts[0] = parts[0][done:]
            clock.append(time.perf_counter())
        finally:
            os.close(file)
        os.replace(draft, path)
    except OSError:
        os.unlink(draft)
        raise
    if spent is not None:
        clock.append(time.perf_counter())
        for name, (start, end) in zip(("create_s", "fill_s", "name_s"), pairwise(clock), strict=True):
            spent[name] = spent.get(name, 0.0) + end - start
    return size


def give_up(path: str, why: BaseException) -> None:
    """Leave a note beside `path` that it will not come, so that its reader need not wait. A full disk takes it without its words;
    where nothing can be written at all the reader is left to its patience."""
    with contextlib.suppress(OSError):  # of a writer that died
        os.unlink(path + PARTIAL)
    try:
        Path(path + FAILED).write_text(str(why), encoding="utf-8")
    except OSError:
        with contextlib.suppress(OSError):
            Path(path + FAILED).touch()


def wait_for(path: Path, limit_s: float, alive: Callable[[], bool] = lambda: True) -> None:
    """Return once `path` is there, which it is whole or not at all. `alive` is asked now and then whether its writer is.

    Raises:
        OSError: its writer gave up or died, or `limit_s` seconds went by.
    """
    note, deadline, pause = Path(f"{path}{FAILED}"), time.monotonic() + limit_s, 0.0002
    look = time.monotonic() + LOOK_S
    while not path.exists():
        if note.exists():
            why = note.read_text(encoding="utf-8")
            note.unlink()
            raise OSError(28, why or "its writer gave up")
        if time.monotonic() > deadline:
            raise OSError(110, f"it did not come within {limit_s:.0f} s")
        if time.monotonic() > look:
            look += LOOK_S
            if not alive() and not path.exists():
                raise OSError(32, "its server died before it wrote it")
        time.sleep(pause)
        pause = min(2 * pause, 0.02)
