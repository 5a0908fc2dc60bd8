"""What all-reduces cost: the latency + bandwidth line, shares of decode time in three readings, and a faster fabric.

Decode sends small messages: tokens of the step × hidden size × bytes a number, twice a layer (after attention and after the
feed-forward part), and once more where the embedding is split, as vLLM splits it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

import numpy as np

from eagle3kit.errors import KitError
from eagle3kit.figures import Figure, kind_of, quotient


def all_reduces_per_step(layers: int, *, split_embedding: bool = True) -> int:
    """2 a layer, and one for a split embedding: 32 layers -> 65 (as vLLM traces show); Kimi's 61, counted without -> 122."""
    return 2 * layers + split_embedding


def message_bytes(batch: int, draft_tokens: int, hidden_size: int, item_bytes: int = 2) -> int:
    """B · (K + 1) · H · bytes: one token of 7,168 in bf16 -> 14,336."""
    return batch * (draft_tokens + 1) * hidden_size * item_bytes


# ---- Latency and bandwidth


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """t(n) = α + β·n microseconds for n bytes; `residuals_us` are measured minus fitted, in the order of `points`."""

    alpha_us: float
    beta_us_per_byte: float
    points: tuple[tuple[float, float], ...]
    residuals_us: tuple[float, ...]

    def us(self, size: float) -> float:
        """The fitted time of a message of `size` bytes."""
        return self.alpha_us + self.beta_us_per_byte * size

    @property
    def gb_per_second(self) -> float | None:
        """1 / β in 10⁹ bytes a second; None where the line grows from the smallest message to the largest by no more than it
        misses some point: latency is all that was seen."""
        sizes = [size for size, _ in self.points]
        grown = self.beta_us_per_byte * (max(sizes) - min(sizes))
        return 1e-3 / self.beta_us_per_byte if grown > max(map(abs, self.residuals_us)) else None


def fit(points: Sequence[tuple[float, float]]) -> Line:
    """The least-squares line through (bytes, µs); KitError for fewer than two sizes.

    Hockney's model of a message (1994). With two points it goes through both and its residuals say nothing.
    (14336, 56.2), (172032, 65.7), (458752, 93.0) -> α = 53.5 µs, β = 8.43e-5 µs a byte (11.9 GB/s), residuals < 2.5 µs.
    """
    table = np.asarray(points, dtype=float).reshape(-1, 2)
    if len(set(table[:, 0])) < 2 or not np.isfinite(table).all():
        raise KitError(f"a latency and a bandwidth need timings of at least two message sizes, not {list(points)}")
    sizes, times = table.T
    beta = float(((sizes - sizes.mean()) * (times - times.mean())).sum() / ((sizes - sizes.mean()) ** 2).sum())
    alpha = float(times.mean() - beta * sizes.mean())
    return Line(alpha_us=alpha, beta_us_per_byte=beta, points=tuple((float(n), float(t)) for n, t in table),
                residuals_us=tuple((times - alpha - beta * sizes).tolist()))  # fmt: skip


# ---- Shares of a step


def share_of_step(count: int, each_us: float, step_ms: float) -> float:
    """count · µs / step: what a microbenchmark says. 122 · 56.2 µs in 12.48 ms -> 0.549. It overstates: see `Saving`."""
    return count * each_us / 1000 / step_ms


def implied_us(share: float, step_ms: float, count: int) -> float:
    """The µs an all-reduce that a share of the step implies: 0.515 of 1/82 s over 122 -> 51.5."""
    return share * step_ms * 1000 / count


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """An A/B: the same engine and load with the usual all-reduce, and with another one. Times of a step in ms.

    80.1 -> 87.5 tok/s over 122 all-reduces: 1.056 ms saved, 8.5 % of a step, 8.65 µs each.
    """

    usual_ms: Figure
    other_ms: Figure
    count: int

    @property
    def saved_ms(self) -> float:
        """Usual minus other; below 0 where the other is slower."""
        return self.usual_ms.value - self.other_ms.value

    @property
    def saved_us_each(self) -> float:
        """Saved µs an all-reduce."""
        return self.saved_ms * 1000 / self.count

    @property
    def share(self) -> Figure:
        """Saved / usual step: 1 - other / usual."""
        rest = quotient(self.other_ms, self.usual_ms, unit="", source="A/B of two engines")
        ends = (None, None) if rest.low is None or rest.high is None else (1 - rest.high, 1 - rest.low)
        return Figure(value=1 - rest.value, low=ends[0], high=ends[1], unit="", kind=rest.kind, n=rest.n,
                      source="saved by the other all-reduce / step with the usual one")  # fmt: skip

    def cost_share(self, other_us: float) -> float:
        """The usual all-reduce's whole share of the step, if the other takes `other_us` each: (saved + other) · count / step.

        With 9.2 to 11.8 µs for the other one: 17.5 % to 20.0 %.
        """
        return share_of_step(self.count, self.saved_us_each + other_us, self.usual_ms.value)


def saving_of_rates(usual: float, other: float, count: int, *, source: str, sequences: int = 1) -> Saving:
    """A published A/B in tokens a second; `sequences` at once give one token each a step."""
    ms = [Figure(value=1000 * sequences / rate, unit="ms", kind="published", source=source) for rate in (usual, other)]
    return Saving(usual_ms=ms[0], other_ms=ms[1], count=count)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Three readings of one cost, never one number.

    of_kernel_time: all-reduce kernel time / all kernel time of a rank, waiting for the slower rank included; the mean over
        ranks, `low` and `high` being the least and the most loaded rank (a spread, not an interval).
    without_waiting: transfer / (kernel time - waiting); None where there is one rank's trace only.
    saved: what switching the all-reduce really saved, of a step (an A/B); None where it was not run.
    """

    of_kernel_time: Figure
    without_waiting: Figure | None
    saved: Figure | None


def three_shares(
    all_reduce_ms: Sequence[float], busy_ms: Sequence[float], transfer_ms: float | None, saving: Saving | None = None
) -> Shares:
    """The readings from per-rank sums over one window (`traces.Comparison` has them): all-reduce time, busy time, transfer."""
    if len(all_reduce_ms) != len(busy_ms) or not busy_ms or min(busy_ms) <= 0:
        raise KitError(f"all-reduce times of {len(all_reduce_ms)} ranks, busy times of {len(busy_ms)}: each rank needs both")
    each = [part / whole for part, whole in zip(all_reduce_ms, busy_ms, strict=True)]
    kernel = Figure(value=sum(each) / len(each), low=min(each), high=max(each), unit="", kind="measured", n=len(each),
                    source="all-reduce kernel time / kernel time, mean over ranks (least to most loaded rank)")  # fmt: skip
    bare = None
    if transfer_ms is not None:
        rest = [whole - part + transfer_ms for part, whole in zip(all_reduce_ms, busy_ms, strict=True)]
        bare = Figure(value=transfer_ms * len(rest) / sum(rest), unit="", kind="measured", n=len(each),
                      source="transfer (the least over ranks, one by one) / (kernel time - waiting)")  # fmt: skip
    return Shares(of_kernel_time=kernel, without_waiting=bare, saved=saving.share if saving else None)


def reread(share: float, saving: Saving, *, microbenchmark_us: float, other_us: float, source: str) -> tuple[Figure, Figure]:
    """How a share of kernel time would read by an A/B, if it overstated as much as a published microbenchmark did.

    Returns (what all-reduces cost, what the other one would save), both shares of a step, "modelled":
    share · (A/B's figure / the microbenchmark's share of the same step). A share of 0.515 with the figures in `Saving`,
    56.2 µs and 11.8 µs -> 0.188 and 0.079.
    """
    stated = share_of_step(saving.count, microbenchmark_us, saving.usual_ms.value)
    cost, saved = (Figure(value=share * part / stated, unit="", kind="modelled", source=f"{source}, scaled by a published A/B")
                   for part in (saving.cost_share(other_us), saving.share.value))  # fmt: skip
    return cost, saved


# ---- A faster fabric


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """`count` all-reduces of one size in a step: µs each now, and on the other fabric."""

    count: int
    old_us: float
    new_us: float

    @property
    def saved_ms(self) -> float:
        """n · (t_old - t_new)."""
        return self.count * (self.old_us - self.new_us) / 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """The same engine on another fabric. A faster one shortens the plain step by a larger part, so r rises."""

    plain_ms: Figure
    speculating_ms: Figure
    r_now: Figure
    r_then: Figure


def faster_fabric(plain_ms: Figure, speculating_ms: Figure, plain: Sequence[Traffic], speculating: Sequence[Traffic]) -> WhatIf:
    """T' = T - Σ n(t_old - t_new) for both kinds of steps, and r again from those; all "modelled".

    `speculating` lists the verify step's messages, which are K + 1 times as large, and the draft's own. Example: steps of 12
    and 20 ms, 122 all-reduces each of 20 µs (22 µs in the verify step) that would take 5 µs: 10.17 and 17.93 ms; r rises
    from 1.67 to 1.76. Take transfer times from traces: a microbenchmark's overstate what can be saved.

    Raises:
        KitError: the all-reduces alone would take the whole step.
    """
    then = [_without(step, traffic) for step, traffic in ((plain_ms, plain), (speculating_ms, speculating))]
    now = quotient(speculating_ms, plain_ms, unit="", source="step times", kind=kind_of(speculating_ms, plain_ms))
    later = quotient(then[1], then[0], unit="", source="step times on the other fabric", kind="modelled")
    return WhatIf(plain_ms=then[0], speculating_ms=then[1], r_now=now, r_then=later)


def _without(step: Figure, traffic: Sequence[Traffic]) -> Figure:
    saved, taken = sum(t.saved_ms for t in traffic), sum(t.count * t.old_us / 1000 for t in traffic)
    if taken >= step.least or not isfinite(saved):
        raise KitError(f"all-reduces of {taken:.3g} ms do not fit into a step of {step.value:.3g} ms: their times are not those "
                       "of this engine; take the transfer from its traces")  # fmt: skip
    ends = [None if x is None else x - saved for x in (step.value, step.low, step.high)]
    return Figure(value=ends[0], low=ends[1], high=ends[2], unit="ms", kind="modelled", n=step.n,
                  source=f"{step.source} - {saved:.3g} ms of all-reduce")  # fmt: skip
