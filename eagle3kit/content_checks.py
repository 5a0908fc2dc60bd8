"""The numbers inside many samples, one process or several; each file is opened, looked at and let go."""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from eagle3kit import content, neighbours
from eagle3kit.errors import KitError
from eagle3kit.faults import Fault, Unreadable
from eagle3kit.neighbours import Surroundings
from eagle3kit.samples import load

FEW = 64  # below, other processes take longer to start than the work takes


@dataclass(frozen=True)
class Work:
    """One sample whose numbers are to be looked at, and what lies beside it."""

    path: Path
    number: int | None
    kind: str
    beside: Surroundings


def check(path: Path, number: int | None, beside: Surroundings) -> list[Fault]:
    """Every fault of one sample's numbers, and of its tokens against manifest and data set."""
    try:
        parts = content.take_apart(load(path), path)
    except Unreadable as error:
        return [error.fault]
    except KitError as error:
        return [Fault(str(path), "", "a sample", str(error), "", content.REMAKE)]
    mask = None if parts.mask is None else parts.mask.tolist()
    found = content.faults(parts, str(path))
    if parts.mask is None and beside.rows is not None and number is not None and number < len(beside.rows):
        found += _mask_of_row(beside, number)
    return found + neighbours.tokens_differ(path, number, parts.ids.tolist(), mask, beside)


def _mask_of_row(beside: Surroundings, number: int) -> list[Fault]:
    """The mask of a states file lies in the data set."""
    import torch

    ids, mask = beside.rows.row(number)
    alone = content.Parts(torch.tensor(ids), torch.tensor(mask), [])
    found = content.faults(alone, str(beside.root), "prepare this row again")
    return [replace(fault, key=f"{fault.key}, row {number}") for fault in found]


def check_all(
    work: Sequence[Work], *, parallel: bool, progress: Callable[[Iterable[Any], int], Iterable[Any]] | None = None
) -> Iterator[tuple[str, list[Fault]]]:
    """(kind, faults) of each, in order; with `parallel`, and enough of them, on all cores."""
    import multiprocessing

    wrap = progress or (lambda items, total: items)
    cores = len(os.sched_getaffinity(0))
    if not parallel or len(work) < FEW or cores == 1:
        for one in wrap(work, len(work)):
            yield one.kind, check(one.path, one.number, one.beside)
        return
    # Processes of their own start: threads of torch do not survive a fork.
    roots = list({one.beside.root: one.beside for one in work}.values())
    with multiprocessing.get_context("spawn").Pool(cores, _begin, (roots,)) as pool:
        told = pool.imap(_one, [(one.path, one.number, one.beside.root) for one in work], chunksize=8)
        for one, faults in zip(work, wrap(told, len(work)), strict=True):
            yield one.kind, faults


_beside: dict[Path, Surroundings] = {}


def _begin(surroundings: list[Surroundings]) -> None:
    import torch

    torch.set_num_threads(1)
    _beside.update({one.root: one for one in surroundings})


def _one(task: tuple[Path, int | None, Path]) -> list[Fault]:
    path, number, root = task
    return check(path, number, _beside[root])
