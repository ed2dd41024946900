"""Which round is best, when a target was reached, when to stop, and where clients diverged: from rows by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest

from personafl.evaluation import rounds


def rows(*means: tuple[float, float] | None) -> list[dict[str, Any]]:
    """Rows with a validation and a test accuracy; None: not evaluated."""
    return [
        {
            "round": t,
            **({} if m is None else {"validation": {"mean": m[0]}, "personal": {"mean": m[1]}, "global": None}),
        }
        for t, m in enumerate(means)
    ]


FIVE = rows((0.5, 0.4), None, (0.8, 0.6), (0.8, 0.9), (0.7, 0.95))


def test_the_first_best_round_of_the_validation_data_is_chosen_not_the_best_of_the_test() -> None:
    assert rounds.by_validation(FIVE) == {
        "best_round": 3,
        "validation": {"mean": 0.8},
        "personal": {"mean": 0.6},
        "last": {"round": 5, "validation": {"mean": 0.7}, "personal": {"mean": 0.95}},
    }
    lowest = rounds.by_validation(FIVE, "lower")
    assert lowest is not None and lowest["best_round"] == 1
    assert rounds.by_validation([{"round": 0, "personal": {"mean": 0.4}}]) is None


def test_rounds_to_a_target_are_the_first_evaluated_that_reach_it() -> None:
    told = [r | ({"global": {"mean": 0.5}} if r["round"] == 4 else {}) for r in FIVE]
    assert rounds.to_target(told, (0.6, 0.5, 0.99)) == {
        "0.6": {"personal": 3, "global": None},
        "0.5": {"personal": 3, "global": 5},
        "0.99": {"personal": None, "global": None},
    }
    assert rounds.to_target(FIVE, (0.45,), "lower") == {"0.45": {"personal": 1, "global": None}}


def test_patience_counts_evaluations_since_the_best() -> None:
    ends = [[rounds.stop(FIVE[: t + 1], patience, None, 4) for t in range(5)] for patience in (1, 2, 3)]
    assert ends[0] == ["", "", "", "patience", "patience"]  # as good as before is not better
    assert ends[1] == ["", "", "", "", "patience"]
    assert ends[2] == [""] * 5
    worse = rows((0.5, 0), (math.nan, 0), (math.nan, 0))
    assert rounds.stop(worse, 2, None, 4) == "patience"


@pytest.mark.parametrize(("target", "at"), [(0.5, 0), (0.8, 2), (0.9, None)])
def test_a_target_is_judged_by_validation_data_where_there_are_some(target: float, at: int | None) -> None:
    ends = [rounds.stop(FIVE[: t + 1], 0, target, 4) for t in range(5)]
    assert (ends.index("target") if "target" in ends else None) == at
    plain = [{k: v for k, v in r.items() if k != "validation"} for r in FIVE]
    assert rounds.stop(plain, 0, 0.95, 4) == "target" and rounds.stop(plain[:4], 0, 0.95, 4) == ""
    assert (rounds.stopped_on(FIVE), rounds.stopped_on(plain)) == ("validation", "test")


def test_what_went_wrong_with_clients() -> None:
    assert rounds.faults(FIVE) == {}
    wrong = [dict(r) for r in FIVE]
    wrong[1] |= {"quarantined": [{"client": 4, "why": "a"}, {"client": 1, "why": "b"}], "dropped": 2}
    wrong[3] |= {
        "quarantined": [{"client": 4, "why": "b"}],
        "kept_model": "no update was left",
        "late": 1,
        "dropped": 1,
    }
    wrong[4] |= {"busy": 1, "stale": 1}
    assert rounds.faults(wrong, [4]) == {
        "faulty_clients": [4],
        "quarantined": {"updates": 3, "clients": [1, 4], "first_round": 2, "last_round": 4, "why": {"b": 2, "a": 1}},
        "dropped": 3,
        "busy": 1,
        "late": 1,
        "stale": 1,
        "kept_model": [{"round": 4, "why": "no update was left"}],
    }


def test_where_clients_diverged() -> None:
    assert rounds.divergence(FIVE, 0, 9) is None
    wild = [r | ({"diverged": 2} if r["round"] in (1, 2) else {}) for r in FIVE]
    found = {"clients": 3, "of": 9, "rounds": 2, "first_round": 2, "last_round": 3, "final": 0}
    assert rounds.divergence(wild, 3, 9) == found
    wild[4]["nonfinite_models"] = 1
    assert rounds.divergence(wild, 3, 9) == found | {"rounds": 3, "last_round": 5, "final": 1}


def cohort(diverged: int, *clients: int) -> dict[str, Any]:
    left_out = [{"client": c, "why": "its loss is not finite"} for c in clients[:diverged]]
    row = {"round": 0, "clients": len(clients)}
    return row | ({"diverged": diverged, "quarantined": left_out} if diverged else {})


def test_a_run_stops_where_everybody_has_diverged() -> None:
    """After three rounds in a row; rounds of nobody do not count."""
    all_three = cohort(3, 0, 1, 2)
    ends = [rounds.stop([all_three] * t, 0, None, 3) for t in range(1, 5)]
    assert ends == ["", "", "diverged", "diverged"]
    assert rounds.stop([all_three, all_three, cohort(0), all_three], 0, None, 3) == "diverged"
    assert rounds.stopped_on([all_three | {"stopped": "diverged"}]) == "training"
    for other in (cohort(2, 0, 1, 2), cohort(0, 0, 1, 2)):
        assert rounds.stop([all_three, other, all_three, all_three], 0, None, 3) == ""


def test_a_few_clients_with_odd_data_do_not_stop_a_run() -> None:
    """Of a hundred, ten different ones must have diverged; of five, all."""
    of_two = [cohort(2, c, c + 1) for c in range(0, 20, 2)]
    ends = [rounds.stop(of_two[:t], 0, None, 100) for t in range(1, 7)]
    assert ends == ["", "", "", "", "diverged", "diverged"]
    same = [cohort(2, 3, 4)] * 20
    assert rounds.stop(same, 0, None, 100) == "" and rounds.stop(same, 0, None, 5) == ""
    assert rounds.stop([*same, cohort(2, 0, 1), cohort(1, 2)], 0, None, 5) == "diverged"
