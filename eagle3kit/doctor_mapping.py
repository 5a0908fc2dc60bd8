"""What a vocabulary mapping betrays: target ids or nothing in place of offsets, other data, special tokens left out."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from eagle3kit.signs import Sign, sign, unchecked

if TYPE_CHECKING:
    from torch import Tensor


def examine_mapping(
    t2d: "Tensor", d2t: "Tensor", token_freq: "Tensor | None" = None, *, special: Mapping[int, str] | None = None,
    counts: "Tensor | None" = None, own: "Tensor | None" = None,
) -> list[Sign]:
    """The signs of a mapping: `t2d` bool [V], `d2t` int64 [D] and, where given, `token_freq` int64 [V] beside it.

    `special`: tokens that must be in, id -> text. `counts` int64 [V]: how often each token occurs in answers that the
    draft will be asked for. `own` int64 [V]: counts of *other* answers of the same kind, from which a mapping of one's own
    would be made; without it, `counts` themselves, which flatters that mapping: it then holds tokens seen once.
    """
    return [convention(t2d, d2t), _special(t2d, special), _frequencies(t2d, token_freq, special),
            _coverage(t2d, counts, counts if own is None else own)]  # fmt: skip


def convention(t2d: "Tensor", d2t: "Tensor") -> Sign:
    """Whether `arange(D) + d2t == t2d.nonzero()`, and if not, what d2t is instead.

    Example, tokens 1, 4, 5 of 6 kept: offsets [1, 3, 3]; target ids [1, 4, 5]; arange [0, 1, 2], which makes 0, 2, 4 of
    them; missing, as zeros, 0, 1, 2.
    """
    import torch

    d2t, targets, vocab = d2t.long().flatten(), t2d.nonzero().squeeze(1), t2d.numel()
    size = len(d2t)
    places = torch.arange(size)
    there = places + d2t
    if size != len(targets):
        return sign("d2t", 0, size, f"{size:,} draft tokens, but t2d keeps {len(targets):,}: of two different mappings", bad=True)
    good = int((there == targets).sum())
    if good == size:
        return sign("d2t", 1, size, "offsets: arange(D) + d2t is what t2d keeps")
    row = int((there != targets).nonzero()[0])
    where = (f"d2t[{row}] is {int(d2t[row])} and makes target token {int(there[row])} of draft token {row}; t2d keeps "
             f"{int(targets[row])}")  # fmt: skip
    if torch.equal(d2t, targets):
        what = "d2t holds target ids, not offsets: subtract arange(D)"
    elif torch.equal(d2t, places):
        what = "d2t is arange(D), a placeholder: draft token i would come out as target token 2 i"
    elif not bool(d2t.any()):
        what = "d2t is all zero, as where it is missing from a checkpoint: draft token i would come out as target token i"
    elif int(there.min()) < 0 or int(there.max()) >= vocab:
        outside = (there < 0) | (there >= vocab)
        row = int(outside.nonzero()[0])
        what = f"{int(outside.sum()):,} draft tokens come out of range, first d2t[{row}] at {int(there[row])} of {vocab:,}"
    elif bool((there.diff() <= 0).any()):
        row = int((there.diff() <= 0).nonzero()[0]) + 1
        what = f"target ids do not increase: draft token {row} comes out as {int(there[row])}, after {int(there[row - 1])}"
    else:
        what = "d2t is of another mapping than t2d"
    return sign("d2t", good / size, size, f"{what} ({where})")


def _special(t2d: "Tensor", special: Mapping[int, str] | None) -> Sign:
    if special is None:
        return unchecked("special tokens", "only the target's tokenizer knows them")
    inside = {token: text for token, text in special.items() if token < t2d.numel()}
    out = [f"{text} ({token})" for token, text in inside.items() if not bool(t2d[token])]
    note = f"{', '.join(out[:4])} outside the draft vocabulary; name them in vocabulary.always" if out else "all inside"
    return sign("special tokens", len(out), len(inside), note)


def _frequencies(t2d: "Tensor", token_freq: "Tensor | None", special: Mapping[int, str] | None) -> Sign:
    """Whether t2d keeps what `vocabulary.build` would keep of these counts, special tokens ahead of all others."""
    from eagle3kit.vocabulary import ranked

    if token_freq is None or token_freq.shape != t2d.shape:
        return unchecked("frequencies", "there is no token_freq of this vocabulary beside it")
    counts, inside = token_freq.clone(), [token for token in special or {} if token < len(token_freq)]
    counts[inside] += int(token_freq.max()) + 1
    top = ranked(counts, int(t2d.sum()))
    top = top[token_freq[top] > 0]
    if not len(top):
        return unchecked("frequencies", "token_freq is all zero")
    held = int(t2d[top].sum())
    note = f"t2d holds {held:,} of token_freq's {len(top):,} most frequent tokens"
    return sign("frequencies", held / len(top), len(top), note, threshold=0.9 if special is None else None)


def _coverage(t2d: "Tensor", counts: "Tensor | None", own: "Tensor | None") -> Sign:
    from eagle3kit.vocabulary import ranked

    if counts is None or own is None or not bool(counts.any()):
        return unchecked("coverage", "no answers were given to hold it against")
    every, size = int(counts.sum()), int(t2d.sum())
    mine, best = int(counts[t2d].sum()), int(counts[ranked(own, size)].sum())
    note = f"{mine / every:.1%} of the answers' tokens are inside; {best / every:.1%} with a mapping of {size:,} of their own"
    return sign("coverage", mine / max(1, best), every, note)
