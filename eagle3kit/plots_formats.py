"""Figures of what lies in the files: one sample drawn to scale, a vocabulary mapping, what it covers, whose layers states are."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.ticker import MaxNLocator, PercentFormatter

from eagle3kit.canvas import COLOURS, DASHES, INK, MARKERS, canvas, label_ends, say, sentence, show, style, thousands
from eagle3kit.words import percent, three

WIDEST = 2400  # columns of a picture of states; wider ones are thinned evenly


def sample_to_scale(names: Sequence[Any], states: Sequence[Any], mask: Sequence[int], bytes_a_number: int) -> None:
    """One sample as it lies in its file: a row a token, a column a number, one block a state, token and number alike in size.

    `states` [n][T, H] are named by `names` (layer ids, then "last"); each value is shown over its token's root mean square,
    so that no layer outshines another. `mask` [T]: supervised tokens have a bar at the left edge.
    """
    blocks = [np.asarray(state, np.float32) for state in states]
    tokens, hidden = blocks[0].shape
    shown = [np.nan_to_num(block / np.sqrt((block**2).mean(1, keepdims=True)).clip(1e-30)) for block in blocks]
    wide = hidden * len(blocks)
    step = -(-wide // WIDEST)
    fig, [axes] = canvas(f"{tokens:,} tokens × {len(blocks)} states of {hidden:,} numbers, to scale")
    stretch = max(1.0, 0.1 * wide / tokens)  # a sample of few tokens would be a hairline
    fig.set_figheight(min(8.0, 1.1 + 0.94 * fig.get_figwidth() * stretch * tokens / wide))
    axes.imshow(np.concatenate(shown, 1)[:, ::step], cmap="RdBu", vmin=-3, vmax=3, interpolation="nearest", aspect=stretch,
                extent=(0, wide, tokens, 0))  # fmt: skip
    supervised = np.asarray(mask) > 0
    axes.fill_betweenx(np.arange(tokens + 1), -0.012 * wide, -0.002 * wide, where=np.append(supervised, supervised[-1]),
                       step="post", color=INK, linewidth=0)  # fmt: skip
    axes.set_xlim(-0.014 * wide, wide)
    for number, name in enumerate(names):
        axes.axvline(number * hidden, color=INK, linewidth=0.8)
        axes.annotate(name if isinstance(name, str) else f"layer {name}", ((number + 0.5) * hidden, 0), (0, 3), ha="center",
                      textcoords="offset points", fontsize=9, color=INK)  # fmt: skip
    axes.set_title(axes.get_title("left") + (f", tokens enlarged {stretch:.1f} times" if stretch > 1 else ""), loc="left",
                   fontsize=10.5, color=INK, pad=22)  # fmt: skip
    axes.grid(False)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    thousands(axes, "x", "y")
    size = tokens * wide * bytes_a_number
    largest = [f"{name} {three(float(np.abs(block).max()))}" for name, block in zip(names, blocks, strict=True)]
    show(fig, f"One sample to scale: {tokens:,} tokens by {len(blocks)} states of {hidden:,} numbers of {bytes_a_number} bytes, "
              f"{three(size / 2**20)} MiB in all; {int(supervised.sum()):,} tokens are supervised. Largest value of each: "
              f"{sentence(largest)}.")  # fmt: skip


def mapping_anatomy(t2d: Any, d2t: Any) -> None:
    """`t2d` [V] as the share that is kept of each stretch of target ids, and `d2t` [D] as the offset of each draft token."""
    t2d, d2t = np.asarray(t2d, bool), np.asarray(d2t)
    fig, (left, right) = canvas("t2d: share kept, by target id", "d2t: offset, by draft id")
    edges = np.linspace(0, len(t2d), min(64, len(t2d)) + 1).astype(int)
    shares = np.array([t2d[a:b].mean() for a, b in zip(edges, edges[1:], strict=False)])
    left.stairs(shares, edges, fill=True, color=COLOURS[0], alpha=0.75)
    left.set_ylim(0, 1.03)
    left.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    right.plot(d2t, color=COLOURS[1], linewidth=2)
    right.set_ylim(bottom=min(0, int(d2t.min())))
    for axes in (left, right):
        axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
        axes.margins(x=0)
    thousands(left, "x")
    thousands(right, "x", "y")
    half = int(np.searchsorted(np.cumsum(t2d), t2d.sum() / 2))
    show(fig, f"t2d keeps {int(t2d.sum()):,} of {len(t2d):,} target tokens, {percent(float(shares[0]))} of the first "
              f"{edges[1]:,} ids and {percent(float(shares[-1]))} of the last {edges[-1] - edges[-2]:,}; half of those kept lie "
              f"below id {half:,}. d2t holds {len(d2t):,} offsets from {int(d2t[0]):,} to {int(d2t[-1]):,}.")  # fmt: skip


def covered(token_freq: Any, t2d: Any) -> None:
    """How often each token occurs, by rank, those that the draft may say apart from those it may not; and what all those up to
    a rank make up of what was counted. `token_freq` [V] counts, `t2d` [V] is true where the draft may say the token."""
    counts, kept = np.asarray(token_freq), np.asarray(t2d, bool)
    total = counts.sum()
    if not total:
        return say("There is nothing to show: no token was counted.")
    order = np.argsort(-counts, kind="stable")
    order = order[: int((counts > 0).sum())]
    ranks, inside = np.arange(1, len(order) + 1), kept[order]
    fig, (left, right) = canvas("Occurrences of a token, by its rank", "Share of all occurrences, up to a rank")
    for number, (mine, name) in enumerate(((inside, "kept"), (~inside, "left out"))):
        if mine.any():
            left.loglog(ranks[mine], counts[order][mine], MARKERS[number], color=COLOURS[number], markersize=4, label=name)
    left.legend(frameon=False, fontsize=9)
    share = np.cumsum(counts[order]) / total
    right.semilogx(ranks, share, color=COLOURS[0], linewidth=2)
    right.set_ylim(0, 1.03)
    right.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    mine = float(counts[kept].sum() / total)
    right.axhline(mine, color=COLOURS[1], linestyle=DASHES[1], linewidth=1.4)
    label_ends(right, [(mine, f"kept: {percent(mine)}", COLOURS[1])])
    thousands(left, "x", "y")
    thousands(right, "x")
    out = order[~inside]
    most = f"the most frequent token left out occurs {int(counts[out[0]]):,} times" if len(out) else "none of them is left out"
    show(fig, f"{len(order):,} different tokens were counted {int(total):,} times; the draft vocabulary of {int(kept.sum()):,} "
              f"holds {int(inside.sum()):,} of them, {percent(mine)} of all occurrences; {most}.")  # fmt: skip


def layer_distances(names: Sequence[Any], errors: Sequence[Sequence[float]], claimed: Sequence[int]) -> None:
    """How far each stored state is from what enters each layer of the target: the lowest point is the layer it is of.

    `errors` [states][layers + 1] are relative distances, `names` name the states, `claimed` are the ids they stand under.
    """
    fig, [axes] = canvas("Relative distance of each stored state from what enters a layer, logarithmic")
    ends, words = [], []
    for number, (name, row, place) in enumerate(zip(names, errors, claimed, strict=True)):
        row = np.asarray(row, float).clip(1e-8)
        axes.semilogy(range(len(row)), row, **style(number, marker=False))
        best = int(row.argmin())
        axes.plot([best], [row[best]], MARKERS[number % 6], color=COLOURS[number % 6], markersize=8, clip_on=False)
        axes.axvline(place, color=COLOURS[number % 6], linewidth=0.8, linestyle=DASHES[3])
        text = name if isinstance(name, str) else f"layer {name}"
        ends.append((row[-1], text, COLOURS[number % 6]))
        words.append(f"{text} is nearest to layer {best} ({row[best]:.2g}, next best {np.delete(row, best).min():.2g})")
    axes.set_xlim(0, len(errors[0]) - 1)
    axes.minorticks_off()
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    label_ends(axes, ends)
    show(fig, f"Distance of {len(words)} stored states from what enters each of {len(errors[0]) - 1} layers and then the final "
              f"norm: {sentence(words)}.")  # fmt: skip
