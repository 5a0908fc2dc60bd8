"""Answers compared token for token: equal shares, rates of parting, and what a draft changes beyond plain serving."""

import pytest

from eagle3kit import lossless


def test_answers_part_at_their_first_difference():
    assert lossless.parted([[1, 2, 3]], [[1, 2, 3]]) == (0, 3)
    assert lossless.parted([[1, 2, 3]], [[1, 5, 3]]) == (1, 2)
    assert lossless.parted([[1, 2]], [[1, 2, 3]]) == (1, 3) and lossless.parted([[]], [[]]) == (0, 0)
    with pytest.raises(ValueError, match="shorter|longer"):
        lossless.parted([[1]], [])


def test_equal_answers_and_rates_carry_their_intervals():
    plain = [[n] * 10 for n in range(64)]
    other = [[*answer[:5], 99, *answer[6:]] if n < 36 else answer for n, answer in enumerate(plain)]
    (row,) = lossless.rows({"plain and draft": (plain, other)})
    assert (row["equal"], row["of"], row["share"]) == (28, 64, 28 / 64) and 0.32 < row["from"] < row["share"] < row["to"] < 0.57
    assert row["tokens"] == 28 * 10 + 36 * 6 and row["parted per 1,000"] == pytest.approx(1000 * 36 / row["tokens"])
    assert row["at least"] < row["parted per 1,000"] < row["at most"]
    (row,) = lossless.rows({"alike": (plain, plain)})
    assert row["share"] == 1 and row["parted per 1,000"] == 0 and row["at most"] > 0, "none seen is not none at all"


def test_the_draft_is_held_against_a_second_plain_run():
    plain = [[n, n] for n in range(20)]

    def with_changes(numbers):
        return [[n, 99] if n in numbers else answer for n, answer in enumerate(plain)]

    told = lossless.verdict(plain, with_changes(range(9)), with_changes(range(2)))
    assert "changes 9 of 20 answers, a second plain run 2 of 20: more than plain serving changes by itself (p = 0.016" in told
    told = lossless.verdict(plain, with_changes(range(3)), with_changes([7, 8]))
    assert "no more than plain serving by itself (p = 1," in told
    assert "p = 0.062" in lossless.verdict(plain, with_changes(range(5)), plain)
    assert "is not known (acceptance.repeat_plain)" in lossless.verdict(plain, plain, None)
