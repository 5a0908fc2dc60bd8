"""Vocabulary mappings as files, anybody's: read, told apart by proof, turned from one convention into the other.

Two conventions go about under one name. Draft token i stands for target token
    offsets    i + d2t[i]      every version of speculators, and vLLM (model_executor/models/llama_eagle3.py)
    absolute   d2t[i]          what some notes and scripts take it for
Example, target tokens 1, 4 and 5 kept: offsets [1 3 3], absolute [1 4 5]. `t2d` (bool [V]) proves which one a file holds:
exactly one of `arange(D) + d2t` and `d2t` can equal `t2d.nonzero()`, but for the mapping of nothing to itself.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from eagle3kit import contracts, headers
from eagle3kit.faults import Fault, Unreadable
from eagle3kit.samples import load

if TYPE_CHECKING:
    from torch import Tensor

Convention = Literal["offsets", "absolute", "unproven", "neither"]
SERVED = "speculators and vLLM read offsets"
TO_OFFSETS = "convert it: `eagle3kit convert SRC DST --to offsets`"
REBUILD = "build the mapping again from the token frequencies"


@dataclass(frozen=True)
class Proof:
    """Which convention a d2t holds, and the sentence that proves it."""

    convention: Convention
    said: str


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


def prove(d2t: "Tensor", t2d: "Tensor | None") -> Proof:
    """Which convention `d2t` (int64 [D]) holds, by `t2d` (bool [V]) where there is one, else by its own numbers alone."""
    import torch

    size = len(d2t)
    targets = torch.arange(size) + d2t
    if t2d is not None:
        kept = t2d.nonzero().squeeze(1)
        if torch.equal(targets, kept):
            return Proof("offsets", f"arange({size}) + d2t equals the {size:,} places where t2d is true: offsets, proven")
        if torch.equal(d2t, kept):
            return Proof("absolute", f"d2t itself equals the {size:,} places where t2d is true: target ids, proven")
        return Proof("neither", _where(d2t, targets, kept))
    rising, as_offsets = bool((d2t.diff() > 0).all()), bool((targets.diff() > 0).all())
    if as_offsets and not rising:
        place = int((d2t.diff() <= 0).nonzero()[0])
        return Proof("offsets", f"d2t[{place + 1}] is not above d2t[{place}]: as target ids two draft tokens would be one or out "
                     "of order, as offsets all rise: offsets")  # fmt: skip
    if rising:
        return Proof("unproven", "it rises throughout, so it may hold offsets or target ids; only its t2d can tell")
    return Proof("neither", "it rises neither as offsets nor as target ids")


def _where(d2t: "Tensor", targets: "Tensor", kept: "Tensor") -> str:
    """The first place where neither reading fits."""
    if len(d2t) != len(kept):
        return f"{len(d2t):,} entries beside a t2d that keeps {len(kept):,}"
    row = int((targets != kept).nonzero()[0])
    return f"d2t[{row}] is {int(d2t[row])}: as an offset it names target token {int(targets[row])}, t2d keeps {int(kept[row])}"


def faults(d2t: "Tensor | None", t2d: "Tensor | None", freq: "Tensor | None", files: dict[str, str]) -> list[Fault]:
    """Everything wrong with a mapping as a whole; `files` names each part's file. Parts that are not there are None."""
    found = []

    def fault(kind: str, there: str, expected: str, causes: str, way_out: str = REBUILD) -> None:
        found.append(Fault(files[kind], kind, expected, there, causes, way_out))

    if t2d is not None and not bool(t2d.any()):
        fault("t2d", "no token is kept", "as many as d2t has", "the draft can say nothing")
    if d2t is not None:
        proof = prove(d2t, t2d)
        if proof.convention == "absolute" and bool(d2t.any()):
            fault("d2t", f"target ids ({proof.said})", "offsets (target id - draft id)",
                  f"{SERVED}: every draft token is taken for another word, acceptance falls to nearly none",
                  TO_OFFSETS)  # fmt: skip
        elif proof.convention == "neither":
            fault("d2t", proof.said, "arange(D) + d2t == t2d.nonzero()", "draft tokens are taken for other words")
        highest = int((d2t.new_tensor(range(len(d2t))) + d2t).max()) if proof.convention == "offsets" else 0
        if int(d2t.min()) < 0:
            fault("d2t", f"{int(d2t.min())}", "offsets of at least 0", "draft tokens are taken for other words")
        elif t2d is not None and highest >= len(t2d):
            fault("d2t", f"it reaches target token {highest}", f"below {len(t2d)}", "serving fails at an index")
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
