"""Predicted against served: the difference by position, whether it is within tolerance, and what the rest is made of."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from eagle3kit.acceptance import Acceptance, Interval, chance_of_none, from_steps, middle, resampled, total
from eagle3kit.errors import KitError

if TYPE_CHECKING:
    from eagle3kit.predict import Prediction, Step
    from eagle3kit.served import Served
    from eagle3kit.suspects import Suspect

EXACT, CLOSE = 0.01, 0.05  # of length: float32 with the recorded answers; anything else (other kernels, other near ties)


@dataclass(frozen=True)
class Position:
    """Predicted and served marginal of one position, or the length in the row called so; the difference served - predicted
    with its 95 % interval, and the share of resamples on the far side of no difference, doubled (`p`)."""

    name: str
    predicted: float
    served: float
    difference: float
    low: float
    high: float
    p: float


@dataclass(frozen=True)
class Agreement:
    """The comparison. `rows`: one a position, the length last. `paired`: over the same prompts one by one. `within`: the
    difference in length is at most `tolerance`. `raised`: it is more, and no mere noise: prompt by prompt what is common
    cancels and little noise is left, else its interval must leave no room for a difference of 0."""

    rows: list[Position]
    paired: bool
    prompts: int
    tolerance: float
    within: bool

    @property
    def difference(self) -> float:
        """Served less predicted length."""
        return self.rows[-1].difference

    @property
    def noise(self) -> bool:
        """Whether the interval of the difference in length holds 0."""
        return self.rows[-1].low <= 0 <= self.rows[-1].high

    @property
    def raised(self) -> bool:
        return not self.within and (self.paired or not self.noise)

    @property
    def verdict(self) -> str:
        """The verdict in two or three words."""
        return "within tolerance" if self.within else "OUTSIDE tolerance" if self.raised else "within noise"

    @property
    def words(self) -> str:
        """The verdict in a sentence."""
        length = self.rows[-1]
        noise = "no more than noise" if self.noise else "more than noise"
        held = "within" if self.within else "ABOVE"
        return (f"served {length.served:.3f}, predicted {length.predicted:.3f}: a difference of {length.difference:+.3f} "
                f"({length.low:+.3f} to {length.high:+.3f}, {noise}), {held} the tolerance of {self.tolerance:g}")  # fmt: skip


def tolerance(dtype: str, equal: tuple[int, int]) -> float:
    """How far served length may lie from the predicted one: 0.01 in float32 with all `equal` (same, of) answers the recorded
    ones, 0.05 otherwise (bfloat16 answers part from the recorded ones at near ties, after which other drafts are made)."""
    same, of = equal
    return EXACT if dtype == "float32" and same == of else CLOSE


def compare(
    predicted: Sequence[Acceptance], served: Sequence[Acceptance], *, tolerance: float, resamples: int = 2000, seed: int = 0
) -> Agreement:
    """Served against predicted counts.

    With one record a prompt on both sides, prompts are drawn in pairs (what both have in common cancels); with other
    numbers of records each side is drawn by itself. KitError when depths differ or nothing was drafted.
    """
    sums = {name: total(rows) for name, rows in (("predicted", predicted), ("served", served))}
    depths = {len(one.accepted) for one in sums.values()}
    if len(depths) != 1:
        raise KitError(f"predicted and served counts are of different depths: {sorted(depths)} draft tokens; predict with "
                       "acceptance.draft_tokens")  # fmt: skip
    for name, one in sums.items():
        if not one.drafts:
            raise KitError(f"the {name} counts hold no draft, so there is nothing to compare")
    paired = len(predicted) == len(served)
    # The same seed draws the same prompts on both sides: so pairs stay pairs.
    seeds = (seed, seed if paired else seed + 1)
    drawn = [_marginals(rows, resamples, which) for rows, which in zip((predicted, served), seeds, strict=True)]
    least = min(map(len, drawn))
    apart = drawn[1][:least] - drawn[0][:least]
    rows = []
    for k in range(len(sums["served"].accepted) + 1):
        last = k == len(sums["served"].accepted)
        mine, theirs = ((s.length if last else s.marginal[k]) for s in sums.values())
        values = apart.sum(axis=1) if last else apart[:, k]
        rows.append(Position("length" if last else f"token {k + 1}", mine, theirs, theirs - mine, *middle(values),
                             chance_of_none(values)))  # fmt: skip
    return Agreement(rows, paired, len(served), tolerance, abs(rows[-1].difference) <= tolerance + 1e-12)


def since_training(
    trained: Sequence[Sequence[int]], prediction: "Prediction", lengths: Sequence[int], most: int, *, dtype: str
) -> Agreement | None:
    """The estimate of the trained weights against that of the exported draft, as a server would read it, on the same turns.

    Both walk the recorded tokens, so anything but rounding says that the directory is not what was trained: another `d2t`,
    another RoPE, a flag that changed. What a server does with it then agrees with the prediction, and nobody would look.

    Args:
        trained: a row a turn [drafts, accepted …], from 06_training, of at least as many turns as `prediction` has.
        lengths: tokens of each recorded answer; those longer than `most`, where the prediction stops, are left out.

    None where nothing can be compared: another number of draft tokens was trained, or every answer is longer.
    """
    pairs = [(Acceptance(drafts=row[0], accepted=tuple(row[1:])), mine)
             for row, mine, length in zip(trained, prediction.recorded, lengths, strict=False) if length <= most]  # fmt: skip
    if not pairs or len(pairs[0][0].accepted) != prediction.depth or not sum(before.drafts for before, _ in pairs):
        return None
    before, now = zip(*pairs, strict=True)
    return compare(before, now, tolerance=EXACT if dtype == "float32" else CLOSE)


def _marginals(records: Sequence[Acceptance], resamples: int, seed: int) -> np.ndarray:
    """Marginals [resamples, K] of records drawn with replacement; a draw without a draft counts as no acceptance."""
    counts = np.array([(r.drafts, *r.accepted) for r in records], dtype=np.int64)
    sums = resampled(counts, resamples=resamples, seed=seed)
    return sums[:, 1:] / np.maximum(1, sums[:, :1])


def trimmed(steps: Sequence[int], new_tokens: int, depth: int) -> Acceptance:
    """The counts of one served answer without what lies past its end: vLLM counts all that it accepts of a last draft, also
    tokens that the answer's end then cuts off. Said were 1 + Σ (accepted + 1) tokens; of those too many the first is the
    target's own, the others are the draft's.

    steps (3, 3), 7 new tokens: nine were said, two too many, one of them the draft's  ->  steps (3, 2)
    """
    steps = list(steps)
    over = 1 + sum(a + 1 for a in steps) - new_tokens
    if steps and over > 1:
        steps[-1] = max(0, steps[-1] - (over - 1))
    return from_steps(steps, depth)


def inside(served: "Served", depth: int) -> list[Acceptance]:
    """The served counts of each prompt without what lies past its answer's end (`trimmed`), which no prediction can see; as they
    were counted where this vLLM does not tell of single verify steps."""
    if len(served.steps) != len(served.answers):
        return served.records
    return [trimmed(steps, len(answer), depth) for steps, answer in zip(served.steps, served.answers, strict=True)]


def first_difference(predicted: Sequence["Step"], served: Sequence[int]) -> tuple[int, int, int] | None:
    """(verify step, predicted, served) where the accepted tokens of one answer first differ, the last step aside, which may
    run past the end; None when they never do. With equal answers every difference is the draft's, and the first is the cause
    of those after it."""
    mine = [step.accepted for step in predicted]
    for number, (a, b) in enumerate(zip(mine[:-1], served, strict=False)):
        if a != b:
            return number, a, b
    return None


def same_walks(predicted: Sequence[Sequence["Step"]], served: Sequence[Sequence[int]]) -> tuple[int, int]:
    """(answers whose verify steps were all as predicted, the last aside; answers told of): with equal answers, the finest
    agreement there is."""
    pairs = list(zip(predicted, served, strict=False)) if len(predicted) == len(served) else []
    return sum(first_difference(mine, theirs) is None for mine, theirs in pairs), len(pairs)


def walk_words(walks: tuple[int, int]) -> str:
    """`same_walks` in words."""
    same, of = walks
    return f"{same} of {of} answers went step by step as predicted" if of else "this vLLM does not tell of single verify steps"


def numbers(
    got: Acceptance, spread: Interval, prediction: "Prediction", predicted: Interval, agreed: Agreement,
    suspects: Sequence["Suspect"] = (),
) -> dict[str, object]:  # fmt: skip
    """What a result says of acceptance: served (`spread`: its 95 % intervals), predicted, and how they agree."""
    covered, own = prediction.covered, prediction.on_policy
    return {
        "acceptance_length": got.length, "acceptance_length_low": spread.length[0],
        "acceptance_length_high": spread.length[1],
        "drafts": got.drafts, "accepted": got.accepted, "marginal": got.marginal, "marginal_intervals": spread.marginal,
        "predicted_length": prediction.length, "predicted_low": predicted.length[0], "predicted_high": predicted.length[1],
        "predicted_marginal": total(prediction.records).marginal, "predicted_marginal_intervals": predicted.marginal,
        "everywhere_length": prediction.everywhere.length, "sampled_length": prediction.sampled_length,
        "temperature": prediction.temperature, "covered": covered, "on_policy": own, "costs": prediction.costs(),
        "agreement": {"difference": agreed.difference, "low": agreed.rows[-1].low, "high": agreed.rows[-1].high,
                      "tolerance": agreed.tolerance, "within": agreed.within, "raised": agreed.raised,
                      "paired": agreed.paired},
        "past_the_end": got.length - agreed.rows[-1].served,
        "suspects": [suspect.name for suspect in suspects if suspect.named],
    }  # fmt: skip


def unchecked(
    *, told: bool, within: bool, again: bool, longest: int, temperature: float, agreed: Agreement | None = None
) -> list[str]:  # fmt: skip
    """What a run did not look at, in sentences for the end of its report.

    Args:
        told: whether this vLLM tells of single requests.
        within: whether prediction and serving agree, or differ by noise, so that no cause was looked for.
        again: whether plain answers were served twice.
        longest: tokens of the longest context served.
        agreed: the comparison; one whose interval is wider than its tolerance is named, for it could not have seen less.
    """
    lines = [f"Sampling was not served: the estimate at temperature {temperature:g} has nothing beside it.",
             f"No context longer than {longest:,} tokens was served."]  # fmt: skip
    if not told:
        lines.append("This vLLM tells nothing of single requests: no counts by context, and intervals are over waves.")
    if agreed and (unseen := max(abs(agreed.rows[-1].low), abs(agreed.rows[-1].high))) > agreed.tolerance:
        lines.append(f"Prediction and serving could differ in length by {unseen:.2f} without being told from noise here; the "
                     f"tolerance is {agreed.tolerance:g}.")  # fmt: skip
    if within:
        how = "agree within tolerance" if not agreed or agreed.within else "differ by no more than noise"
        lines.append(f"Prediction and serving {how}, so no cause of a difference was looked for.")
    if not again:
        lines.append("Plain answers were served once (acceptance.repeat_plain): how often they differ by themselves is told from "
                     "the recorded answers alone.")  # fmt: skip
    return lines
