"""Which lines, boxes and squares runs give."""

from __future__ import annotations

import math

import numpy as np
import pytest

from personafl.evaluation import comparison_figures
from tests.evaluation.summaries import CURVES, summary


def test_a_square_of_another_metric_is_drawn_on_the_scale_of_its_numbers() -> None:
    squares = {
        (n, 0): {"client_accuracy": np.full((2, 2), v), "ids": np.arange(2)} for n, v in (("a", 2.0), ("b", 7.5))
    }
    runs = [summary(n, 0, 0.9, 0.5, metric={"name": "mse", "better": "lower"}) for n, _ in squares]
    drawn = comparison_figures.figure("matrix", runs, {}, squares)
    assert drawn is not None
    assert [axes.images[0].get_clim() for axes in drawn.axes[:2]] == [(2.0, 7.5)] * 2


def test_seeds_are_one_line_in_a_band_and_a_last_stage_is_no_round() -> None:
    """Two seeds at 0.5 and 0.7: mean 0.6, deviation 0.2 / sqrt(2); after fine-tuning 0.8 and 0.9."""
    runs = [summary("fedavg-ft", seed, 0.9, 0.25) for seed in (0, 1)]
    curves = {
        ("fedavg-ft", seed): [
            {"round": 9, "phase": "train", "personal": {"mean": own}},
            {"round": 10, "phase": "finetune", "personal": {"mean": tuned}},
        ]
        for seed, own, tuned in ((0, 0.5, 0.8), (1, 0.7, 0.9))
    }
    drawn = comparison_figures.figure("rounds", runs, curves, {})
    assert drawn is not None
    line, dotted, mark = drawn.axes[0].lines
    assert (list(line.get_xdata()), list(line.get_ydata())) == ([10], [60])
    assert mark.get_label() == "fedavg-ft, finetune stage"
    assert list(mark.get_xdata()) == [10] and list(mark.get_ydata()) == pytest.approx([85])
    assert dotted.get_linestyle() == ":"
    (band,) = drawn.axes[0].collections
    low, high = band.get_paths()[0].vertices[:, 1].min(), band.get_paths()[0].vertices[:, 1].max()
    assert (low, high) == pytest.approx((60 - 20 / math.sqrt(2), 60 + 20 / math.sqrt(2)))
    assert line.get_color() == dotted.get_color() == mark.get_color()


def test_every_one_of_25_methods_has_a_look_of_its_own_in_all_figures() -> None:
    runs = [summary(f"m{i}", 0, 0.9, 0.5) for i in range(25)]
    runs[0]["shift"] = None  # the others keep their colours
    curves = {(r["label"], 0): CURVES["ditto", 0] for r in runs}
    looks = []
    for what in ("rounds", "shift"):
        drawn = comparison_figures.figure(what, runs, curves, {})
        assert drawn is not None
        looks.append({line.get_label(): (line.get_color(), line.get_marker()) for line in drawn.axes[0].lines})
    over_rounds, over_degrees = looks
    assert len(set(over_rounds.values())) == 25
    assert over_degrees == {label: look for label, look in over_rounds.items() if label != "m0"}


def test_clients_of_all_seeds_are_drawn_as_one_box() -> None:
    """Two seeds of two clients: 0, 1 and 0.5, 1 of two samples each; the median is 0.75."""
    runs = [summary("ditto", seed, 0.9, 0.5) for seed in (0, 1)]
    edges = np.array([0, 2, 4])
    scores = {("ditto", 0): np.array([0, 0, 1, 1]), ("ditto", 1): np.array([0, 1, 1, 1])}
    drawn = comparison_figures.figure(
        "clients", runs, {}, {k: {"scores": s, "edges": edges} for k, s in scores.items()}
    )
    assert drawn is not None
    median = next(line for line in drawn.axes[0].lines if len(set(line.get_ydata())) == 1 and line.get_color() == "C1")
    assert list(median.get_ydata()) == [75, 75]
    assert [t.get_text() for t in drawn.axes[0].get_xticklabels()] == ["ditto"]


def test_what_a_run_has_not_is_not_drawn() -> None:
    one = [summary("ditto", 0, 0.9, 0.5, shift=None)]
    assert [
        what for what in comparison_figures.FIGURES if comparison_figures.figure(what, one, CURVES, {}) is not None
    ] == ["rounds"]
