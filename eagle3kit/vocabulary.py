"""Which tokens the draft may say: token frequencies -> `t2d`, `d2t`; what they cover; and the check that they fit.

    token_freq  int64 [V]     how often each target token is supervised in the training samples
    t2d         bool  [V]     true where the draft may say the token; exactly D are true
    d2t         int64 [D]     *offsets*: target id = draft id + d2t[draft id]

Example, V = 6, D = 3, tokens 1, 4 and 5 kept:  t2d = [0 1 0 0 1 1], d2t = [1 3 3], for 0+1 = 1, 1+3 = 4, 2+3 = 5.
So `arange(D) + d2t == t2d.nonzero()`, in speculators 0.3 to 0.9 and in vLLM (model_executor/models/llama_eagle3.py).
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from eagle3kit.errors import KitError
from eagle3kit.files import publish
from eagle3kit.samples import load

if TYPE_CHECKING:
    from torch import Tensor


def count_tokens(samples: Iterable[tuple[Sequence[int], Sequence[int]]], vocab_size: int) -> "Tensor":
    """`token_freq` int64 [V]: how often each token is supervised, over pairs of (token ids, loss mask).

    Raises:
        KitError: a token id outside the target's vocabulary, naming the sample.
    """
    import torch

    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for number, (ids, mask) in enumerate(samples):
        kept = torch.tensor([token for token, is_answer in zip(ids, mask, strict=True) if is_answer], dtype=torch.int64)
        if kept.numel() and not 0 <= int(kept.min()) <= int(kept.max()) < vocab_size:
            outside = int(kept.min()) if int(kept.min()) < 0 else int(kept.max())
            raise KitError(f"sample {number}: token id {outside} outside the target's vocabulary of {vocab_size}; "
                           "it was made with another tokenizer: run the stage 02_dataset again")  # fmt: skip
        counts += torch.bincount(kept, minlength=vocab_size)
    return counts


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


def build(token_freq: "Tensor", size: int, forced: Iterable[int]) -> tuple["Tensor", "Tensor"]:
    """(t2d bool [V], d2t int64 [size]): the `forced` tokens and the most frequent others, by speculators' own routine.

    Tokens that never occur fill what is left, lowest id first (speculators, train/vocab_mapping.py).

    Raises:
        KitError: more tokens asked for than the target has, or fewer than are forced. A size is never changed silently.
    """
    from speculators.train.vocab_mapping import build_vocab_mappings_from_distribution

    vocab_size = token_freq.numel()
    forced = sorted({token for token in forced if token < vocab_size})  # a tokenizer may know more than the model can say
    if size > vocab_size:
        raise KitError(f"vocabulary.size is {size}, but the target has only {vocab_size} tokens; "
                       f"choose at most {vocab_size}")  # fmt: skip
    if size < len(forced):
        raise KitError(f"vocabulary.size is {size}, but {len(forced)} tokens must be in (end of turn, special tokens, "
                       "vocabulary.always); choose more")  # fmt: skip
    ranked = token_freq.clone()
    ranked[forced] += int(token_freq.max()) + 1  # ahead of every other, in the order of their own counts
    frequencies = {token: int(count) for token, count in enumerate(ranked.tolist()) if count}
    d2t, t2d = build_vocab_mappings_from_distribution(frequencies, size, vocab_size)
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
    if torch.equal(d2t, targets) and not torch.equal(targets, torch.arange(kept)):
        raise KitError("d2t holds target ids; speculators and vLLM read offsets (target id - draft id): "
                       "subtract arange(D), or run the stage 04_vocabulary again")  # fmt: skip
    wrong = (torch.arange(kept) + d2t != targets).nonzero()
    if wrong.numel():
        row = int(wrong[0])
        raise KitError(f"d2t[{row}] is {int(d2t[row])}: it maps draft token {row} to target token {row + int(d2t[row])}, "
                       f"but t2d keeps {int(targets[row])} there; run the stage 04_vocabulary again")  # fmt: skip


def coverage(samples: Iterable[tuple[Sequence[int], Sequence[int]]], t2d: "Tensor") -> tuple[int, int]:
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
