"""Status and results of a deployment."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from personafl.core.errors import UserError
from personafl.core.table import Table
from personafl.deployment.flower import control, report
from personafl.deployment.flower.control import Run
from personafl.deployment.flower.folder import Folder
from tests.deployment.flower.folders import made

SUMMARY = {
    "metric": {"name": "accuracy", "better": "higher"},
    "accuracy": {"personal": {"mean": 0.75}, "global": {"mean": 0.5}, "unseen": {"mean": 0.25}},
    "final": {"personal": {"mean": 0.875}, "global": {"mean": 0.5}, "clients": 2},
    "rounds_without_update": {"count": 0, "last": 0},
    "communication": {"up_bytes": 1000, "down_bytes": 2000},
}
ROWS = [{"round": 0, "phase": "train"}, {"round": 1, "phase": "tune", "personal": {"mean": 0.5}}]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folder:
    """A deployment of two nodes, one of which the server app knows, whose run was resumed once."""
    found = made(tmp_path / "fed")
    monkeypatch.setattr(control, "is_up", lambda folder: True)
    monkeypatch.setattr(control, "nodes", lambda folder: {"11": "online", "12": "offline", "13": "unregistered"})
    monkeypatch.setattr(control, "registered", lambda folder: {"client-0": "11", "client-1": "12"})
    runs = [Run("8", "running", "N/A", 300, 500, 12.5), Run("7", "finished:failed", "lost", 800, 1700, 9.0)]
    monkeypatch.setattr(control, "runs", lambda folder: runs)
    found.results.mkdir()
    return found


def write(folder: Folder, rows: list[dict[str, Any]] = ROWS, more: str = "") -> None:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder.results / "metrics.jsonl").write_text(text + more)


def finish(folder: Folder, **changes: Any) -> None:
    (folder.results / "summary.json").write_text(json.dumps(SUMMARY | changes))
    (folder.results / "clients.csv").write_text("client,train,own\r\nphone a,12,0.5\r\nphone b,7,\r\n")


def test_nodes_have_their_clients_names_where_the_server_app_knows_them(folder: Folder) -> None:
    folder.roster.parent.mkdir()
    clients = [{"name": "phone a", "node": 11}, {"name": "gone", "node": 0}]
    folder.roster.write_text(json.dumps({"clients": clients}))
    assert report.status(folder)["nodes"] == [
        {"node": "11", "name": "phone a", "status": "online"},
        {"node": "12", "name": "client-1", "status": "offline"},
    ]
    folder.roster.write_text("[]")
    with pytest.raises(UserError, match=r"roster\.json: not a roster"):
        report.status(folder)


def test_a_status_says_how_far_the_run_is(folder: Folder) -> None:
    write(folder, more='{"round": 2, "pha')  # of which the rest is still to come
    folder.roster.parent.mkdir()
    told = {"clients": [], "unused": {"12": "another version"}, "waits": "", "stage": 3, "stages": 6}
    folder.roster.write_text(json.dumps(told))
    found = report.status(folder)
    assert found["position"] == {"round": 1, "phase": "tune", "personal": 0.5}
    assert report.status_lines(found) == [
        "server   running",
        "nodes    1 of 2 online",
        "         client-0: online (node 11)",
        "         client-1: offline (node 12)",
        "run      8, running, 12 s",
        "traffic  300 bytes from nodes, 500 to them, by Flower's report",
        "unused   client-1: another version",
        "rounds   3 of 6 stages are done; scores are known up to round 1, tune, accuracy 0.500",
    ]


def test_a_status_says_what_the_server_waits_for_and_which_rounds_had_no_update(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(folder)
    folder.roster.parent.mkdir()
    told = {
        "clients": [],
        "waits": "Stage 3 needs 2 clients",
        "unused": {"12": "another version"},
        "stage": 3,
        "stages": 6,
        "rounds_without_update": 1,
    }
    folder.roster.write_text(json.dumps(told))
    lines = report.status_lines(report.status(folder))
    assert "waits    Stage 3 needs 2 clients" in lines
    assert lines[-1] == "         1 round had no update and left the model as it was; logs/rounds.log has the reasons"
    monkeypatch.setattr(control, "runs", lambda folder: [Run("8", "finished:failed", "it waited", 0, 0, 1.0)])
    assert not any(line.startswith(("waits", "unused")) for line in report.status_lines(report.status(folder)))


def test_a_run_whose_last_rounds_had_no_update_is_not_called_completed(folder: Folder) -> None:
    finish(folder, rounds_without_update={"count": 3, "last": 2}, not_completed="The last 2 rounds had no update.")
    lines = report.collect_lines(report.collect(folder))
    assert "3 rounds had no update and left the model as it was; logs/rounds.log has the reasons" in lines
    assert "The run is not completed. The last 2 rounds had no update." in lines
    finish(folder)
    assert not any("not completed" in line for line in report.collect_lines(report.collect(folder)))


def test_a_failed_run_is_told_with_its_reason(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "runs", lambda folder: [Run("7", "finished:failed", "lost", 0, 0, 9.0)])
    assert "run      7, finished:failed: lost, 9 s" in report.status_lines(report.status(folder))


def test_a_status_without_a_server_says_so(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "is_up", lambda folder: False)
    assert report.status_lines(report.status(folder)) == ["server   not running"]


def test_results_have_bytes_by_both_counts_over_all_runs(folder: Folder) -> None:
    finish(folder)
    found = report.collect(folder)
    assert report.client_table(found) == Table(
        ["client", "train", "own"], [["phone a", "12", "0.5000"], ["phone b", "7", ""]], "lr"
    )
    # Flower's count: 300 + 800 bytes up, 500 + 1700 down.
    assert [" ".join(line.split()) for line in report.collect_lines(found)] == [
        "run 8 is under way: these are results from before it",
        "accuracy, personal: 0.8750 (mean over the final models of 2 clients)",
        "accuracy, global: 0.5000 (mean over the final models of 2 clients)",
        "accuracy, personal: 0.7500 (mean over clients, as the recipe evaluates)",
        "accuracy, unseen: 0.2500 (mean over newcomers)",
        "sent, our count: 1,000 bytes up, 2,000 bytes down",
        "sent, Flower's report: 1,100 bytes up, 2,200 bytes down, framing included, over 2 runs",
        "Flower's over ours: 1.100 up, 1.100 down",
    ]
    assert json.loads(json.dumps(found))["flower"] == {"runs": 2, "inbound_bytes": 1100, "outbound_bytes": 2200}


def test_results_of_the_last_run_are_told_as_such(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    finish(folder)
    monkeypatch.setattr(control, "runs", lambda folder: [Run("8", "finished:completed", "", 0, 0, 1.0)])
    found = report.collect(folder)
    assert found["under_way"] is None and not any("under way" in line for line in report.collect_lines(found))


def test_results_do_not_need_the_server(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    finish(folder)
    monkeypatch.setattr(control, "is_up", lambda folder: False)
    found = report.collect(folder)
    assert found["flower"] is None and "not known; the server is not running" in report.collect_lines(found)[-1]


def test_results_of_a_run_that_has_not_ended_are_refused(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"no such file: no stage is done; run 8 is under way; see personafl deploy"):
        report.collect(folder)
    folder.roster.parent.mkdir()
    folder.roster.write_text(json.dumps({"clients": [], "stage": 2, "stages": 80}))
    monkeypatch.setattr(control, "is_up", lambda folder: False)
    with pytest.raises(UserError, match=r"2 of 80 stages are done; no run is under way, personafl deploy start begins"):
        report.collect(folder)


@pytest.mark.parametrize("text", ["{", "3"])
def test_a_damaged_summary_is_named(folder: Folder, text: str) -> None:
    (folder.results / "summary.json").write_text(text)
    with pytest.raises(UserError, match=r"summary\.json: not a summary of a run"):
        report.collect(folder)
