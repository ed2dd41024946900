"""What is said below a comparison, from summaries."""

from __future__ import annotations

from typing import Any

from personafl.evaluation import comparison_notes, comparison_table, report
from tests.evaluation.summaries import CURVES, summary

WILD = {"clients": 3, "of": 20, "rounds": 2, "first_round": 4, "last_round": 6, "final": 2}


def test_what_diverged_is_marked_and_explained() -> None:
    wild = [summary("ditto", 0, 0.1, 0.1, diverged=WILD, lr=1000.0), summary("local", 0, 0.9, 0.5)]
    assert [r[2] for r in comparison_table.rows(wild)] == ["10.0 ± 5.0 (diverged)", "90.0 ± 5.0"]
    line = (
        "ditto diverged: loss or model of 3 of 20 clients was not finite, first in round 4; try a learning rate below "
        "1000, or grad_clip. The final models of 2 clients are not finite and count as wrong."
    )
    assert comparison_notes.alerts(wild) == [line]
    assert line in report.markdown(wild)
    assert f"% {line}" in report.latex(wild)
    assert f'<p class="concern">{line}</p>' in report.html(wild, CURVES, title="x")
    recovered = [summary("ditto", 0, 0.9, 0.5), summary("ditto", 1, 0.9, 0.5, diverged=WILD | {"final": 0})]
    assert comparison_table.rows(recovered)[0][2] == "90.0 ± 0.0 (1 of 2 seeds diverged)"
    (told,) = comparison_notes.alerts(recovered)
    assert told.startswith("ditto diverged in seed 1: loss or model of 3 of") and told.endswith("or grad_clip.")
    worse = summary("ditto", 0, 0.9, 0.5, diverged=WILD | {"clients": 7, "first_round": 2, "final": 1})
    (told,) = comparison_notes.alerts([worse, *recovered[1:]])
    assert "in seeds 0, 1: loss or model of up to 7 of 20 clients was not finite, first in round 2;" in told
    assert told.endswith("The final models of up to 1 clients are not finite and count as wrong.")


LEFT_OUT = {"updates": 3, "clients": [1, 4], "first_round": 2, "last_round": 5, "why": {"an empty update": 2, "w": 1}}


def test_updates_that_were_left_out_are_told() -> None:
    kept = [{"round": 3, "why": "no update was left"}]
    runs = [summary("ditto", 0, 0.9, 0.5, faults={"quarantined": LEFT_OUT, "kept_model": kept, "late": 4, "stale": 3})]
    line = (
        "ditto: 3 updates of 2 clients were left out, first in round 2 (an empty update, 2 times; w); after 1 rounds "
        "the server's model was what it had been before."
    )
    assert comparison_notes.alerts(runs) == [line]
    assert line in report.markdown(runs) and f"% {line}" in report.latex(runs)
    runs.append(summary("ditto", 1, 0.9, 0.5, faults={"quarantined": LEFT_OUT | {"clients": [2]}, "dropped": 5}))
    (told,) = comparison_notes.alerts(runs)
    assert told.startswith(
        "ditto: 6 updates of up to 2 clients were left out, first in round 2 (an empty update, 4 times"
    )
    line = "Results of clients: ditto: 5 vanished, 4 came late, 3 of these were used a round later."
    assert line in comparison_notes.remarks(runs)
    many = {"quarantined": LEFT_OUT | {"why": {"a": 1, "b": 1, "c": 1, "d": 1}}}
    assert "(a; b; c; 1 other reasons)" in comparison_notes.alerts([summary("ditto", 0, 0.9, 0.5, faults=many)])[0]
    nobody = summary("ditto", 0, 0.9, 0.5, faults={"kept_model": kept})
    assert comparison_notes.alerts([nobody]) == [
        "ditto: after 1 rounds the server's model was what it had been before."
    ]
    assert not comparison_notes.alerts([summary("ditto", 0, 0.9, 0.5, faults={"dropped": 2})])


def test_early_stops_and_targets_are_told_below_the_table() -> None:
    def reached(personal: int | None, common: int | None = None) -> dict[str, Any]:
        return {"0.8": {"personal": personal, "global": common}}

    early = {"by": "patience", "on": "validation", "rounds": 30}
    runs = [
        summary("ditto", 0, 0.9, 0.5, stopped=early, rounds_to_target=reached(10)),
        summary("ditto", 1, 0.9, 0.5, stopped=early | {"rounds": 20}, rounds_to_target=reached(15)),
        summary("local", 0, 0.9, 0.5, rounds_to_target=reached(None)),
        summary("fedavg", 0, 0.9, 0.5, stopped=early | {"by": "target", "on": "test"}, rounds_to_target=reached(7, 7)),
        summary("fedavg", 1, 0.9, 0.5, rounds_to_target=reached(None)),
    ]
    assert comparison_notes.remarks(runs) == [
        "Stopped by training.patience on validation data: ditto after 20–30 rounds.",
        "Stopped by training.target on test data: fedavg after 30 rounds (1 of 2 seeds).",
        "Rounds to the target accuracy 80 %: ditto 12.5, local –, fedavg 7 (1 of 2 seeds).",
        "Rounds to the target accuracy 80 % of the global model: ditto –, local –, fedavg 7 (1 of 2 seeds).",
    ]
    told = [c for c in comparison_notes.concerns(runs) if "stopped by" in c]
    assert told == [
        "fedavg stopped by the score on test data: set data.validation_share to stop without a look at test data"
    ]
    assert not [line for line in comparison_notes.remarks(runs[:3]) if "global" in line]


def test_a_target_is_written_in_the_unit_of_its_metric() -> None:
    mae = {"name": "mae", "better": "lower"}
    reached = {"1500.0": {"personal": 4, "global": None}, "0.25": {"personal": None, "global": None}}
    run = summary("ditto", 0, 900.0, 0.5, metric=mae, rounds_to_target=reached)
    assert comparison_notes.remarks([run]) == [
        "Rounds to the target mae 1500: ditto 4.",
        "Rounds to the target mae 0.25: ditto –.",
    ]


def test_the_execution_of_the_model_is_told_below_the_table() -> None:
    alone = "layer by layer: its forward pass uses register_hook"
    one, other = (summary(n, 0, 0.9, 0.5, environment={"execution": alone}) for n in ("ditto", "local"))
    stacked = summary("local", 1, 0.9, 0.5, environment={"execution": "stacked"})
    assert comparison_notes.remarks([one, other]) == [f"The model runs {alone}."]
    assert comparison_notes.remarks([one, stacked]) == [
        f"The model of ditto runs {alone}.",
        "The model of local runs stacked.",
    ]
    assert comparison_notes.remarks([summary("ditto", 0, 0.9, 0.5)]) == []


def test_missing_baselines_and_different_worlds_are_pointed_out() -> None:
    fine = [summary(n, 0, 0.9, 0.5) for n in ("local", "fedavg-ft")]
    assert comparison_notes.concerns(fine) == []
    assert "no local" in comparison_notes.concerns(fine[1:])[0]
    other = summary("ditto", 0, 0.9, 0.5, hashes={"split": "z", "cohorts": "b", "init": "c", "shift": "d"})
    assert "did not see the same split" in comparison_notes.concerns([*fine, other])[0]
    blurred, clean = (summary("ditto", 0, 0.9, 0.5, hashes=fine[0]["hashes"] | {"data": d}) for d in "ab")
    assert comparison_notes.concerns([*fine, clean]) == []  # the others do not say
    assert comparison_notes.concerns([*fine, clean, blurred]) == [
        "seed 0: the methods did not see the same data; their numbers are not comparable"
    ]


def test_the_same_concern_is_said_once_for_all_seeds() -> None:
    """Two methods and three seeds: for seeds 0 and 1 the split and the data differ, for seed 2 the split alone."""
    runs = []
    for label in ("local", "fedavg-ft"):
        for seed in range(3):
            data = label if seed < 2 else "same"
            runs.append(summary(label, seed, 0.9, 0.5, hashes={"split": label, "cohorts": "b", "data": data}))
    rest = "; their numbers are not comparable"
    assert comparison_notes.concerns(runs) == [
        f"seeds 0, 1: the methods did not see the same split, data{rest}",
        f"seed 2: the methods did not see the same split{rest}",
    ]


def test_methods_with_other_seeds_than_others_are_told() -> None:
    ours = [summary("local", s, 0.9, 0.5) for s in (0, 1)] + [summary("fedavg-ft", s, 0.9, 0.5) for s in (0, 1)]
    assert not comparison_notes.concerns(ours)
    (told,) = comparison_notes.concerns(ours[:-1])
    assert told.startswith("the methods do not have the same seeds (local: 0, 1; fedavg-ft: 0); their means")
