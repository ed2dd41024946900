"""What is read back of a run, and what is refused."""

from __future__ import annotations

import copy
import functools
import json
import math
import operator
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from personafl import UserError
from personafl.evaluation import comparison_notes, report
from personafl.evaluation.run_records import read_clients, read_rounds, read_summary
from tests.evaluation.summaries import summary

WHOLE = summary("ditto", 0, 0.9, 0.5)


def without(*path: str) -> dict[str, Any]:
    """A summary less one of its keys."""
    found: dict[str, Any] = json.loads(json.dumps(WHOLE))
    inner = found
    for key in path[:-1]:
        inner = inner[key]
    del inner[path[-1]]
    return found


DAMAGED: list[tuple[str, str]] = [
    ("", "Expecting value"),
    ('{"label": "a"', "Expecting ',' delimiter"),
    ("[]", "it is a list"),
    ("3", "it is a number"),
    ("[" * 10**5, "nested too deeply|Expecting value"),
    ("{}", "it has no label"),
    (json.dumps(without("seed")), "it has no seed"),
    (json.dumps(without("shift")), "it has no shift"),
    (json.dumps(without("accuracy", "personal", "worst")), "it has no accuracy.personal.worst"),
    (json.dumps(WHOLE | {"accuracy": None}), "accuracy is null"),
    (json.dumps(WHOLE | {"seed": "0"}), "seed is text"),
    (json.dumps(WHOLE | {"lr": True}), "lr is true or false"),
    (json.dumps(WHOLE | {"hashes": ["a"]}), "hashes is a list"),
    (json.dumps(WHOLE | {"validation": None}), "validation is null"),
    (json.dumps(WHOLE | {"metric": {"name": "mse"}}), "it has no metric.better"),
    (
        json.dumps(WHOLE | {"shift": {"degrees": {"full": {"mean": 0}}, "average": 0}}),
        "shift.degrees.full is no number",
    ),
    (json.dumps(WHOLE | {"shift": {"degrees": {"1.0": 0.5}, "average": 0}}), "shift.degrees.1.0 is a number"),
]


@pytest.mark.parametrize(("text", "told"), DAMAGED, ids=[t for _, t in DAMAGED])
def test_a_damaged_summary_is_refused_with_what_is_wrong(text: str, told: str, tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    path.write_text(text)
    with pytest.raises(UserError, match=rf"summary.json: not a summary of a run: ({told})") as refused:
        read_summary(path)
    assert "\n" not in str(refused.value)


def test_a_file_that_is_not_there_or_not_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"summary.json: cannot be read: No such file"):
        read_summary(tmp_path / "summary.json")
    (tmp_path / "metrics.jsonl").write_bytes(b"\xff")
    with pytest.raises(UserError, match=r"metrics.jsonl: cannot be read: 'utf-8' codec"):
        read_rounds(tmp_path / "metrics.jsonl")


def test_rows_that_are_torn_are_named_by_their_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    rows = [{"round": 0, "phase": "train"}, {"round": 1, "phase": "train", "personal": {"mean": 0.5, "std": 0.1}}]
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    assert read_rounds(path) == rows
    path.write_text(path.read_text()[:-4])
    with pytest.raises(UserError, match=r"metrics.jsonl: line 2 is not of a run: Expecting"):
        read_rounds(path)
    path.write_text('{"round": 0}\n')
    with pytest.raises(UserError, match=r"metrics.jsonl: line 1 is not of a run: it has no phase"):
        read_rounds(path)


def test_a_summary_is_read_as_it_was_written_but_for_what_a_terminal_obeys(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    path.write_text(json.dumps(WHOLE | {"robustness": {}, "shift": None}))
    assert read_summary(path) == WHOLE | {"robustness": {}, "shift": None}
    path.write_text(json.dumps(WHOLE | {"label": "a\x1b[31m", "evaluated_model": "x\ny"}))
    assert read_summary(path)["label"] == r"a\x1b[31m" and read_summary(path)["evaluated_model"] == r"x\ny"


def test_clients_have_numbers_and_names(tmp_path: Path) -> None:
    path = tmp_path / "clients.csv"
    path.write_text('client,name,train,accuracy\n0,"two\nlines",6,0.5\n1,7,8,nan\n', newline="")
    first, second = read_clients(path)
    assert first == {"client": 0, "name": "two\nlines", "train": 6, "accuracy": 0.5}
    assert second["name"] == "7" and second["accuracy"] != second["accuracy"]
    for text, told in (
        ("client,train\n0\n", "more or fewer cells"),
        ("client,train\n0,1,2\n", "more or fewer cells"),
        (f"client,train\n0,{'9' * 5000}\n", "client 1, column train: '9999"),
        ("client,train\n0,many\n", "client 1, column train: 'many' is no number"),
    ):
        path.write_text(text)
        with pytest.raises(UserError, match=rf"clients\.csv: .*{told}"):
            read_clients(path)


FULL: dict[str, Any] = WHOLE | {
    "faults": {
        "faulty_clients": [0, 3],
        "quarantined": {
            "updates": 2,
            "clients": [3],
            "first_round": 2,
            "last_round": 3,
            "why": {"head.weight is not finite": 2},
        },
        "late": 2,
        "kept_model": [{"round": 2, "why": "no update was left"}],
    },
    "diverged": {"clients": 1, "of": 5, "first_round": 1, "final": 1},
    "validation": {"best_round": 1, "personal": {"mean": 0.2, "std": 0.1}},
    "rounds_to_target": {"0.5": {"personal": 1, "global": None}},
    "robustness": {
        "corruptions": {"fog": {"2": {"mean": 0.2, "std": 0.1}}},
        "corruption_average": {"mean": 0.2, "std": 0.1},
        "rotations": {"30.0": {"mean": 0.2, "std": 0.3}},
        "expected": {"0.0": {"mean": 0.2, "std": 0.2}, "1.0": {"mean": 0.1, "std": 0.1}},
        "change": {"inputs": 3, "levels": {"a": 0.5}, "recovery": {"a": 1}, "curve": [0.1, 0.2]},
    },
}
ODD: list[Any] = [None, -3, 10**400, math.nan, "x", [[1]], ["a"], {}, {"a": None}, {"1": {"mean": 1}}]


def places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every value within nested tables and lists, by the keys that lead to it."""
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield (*place, key)
        yield from places(value[key], (*place, key))


def test_a_summary_with_any_value_forged_is_refused_or_shown(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    for place in places(FULL):
        for odd in ODD:
            forged = copy.deepcopy(FULL)
            functools.reduce(operator.getitem, place[:-1], forged)[place[-1]] = odd
            path.write_text(json.dumps(forged))
            try:
                read = read_summary(path)
            except UserError:
                continue
            several = [read, FULL | {"seed": 1}]
            report.markdown(several)
            comparison_notes.alerts(several)
            comparison_notes.remarks(several)


def test_seeds_that_diverged_have_no_deviation() -> None:
    """Regression of a model that diverged has a mean of NaN or infinity."""
    several = [FULL, FULL | {"seed": 1, "accuracy": {"personal": {"mean": math.inf, "std": 0.0, "worst": math.inf}}}]
    assert "inf ± nan" in report.markdown(several).replace(" %", "")
