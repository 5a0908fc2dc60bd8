"""The figures of where decode time goes and what speculation costs and buys; as in `plots`, one message each."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.ticker import LogLocator, PercentFormatter

from eagle3kit.canvas import COLOURS, INK, canvas, label_ends, say, sentence, show, style, thousands, whisker
from eagle3kit.words import percent, three

if TYPE_CHECKING:
    from eagle3kit.collective import Measured
    from eagle3kit.fabric import Line
    from eagle3kit.verdict import Verdict

HATCHES = ("", "//", "..", "\\\\", "xx", "--")
WORDS = {"GO": (COLOURS[2], "pays"), "NO-GO": (COLOURS[1], "does not pay"), "WITHIN NOISE": ("#999999", "within noise")}


def all_reduce_times(measured: "Measured", fits: Mapping[str, "Line"]) -> None:
    """Time of one all-reduce by message size, each way a line of medians with a whisker up to its 95th percentile.

    `fits` are the latency + bandwidth lines, drawn thin where given.
    """
    if not measured.timings:
        return say("No all-reduce was timed.")
    fig, [axes] = canvas("One all-reduce (µs, median; whisker: to the 95th percentile), by message (KiB)")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ends, words = [], []
    for number, way in enumerate(measured.ways):
        timings = measured.of(way)
        sizes = np.array([timing.size for timing in timings]) / 1024
        medians = [1e6 * timing.median for timing in timings]
        axes.plot(sizes, medians, **style(number))
        for size, timing in zip(sizes, timings, strict=True):
            whisker(axes, size, 1e6 * timing.median, 1e6 * timing.p95, COLOURS[number % 6])
        if (line := fits.get(way)) is not None and min(map(line.us, sizes * 1024)) > 0:
            axes.plot(sizes, [line.us(size * 1024) for size in sizes], color=COLOURS[number % 6], linewidth=0.8, alpha=0.7)
        ends.append((medians[-1], way, COLOURS[number % 6]))
        words.append(f"{way} {three(medians[0])} µs at {sizes[0]:,.4g} KiB, {three(medians[-1])} µs at {sizes[-1]:,.4g} KiB")
    axes.yaxis.set_major_locator(LogLocator(10, subs=(1, 2, 5)))
    axes.minorticks_off()
    thousands(axes, "x", "y")
    label_ends(axes, ends)
    show(fig, f"Median time of one all-reduce: {sentence(words)}.")


def where_time_goes(rows: Sequence[Mapping[str, Any]]) -> None:
    """Each traced window as a bar of shares that add up to its whole. A row: name, shares {bucket: 0 to 1}."""
    if not rows:
        return say("No decode steps were traced.")
    every = dict.fromkeys(bucket for row in rows for bucket in row["shares"])
    buckets = [bucket for bucket in every if any(row["shares"].get(bucket, 0.0) >= 0.001 for row in rows)]
    fig, [axes] = canvas("Where the time of decode steps goes (% of the window)")
    axes.grid(visible=False)
    left = np.zeros(len(rows))
    for number, bucket in enumerate(buckets):
        shares = np.array([row["shares"].get(bucket, 0.0) for row in rows])
        axes.barh(range(len(rows)), shares, left=left, height=0.6, color=COLOURS[number % 6], edgecolor="white",
                  hatch=HATCHES[number // 6 % 6], label=bucket, alpha=1 if number < 6 else 0.6)  # fmt: skip
        for place, (start, share) in enumerate(zip(left, shares, strict=True)):
            if share >= 0.08:
                axes.annotate(percent(share), (start + share / 2, place), ha="center", va="center", fontsize=8.5, color="black",
                              bbox={"facecolor": "white", "edgecolor": "none", "pad": 1, "alpha": 0.8})  # fmt: skip
        left = left + shares
    axes.set_yticks(range(len(rows)), [row["name"] for row in rows])
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.legend(ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.12), fontsize=8.5, frameon=False)
    words = [f"{row['name']}: " + ", ".join(f"{bucket} {percent(row['shares'].get(bucket, 0.0))}" for bucket in buckets)
             for row in rows]  # fmt: skip
    show(fig, f"Shares of the traced time. {'; '.join(words)}.")


def step_times(rows: Sequence[Mapping[str, Any]]) -> None:
    """Milliseconds of a step by concurrency, one line for each kind of step. A row: name, batch, ms, low, high."""
    if not rows:
        return say("No decode steps were timed.")
    fig, [axes] = canvas("Time of one step (ms, with 95 % intervals), by sequences at once")
    ends, words = [], []
    batches = sorted({row["batch"] for row in rows})
    for number, name in enumerate(dict.fromkeys(row["name"] for row in rows)):
        line = sorted((row for row in rows if row["name"] == name), key=lambda row: row["batch"])
        places = [batches.index(row["batch"]) for row in line]
        axes.plot(places, [row["ms"] for row in line], **style(number))
        for place, row in zip(places, line, strict=True):
            whisker(axes, place, row["low"], row["high"], COLOURS[number % 6])
        ends.append((line[-1]["ms"], name, COLOURS[number % 6]))
        words.append(f"{name}: " + ", ".join(f"{three(row['ms'])} ms at {row['batch']}" for row in line))
    axes.set_xticks(range(len(batches)), [f"{batch:,}" for batch in batches])
    axes.set_xlim(-0.3, len(batches) - 0.7)
    axes.set_ylim(bottom=0)
    label_ends(axes, ends)
    show(fig, f"Time of one step by sequences at once. {'; '.join(words)}.")


def speedups(verdict: "Verdict | None") -> None:
    """The map: speedup at each concurrency and context, coloured and worded by whether it pays."""
    if verdict is None:
        return say("No speedup can be foretold: no step was timed with and without speculation.")
    cells = verdict.cells
    contexts = sorted({judged.cell.context for judged in cells})
    concurrencies = sorted({judged.cell.concurrency for judged in cells})
    fig, [axes] = canvas("Speedup = length / r, by sequences at once (across) and context in tokens (down)")
    axes.grid(visible=False)
    words = []
    for judged in cells:
        place = concurrencies.index(judged.cell.concurrency), contexts.index(judged.cell.context)
        colour, meaning = WORDS[judged.word]
        axes.add_patch(_tile(place, colour))
        gain = judged.cell.speedup
        spread = "" if gain.low is None else f"\n{gain.low:.2f} to {gain.high:.2f}"
        axes.annotate(f"{gain.value:.2f}×{spread}\n{meaning}", place, ha="center", va="center", fontsize=9, color=INK)
        words.append(f"{gain.value:.2f} at {judged.cell.concurrency} and {judged.cell.context:,} ({meaning})")
    axes.set_xticks(range(len(concurrencies)), [f"{count:,} at once" for count in concurrencies])
    axes.set_yticks(range(len(contexts)), [f"{context:,}" for context in contexts])
    axes.set_xlim(-0.5, len(concurrencies) - 0.5)
    axes.set_ylim(len(contexts) - 0.5, -0.5)
    kinds = sentence(sorted({judged.cell.speedup.kind for judged in cells}))
    show(fig, f"{verdict.word}. Speedup ({kinds}) by concurrency and context: {'; '.join(words)}.")


def _tile(place: tuple[int, int], colour: str) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((place[0] - 0.47, place[1] - 0.45), 0.94, 0.9, facecolor=colour, alpha=0.28, edgecolor=colour)
