"""A safetensors file of hidden states, written without a copy and published whole; and how a reader waits for it.

The bytes are those of `safetensors.torch.save_file({"hidden_states": [T, states, H], "token_ids": int64 [T]})`, which copies
every tensor into a Python object first, under the interpreter's lock. Here the kernel takes them from where they lie.
"""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

# safetensors' names (format of its README): little-endian, in the order in which its writer lays tensors out, widest first.
NAMES = {"torch.int64": "I64", "torch.float32": "F32", "torch.bfloat16": "BF16", "torch.float16": "F16"}
PARTIAL, FAILED = ".part", ".failed"
LOOK_S = 1.0  # between two looks at a writer that keeps its reader waiting


def header(tokens: int, states: "Tensor") -> bytes:
    """The file's first bytes: the length of the JSON as uint64, little-endian, then the JSON, filled up with blanks to a
    multiple of 8 bytes.

    5 tokens, states float32 [5, 2, 3] -> token_ids at [0, 40), hidden_states at [40, 160).
    """
    ids, size = 8 * tokens, states.numel() * states.element_size()
    told = {"token_ids": {"dtype": "I64", "shape": [tokens], "data_offsets": [0, ids]},
            "hidden_states": {"dtype": NAMES[str(states.dtype)], "shape": list(states.shape),
                              "data_offsets": [ids, ids + size]}}  # fmt: skip
    text = json.dumps(told, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write(path: str, token_ids: "Tensor", states: "Tensor") -> int:
    """Publish `token_ids` int64 [T] and `states` [T, states, H], both contiguous and on the CPU, as `path`; the bytes written.

    The name appears when the file is whole. OSError when it cannot be written: nothing is left of it then.
    """
    import torch

    parts = [memoryview(header(len(token_ids), states))]
    parts += [memoryview(tensor.reshape(-1).view(torch.uint8).numpy()) for tensor in (token_ids, states) if tensor.numel()]
    draft, size = path + PARTIAL, sum(part.nbytes for part in parts)
    file = os.open(draft, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644)
    try:
        try:
            while parts:
                done = os.writev(file, parts)  # a write may stop short of 2 GiB; the rest follows
                while parts and done >= parts[0].nbytes:
                    done -= parts.pop(0).nbytes
                if parts:
                    parts[0] = parts[0][done:]
        finally:
            os.close(file)
        os.replace(draft, path)
    except OSError:
        os.unlink(draft)
        raise
    return size


def give_up(path: str, why: BaseException) -> None:
    """Leave a note beside `path` that it will not come, so that its reader need not wait; a full disk may refuse that too."""
    try:
        Path(path + FAILED).write_text(str(why), encoding="utf-8")
    except OSError:
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
