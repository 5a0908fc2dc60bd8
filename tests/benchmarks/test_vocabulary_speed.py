"""What counting and mapping the vocabulary of a large target costs: 10⁸ tokens of 163,840, of which the draft keeps 32,000.

Nothing here passes or fails by a time; run it on an otherwise idle machine.
"""

import time
from collections import Counter

import numpy as np
import pytest
import torch

from eagle3kit import vocabulary

VOCAB, KEPT, TOKENS, LENGTH = 163_840, 32_000, 100_000_000, 512


@pytest.fixture(scope="module")
def tokens() -> np.ndarray:
    """Token ids as languages have them: frequency falls with rank."""
    dice = np.random.default_rng(0)
    weights = 1 / (np.arange(VOCAB) + 10)
    edges = np.cumsum(weights / weights.sum())
    ranks = np.concatenate([edges.searchsorted(dice.random(10_000_000)) for _ in range(TOKENS // 10_000_000)])
    return dice.permutation(VOCAB)[ranks.clip(max=VOCAB - 1)]


def timed(what: str, work, amount: int = TOKENS):
    """Do `work`, print a line, and return what it gave."""
    started = time.perf_counter()
    given = work()
    seconds = time.perf_counter() - started
    print(f"{what}: {seconds:.3f} s for {amount:,} tokens, {amount / seconds / 1e6:,.0f} million tokens/s, "
          f"{8 * amount / seconds / 2**30:.2f} GiB/s")
    return given


def test_counting_and_mapping(tokens):
    """One line each; all that count must agree."""
    mask = np.ones(LENGTH, dtype=np.int64)
    every = np.ones_like(tokens, dtype=np.int8)
    print(f"\n{VOCAB:,} tokens, of which the draft keeps {KEPT:,}; samples of {LENGTH} tokens; {torch.get_num_threads()} threads")
    copied = timed("reading and writing the same memory", tokens.copy)
    assert len(copied) == len(tokens)
    del copied
    plain = timed("torch.bincount", lambda: torch.bincount(torch.from_numpy(tokens), minlength=VOCAB))
    whole = timed("count_tokens, one array", lambda: vocabulary.count_tokens([(tokens, every)], VOCAB))
    rows = tokens[: TOKENS // LENGTH * LENGTH].reshape(-1, LENGTH)
    samples = timed("count_tokens, arrays a sample", lambda: vocabulary.count_tokens(((row, mask) for row in rows), VOCAB),
                    rows.size)
    few = tokens[:5_000_000]
    listed = few.tolist()
    slow = timed("collections.Counter, of a list", lambda: Counter(listed), len(few))
    timed("collections.Counter, of an array's .tolist()", lambda: Counter(few.tolist()), len(few))
    assert torch.equal(plain, whole) and int((plain - samples).sum()) == tokens.size - rows.size
    assert dict(slow) == {token: count for token, count in enumerate(np.bincount(few).tolist()) if count}
    started = time.perf_counter()
    t2d, d2t = vocabulary.build(whole, KEPT, range(256))
    print(f"build {VOCAB:,} -> {KEPT:,}: {time.perf_counter() - started:.3f} s, covers {int(whole[t2d].sum()) / TOKENS:.2%}")
    assert len(d2t) == KEPT
    from speculators.train.vocab_mapping import build_vocab_mappings_from_distribution

    started = time.perf_counter()
    frequencies = {token: count for token, count in enumerate(whole.tolist()) if count}
    build_vocab_mappings_from_distribution(frequencies, KEPT, VOCAB)
    print(f"speculators' routine, of a dictionary: {time.perf_counter() - started:.3f} s")
