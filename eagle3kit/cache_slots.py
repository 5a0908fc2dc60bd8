"""Where the tokens of finished requests lie in vLLM's cache, and how many requests are saved in one go."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class Pending(Protocol):
    """What vLLM says of a finished request: its tokens int64 [T], and its blocks in the cache, in order."""

    token_ids: "Tensor"
    block_ids: list[int]


def slots(pending: Sequence[Pending], block_size: int) -> "Tensor":
    """Where the tokens of `pending` lie in the cache, int64 [T₁ + T₂ + …]: token t of a request is in its block t // size, at
    t % size. Blocks [7, 2] of 4 and 6 tokens -> 28 29 30 31 8 9."""
    import torch

    found = []
    for save in pending:
        blocks = torch.tensor(save.block_ids, dtype=torch.int64)
        every = (blocks[:, None] * block_size + torch.arange(block_size)).flatten()
        found.append(every[: save.token_ids.shape[0]])
    return torch.cat(found)


def grouped(pending: Sequence[Any], most: int) -> list[list[Any]]:
    """`pending` in order, in groups of at most `most` tokens; a longer request would be alone in its group."""
    groups: list[list[Any]] = []
    held = most + 1
    for save in pending:
        tokens = save.token_ids.shape[0]
        if held + tokens > most:
            groups.append([])
            held = 0
        groups[-1].append(save)
        held += tokens
    return groups
