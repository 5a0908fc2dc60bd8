"""How many draft tokens the target keeps: counts, the estimate that needs no serving, and intervals.

Words. A *draft* is one proposal of K draft tokens, checked in one *verify step*. Position k is accepted when draft tokens 0
… k all are. *Marginal* acceptance m_k = drafts whose positions 0 … k were accepted / all drafts; *conditional* c_k = m_k /
m_(k-1), c_0 = m_0 (positions count from 0 here, from 1 in tables and figures). *Acceptance length* = 1 + Σ m_k: new tokens
a verify step, the target's own one included (so vLLM counts, v1/spec_decode/metrics.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from eagle3kit.errors import KitError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """Raw counts: `accepted[k]` drafts had positions 0 … k accepted, so it never rises with k.

    drafts = 100, accepted = (60, 30, 10)  ->  marginal (.6, .3, .1), conditional (.6, .5, .333), length 2.0
    """

    drafts: int
    accepted: tuple[int, ...]  # [K]

    def __post_init__(self):
        chain = (self.drafts, *self.accepted)
        if self.drafts < 0 or any(later > earlier or later < 0 for earlier, later in zip(chain, chain[1:], strict=False)):
            raise ValueError(f"accepted counts must not rise along a draft, nor be negative: {chain}")

    @property
    def marginal(self) -> tuple[float, ...]:
        """m_k [K]."""
        return tuple(count / self.drafts for count in self.accepted) if self.drafts else (0.0,) * len(self.accepted)

    @property
    def conditional(self) -> tuple[float, ...]:
        """c_k [K]; 0 where nothing reached the position."""
        reached = (self.drafts, *self.accepted)
        return tuple(count / before if before else 0.0 for before, count in zip(reached, self.accepted, strict=False))

    @property
    def length(self) -> float:
        """Tokens a verify step, the target's own included: 1 to K + 1."""
        return 1.0 + sum(self.marginal)

    @property
    def rate(self) -> float:
        """Accepted draft tokens / all draft tokens: (length - 1) / K."""
        return sum(self.marginal) / len(self.accepted)


def total(records: Sequence[Acceptance]) -> Acceptance:
    """The sum of counts over prompts; KitError when there are none or their depths differ."""
    depths = {len(record.accepted) for record in records}
    if len(depths) != 1:
        raise KitError("no drafts were counted, so there is no acceptance to report" if not depths
                       else f"counts of different depths cannot be added: {sorted(depths)} draft tokens")  # fmt: skip
    columns = zip(*(record.accepted for record in records), strict=True)
    return Acceptance(drafts=sum(record.drafts for record in records), accepted=tuple(map(sum, columns)))


def from_steps(accepted_per_step: Sequence[int], depth: int) -> Acceptance:
    """Counts from the number of draft tokens accepted in each verify step: [2, 0, 3], depth 3 -> 3 drafts, (2, 2, 1)."""
    return Acceptance(drafts=len(accepted_per_step),
                      accepted=tuple(sum(a > k for a in accepted_per_step) for k in range(depth)))  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """95 % bootstrap interval over prompts of the acceptance length and of each marginal [K]."""

    length: tuple[float, float]
    marginal: tuple[tuple[float, float], ...]


def resampled(rows: np.ndarray, *, resamples: int, seed: int) -> np.ndarray:
    """Sums [resamples, columns] of `rows` [n, columns], n of them drawn with replacement each time: the bootstrap under
    every interval here. The same `seed` draws the same rows, so ways of serving are compared over the same waves."""
    draws = np.random.default_rng(seed).integers(len(rows), size=(resamples, len(rows)))
    return np.stack([rows[draw].sum(axis=0) for draw in draws])


def middle(values: np.ndarray) -> tuple[float, float]:
    """Where the middle 95 % of `values` begin and end: the interval that resampled values give."""
    low, high = np.percentile(values, [2.5, 97.5])
    return float(low), float(high)


def chance_of_none(differences: np.ndarray) -> float:
    """Two-sided p of no difference: the share of resampled `differences` on its far side, doubled, at most 1."""
    return float(min(1.0, 2 * min(np.mean(differences <= 0), np.mean(differences >= 0))))


def interval(records: Sequence[Acceptance], *, resamples: int = 2000, seed: int = 0) -> Interval:
    """Percentile bootstrap over prompts: prompts are drawn with replacement, their counts added, the ratio taken last.

    Drafts of one answer are alike, so the prompt, not the draft, is what is drawn (Efron and Tibshirani 1993, ch. 8 and 13).
    """
    counts = np.array([(record.drafts, *record.accepted) for record in records], dtype=np.int64)  # [prompts, 1 + K]
    return interval_of(counts, resamples=resamples, seed=seed)


def interval_of(counts: np.ndarray, *, resamples: int = 2000, seed: int = 0) -> Interval:
    """`interval` of rows [n, 1 + K] of drafts and accepted, counted or expected; KitError when they hold no draft."""
    sums = resampled(counts, resamples=resamples, seed=seed)  # [resamples, 1 + K]
    sums = sums[sums[:, 0] > 0]
    if not len(sums):
        raise KitError(f"{len(counts)} prompts with {int(counts[:, 0].sum())} drafts are too few for an interval")
    marginal = sums[:, 1:] / sums[:, :1]
    return Interval(length=middle(1 + marginal.sum(axis=1)), marginal=tuple(map(middle, marginal.T)))


def wilson(successes: int, of: int, z: float = 1.96) -> tuple[float, float]:
    """95 % interval of a share (Wilson 1927): (p + z²/2n ± z·sqrt(p(1-p)/n + z²/4n²)) / (1 + z²/n); (0, 1) when n is 0.

    8 of 10 -> (.490, .943)
    """
    if not of:
        return 0.0, 1.0
    share, square = successes / of, z * z / of
    middle, half = share + square / 2, z * (share * (1 - share) / of + square / (4 * of)) ** 0.5
    return max(0.0, (middle - half) / (1 + square)), min(1.0, (middle + half) / (1 + square))


def hits(draft_tokens: Sequence["Tensor"], input_ids: "Tensor", d2t: "Tensor") -> np.ndarray:
    """Which draft tokens equal the target's: bool [T - 1, K], not yet joined along the draft.

    Args:
        draft_tokens: K tensors of draft ids [1, T - 1], as speculators' model returns them without targets: entry j of
            step k was predicted from a draft that starts after reading token j + 1.
        input_ids: the sample's target ids [T].
        d2t: offsets [D].

    Step k of start j proposes token j + 2 + k (step 0 at j reads token j + 1 and the states of token j, and proposes the
    next). Example, T = 6, K = 2: row 1 compares step 0 with token 3 and step 1 with token 4. Past the end: False.
    A token that the draft vocabulary lacks can never be proposed, so it counts as a miss by itself.
    """
    length, ids = input_ids.shape[0], input_ids.cpu()
    table = np.zeros((length - 1, len(draft_tokens)), dtype=bool)
    for step, drafted in enumerate(draft_tokens):
        drafted = drafted[0, : length - 1].cpu()
        targets = (drafted + d2t.cpu()[drafted])[: max(0, length - 2 - step)]
        table[: len(targets), step] = (targets == ids[2 + step :]).numpy()
    return table


def walk(table: np.ndarray, turn: tuple[int, int]) -> list[tuple[int, int]]:
    """The verify steps of one answer [start, end), each as (row that the draft starts from, draft tokens accepted).

    The first answer token comes from the prompt's own pass. Then: draft, count the `a` accepted, go on after a + 1 tokens,
    until the answer's last token is out. Example, answer tokens 5 … 9, K = 2: the first draft starts at row j = 4 (it has
    read token 5); if both its tokens hit (6, 7), the target adds 8 and the next draft starts at row 7; it may propose 9.
    """
    (start, end), depth = turn, table.shape[1]
    row, steps = start - 1, []
    while row + 1 < end - 1:
        accepted = 0
        while accepted < depth and row + 2 + accepted < end and table[row, accepted]:
            accepted += 1
        steps.append((row, accepted))
        row += accepted + 1
    return steps


def replay(table: np.ndarray, turns: Sequence[tuple[int, int]]) -> list[Acceptance]:
    """Walk each answer as the server does (`walk`), one record a turn [start, end)."""
    return [from_steps([accepted for _, accepted in walk(table, turn)], table.shape[1]) for turn in turns]


def everywhere(table: np.ndarray, turns: Sequence[tuple[int, int]]) -> Acceptance:
    """The mean over all answer positions: what trainers report. Serving starts drafts where the last one failed, so hard
    places are met more often than here and this overstates the length."""
    joint = np.logical_and.accumulate(table, axis=1)
    rows = np.concatenate([np.arange(start - 1, end - 2) for start, end in turns] or [np.arange(0)]).astype(int)
    return Acceptance(drafts=len(rows), accepted=tuple(joint[rows].sum(axis=0).astype(int).tolist()))
