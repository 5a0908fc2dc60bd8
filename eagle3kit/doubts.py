"""Is there a reason to look for a fault? Comparisons that come out equal in a sound run; each sees what the others cannot.

Served against predicted: what vLLM does is not what the directory says. Exported against trained: the directory is not what was
trained, and vLLM and the prediction believe it alike. The trainer's own figure against the same positions by the target's own
words: what was taught is not what the target says. Masks against answers: other tokens were taught. Vocabulary against the
answers' words: a draft can be right in all it may say, and may not say much.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from eagle3kit.agreement import CLOSE, Agreement
from eagle3kit.signs import CHECKS

if TYPE_CHECKING:
    import torch

    from eagle3kit.predict import Prediction
    from eagle3kit.suspects import Samples


ALIKE = 0.5  # share of the held-out turns that must have been predicted, for a mean over them to be like one over all


@dataclass(frozen=True)
class Doubt:
    """One comparison: the two figures, how far they may lie apart (`allowed`), whether they lie further (`raised`), and in words
    what was seen. None where nothing could be compared."""

    compared: str
    expected: float | None
    found: float | None
    allowed: float
    raised: bool
    seen: str


def look(
    agreed: Agreement, exported: Agreement | None, prediction: "Prediction", samples: "Samples", *,
    taught: Sequence[float] | None = None, held_out: int = 0, frequencies: "torch.Tensor | None" = None, resamples: int = 2000,
    seed: int = 0,
) -> list[Doubt]:  # fmt: skip
    """The five comparisons.

    Args:
        agreed: served against predicted (`agreement.compare`).
        exported: `agreement.since_training`.
        prediction, samples: what was predicted, on which recorded answers with their turns.
        taught: the trainer's own marginals [K] on held-out samples, of the epoch that was exported (`trainers`).
        held_out: how many turns these are of; 0: as many as were predicted.
        frequencies: token_freq [V] of 04_vocabulary.
    """
    return [_of("served against predicted, length", agreed), _of("exported draft against trained weights, length", exported),
            _taught(prediction, taught, resamples, seed, _unlike(samples, held_out)), masks(samples),
            vocabulary(prediction, samples, frequencies)]  # fmt: skip


def raised(doubts: Sequence[Doubt]) -> list[str]:
    """What was seen where a doubt is raised."""
    return [doubt.seen for doubt in doubts if doubt.raised]


def trainers(trained: Mapping[str, Any]) -> list[float]:
    """speculators' own joined accuracies [K] of the best epoch on held-out samples, from the numbers of 06_training."""
    rows = [row for row in trained["history"] if row["split"] == "held out" and row["epoch"] == trained["best_epoch"]]
    return [row["full_acceptance"] for row in sorted(rows, key=lambda row: row["draft_step"])]


def _of(what: str, found: Agreement | None) -> Doubt:
    if found is None:
        return Doubt(what, None, None, CLOSE, False, "not compared: other draft tokens were trained, or longer answers")
    length = found.rows[-1]
    return Doubt(what, length.predicted, length.served, found.tolerance, found.raised,
                 f"{found.difference:+.3f} ({length.low:+.3f} to {length.high:+.3f})")  # fmt: skip


def _unlike(samples: "Samples", held_out: int) -> str:
    """Why the trainer's figure is of other answers than were predicted, "" where it is not. Ends of long answers are the easiest
    to guess, and the first turns are another mix of sources than all of them: small sources end early."""
    turns = [(sample, start, end) for sample, turns in samples for start, end in turns]
    cut = sum(end < len(sample.loss_mask) and bool(sample.loss_mask[end]) for sample, _, end in turns)
    if cut:
        return f"not compared: {cut} of {len(turns)} answers are cut to acceptance.max_new_tokens, the trainer's are not"
    few = len(turns) < ALIKE * held_out
    return f"not compared: {len(turns)} of the {held_out} turns held out were predicted (acceptance.prompts)" if few else ""


def _taught(
    prediction: "Prediction", taught: Sequence[float] | None, resamples: int, seed: int, unlike: str = ""
) -> Doubt:  # fmt: skip
    """The trainer counts a hit where the draft says what *its* idea of the target says: another norm, another head, other
    states, and it is right about the wrong words. The same positions, by the target's own words, tell. Only a trainer that
    thinks too well of the draft is a doubt; the turns need not be the very same, so chance is allowed for."""
    what = "target's own words against the trainer's, mean over positions"
    if unlike:
        return Doubt(what, None, None, CLOSE, False, unlike)
    marginal = prediction.everywhere_restricted.marginal
    if not taught or len(taught) < len(marginal):
        return Doubt(what, None, None, CLOSE, False, "not compared: fewer draft tokens were trained than are served")
    theirs, ours = 1 + sum(taught[: len(marginal)]), prediction.everywhere_restricted.length
    low, high = prediction.interval(resamples=resamples, seed=seed, of="everywhere_restricted_records").length
    allowed = CLOSE + (high - low) / 2
    return Doubt(what, theirs, ours, allowed, theirs - ours > allowed,
                 f"{ours - theirs:+.3f}; chance may make {allowed:.3f} of it")  # fmt: skip


def masks(samples: "Samples") -> Doubt:
    """Do loss masks lie where the answers are: 1 all along each, 0 before the first and just before the others?

    Answers may be cut to what is served, so of the tokens between two of them only the last is known to be the prompt's.
    """
    wrong, tokens, rows = 0, 0, 0
    for sample, turns in samples:
        mask, (first, _) = sample.loss_mask, turns[0]
        parts = [mask[:first], *(mask[start - 1 : start] for start, _ in turns[1:])]
        parts += [1 - mask[start:end] for start, end in turns]
        differ = sum(int((part != 0).sum()) for part in parts)
        wrong, tokens, rows = wrong + differ, tokens + sum(map(len, parts)), rows + (differ > 0)
    return Doubt("loss masks against answers, mask values", 0, wrong, 0, wrong > 0,
                 f"{wrong:,} of {tokens:,} mask values, in {rows} samples, are not those of the answers")  # fmt: skip


def vocabulary(prediction: "Prediction", samples: "Samples", frequencies: "torch.Tensor | None" = None) -> Doubt:
    """Coverage over that of as many tokens by `frequencies` [V], how often each occurs in the answers that were trained on: a
    mapping chosen from these does no better. Without them by the answers' own counts, which no mapping can beat."""
    import torch

    from eagle3kit.vocabulary import ranked

    said = torch.cat([sample.input_ids[start:end].cpu() for sample, turns in samples for start, end in turns])
    counts = torch.bincount(said, minlength=0 if frequencies is None else len(frequencies))
    chosen = ranked(counts if frequencies is None else frequencies, prediction.vocabulary)
    best = int(counts[chosen].sum()) / max(1, len(said))
    covered, of = prediction.covered
    share, limit = covered / max(1, of), CHECKS["coverage"].threshold
    whose = "of their own" if frequencies is None else "that are the most frequent in training"
    return Doubt("draft vocabulary, share of the answers' tokens", best, share, best * (1 - limit), share < limit * best,
                 f"{share:.1%} of {of:,} tokens are inside; {best:.1%} with {prediction.vocabulary:,} {whose}")  # fmt: skip
