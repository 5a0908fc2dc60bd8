"""Figures of acceptance: predicted against served, by source and context, along real text, and between runs."""

import html
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from IPython.display import HTML, display
from matplotlib.colors import LinearSegmentedColormap

from eagle3kit.canvas import COLOURS, INK, RULE, canvas, has_interval, say, sentence, show, whisker
from eagle3kit.tables import VISIBLE
from eagle3kit.words import percent, three

# Translucent tints for any page; the marks say the same without colour: underlined, struck through.
TEXT_CSS = """
.drafted p { font-family: ui-monospace, monospace; font-size: .875rem; line-height: 1.9; overflow-wrap: anywhere }
.drafted mark { color: inherit; background: rgba(0, 158, 115, .25); border-bottom: 2px solid #009e73; border-radius: 2px;
  print-color-adjust: exact; -webkit-print-color-adjust: exact }
.drafted del { background: rgba(213, 94, 0, .2); border-radius: 2px; opacity: .85; font-size: .8em;
  print-color-adjust: exact; -webkit-print-color-adjust: exact }
.drafted i { font-style: normal; opacity: .45 }
"""
SHADES = LinearSegmentedColormap.from_list("shades", ("#ffffff", COLOURS[5], COLOURS[0]))


def differences(rows: Sequence[Any], tolerance: float) -> None:
    """Served less predicted, by position and in length, with 95 % intervals and the tolerance of the length shaded.

    Each row has name, difference, low and high (`agreement.Position`); the last is the length.
    """
    fig, [axes] = canvas("Served less predicted (tokens a verify step; shaded: tolerance of the length)")
    axes.axhspan(-tolerance, tolerance, color=RULE, alpha=0.7, linewidth=0)
    axes.axhline(0, color=INK, linewidth=0.8)
    for place, row in enumerate(rows):
        colour = COLOURS[1 if place == len(rows) - 1 else 0]
        whisker(axes, place, row.low, row.high, colour)
        axes.plot([place], [row.difference], "s" if place == len(rows) - 1 else "o", color=colour, markersize=7)
        axes.annotate(f"{row.difference:+.3f}", (place, row.difference), (9, 8), textcoords="offset points", va="center",
                      fontsize=9, color=INK)  # fmt: skip
    most = 1.25 * max([tolerance, *(max(abs(row.low), abs(row.high)) for row in rows)])
    axes.set_ylim(-most, most)
    axes.set_xticks(range(len(rows)), [row.name for row in rows])
    axes.set_xlim(-0.6, len(rows) - 0.2)
    words = [f"{row.name} {row.difference:+.3f} ({row.low:+.3f} to {row.high:+.3f})" for row in rows]
    show(fig, f"Served less predicted acceptance: {sentence(words)}; tolerance of the length {tolerance:g}.")


def by_source_and_context(cells: Sequence[Any]) -> None:
    """Served acceptance length as a field of source by context length, the number of drafts in each.

    Each cell has source, context and counts (`breakdown.Cell`); contexts stand in the order in which they begin.
    """
    if not cells:
        return say("This vLLM tells nothing of single requests: acceptance by context length was not measured.")
    sources = sorted({cell.source for cell in cells})
    contexts = sorted({cell.context for cell in cells}, key=lambda text: int(text.split()[0].replace(",", "")))
    lengths = np.full((len(sources), len(contexts)), np.nan)
    fig, [axes] = canvas("Served acceptance length, by source and context in tokens (below: 95 % interval, drafts)")
    axes.grid(False)
    for cell in cells:
        lengths[sources.index(cell.source), contexts.index(cell.context)] = cell.counts.length
    low, high = float(np.nanmin(lengths)), float(np.nanmax(lengths))
    axes.imshow(lengths, cmap=SHADES, vmin=low - 0.3 * (high - low) - 0.05, vmax=high + 0.05, aspect="auto")
    for cell in cells:
        place = (contexts.index(cell.context), sources.index(cell.source))
        shade = (cell.counts.length - low) / (high - low) if high > low else 0.5
        spread = "one prompt" if cell.low is None else f"{three(cell.low)} to {three(cell.high)}"
        axes.annotate(f"{three(cell.counts.length)}\n{spread}\n{cell.counts.drafts:,}", place, ha="center", va="center",
                      fontsize=8.5, color="white" if shade > 0.6 else INK)  # fmt: skip
    axes.set_xticks(range(len(contexts)), contexts)
    axes.set_yticks(range(len(sources)), [source.rpartition("/")[2] for source in sources])  # of a file, its name
    words = [f"{cell.source} at {cell.context} tokens {three(cell.counts.length)}"
             f"{_interval({'from': cell.low, 'to': cell.high})} of {cell.counts.drafts:,} drafts" for cell in cells]  # fmt: skip
    show(fig, f"Served acceptance length by source and context: {sentence(words)}.")


def draft_text(pieces: Sequence[tuple[str, str]], title: str) -> None:
    """An answer with the draft's tokens marked: kept ones underlined on a tint, rejected ones struck through, others plain.

    `pieces` are (text, "target" | "kept" | "rejected").
    """
    tags = {"kept": "mark", "rejected": "del", "target": "span"}
    spans, counts = [], dict.fromkeys(tags, 0)
    for piece, kind in pieces:
        text = "".join(VISIBLE.get(letter) or html.escape(letter) for letter in piece)
        spans.append(f"<{tags[kind]}>{text}</{tags[kind]}>")
        counts[kind] += 1
    of = counts["kept"] + counts["target"]
    share = percent(counts["kept"] / of) if of else "none"
    caption = (f"{title}. {counts['kept']:,} of {of:,} tokens came from the draft ({share}): underlined;"
               f" draft tokens overruled: {counts['rejected']:,}, struck through.")  # fmt: skip
    display(HTML(f'<style>{TEXT_CSS}</style><figure class="drafted"><figcaption>{html.escape(caption)}</figcaption>'
                 f"<p>{'<wbr>'.join(spans)}</p></figure>"))  # fmt: skip


def lengths(rows: Sequence[Mapping[str, Any]]) -> None:
    """Acceptance length of each run as a point with its interval, and the predicted one beside it where there is one.

    Each row: run, "acceptance length", from, to, and optionally predicted.
    """
    if not rows:
        return say("No run has measured an acceptance length yet: 0 runs.")
    fig, [axes] = canvas("Acceptance length by run, served with 95 % intervals (hollow: predicted)")
    for place, row in enumerate(rows):
        whisker(axes, place, row["from"], row["to"], COLOURS[place % 6])
        axes.plot([place], [row["acceptance length"]], "o", color=COLOURS[place % 6], markersize=7)
        if row.get("predicted"):
            axes.plot([place + 0.15], [row["predicted"]], "o", markerfacecolor="white", color=COLOURS[place % 6], markersize=6)
        axes.annotate(three(row["acceptance length"]), (place, row["acceptance length"]), (-9, 0), textcoords="offset points",
                      ha="right", va="center", fontsize=9, color=INK)  # fmt: skip
    axes.set_xticks(range(len(rows)), [row["run"] for row in rows])
    axes.set_xlim(-0.7, max(len(rows), 3) - 0.3)
    axes.margins(y=0.2)
    words = [f"{row['run']} {three(row['acceptance length'])}"
             f"{_interval(row)}" for row in rows]  # fmt: skip
    show(fig, f"Served acceptance length: {sentence(words)}.")


def _interval(row: Mapping[str, Any]) -> str:
    given = {"low": row.get("from"), "high": row.get("to")}
    return f" ({three(given['low'])} to {three(given['high'])})" if has_interval(given) else ""
