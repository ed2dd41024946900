"""The SuperLink as `flwr` shows it: keys and nodes, runs."""

from __future__ import annotations

import itertools
import tomllib
from pathlib import Path
from typing import Any

import pytest

from personafl.core.errors import UserError
from personafl.deployment.flower import control
from personafl.deployment.flower.folder import Folder
from tests.deployment.flower.folders import made, with_keys


class Link:
    """A SuperLink that answers as Flower's does, as far as it is asked here."""

    def __init__(self) -> None:
        self.nodes: dict[str, list[str]] = {}  # node id: public key, status
        self.runs: list[dict[str, Any]] = []
        self.asked: list[tuple[str, ...]] = []

    def run(self, number: str, status: str, at: str = "2026-01-01", sent: int = 0) -> None:
        traffic = {"inbound-bytes": sent, "outbound-bytes": 2 * sent}
        told = {"run-id": number, "status": status, "status-details": "why", "pending-at": at, "elapsed": 1.5}
        self.runs.append(told | {"network-traffic": traffic})

    def __call__(self, folder: Folder, *words: str) -> dict[str, Any]:
        self.asked.append(words)
        if words[:2] == ("supernode", "register"):
            key = Path(words[2]).read_text()
            if key in (held for held, _ in self.nodes.values()):
                raise UserError("flwr supernode: [code: 23] Public key already in use.")
            node = str(100 + len(self.nodes))
            self.nodes[node] = [key, "registered"]
            return {"node-id": int(node)}
        if words[:2] == ("supernode", "unregister"):
            self.nodes[words[2]][1] = "unregistered"
            return {}
        if words[0] == "supernode":
            return {"nodes": [{"node-id": n, "status": s} for n, (_, s) in self.nodes.items()]}
        if words[0] == "stop":
            next(r for r in self.runs if r["run-id"] == words[1])["status"] = "finished:stopped"
            return {}
        if words[0] == "run":
            return {"run-id": 7}
        return {"runs": [r for r in self.runs if "--run-id" not in words or r["run-id"] == words[-1]]}


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> Link:
    found = Link()
    monkeypatch.setattr(control, "ask", found)
    return found


def prepared(root: Path) -> Folder:
    folder = with_keys(root)
    control.write_settings(folder, plain=False)
    return folder


def test_every_public_key_is_registered_once(link: Link, tmp_path: Path) -> None:
    folder, said = prepared(tmp_path), list[str]()
    for _ in range(2):
        control.synchronise(folder, said.append)
    assert control.registered(folder) == {"client-0": "100", "client-1": "101"}
    assert sum(words[1] == "register" for words in link.asked) == 2 and not said


def test_a_key_that_is_taken_away_is_revoked_for_good(link: Link, tmp_path: Path) -> None:
    folder, said = prepared(tmp_path), list[str]()
    control.synchronise(folder, said.append)
    key = (folder.keys / "client-0.pub").read_text()
    (folder.keys / "client-0.pub").unlink()
    control.synchronise(folder, said.append)
    assert control.registered(folder) == {"client-1": "101"} and link.nodes["100"][1] == "unregistered"
    assert said == ["client-0: its key is revoked (keys/client-0.pub is gone)"]
    (folder.keys / "client-0.pub").write_text(key)
    control.synchronise(folder, said.append)
    assert "client-0" not in control.registered(folder) and "make a new key" in said[-1]


def test_keys_are_registered_again_with_a_superlink_that_has_lost_its_database(link: Link, tmp_path: Path) -> None:
    folder = prepared(tmp_path)
    control.synchronise(folder, print)
    link.nodes.clear()
    control.synchronise(folder, print)
    assert len(link.nodes) == 2


def test_a_damaged_registry_is_named(link: Link, tmp_path: Path) -> None:
    folder = prepared(tmp_path)
    (folder.home / "nodes.json").write_text("[")
    with pytest.raises(UserError, match=r"nodes\.json: damaged"):
        control.synchronise(folder, print)


def test_other_refusals_of_a_key_are_not_passed_over(
    link: Link, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(folder: Folder, *words: str) -> dict[str, Any]:
        if words[1] == "register":
            raise UserError("flwr supernode: [code: 22] The public key is not valid.")
        return link(folder, *words)

    monkeypatch.setattr(control, "ask", refuse)
    with pytest.raises(UserError, match="not valid"):
        control.synchronise(prepared(tmp_path), print)


def test_the_newest_run_is_the_first(link: Link, tmp_path: Path) -> None:
    link.run("1", "finished:completed", "2026-01-01 10:00:00Z", sent=3)
    link.run("2", "running", "2026-01-02 10:00:00Z")
    first, second = control.runs(made(tmp_path))
    assert (first.id, first.finished, second.id, second.completed) == ("2", False, "1", True)
    assert (second.inbound, second.outbound, second.seconds) == (3, 6, 1.5)


def test_a_run_is_started_for_the_folder(link: Link, tmp_path: Path) -> None:
    folder = made(tmp_path)
    link.run("1", "finished:failed")
    assert control.submit(folder) == "7"
    assert link.asked[-1] == ("run", str(folder.app), "link", "-c", f'folder="{folder.root}"')


@pytest.mark.parametrize("status", ["pending", "starting", "running"])
def test_a_run_is_refused_while_another_is_under_way(link: Link, tmp_path: Path, status: str) -> None:
    link.run("1", "finished:completed", "2026-01-01")
    link.run("2", status, "2026-01-02")
    with pytest.raises(UserError, match=r"run 2 is under way; .* FLWR_HOME=.* flwr stop 2 link"):
        control.submit(made(tmp_path))
    assert all(words[0] != "run" for words in link.asked)


def test_runs_of_a_superlink_before_are_marked_as_stopped(link: Link, tmp_path: Path) -> None:
    link.run("1", "finished:completed")
    link.run("2", "running")
    assert control.stop_runs(made(tmp_path)) == ["2"]
    assert [r["status"] for r in link.runs] == ["finished:completed", "finished:stopped"]


def test_a_wait_lasts_until_the_end_also_while_the_server_is_away(
    link: Link, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = iter(["running", None, None, "finished:failed"])

    def is_up(folder: Folder) -> bool:
        state = next(states)
        link.runs.clear()
        link.run("1", state or "")
        return state is not None

    monkeypatch.setattr(control, "is_up", is_up)
    monkeypatch.setattr(control, "WAIT_SECONDS", 0)
    ended = control.await_end(made(tmp_path), "1")
    assert (ended.status, ended.details, ended.completed) == ("finished:failed", "why", False)


def test_a_wait_goes_on_where_the_server_goes_away_while_it_is_asked(
    link: Link, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = control.run
    asked: Any = iter([True, True, False])

    def run(folder: Folder, number: str) -> control.Run:
        if next(asked):
            raise UserError("its server is not running")
        return real(folder, number)

    link.run("1", "finished:failed")
    monkeypatch.setattr(control, "is_up", lambda folder: True)
    monkeypatch.setattr(control, "run", run)
    monkeypatch.setattr(control, "WAIT_SECONDS", 0)
    opened = made(tmp_path)
    assert control.await_end(opened, "1").status == "finished:failed"
    asked = itertools.repeat(True)
    monkeypatch.setattr(control, "AWAY_SECONDS", 0)
    with pytest.raises(UserError, match="run 1 had not ended: its server is not running"):
        control.await_end(opened, "1")


def test_a_wait_for_a_server_that_stays_away_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "WAIT_SECONDS", 0)
    monkeypatch.setattr(control, "AWAY_SECONDS", 0)
    with pytest.raises(UserError, match="its server has stopped; run 1 had not ended"):
        control.await_end(made(tmp_path), "1")


@pytest.mark.parametrize("plain", [False, True])
def test_flower_s_settings_lead_to_the_loopback_interface(tmp_path: Path, plain: bool) -> None:
    folder = made(tmp_path, link=9555)
    control.write_settings(folder, plain)
    assert folder.home.stat().st_mode & 0o777 == 0o700  # what clients send is kept there
    told = tomllib.loads((folder.home / "config.toml").read_text())["superlink"]
    ending = {"insecure": True} if plain else {"root-certificates": str(folder.keys / "ca.crt")}
    assert told == {"default": "link", "link": {"address": "127.0.0.1:9555", **ending}}


def test_a_server_that_does_not_run_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="its server is not running; personafl deploy server starts it"):
        control.runs(made(tmp_path))


def test_nodes_have_keys_unless_the_superlink_was_started_plain(tmp_path: Path) -> None:
    """Where it cannot be told, they have: a name is rather refused than given to whoever comes first."""
    folder = with_keys(tmp_path)
    assert not control.has_keys(folder.root)  # no SuperLink has been started here: a simulation, or a test
    for plain in (False, True):
        control.write_settings(folder, plain)
        assert control.has_keys(folder.root) is not plain
    (folder.home / "config.toml").write_text("[superlink")
    assert control.has_keys(folder.root)
