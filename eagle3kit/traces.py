"""Where decode time goes: every kernel of a rank's trace in exactly one bucket, idle time, and the all-reduce taken apart.

Time is measured by interval union, never by adding up durations: kernels of several streams overlap, operators nest.
1. Within a lane (a GPU stream, a CPU thread) each instant belongs to the span that began last: the innermost operator gets
   its self time. (Kernels of a stream follow each other; then nothing changes.)
2. Across lanes an instant that several buckets fill is given to the first of them in `buckets.ORDER`, compute before
   communication: `exposed_ms`. `total_ms` is the union of a bucket's own spans, whatever else ran.
3. What no span fills is idle: launch gaps on a GPU; on CPU Python, scheduling, and waiting outside operators.
So exposed times and idle add up to the wall time.

*All-reduce.* A rank that comes early waits for the last one inside the collective, so a rank's all-reduce time says little.
Instance by instance (the i-th of each rank is the same collective), the least duration over ranks is the *transfer*, what is
above it *waiting*.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from eagle3kit.buckets import ASYNCHRONOUS, COLLECTIVES, FRAME, NOTE, ORDER, OWNERS, WRAPPER, Bucket, bucket_of
from eagle3kit.errors import KitError
from eagle3kit.lanes import leaves, length, union
from eagle3kit.trace_file import KERNELS, Trace, read

# What vLLM's workers call a step in which no request reads its prompt: "execute_context_0(0)_generation_8(8)".
DECODE_STEP = r"^execute_context_0\(.*_generation_[1-9]"

_AR = ORDER.index("all-reduce")


class NoSteps(KitError):
    """No step is annotated as asked, or none that is to be looked at."""


class UnequalRanks(KitError):
    """Ranks whose windows do not hold the same steps or all-reduces."""


@dataclass(frozen=True, slots=True)
class Window:
    """The part of a trace that is looked at, ns of its clock; `steps` in it, None where the whole trace is taken."""

    start: int
    end: int
    steps: int | None


@dataclass(frozen=True, slots=True)
class BucketTime:
    """ms that only this bucket is given, ms while any span of it ran, and how many spans began."""

    exposed_ms: float
    total_ms: float
    count: int


@dataclass(frozen=True, slots=True)
class KernelTime:
    """A kernel or operator by name: its self time in the window, before overlap across lanes is resolved."""

    name: str
    bucket: Bucket
    count: int
    ms: float


@dataclass(frozen=True, eq=False)
class RankProfile:
    """One rank's window. `buckets` holds all nine, in `buckets.ORDER`; `kernels` are sorted by time, the longest first.

    all_reduce_us: float64 [instances], durations in order of their start, waiting included. unaccounted: |Σ exposed + idle -
    wall| / wall, where idle is the wall time less the union of all spans, computed on its own: at most 0.01, else the profile
    is not to be trusted.
    """

    path: Path
    rank: int | None
    world_size: int | None
    device: str  # "gpu": kernels and copies; "cpu": operators
    wall_ms: float
    busy_ms: float
    idle_ms: float
    steps: int | None
    buckets: dict[Bucket, BucketTime]
    kernels: tuple[KernelTime, ...]
    all_reduce_us: np.ndarray
    unaccounted: float
    ignored: Mapping[str, int]

    @property
    def step_ms(self) -> float | None:
        """Wall time a step, gaps between steps included."""
        return self.wall_ms / self.steps if self.steps else None

    @property
    def unknown(self) -> tuple[KernelTime, ...]:
        """What no rule of `buckets` knows."""
        return tuple(kernel for kernel in self.kernels if kernel.bucket == "unknown")

    @property
    def all_reduce_ms(self) -> float:
        """The sum over instances: what a kernel summary shows, waiting included."""
        return float(self.all_reduce_us.sum()) / 1000


@dataclass(frozen=True, eq=False)
class Comparison:
    """The same window on several ranks. Sums are over the window, in ms; lists follow the order of `ranks`.

    transfer_us: float64 [instances], the least over ranks. waiting_us: float64 [ranks, instances], what is above it.
    transfer_ms and waiting_ms (the mean over ranks): None with one rank, whose waiting nobody can tell. straggler: the rank
    that waited least, which the others waited for; None where nobody did. whole: traces of all ranks are here, so the least
    duration is the least there is. remark: what is odd about the window, "" for nothing.
    """

    ranks: tuple[int | None, ...]
    steps: int | None
    instances: int
    transfer_us: np.ndarray
    waiting_us: np.ndarray
    all_reduce_ms: tuple[float, ...]
    busy_ms: tuple[float, ...]
    transfer_ms: float | None
    waiting_ms: float | None
    straggler: int | None
    whole: bool
    remark: str = ""


def window(trace: Trace, annotation: str | None = None, *, skip: int = 0) -> Window:
    """The steps that the regular expression `annotation` names, or from the first kernel to the last.

    n annotated spans give n - 1 whole steps, from the start of the first to the start of the last, so that what lies between
    steps is counted with them; a single one gives itself. All that lies between counts, so name steps that follow each other.
    On a GPU its own copies of the annotations are taken, which lie where the kernels ran; else the host's. The first `skip`
    spans are left out: ranks begin to be profiled at different moments, and the first step of the early one waits for that.

    Raises:
        NoSteps: nothing is annotated so, or no more than `skip` spans are; the message lists what there is.
    """
    if annotation is None:
        rows = _rows(trace)
        return Window(int(trace.start[rows].min()), int(trace.end[rows].max()), None)
    wanted = np.array([bool(re.search(annotation, name)) for name in trace.names], dtype=bool)
    for category in ("gpu_user_annotation", "user_annotation"):
        rows = trace.of(category)
        rows = rows[wanted[trace.name[rows]]]
        if len(rows):
            # A GPU repeats an annotation for each stream: take the stream that has most. What lies within another is no step.
            rows = rows[trace.lane[rows] == np.bincount(trace.lane[rows]).argmax()]
            rows = rows[np.lexsort((-trace.end[rows], trace.start[rows]))]
            outer = np.append(True, trace.start[rows][1:] >= np.maximum.accumulate(trace.end[rows])[:-1])
            starts, ends = trace.start[rows][outer][skip:], trace.end[rows][outer][skip:]
            if not len(starts):
                raise NoSteps(f"{trace.path}: {outer.sum()} steps are annotated {annotation!r}, all of which are to be skipped")
            last = ends[0] if len(starts) == 1 else starts[-1]
            return Window(int(starts[0]), int(last), max(1, len(starts) - 1))
    known = sorted({trace.names[i] for i in np.unique(trace.name[trace.of("user_annotation", "gpu_user_annotation")])})
    more = f" and {len(known) - 12} more" if len(known) > 12 else ""
    listed = ", ".join(known[:12]) or "no annotation at all"
    raise NoSteps(f"{trace.path}: no step is annotated {annotation!r}; there is {listed}{more}")


def profile(trace: Trace, where: Window) -> RankProfile:
    """The buckets of one rank within a window.

    Raises:
        KitError: nothing ran in the window, or kernels of several GPUs are in one trace.
    """
    device, every = _device(trace), _rows(trace)
    rows = every[(trace.end[every] > where.start) & (trace.start[every] < where.end)]
    wall = where.end - where.start
    if not len(rows) or wall <= 0:
        raise KitError(f"{trace.path}: no kernel or operator ran in the {wall / 1e6:.3f} ms looked at")
    rows = rows[np.lexsort((-trace.end[rows], trace.start[rows]))]  # what contains others comes before them
    start, end, name = np.clip(trace.start[rows], where.start, None), np.clip(trace.end[rows], None, where.end), trace.name[rows]
    by_name = np.array([ORDER.index(bucket_of(text)) for text in trace.names], dtype=np.int64)
    owns = np.array([device == "cpu" and bucket_of(text) in OWNERS and not ASYNCHRONOUS.match(text) for text in trace.names])
    keeps = np.array([bucket_of(text) in COLLECTIVES and text != NOTE for text in trace.names])
    bucket, (of_row, leaf_start, leaf_end) = leaves(start, end, trace.lane[rows], by_name[name], owns[name], keeps[name])
    began = trace.start[rows] >= where.start
    times, covered = {}, (np.zeros(0, np.int64), np.zeros(0, np.int64))
    for number, label in enumerate(ORDER):
        mine, of_leaf = bucket == number, bucket[of_row] == number
        before = length(covered)
        covered = union(np.concatenate([covered[0], leaf_start[of_leaf]]), np.concatenate([covered[1], leaf_end[of_leaf]]))
        times[label] = BucketTime((length(covered) - before) / 1e6, length(union(start[mine], end[mine])) / 1e6,
                                  int((mine & began).sum()))  # fmt: skip
    busy = length(union(start, end))
    exposed = sum(time.exposed_ms for time in times.values())
    spent = np.bincount(of_row, weights=leaf_end - leaf_start, minlength=len(rows)) / 1e6
    reduced = np.flatnonzero((by_name[name] == _AR) & (bucket == _AR) & began)
    return RankProfile(
        trace.path, trace.rank, trace.world_size, device, wall / 1e6, busy / 1e6, (wall - busy) / 1e6, where.steps, times,
        _kernels(trace.names, name, bucket, began, spent),
        _instances(trace.start[rows][reduced], trace.end[rows][reduced], [trace.names[i] for i in name[reduced]]),
        abs(exposed + (wall - busy) / 1e6 - wall / 1e6) / (wall / 1e6), trace.ignored,
    )  # fmt: skip


def profile_ranks(
    paths: Sequence[Path | str], annotation: str | None = None, *, skip: int = 0
) -> tuple[list[RankProfile], Comparison]:
    """The traces of all ranks, one file each, in the order of their ranks, and what comparing them says (see `window`)."""
    found = []
    for path in paths:
        trace = read(path)
        found.append(profile(trace, window(trace, annotation, skip=skip)))
    found.sort(key=lambda one: -1 if one.rank is None else one.rank)
    return found, compare(found)


def compare(profiles: Sequence[RankProfile]) -> Comparison:
    """All-reduces of several ranks, instance by instance.

    Two ranks, durations (5, 9) and (11, 4) µs -> transfer (5, 4), waiting ((0, 5), (6, 0)): 9 µs of work, 5.5 of waiting.

    Raises:
        UnequalRanks: they saw different numbers of steps or all-reduces.
        KitError: no profile, or two of one rank.
    """
    ranks = tuple(one.rank for one in profiles)
    known = [rank for rank in ranks if rank is not None]
    if not profiles or len(set(known)) < len(known):
        raise KitError(f"the traces must be of different ranks, one each; these are of {list(ranks)}")
    seen = {"steps": [one.steps for one in profiles], "all-reduces": [len(one.all_reduce_us) for one in profiles]}
    for what, counts in seen.items():
        if len(set(counts)) > 1:
            told = ", ".join(f"{one.path.name}: {count}" for one, count in zip(profiles, counts, strict=True))
            raise UnequalRanks(f"the ranks did not see the same {what} ({told}), so they cannot be compared one by one; look at "
                               "the same annotated steps of each")  # fmt: skip
    durations = np.stack([one.all_reduce_us for one in profiles])
    transfer = durations.min(axis=0) if durations.size else np.zeros(0)
    waiting = durations - transfer
    several, sums = len(profiles) > 1, waiting.sum(axis=1)
    world = profiles[0].world_size
    return Comparison(
        ranks, profiles[0].steps, len(transfer), transfer, waiting, tuple(one.all_reduce_ms for one in profiles),
        tuple(one.busy_ms for one in profiles), float(transfer.sum()) / 1000 if several else None,
        float(sums.mean()) / 1000 if several else None, int(np.argmin(sums)) if several and sums.any() else None,
        len(profiles) == world if world else several,
    )  # fmt: skip


def _device(trace: Trace) -> str:
    return "gpu" if len(trace.of(*KERNELS)) else "cpu"


def _rows(trace: Trace) -> np.ndarray:
    """The rows that take a rank's time: a GPU's kernels and copies; without any, operators of the CPU."""
    rows = trace.of(*KERNELS)
    if len(rows):
        devices = {trace.lanes[lane].process for lane in np.unique(trace.lane[rows])}
        if len(devices) > 1:
            told = ", ".join(sorted(map(str, devices)))
            raise KitError(f"{trace.path} holds kernels of the GPUs {told}; each rank needs a trace of its own")
        return rows
    # A collective that runs on another thread is an annotation to the profiler, though it is work.
    asynchronous = np.array([bool(ASYNCHRONOUS.match(name)) for name in trace.names], dtype=bool)
    notes = trace.of("user_annotation")
    frames = np.array([bool(FRAME.match(name)) for name in trace.names], dtype=bool)
    operators = trace.of("cpu_op")
    rows = np.concatenate([operators[~frames[trace.name[operators]]], notes[asynchronous[trace.name[notes]]]])
    if not len(rows):
        raise KitError(f"{trace.path} holds annotations only, neither kernels nor operators; profile CPU or GPU activities")
    return rows


def _kernels(
    names: Sequence[str], name: np.ndarray, bucket: np.ndarray, began: np.ndarray, spent: np.ndarray
) -> tuple[KernelTime, ...]:
    key = name.astype(np.int64) * len(ORDER) + bucket
    keys, place = np.unique(key, return_inverse=True)
    counts = np.bincount(place, weights=began, minlength=len(keys))
    times = np.bincount(place, weights=spent, minlength=len(keys))
    found = [KernelTime(names[k // len(ORDER)], ORDER[k % len(ORDER)], int(n), float(ms))
             for k, n, ms in zip(keys.tolist(), counts, times, strict=True)]  # fmt: skip
    return tuple(sorted(found, key=lambda kernel: (-kernel.ms, kernel.name)))


def _instances(start: np.ndarray, end: np.ndarray, names: Sequence[str]) -> np.ndarray:
    """µs of each all-reduce, in order of start. Spans that only wrap one count where nothing inside them was recorded."""
    wraps = np.array([bool(WRAPPER.match(name)) for name in names], dtype=bool)
    start, end = (start[~wraps], end[~wraps]) if (~wraps).any() else union(start, end)
    return (end - start) / 1000
