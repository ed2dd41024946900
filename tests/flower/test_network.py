"""Deployments of real processes on hosts of a network, over TLS through nginx, to which happens what happens there.

In none of them is a stage that expects updates counted as played without them, and what `status` and `collect` say is
what came about.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from personafl.flower import proxy
from tests.flower.faults import again, played, same_as_simulated, sound, started
from tests.flower.loopback import recipe_text, write_clients
from tests.flower.network import Federation, Network, obstacle

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
CLIENTS = 3


@pytest.fixture
def network() -> Iterator[Network]:
    if why := obstacle() or ("" if proxy.find() else "nginx is not installed (apt install nginx-light)"):
        pytest.skip(why)
    with Network(CLIENTS) as found:
        yield found


def federation(network: Network, box: Path, rounds: int, **settings: Any) -> Federation:
    """Three clients of Ditto with data of their own, all sampled in every round; half of three is two."""
    write_clients(box / "data", CLIENTS)
    text = recipe_text("ditto", box / "data", num_rounds=rounds, precision="float64")
    return Federation(network, box / "fed", text, box / "data", CLIENTS, **settings)


def status(loop: Federation) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(loop.command("status", str(loop.folder), "--json").stdout)
    return found


def waits(loop: Federation) -> str:
    """What the server says it waits for."""
    return str(status(loop)["server_app"].get("waits", ""))


def every_round_had_updates(loop: Federation, rounds: int, at_least: int) -> None:
    """Every round is there once, with enough updates, and status and collect say so."""
    rows = loop.rows()
    assert [row["round"] for row in rows] == list(range(rounds))
    for row in rows:
        left = row["clients"] - len(row.get("failed", [])) - len(row.get("quarantined", []))
        assert left >= at_least and "kept_model" not in row, row
    assert status(loop)["server_app"]["rounds_without_update"] == 0
    collected = json.loads(loop.command("collect", str(loop.folder), "--json").stdout)
    assert collected["summary"]["rounds_without_update"] == {"count": 0, "last": 0}
    own = [float(client["own"]) for client in collected["clients"]]
    assert collected["summary"]["final"]["clients"] == CLIENTS
    assert collected["summary"]["final"]["personal"]["mean"] == pytest.approx(sum(own) / CLIENTS)


def test_a_restart_of_everybody_in_mid_run_uses_up_no_round(network: Network, tmp_path: Path) -> None:
    with federation(network, tmp_path, rounds=4) as loop:
        loop.server()
        for i in range(CLIENTS):
            loop.client(i)
        run = started(loop)
        loop.until(lambda: played(loop) >= 2, 300, "two rounds")
        for name in ("server", *(f"client-{i}" for i in range(CLIENTS))):
            loop.kill(name, signal.SIGTERM)
        before = played(loop)
        loop.server()
        assert run.wait(300) == 1, "a run that was ended with its server is not completed"

        run = started(loop)
        wanted = "3 clients can be used; 0 can now. Missing: client-0, client-1, client-2."
        loop.until(lambda: wanted in waits(loop), 120, "the server that waits")
        time.sleep(10)  # in which 51 rounds were once played
        assert played(loop) == before and run.poll() is None
        for i in range(CLIENTS):
            loop.client(i)
        assert run.wait(600) == 0, run.stdout.read() if run.stdout else ""
        every_round_had_updates(loop, 4, at_least=3)
        sound(loop)
        same_as_simulated(loop)


def test_a_server_link_that_is_cut_for_longer_than_every_timeout_uses_up_no_round(
    network: Network, tmp_path: Path
) -> None:
    """100 seconds: an answer is awaited for 20, and a SuperLink counts on a node it does not hear for about 60."""
    with federation(network, tmp_path, rounds=5, round_timeout=20.0) as loop:
        loop.server()
        for i in range(CLIENTS):
            loop.client(i)
        run = started(loop)
        loop.until(lambda: played(loop) >= 1, 300, "a round")
        network.cut("server")
        time.sleep(25)
        before = played(loop)  # what was under way had its 20 seconds
        time.sleep(75)
        assert played(loop) == before and run.poll() is None
        said = waits(loop)
        assert said.startswith(f"Stage {before} (round {before}, train) needs "), said
        network.restore("server")
        assert run.wait(600) == 0, run.stdout.read() if run.stdout else ""
        every_round_had_updates(loop, 5, at_least=2)


def test_a_wait_that_is_too_long_ends_the_run_and_the_next_one_resumes_it(network: Network, tmp_path: Path) -> None:
    with federation(network, tmp_path, rounds=3, round_timeout=10.0, quorum_timeout=20.0) as loop:
        loop.server()
        for i in range(CLIENTS):
            loop.client(i)
        run = started(loop)
        loop.until(lambda: played(loop) >= 1, 300, "a round")
        network.cut("server")
        assert run.wait(300) == 1
        said = run.stdout.read() if run.stdout else ""
        assert "The server has waited for 20 seconds (deployment.quorum_timeout)" in " ".join(said.split()), said
        assert not (loop.folder / "results" / "summary.json").exists()
        network.restore("server")
        again(loop)
        every_round_had_updates(loop, 3, at_least=2)
