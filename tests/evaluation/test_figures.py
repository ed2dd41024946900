"""Drawings of a comparison."""

from __future__ import annotations

import numpy as np

from personafl.evaluation import figures
from personafl.evaluation.shown import Shown


def test_rows_of_a_matrix_are_called_by_their_clients() -> None:
    figure = figures.matrix({"ditto": {"client_accuracy": np.zeros((3, 20)), "ids": np.array([0, 5, 19])}}, Shown())
    axes = figure.axes[0]
    assert dict(zip(axes.get_yticks(), (t.get_text() for t in axes.get_yticklabels()), strict=True)) == {
        0: "0",
        1: "5",
        2: "19",
    }
