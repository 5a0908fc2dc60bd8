"""A number that says what it is: its unit, whether it was measured, published or modelled, where from, and its interval."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, isfinite, log, sqrt
from typing import Literal

import numpy as np

from eagle3kit.acceptance import middle, resampled
from eagle3kit.errors import KitError

Kind = Literal["measured", "published", "modelled"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One number for a table, a figure or `result.json` (`dataclasses.asdict` gives plain JSON, None where unknown).

    kind: "measured" here, on this machine; "published" by somebody else; "modelled" by a formula, from an assumption, or
    from a mixture of the two others. `low` and `high` are a 95 % interval, None where there is none. `n` is the number of
    repeats or prompts behind it. `source` says in words where it is from.
    """

    value: float
    unit: str
    kind: Kind
    source: str
    low: float | None = None
    high: float | None = None
    n: int | None = None

    def __post_init__(self):
        ends = [self.value] if self.low is None or self.high is None else [self.low, self.value, self.high]
        if (self.low is None) != (self.high is None) or not all(map(isfinite, ends)) or ends != sorted(ends):
            raise ValueError(f"no figure: {self.low} <= {self.value} <= {self.high}")

    @property
    def least(self) -> float:
        """The lower end of the interval, the value itself where there is none."""
        return self.value if self.low is None else self.low

    @property
    def most(self) -> float:
        """The upper end of the interval, the value itself where there is none."""
        return self.value if self.high is None else self.high


def kind_of(*parts: Figure) -> Kind:
    """What is computed from `parts`: of their kind if they share one, else modelled."""
    kinds = {part.kind for part in parts}
    return kinds.pop() if len(kinds) == 1 else "modelled"


def mean(repeats: Sequence[float], *, unit: str, source: str, resamples: int = 2000, seed: int = 0) -> Figure:
    """The mean of `repeats` with a percentile bootstrap interval over them (Efron and Tibshirani 1993, ch. 13).

    The mean, not the median: tokens a second follow from the mean step time. KitError for fewer than two repeats, or for
    one that is not a positive number.
    """
    rows = _positive(repeats, source)
    low, high = middle(resampled(rows, resamples=resamples, seed=seed)[:, 0] / len(rows))
    value = float(rows.mean())
    return Figure(value=value, unit=unit, kind="measured", source=source, n=len(rows),
                  low=min(low, value), high=max(high, value))  # fmt: skip


def ratio_of_means(
    above: Sequence[float], below: Sequence[float], *, source: str, paired: bool = False, resamples: int = 2000, seed: int = 0
) -> Figure:
    """mean(above) / mean(below), with a percentile bootstrap interval over the repeats.

    `paired`: repeat i of both was measured in the same company (alternately), so both are drawn together, which takes what
    they share out of the interval; else each is drawn on its own. Example: [2, 2.2] over [1, 1.1] is 2.0, and paired it is
    2.0 to 2.0.
    """
    over, under = _positive(above, source), _positive(below, source)
    if paired and len(over) != len(under):
        raise KitError(f"{source}: {len(over)} and {len(under)} timings cannot be paired")
    if paired:
        sums = resampled(np.hstack([over, under]), resamples=resamples, seed=seed)
        ratios = sums[:, 0] / sums[:, 1]
    else:
        drawn = [resampled(rows, resamples=resamples, seed=seed + i)[:, 0] / len(rows) for i, rows in enumerate((over, under))]
        ratios = drawn[0] / drawn[1]
    low, high = middle(ratios)
    value = float(over.mean() / under.mean())
    return Figure(value=value, unit="", kind="measured", source=source, n=min(len(over), len(under)),
                  low=min(low, value), high=max(high, value))  # fmt: skip


def quotient(above: Figure, below: Figure, *, unit: str, source: str, kind: Kind | None = None) -> Figure:
    """above / below; both positive. The interval combines two independent ones on the logarithmic scale:

    ln(q / low) = sqrt(ln(a / a_low)² + ln(b_high / b)²), and the other end likewise (first-order propagation of errors,
    which for ratios is exact enough on logarithms). A part without an interval counts as exact; without any, none results.
    Example: 2.0 (1.9 to 2.1) over 1.6 (1.5 to 1.7) is 1.25 (1.15 to 1.36).
    """
    if above.least <= 0 or below.least <= 0:
        raise KitError(f"{source}: {above.least:g} over {below.least:g} has no meaning; both must be above 0")
    value = above.value / below.value
    low = high = None
    if above.low is not None or below.low is not None:
        low = value * exp(-sqrt(log(above.value / above.least) ** 2 + log(below.most / below.value) ** 2))
        high = value * exp(sqrt(log(above.most / above.value) ** 2 + log(below.value / below.least) ** 2))
    sizes = [part.n for part in (above, below) if part.n is not None]
    return Figure(value=value, unit=unit, kind=kind or kind_of(above, below), source=source, low=low, high=high,
                  n=min(sizes) if sizes else None)  # fmt: skip


def _positive(repeats: Sequence[float], source: str) -> np.ndarray:
    """Repeats as rows [n, 1]."""
    rows = np.asarray(repeats, dtype=float).reshape(-1, 1)
    if len(rows) < 2:
        raise KitError(f"{source}: {len(rows)} timing has no interval; measure at least two repeats")
    if not (np.isfinite(rows) & (rows > 0)).all():
        raise KitError(f"{source}: a timing that is no positive number: {rows[~(np.isfinite(rows) & (rows > 0))][0]}")
    return rows
