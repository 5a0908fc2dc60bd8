"""Does speculation change what is said? Answers compared token for token, and how often plain serving differs from itself.

Greedy speculation is lossless by construction. In bfloat16 another order of additions tips near ties, so a batch of another shape
may say another word, and from there another answer: a rate per token, which two plain runs show without any draft.
"""

from collections.abc import Mapping, Sequence
from math import comb

from eagle3kit.acceptance import wilson

Answers = Sequence[Sequence[int]]


def parted(one: Answers, other: Answers) -> tuple[int, int]:
    """(answers that part, tokens at which they could have): an answer is looked at up to its first difference.

    (1, 2, 3) and (1, 2, 3): none in 3 tokens. (1, 2, 3) and (1, 5, 3): one, in 2. An answer that goes on where the other ended
    parts there.
    """
    count, tokens = 0, 0
    for a, b in zip(one, other, strict=True):
        alike = next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        differ = list(a) != list(b)
        count, tokens = count + differ, tokens + alike + differ
    return count, tokens


def rows(pairs: Mapping[str, tuple[Answers, Answers]]) -> list[dict[str, object]]:
    """A row a pair of ways that answered the same prompts: equal answers and their share, answers that part per 1,000 tokens;
    both with 95 % intervals (Wilson)."""
    made = []
    for name, (one, other) in pairs.items():
        apart, tokens = parted(one, other)
        same, of = len(one) - apart, len(one)
        low, high = wilson(same, of)
        least, most = wilson(apart, tokens)
        made.append({"pair": name, "equal": same, "of": of, "share": same / of if of else None, "from": low, "to": high,
                     "tokens": tokens, "parted per 1,000": 1000 * apart / tokens if tokens else None, "at least": 1000 * least,
                     "at most": 1000 * most})  # fmt: skip
    return made


def verdict(plain: Answers, draft: Answers, again: Answers | None) -> str:
    """Whether the draft changes more answers than a second plain run, in a sentence; without one, only how many it changes.

    An exact sign test over the prompts where just one of the two differs from plain (McNemar): of 5 such prompts, all the
    draft's, p = 0.0625.
    """
    changed = [list(a) != list(b) for a, b in zip(plain, draft, strict=True)]
    told = f"the draft changes {sum(changed)} of {len(changed)} answers"
    if again is None:
        return f"{told}; plain was served once, so how many it changes by itself is not known (acceptance.repeat_plain)"
    itself = [list(a) != list(b) for a, b in zip(plain, again, strict=True)]
    mine = sum(a and not b for a, b in zip(changed, itself, strict=True))
    theirs = sum(b and not a for a, b in zip(changed, itself, strict=True))
    p = _sign_test(mine, theirs)
    more = "more than plain serving changes by itself" if mine > theirs and p < 0.05 else "no more than plain serving by itself"
    return f"{told}, a second plain run {sum(itself)} of {len(itself)}: {more} (p = {p:.2g}, paired over prompts)"


def _sign_test(one: int, other: int) -> float:
    """Two-sided p that a fair coin falls `one` against `other` times or further apart."""
    n = one + other
    return min(1.0, 2 * sum(comb(n, k) for k in range(min(one, other) + 1)) / 2**n)
