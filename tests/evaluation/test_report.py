"""Tables and pages from summaries."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from personafl import UserError
from personafl.evaluation import report


def summary(label: str, seed: int, own: float, full: float, **changes: Any) -> dict[str, Any]:
    return {
        "algorithm": label,
        "label": label,
        "seed": seed,
        "rounds": 10,
        "evaluated_model": "theirs & <ours>",
        "lr": 0.1,
        "accuracy": {"personal": {"mean": own, "std": 0.05, "worst": own - 0.1}, "global": None},
        "shift": {"degrees": {"0.0": {"mean": own}, "1.0": {"mean": full, "std": 0.2}}, "average": (own + full) / 2},
        "communication": {"mib_per_client": 1234.5},
        "compute": {"flops_per_client": 2.5e9},
        "time": {"seconds": 3.0},
        "hashes": {"split": "a", "cohorts": "b", "init": "c", "shift": "d"},
    } | changes


def test_one_seed_shows_the_deviation_over_clients() -> None:
    (row,) = report.rows([summary("ditto", 0, 0.9, 0.5)])
    assert row[:9] == ("ditto", "0.1", "90.0 ± 5.0", "50.0 ± 20.0", "70.0", "80.0", "1,234", "2.5", "3")


def test_several_seeds_show_a_student_interval() -> None:
    """0.8, 0.9, 1.0: mean 0.9, deviation 0.1, half width 4.30 * 0.1 / sqrt(3)."""
    (row,) = report.rows([summary("ditto", s, own, 0.5) for s, own in enumerate((0.8, 0.9, 1.0))])
    mean, half = row[2].split(" ± ")
    assert mean == "90.0"
    assert float(half) == pytest.approx(100 * 4.30 * 0.1 / math.sqrt(3), abs=0.05)


def test_the_interval_narrows_with_any_number_of_seeds() -> None:
    """Thirty seeds, half at 0 and half at 1: deviation sqrt(30 / 29 / 4), t of 29 degrees of freedom 2.0452."""
    (row,) = report.rows([summary("ditto", s, float(s % 2), 0.5) for s in range(30)])
    half = 100 * 2.0452 * math.sqrt(30 / 29 / 4) / math.sqrt(30)  # 18.99; with 19 degrees of freedom it would be 19.4
    assert row[2] == f"50.0 ± {half:.1f}"


def test_two_seeds_show_their_deviation_and_say_so() -> None:
    """0.8 and 0.9: deviation 0.1 / sqrt(2) = 7.1; the interval would be 12.7 times that over sqrt(2), 63.5."""
    two = [summary("ditto", s, own, 0.5) for s, own in enumerate((0.8, 0.9))]
    assert report.rows(two)[0][2] == "85.0 ± 7.1"
    assert "mean ± standard deviation over 2 seeds, too few for an interval." in report.note(two)
    assert report.rows(two, "ci")[0][2] == "85.0 ± 63.5"
    assert "mean ± 95 % interval over 2 seeds." in report.note(two, "ci")
    three = [*two, summary("ditto", 2, 1.0, 0.5)]
    assert "mean ± 95 % interval over 3 seeds." in report.note(three)
    assert report.rows(three, "std")[0][2] == "90.0 ± 10.0"
    assert "mean ± standard deviation over 3 seeds." in report.note(three, "std")
    with pytest.raises(UserError, match="spread 'sem': possible are std, ci"):
        report.rows(three, "sem")


def test_a_single_seed_among_several_has_no_spread() -> None:
    """Its deviation over clients would look as if it were one over seeds."""
    runs = [*(summary("ditto", s, 0.9, 0.5) for s in range(3)), summary("local", 0, 0.8, 0.5)]
    assert [r[2] for r in report.rows(runs)] == ["90.0 ± 0.0", "80.0"]
    assert "mean ± 95 % interval over 1–3 seeds." in report.note(runs)


WILD = {"clients": 3, "of": 20, "rounds": 2, "first_round": 4, "last_round": 6, "final": 2}


def test_what_diverged_is_marked_and_explained() -> None:
    wild = [summary("ditto", 0, 0.1, 0.1, diverged=WILD, lr=1000.0), summary("local", 0, 0.9, 0.5)]
    assert [r[2] for r in report.rows(wild)] == ["10.0 ± 5.0 (diverged)", "90.0 ± 5.0"]
    line = (
        "ditto diverged: loss or model of 3 of 20 clients was not finite, first in round 4; try a learning rate below "
        "1000, or grad_clip. The final models of 2 clients are not finite and count as wrong."
    )
    assert report.alerts(wild) == [line]
    assert line in report.markdown(wild)
    assert f"% {line}" in report.latex(wild)
    assert f'<p class="concern">{line}</p>' in report.html(wild, CURVES, title="x")
    recovered = [summary("ditto", 0, 0.9, 0.5), summary("ditto", 1, 0.9, 0.5, diverged=WILD | {"final": 0})]
    assert report.rows(recovered)[0][2] == "90.0 ± 0.0 (1 of 2 seeds diverged)"
    (told,) = report.alerts(recovered)
    assert told.startswith("ditto diverged in seed 1: loss or model of 3 of") and told.endswith("or grad_clip.")
    worse = summary("ditto", 0, 0.9, 0.5, diverged=WILD | {"clients": 7, "first_round": 2, "final": 1})
    (told,) = report.alerts([worse, *recovered[1:]])
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
    assert report.alerts(runs) == [line]
    assert line in report.markdown(runs) and f"% {line}" in report.latex(runs)
    runs.append(summary("ditto", 1, 0.9, 0.5, faults={"quarantined": LEFT_OUT | {"clients": [2]}, "dropped": 5}))
    (told,) = report.alerts(runs)
    assert told.startswith(
        "ditto: 6 updates of up to 2 clients were left out, first in round 2 (an empty update, 4 times"
    )
    line = "Results of clients: ditto: 5 vanished, 4 came late, 3 of these were used a round later."
    assert line in report.remarks(runs)
    many = {"quarantined": LEFT_OUT | {"why": {"a": 1, "b": 1, "c": 1, "d": 1}}}
    assert "(a; b; c; 1 other reasons)" in report.alerts([summary("ditto", 0, 0.9, 0.5, faults=many)])[0]
    nobody = summary("ditto", 0, 0.9, 0.5, faults={"kept_model": kept})
    assert report.alerts([nobody]) == ["ditto: after 1 rounds the server's model was what it had been before."]
    assert not report.alerts([summary("ditto", 0, 0.9, 0.5, faults={"dropped": 2})])


def test_what_is_missing_is_said_with_every_form_of_the_table() -> None:
    done, gone = [summary("local", 0, 0.9, 0.5)], [("local", 1), ("ditto", 0), ("ditto", 1)]
    line = "Partial: 3 of 4 runs are not finished: local (seed 1), ditto (seeds 0, 1)."
    assert line in report.markdown(done, gone).splitlines()
    assert f"% {line}" in report.latex(done, gone)
    assert f'<p class="concern">{line}</p>' in report.html(done, CURVES, title="x", missing=gone)
    assert "Partial" not in report.markdown(done)


def chosen(best: int, own: float) -> dict[str, Any]:
    return {"best_round": best, "validation": {"mean": 0.7}, "personal": {"mean": own, "std": 0.02}}


def test_the_round_chosen_by_validation_has_a_column_where_there_is_one() -> None:
    one = summary("ditto", 0, 0.9, 0.5, validation=chosen(40, 0.95))
    place = report.columns([one]).index("By validation")
    assert report.rows([one, summary("local", 0, 0.9, 0.5)])[0][place] == "95.0 ± 2.0 (round 40)"
    assert report.rows([one, summary("local", 0, 0.9, 0.5)])[1][place] == "–"
    assert "By validation: at the evaluated round with the best validation score." in report.note([one])
    two = [one, summary("ditto", 1, 0.9, 0.5, validation=chosen(20, 0.85))]
    assert report.rows(two)[0][place] == "90.0 ± 7.1 (rounds 20–40)"  # deviation 0.1 / sqrt(2)
    plain = [summary("ditto", 0, 0.9, 0.5)]
    assert "By validation" not in report.columns(plain) and "validation" not in report.note(plain)


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
    assert report.remarks(runs) == [
        "Stopped by training.patience on validation data: ditto after 20–30 rounds.",
        "Stopped by training.target on test data: fedavg after 30 rounds (1 of 2 seeds).",
        "Rounds to the target accuracy 80 %: ditto 12.5, local –, fedavg 7 (1 of 2 seeds).",
        "Rounds to the target accuracy 80 % of the global model: ditto –, local –, fedavg 7 (1 of 2 seeds).",
    ]
    told = [c for c in report.concerns(runs) if "stopped by" in c]
    assert told == [
        "fedavg stopped by the score on test data: set data.validation_share to stop without a look at test data"
    ]
    assert not [line for line in report.remarks(runs[:3]) if "global" in line]


def test_a_target_is_written_in_the_unit_of_its_metric() -> None:
    mae = {"name": "mae", "better": "lower"}
    reached = {"1500.0": {"personal": 4, "global": None}, "0.25": {"personal": None, "global": None}}
    run = summary("ditto", 0, 900.0, 0.5, metric=mae, rounds_to_target=reached)
    assert report.remarks([run]) == [
        "Rounds to the target mae 1500: ditto 4.",
        "Rounds to the target mae 0.25: ditto –.",
    ]


def test_the_execution_of_the_model_is_told_below_the_table() -> None:
    alone = "layer by layer: its forward pass uses register_hook"
    one, other = (summary(n, 0, 0.9, 0.5, environment={"execution": alone}) for n in ("ditto", "local"))
    stacked = summary("local", 1, 0.9, 0.5, environment={"execution": "stacked"})
    assert report.remarks([one, other]) == [f"The model runs {alone}."]
    assert report.remarks([one, stacked]) == [
        f"The model of ditto runs {alone}.",
        "The model of local runs stacked.",
    ]
    assert report.remarks([summary("ditto", 0, 0.9, 0.5)]) == []


def test_a_run_without_shift_has_dashes() -> None:
    (row,) = report.rows([summary("ditto", 0, 0.9, 0.5, shift=None)])
    assert row[3:5] == ("–", "–")


def test_missing_baselines_and_different_worlds_are_pointed_out() -> None:
    fine = [summary(n, 0, 0.9, 0.5) for n in ("local", "fedavg-ft")]
    assert report.concerns(fine) == []
    assert "no local" in report.concerns(fine[1:])[0]
    other = summary("ditto", 0, 0.9, 0.5, hashes={"split": "z", "cohorts": "b", "init": "c", "shift": "d"})
    assert "did not see the same split" in report.concerns([*fine, other])[0]
    blurred, clean = (summary("ditto", 0, 0.9, 0.5, hashes=fine[0]["hashes"] | {"data": d}) for d in "ab")
    assert report.concerns([*fine, clean]) == []  # the others do not say
    assert report.concerns([*fine, clean, blurred]) == [
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
    assert report.concerns(runs) == [
        f"seeds 0, 1: the methods did not see the same split, data{rest}",
        f"seed 2: the methods did not see the same split{rest}",
    ]


def test_latex_and_html_escape_what_they_print() -> None:
    one = [summary("a_b", 0, 0.9, 0.5)]
    assert r"a\_b & 0.1 & 90.0 $\pm$ 5.0" in report.latex(one)
    page = report.html(one, {("a_b", 0): [{"round": 0, "personal": {"mean": 0.5}}]}, title="x < y")
    assert "theirs &amp; &lt;ours&gt;" in page
    assert "<title>x &lt; y</title>" in page
    assert page.count("<svg") == 2


CURVES = {("ditto", 0): [{"round": 0, "personal": {"mean": 0.5}}]}


def corrupted(*means: float) -> dict[str, Any]:
    cells = {str(s): {"mean": m, "std": 0.1} for s, m in enumerate(means, 1)}
    return {"corruptions": {"fog": cells}, "corruption_average": {"mean": sum(means) / len(means), "std": 0.1}}


def test_corruptions_are_summed_up_below_the_table_and_shown_on_the_page() -> None:
    runs = [summary("ditto", s, 0.9, 0.5, robustness=corrupted(0.5 + s / 10, 0.25)) for s in (0, 1)]
    runs.append(summary("local", 0, 0.9, 0.5))
    (line,) = report.remarks(runs)
    # 0.375 and 0.425: mean 0.4, deviation 0.05 / sqrt(2), half width 12.71 * 0.05 / 2
    assert line == "Mean over corruptions and severities: ditto 40.0 ± 3.5."
    assert report.remarks(runs, "ci") == ["Mean over corruptions and severities: ditto 40.0 ± 31.8."]
    assert report.markdown(runs).endswith(line)
    page = report.html(runs, CURVES, title="x")
    # 0.55 over seeds at severity 1: 255 - 0.55 * (164, 100, 42) = 165, 200, 232
    assert '<td style="background: rgb(165, 200, 232)">55.0</td>' in page
    assert "ditto, by severity" in page
    assert "local, by severity" not in page
    assert report.remarks(runs[2:]) == []
    assert "Corrupted images" not in report.html(runs[2:], CURVES, title="x")


def test_corruptions_of_the_whole_test_set_stand_behind_those_of_own_images() -> None:
    whole = {f"whole_{n}": v for n, v in corrupted(0.3, 0.1).items()} | {"whole_clean": {"mean": 0.45, "std": 0.05}}
    one = [summary("ditto", 0, 0.9, 0.5, robustness=corrupted(0.5, 0.25) | whole), summary("local", 0, 0.9, 0.5)]
    assert report.remarks(one) == [
        "Mean over corruptions and severities: ditto 37.5 ± 10.0.",
        "Every model on the whole test set: ditto 45.0 ± 5.0.",
        "Mean over corruptions and severities, every model on the whole test set: ditto 20.0 ± 10.0.",
    ]
    page = report.html(one, CURVES, title="x")
    own, _, of_all = page.partition("<h2>Corrupted images, every model on the whole test set</h2>")
    assert "<h2>Corrupted images</h2>" in own and ">25.0</td>" in own and ">10.0</td>" not in own
    assert "ditto, by severity" in of_all and ">10.0</td>" in of_all and ">25.0</td>" not in of_all
    alone = [summary("ditto", 0, 0.9, 0.5, robustness=whole)]
    assert "<h2>Corrupted images</h2>" not in report.html(alone, CURVES, title="x")
    assert len(report.remarks(alone)) == 2


def test_rotations_and_matrices_are_drawn() -> None:
    turned = {"rotations": {a: {"mean": 0.5, "std": 0.1} for a in ("-15.0", "0.0", "15.0")}}
    one = [summary("ditto", 0, 0.9, 0.5, robustness=turned)]
    square = {"client_accuracy": np.eye(4)[[1, 3]], "ids": np.array([1, 3])}  # a sample of two of four clients
    page = report.html(one, CURVES, title="x", evaluations={("ditto", 0): square, ("local", 0): {"ids": np.arange(4)}})
    assert page.count("<svg") == 4
    assert "Every model on every client" in page


def test_different_corruptions_are_compared_where_both_have_them() -> None:
    two = corrupted(0.5, 0.1)  # fog at severities 1 and 2
    one = corrupted(0.3) | {"corruptions": {"fog": {"1": {"mean": 0.3, "std": 0.1}}, "snow": {"1": {"mean": 0.9}}}}
    runs = [summary("ditto", 0, 0.9, 0.5, robustness=two), summary("local", 0, 0.9, 0.5, robustness=one)]
    line = "Mean over corruptions and severities all have (1): ditto 50.0, local 30.0."
    assert report.remarks(runs) == [line]  # fog at severity 1
    page = report.html(runs, CURVES, title="x")
    assert "Mean over severities that all have" in page
    assert page.count("snow") == 1  # in the method's own table
    apart = {"corruptions": {"snow": {"1": {"mean": 0.9}}}, "corruption_average": {"mean": 0.9, "std": 0.1}}
    runs[1] = summary("local", 0, 0.9, 0.5, robustness=apart)
    assert report.remarks(runs) == []
    assert "Mean over severities" not in report.html(runs, CURVES, title="x")


def test_the_expectation_stands_beside_what_was_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = {"expected": {"0.0": {"mean": 0.9, "std": 0.1}, "1.0": {"mean": 0.103, "std": 0.02}}}
    drawn = {"protocol": "donor", **summary("local", 0, 0.9, 0.03)["shift"]}
    runs = [summary("local", 0, 0.9, 0.03, robustness=expected, shift=drawn), summary("ditto", 0, 0.9, 0.5)]
    assert report.remarks(runs) == ["Full donor shift, expected over all donors: local 10.3 ± 2.0."]
    figures = []
    monkeypatch.setattr(report, "_drawn", lambda figure: figures.append(figure) or "")
    report.html(runs, CURVES, title="x")
    dashed = [line for line in figures[1].axes[0].lines if line.get_linestyle() == "--"]
    assert [list(line.get_xdata()) for line in dashed] == [[0, 100]]
    assert list(dashed[0].get_ydata()) == pytest.approx([90.0, 10.3])


def test_a_run_without_newcomers_beside_one_with_has_a_dash() -> None:
    one, other = summary("fedavg", 0, 0.9, 0.5), summary("fedper", 0, 0.9, 0.5)
    one["accuracy"]["unseen"] = {"mean": 0.7, "std": 0.1}
    place = report.columns([one, other]).index("Newcomers")
    assert [r[place] == "–" for r in report.rows([one, other])] == [False, True]


def test_the_rule_below_the_head_has_its_columns() -> None:
    head, rule, row, *_ = report.markdown([summary("ditto", 0, 0.9, 0.5)]).splitlines()
    assert set(rule) == {"|", "-"}
    edges = [[i for i, c in enumerate(line) if c == "|"] for line in (head, rule, row)]
    assert edges[0] == edges[1] == edges[2]
    assert len(edges[0]) == len(report.columns([summary("ditto", 0, 0.9, 0.5)])) + 1


def test_curves_are_drawn_over_rounds_from_one_and_in_per_cent(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = []
    monkeypatch.setattr(report, "_drawn", lambda figure: figures.append(figure) or "")
    curve: list[dict[str, Any]] = [
        {"round": 0, "personal": {"mean": 0.5}},
        {"round": 4},
        {"round": 9, "personal": {"mean": 0.75}},
    ]
    report.html([summary("ditto", 0, 0.9, 0.25)], {("ditto", 0): curve}, title="x")
    (over_rounds,), (over_degrees,) = (figure.axes[0].lines for figure in figures)
    assert (list(over_rounds.get_xdata()), list(over_rounds.get_ydata())) == ([1, 10], [50, 75])
    assert (list(over_degrees.get_xdata()), list(over_degrees.get_ydata())) == ([0, 100], [90, 25])


def test_a_metric_of_which_lower_is_better_is_written_in_its_own_unit() -> None:
    mse = {"name": "mse", "better": "lower"}
    runs = [summary("ditto", 0, 12.34567, 0.5, metric=mse, robustness=corrupted(1.0, 3.0, 2.0))]
    (row,) = report.rows(runs)
    assert row[2:6] == ("12.35 ± 0.05", "0.5 ± 0.2", "6.423", "12.25")
    assert "Mse (lower is better), mean ± deviation over clients" in report.markdown(runs)
    page = report.html(runs, CURVES, title="x")
    # the least is the best and has the full colour, the largest the worst and is white, 2 is half way
    for colour, number in (("91, 155, 213", "1"), ("255, 255, 255", "3"), ("173, 205, 234", "2")):
        assert f'<td style="background: rgb({colour})">{number}</td>' in page
    assert "Mse over the degree of shift" in page and "mse (lower is better)" in page


def test_a_square_of_another_metric_is_drawn_on_the_scale_of_its_numbers() -> None:
    squares = {
        (n, 0): {"client_accuracy": np.full((2, 2), v), "ids": np.arange(2)} for n, v in (("a", 2.0), ("b", 7.5))
    }
    runs = [summary(n, 0, 0.9, 0.5, metric={"name": "mse", "better": "lower"}) for n, _ in squares]
    drawn = report.figure("matrix", runs, {}, squares)
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
    drawn = report.figure("rounds", runs, curves, {})
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
        drawn = report.figure(what, runs, curves, {})
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
    drawn = report.figure("clients", runs, {}, {k: {"scores": s, "edges": edges} for k, s in scores.items()})
    assert drawn is not None
    median = next(line for line in drawn.axes[0].lines if len(set(line.get_ydata())) == 1 and line.get_color() == "C1")
    assert list(median.get_ydata()) == [75, 75]
    assert [t.get_text() for t in drawn.axes[0].get_xticklabels()] == ["ditto"]


def test_what_a_run_has_not_is_not_drawn() -> None:
    one = [summary("ditto", 0, 0.9, 0.5, shift=None)]
    assert [what for what in report.FIGURES if report.figure(what, one, CURVES, {}) is not None] == ["rounds"]


NASTY = r"$x_{&}$ |<b>`^~#%\\[1]"


def test_names_are_no_markup_in_any_form_of_the_table() -> None:
    one = [summary(NASTY, 0, 0.9, 0.5)]
    page = report.html(one, {(NASTY, 0): [{"round": 0, "phase": "train", "personal": {"mean": 0.5}}]}, NASTY)
    assert "<b>" not in page and "&lt;b&gt;" in page and page.count("<svg") == 2
    row = report.markdown(one).splitlines()[2]
    assert row.startswith(r"| $x_{&}$ \|\<b>\`^~#%\\\\\[1] |") and row.replace(r"\|", "").count("|") == 11
    told = report.markdown(one, [(NASTY, 1)]).splitlines()[4]
    assert told == r"Partial: 1 of 2 runs are not finished: $x_{&}$ \|\<b>\`^~#%\\\\\[1] (seed 1)."
    tex = report.latex(one).splitlines()[4]
    back = r"\textbackslash{}"
    assert tex.startswith(
        rf"\$x\_\{{\&\}}\$ |<b>`\textasciicircum{{}}\textasciitilde{{}}\#\%{back}{back}[1] & 0.1 & 90.0 $\pm$ 5.0"
    )


def test_methods_with_other_seeds_than_others_are_told() -> None:
    ours = [summary("local", s, 0.9, 0.5) for s in (0, 1)] + [summary("fedavg-ft", s, 0.9, 0.5) for s in (0, 1)]
    assert not report.concerns(ours)
    (told,) = report.concerns(ours[:-1])
    assert told.startswith("the methods do not have the same seeds (local: 0, 1; fedavg-ft: 0); their means")
