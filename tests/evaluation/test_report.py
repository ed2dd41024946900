"""Tables and pages from summaries."""

from __future__ import annotations

import math
from typing import Any

import pytest

from personafl.evaluation import report


def summary(label: str, seed: int, own: float, full: float, **changes: Any) -> dict[str, Any]:
    return {
        "algorithm": label,
        "label": label,
        "seed": seed,
        "evaluated_model": "theirs & <ours>",
        "accuracy": {"personal": {"mean": own, "std": 0.05, "worst": own - 0.1}, "global": None},
        "shift": {"degrees": {"0.0": {"mean": own}, "1.0": {"mean": full, "std": 0.2}}, "average": (own + full) / 2},
        "communication": {"mib_per_client": 1234.5},
        "compute": {"flops_per_client": 2.5e9},
        "time": {"seconds": 3.0},
        "hashes": {"split": "a", "cohorts": "b", "init": "c", "shift": "d"},
    } | changes


def test_one_seed_shows_the_deviation_over_clients() -> None:
    (row,) = report.rows([summary("ditto", 0, 0.9, 0.5)])
    assert row[:8] == ("ditto", "90.0 ± 5.0", "50.0 ± 20.0", "70.0", "80.0", "1,234", "2.5", "3")


def test_several_seeds_show_a_student_interval() -> None:
    """0.8, 0.9, 1.0: mean 0.9, deviation 0.1, half width 4.30 * 0.1 / sqrt(3)."""
    (row,) = report.rows([summary("ditto", s, own, 0.5) for s, own in enumerate((0.8, 0.9, 1.0))])
    mean, half = row[1].split(" ± ")
    assert mean == "90.0"
    assert float(half) == pytest.approx(100 * 4.30 * 0.1 / math.sqrt(3), abs=0.05)


def test_a_run_without_shift_has_dashes() -> None:
    (row,) = report.rows([summary("ditto", 0, 0.9, 0.5, shift=None)])
    assert row[2:4] == ("–", "–")


def test_missing_baselines_and_different_worlds_are_pointed_out() -> None:
    fine = [summary(n, 0, 0.9, 0.5) for n in ("local", "fedavg-ft")]
    assert report.concerns(fine) == []
    assert "no local" in report.concerns(fine[1:])[0]
    other = summary("ditto", 0, 0.9, 0.5, hashes={"split": "z", "cohorts": "b", "init": "c", "shift": "d"})
    assert "did not see the same split" in report.concerns([*fine, other])[0]


def test_latex_and_html_escape_what_they_print() -> None:
    one = [summary("a_b", 0, 0.9, 0.5)]
    assert r"a\_b & 90.0 $\pm$ 5.0" in report.latex(one)
    page = report.html(one, {"a_b": [{"round": 0, "personal": {"mean": 0.5}}]}, title="x < y")
    assert "theirs &amp; &lt;ours&gt;" in page
    assert "<title>x &lt; y</title>" in page
    assert page.count("<svg") == 2
