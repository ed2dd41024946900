"""Drawings of a comparison."""

from __future__ import annotations

import numpy as np
import pytest

from personafl.evaluation import figures
from personafl.evaluation.metric_format import Shown


def test_rows_of_a_matrix_are_called_by_their_clients() -> None:
    figure = figures.matrix({"ditto": {"client_accuracy": np.zeros((3, 20)), "ids": np.array([0, 5, 19])}}, Shown())
    axes = figure.axes[0]
    assert dict(zip(axes.get_yticks(), (t.get_text() for t in axes.get_yticklabels()), strict=True)) == {
        0: "0",
        1: "5",
        2: "19",
    }


def test_a_frontier_has_a_disc_for_each_method_and_a_cross_for_each_published_one() -> None:
    drawn = figures.frontier({"Dense": (80.0, 77.0, 100.0), "Sparse": (79.0, 76.0, 40.0)}, {"Sparse": (75.0, 50.0)})
    (axes,) = drawn.axes
    places = [tuple(c.get_offsets()[0]) for c in axes.collections]
    sizes = [float(c.get_sizes()[0]) for c in axes.collections]  # type: ignore[attr-defined]
    assert places == [(80.0, 77.0), (79.0, 76.0), (75.0, 50.0)] and sizes[0] > sizes[1]
    assert {t.get_text() for t in axes.texts} == {"Dense", "Sparse"}
    assert axes.get_xlabel() == "accuracy on own data, %" and axes.get_ylabel() == "accuracy at full shift, %"


def test_names_of_points_that_lie_together_are_put_one_below_the_other() -> None:
    """A name takes 2.4 of the 100 points of height here, and a quarter of the width."""
    points = {
        "top": (60.0, 100.0),
        "a": (70.0, 50.0),
        "b": (71.0, 50.5),
        "c": (72.0, 48.0),
        "far": (80.0, 50.2),
        "low": (60.0, 0.0),
    }
    found = figures._apart(points)
    assert {n: found[n] for n in ("top", "b", "far", "low")} == {"top": 100.0, "b": 50.5, "far": 50.2, "low": 0.0}
    assert found["a"] == pytest.approx(50.5 - 2.4) and found["c"] == pytest.approx(50.5 - 4.8)
