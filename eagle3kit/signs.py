"""What the doctor says: one sign a check, with its number, its threshold, the reason for it, and what the fault costs.

The table CHECKS is the whole of it: a threshold that is *derived* follows from the format or from arithmetic; one that was
*measured* stands between what right and wrong samples of SmolLM2-135M-Instruct (float32 and bfloat16) gave.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from eagle3kit.errors import KitError
from eagle3kit.words import three


class Check(NamedTuple):
    """`side` is where a number is bad: "above" the threshold, or "below" it."""

    side: str
    threshold: float
    reason: str
    effect: str


@dataclass(frozen=True)
class Sign:
    """One check. `number` of `n` things looked at, bad on one side of `threshold`; `number` is None where it could not be
    checked, and then `note` says why. `effect` is what such a fault does to acceptance."""

    name: str
    number: float | None
    n: int
    threshold: float
    reason: str
    effect: str
    bad: bool
    note: str

    @property
    def word(self) -> str:
        """FAULT, sound or not checked: what is unknown is never called sound."""
        return "FAULT" if self.bad else "not checked" if self.number is None else "sound"

    @property
    def line(self) -> str:
        """All that a person needs of it."""
        if self.number is None:
            return f"{self.name}: not checked: {self.note}"
        return (f"{self.name}: {three(self.number)} of {self.n:,} looked at, threshold {three(self.threshold)}: {self.note}"
                + (f". {self.effect}" if self.bad else ""))  # fmt: skip


CHECKS = {
    # Of the samples alone
    "states per token": Check(
        "above", 0, "derived: each token has a state in each layer; the number counts samples where that is not so",
        "States would stand beside other tokens than theirs, so the draft learns to continue something else: prefix caching "
        "was on, and the server computed only what it had not seen"),
    "states a sample": Check(
        "above", 0, "derived: the auxiliary layers and the last state; the number counts samples with another number of them",
        "The final layer was dropped without a word (older vLLM with the DeepSeek family, so Kimi too): an auxiliary layer "
        "would pass for the last state, and the draft would learn another model's words"),
    "finite values": Check(
        "above", 0, "derived: one NaN reaches every weight in the first step; the number counts values",
        "The loss is NaN from the first such sample on, and the draft accepts nothing"),
    "zero states": Check(
        "above", 0, "derived: a residual stream is a sum that is never zero in all its numbers; the number is a share of tokens",
        "Validation looks fine, for it reads zeros too; served, acceptance falls to about nothing"),
    "constant states": Check(
        "below", 0.01, "measured: the median change from a token to another, relative to the state, is 0.7 to 1.0 in every layer "
        "(steps from a token to the same one are left out: an answer that got stuck on one token has states that hardly change)",
        "The draft sees the same whatever was said, so it can learn token frequencies only: a length near 1"),
    "repeated states": Check(
        "above", 0, "derived: no two different tokens have one state to the last bit; the number is a share of tokens",
        "A buffer was written twice: the draft learns from states that are not of its tokens, and served acceptance is low "
        "though validation is not"),
    "last state is its own": Check(
        "above", 0, "derived: no layer adds nothing; the number counts samples whose last state equals an auxiliary one",
        "The final layer is missing and another stands in its place: the draft learns an unfinished model's words"),
    # Of the samples and the tokenizer
    "token ids": Check(
        "above", 0, "derived: the target has no such token; the number counts tokens",
        "Made with another tokenizer: nothing that the draft learns fits what the target says"),
    "supervised tokens": Check(
        "above", 0, "derived: nothing is learned from a sample without any; the number is a share of samples",
        "Loss and accuracy stay at 0 on these, and a data set of them trains nothing at all"),
    "chat template": Check(
        "below", 0.5, "derived: every answer follows the target's own generation prompt; half leaves room for other turns",
        "The draft learns another dialogue than the one served: its first tokens after each prompt are misses"),
    "mask place": Check(
        "below", 0.9, "derived: an answer's first token follows the generation prompt; a cut sample may begin inside an answer",
        "Shifted by one, the loss leaves out the first or the last token of every answer and counts one of the prompt: the "
        "end-of-turn token or the first word is never learned"),
    "end of turn": Check(
        "below", 0.02, "derived: a mask that leaves it out does so always; answers as long as the longest count as cut",
        "The draft never learns to end a turn (nor is the token counted for its vocabulary): a certain miss at every end"),
    # Of the samples and the target
    "own tokens": Check(
        "above", 0, "derived: a sample's states predict its own tokens as well as another's or better, 10 points aside; it "
        "counts the share of samples (measured: all of its own tokens, 2 % of another's)",
        "States of one conversation under the tokens of another: noise to learn from, so low acceptance everywhere"),
    "norm applied": Check(
        "below", 0.02, "derived: after an RMS norm, state / weight has the same length at every token (0 in float32, 0.0006 "
        "in bfloat16); measured before the norm: 0.19. The number is the spread of that length over its mean",
        "The trainer norms what is normed already, so the draft is taught a distorted distribution: a share of the target's "
        "choices, the larger the more uneven the weights, becomes a miss"),
    "auxiliary layers": Check(
        "above", 0, "derived: each stored state is nearest to the state that its id names; the number counts those that are not. "
        "Measured: 0.000002 from it in float32, 0.02 in bfloat16, 0.34 or more from its neighbours",
        "vLLM feeds the draft other layers than it learned from. A trial: validation 3.90, served 2.63 tokens a step; reports "
        "of one layer's shift: 10 % accepted at the first position where 45 % were due"),
    "last layer": Check(
        "above", 0.1, "measured: relative distance from the target's own state before the final norm, 0.000002 in float32, "
        "0.02 in bfloat16, 1.3 for the layer before",
        "The draft is taught what an unfinished model would say, which caps what the whole one accepts"),
    "final norm": Check(
        "above", 0.05, "derived: no other reading of the last state may predict the next token better, chance aside (2.6 "
        "standard errors of the paired difference); the number is by how much the best other one does",
        "The trainer's idea of the target's words is wrong wherever its final norm is: loss can look better and acceptance "
        "falls (a trial: 3.92 to 3.60; a report: 25 % accepted, 40 % after the repair; a 1 + w norm read as w: nothing right)"),
    "own answers": Check(
        "below", 0.9, "measured: all of 384 tokens that the target wrote greedily are the argmax of its states (batching may "
        "cost a few), 59 % of 699 that its users wrote",
        "The draft is taught words that the target would not say, so what it learned is rejected where the two differ"),
    # Of a mapping
    "d2t": Check(
        "below", 1, "derived: arange(D) + d2t == t2d.nonzero() in speculators 0.3 to 0.9 and in vLLM; the number is the share of "
        "draft tokens for which it holds",
        "Training never reads d2t, so all looks well; served, these draft tokens come out as others and are rejected"),
    "special tokens": Check(
        "above", 0, "derived: a token outside can never be proposed; the number counts special tokens outside",
        "Every turn ends with one: a certain miss each time"),
    "frequencies": Check(
        "below", 0.98, "derived: t2d keeps the most frequent tokens, after those that must be in (a few may be unknown here; 0.9 "
        "where all are). The number is the share of token_freq's most frequent that t2d holds",
        "t2d was chosen on other counts than those beside it, so on other data"),
    "coverage": Check(
        "below", 0.9, "derived: coverage of the answers over that of a mapping of this size made from their own kind; a tenth "
        "less lowers the first position's ceiling by as much",
        "Each token outside is a certain miss: English data alone gave a length of 1.48 on Chinese where 2.3 was had with both"),
}  # fmt: skip


def sign(name: str, number: float, n: int, note: str, *, bad: bool | None = None, threshold: float | None = None) -> Sign:
    """The sign of check `name`: bad by the side of its threshold that `number` lies on, unless `bad` says it. Of nothing
    looked at, nothing is known."""
    if n == 0:
        return unchecked(name, f"nothing to look at: {note}")
    check = CHECKS[name]
    limit = check.threshold if threshold is None else threshold
    if bad is None:
        bad = number > limit if check.side == "above" else number < limit
    return Sign(name, float(number), n, limit, check.reason, check.effect, bool(bad), note)


def unchecked(name: str, why: str) -> Sign:
    """The sign of a check that could not be made."""
    check = CHECKS[name]
    return Sign(name, None, 0, check.threshold, check.reason, check.effect, False, why)


def require_sound(signs: Iterable[Sign]) -> None:
    """KitError with one line a fault, unless there is none."""
    faults = [found.line for found in signs if found.bad]
    if faults:
        raise KitError(f"{len(faults)} faults that no shape betrays; training on these files would look fine and serve badly:\n"
                       + "\n".join(faults))  # fmt: skip
