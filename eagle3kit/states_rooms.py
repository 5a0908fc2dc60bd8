"""Rooms of memory in which the states of a step wait for their files, shared with the processes that write them.

Made once, before the first request, and used over and over: page-locked memory is dear to make (a millisecond and more for what
the driver has not given before). It has no name in any file system, so nothing is left of it whatever happens to its engine, and
the size of /dev/shm does not matter.
"""

import contextlib
import mmap
import os
import queue
from dataclasses import dataclass

import torch


@dataclass
class Room:
    """`states` [tokens, states, H], which begin at byte `start` of the shared memory, and `slots` int64 [tokens] beside them.
    `parts`: how many lists of its files are still to be written."""

    states: torch.Tensor
    slots: torch.Tensor
    start: int
    parts: int = 0


class Rooms:
    """`count` rooms for `tokens` rows of `row` [states, H] each; `take` one, `give` it back."""

    def __init__(self, count: int, tokens: int, row: torch.Size, dtype: torch.dtype, *, locked: bool):
        size = tokens * row.numel() * dtype.itemsize
        apart = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        self.count, self.file = count, os.memfd_create("hidden-states")
        os.ftruncate(self.file, count * apart)
        memory = torch.frombuffer(mmap.mmap(self.file, count * apart), dtype=torch.uint8)
        self.locked = locked and _lock(memory)
        self._free: queue.SimpleQueue[Room] = queue.SimpleQueue()
        for start in range(0, count * apart, apart):
            states = memory[start : start + size].view(dtype).view(tokens, *row)
            self._free.put(Room(states, torch.empty(tokens, dtype=torch.int64, pin_memory=locked), start))

    def take(self) -> Room:
        """A free room; waits for one, so what is under way is bounded."""
        return self._free.get()

    def give(self, room: Room) -> None:
        """`room` may be used again."""
        self._free.put(room)

    def in_use(self) -> int:
        """Rooms whose files are not all written."""
        return self.count - self._free.qsize()

    def drain(self) -> None:
        """Wait until every room is free, and keep them."""
        for _ in range(self.count):
            self._free.get()


def _lock(memory: torch.Tensor) -> bool:
    """Whether the driver has page-locked `memory`. A copy into memory that is not waits for the GPU, but is as right."""
    if int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)) == 0:
        return True
    with contextlib.suppress(RuntimeError):  # CUDA remembers the failure and would blame the next kernel for it
        torch.ones(1, device="cuda")
    return False
