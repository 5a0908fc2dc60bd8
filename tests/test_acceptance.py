"""Acceptance: published figures, and the replay against a server's loop written out over tokens."""

import math
import random

import numpy as np
import pytest
import torch

from eagle3kit.acceptance import Acceptance, everywhere, from_steps, hits, interval, replay, total, wilson
from eagle3kit.errors import KitError


def of_marginals(*marginals: float) -> Acceptance:
    return Acceptance(drafts=100_000, accepted=tuple(round(m * 100_000) for m in marginals))


@pytest.mark.parametrize(
    ("marginals", "length"),
    [
        ((0.4084, 0.1084, 0.0158, 0.0015), 1.534),
        ((0.71, 0.48, 0.34), 2.53),
        ((0.589, 0.3028, 0.1558, 0.0846, 0.0481), 2.18),
        ((0.645, 0.393, 0.24), 2.278),
        ((0.6739, 0.5228, 0.4421), 2.6388),
    ],
)
def test_length_of_published_marginals(marginals, length):
    found = of_marginals(*marginals)
    assert found.length == pytest.approx(length, abs=6e-4)
    assert found.marginal == pytest.approx(marginals)
    assert found.rate == pytest.approx((found.length - 1) / len(marginals))


def test_conditional_rates_are_not_marginal_ones():
    # The same three published rates, read as the one and as the other.
    rates = (0.633, 0.404, 0.264)
    assert of_marginals(*rates).length == pytest.approx(2.301, abs=5e-4)
    chained = of_marginals(*np.cumprod(rates))
    assert chained.length == pytest.approx(1.956, abs=5e-4)
    assert chained.conditional == pytest.approx(rates, abs=1e-3)


def test_marginals_are_the_running_product_of_conditionals():
    for seed in range(20):
        counts = sorted(random.Random(seed).choices(range(1, 1000), k=5), reverse=True)
        found = Acceptance(drafts=counts[0], accepted=tuple(counts[1:]))
        assert np.cumprod(found.conditional) == pytest.approx(found.marginal)


def test_nothing_drafted_is_length_one_and_nothing_reached_is_rate_zero():
    assert Acceptance(drafts=0, accepted=(0, 0)).length == 1.0
    assert Acceptance(drafts=4, accepted=(0, 0)).conditional == (0.0, 0.0)


@pytest.mark.parametrize(("drafts", "accepted"), [(3, (4,)), (3, (1, 2)), (3, (1, -1)), (-1, ())])
def test_impossible_counts_are_refused(drafts, accepted):
    with pytest.raises(ValueError, match="must not rise"):
        Acceptance(drafts=drafts, accepted=accepted)


def test_counts_from_steps_and_their_sum():
    assert from_steps([2, 0, 3], 3) == Acceptance(drafts=3, accepted=(2, 2, 1))
    assert from_steps([], 2) == Acceptance(drafts=0, accepted=(0, 0))
    parts = [from_steps(steps, 3) for steps in ([2, 0], [3], [])]
    assert total(parts) == from_steps([2, 0, 3], 3)


def test_what_cannot_be_added_is_refused():
    with pytest.raises(KitError, match=r"different depths.*\[2, 3\]"):
        total([from_steps([1], 2), from_steps([1], 3)])
    with pytest.raises(KitError, match="no drafts were counted"):
        total([])


# ---- The table of hits


def test_hits_line_up_with_the_tokens_they_propose():
    # V = 6, the draft knows the target's tokens 1, 4 and 5 as 0, 1 and 2.
    d2t = torch.tensor([1, 3, 3])
    ids = torch.tensor([0, 1, 4, 5, 2, 4])
    # From row j, step 0 proposes token j + 2 and step 1 token j + 3.
    first, second = torch.tensor([[1, 2, 0, 1, 0]]), torch.tensor([[2, 0, 1, 2, 2]])
    expected = [[True, True], [True, False], [False, True], [True, False], [False, False]]
    assert hits([first, second], ids, d2t).tolist() == expected


def test_a_token_outside_the_draft_vocabulary_never_hits():
    ids, d2t = torch.tensor([0, 1, 2, 2, 2]), torch.tensor([1, 3, 3])  # keeps 1, 4, 5
    for token in range(3):
        drafted = torch.full((1, 4), token)
        assert not hits([drafted, drafted], ids, d2t).any()


# ---- The replay


def served_steps(target: list[int], proposals: dict[int, list[int]], start: int, end: int) -> list[int]:
    """The server's loop over the answer target[start:end], which it would write anyway: accepted tokens a verify step.

    `proposals[place]` are the target ids that the draft proposes after reading the token at `place`.
    """
    out, steps = [target[start]], []  # the pass over the prompt gives the first token
    while len(out) < end - start:
        place = start + len(out) - 1
        agreed = 0
        for k, token in enumerate(proposals[place]):
            if place + 1 + k >= end or token != target[place + 1 + k]:
                break
            agreed += 1
        out += target[place + 1 : place + 2 + agreed][: end - start - len(out)]  # the agreed ones and the target's own
        steps.append(agreed)
    assert out == target[start:end]
    return steps


def random_case(seed: int, depth: int, vocabulary: int = 9, kept: int = 6):
    rng = random.Random(seed)
    known = sorted(rng.sample(range(vocabulary), kept))
    d2t = torch.tensor(known) - torch.arange(kept)
    length = rng.randint(12, 40)
    ids = [rng.randrange(vocabulary) for _ in range(length)]
    right = rng.uniform(0.3, 1.0)
    drafted = torch.zeros(depth, 1, length - 1, dtype=torch.int64)
    proposals: dict[int, list[int]] = {}
    for j in range(length - 1):
        proposals[j + 1] = []
        for k in range(depth):
            due = ids[j + 2 + k] if j + 2 + k < length else None
            token = known.index(due) if due in known and rng.random() < right else rng.randrange(kept)
            drafted[k, 0, j] = token
            proposals[j + 1].append(known[token])
    turns, place = [], 1
    while place < length - 3:
        end = rng.randint(place + 1, length)
        turns.append((place, end))
        place = end + rng.randint(1, 4)
    return torch.tensor(ids), list(drafted), d2t, turns, proposals


@pytest.mark.parametrize("depth", [1, 2, 3, 5])
def test_replay_is_what_the_server_would_count(depth):
    for seed in range(60):
        ids, drafted, d2t, turns, proposals = random_case(seed, depth)
        served = [from_steps(served_steps(ids.tolist(), proposals, *turn), depth) for turn in turns]
        assert replay(hits(drafted, ids, d2t), turns) == served, f"seed {seed}"


def test_every_step_gives_a_token_of_its_own_and_those_accepted():
    for seed in range(40):
        table = np.random.default_rng(seed).random((50, 3)) < 0.6
        for start, end in ((1, 51), (7, 20), (30, 31)):
            (found,) = replay(table, [(start, end)])
            # The first token comes from the prompt; a last step whose tokens are all accepted has no room for its own.
            assert found.drafts + sum(found.accepted) in (end - start - 1, end - start)


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_a_perfect_draft_is_only_stopped_by_the_end(depth):
    whole = np.ones((100, depth), dtype=bool)
    (even,) = replay(whole, [(3, 3 + 1 + 6 * (depth + 1))])
    assert even.length == depth + 1 and even.drafts == 6
    (odd,) = replay(whole, [(3, 3 + 1 + 6 * (depth + 1) + 1)])
    assert odd.drafts == 7 and odd.accepted == (7, *[6] * (depth - 1))


def test_a_draft_that_is_never_right_costs_a_step_a_token():
    (found,) = replay(np.zeros((30, 3), dtype=bool), [(2, 12)])
    assert found == Acceptance(drafts=9, accepted=(0, 0, 0)) and found.length == 1.0


def test_an_answer_of_one_token_needs_no_draft():
    assert replay(np.ones((10, 2), dtype=bool), [(4, 5)]) == [Acceptance(drafts=0, accepted=(0, 0))]


def test_where_hits_are_independent_it_does_not_matter_where_drafts_start():
    table = np.random.default_rng(1).random((60_000, 3)) < 0.6
    turns = [(1, 60_001)]
    expected = 1 + 0.6 + 0.6**2 + 0.6**3
    assert everywhere(table, turns).length == pytest.approx(expected, abs=0.02)
    assert total(replay(table, turns)).length == pytest.approx(expected, abs=0.02)


def test_where_they_are_not_the_mean_over_positions_overstates():
    # Nine easy tokens, then a hard one that only the target can say: drafts restart right after it, never at it.
    length = 20_000
    easy = np.arange(length + 8) % 10 != 0
    table = np.stack([easy[k : length + k] for k in range(3)], axis=1)
    hard = np.stack([~easy[k : length + k] for k in range(3)], axis=1)
    turns = [(1, length + 1)]
    # Every run of ten tokens takes the steps 3, 3, 1 (its end is the hard token): three drafts.
    assert total(replay(table, turns)).length == pytest.approx(10 / 3, abs=0.01)
    assert everywhere(table, turns).length == pytest.approx(1 + 0.9 + 0.8 + 0.7, abs=0.01)
    assert everywhere(hard, turns).length == pytest.approx(1.1, abs=0.01)


def test_everywhere_counts_each_place_of_each_answer_once():
    table = np.ones((20, 2), dtype=bool)
    assert everywhere(table, [(3, 8), (10, 12)]) == Acceptance(drafts=5, accepted=(5, 5))
    # The places from which a token of the answer is proposed: not the token that the prompt's own pass gives, nor past the end.
    proposing = np.zeros((20, 2), dtype=bool)
    proposing[2:6] = True
    assert everywhere(proposing, [(3, 8)]) == Acceptance(drafts=4, accepted=(4, 4))
    assert everywhere(~proposing, [(3, 8)]).length == 1.0
    assert everywhere(table, []) == Acceptance(drafts=0, accepted=(0, 0))


# ---- Intervals


@pytest.mark.parametrize(
    ("successes", "of", "low", "high"),
    # The first is in the docstring; the others are from Newcombe 1998, table I, method 3.
    [(8, 10, 0.490, 0.943), (81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_interval_as_published(successes, of, low, high):
    assert wilson(successes, of) == pytest.approx((low, high), abs=6e-4)


def test_wilson_interval_stays_within_and_mirrors():
    assert wilson(0, 0) == (0.0, 1.0)
    for of in (1, 7, 40):
        for successes in range(of + 1):
            low, high = wilson(successes, of)
            assert 0 <= low <= successes / of <= high <= 1
            assert (1 - high, 1 - low) == pytest.approx(wilson(of - successes, of))


def test_interval_holds_its_promise():
    """Of 200 experiments with a known acceptance length, about 95 % of the intervals hold it."""
    rng, held, truth = np.random.default_rng(0), 0, 1 + 0.7 + 0.7**2
    for _ in range(200):
        records = []
        for _ in range(60):
            table = rng.random((30, 2)) < 0.7
            records.append(from_steps(np.logical_and.accumulate(table, axis=1).sum(axis=1).tolist(), 2))
        low, high = interval(records, resamples=200).length
        held += low <= truth <= high
    assert 176 <= held <= 199


def test_interval_is_around_the_whole_and_the_same_again():
    rng = random.Random(0)
    records = [from_steps([rng.randint(0, 3) for _ in range(rng.randint(1, 30))], 3) for _ in range(25)]
    found, whole = interval(records, resamples=500, seed=3), total(records)
    assert found.length[0] < whole.length < found.length[1]
    assert all(low < m < high for (low, high), m in zip(found.marginal, whole.marginal, strict=True))
    assert interval(records, resamples=500, seed=3) == found != interval(records, resamples=500, seed=4)


def test_interval_is_drawn_over_prompts_not_over_drafts():
    # Two kinds of prompts, each the same all along: what is uncertain is which prompts there are.
    alike = [from_steps([2] * 50, 2)] * 10 + [from_steps([0] * 50, 2)] * 10
    mixed = [from_steps([2, 0] * 25, 2)] * 20
    assert total(alike) == total(mixed)
    wide, narrow = (math.dist(*[[end] for end in interval(rows, resamples=500).length]) for rows in (alike, mixed))
    assert narrow == 0 and wide > 0.5


def test_no_interval_without_drafts():
    with pytest.raises(KitError, match="2 prompts with 0 drafts"):
        interval([from_steps([], 2)] * 2)
