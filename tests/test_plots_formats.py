"""Figures of the files: each one is a picture whose sentence holds its numbers."""

import numpy as np
import torch

from eagle3kit import canvas, plots_formats

FIGURES = plots_formats  # whose figures `drawn` listens to


def test_a_sample_to_scale(drawn):
    states = [np.full((50, 32), 2.0), np.full((50, 32), -8.0)]
    plots_formats.sample_to_scale([2, "last"], states, [0] * 20 + [1] * 30, 4)
    assert drawn == ["One sample to scale: 50 tokens by 2 states of 32 numbers of 4 bytes, 0.0122 MiB in all; 30 tokens are "
                     "supervised. Largest value of each: 2 2.00 and last 8.00."]  # fmt: skip
    plots_formats.sample_to_scale([2], [np.zeros((3, 5000))], [0, 1, 1], 2)  # wider than a picture, few tokens, zeros
    assert "3 tokens by 1 states of 5,000 numbers" in drawn[1]


def test_a_mapping_and_what_it_covers(drawn):
    t2d = torch.zeros(100, dtype=torch.bool)
    t2d[:50:2] = True
    d2t = t2d.nonzero().flatten() - torch.arange(25)
    counts = torch.arange(100, 0, -1)
    counts[60:] = 0
    plots_formats.mapping_anatomy(t2d, d2t)
    plots_formats.covered(counts, t2d)
    assert "t2d keeps 25 of 100 target tokens" in drawn[0] and "d2t holds 25 offsets from 0 to 24" in drawn[0]
    share = f"{int(counts[t2d].sum()) / int(counts.sum()):.1%}".replace("%", "\u00a0%")
    assert "60 different tokens were counted" in drawn[1] and f"holds 25 of them, {share} of all" in drawn[1]
    assert "the most frequent token left out occurs 99 times" in drawn[1]
    plots_formats.covered(counts, torch.ones(100, dtype=torch.bool))
    assert "none of them is left out" in drawn[2]


def test_nothing_counted_is_said(capsys):
    plots_formats.covered(torch.zeros(5, dtype=torch.int64), torch.ones(5, dtype=torch.bool))
    assert "no token was counted" in capsys.readouterr().out


def test_distances_by_layer(drawn):
    errors = [[0.5, 1e-5, 0.4, 0.6], [0.9, 0.7, 0.5, 0.0]]
    plots_formats.layer_distances([2, "last"], errors, [2, 3])
    assert "Distance of 2 stored states from what enters each of 3 layers" in drawn[0]
    assert "layer 2 is nearest to layer 1 (1e-05, next best 0.4)" in drawn[0]  # stored one layer early
    assert "last is nearest to layer 3 (1e-08" in drawn[0]


def test_the_sentence_goes_with_the_picture(capsys):
    plots_formats.layer_distances(["last"], [[1.0, 0.1]], [1])
    printed = capsys.readouterr().out
    assert "image/png" in printed and "last is nearest to layer 1 (0.1" in printed and canvas.DPI == 144
