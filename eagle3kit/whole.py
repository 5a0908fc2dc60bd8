"""From a cut geometry to the whole one: r with all layers, from what steps take with two smaller numbers of them.

A geometry is cut to fit the machine. The draft and the output head stay as they are, so against few layers they weigh too much,
and the r of a cut says nothing of the whole. But each layer that is added costs the same, so a step's time is a line in the
number of layers, and two cuts give it: T(L) = T(n) + (L - n) · (T(n) - T(m)) / (n - m). r is then the ratio of two such lines.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from eagle3kit.acceptance import middle, resampled
from eagle3kit.errors import KitError
from eagle3kit.figures import Figure
from eagle3kit.speedup import checked_ratio


@dataclass(frozen=True, kw_only=True)
class Cut:
    """Seconds of steps of one geometry cut to `layers`. `paired`: step i of both was taken in the same company."""

    layers: int
    plain: Sequence[float]
    speculating: Sequence[float]
    paired: bool = False

    @property
    def means(self) -> np.ndarray:
        """Mean seconds of a step with speculation and of a plain one [2]."""
        return np.array([np.mean(self.speculating), np.mean(self.plain)])

    def drawn(self, resamples: int, seed: int) -> np.ndarray:
        """The same of `resamples` bootstrap samples [resamples, 2]; paired steps are drawn together."""
        both = [np.asarray(row, dtype=float).reshape(-1, 1) for row in (self.speculating, self.plain)]
        if self.paired and len(both[0]) == len(both[1]):
            return resampled(np.hstack(both), resamples=resamples, seed=seed) / len(both[0])
        return np.hstack([resampled(row, resamples=resamples, seed=seed + i) / len(row) for i, row in enumerate(both)])


def ratio(
    many: Cut, few: Cut, layers: int, *, pair: str, together: bool = False, resamples: int = 2000, seed: int = 0
) -> Figure:  # fmt: skip
    """r of `layers` layers, "modelled", with a percentile bootstrap interval over the steps of both cuts.

    `together`: the steps of both cuts took turns too, so step i of all four is drawn together. Else what slowed the machine down
    while one cut was timed and not the other is not in the interval.

    Example: plain steps of 5 and 8 ms with 3 and 6 layers, 9 and 12.6 ms with speculation. A layer takes 1 and 1.2 ms, so 32
    layers take 34 and 43.8 ms: r = 1.29, where the cuts have 1.8 and 1.58.

    Raises:
        KitError: steps do not grow with layers by more than noise, or r lies below 1 with its whole interval.
    """
    if not few.layers < many.layers <= layers:
        raise KitError(f"{pair}: {few.layers} and {many.layers} of {layers} layers make no line")
    reach = (layers - many.layers) / (many.layers - few.layers)
    above, below = many.drawn(resamples, seed), few.drawn(resamples, seed if together else seed + 2)
    grown, drawn = above[:, 1] - below[:, 1], above + reach * (above - below)
    value = many.means + reach * (many.means - few.means)
    if many.means[1] <= few.means[1] or np.percentile(grown, 2.5) <= 0 or (drawn <= 0).any():
        raise KitError(f"{pair}: a plain step takes {1000 * few.means[1]:.3g} ms with {few.layers} layers and "
                       f"{1000 * many.means[1]:.3g} ms with {many.layers}, within noise the same, which tells nothing of "
                       f"{layers}; time more steps (profile.steps) or keep more layers (profile.geometry_layers)")  # fmt: skip
    low, high = middle(drawn[:, 0] / drawn[:, 1])
    r = float(value[0] / value[1])
    return checked_ratio(Figure(value=r, low=min(low, r), high=max(high, r), unit="", kind="modelled",
                                n=min(len(many.plain), len(few.plain), len(many.speculating), len(few.speculating)),
                                source=f"lines through cuts of {few.layers} and {many.layers} of {layers} layers, {pair}"),
                         pair)  # fmt: skip
