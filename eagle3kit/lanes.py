"""Intervals of time: their union, and which of several nested or overlapping spans has each instant. Integers (ns) throughout."""

import numpy as np

from eagle3kit.buckets import COLLECTIVES, ORDER

_COLLECTIVES = frozenset(ORDER.index(bucket) for bucket in COLLECTIVES)


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
    start: np.ndarray, end: np.ndarray, lane: np.ndarray, bucket: np.ndarray, owner: np.ndarray
) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """(each row's bucket, (row, start, end) of disjoint pieces within each lane), of rows sorted by start, then longest first.

    The bucket of a row inside an owner is the owner's, unless it is a collective.
    """
    bucket, pieces = bucket.copy(), []
    for number in np.unique(lane):
        rows = np.flatnonzero(lane == number)
        if (start[rows][1:] >= end[rows][:-1]).all():
            pieces.append((rows, start[rows], end[rows]))
            continue
        walked = _walk(start[rows].tolist(), end[rows].tolist(), bucket[rows].tolist(), owner[rows].tolist())
        bucket[rows] = walked[0]
        pieces.append((rows[np.array(walked[1], dtype=np.int64)], np.array(walked[2], np.int64), np.array(walked[3], np.int64)))
    row, first, last = (np.concatenate(column) for column in zip(*pieces, strict=True))
    return bucket, (row, first, last)


def _walk(
    starts: list[int], ends: list[int], buckets: list[int], owners: list[bool]
) -> tuple[list[int], list[int], list[int], list[int]]:
    """One lane, a stack of running spans, the one that began last on top: (buckets, rows, starts, ends of the pieces)."""
    found: list[int] = []
    rows: list[int] = []
    firsts: list[int] = []
    lasts: list[int] = []
    stack: list[tuple[int, int, int]] = []  # end, row, the bucket that owns what it calls or -1
    cursor = 0
    for row, (start, end, bucket, owns) in enumerate(zip(starts, ends, buckets, owners, strict=True)):
        while stack and stack[-1][0] <= start:
            over, ran, _ = stack.pop()
            if over > cursor:
                rows.append(ran)
                firsts.append(cursor)
                lasts.append(over)
                cursor = over
        owned = -1
        if stack:
            owned = stack[-1][2]
            if start > cursor:
                rows.append(stack[-1][1])
                firsts.append(cursor)
                lasts.append(start)
            if owned >= 0 and bucket not in _COLLECTIVES:
                bucket, owns = owned, False
        cursor = start
        found.append(bucket)
        stack.append((end, row, bucket if owns else owned))
    while stack:
        over, ran, _ = stack.pop()
        if over > cursor:
            rows.append(ran)
            firsts.append(cursor)
            lasts.append(over)
            cursor = over
    return found, rows, firsts, lasts
