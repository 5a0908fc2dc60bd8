"""A dictionary of acceptance metrics: what each tool prints, and what can be told from it about the one quantity that counts.

That is the marginal m_k (share of drafts whose tokens 0 … k were all accepted) as served, and the length 1 + Σ m_k. Tools
differ in four ways: joined along the draft or not; with the target's own token (the "+ 1") or without; a token outside the
draft vocabulary counted as a miss, left out, or counted as a hit when it is the best of those inside; drafts where serving
starts them, or every position of the answers. `translate` says what follows from a figure, exactly or within bounds, and
refuses when something is missing. Sources: the code of each tool (EAGLE cnets.py; SpecForge eagle3/model.py and
evaluator.py; TorchSpec models/eagle3.py, ops/loss.py; speculators models/eagle3/metrics.py; Model-Optimizer hf_eagle.py;
NeMo Automodel eagle/core.py; vLLM v1/spec_decode/metrics.py; SGLang's server_info).
"""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from eagle3kit.errors import KitError


@dataclass(frozen=True)
class Metric:
    """One figure that a tool prints.

    `form`: marginal [K], conditional [K], step (accuracy of each draft step by itself) [K], length (with the target's token),
    product (a0 + a0·a1 + … of step accuracies, without it), rate (accepted / drafted).
    `outside`: what a token that the draft vocabulary lacks counts as. `served`: drafts are where serving starts them.
    """

    tool: str
    says: str
    form: Literal["marginal", "conditional", "step", "length", "product", "rate"]
    outside: Literal["miss", "left out", "may hit"]
    served: bool


METRICS = {
    "vllm.per_position": Metric("vLLM", "Per-position acceptance rate", "marginal", "miss", True),
    "vllm.length": Metric("vLLM", "Mean acceptance length", "length", "miss", True),
    "vllm.rate": Metric("vLLM", "Avg Draft acceptance rate", "rate", "miss", True),
    "sglang.length": Metric("SGLang", "avg_spec_accept_length", "length", "miss", True),
    "sglang.rate": Metric("SGLang", "accept rate", "rate", "miss", True),
    "eagle.length": Metric("EAGLE", "average acceptance length (tau)", "length", "miss", True),
    "eagle.accuracy": Metric("EAGLE", "acc of each training step", "step", "miss", False),
    "specforge.accuracy": Metric("SpecForge", "acc_i", "step", "miss", False),
    "specforge.simulated": Metric("SpecForge", "simulated_acc_len", "product", "miss", False),
    "torchspec.accuracy": Metric("TorchSpec", "acc_i", "step", "left out", False),
    "torchspec.simulated": Metric("TorchSpec", "simulated_acc_len", "product", "left out", False),
    "speculators.full_acc": Metric("speculators", "full_acc_k", "marginal", "may hit", False),
    "speculators.cond_acc": Metric("speculators", "cond_acc_k", "conditional", "may hit", False),
    "modelopt.accuracy": Metric("Model-Optimizer", "train acc of each step", "step", "may hit", False),
    "nemo.tau_sim": Metric("NeMo Automodel", "tau_sim", "length", "miss", False),
    "marginal": Metric("any", "served marginal rates", "marginal", "miss", True),
    "conditional": Metric("any", "served rates, each given the one before", "conditional", "miss", True),
}
Bounds = tuple[float, float]


@dataclass(frozen=True)
class Translation:
    """What follows from a figure: `marginal` [K] as (lowest, highest), None where it cannot be told; `length` likewise.

    `kind`: "exact"; "bounds", which hold whatever the draft; or "approximate", which hold for independent positions only.
    `over`: "drafts as served" or "all answer positions": the latter overstates what is served, by an amount no figure tells.
    """

    metric: Metric
    kind: Literal["exact", "bounds", "approximate"]
    marginal: tuple[Bounds, ...] | None
    length: Bounds
    over: str
    why: str

    def marginals(self) -> tuple[Bounds, ...]:
        """`marginal`; KitError where the figure does not tell."""
        if self.marginal is None:
            raise KitError(f"{self.metric.tool}'s {self.metric.says} is one number: rates by position cannot be told from it; "
                           "give the tool's figures for each step or position")  # fmt: skip
        return self.marginal


def translate(name: str, values: float | Sequence[float], *, depth: int | None = None, coverage: float | None = None
              ) -> Translation:
    """What `values`, printed as METRICS[name], say of marginal acceptance and length.

    Args:
        depth: draft tokens K, needed for a rate (SGLang: its number of steps).
        coverage: share of the target's answer tokens inside the draft vocabulary (1 for a whole one), needed where these are
            not simply misses.

    Bounds, with c the coverage and a_i step accuracies over all tokens:
        outside may hit    full_acc_k - (k + 1)(1 - c) <= m_k <= min(full_acc_k, c): a false hit needs a token outside, in
                           one of k + 1 places, and a true one needs none
        not joined         max(0, Σ a_i - k) <= m_k <= min a_i, i = 0 … k (Fréchet)
    Example: full_acc (.7021, .5677, .5001) at coverage .96 -> m_0 in .6621 … .7021.

    Raises:
        KitError: an unknown name, a figure that cannot be what it is called, or one that needs what was not given.
    """
    if name not in METRICS:
        near = difflib.get_close_matches(name, METRICS, 1)
        raise KitError(f"no metric {name!r}; " + (f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(METRICS)}"))
    metric, given = METRICS[name], np.atleast_1d(np.asarray(values, dtype=float))
    over = "drafts as served" if metric.served else "all answer positions"
    if metric.form in ("length", "product", "rate"):
        return _scalar(name, metric, given, depth, over)
    if not given.size or not np.isfinite(given).all() or (given < 0).any() or (given > 1).any():
        raise KitError(f"{name}: {given.tolist()} are no rates; each must lie between 0 and 1")
    if metric.outside != "miss":
        _need(name, "coverage", coverage)
    if metric.form == "marginal" and (np.diff(given) > 1e-9).any():
        raise KitError(f"{name}: {given.tolist()} rise, which shares of whole drafts cannot; are they rates given the position "
                       'before (metric "conditional"), or accuracies of single steps?')  # fmt: skip
    if metric.form == "step":
        low, high, why = _of_steps(given if metric.outside != "left out" else given * coverage, metric, coverage)
    else:
        joint = np.cumprod(given) if metric.form == "conditional" else given
        low, high, why = joint, joint, "marginal rates" if metric.form == "marginal" else "products along the draft"
        if metric.outside == "may hit" and coverage < 1:
            low, high = _may_hit(joint, coverage)
            why += "; a token outside the draft vocabulary may have counted as a hit"
    kind = "exact" if np.array_equal(low, high) else "bounds"
    if name == "speculators.cond_acc":  # its denominators are not shifted as its numerators are
        kind, why = "approximate", why + "; its denominators are of neighbouring positions, full_acc is the one to use"
    bounds = tuple(zip(low.tolist(), high.tolist(), strict=True))
    return Translation(metric, kind, bounds, (1 + float(low.sum()), 1 + float(high.sum())), over, why)


def _need(name: str, what: str, value: float | None) -> None:
    """KitError when something needed is missing or no share."""
    if value is None:
        raise KitError(f"{name} does not count tokens outside the draft vocabulary as misses: give {what}, the share of the "
                       "target's answer tokens inside it (1 for a whole vocabulary)")  # fmt: skip
    if not 0 <= value <= 1:
        raise KitError(f"{what} is {value}; it is a share between 0 and 1")


def _scalar(name: str, metric: Metric, given: np.ndarray, depth: int | None, over: str) -> Translation:
    if given.size != 1 or not np.isfinite(given).all():
        raise KitError(f"{name} is one number, {given.tolist()} was given")
    value = float(given[0])
    if metric.form == "rate":
        if depth is None:
            raise KitError(f"{name} is a share of all draft tokens: give depth, the draft tokens a verify step")
        if not 0 <= value <= 1:
            raise KitError(f"{name} is {value}; a share lies between 0 and 1")
        return Translation(metric, "exact", None, (1 + value * depth,) * 2, over, f"1 + {depth} times the rate")
    if metric.form == "product":
        if value < 0:
            raise KitError(f"{name} is {value}; a sum of products of accuracies is not negative")
        why = "plus the target's own token; right only if hits at different positions had nothing to do with each other"
        if metric.outside == "left out":
            why += ", and too high by 1 / coverage at each step"
        return Translation(metric, "approximate", None, (1 + value,) * 2, over, why)
    if value < 1 or (depth is not None and value > depth + 1 + 1e-9):
        most = "" if depth is None else f" and at most {depth + 1}"
        raise KitError(f"{name} is {value}; a length that holds the target's own token is at least 1{most}")
    return Translation(metric, "exact", None, (value, value), over, "the length itself")


def _of_steps(accuracy: np.ndarray, metric: Metric, coverage: float | None) -> tuple[np.ndarray, np.ndarray, str]:
    steps = np.arange(1, len(accuracy) + 1)
    low = np.maximum(0.0, np.cumsum(accuracy) - (steps - 1))
    high = np.minimum.accumulate(accuracy)
    why = "accuracies of single steps, not joined along the draft"
    if metric.outside == "may hit" and coverage < 1:
        low, high = np.maximum(0.0, low - steps * (1 - coverage)), np.minimum(high, coverage)
        why += "; a token outside the draft vocabulary may have counted as a hit"
    return np.minimum.accumulate(low), high, why


def _may_hit(joint: np.ndarray, coverage: float) -> tuple[np.ndarray, np.ndarray]:
    steps = np.arange(1, len(joint) + 1)
    low = np.maximum(0.0, joint - steps * (1 - coverage))
    return np.minimum.accumulate(low), np.minimum(joint, coverage)


def printed(accuracy: Sequence[Sequence[int]]) -> dict[str, float | list[float]]:
    """What other tools would print for a draft, from per-step counts [K] of (hits, positions, hits inside, positions inside)
    as `predict.Prediction.accuracy` holds them."""
    every = [hit / max(1, n) for hit, n, _, _ in accuracy]
    inside = [hit / max(1, n) for _, _, hit, n in accuracy]
    return {"eagle.accuracy": every, "specforge.accuracy": every, "specforge.simulated": float(np.cumprod(every).sum()),
            "torchspec.accuracy": inside, "torchspec.simulated": float(np.cumprod(inside).sum())}  # fmt: skip


def rows(printed_values: dict[str, float | list[float]], coverage: float) -> list[dict[str, object]]:
    """Figures of other tools and what each would say of the acceptance length, as rows of a table."""
    table = []
    for name, values in printed_values.items():
        told = translate(name, values, coverage=coverage)
        shown = ", ".join(f"{value:.3f}" for value in np.atleast_1d(values))
        low, high = told.length
        table.append({"tool prints": f"{told.metric.tool}: {told.metric.says}", "value": shown,
                      "length": f"{low:.3f}" if told.kind != "bounds" else f"{low:.3f} to {high:.3f}",
                      "which is": f"{told.kind}, over {told.over}", "why": told.why})  # fmt: skip
    return table
