"""Rooms of memory in which the states of a step wait for their files, shared with the processes that write them.

Made once, before the first request, and used over and over: page-locked memory is dear to make (a millisecond and more for what
the driver has not given before). It has no name in any file system, so nothing is left of it whatever happens to its engine, and
the size of /dev/shm does not matter.

A room is a flag int64 and states [tokens, states, H]. The flag tells the writers that states have come: it is set to a number
that they have been told, on a GPU by a copy in the same stream, right behind the states. So nobody in the engine's process waits
for a copy.
"""

import contextlib
import mmap
import os
from dataclasses import dataclass

import torch

EDGE = 64  # bytes for the flag, so that the states begin where any number type may


@dataclass(frozen=True)
class Layout:
    """Where things lie, in bytes: `count` rooms, `apart` from each other; each begins with its flag, `states` bytes on come the
    states. A row of them has the shape `row` [states, H], takes `size` bytes and is of `dtype`, as torch prints it. Plain values:
    a process without torch reads them."""

    count: int
    apart: int
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


class Rooms:
    """`count` rooms for `tokens` rows of `row` [states, H] each, in one piece of shared memory, the file descriptor `file`."""

    def __init__(self, count: int, tokens: int, row: torch.Size, dtype: torch.dtype, *, locked: bool):
        size = row.numel() * dtype.itemsize
        apart = -(-(EDGE + tokens * size) // mmap.PAGESIZE) * mmap.PAGESIZE
        self.layout = Layout(count, apart, EDGE, tuple(row), size, str(dtype))
        self.file = os.memfd_create("hidden-states")
        os.ftruncate(self.file, count * apart)
        self._memory = memory = torch.frombuffer(mmap.mmap(self.file, count * apart), dtype=torch.uint8)
        self.locked = locked and _lock(memory)
        self.free: list[Room] = []
        for number, start in enumerate(range(0, count * apart, apart)):
            flag, states = memory[start : start + 8], memory[start + EDGE : start + EDGE + tokens * size]
            self.free.append(Room(number, flag.view(torch.int64), states.view(dtype).view(tokens, *row),
                                  torch.empty(tokens, dtype=torch.int64, pin_memory=locked)))  # fmt: skip

    def take(self) -> Room:
        """A free room, its flag at 0, which is never told: the number that it had last may come again."""
        room = self.free.pop()
        room.flag.zero_()
        return room

    def close(self) -> None:
        """Give the memory back; what still looks at it keeps it."""
        if self.locked:
            torch.cuda.cudart().cudaHostUnregister(self._memory.data_ptr())
            self.locked = False
        self.free.clear()
        os.close(self.file)


def _lock(memory: torch.Tensor) -> bool:
    """Whether the driver has page-locked `memory`. A copy into memory that is not waits for the GPU, but is as right."""
    if int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)) == 0:
        return True
    with contextlib.suppress(RuntimeError):  # CUDA remembers the failure and would blame the next kernel for it
        torch.ones(1, device="cuda")
    return False
