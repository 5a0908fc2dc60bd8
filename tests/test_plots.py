"""Every figure drawn in a real notebook: its size, its sentence, and labels that do not touch."""

import base64
import os
import re
import struct
import subprocess
import sys
from pathlib import Path

import nbformat
import pandas as pd
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from eagle3kit import words
from eagle3kit.canvas import canvas, label_ends, smooth, spread, style

ROOT = Path(__file__).parent.parent
DATA = """
import numpy as np, pandas as pd, torch
from eagle3kit import plots, tables
history = pd.DataFrame([
    {"epoch": e - 1, "split": s, "draft_step": k, "loss": 4 / e + k, "full_acceptance": 0.1 * e}
    for e in (1, 2, 3) for s in ("train", "held out") for k in (0, 1, 2)])
steps = pd.DataFrame({"step": range(100), "loss": np.linspace(5, 2, 100), "tokens_per_second": 900.0,
                      "learning_rate": 1e-3})
served = [{"name": "predicted", "marginal": [0.41, 0.17, 0.07], "low": [0.39, 0.15, 0.06], "high": [0.43, 0.19, 0.08]},
          {"name": "served", "marginal": [0.4, 0.17, 0.07]}]
t2d = torch.zeros(100, dtype=torch.bool); t2d[::4] = True
d2t = t2d.nonzero().flatten() - torch.arange(25)
"""
FIGURES = {  # what is drawn, and what its sentence must say
    "plots.histogram(torch.tensor([1, 2, 3, 4, 100]), 'answer length', 'tokens')": "over 5: median 3, nine in ten",
    "plots.histogram([0.5], 'mask share', '%')": "median 0.500",
    "plots.loss_by_step(history)":
    "epoch 1 to 3. step 1: loss 4.00 to 1.33, all right 10.0 % to 30.0 %; step 2: loss 5.00",
    "plots.loss_by_step(history[history.epoch == 0])": "epoch 1 to 1. step 1: loss 4.00 to 4.00",
    "plots.training_log(steps)": "over 100 steps, smoothed over 5: 5.00 at first, 2.06 at the end; median 900 tokens/s",
    "plots.training_log(steps[:1])": "over 1 steps, smoothed over 1: 5.00 at first, 5.00 at the end",
    "plots.acceptance_by_position(served)": "position 1 to 3: predicted 41.0 %, 17.0 %, 7.00 %; served 40.0 %",
    "plots.speed([{'name': 'plain', 'tokens_per_second': 38.24, 'low': 37, 'high': 39}, "
    "{'name': 'draft', 'tokens_per_second': 52.9}])": "plain 38.2 (95 % interval 37.0 to 39.0) and draft 52.9.",
    "plots.coverage([1024, 4096, 8192], {'mt': [0.8, 0.9, 0.98]}, 8192)":
    "vocabulary of 8,192 tokens: mt 98.0 %. Sizes from 1,024",
    "plots.acceptance_by_position([{'name': 'draft', 'marginal': [0.0], 'low': [0.0], 'high': [0.0]}])": "draft 0 %.",
    "plots.coverage([64], {'mt': [1.0]}, 64)": "mt 100 %",
    "plots.token_frequencies(torch.tensor([0, 5, 100, 1]), 2)": "3 different tokens seen 106 times; the most frequent "
    "occurs 100 times, and the 2 most frequent make up 99.1 %",
    "plots.mapping(t2d, d2t)":
    "25 draft tokens stand for 25 of 100 target tokens, ids 0 to 96; half of them lie below id 48",
    "plots.sample_anatomy([2, 15, 'last'], 4, 576, np.array([[9, 1, 1, 1], [9, 2, 2, 2], [9, 3, 3, 3]]), [0, 0, 1, 1])":
    "Norms of 3 states of 576 numbers over 4 tokens; medians: layer 2 1.00 (largest 9.00), layer 15",
    "plots.agreement({'mt': {'share': 0.998, 'n': 12034, 'low': 0.997, 'high': 0.999}})":
    "mt 99.8 % of 12,034 (95 % interval 99.7 % to 99.9 %)",
}
TABLES = {
    "tables.table(pd.DataFrame([], columns=['source', 'reason']), '0 rows rejected')": ["0 rows rejected", ">reason<"],
    "tables.table(pd.DataFrame({'x': np.float32([0.5, np.nan]), 'y': pd.array([None, 2])}), '')":
    [">0.500<", ">–<", ">2<"],
    "plots.agreement({})": ["0 samples were looked at"],
    "plots.histogram([], 'answer length', 'tokens')": ["0 values"],
    "tables.html_tokens(['<|im_end|>', 'x<y', ' ', '\\n'], [0, 1, 1, 0], 'row & 1')":
    ["row &amp; 1. 2 of 4 tokens are supervised (50.0\N{NO-BREAK SPACE}%)",
     '<span class="special">&lt;|im_end|&gt;</span>', "<mark>x&lt;y</mark>", "<mark><i>·</i></mark>", "<i>⏎</i><br>"],
    "tables.table(pd.DataFrame({'a': ['<b>'], 'n': [12345], 'f': [0.123456], 'ok': [True], 'none': [None]}), 'c & d')":
    ["&lt;b&gt;", ">12,345<", ">0.123<", ">yes<", ">–<", "c &amp; d"],
}


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """The output of each line of FIGURES and TABLES, run by the real papermill."""
    folder = tmp_path_factory.mktemp("figures")
    made = new_notebook(cells=[new_code_cell(code) for code in (DATA, *FIGURES, *TABLES)])
    made.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(made, folder / "in.ipynb")
    command = [sys.executable, "-W", "error:::eagle3kit", "-m", "papermill", "in.ipynb", "out.ipynb", "-k", "python3"]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(command, cwd=folder, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True,
                          check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    cells = nbformat.read(folder / "out.ipynb", as_version=4).cells
    return {cell.source: cell.outputs for cell in cells if cell.source != DATA}


@pytest.mark.parametrize("code", FIGURES)
def test_a_figure_is_one_picture_with_its_numbers_in_words(outputs, code):
    [shown] = outputs[code]
    assert shown.output_type == "display_data", shown
    alt = shown.metadata["image/png"]["alt"]
    assert FIGURES[code] in alt.replace("\N{NO-BREAK SPACE}", " "), alt
    assert alt.endswith(".") and re.search(r"\d", alt) and shown.data["text/plain"] == alt and "nan" not in alt
    png = base64.b64decode(shown.data["image/png"])
    assert struct.unpack(">II", png[16:24]) in ((1036, 518), (1037, 518))


@pytest.mark.parametrize("code", TABLES)
def test_a_table_is_safe_html_with_figures_for_people(outputs, code):
    [shown] = outputs[code]
    words = shown.data.get("text/html") or shown.data["text/markdown"]
    for part in TABLES[code]:
        assert part in words, words


def test_lines_differ_without_their_colour():
    looks = [style(number) for number in range(6)]
    assert len({str(look["linestyle"]) for look in looks}) == len({look["marker"] for look in looks}) == 6


@pytest.mark.parametrize(
    "places", [(0.5, 0.52, 0.9), (0.1, 0.1, 0.1, 0.1), (0.9, 0.1), (0.3, 0.31, 0.32, 0.33, 0.6), ()])
def test_spread_keeps_order_and_centre_and_makes_room(places):
    moved = spread(places, 0.1)
    ordered = sorted(range(len(places)), key=lambda i: (places[i], i))
    assert all(moved[b] - moved[a] >= 0.1 - 1e-9 for a, b in zip(ordered, ordered[1:], strict=False))
    assert sum(moved) == pytest.approx(sum(places))


def test_labels_at_the_ends_of_lines_do_not_touch():
    fig, [axes] = canvas("ends")
    for end in (1.0, 1.01, 1.02, 5.0):
        axes.plot([0, 1], [0, end])
    label_ends(axes, [(end, f"line {end}", "#0072B2") for end in (1.0, 1.01, 1.02, 5.0)])
    fig.draw_without_rendering()
    boxes = sorted((label.get_window_extent() for label in axes.texts), key=lambda box: box.y0)
    assert all(low.y1 <= high.y0 for low, high in zip(boxes, boxes[1:], strict=False))
    assert all(box.x1 <= fig.bbox.x1 for box in boxes)  # and none is cut off


def test_smooth_is_the_mean_of_what_has_been_seen():
    assert list(smooth(pd.Series([2.0, 4.0, 6.0, 8.0]), 2)) == [2, 3, 5, 7]


@pytest.mark.parametrize("value, written", [
    (1.6, "1.60"), (0, "0"), (12, "12"), (1234.5, "1,234"), (99.95, "100"), (1e-5, "1.00e-05"),
    (1234567, "1,234,567"), (-0.5, "-0.500"), (float("inf"), "inf")])
def test_three_significant_figures(value, written):
    assert words.three(value) == written


@pytest.mark.parametrize("share, written", [(1, "100 %"), (0.99999, "99.9 %"), (0, "0 %"), (0.0712, "7.12 %")])
def test_a_share_is_never_rounded_up_to_all(share, written):
    assert words.percent(share) == written.replace(" ", "\N{NO-BREAK SPACE}")


@pytest.mark.parametrize("seconds, written", [
    (0.42, "0.4 s"), (41.6, "42 s"), (59.7, "1 min 00 s"), (185, "3 min 05 s"), (4321, "1 h 12 min")])
def test_durations(seconds, written):
    assert words.duration(seconds) == written
