"""Which tokens the draft may say: token frequencies -> `t2d`, `d2t`; what they cover; and the check that they fit.

    token_freq  int64 [V]     how often each target token is supervised in the training samples
    t2d         bool  [V]     true where the draft may say the token; exactly D are true
    d2t         int64 [D]     *offsets*: target id = draft id + d2t[draft id]

Example, V = 6, D = 3, tokens 1, 4 and 5 kept:  t2d = [0 1 0 0 1 1], d2t = [1 3 3], for 0+1 = 1, 1+3 = 4, 2+3 = 5.
So `arange(D) + d2t == t2d.nonzero()`, in speculators 0.3 to 0.9 and in vLLM (model_executor/models/llama_eagle3.py).
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from eagle3kit.errors import KitError
from eagle3kit.files import publish
from eagle3kit.samples import load

if TYPE_CHECKING:
    from torch import Tensor

BATCH = 2**20  # tokens a count: 8 MiB of ids


def count_tokens(samples: Iterable[tuple[Any, Any]], vocab_size: int) -> "Tensor":
    """`token_freq` int64 [V]: how often each token is supervised, over pairs of (token ids [T], loss mask [T]).

    Each may be a tensor, an array or a list of whole numbers; arrays are counted without a Python object a token. Samples are
    gathered to `BATCH` tokens before a count, for each count costs V as well.

    Raises:
        KitError: a token id outside the target's vocabulary, or a mask of another length, naming the sample.
    """
    import torch

    counts = np.zeros(vocab_size, dtype=np.int64)
    pieces: list[tuple[int, np.ndarray, np.ndarray]] = []
    waiting = 0
    for number, (ids, mask) in enumerate(samples):
        ids, mask = np.asarray(ids), np.asarray(mask)
        if ids.shape != mask.shape:
            raise KitError(f"sample {number}: a loss mask of {mask.size} beside {ids.size} token ids; "
                           "run the stage 02_dataset again")  # fmt: skip
        for start in range(0, ids.size, BATCH):
            pieces.append((number, ids[start : start + BATCH], mask[start : start + BATCH]))
            waiting += len(pieces[-1][1])
            if waiting >= BATCH:
                _add(counts, pieces)
                pieces, waiting = [], 0
    if pieces:
        _add(counts, pieces)
    return torch.from_numpy(counts)


def _add(counts: np.ndarray, pieces: list[tuple[int, np.ndarray, np.ndarray]]) -> None:
    """Count the supervised tokens of `pieces`: (sample number, token ids, loss mask) each."""
    several = len(pieces) > 1
    ids = np.concatenate([piece for _, piece, _ in pieces]) if several else pieces[0][1]
    mask = np.concatenate([piece for _, _, piece in pieces]) if several else pieces[0][2]
    kept = ids[mask.astype(bool, copy=False)].astype(np.int64, copy=False)
    if kept.size and kept.view(np.uint64).max() >= len(counts):  # a negative one is huge without its sign: one look for both
        for number, ids, mask in pieces:
            outside = ids[(mask != 0) & ((ids < 0) | (ids >= len(counts)))]
            if outside.size:
                raise KitError(f"sample {number}: token id {int(outside[0])} outside the target's vocabulary of {len(counts)}; "
                               "it was made with another tokenizer: run the stage 02_dataset again")  # fmt: skip
    counts += np.bincount(kept, minlength=len(counts))


def special_ids(tokenizer, always: Sequence[str]) -> dict[int, str]:
    """Tokens that are kept however rare: end of turn, all special tokens, and those named in `always`; id -> text.

    Raises:
        KitError: a name in `always` that is not one token of this tokenizer.
    """
    kept = dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))
    for text in always:
        ids = tokenizer.encode(text, add_special_tokens=False)
        if len(ids) != 1:
            raise KitError(f"vocabulary.always: {text!r} is {len(ids)} tokens of this tokenizer, not one; "
                           "name single tokens")  # fmt: skip
        kept[ids[0]] = text
    return kept


def ranked(token_freq: "Tensor", size: int) -> "Tensor":
    """The `size` most frequent token ids int64 [size], the most frequent first; of equal ones the lower id.

    Example: counts [0, 5, 0, 0, 2, 9] give 5, 1, 4, 0, ...
    """
    import torch

    return torch.sort(token_freq, descending=True, stable=True).indices[:size]


def build(token_freq: "Tensor", size: int, forced: Iterable[int]) -> tuple["Tensor", "Tensor"]:
    """(t2d bool [V], d2t int64 [size]): the `forced` tokens and the most frequent others.

    The choice is that of speculators (train/vocab_mapping.py, build_vocab_mappings_from_distribution), ties by id and tokens
    that never occur filling what is left, lowest id first; by one sort in place of dictionaries of a number a token.

    Raises:
        KitError: more tokens asked for than the target has, or fewer than are forced. A size is never changed silently.
    """
    import torch

    vocab_size = token_freq.numel()
    forced = sorted({token for token in forced if token < vocab_size})  # a tokenizer may know more than the model can say
    if size > vocab_size:
        raise KitError(f"vocabulary.size is {size}, but the target has only {vocab_size} tokens; "
                       f"choose at most {vocab_size}")  # fmt: skip
    if size < len(forced):
        raise KitError(f"vocabulary.size is {size}, but {len(forced)} tokens must be in (end of turn, special tokens, "
                       "vocabulary.always); choose more")  # fmt: skip
    counts = token_freq.clone()
    counts[forced] += int(token_freq.max()) + 1  # ahead of every other
    t2d = torch.zeros(vocab_size, dtype=torch.bool)
    t2d[ranked(counts, size)] = True
    d2t = t2d.nonzero().squeeze(1) - torch.arange(size)
    check(t2d, d2t)
    return t2d, d2t


def check(t2d: "Tensor", d2t: "Tensor") -> None:
    """Raise KitError unless `t2d` and `d2t` describe one mapping, offsets, in rising order."""
    import torch

    if t2d.dtype != torch.bool or t2d.ndim != 1:
        raise KitError(f"t2d: expected bool [V], found {t2d.dtype} {list(t2d.shape)}; run the stage 04_vocabulary again")
    kept = int(t2d.sum())
    if d2t.dtype != torch.int64 or list(d2t.shape) != [kept]:
        raise KitError(f"d2t: expected int64 [{kept}] (t2d keeps {kept} tokens), found {d2t.dtype} {list(d2t.shape)}; "
                       "run the stage 04_vocabulary again")  # fmt: skip
    targets = t2d.nonzero().squeeze(1)
    wrong = (torch.arange(kept) + d2t != targets).nonzero()
    if wrong.numel() and torch.equal(d2t, targets):
        raise KitError("d2t holds target ids; speculators and vLLM read offsets (target id - draft id): "
                       "subtract arange(D), or run the stage 04_vocabulary again")  # fmt: skip
    if wrong.numel():
        row = int(wrong[0])
        raise KitError(f"d2t[{row}] is {int(d2t[row])}: it maps draft token {row} to target token {row + int(d2t[row])}, "
                       f"but t2d keeps {int(targets[row])} there; run the stage 04_vocabulary again")  # fmt: skip


def coverage(samples: Iterable[tuple[Any, Any]], t2d: "Tensor") -> tuple[int, int]:
    """(covered, all) supervised tokens: those that the draft may say, and all. Under greedy verification a token outside
    is a certain miss."""
    counts = count_tokens(samples, t2d.numel())
    return int(counts[t2d].sum()), int(counts.sum())


def coverage_by_size(
    train_freq: "Tensor", held_out: dict[str, "Tensor"], forced: Iterable[int], sizes: Sequence[int]
) -> dict[str, list[float]]:
    """Share of the tokens counted in each of `held_out` (name -> int64 [V]) that the draft vocabulary of each size would
    cover, chosen on the training counts."""
    maps = [build(train_freq, size, forced)[0] for size in sizes]
    return {name: [int(freq[t2d].sum()) / max(1, int(freq.sum())) for t2d in maps] for name, freq in held_out.items()}


def write(folder: Path, token_freq: "Tensor", t2d: "Tensor", d2t: "Tensor") -> None:
    """Publish token_freq.pt, t2d.pt and d2t.pt, each one plain tensor."""
    import torch

    for name, tensor in (("token_freq", token_freq), ("t2d", t2d), ("d2t", d2t)):
        with publish(folder / f"{name}.pt") as inner:
            torch.save(tensor, inner)


def read(folder: Path) -> tuple["Tensor", "Tensor"]:
    """(t2d, d2t) from a folder, checked against each other; KitError when missing or wrong."""
    t2d, d2t = (load(folder / f"{name}.pt").get("") for name in ("t2d", "d2t"))
    if t2d is None or d2t is None:
        raise KitError(f"{folder}: t2d.pt and d2t.pt must each hold one tensor; run the stage 04_vocabulary again")
    check(t2d, d2t)
    return t2d, d2t


def turn_ends(samples: Iterable, tokenizer) -> dict[int, str]:
    """The tokens that end turns in `samples`, id -> text: special tokens on which a supervised span ends."""
    special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    ends = {sample.input_ids[end - 1] for sample in samples for _, end in sample.turns}
    return {token: tokenizer.decode([token]) for token in sorted(ends & special)}


def sizes(chosen: int, least: int, vocab_size: int) -> list[int]:
    """Powers of two from 512 on, the size that was chosen, and the whole vocabulary: where a coverage curve is drawn."""
    return sorted({2**power for power in range(9, 20) if least <= 2**power < vocab_size} | {chosen, vocab_size})
