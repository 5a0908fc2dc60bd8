"""The question this kit began with, answered from the public record: Kimi-K2 at 82 tokens a second on GPUs joined by PCIe,
51.5 % of decode time in all-reduce, n-gram speculation 9 to 26 % slower; would an EAGLE-3 draft pay?

All figures are published ones, of 8x RTX PRO 6000 (rtx6kpro: its Kimi-K2.6 matrix and its notes on communicators); those
runs lasted ten seconds each, so cells are noisy by some percent, and no intervals are given.
"""

from dataclasses import dataclass

from eagle3kit import fabric, verdict
from eagle3kit.figures import Figure
from eagle3kit.speedup import Cell, published_cell

SOURCE = "rtx6kpro, Kimi-K2.6 with an EAGLE-3 draft on 8x RTX PRO 6000"
CONCURRENCY = (1, 2, 4, 8, 16, 32, 64, 128)
# Speed with the draft over speed without; by nominal context in tokens, then by concurrency; None: not run.
SPEEDUP = {
    0: (1.29, 1.21, 1.04, 1.23, 1.39, 1.28, 1.14, 0.98),
    16384: (1.31, 1.20, 1.05, 1.14, 1.22, 1.02, 0.92, 0.85),
    32768: (None, 1.17, 0.96, 1.02, 1.08, 0.87, 0.76, 0.68),
    65536: (1.25, 1.16, 0.92, 0.90, 0.95, 0.86, 0.83, 0.61),
}
LENGTH, DRAFT_TOKENS = 2.278, 3  # pooled over all prompts
SHARE, TOKENS_PER_SECOND = 0.515, 82.0  # what the story says of itself
ALL_REDUCES = 122  # two a layer, 61 layers
USUAL_US, CUSTOM_US = 56.2, 11.8  # one message of a token, 14,336 bytes, alone: NCCL, and a one-shot kernel
USUAL_RATE, CUSTOM_RATE = 80.1, 87.5  # tokens a second of the engine with each


@dataclass(frozen=True)
class Readings:
    """One claim, read four ways, each a share of a decode step: as claimed (of kernel time), what a microbenchmark on that
    hardware says, what an A/B says the all-reduce costs, and what switching it saved."""

    claimed: Figure
    microbenchmark: Figure
    cost: Figure
    saved: Figure
    implied_us: float


def cells() -> list[Cell]:
    """The published map."""
    length = Figure(value=LENGTH, unit="tokens", kind="published", source=SOURCE)
    known = [(count, context, gain) for context, row in SPEEDUP.items()
             for count, gain in zip(CONCURRENCY, row, strict=True) if gain is not None]  # fmt: skip
    return [published_cell(count, context, DRAFT_TOKENS, speedup=gain, acceptance_length=length, source=SOURCE)
            for count, context, gain in known]  # fmt: skip


def answer() -> verdict.Verdict:
    """The verdict on the published map."""
    return verdict.judge(cells())


def saving() -> fabric.Saving:
    """The published A/B: NCCL, and a one-shot all-reduce."""
    return fabric.saving_of_rates(USUAL_RATE, CUSTOM_RATE, ALL_REDUCES, source=SOURCE)


def usual_us() -> float:
    """What one of NCCL's takes there inside the engine, as the A/B says: 20.4 µs, where a microbenchmark says 56.2."""
    return saving().saved_us_each + CUSTOM_US


def readings() -> Readings:
    """How the claimed share would read by other rulers (`fabric.reread`)."""
    cost, saved = fabric.reread(SHARE, saving(), microbenchmark_us=USUAL_US, other_us=CUSTOM_US, source="the story's share")
    step_ms = 1000 / TOKENS_PER_SECOND
    alone = Figure(value=fabric.share_of_step(ALL_REDUCES, USUAL_US, step_ms), unit="", kind="modelled",
                   source=f"{ALL_REDUCES} x {USUAL_US} µs in {step_ms:.1f} ms")  # fmt: skip
    claimed = Figure(value=SHARE, unit="", kind="published", source="the story, of kernel time")
    return Readings(claimed, alone, cost, saved, fabric.implied_us(SHARE, step_ms, ALL_REDUCES))


def plain_ms() -> Figure:
    """A plain step of the published engine, one sequence."""
    return Figure(value=1000 / USUAL_RATE, unit="ms", kind="published", source=SOURCE)


def speculating_ms() -> Figure:
    """A step with three draft tokens there, one sequence, no context: plain · length / speedup."""
    return Figure(value=1000 / USUAL_RATE * LENGTH / SPEEDUP[0][0], unit="ms", kind="modelled",
                  source=f"length / speedup, {SOURCE}")  # fmt: skip


def faster(new_us: float) -> fabric.WhatIf:
    """The published engine if an all-reduce of one token took `new_us`; what it takes now is what the A/B says, not what a
    microbenchmark says. A verify step's messages, four tokens, take longer in proportion to the published line (53.5 µs +
    8.43e-5 µs a byte)."""
    line = fabric.fit([(14_336, 56.2), (172_032, 65.7), (458_752, 93.0)])
    now = usual_us()
    longer = line.us(14_336 * (DRAFT_TOKENS + 1)) / line.us(14_336)
    return fabric.faster_fabric(
        plain_ms(), speculating_ms(), [fabric.Traffic(count=ALL_REDUCES, old_us=now, new_us=new_us)],
        [fabric.Traffic(count=ALL_REDUCES, old_us=now * longer, new_us=new_us * longer)],
    )  # fmt: skip
