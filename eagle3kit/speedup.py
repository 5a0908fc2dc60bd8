"""What speculation buys: every formula with its source. What links and all-reduces cost is next door, in `fabric`.

Words. K draft tokens a verify step; B sequences at once (concurrency). *Acceptance length* L: new tokens a verify step, the
target's own one included, 1 to K + 1. *r* = time of a step with speculation (the draft's passes, the verify step over K + 1
tokens a sequence, and what surrounds them) / time of a plain step of the same B. A verify step yields L tokens for r plain
steps, so speedup = L / r, and it pays from **L = r** on.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from eagle3kit.errors import KitError
from eagle3kit.figures import Figure, quotient, ratio_of_means

# ---- Lengths


def expected_tokens(alpha: float, gamma: int) -> float:
    """Tokens a verify step if each draft token is accepted with the same probability: E = (1 - α^(γ+1)) / (1 - α).

    Leviathan et al. 2022 (arXiv 2211.17192), equation 1. α = 0.8, γ = 5 -> 3.689.
    """
    _within(alpha, gamma)
    return float(gamma + 1) if alpha == 1 else (1 - alpha ** (gamma + 1)) / (1 - alpha)


def leviathan_speedup(alpha: float, gamma: int, c: float) -> float:
    """E / (γc + 1), where a pass of the draft takes c times a pass of the target, and a verify step is one plain step.

    Leviathan et al., theorem 3.8. It leaves out that checking more tokens takes longer: r = γc + 1. α = 0.8, γ = 5,
    c = 0.05 -> 2.951.
    """
    return expected_tokens(alpha, gamma) / (gamma * c + 1)


def leviathan_operations(alpha: float, gamma: int, c_hat: float = 0.0) -> float:
    """Arithmetic a token, over plain decoding: (1 - α)(γĉ + γ + 1) / (1 - α^(γ+1)); ĉ: the draft's over the target's.

    Leviathan et al., theorem 3.11. α = 0.8, γ = 5, ĉ = 0 -> 1.626.
    """
    return (gamma * c_hat + gamma + 1) / expected_tokens(alpha, gamma)


def marginals(conditionals: Sequence[float]) -> tuple[float, ...]:
    """m_k = c_1 · … · c_k [K]: the chance that draft tokens 1 … k are all accepted. (.816, .777) -> (.816, .634)."""
    _rates(conditionals)
    return tuple(np.cumprod(conditionals).tolist())


def length(marginal: Sequence[float]) -> float:
    """1 + Σ m_k. KitError for rates that rise: then they are conditional ones (see `marginals`), or not rates.

    (.71, .48, .34) -> 2.53. The same from counts: `acceptance.Acceptance.length`.
    """
    _rates(marginal)
    if any(later > earlier for earlier, later in zip(marginal, marginal[1:], strict=False)):
        raise KitError(f"marginal acceptance {tuple(marginal)} rises along the draft; these are conditional rates: multiply them")
    return 1.0 + sum(marginal)


def lengths_by_depth(marginal: Sequence[float]) -> dict[int, float]:
    """The length with 1, 2, … K draft tokens: a shorter draft is the same draft cut off. (.7, .5) -> {1: 1.7, 2: 2.2}."""
    length(marginal)
    return {depth: 1.0 + sum(marginal[:depth]) for depth in range(1, len(marginal) + 1)}


# ---- What a verify step costs


def step_ratio(
    speculating: Sequence[float],
    plain: Sequence[float],
    *,
    pair: str,
    paired: bool = False,
    resamples: int = 2000,
    seed: int = 0,
) -> Figure:
    """r, measured: mean step time with speculation over mean plain step time, each of repeated timings in one unit.

    `pair` names what is compared ("smollm2, B = 8, K = 3, context 64"). `paired`: timings alternate (see `figures`).

    Raises:
        KitError: the whole interval lies below 1. A step with speculation does all that a plain step does and more, so the
            plain one was slowed down by something else (no graphs, cold caches, another engine). An interval that reaches 1
            is let pass, as noise.
    """
    return checked_ratio(ratio_of_means(speculating, plain, source=f"step times, {pair}", paired=paired,
                                        resamples=resamples, seed=seed), pair)  # fmt: skip


def published_ratio(acceptance_length: float, speedup: float, *, pair: str, decimals: int = 2) -> Figure:
    """r = L / speedup of figures that others published, both rounded to `decimals`; KitError as in `step_ratio`.

    3.27 and 1.47 -> 2.22.
    """
    if speedup <= 0 or acceptance_length < 1:
        raise KitError(f"{pair}: length {acceptance_length} (at least 1) and speedup {speedup} (above 0) give no r")
    half = 0.5 * 10**-decimals
    if (acceptance_length + half) / (speedup - half) < 1:
        _refuse(acceptance_length / speedup, pair)
    return Figure(value=acceptance_length / speedup, unit="", kind="published", source=f"length / speedup, {pair}")


def checked_ratio(r: Figure, pair: str) -> Figure:
    """`r` itself, unless it lies below 1 with its whole interval (KitError, see `step_ratio`)."""
    if r.most < 1:
        _refuse(r.value, pair)
    return r


def needed_rate(r: Figure, draft_tokens: int) -> Figure:
    """The mean acceptance rate that breaks even: (r - 1) / K accepted draft tokens a draft token. Above 1: out of reach.

    r = 1.6, K = 3 -> 0.2. (L = 1 + K · rate, and L = r.) Never below 0.
    """
    if draft_tokens < 1:
        raise KitError(f"{draft_tokens} draft tokens: at least one is needed to speculate")
    value, low, high = (None if x is None else max(0.0, (x - 1) / draft_tokens) for x in (r.value, r.low, r.high))
    return Figure(value=value, unit="", kind=r.kind, source=f"(r - 1) / {draft_tokens}, {r.source}", low=low, high=high, n=r.n)


def distinct_experts(experts: int, active: int, tokens: float) -> float:
    """N(t) = E · (1 - ((E - k) / E)^t): how many of E experts t tokens wake, k each, if they choose independently.

    MoESD (arXiv 2505.19645). So a verify step over B(K + 1) tokens reads more weights than a plain one over B, where a dense
    target reads the same. Neighbouring tokens choose alike, so this is an upper estimate. E = 384, k = 8, t = 4 -> 31.01.
    """
    if not 0 < active <= experts or tokens < 0:
        raise KitError(f"{active} active of {experts} experts for {tokens} tokens: that is no mixture of experts")
    return experts * (1 - ((experts - active) / experts) ** tokens)


def experts_ratio(experts: int, active: int, batch: int, draft_tokens: int) -> float:
    """N(B(K + 1)) / N(B): how much more expert weight a verify step reads. 384, 8, B = 1, K = 3 -> 3.88; B = 128 -> 1.07."""
    return distinct_experts(experts, active, batch * (draft_tokens + 1)) / distinct_experts(experts, active, batch)


# ---- What it buys


def predicted_speedup(acceptance_length: Figure, r: Figure) -> Figure:
    """L / r, always "modelled" (length and r come from different runs); the interval as in `figures.quotient`."""
    return quotient(acceptance_length, r, unit="x", kind="modelled",
                    source=f"length ({acceptance_length.kind}) / r ({r.kind})")  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One place of the map: what speculation with K draft tokens buys at this concurrency and context (tokens)."""

    concurrency: int
    context: int
    draft_tokens: int
    length: Figure
    r: Figure
    speedup: Figure


def speedup_map(ratios: Mapping[tuple[int, int, int], Figure], lengths: Mapping[int, Figure]) -> list[Cell]:
    """A cell for each r. `ratios`: by (concurrency, context, K); `lengths`: by K. KitError for a K without a length."""
    cells = []
    for (concurrency, context, depth), r in sorted(ratios.items()):
        if depth not in lengths:
            raise KitError(f"r was measured with {depth} draft tokens, but lengths are known for {sorted(lengths)} only")
        cells.append(Cell(concurrency=concurrency, context=context, draft_tokens=depth, length=lengths[depth], r=r,
                          speedup=predicted_speedup(lengths[depth], r)))  # fmt: skip
    return cells


def published_cell(
    concurrency: int, context: int, draft_tokens: int, *, speedup: float, acceptance_length: Figure, source: str
) -> Cell:
    """A cell whose speedup somebody published; r is then the length over it."""
    pair = f"{source}, concurrency {concurrency}, context {context}"
    return Cell(concurrency=concurrency, context=context, draft_tokens=draft_tokens, length=acceptance_length,
                r=published_ratio(acceptance_length.value, speedup, pair=pair),
                speedup=Figure(value=speedup, unit="x", kind="published", source=source))  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The draft tokens that give most tokens a second at one batch size; `by_depth` holds all, 0 being no speculation.

    `beyond_noise`: the intervals of the best one and of plain decoding do not touch; without intervals, that it is better.
    """

    draft_tokens: int
    by_depth: dict[int, Figure]
    beyond_noise: bool


def best_draft_tokens(batch: int, step_ms: Mapping[int, Figure], lengths: Mapping[int, Figure]) -> Choice:
    """K by goodput: B · L(K) / T(B, K) tokens a second, the largest wins (SmartSpec, arXiv 2406.14066).

    Args:
        step_ms: time of a step by K, K = 0 being the plain step.
        lengths: acceptance length by K ≥ 1.

    B = 8, steps of 10, 13 and 20 ms with 0, 1 and 3 draft tokens, lengths 1.6 and 2.2 -> 800, 985 and 880 tok/s: K = 1.
    """
    if 0 not in step_ms or not set(step_ms) - {0} <= set(lengths):
        raise KitError(f"goodput needs the plain step (0) and a length for each K; steps are known for {sorted(step_ms)}, "
                       f"lengths for {sorted(lengths)} draft tokens")  # fmt: skip
    by_depth = {}
    for depth, step in sorted(step_ms.items()):
        one = Figure(value=1.0, unit="", kind=step.kind, source="a plain step gives one token")
        tokens = lengths[depth] if depth else one
        rate = quotient(tokens, step, unit="tok/s", source=f"{batch} · length / step time, {depth} draft tokens")
        ends = [None if x is None else x * 1000 * batch for x in (rate.value, rate.low, rate.high)]
        by_depth[depth] = Figure(value=ends[0], low=ends[1], high=ends[2], unit="tok/s", source=rate.source, n=rate.n,
                                 kind=step.kind if not depth else "modelled")  # fmt: skip
    best = max(by_depth, key=lambda depth: by_depth[depth].value)
    return Choice(draft_tokens=best, by_depth=by_depth, beyond_noise=best != 0 and by_depth[best].least > by_depth[0].most)


# ---- What it needs on disk


def state_bytes_per_token(auxiliary_layers: int, hidden_size: int, item_bytes: int = 2) -> int:
    """(auxiliary layers + 1) · H · bytes a number: what a token's hidden states take on disk, the last state included.

    Three layers of 7,168 in bf16 -> 57,344.
    """
    return (auxiliary_layers + 1) * hidden_size * item_bytes


def _refuse(r: float, pair: str) -> None:
    raise KitError(f"r = {r:.2f} for {pair}: a step with speculation cannot be shorter than a plain one, so the plain "
                   "baseline is broken (graphs off, cold caches, another engine); measure both again together")  # fmt: skip


def _within(alpha: float, gamma: int) -> None:
    if not 0 <= alpha <= 1 or gamma < 0:
        raise KitError(f"acceptance {alpha} (0 to 1) and {gamma} draft tokens (0 or more) make no expectation")


def _rates(rates: Sequence[float]) -> None:
    if any(not 0 <= rate <= 1 for rate in rates):
        raise KitError(f"acceptance rates are shares of 0 to 1, not {tuple(rates)}")
