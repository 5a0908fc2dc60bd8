"""One function a figure: data in, one figure shown, nothing returned.

Every figure carries one message, has its unit in the title, and a sentence with its numbers as the text alternative.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, PercentFormatter

from eagle3kit.canvas import (
    COLOURS,
    DASHES,
    INK,
    RULE,
    canvas,
    has_interval,
    interval,
    label_ends,
    mark,
    say,
    sentence,
    show,
    smooth,
    style,
    thousands,
    whisker,
)
from eagle3kit.words import percent, three


def histogram(values: Sequence[float], what: str, unit: str) -> None:
    """How many of `values` lie where, the median marked.

    `what` is what was measured ("conversation length"), `unit` what one is measured in ("tokens").
    """
    values = np.asarray(values)
    if not len(values):
        return say(f"There is no {what} to show: 0 values.")
    low, middle, high = np.percentile(values, (5, 50, 95))
    if np.issubdtype(values.dtype, np.integer):
        low, middle, high = round(low), round(middle), round(high)
    fig, [axes] = canvas(f"{what[0].upper()}{what[1:]} ({unit}): how many of each")
    bins = min(40, max(5, round(2 * len(values) ** 0.5)))
    axes.hist(values, bins=bins, color=COLOURS[0], edgecolor="white", linewidth=0.6)
    axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    thousands(axes, "x", "y")
    mark(axes, middle, f"median {three(middle)}")
    show(fig, f"Histogram of {what} ({unit}) over {len(values):,}: median {three(middle)}, nine in ten between "
              f"{three(low)} and {three(high)}, smallest {three(values.min())}, largest {three(values.max())}.")


def loss_by_step(history: pd.DataFrame, loss_name: str = "Loss") -> None:
    """Loss, and share of positions with all draft tokens so far right, per draft step over epochs.

    Solid lines with markers are held out, thin dotted ones are train. `history` has a row per epoch, split ("train" or
    "held out") and draft_step, with loss and full_acceptance (0 to 1); epochs and steps count from 0, shown from 1.
    """
    fig, panels = canvas(f"{loss_name} by epoch, held out (dotted: train)", "All draft tokens right so far, by epoch")
    lines = {key: rows.sort_values("epoch") for key, rows in history.groupby(["draft_step", "split"])}
    steps = sorted(history.draft_step.unique())
    for axes, column in zip(panels, ("loss", "full_acceptance"), strict=True):
        ends = []
        for number, step in enumerate(steps):
            colour = COLOURS[number % 6]
            if (train := lines.get((step, "train"))) is not None:
                axes.plot(train.epoch + 1, train[column], color=colour, linestyle=":", linewidth=1.2)
            if (held_out := lines.get((step, "held out"))) is not None:
                axes.plot(held_out.epoch + 1, held_out[column], **style(number))
                ends.append((held_out[column].iloc[-1], f"step {step + 1}", colour))
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.set_ylim(bottom=0)
        label_ends(axes, ends)
    panels[1].yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    words = []
    for step in steps:
        rows = lines.get((step, "held out"), lines.get((step, "train")))
        (loss, last_loss), (share, last_share) = rows.loss.iloc[[0, -1]], rows.full_acceptance.iloc[[0, -1]]
        words.append(f"step {step + 1}: loss {three(loss)} to {three(last_loss)}, all right {percent(share)} to "
                     f"{percent(last_share)}")
    show(fig, f"Held-out loss and share of positions with all draft tokens so far right, by draft step, epoch "
              f"{history.epoch.min() + 1:g} to {history.epoch.max() + 1:g}. {'; '.join(words)}.")


def training_log(steps: pd.DataFrame) -> None:
    """Training loss at every step, with its mean over the last twentieth of the steps drawn through it.

    `steps` has columns step (from 0, shown from 1), loss, tokens_per_second and learning_rate.
    """
    width = max(1, len(steps) // 20)
    mean = smooth(steps.loss, width)
    fig, [axes] = canvas("Training loss by step" + (f" (line: mean of {width} steps)" if width > 1 else ""))
    axes.plot(steps.step + 1, steps.loss, ".", color=COLOURS[5], markersize=3, alpha=0.5)
    axes.plot(steps.step + 1, mean, color=COLOURS[0], linewidth=2)
    axes.set_ylim(0, 1.05 * float(np.max(steps.loss)))
    axes.margins(x=0.01)
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    thousands(axes, "x")
    label_ends(axes, [(mean[-1], three(mean[-1]), COLOURS[0])])
    show(fig, f"Training loss over {len(steps):,} steps, smoothed over {width}: {three(mean[0])} at first, "
              f"{three(mean[-1])} at the end; median {three(float(steps.tokens_per_second.median()))} tokens/s, "
              f"learning rate up to {steps.learning_rate.max():.3g}.")


def acceptance_by_position(rows: Sequence[Mapping[str, Any]]) -> None:
    """Share of drafts whose tokens up to each position were all accepted, with 95 % intervals.

    Each row: name ("served"), marginal [K] of shares 0 to 1, and optionally low [K] and high [K].
    """
    fig, [axes] = canvas("Draft tokens accepted, by position in the draft (% of drafts, with 95 % intervals)")
    axes.set_ylim(0, min(1, 1.15 * max(max(row.get("high") or row["marginal"]) for row in rows)) or 1)
    ends, words = [], []
    for number, row in enumerate(rows):
        places = np.arange(1, len(row["marginal"]) + 1) + 0.07 * (number - (len(rows) - 1) / 2)
        axes.plot(places, row["marginal"], **style(number) | {"linewidth": 1.1, "markersize": 7})
        for place, low, high in zip(places, row.get("low") or (), row.get("high") or (), strict=False):
            whisker(axes, place, low, high, COLOURS[number % 6])
        ends.append((row["marginal"][-1], row["name"], COLOURS[number % 6]))
        words.append(f"{row['name']} {', '.join(percent(share) for share in row['marginal'])}")
    longest = max(len(row["marginal"]) for row in rows)
    axes.set_xticks(range(1, longest + 1), [f"token {k}" for k in range(1, longest + 1)])
    axes.set_xlim(0.7, longest + 0.2)
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    label_ends(axes, ends)
    show(fig, f"Share of drafts accepted up to position 1 to {longest}: {'; '.join(words)}.")


def speed(rows: Sequence[Mapping[str, Any]]) -> None:
    """Tokens a second of each way to serve, as bars from zero.

    Each row: name, tokens_per_second, and optionally low and high.
    """
    fig, [axes] = canvas("Output tokens a second")
    bars(axes, rows, [row["tokens_per_second"] for row in rows], three)
    thousands(axes, "y")
    words = [f"{row['name']} {three(row['tokens_per_second'])}{interval(row, three)}" for row in rows]
    show(fig, f"Output tokens a second: {sentence(words)}.")


def agreement(by_source: Mapping[str, Mapping[str, Any]]) -> None:
    """How often the stored last state gives the next token, by source.

    Each source maps to share (0 to 1), n (tokens compared) and optionally low and high.
    """
    if not by_source:
        return say("No token was compared with the stored states: 0 samples were looked at.")
    rows = [{"name": f"{name}\n(n = {row['n']:,})", **row} for name, row in by_source.items()]
    fig, [axes] = canvas("Next token is the most likely one by the stored state (% of tokens, with 95 % intervals)")
    bars(axes, rows, [row["share"] for row in rows], percent)
    axes.set_ylim(0, 1.12)
    axes.set_yticks(np.linspace(0, 1, 6))
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    words = [f"{name} {percent(row['share'])} of {row['n']:,}{interval(row, percent)}"
             for name, row in by_source.items()]
    show(fig, f"Next token equals the argmax of the stored state: {sentence(words)}.")


def bars(axes: Axes, rows: Sequence[Mapping], values: Sequence[float], write: Callable[[float], str]) -> None:
    """Bars from zero with the value written above each, and whiskers where a row has low and high."""
    axes.bar(range(len(rows)), values, width=0.56, color=[COLOURS[i % 6] for i in range(len(rows))])
    tops = []
    for place, (row, value) in enumerate(zip(rows, values, strict=True)):
        if has_interval(row):
            whisker(axes, place, row["low"], row["high"], INK)
        tops.append(max(value, row["high"]) if has_interval(row) else value)
        axes.annotate(write(value), (place, tops[-1]), (0, 4), textcoords="offset points", ha="center", fontsize=10)
    axes.set_xticks(range(len(rows)), [row["name"] for row in rows])
    middle, half = (len(rows) - 1) / 2, max(len(rows), 3) / 2 + 0.1
    axes.set_xlim(middle - half, middle + half)
    axes.set_ylim(0, 1.15 * max(tops) or 1)


def coverage(sizes: Sequence[int], coverage_by_source: Mapping[str, Sequence[float]], chosen: int) -> None:
    """Share of answer tokens (0 to 1) that a draft vocabulary of each of `sizes` holds, by source.

    `chosen` is marked; `sizes` rise.
    """
    fig, [axes] = canvas("Answer tokens inside the draft vocabulary, by its size (% of tokens)")
    ends, words = [], []
    axes.set_xscale("log", base=2)
    axes.set_xlim(sizes[0] * 0.9, sizes[-1] * 1.05)
    axes.set_ylim(max(0, min(map(min, coverage_by_source.values())) - 0.05), 1.005)
    for number, (name, shares) in enumerate(coverage_by_source.items()):
        axes.plot(sizes, shares, **style(number))
        ends.append((shares[-1], name, COLOURS[number % 6]))
        words.append(f"{name} {percent(float(np.interp(np.log(chosen), np.log(sizes), shares)))}")
    shown = sizes[:: -(-len(sizes) // 8)]
    axes.set_xticks(shown, [f"{size:,}" for size in shown])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    mark(axes, chosen, f"{chosen:,} chosen", low=True)
    label_ends(axes, ends)
    show(fig, f"Share of answer tokens inside a draft vocabulary of {chosen:,} tokens: {sentence(words)}. "
              f"Sizes from {sizes[0]:,} to {sizes[-1]:,}.")


def token_frequencies(counts: Any, chosen: int) -> None:
    """How often the most frequent tokens occur, by rank, both axes logarithmic; the `chosen` first are marked.

    `counts` [V] holds whole numbers in any order (a torch tensor or an array); tokens never seen are left out.
    """
    counts = np.sort(np.asarray(counts))[::-1]
    counts = counts[counts > 0]
    kept = counts[:chosen].sum() / counts.sum()
    fig, [axes] = canvas("Occurrences of a token, by its rank (both logarithmic)")
    axes.loglog(np.arange(1, len(counts) + 1), counts, color=COLOURS[0], linewidth=2)
    thousands(axes, "x", "y")
    mark(axes, chosen, f"{chosen:,} kept")
    show(fig, f"Rank and frequency of {len(counts):,} different tokens seen {counts.sum():,} times; the most frequent "
              f"occurs {counts[0]:,} times, and the {min(chosen, len(counts)):,} most frequent make up "
              f"{percent(float(kept))}.")


def mapping(t2d: Any, d2t: Any) -> None:
    """Which target token each draft token stands for: target id = draft id + d2t[draft id].

    `t2d` [V] is true where the draft may say a token, `d2t` [size] holds the offsets.
    """
    t2d, d2t = np.asarray(t2d), np.asarray(d2t)
    target = np.arange(len(d2t)) + d2t
    fig, [axes] = canvas("Target token id of each draft token id")
    axes.plot([0, len(d2t)], [0, len(d2t)], color="#777777", linewidth=1, linestyle=DASHES[1])
    axes.plot(target, color=COLOURS[0], linewidth=2)
    axes.set_xlim(0, len(d2t))
    axes.set_ylim(0, len(t2d))
    thousands(axes, "x", "y")
    label_ends(axes, [(target[-1], "draft to target", COLOURS[0]), (len(d2t), "same id", "#777777")])
    show(fig, f"{len(d2t):,} draft tokens stand for {int(t2d.sum()):,} of {len(t2d):,} target tokens, ids "
              f"{target.min():,} to {target.max():,}; half of them lie below id {int(np.median(target)):,}; offsets "
              f"reach {int(d2t.max()):,}.")


def sample_anatomy(
    layers: Sequence[Any], tokens: int, hidden: int, norms: Any, mask: Sequence[int] | None = None
) -> None:
    """How long each stored state is along one sample, on a logarithmic scale; supervised tokens are shaded.

    `layers` [states] names the rows of `norms` [states, tokens] (layer numbers, then "last"); `hidden` is the width
    of a state; `mask` [tokens] is the loss mask.
    """
    norms = np.asarray(norms, float)
    names = [layer if isinstance(layer, str) else f"layer {layer}" for layer in layers]
    fig, [axes] = canvas(f"Norm of each state ({hidden:,} numbers) along one sample of {tokens:,} tokens, logarithmic")
    axes.set_yscale("log")
    ends, words = [], []
    for number, (name, row) in enumerate(zip(names, norms, strict=True)):
        axes.plot(row, **style(number, marker=False))
        ends.append((row[-1], name, COLOURS[number % 6]))
        words.append(f"{name} {three(float(np.median(row)))} (largest {three(row.max())})")
    axes.set_xlim(0, tokens - 1)
    thousands(axes, "x", "y")
    if mask is not None:
        axes.fill_between(range(tokens), 0, 1, where=np.asarray(mask) > 0, step="mid", color=RULE, alpha=0.6,
                          linewidth=0, zorder=0, transform=axes.get_xaxis_transform())
        axes.annotate("shaded: supervised", (1, 0.97), (-6, 0), xycoords="axes fraction", textcoords="offset points",
                      ha="right", va="top", fontsize=9, color=INK)
    label_ends(axes, ends)
    show(fig, f"Norms of {len(names)} states of {hidden:,} numbers over {tokens:,} tokens; medians: {sentence(words)}.")
