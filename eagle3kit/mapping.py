"""Vocabulary mappings as files, anybody's: read, told apart by proof, turned from one convention into the other.

Two conventions go about under one name. Draft token i stands for target token
    offsets    i + d2t[i]      every version of speculators, and vLLM (model_executor/models/llama_eagle3.py)
    absolute   d2t[i]          what some notes and scripts take it for
Example, target tokens 1, 4 and 5 kept: offsets [1 3 3], absolute [1 4 5]. `t2d` (bool [V]) proves which one a file holds:
exactly one of `arange(D) + d2t` and `d2t` can equal `t2d.nonzero()`, but for the mapping of nothing to itself.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from eagle3kit import contracts, doctor_mapping, headers
from eagle3kit.faults import Fault, Unreadable
from eagle3kit.samples import load

if TYPE_CHECKING:
    from torch import Tensor

Convention = Literal["offsets", "absolute", "unproven", "neither"]
SERVED = "speculators and vLLM read offsets"
OTHER_WORDS = f"{SERVED}: every draft token is taken for another word, acceptance falls to nearly none"
CHANCE = 9  # what happens by chance but once in 10^9 times is not taken for chance
TO_OFFSETS = "convert it: `eagle3kit convert SRC DST --to offsets`"
REBUILD = "build the mapping again from the token frequencies"


@dataclass(frozen=True)
class Proof:
    """Which convention a d2t holds, and the sentence that proves it; `likely` is the one that is as good as sure where
    nothing proves either."""

    convention: Convention
    said: str
    likely: Convention | None = None


def read(path: Path, kind: str) -> "Tensor":
    """The t2d, d2t or token_freq in one file: .pt of a tensor or of {kind: tensor}, .npy, or a dictionary of counts (then
    int64 up to the highest id counted).

    Raises:
        Unreadable: not a tensor file, or not of this kind; with the fault.
    """
    import torch

    found = contracts.recognise(headers.read(path))
    if found is None or found.kind not in (kind, "mapping"):
        what = found.version if found else "other tensors"
        raise Unreadable(Fault(str(path), "", kind, what, "", "name the file that holds it"))
    if found.faults:
        raise Unreadable(found.faults[0])
    content = some(path, (kind,))
    if found.kind == "mapping" and kind not in content:
        raise Unreadable(Fault(str(path), kind, "a tensor", f"missing (the file has {', '.join(content)})", "", REBUILD))
    if kind == "token_freq" and "" not in content and kind not in content:
        counts = torch.zeros(max(content) + 1 if max(content) < 1 << 24 else 0, dtype=torch.int64)
        if not len(counts):
            raise Unreadable(Fault(str(path), f"token_freq[{max(content)}]", "a token id of some vocabulary",
                                   f"{max(content):,}", "", "count the tokens again"))  # fmt: skip
        counts[torch.tensor(list(content))] = torch.tensor(list(content.values()))
        return counts
    return content.get(kind, content.get(""))


def some(path: Path, keys: tuple[str, ...]) -> dict[str, "Tensor"]:
    """The content of a tensor file; of a safetensors file only those of `keys` that it has, and nothing else is read."""
    if headers.read(path).container != "safetensors":
        return load(path)
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        return {key: file.get_tensor(key) for key in keys if key in file.keys()}  # noqa: SIM118 - not a dictionary


def prove(d2t: "Tensor", t2d: "Tensor | None", vocab: int | None = None) -> Proof:
    """Which convention `d2t` (int64 [D]) holds, by `t2d` (bool [V]) where there is one, else by its own numbers alone, none of
    which may name a token that a target of `vocab` tokens does not have.

    Example, alone: [1, 3, 3] is offsets, for target ids do not repeat; [1, 4, 5] of a target of 6 tokens is target ids, for
    as offsets it would reach token 7; of a target of 100 it may be either.
    """
    import torch

    size = len(d2t)
    targets = torch.arange(size) + d2t
    if t2d is not None:
        kept = t2d.nonzero().squeeze(1)
        if torch.equal(targets, kept):
            return Proof("offsets", f"arange({size}) + d2t equals the {size:,} places where t2d is true: offsets, proven")
        if torch.equal(d2t, kept):
            return Proof("absolute", f"d2t itself equals the {size:,} places where t2d is true: target ids, proven")
        return Proof("neither", doctor_mapping.convention(t2d, d2t).note)
    if not bool(d2t.any()) and size > 1:
        return Proof("offsets", f"it is all zero: draft token i is target token i, right only for a draft of all {size:,} tokens "
                     "that its target has")  # fmt: skip
    rising, as_offsets = bool((d2t.diff() > 0).all()), bool((targets.diff() > 0).all())
    highest = int(targets.max())
    if rising and vocab is not None and highest >= vocab:
        if int(d2t[0]) >= 0 and int(d2t[-1]) < vocab:
            return Proof("absolute", f"as offsets it would reach target token {highest:,} of {vocab:,}, as target ids it stays "
                         "inside: target ids, proven")  # fmt: skip
        return Proof("neither", f"as target ids it reaches {int(d2t[-1]):,}, as offsets {highest:,}, of the target's {vocab:,}")
    if as_offsets and not rising:
        place = int((d2t.diff() <= 0).nonzero()[0])
        return Proof("offsets", f"d2t[{place + 1}] is not above d2t[{place}]: as target ids two draft tokens would be one or out "
                     "of order, as offsets all rise: offsets")  # fmt: skip
    if rising:
        once = -_no_neighbours(size, highest + 1)
        if once > CHANCE:
            said = (f"it rises throughout: as offsets no two of the {size:,} kept tokens would be neighbours, which by chance is "
                    f"so once in 10^{min(once, 9999):.0f} times; its t2d would prove it")  # fmt: skip
            return Proof("unproven", said, "absolute")
        return Proof("unproven", "it rises throughout, so it may hold offsets or target ids; only its t2d can tell")
    return Proof("neither", "it rises neither as offsets nor as target ids")


def _no_neighbours(kept: int, places: int) -> float:
    """The decimal logarithm of the chance that of `kept` places drawn from `places` no two are neighbours, which is
    C(places - kept + 1, kept) / C(places, kept): 2 of 4 places -> log10(3 / 6)."""

    def ways(n: int, k: int) -> float:
        return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)

    if kept > places - kept + 1:
        return -math.inf
    return (ways(places - kept + 1, kept) - ways(places, kept)) / math.log(10)


def faults(d2t: "Tensor | None", t2d: "Tensor | None", freq: "Tensor | None", files: dict[str, str],
           vocab: int | None = None) -> list[Fault]:  # fmt: skip
    """Everything wrong with a mapping as a whole; `files` names each part's file. Parts that are not there are None; `vocab`,
    the number of the target's tokens, tells more of a d2t without its t2d."""
    found = []

    def fault(kind: str, there: str, expected: str, causes: str, way_out: str = REBUILD) -> None:
        found.append(Fault(files[kind], kind, expected, there, causes, way_out))

    if t2d is not None and not bool(t2d.any()):
        fault("t2d", "no token is kept", "as many as d2t has", "the draft can say nothing")
    if d2t is not None:
        proof = prove(d2t, t2d, vocab)
        if proof.convention == "absolute" and bool(d2t.any()):
            fault("d2t", f"target ids ({proof.said})", "offsets (target id - draft id)", OTHER_WORDS, TO_OFFSETS)
        elif proof.likely == "absolute":
            fault("d2t", f"target ids, as good as surely ({proof.said})", "offsets (target id - draft id)", OTHER_WORDS,
                  f"put its t2d beside it and {TO_OFFSETS}")  # fmt: skip
        elif t2d is None and vocab is not None and len(d2t) < vocab and len(d2t) > 1 and not bool(d2t.any()):
            fault("d2t", "all zero", f"offsets that reach over the target's {vocab:,} tokens",
                  "draft token i is taken for target token i, as where d2t was lost: acceptance collapses")  # fmt: skip
        elif proof.convention == "neither":
            fault("d2t", proof.said, "arange(D) + d2t == t2d.nonzero()", "draft tokens are taken for other words")
        highest = int((d2t.new_tensor(range(len(d2t))) + d2t).max()) if proof.convention == "offsets" else 0
        if int(d2t.min()) < 0:
            fault("d2t", f"{int(d2t.min())}", "offsets of at least 0", "draft tokens are taken for other words")
        elif vocab is not None and highest >= vocab:
            fault("d2t", f"it reaches target token {highest:,}", f"below {vocab:,}, all the target has", "it is another target's")
    if freq is not None:
        if int(freq.min()) < 0:
            fault("token_freq", f"a count of {int(freq.min())}", "at least 0", "tokens are ranked by it")
        elif not bool(freq.any()):
            fault("token_freq", "nothing was counted", "counts", "the vocabulary is then the lowest token ids")
        if t2d is not None and len(freq) > len(t2d):
            fault("token_freq", f"{len(freq):,} tokens", f"{len(t2d):,}, those of t2d", "they are of two targets")
    return found


def turned(d2t: "Tensor", to: Convention) -> "Tensor":
    """`d2t` in the other convention: [1 3 3] (offsets) to absolute gives [1 4 5], and back."""
    import torch

    places = torch.arange(len(d2t))
    return d2t + places if to == "absolute" else d2t - places
