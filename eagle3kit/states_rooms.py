"""Rooms of memory in which the states of a step wait for their files, shared with the processes that write them.

Made once, before the first request, and used over and over: page-locked memory is dear to make (a millisecond and more for what
the driver has not given before). It has no name in any file system, so nothing is left of it whatever happens to its engine, and
the size of /dev/shm does not matter.

A room is a flag int64, token ids int64 [tokens] and states [tokens, states, H], one after the other. The flag tells the writers
that states have come: it is set to a number that they have been told, on a GPU by a copy in the same stream, right behind the
states. So nobody in the engine's process waits for a copy.
"""

import contextlib
import mmap
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

EDGE = 64  # bytes that a part of a room begins at a multiple of


@dataclass(frozen=True)
class Layout:
    """Where things lie, in bytes: `count` rooms, `apart` from each other; in each the flag, then `ids` and `states`. A row of
    states has the shape `row` [states, H], takes `size` bytes and is of `dtype`, as torch prints it. Plain values: a process
    without torch reads them."""

    count: int
    apart: int
    ids: int
    states: int
    row: tuple[int, ...]
    size: int
    dtype: str


@dataclass(frozen=True)
class Room:
    """`flag` int64 [1] and `states` [tokens, states, H] in shared memory, `slots` int64 [tokens] beside them."""

    number: int
    flag: torch.Tensor
    states: torch.Tensor
    slots: torch.Tensor
    _ids: memoryview

    def name(self, token_ids: Iterable[Any]) -> None:
        """Put the token ids (buffers of int64, one a request) before the states."""
        joined = b"".join(token_ids)
        self._ids[: len(joined)] = joined


class Rooms:
    """`count` rooms for `tokens` rows of `row` [states, H] each, in one piece of shared memory, the file descriptor `file`."""

    def __init__(self, count: int, tokens: int, row: torch.Size, dtype: torch.dtype, *, locked: bool):
        size = row.numel() * dtype.itemsize
        states = EDGE + _up(8 * tokens, EDGE)
        apart = _up(states + tokens * size, mmap.PAGESIZE)
        self.layout = Layout(count, apart, EDGE, states, tuple(row), size, str(dtype))
        self.file = os.memfd_create("hidden-states")
        os.ftruncate(self.file, count * apart)
        shared = mmap.mmap(self.file, count * apart)
        memory = torch.frombuffer(shared, dtype=torch.uint8)
        self.locked = locked and _lock(memory)
        self.free: list[Room] = []
        for number, start in enumerate(range(0, count * apart, apart)):
            held = memory[start + states : start + states + tokens * size].view(dtype).view(tokens, *row)
            self.free.append(Room(number, memory[start : start + 8].view(torch.int64), held,
                                  torch.empty(tokens, dtype=torch.int64, pin_memory=locked),
                                  memoryview(shared)[start + EDGE : start + EDGE + 8 * tokens]))  # fmt: skip


def _up(size: int, edge: int) -> int:
    return -(-size // edge) * edge


def _lock(memory: torch.Tensor) -> bool:
    """Whether the driver has page-locked `memory`. A copy into memory that is not waits for the GPU, but is as right."""
    if int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)) == 0:
        return True
    with contextlib.suppress(RuntimeError):  # CUDA remembers the failure and would blame the next kernel for it
        torch.ones(1, device="cuda")
    return False
