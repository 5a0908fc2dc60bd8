"""The dictionary of metrics: published figures, and drafts whose truth is known."""

import json
from pathlib import Path

import numpy as np
import pytest

from eagle3kit.errors import KitError
from eagle3kit.metrics import METRICS, printed, rows, translate

CASES = json.loads((Path(__file__).parent / "cases" / "oracles.json").read_text())
FIXTURE = CASES["estimator_fixture"]


def test_published_marginals_give_their_length():
    group = CASES["acceptance_length_from_marginals"]
    for row in group["rows"] if isinstance(group, dict) else group:
        told = translate("vllm.per_position", row["marginals"])
        assert told.kind == "exact" and told.length == pytest.approx((row["length"],) * 2, abs=6e-4)
        assert [low for low, _ in told.marginals()] == pytest.approx(row["marginals"])
    told = translate("vllm.per_position", FIXTURE["served_marginals"])
    assert told.length[0] == pytest.approx(FIXTURE["served_length"], abs=2e-4)


def test_conditional_rates_misread_as_marginal_ones():
    row = CASES["misread_conditional"]
    assert translate("marginal", row["rates"]).length[0] == pytest.approx(row["as_marginals"], abs=1e-3)
    assert translate("conditional", row["rates"]).length[0] == pytest.approx(row["as_conditionals"], abs=1e-3)
    with pytest.raises(KitError, match=r"rise, which shares of whole drafts cannot"):
        translate("marginal", [0.5, 0.6])
    assert translate("conditional", [0.5, 0.6]).marginals()[1] == pytest.approx((0.3, 0.3))


def test_one_draft_in_the_words_of_four_tools():
    told = translate("speculators.full_acc", FIXTURE["speculators_full_acc"], coverage=FIXTURE["coverage"])
    assert told.kind == "bounds" and told.marginals()[0] == pytest.approx(FIXTURE["bound_position_0"], abs=1e-4)
    for (low, high), served in zip(told.marginals(), FIXTURE["served_marginals"], strict=True):
        assert low <= served <= high
    assert told.length[0] <= FIXTURE["served_length"] <= told.length[1] and told.over == "all answer positions"
    for tool in ("specforge", "torchspec"):
        name, value = f"{tool}.simulated", FIXTURE[f"{tool}_simulated"]
        told = translate(name, value, coverage=FIXTURE["coverage"])
        assert told.kind == "approximate" and told.length[0] == pytest.approx(1 + value)
        assert told.length[1] < FIXTURE["served_length"], "positions are alike, so a product is too low"
        with pytest.raises(KitError, match="rates by position cannot be told"):
            told.marginals()


def test_a_whole_vocabulary_makes_full_acc_exact():
    told = translate("speculators.full_acc", [0.7, 0.5], coverage=1)
    assert told.kind == "exact" and told.length == pytest.approx((2.2, 2.2))
    assert translate("speculators.cond_acc", [0.7, 0.5], coverage=1).kind == "approximate"


def test_scalars():
    assert translate("vllm.rate", 0.5178, depth=4).length[0] == pytest.approx(3.07, abs=2e-3)  # a published pair
    assert translate("sglang.rate", 0.2, depth=3).length[0] == pytest.approx(1.6)
    assert translate("sglang.length", 2.39, depth=3).length == (2.39, 2.39)
    assert translate("eagle.length", 3.27).over == "drafts as served" != translate("nemo.tau_sim", 3.27).over


@pytest.mark.parametrize(
    ("name", "value", "given", "words"),
    [
        ("vllm.per_positions", [0.5], {}, "did you mean 'vllm.per_position'"),
        ("speculators.full_acc", [0.5], {}, "give coverage"),
        ("torchspec.accuracy", [0.5], {}, "give coverage"),
        ("modelopt.accuracy", [0.5], {"coverage": 1.2}, "coverage is 1.2; it is a share"),
        ("vllm.rate", 0.5, {}, "give depth"),
        ("vllm.rate", 1.5, {"depth": 3}, "a share lies between 0 and 1"),
        ("vllm.length", 0.53, {}, "is at least 1"),
        ("vllm.length", 5, {"depth": 3}, "at least 1 and at most 4"),
        ("eagle.accuracy", [1.42], {}, "are no rates"),
        ("vllm.length", [1.5, 1.2], {}, "is one number"),
        ("marginal", [], {}, "are no rates"),
        ("marginal", [float("nan")], {}, "are no rates"),
        ("specforge.simulated", -1, {}, "is not negative"),
    ],
)
def test_what_cannot_be_converted_is_refused(name, value, given, words):
    with pytest.raises(KitError, match=words):
        translate(name, value, **given)


def synthetic(seed: int, n: int = 4000, depth: int = 3, outside: float = 0.08):
    """Places of an answer with their own difficulty: true hits, hits by the best of the draft vocabulary, tokens inside."""
    dice = np.random.default_rng(seed)
    easy = dice.beta(0.8, 0.6, size=(n, 1))
    inside = dice.random((n, depth)) > outside
    right = dice.random((n, depth)) < easy
    return right & inside, right, inside


@pytest.mark.parametrize("seed", range(6))
def test_bounds_hold_the_truth(seed):
    true, restricted, inside = synthetic(seed)
    marginal = np.logical_and.accumulate(true, axis=1).mean(axis=0)
    length = 1 + marginal.sum()
    coverage = float(inside.mean())
    accuracy = [[int(true[:, k].sum()), len(true), int(true[:, k].sum()), int(inside[:, k].sum())] for k in range(3)]
    shown = printed(accuracy)
    shown["speculators.full_acc"] = np.logical_and.accumulate(restricted, axis=1).mean(axis=0).tolist()
    shown["modelopt.accuracy"] = restricted.mean(axis=0).tolist()
    slack = 0.015  # coverage differs a little from position to position, as in any sample
    for name in ("eagle.accuracy", "specforge.accuracy", "torchspec.accuracy", "speculators.full_acc", "modelopt.accuracy"):
        told = translate(name, shown[name], coverage=coverage)
        for (low, high), m in zip(told.marginals(), marginal, strict=True):
            assert low - slack <= m <= high + slack, name
        assert told.length[0] - 3 * slack <= length <= told.length[1] + 3 * slack
    assert 1 + shown["specforge.simulated"] < length, "easy places stay easy, so the product is too low"
    table = rows(shown, coverage)
    assert len(table) == len(shown) and {row["which is"].partition(",")[0] for row in table} == {"bounds", "approximate"}


def test_every_metric_can_be_asked_for():
    for name, metric in METRICS.items():
        value = [0.5, 0.25] if metric.form in ("marginal", "conditional", "step") else 1.5 if metric.form == "length" else 0.5
        told = translate(name, value, depth=3, coverage=0.9)
        assert 1 <= told.length[0] <= told.length[1] <= 4, name
