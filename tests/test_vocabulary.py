"""The draft's vocabulary: one mapping, written twice, and nothing about it decided in silence."""

import random

import numpy as np
import pytest
import torch
from tinymodel import make_tiny_tokenizer

from eagle3kit import vocabulary
from eagle3kit.conversations import make_sample
from eagle3kit.errors import KitError


def some_counts(seed: int, vocab: int = 300) -> torch.Tensor:
    """Counts as words have them: few frequent, most rare, many never."""
    generator = torch.Generator().manual_seed(seed)
    ranks = torch.randperm(vocab, generator=generator).float() + 1
    return (2000 / ranks).long() * (ranks < 200)


def some_samples(seed: int, vocab: int = 300, count: int = 30):
    rng = random.Random(seed)
    weights = (some_counts(seed, vocab) + 1).tolist()
    pairs = []
    for _ in range(count):
        ids = rng.choices(range(vocab), weights, k=40)
        pairs.append((ids, [rng.randint(0, 1) for _ in ids]))
    return pairs


# ---- t2d and d2t


@pytest.mark.parametrize("size", [16, 100, 250, 300])
def test_both_halves_say_the_same(size):
    t2d, d2t = vocabulary.build(some_counts(size), size, [0, 7, 299])
    assert t2d.dtype == torch.bool and d2t.dtype == torch.int64
    assert int(t2d.sum()) == size == len(d2t)
    assert torch.equal(torch.arange(size) + d2t, t2d.nonzero().squeeze(1))
    assert t2d[[0, 7, 299]].all()
    assert (d2t.diff() >= 0).all()  # kept tokens rise, so their offsets never fall


def test_the_example_of_the_room():
    counts = torch.tensor([0, 5, 0, 0, 2, 9])
    t2d, d2t = vocabulary.build(counts, 3, [])
    assert t2d.int().tolist() == [0, 1, 0, 0, 1, 1] and d2t.tolist() == [1, 3, 3]


def test_the_most_frequent_are_kept_after_the_forced():
    counts = some_counts(5)
    rarest = [int(token) for token in counts.argsort()[:4]]
    t2d, _ = vocabulary.build(counts, 50, rarest)
    assert t2d[rarest].all()
    others = t2d.clone()
    others[rarest] = False
    left_out = ~t2d
    assert int(counts[others].min()) >= int(counts[left_out].max())


def test_no_other_choice_of_that_size_covers_more():
    pairs = some_samples(1)
    counts = vocabulary.count_tokens(pairs, 300)
    t2d, _ = vocabulary.build(counts, 64, [])
    best, every = vocabulary.coverage(pairs, t2d)
    for seed in range(50):
        other = torch.zeros(300, dtype=torch.bool)
        other[random.Random(seed).sample(range(300), 64)] = True
        assert vocabulary.coverage(pairs, other) <= (best, every)


def test_a_size_is_refused_rather_than_changed():
    with pytest.raises(KitError, match="vocabulary.size is 301, but the target has only 300"):
        vocabulary.build(some_counts(0), 301, [])
    with pytest.raises(KitError, match="vocabulary.size is 16, but 17 tokens must be in"):
        vocabulary.build(some_counts(0), 16, [*range(17), 3])
    t2d, d2t = vocabulary.build(some_counts(0), 16, [*range(16), 3])  # named twice counts once
    assert t2d[:16].all() and not d2t.any()


def test_the_whole_vocabulary_maps_to_itself():
    t2d, d2t = vocabulary.build(some_counts(0), 300, [])
    assert t2d.all() and not d2t.any()


# ---- What is wrong with a mapping


def test_target_ids_in_place_of_offsets_are_recognised():
    t2d, d2t = vocabulary.build(some_counts(2), 40, [])
    with pytest.raises(KitError, match="d2t holds target ids; speculators and vLLM read offsets"):
        vocabulary.check(t2d, d2t + torch.arange(40))


def test_other_faults_name_the_place():
    t2d, d2t = vocabulary.build(some_counts(2), 40, [])
    vocabulary.check(t2d, d2t)
    with pytest.raises(KitError, match="t2d: expected bool"):
        vocabulary.check(t2d.int(), d2t)
    with pytest.raises(KitError, match=r"d2t: expected int64 \[40\].*int64 \[39\]"):
        vocabulary.check(t2d, d2t[:-1])
    with pytest.raises(KitError, match=r"d2t: expected int64 \[40\].*int32"):
        vocabulary.check(t2d, d2t.int())
    bent = d2t.clone()
    bent[7] += 1
    there = int(t2d.nonzero()[7])
    with pytest.raises(KitError, match=rf"d2t\[7\] is {int(bent[7])}.*to target token {there + 1}, but t2d keeps {there} there"):
        vocabulary.check(t2d, bent)


def test_files_hold_what_was_written_and_are_checked_when_read(tmp_path):
    counts = some_counts(3)
    t2d, d2t = vocabulary.build(counts, 64, [1])
    vocabulary.write(tmp_path, counts, t2d, d2t)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d2t.pt", "t2d.pt", "token_freq.pt"]
    read = vocabulary.read(tmp_path)
    assert torch.equal(read[0], t2d) and torch.equal(read[1], d2t)
    assert torch.equal(torch.load(tmp_path / "token_freq.pt", weights_only=True), counts)
    torch.save(t2d.nonzero().squeeze(1), tmp_path / "d2t.pt")
    with pytest.raises(KitError, match="d2t holds target ids"):
        vocabulary.read(tmp_path)
    torch.save({"d2t": d2t}, tmp_path / "d2t.pt")
    with pytest.raises(KitError, match="must each hold one tensor"):
        vocabulary.read(tmp_path)
    (tmp_path / "d2t.pt").unlink()
    with pytest.raises(KitError, match=r"d2t\.pt does not exist"):
        vocabulary.read(tmp_path)


# ---- Counting and covering


def test_only_supervised_tokens_count():
    counts = vocabulary.count_tokens([([1, 2, 2, 3], [0, 1, 1, 1]), ([2, 0], [1, 0])], 5)
    assert counts.dtype == torch.int64 and counts.tolist() == [0, 0, 3, 1, 0]
    pairs = some_samples(4)
    counts = vocabulary.count_tokens(pairs, 300)
    assert int(counts.sum()) == sum(sum(mask) for _, mask in pairs)
    assert torch.equal(counts, vocabulary.count_tokens(pairs[:9], 300) + vocabulary.count_tokens(pairs[9:], 300))
    assert not vocabulary.count_tokens([([1], [0])], 5).any()


@pytest.mark.parametrize("token", [300, -1])
def test_a_token_of_another_vocabulary_is_refused(token):
    good = ([1, 2], [1, 1])
    with pytest.raises(KitError, match=f"sample 1: token id {token} outside the target's vocabulary of 300"):
        vocabulary.count_tokens([good, ([5, token, 6], [1, 1, 1])], 300)


def test_arrays_tensors_and_lists_count_alike(monkeypatch):
    pairs = some_samples(8)
    counts = vocabulary.count_tokens(pairs, 300)
    for how in (np.array, torch.tensor, lambda row: np.array(row, np.int32), lambda row: torch.tensor(row, dtype=torch.int32)):
        assert torch.equal(vocabulary.count_tokens([(how(ids), how(mask)) for ids, mask in pairs], 300), counts)
    boolean = [(torch.tensor(ids), torch.tensor(mask).bool()) for ids, mask in pairs]
    monkeypatch.setattr(vocabulary, "BATCH", 7)  # many batches, and samples longer than one
    assert torch.equal(vocabulary.count_tokens(boolean, 300), counts)
    assert not vocabulary.count_tokens([], 5).any() and not vocabulary.count_tokens([([], [])], 5).any()
    with pytest.raises(KitError, match="sample 30: token id 300 outside"):
        vocabulary.count_tokens([*boolean, (torch.tensor([1, 300] * 5), torch.ones(10))], 300)


def test_a_mask_of_another_length_is_refused():
    with pytest.raises(KitError, match="sample 1: a loss mask of 2 beside 3 token ids"):
        vocabulary.count_tokens([([1], [1]), ([1, 2, 3], [1, 1])], 5)


@pytest.mark.parametrize("seed", range(12))
def test_the_choice_is_that_of_speculators(seed):
    """Random counts with many ties and many tokens never seen, every size from few to all."""
    from speculators.train.vocab_mapping import build_vocab_mappings_from_distribution

    dice = random.Random(seed)
    vocab = dice.choice([7, 64, 1000])
    generator = torch.Generator().manual_seed(seed)
    counts = torch.randint(0, dice.choice([2, 5, 1000]), (vocab,), generator=generator)
    seen = {token: count for token, count in enumerate(counts.tolist()) if count}
    for size in {1, vocab // 3, vocab // 2, vocab}:
        theirs = build_vocab_mappings_from_distribution(seen, size, vocab)
        t2d, d2t = vocabulary.build(counts, size, [])
        assert torch.equal(d2t, theirs[0]) and torch.equal(t2d, theirs[1])


def test_coverage_adds_up():
    train, held_out = some_samples(6), some_samples(7)
    counts, held = (vocabulary.count_tokens(pairs, 300) for pairs in (train, held_out))
    t2d, _ = vocabulary.build(counts, 80, [])
    covered, every = vocabulary.coverage(held_out, t2d)
    missed, _ = vocabulary.coverage(held_out, ~t2d)
    assert covered + missed == every == int(held.sum())
    assert vocabulary.coverage(held_out, torch.ones(300, dtype=torch.bool)) == (every, every)
    sizes = [16, 40, 80, 200, 300]
    curve = vocabulary.coverage_by_size(counts, {"all": held}, [3], sizes)["all"]
    assert curve == sorted(curve) and curve[-1] == 1.0
    with_3, _ = vocabulary.build(counts, 80, [3])
    assert curve[2] == vocabulary.coverage(held_out, with_3)[0] / every
    assert vocabulary.coverage_by_size(counts, {"none": torch.zeros(300, dtype=torch.int64)}, [], [16]) == {"none": [0.0]}


def test_the_curve_is_drawn_where_a_vocabulary_can_be():
    assert vocabulary.sizes(8192, 20, 49152) == [512, 1024, 2048, 4096, 8192, 16384, 32768, 49152]
    assert vocabulary.sizes(3000, 600, 5000) == [1024, 2048, 3000, 4096, 5000]
    assert vocabulary.sizes(512, 3, 512) == [512]


# ---- Tokens that are always in


def test_special_tokens_and_those_named_are_kept():
    tokenizer = make_tiny_tokenizer(extra=("<think>",))
    kept = vocabulary.special_ids(tokenizer, ["<unused3>"])
    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "<unused3>"]
    assert sorted(kept.values()) == sorted(names)
    assert all(tokenizer.convert_tokens_to_ids(text) == token for token, text in kept.items())
    with pytest.raises(KitError, match=r"vocabulary.always: 'two words' is \d+ tokens"):
        vocabulary.special_ids(tokenizer, ["two words"])


def test_turns_end_with_the_special_token_that_the_samples_show():
    tokenizer = make_tiny_tokenizer()
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    words = tokenizer.encode("Hello there")
    whole = make_sample("a", "s", [*words, *words, end], [(len(words), 2 * len(words) + 1)])
    cut = make_sample("b", "s", [*words, *words], [(len(words), 2 * len(words))])
    assert vocabulary.turn_ends([whole, cut], tokenizer) == {end: "<|im_end|>"}
    assert vocabulary.turn_ends([cut], tokenizer) == {}
