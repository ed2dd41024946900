"""What a deployment leaves at the server."""

from __future__ import annotations

import csv
import json
from pathlib import Path

from personafl.deployment.results import Results
from personafl.deployment.roster import Roster


def test_rows_behind_the_checkpoint_are_cut(tmp_path: Path) -> None:
    results = Results(tmp_path / "results")
    assert results.rows() == []
    first = results.add({"round": 0})
    results.add({"round": 1})
    results.cut(first)
    assert results.rows() == [{"round": 0}]
    results.cut(10**6)
    assert results.rows() == [{"round": 0}]
    assert results.add({"round": 1, "loss": None}) == first + len('{"round": 1, "loss": null}\n')


def test_the_table_has_every_client(tmp_path: Path) -> None:
    roster = Roster(1)
    first, _ = roster.add(["a", "b"])
    first.sizes, first.scores, first.closed = {"train": 3, "validation": 0, "test": 2}, {"own": 0.5}, True
    results = Results(tmp_path)
    results.finish({"seed": 1}, roster)
    rows = list(csv.DictReader((tmp_path / "clients.csv").read_text().splitlines()))
    assert [(r["client"], r["newcomer"], r["train"], r["own"], r["has_model"]) for r in rows] == [
        ("a", "False", "3", "0.5", "True"),
        ("b", "True", "", "", "False"),
    ]
    assert json.loads((tmp_path / "summary.json").read_text()) == {"seed": 1}


def test_rows_are_cut_to_the_byte(tmp_path: Path) -> None:
    results = Results(tmp_path)
    size = results.add({"round": 0})
    whole = (tmp_path / "metrics.jsonl").read_bytes()
    assert len(whole) == size and whole.endswith(b"\n")
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b"{")  # one byte of the next
    results.cut(size)
    assert (tmp_path / "metrics.jsonl").read_bytes() == whole
    results.cut(size)
    results.add({"round": 1})
    assert results.rows() == [{"round": 0}, {"round": 1}]
