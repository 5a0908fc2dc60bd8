"""The way from a trainer's figure to the served one: each named cause of a difference, switched off by an experiment or said why
it cannot be.

A line is the length on the same prompts with one thing switched, over how many drafts, with its interval. Two lines of one cause
stand beside each other: their difference is what it makes. RoPE, norm flags and states are switched off by `suspects`, which
looks only where a comparison raised a doubt; without one there is nothing left that they could explain.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from eagle3kit.acceptance import Acceptance, from_steps, interval, total
from eagle3kit.agreement import trimmed

if TYPE_CHECKING:
    from eagle3kit.predict import Prediction
    from eagle3kit.suspects import Suspect

CAUSES = ("prompt tokens in the estimate", "vocabulary", "off-policy targets", "position weighting", "past the end",
          "positions near the start", "sequence limit", "dtype and kernels", "RoPE or window", "norm flags",
          "train/serve state mismatch")  # fmt: skip
# Which suspects answer for which cause.
EXPERIMENTS = {"dtype and kernels": ("number type",), "RoPE or window": ("RoPE",), "norm flags": ("a norm flag",),
               "train/serve state mismatch": ("states of training and serving differ", "layers shifted",
                                              "tokens and states misaligned")}  # fmt: skip


@dataclass(frozen=True)
class Cause:
    """One line: the `cause` it belongs to, what was counted (`name`), the length with its 95 % interval over prompts, drafts, and
    `what` is switched. None where the cause was not switched off; `what` then says why."""

    cause: str
    name: str
    length: float | None
    low: float | None
    high: float | None
    drafts: int | None
    what: str


def decompose(
    prediction: "Prediction", served: Sequence[Acceptance], *, steps: Sequence[Sequence[int]] = (),
    new_tokens: Sequence[int] = (), equal: Sequence[bool] = (), prompt_tokens: Sequence[int] = (), limit: int | None = None,
    suspects: Sequence["Suspect"] = (), start_tokens: int = 16, resamples: int = 500, seed: int = 0,
) -> list[Cause]:  # fmt: skip
    """Every cause of CAUSES, in at least one line each; what vLLM counted last.

    Args:
        served: vLLM's counts, a record a prompt (or a wave).
        steps, new_tokens, prompt_tokens: of each prompt, the draft tokens accepted in each verify step, the answer's and the
            prompt's length; without them nothing is known of single verify steps.
        equal: which served answers are the recorded ones.
        limit: tokens of the longest sequence that was trained on.
        suspects: from `suspects.investigate`, where it was called.
    """
    told = len(steps) == len(served) == len(new_tokens)
    lines = [*_estimates(prediction)]
    if told:
        walks = [[step.accepted for step in mine] for mine in prediction.steps]
        lines += _ends(prediction, steps, new_tokens)
        lines += _starts(walks if len(walks) == len(served) else [], steps, prediction.depth, start_tokens)
        if limit and len(prompt_tokens) == len(served):
            lines += _limit(steps, prompt_tokens, prediction.depth, limit)
    lines += _equal(prediction, served, equal)
    made = [_line(*line, resamples, seed) for line in lines]
    made = [line for line in made if line.drafts or line.length is None]
    for cause, names in EXPERIMENTS.items():
        made += [Cause(cause, f"{one.name}, undone", one.length, None, None, None, one.seen)
                 for one in suspects if one.name in names]  # fmt: skip
    made += [Cause(cause, "not switched off", None, None, None, None, _why_not(cause, told, bool(suspects)))
             for cause in CAUSES if cause not in {line.cause for line in made}]  # fmt: skip
    made.sort(key=lambda line: CAUSES.index(line.cause))
    return [*made, _line("", "served: vLLM's counters", served, "every verify step of every prompt", resamples, seed)]


Line = tuple[str, str, Sequence[Acceptance], str]


def _line(cause: str, name: str, records: Sequence[Acceptance], what: str, resamples: int, seed: int) -> Cause:
    whole = total(records)
    low, high = interval(records, resamples=resamples, seed=seed).length if whole.drafts else (None, None)
    return Cause(cause, name, whole.length, low, high, whole.drafts, what)


def _estimates(one: "Prediction") -> Iterator[Line]:
    yield "prompt tokens in the estimate", "mean over answers and prompts, recorded tokens as the truth", one.with_prompts, (
        "what an estimate without a loss mask averages")  # fmt: skip
    yield "prompt tokens in the estimate", "mean over answers, recorded tokens as the truth", one.everywhere_recorded, (
        "the prompts' tokens are left out")  # fmt: skip
    yield "vocabulary", "mean over answers, among the draft vocabulary", one.everywhere_restricted_records, (
        "what speculators' full_acc averages: tokens outside the draft vocabulary may count as hits")  # fmt: skip
    yield "vocabulary", "mean over answers", one.everywhere_records, "tokens outside the draft vocabulary are misses"
    yield "vocabulary", "replay, outside tokens as hits", one.outside, "the most that the cut vocabulary can cost"
    yield "off-policy targets", "replay, recorded tokens as the truth", one.recorded, "instead of the target's own next tokens"
    yield "off-policy targets", "replay, off-policy places as hits", one.foreign, (
        "the most that answers not the target's own can cost")  # fmt: skip
    yield "position weighting", "mean over answers, once more", one.everywhere_records, "a draft starts at every position"
    yield "position weighting", "replay: the prediction", one.records, "drafts start where serving starts them"


def _ends(one: "Prediction", steps, new_tokens) -> Iterator[Line]:
    yield "past the end", "served, cut at the answers' ends", [
        trimmed(mine, n, one.depth) for mine, n in zip(steps, new_tokens, strict=True)
    ], "what a last draft holds past the end is left out, as no prediction can see it"  # fmt: skip


def _starts(walks, steps, depth: int, tokens: int) -> Iterator[Line]:
    cause = "positions near the start"
    for name, every in (("replay", walks), ("served", steps)):
        cut = [_within(mine, tokens) for mine in every]
        early = [from_steps(mine[:n], depth) for mine, n in zip(every, cut, strict=True)]
        late = [from_steps(mine[n:], depth) for mine, n in zip(every, cut, strict=True)]
        if every:
            yield cause, f"{name}, first {tokens} tokens of answers", early, "verify steps that begin there"
            yield cause, f"{name}, after {tokens} tokens", late, "all others"


def _limit(steps, prompt_tokens, depth: int, limit: int) -> Iterator[Line]:
    cut = [_within(mine, limit - n) for mine, n in zip(steps, prompt_tokens, strict=True)]
    if all(n == len(mine) for n, mine in zip(cut, steps, strict=True)):
        yield "sequence limit", f"served, all within {limit:,} tokens", [from_steps(mine, depth) for mine in steps], (
            "no verify step began past the longest sequence that was trained on, so there is nothing to switch off")  # fmt: skip
        return
    parts = [[from_steps(part, depth) for part in side]
             for side in zip(*((mine[:n], mine[n:]) for mine, n in zip(steps, cut, strict=True)), strict=True)]  # fmt: skip
    yield "sequence limit", f"served, contexts within {limit:,} tokens", parts[0], "the longest sequence that was trained on"
    yield "sequence limit", f"served, contexts past {limit:,} tokens", parts[1], "longer than anything trained on"


def _equal(one: "Prediction", served, equal) -> Iterator[Line]:
    if len(equal) != len(served) or len(served) != len(one.records) or not any(equal):
        return
    words = ("number type, kernels and company told other answers in the rest" if not all(equal)
             else "all answers are the recorded ones, so number type and kernels changed no token")  # fmt: skip
    for name, rows in (("replay", one.records), ("served", served)):
        yield "dtype and kernels", f"{name}, prompts with the recorded answer", [
            row for row, same in zip(rows, equal, strict=True) if same
        ], words  # fmt: skip


def _within(steps: Sequence[int], tokens: int) -> int:
    """How many verify steps begin within the first `tokens` tokens, one of which is said before the first of them."""
    said, count = 1, 0
    for accepted in steps:
        if said >= tokens:
            break
        said, count = said + accepted + 1, count + 1
    return count


def _why_not(cause: str, told: bool, looked: bool) -> str:
    if cause in EXPERIMENTS and not looked:
        return "no comparison raised a doubt, so there is no difference that it could explain"
    if cause in EXPERIMENTS:
        return "the experiment could not be made; the table of likely faults says why"
    if cause == "sequence limit" and told:
        return "how long the training sequences were is not known here"
    return "this vLLM does not tell of single verify steps or requests"
