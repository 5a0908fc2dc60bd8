"""Which layers the stored states are of: the target computes a few samples itself, and each stored state is compared with
what enters every layer. The only check that sees layer ids that are shifted or in another order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from eagle3kit.language_model import forward
from eagle3kit.signs import Sign, sign

if TYPE_CHECKING:
    from torch import Tensor

    from eagle3kit.samples import StatesSample
    from eagle3kit.target import Geometry

FAR = 0.15  # relative distance beyond which a state is no layer's: bfloat16 stays at 0.02, a neighbour is 0.34 away


@dataclass(frozen=True)
class Match:
    """Relative distance of stored state `place` from what enters each layer k, `errors` [n + 1], and from the state after
    the final norm, `after`. `claimed` is the id it stands under (None: not said)."""

    place: int
    claimed: int | None
    errors: list[float]
    after: float

    @property
    def best(self) -> int:
        """The layer whose input is nearest; n + 1 stands for the state after the final norm."""
        every = [*self.errors, self.after]
        return every.index(min(every))


def distance(stored: "Tensor", computed: "Tensor", any_length: bool = False) -> float:
    """Median over tokens of |stored - computed| / |computed - mean computed|, the first token aside; with `any_length` each
    stored state is brought to the computed one's length before.

    A few huge numbers that are the same at every token are normal (up to 24,960 in SmolLM2) and would hide all else; so is
    a first token a thousand times longer than the rest. Hence the mean is taken off, and the median is of the others.
    """
    stored, computed = stored[1:].float(), computed[1:]
    if any_length:
        stored = stored * (computed.norm(dim=1) / stored.norm(dim=1).clamp_min(1e-30))[:, None]
    size = (computed - computed.mean(0)).norm(dim=1).clamp_min(1e-30)
    return float(((stored - computed).norm(dim=1) / size).nan_to_num(float("inf")).median())


def matches(
    samples: Sequence[tuple[str, "StatesSample"]], model: Any, geometry: "Geometry", layer_ids: Sequence[int] | None,
    tokens: int = 128, any_length: bool = False,
) -> list[Match]:
    """Each stored state of `samples` against every layer: distances averaged over the samples, whose first `tokens` are
    computed (what comes later changes nothing before it). `any_length`: see `distance`.

    Example, ids [2, 15, 27] stored one layer late: matches at 3, 16, 28, where 2, 15 and 27 are claimed.
    """
    sums: list[list[float]] = []
    for _, row in samples:
        ids = row.input_ids[:tokens]
        found = forward(model, ids, geometry.layers)
        every = [*found.entering, found.normed]
        mine = [[distance(state[: len(ids)], other, any_length) for other in every] for state in row.states]
        sums = [[a + b for a, b in zip(old, new, strict=True)] for old, new in zip(sums, mine, strict=True)] if sums else mine
    claims = [*(layer_ids or [None] * (len(sums) - 1)), geometry.layers]
    n = len(samples)
    return [Match(place, claimed, [value / n for value in errors[:-1]], errors[-1] / n)
            for place, (errors, claimed) in enumerate(zip(sums, claims, strict=True))]  # fmt: skip


def of_layers(found: Sequence[Match], samples: int) -> list[Sign]:
    """The signs of the auxiliary layers and of the last, from `matches` on so many samples."""
    *auxiliary, last = found
    return [_auxiliary(auxiliary, samples), _last(last, len(last.errors) - 1, samples)]


def _auxiliary(found: Sequence[Match], samples: int) -> Sign:
    best = [match.best for match in found]
    claimed = [match.claimed for match in found]
    lost = [match.place for match in found if min(match.errors) > FAR]
    if None in claimed:
        wrong = lost or ([match.place for match in found] if best != sorted(set(best)) else [])
        note = f"no ids were said; the states are those of {best}"
    else:
        wrong = [match.place for match in found if match.best != match.claimed or match.place in lost]
        note = f"the states stored under {claimed} are those of {best}"
        shifts = {there - said for there, said in zip(best, claimed, strict=True)}
        if not lost and shifts in ({1}, {-1}):
            step = "one layer late: captured after the layer" if shifts == {1} else "one layer early"
            note += f", {step}; write {best} as the layer ids, or extract again"
        elif not lost and wrong and sorted(best) == sorted(claimed):
            note += ", in another order; sort them as their ids rise"
    if lost:
        note += f". State {lost[0]} is of no layer (nearest is {min(found[lost[0]].errors):.2g} away): another target, or damaged"
    far = ", ".join(f"{match.errors[min(match.best, len(match.errors) - 1)]:.2g}" for match in found)
    return sign("auxiliary layers", len(wrong), len(found), f"{note} (relative distance {far}, {samples} samples)")


def _last(match: Match, layers: int, samples: int) -> Sign:
    here = match.errors[layers]
    if match.best == layers:
        note = "it is what goes into the final norm" if here <= FAR else "it is no state of this target: another one, or damaged"
    elif match.best == layers + 1:
        note = "it is what comes out of the final norm: applied already"
    else:
        early = layers - match.best
        note = f"it is what enters layer {match.best}, {early} layer{'s' if early > 1 else ''} early; extract id {layers} instead"
    bad = match.best != layers or here > FAR
    nearest = min(*match.errors, match.after)
    return sign("last layer", here, samples, f"{note} (relative distance {nearest:.2g})", bad=bad)
