"""The table of a comparison, from summaries."""

from __future__ import annotations

import math
from typing import Any

import pytest

from personafl import UserError
from personafl.evaluation import comparison_notes, comparison_table
from tests.evaluation.summaries import summary


def test_one_seed_shows_the_deviation_over_clients() -> None:
    (row,) = comparison_table.rows([summary("ditto", 0, 0.9, 0.5)])
    assert row[:9] == ("ditto", "0.1", "90.0 ± 5.0", "50.0 ± 20.0", "70.0", "80.0", "1,234", "2.5", "3")


def test_several_seeds_show_a_student_interval() -> None:
    """0.8, 0.9, 1.0: mean 0.9, deviation 0.1, half width 4.30 * 0.1 / sqrt(3)."""
    (row,) = comparison_table.rows([summary("ditto", s, own, 0.5) for s, own in enumerate((0.8, 0.9, 1.0))])
    mean, half = row[2].split(" ± ")
    assert mean == "90.0"
    assert float(half) == pytest.approx(100 * 4.30 * 0.1 / math.sqrt(3), abs=0.05)


def test_the_interval_narrows_with_any_number_of_seeds() -> None:
    """Thirty seeds, half at 0 and half at 1: deviation sqrt(30 / 29 / 4), t of 29 degrees of freedom 2.0452."""
    (row,) = comparison_table.rows([summary("ditto", s, float(s % 2), 0.5) for s in range(30)])
    half = 100 * 2.0452 * math.sqrt(30 / 29 / 4) / math.sqrt(30)  # 18.99; with 19 degrees of freedom it would be 19.4
    assert row[2] == f"50.0 ± {half:.1f}"


def test_two_seeds_show_their_deviation_and_say_so() -> None:
    """0.8 and 0.9: deviation 0.1 / sqrt(2) = 7.1; the interval would be 12.7 times that over sqrt(2), 63.5."""
    two = [summary("ditto", s, own, 0.5) for s, own in enumerate((0.8, 0.9))]
    assert comparison_table.rows(two)[0][2] == "85.0 ± 7.1"
    assert "mean ± standard deviation over 2 seeds, too few for an interval." in comparison_notes.note(two)
    assert comparison_table.rows(two, "ci")[0][2] == "85.0 ± 63.5"
    assert "mean ± 95 % interval over 2 seeds." in comparison_notes.note(two, "ci")
    three = [*two, summary("ditto", 2, 1.0, 0.5)]
    assert "mean ± 95 % interval over 3 seeds." in comparison_notes.note(three)
    assert comparison_table.rows(three, "std")[0][2] == "90.0 ± 10.0"
    assert "mean ± standard deviation over 3 seeds." in comparison_notes.note(three, "std")
    with pytest.raises(UserError, match="spread 'sem': possible are std, ci"):
        comparison_table.rows(three, "sem")


def test_a_single_seed_among_several_has_no_spread() -> None:
    """Its deviation over clients would look as if it were one over seeds."""
    runs = [*(summary("ditto", s, 0.9, 0.5) for s in range(3)), summary("local", 0, 0.8, 0.5)]
    assert [r[2] for r in comparison_table.rows(runs)] == ["90.0 ± 0.0", "80.0"]
    assert "mean ± 95 % interval over 1–3 seeds." in comparison_notes.note(runs)


def chosen(best: int, own: float) -> dict[str, Any]:
    return {"best_round": best, "validation": {"mean": 0.7}, "personal": {"mean": own, "std": 0.02}}


def test_the_round_chosen_by_validation_has_a_column_where_there_is_one() -> None:
    one = summary("ditto", 0, 0.9, 0.5, validation=chosen(40, 0.95))
    place = comparison_table.columns([one]).index("By validation")
    assert comparison_table.rows([one, summary("local", 0, 0.9, 0.5)])[0][place] == "95.0 ± 2.0 (round 40)"
    assert comparison_table.rows([one, summary("local", 0, 0.9, 0.5)])[1][place] == "–"
    assert "By validation: at the evaluated round with the best validation score." in comparison_notes.note([one])
    two = [one, summary("ditto", 1, 0.9, 0.5, validation=chosen(20, 0.85))]
    assert comparison_table.rows(two)[0][place] == "90.0 ± 7.1 (rounds 20–40)"  # deviation 0.1 / sqrt(2)
    plain = [summary("ditto", 0, 0.9, 0.5)]
    assert "By validation" not in comparison_table.columns(plain) and "validation" not in comparison_notes.note(plain)


def test_a_run_without_shift_has_dashes() -> None:
    (row,) = comparison_table.rows([summary("ditto", 0, 0.9, 0.5, shift=None)])
    assert row[3:5] == ("–", "–")


def test_a_run_without_newcomers_beside_one_with_has_a_dash() -> None:
    one, other = summary("fedavg", 0, 0.9, 0.5), summary("fedper", 0, 0.9, 0.5)
    one["accuracy"]["unseen"] = {"mean": 0.7, "std": 0.1}
    place = comparison_table.columns([one, other]).index("Newcomers")
    assert [r[place] == "–" for r in comparison_table.rows([one, other])] == [False, True]
