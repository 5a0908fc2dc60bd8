"""What the last state betrays beside the target's final norm and head: whose tokens it belongs to, how it must be read.

No forward of the target is needed here: two of its tensors, [V, H] and [H], are all that is loaded.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from eagle3kit.hidden_states import normalised
from eagle3kit.signs import Sign, sign, unchecked

if TYPE_CHECKING:
    from torch import Tensor

    from eagle3kit.samples import StatesSample

# How a last state x [T, H] may have to be read before the head; the words finish "the next token is predicted best by ...".
READINGS = {"norm": "head(norm(x)), the norm multiplying by w", "1 + w": "head(norm(x)), the norm multiplying by 1 + w",
            "none": "head(x), without a norm"}  # fmt: skip
LEAST = 8  # compared tokens that two samples must share: own ones are right for half at least, others' for a tenth
POSITIONS = 48  # tokens of a sample that are looked at: some hundreds in all tell 5 points apart
MARGIN = 0.1  # by how much another sample's tokens must fit better to be taken for the true ones


def read(last: "Tensor", weights: dict[str, "Tensor"], reading: str, eps: float) -> "Tensor":
    """What goes into the head, float32 [n, H], by one of READINGS."""
    if reading == "none":
        return last.float()
    return normalised(last, weights["final_norm"], eps=eps, adds_one=reading == "1 + w")


def likeliest(x: "Tensor", head: "Tensor", rows: int = 16384) -> "Tensor":
    """argmax of `x` [n, H] times `head` [V, H], int64 [n]; the head is widened to float32 block by block."""
    import torch

    best, where = torch.full((len(x),), -torch.inf), torch.zeros(len(x), dtype=torch.int64)
    for start in range(0, len(head), rows):
        value, place = (x @ head[start : start + rows].float().T).max(dim=1)
        where = torch.where(value > best, place + start, where)
        best = torch.maximum(best, value)
    return where


def positions(sample: "StatesSample", most: int = POSITIONS) -> "Tensor":
    """Tokens t of `sample` whose successor t + 1 is compared: supervised ones, spread evenly; without any, all others."""
    import torch

    length = min(len(sample.input_ids), len(sample.states[-1]))
    answers = sample.loss_mask[:length].nonzero().squeeze(1) - 1
    found = answers[answers >= 0]
    found = found if len(found) else torch.arange(max(0, length - 1))
    return found[torch.linspace(0, len(found) - 1, min(most, len(found))).round().long()] if len(found) else found


def of_last_state(
    samples: Sequence[tuple[str, "StatesSample"]], weights: dict[str, "Tensor"], *, eps: float, adds_one: bool, reader: str,
    greedy: bool | None,
) -> tuple[list[Sign], Sign]:
    """(whose tokens; norm applied; how to read it), and how often the next token is what the last state predicts.

    `weights`: head [V, H] and final_norm [H]. `adds_one` is the target's kind of norm, `reader` the READING that the
    trainer of these samples will use. `greedy` False: the answers were sampled or are not the target's own on purpose.
    """
    import torch

    places = [positions(row) for _, row in samples]
    asked = {reading: [likeliest(read(row.states[-1][place], weights, reading, eps), weights["head"])
                       for (_, row), place in zip(samples, places, strict=True)] for reading in READINGS}  # fmt: skip
    truth = [row.input_ids[place + 1] for (_, row), place in zip(samples, places, strict=True)]
    right = {reading: torch.cat([said == true for said, true in zip(asked[reading], truth, strict=True)]) for reading in READINGS}
    best = max(READINGS, key=lambda reading: (int(right[reading].sum()), reading == reader))
    found = [own_tokens(samples, places, asked), norm_applied(samples, weights["final_norm"], adds_one), _reading(right, reader)]
    return found, _answers(right[best], greedy)


def own_tokens(
    samples: Sequence[tuple[str, "StatesSample"]], places: Sequence["Tensor"], asked: dict[str, list["Tensor"]]
) -> Sign:
    """Whether each sample's states predict its own tokens, or another's better: share[i][j] of the tokens of sample j, at
    the positions looked at of sample i, that the states of i predict; by the reading that does best."""
    if len(samples) < 2:
        return unchecked("own tokens", "one sample alone has no other to be mistaken for")
    wrong, judged, note = 0, 0, ""
    for i, (name, _) in enumerate(samples):
        shares: dict[int, float] = {}
        for j, (_, other) in enumerate(samples):
            if bool((shared := places[i] + 1 < len(other.input_ids)).sum() < LEAST):
                continue
            true = other.input_ids[places[i][shared] + 1]
            shares[j] = max(float((said[i][shared] == true).float().mean()) for said in asked.values())
        if i not in shares or len(shares) < 2:
            continue
        judged += 1
        best = max(shares, key=lambda j: shares[j])
        if shares[best] > shares[i] + MARGIN:
            wrong += 1
            note = note or (f"the states of {name} predict {shares[i]:.0%} of its own tokens, but {shares[best]:.0%} of those of "
                            f"{samples[best][0]}: the samples were put in another order than their states")  # fmt: skip
    if not judged:
        return unchecked("own tokens", f"no two samples have {LEAST} compared tokens in common")
    return sign("own tokens", wrong / judged, judged, note or "each sample's states fit its own tokens best")


def norm_applied(samples: Sequence[tuple[str, "StatesSample"]], final_norm: "Tensor", adds_one: bool) -> Sign:
    """The spread of |x / w| over tokens, by its mean: nothing where x is what an RMS norm with weight w gave.

    For x = w · y / rms(y), x / w = y / rms(y), which has rms 1 whatever y was. Weights of zero are left out, and so is each
    sample's first token, which before the norm is the longest by far.
    """
    import torch

    weight = final_norm.float() + (1.0 if adds_one else 0.0)
    kept = weight.abs() > 1e-3 * weight.abs().max()
    lengths = [(row.states[-1][1:].float()[:, kept] / weight[kept]).pow(2).mean(1).sqrt() for _, row in samples]
    every = torch.cat(lengths) if lengths else torch.zeros(0)
    if len(every) < 8:
        return unchecked("norm applied", "too few tokens to tell")
    spread = float(every.std() / every.mean().clamp_min(1e-30))
    note = f"|last state / norm weight| is {float(every.mean()):.3g} on average, give or take {spread:.1%}"
    check = sign("norm applied", spread, len(every), note)
    return sign("norm applied", spread, len(every), f"{note}: the final norm has been applied already") if check.bad else check


def _reading(right: dict[str, "Tensor"], reader: str) -> Sign:
    """The reader's reading against the best other one, token by token."""
    n = len(right[reader])
    other = max((reading for reading in READINGS if reading != reader), key=lambda reading: int(right[reading].sum()))
    gain = int((right[other] & ~right[reader]).sum()) - int((right[reader] & ~right[other]).sum())
    apart = int((right[other] ^ right[reader]).sum())
    lead = gain / max(1, n)
    shares = ", ".join(f"{READINGS[reading]} {int(found.sum()) / max(1, n):.0%}" for reading, found in right.items())
    # Half of `apart` fall either way by chance, give or take half its root.
    bad = lead > 0.05 and gain > 2.6 * apart**0.5
    told = f"the next token is predicted best by {READINGS[other]}, but it will be read as {READINGS[reader]} " if bad else ""
    return sign("final norm", lead, n, f"{told}(next token right: {shares})", bad=bad)


def _answers(right: "Tensor", greedy: bool | None) -> Sign:
    n = len(right)
    share = int(right.sum()) / max(1, n)
    if greedy is False:
        note = f"{share:.1%} of the answers' tokens are the target's first choice; they were not to be its greedy words"
        return sign("own answers", share, n, note, bad=n > 0 and share < 0.2, threshold=0.2)
    others = ("; sampled ones and other people's agree less: let the target write them (dataset.regenerate)"
              if share < 0.9 else "")  # fmt: skip
    return sign("own answers", share, n, f"{share:.1%} of the answers' tokens are the target's first choice{others}")
