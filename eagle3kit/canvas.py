"""What every figure shares: its size, its colours, its labels, and the one way it is shown.

Lines differ in colour (Okabe-Ito) *and* in dash and marker, and are labelled where they end rather than in a legend.
"""

import base64
import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from IPython.display import display
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

INK, RULE = "#1a1a1a", "#dddddd"
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
DASHES = ("-", "--", "-.", ":", (0, (6, 2, 1, 2, 1, 2)), (0, (1, 1)))
MARKERS = ("o", "s", "^", "D", "v", "P")
SIZE, DPI = (7.2, 3.6), 144  # inches; 1037 x 518 pixels, shown at half of that on a sharp screen


def show(fig: Figure, alt: str) -> None:
    """Display `fig` as a PNG whose text alternative is `alt`: a sentence that holds the figure's numbers."""
    buffer = io.BytesIO()
    fig.savefig(buffer, format="png", dpi=DPI, facecolor="white", metadata={"Software": None, "Description": alt})
    data = {"image/png": base64.b64encode(buffer.getvalue()).decode(), "text/plain": alt}
    display(data, raw=True, metadata={"image/png": {"alt": alt, "width": round(fig.get_figwidth() * 100)}})


def say(text: str) -> None:
    """Show a sentence where there is nothing to draw."""
    display({"text/markdown": text, "text/plain": text}, raw=True)


def canvas(*titles: str, sharey: bool = False) -> tuple[Figure, list[Axes]]:
    """A figure with one panel a title, side by side: y grid only, no box, text in one size."""
    fig = Figure(figsize=SIZE, layout="constrained")
    fig.get_layout_engine().set(w_pad=0.1, h_pad=0.1)  # inches; the figure lies on a white card of its own
    panels = fig.subplots(1, len(titles), sharey=sharey, squeeze=False)[0]
    for axes, title in zip(panels, titles, strict=True):
        axes.set_title(title, loc="left", fontsize=10.5, color=INK, pad=10)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.spines["bottom"].set_color("#888888")
        axes.grid(axis="y", color=RULE, linewidth=0.8)
        axes.tick_params(labelsize=9, length=0, colors="#444444", pad=5)
        axes.tick_params(axis="x", length=3)
        axes.set_axisbelow(True)
    return fig, list(panels)


def style(number: int, marker: bool = True) -> dict[str, Any]:
    """The look of line `number`: a colour, and a dash and a marker that tell it apart without the colour."""
    look = {"color": COLOURS[number % 6], "linestyle": DASHES[number % 6], "linewidth": 1.8}
    return look | ({"marker": MARKERS[number % 6], "markersize": 5} if marker else {})


def dark(colour: str) -> tuple[float, ...]:
    """`colour` mixed with black until it can be read as text on white."""
    return tuple(0.62 * part for part in to_rgb(colour))


def spread(places: Sequence[float], gap: float) -> list[float]:
    """`places` moved as little as needed so that neighbours are at least `gap` apart; their order and centre stay.

    (0.50, 0.52, 0.90) with a gap of 0.1 -> (0.46, 0.56, 0.90)
    """
    groups: list[list[int]] = []

    def start(group: list[int]) -> float:
        return float(np.mean([places[i] for i in group])) - gap * (len(group) - 1) / 2

    for index in sorted(range(len(places)), key=lambda i: places[i]):
        groups.append([index])
        while len(groups) > 1 and start(groups[-1]) - start(groups[-2]) < gap * len(groups[-2]) - 1e-12:
            groups[-2:] = [groups[-2] + groups[-1]]
    moved = {index: start(group) + gap * rank for group in groups for rank, index in enumerate(group)}
    return [moved[i] for i in range(len(places))]


def label_ends(axes: Axes, ends: Sequence[tuple[float, str, str]]) -> None:
    """Write each (y, text, colour) at the right edge, at the height of its line, nudged apart where they touch."""
    to_share = axes.transData.transform  # data -> pixels, so that a log axis spreads evenly too
    bottom, top = axes.transAxes.transform([(0, 0), (0, 1)])[:, 1]
    places = [(to_share((axes.get_xlim()[0], y))[1] - bottom) / (top - bottom) for y, _, _ in ends]
    for place, (_, text, colour) in zip(spread(places, 0.075), ends, strict=True):
        axes.annotate(text, (1, place), (6, 0), xycoords="axes fraction", textcoords="offset points",
                      va="center", fontsize=9, color=dark(colour), annotation_clip=False)


def thousands(axes: Axes, *names: str) -> None:
    """Write the ticks of the named axes ("x", "y") as 1,000 rather than 10^3."""
    for name in names:
        getattr(axes, f"{name}axis").set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))


def whisker(axes: Axes, place: float, low: float, high: float, colour: str) -> None:
    """An interval as an upright line with short ends."""
    axes.errorbar(place, low, yerr=[[0], [high - low]], fmt="none", ecolor=colour, elinewidth=1.6, capsize=3.5)


def mark(axes: Axes, place: float, text: str, low: bool = False) -> None:
    """An upright dashed line at `place` with `text` beside it, at the top or `low` down, on the side with more room."""
    axes.axvline(place, color=INK, linewidth=1.2, linestyle=DASHES[1])
    left, right = axes.transAxes.transform([(0, 0), (1, 0)])[:, 0]
    share = (axes.transData.transform((place, axes.get_ylim()[0]))[0] - left) / (right - left)
    side, shift = ("right", -6) if share > 0.6 else ("left", 6)
    axes.annotate(text, (place, 0.06 if low else 0.94), (shift, 0), xycoords=("data", "axes fraction"), fontsize=9,
                  textcoords="offset points", ha=side, va="center", color=INK,
                  bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5})


def has_interval(row: Mapping) -> bool:
    """Whether a row gives both low and high."""
    return row.get("low") is not None and row.get("high") is not None


def interval(row: Mapping, write: Callable[[float], str]) -> str:
    """" (95 % interval 1.2 to 1.4)" where a row has low and high, else nothing."""
    if not has_interval(row):
        return ""
    return f" (95 % interval {write(float(row['low']))} to {write(float(row['high']))})"


def sentence(parts: Sequence[str]) -> str:
    """"a", "b" and "c" as one list in words."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def smooth(values: Sequence[float], width: int) -> np.ndarray:
    """Mean over the last `width` values at each place, fewer at the start."""
    total = np.cumsum(np.insert(np.asarray(values, float), 0, 0))
    ends = np.arange(1, len(total))
    starts = np.maximum(ends - width, 0)
    return (total[ends] - total[starts]) / (ends - starts)
