"""Do stored states foretell the tokens that follow? A fault of layer, norm or alignment that no shape betrays shows here."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from eagle3kit.errors import KitError
from eagle3kit.hidden_states import normalised
from eagle3kit.samples import StatesSample, Store

if TYPE_CHECKING:
    from torch import Tensor

    from eagle3kit.conversations import Sample
    from eagle3kit.target import Geometry


def agreement(sample: StatesSample, weights: dict[str, "Tensor"], *, eps: float, adds_one: bool) -> tuple[int, int]:
    """(agreeing, compared): is argmax(head(norm(last state of token t - 1))) the supervised token t?

    Near 1 where the target wrote the answers itself, greedily; lower for other people's words; near 0 when the last state
    is from a wrong place, the norm is missing or the tokens are misaligned.
    """
    positions = sample.loss_mask.nonzero().squeeze(1)
    positions = positions[positions > 0]
    last = sample.states[-1][positions - 1]
    logits = normalised(last, weights["final_norm"], eps=eps, adds_one=adds_one) @ weights["head"].float().T
    return int((logits.argmax(-1) == sample.input_ids[positions]).sum()), len(positions)


def audit(
    stores: dict[str, Store], sides: dict[str, Sequence["Sample"]], weights: dict[str, "Tensor"], geometry: "Geometry", most: int
) -> dict[str, dict[str, Any]]:
    """`agreement` on at most `most` samples, spread evenly over both sides, by source: agreeing, n, share, low, high.

    The interval is Wilson's, of 95 %.
    """
    from eagle3kit.acceptance import wilson

    every = [(side, number) for side, rows in sides.items() for number in range(len(rows))]
    step = max(1, len(every) // most) if most else len(every) + 1
    sums: dict[str, list[int]] = {}
    for side, number in every[:: step][:most]:
        good, compared = agreement(stores[side].read(number), weights, eps=geometry.rms_norm_eps, adds_one=geometry.norm_adds_one)
        row = sums.setdefault(sides[side][number].source, [0, 0])
        row[0], row[1] = row[0] + good, row[1] + compared
    intervals = {source: wilson(good, n) for source, (good, n) in sums.items()}
    return {source: {"agreeing": good, "n": n, "share": good / n, "low": intervals[source][0], "high": intervals[source][1]}
            for source, (good, n) in sums.items() if n}  # fmt: skip


def require_agreement(audited: dict[str, dict[str, Any]], minimum: float) -> None:
    """KitError when the next token agrees for less than `minimum` of the audited tokens."""
    good, n = sum(row["agreeing"] for row in audited.values()), sum(row["n"] for row in audited.values())
    if n and good / n < minimum:
        raise KitError(f"from the stored last states only {good / n:.1%} of {n:,} next tokens are predicted, at least "
                       f"{minimum:.0%} was expected: the last state may be of the wrong layer, the final norm missing, or the "
                       "tokens misaligned. If the answers are not the target's own, lower hidden_states.minimum_agreement")
