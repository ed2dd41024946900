"""What a finished run wrote for people, whole and damaged."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from personafl.core.errors import UserError
from personafl.experiment.run_files import read_clients, read_rows, read_summary

SUMMARY: dict[str, Any] = {
    "algorithm": "fedavg",
    "label": "mine",
    "seed": 3,
    "rounds": 2,
    "evaluated_model": "the global one",
    "metric": {"name": "accuracy", "better": "higher"},
    "accuracy": {"personal": {"mean": 0.5, "std": 0, "worst": None}, "global": None},
    "shift": {"degrees": {"0.0": {"mean": 0.5, "std": 0.1}, "1": {"mean": 0.25, "std": 0.1}}, "average": 0.4},
    "communication": {"up_bytes": 10, "down_bytes": 20, "mib_per_client": 0.1},
    "compute": {"flops_per_client": 1e6},
    "time": {"seconds": 1.5},
    "hashes": {"split": "a"},
    "new": "whatever else there is",
}


def test_a_summary_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    for held in (SUMMARY, SUMMARY | {"shift": None}):
        path.write_text(json.dumps(held))
        assert read_summary(path) == held


DAMAGE: dict[str, tuple[Callable[[str], str], str]] = {
    "cut short": (lambda text: text[:-20], "damaged: "),
    "no table": (lambda text: "[1]", "it has no algorithm"),
    "without a seed": (lambda text: text.replace('"seed"', '"sad"'), "it has no seed"),
    "a seed of text": (lambda text: text.replace('"seed": 3', '"seed": "3"'), "seed is a str"),
    "a seed that is true": (lambda text: text.replace('"seed": 3', '"seed": true'), "seed is a bool"),
    "no accuracy": (lambda text: text.replace('{"personal"', '{"own"'), r"it has no accuracy\.personal"),
    "accuracy of text": (
        lambda text: text.replace('"mean": 0.5', '"mean": "0.5"'),
        r"accuracy\.personal\.mean is a str",
    ),
    "a degree of text": (lambda text: text.replace('"1":', '"much":'), "'much' is no degree of shift"),
    "a degree without numbers": (lambda text: text.replace('"mean": 0.25', '"m": 1'), r"no shift\.degrees\.mean"),
    "brackets": (lambda text: "[" * 100_000, "damaged: "),
}


@pytest.mark.parametrize(("change", "told"), DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_summary_is_refused_in_one_line(tmp_path: Path, change: Callable[[str], str], told: str) -> None:
    path = tmp_path / "summary.json"
    path.write_text(change(json.dumps(SUMMARY)))
    with pytest.raises(UserError, match=rf"summary\.json: .*{told}") as refused:
        read_summary(path)
    assert "\n" not in str(refused.value)


def test_rows_are_tables_with_their_round(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"round": 0, "loss": NaN}\n{"round": 1}\n')
    assert [r["round"] for r in read_rows(path)] == [0, 1]
    for text, told in (
        ('{"round": 0}\n{"rou', "damaged: "),
        ('{"round": 0}\n[1]\n', "line 2: not a row of a run"),
        ('{"round": "0"}\n', "line 1: not a row of a run"),
    ):
        path.write_text(text)
        with pytest.raises(UserError, match=rf"metrics\.jsonl.*{told}"):
            read_rows(path)


def test_clients_have_numbers_and_names(tmp_path: Path) -> None:
    path = tmp_path / "clients.csv"
    path.write_text('client,name,train,accuracy\n0,"two\nlines",6,0.5\n1,7,8,nan\n', newline="")
    first, second = read_clients(path)
    assert first == {"client": 0, "name": "two\nlines", "train": 6, "accuracy": 0.5}
    assert second["name"] == "7" and second["accuracy"] != second["accuracy"]
    for text, told in (
        ("client,train\n0\n", "more or fewer cells"),
        ("client,train\n0,1,2\n", "more or fewer cells"),
        ("client,train\n0,many\n", "client 1, column train: 'many' is no number"),
    ):
        path.write_text(text)
        with pytest.raises(UserError, match=rf"clients\.csv: .*{told}"):
            read_clients(path)


@pytest.mark.parametrize("read", [read_summary, read_rows, read_clients])
def test_what_is_no_text_or_not_there_is_named(tmp_path: Path, read: Callable[[Path], Any]) -> None:
    (tmp_path / "a").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="a: damaged: it is no text"):
        read(tmp_path / "a")
    with pytest.raises(UserError, match="b: cannot be read: No such file"):
        read(tmp_path / "b")
