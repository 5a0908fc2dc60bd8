"""Where the tokens of finished requests lie in vLLM's cache, and how many requests are saved in one go."""

from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class Pending(Protocol):
    """What vLLM says of a finished request: how many tokens it has, and its blocks in the cache, in order."""

    tokens: int
    block_ids: list[int]


def slots(pending: Sequence[Pending], block_size: int) -> "Tensor":
    """Where the tokens of `pending` lie in the cache, int64 [T₁ + T₂ + …]: token t of a request is in its block t // size, at
    t % size. Blocks [7, 2] of 4 and 6 tokens -> 28 29 30 31 8 9.

    All requests at once, for this is on the thread that drives the model: a step may finish fifty requests of 170 blocks each.
    """
    import numpy as np
    import torch

    lengths = np.array([save.tokens for save in pending], dtype=np.int64)
    needed = -(-lengths // block_size)  # a request may hold a block more
    named = chain.from_iterable(save.block_ids[:count] for save, count in zip(pending, needed.tolist(), strict=True))
    blocks = np.fromiter(named, dtype=np.int64, count=int(needed.sum()))
    held = np.full(len(blocks), block_size)  # the last block of a request may hold fewer
    some = needed > 0
    held[(needed.cumsum() - 1)[some]] -= (needed * block_size - lengths)[some]
    inside = np.arange(block_size)
    return torch.from_numpy((blocks[:, None] * block_size + inside)[inside < held[:, None]])


def shares(lengths: Sequence[int], count: int) -> list[tuple[int, int]]:
    """Consecutive runs of items, (first, after last), of about the same length in sum, at most `count`, none empty.

    Lengths 3 1 4 4 in two -> (0, 3) (3, 4): 8 and 4, since an item is not cut.
    """
    runs: list[tuple[int, int]] = []
    first, held, left = 0, 0, sum(lengths) + len(lengths)
    for at, length in enumerate(lengths):
        held += length + 1  # an item without length takes time too
        if held * (count - len(runs)) >= left:
            runs.append((first, at + 1))
            first, left, held = at + 1, left - held, 0
    return runs


def grouped(pending: Sequence[Pending], most: int) -> list[list[Any]]:
    """`pending` in order, in groups of at most `most` tokens; a longer request would be alone in its group."""
    groups: list[list[Any]] = []
    held = most + 1
    for save in pending:
        if held + save.tokens > most:
            groups.append([])
            held = 0
        groups[-1].append(save)
        held += save.tokens
    return groups
