"""Intervals of time: their union, and which of several nested or overlapping spans has each instant. Integers (ns) throughout."""

import math

import numpy as np


def union(starts: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Disjoint intervals in order that cover the same: [0, 4), [2, 6), [6, 7), [9, 9) -> [0, 7). Empty ones vanish."""
    full = ends > starts
    starts, ends = starts[full], ends[full]
    if not len(starts):
        return starts, ends
    order = np.argsort(starts, kind="stable")
    starts, reach = starts[order], np.maximum.accumulate(ends[order])
    new = starts[1:] > reach[:-1]
    return starts[np.concatenate([[True], new])], reach[np.concatenate([new, [True]])]


def length(intervals: tuple[np.ndarray, np.ndarray]) -> int:
    """The sum of what disjoint intervals (starts, ends) cover."""
    return int((intervals[1] - intervals[0]).sum())


def leaves(
    start: np.ndarray, end: np.ndarray, lane: np.ndarray, bucket: np.ndarray, owns: np.ndarray, keeps: np.ndarray
) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """(each row's bucket, (row, start, end) of disjoint pieces within each lane), of rows sorted by start, then longest first.

    The bucket of a row inside a running one that `owns` is the owner's, and it owns nothing itself, unless it `keeps` its own.
    """
    bucket, pieces = bucket.copy(), []
    for number in np.unique(lane):
        rows = np.flatnonzero(lane == number)
        if (start[rows][1:] >= end[rows][:-1]).all():
            pieces.append((rows, start[rows], end[rows]))
            continue
        walked = _walk(start[rows].tolist(), end[rows].tolist(), bucket[rows].tolist(), owns[rows].tolist(),
                       keeps[rows].tolist())  # fmt: skip
        bucket[rows] = walked[0]
        pieces.append((rows[np.array(walked[1], dtype=np.int64)], np.array(walked[2], np.int64), np.array(walked[3], np.int64)))
    row, first, last = (np.concatenate(column) for column in zip(*pieces, strict=True))
    return bucket, (row, first, last)


def _walk(
    starts: list[int], ends: list[int], buckets: list[int], owning: list[bool], keeping: list[bool]
) -> tuple[list[int], list[int], list[int], list[int]]:
    """One lane, a stack of running spans, the one that began last on top: (buckets, rows, starts, ends of the pieces).

    An entry is (end, row, owner); an owner is (end, bucket, the owner around it). Spans may lie across each other (a
    collective on another thread outlives the operator that began it), so an owner is asked whether it still runs.
    """
    found: list[int] = []
    rows: list[int] = []
    firsts: list[int] = []
    lasts: list[int] = []
    stack: list[tuple[int, int, tuple | None]] = []
    cursor = 0

    def leave(until: float) -> None:
        """Take off the stack what has ended by then; each span gets the time since the last piece."""
        nonlocal cursor
        while stack and stack[-1][0] <= until:
            over, ran, _ = stack.pop()
            if over > cursor:
                rows.append(ran)
                firsts.append(cursor)
                lasts.append(over)
                cursor = over

    for row, (start, end, bucket, owns, keeps) in enumerate(zip(starts, ends, buckets, owning, keeping, strict=True)):
        leave(start)
        owner = None
        if stack:
            if start > cursor:
                rows.append(stack[-1][1])
                firsts.append(cursor)
                lasts.append(start)
            owner = stack[-1][2]
            while owner and owner[0] <= start:
                owner = owner[2]
            if owner and not keeps:
                bucket, owns = owner[1], False
        cursor = start
        found.append(bucket)
        stack.append((end, row, (end, bucket, owner) if owns else owner))
    leave(math.inf)
    return found, rows, firsts, lasts
