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

import numpy as np
import pytest

pytest.importorskip("flwr")

from personafl.deployment.flower import proxy
from personafl.deployment.stored_split import SPLIT, StoredSplit
from tests.deployment.flower.faults import again, played, same_as_simulated, sound, started
from tests.deployment.flower.loopback import recipe_text, write_clients
from tests.deployment.flower.network import Federation, Network, obstacle

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
        code = run.wait(300)  # a run that was ended with its server is not completed
        assert code == 1, run.stdout.read() if run.stdout else ""

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
        grow(loop, 1)
        time.sleep(25)
        before = played(loop)  # what was under way had its 20 seconds
        time.sleep(75)
        assert played(loop) == before and run.poll() is None
        said = waits(loop)
        assert said.startswith(f"Stage {before} (round {before}, train) needs "), said
        network.restore("server")
        assert run.wait(600) == 0, run.stdout.read() if run.stdout else ""
        every_round_had_updates(loop, 5, at_least=2)


def grow(loop: Federation, client: int) -> None:
    """Put further rows before and behind those of a client, in place of its file in one step."""
    file = loop.data / f"client-{client}" / "mine.npz"
    with np.load(file) as held:
        x, y = held["x"], held["y"]
    more = x[:40] + 0.25
    draft = file.with_name("draft")
    with draft.open("wb") as out:
        np.savez(out, x=np.concatenate([more[:20], x, more[20:]]), y=np.concatenate([y[:20], y, y[20:40]]))
    draft.replace(file)


def stored_split(loop: Federation, client: int) -> StoredSplit:
    (file,) = loop.home(client).glob(f"state/*/*/{SPLIT}")
    found = StoredSplit.read(file)
    assert found is not None
    return found


def test_data_that_grow_between_rounds_keep_their_parts(network: Network, tmp_path: Path) -> None:
    """Client 1 has 90 rows, of which a quarter are for testing, and gets 40 more."""
    with federation(network, tmp_path, rounds=4) as loop:
        loop.server()
        for i in range(CLIENTS):
            loop.client(i)
        run = started(loop)
        loop.until(lambda: played(loop) >= 1, 300, "a round")
        before = stored_split(loop, 1)
        grow(loop, 1)
        assert run.wait(600) == 0, run.stdout.read() if run.stdout else ""
        after = stored_split(loop, 1)
        for part, rows in before.parts.items():
            assert set(rows) <= set(after.parts[part])
        trained, tested = set(after.parts["train"]), set(after.parts["test"])
        assert not trained & tested and len(trained | tested) == 130
        collected = json.loads(loop.command("collect", str(loop.folder), "--json").stdout)
        (grown,) = (c for c in collected["clients"] if c["client"] == "client-1")
        assert (grown["train"], grown["test"]) == (len(trained), len(tested))
        every_round_had_updates(loop, 4, at_least=2)
        sound(loop)


MODULE = """
from torch import nn

class Net(nn.Sequential):
    def __init__(self, shape, num_classes):
        super().__init__(nn.Flatten(), nn.Linear(64, 32), nn.{activation}(), nn.Linear(32, num_classes))
"""


def test_a_module_that_is_missing_or_other_at_a_client_is_named_before_any_round(
    network: Network, tmp_path: Path
) -> None:
    """It is missing at every client, then there, and at one of them with another activation."""
    write_clients(tmp_path / "data", CLIENTS)
    (tmp_path / "fed").mkdir()
    (tmp_path / "fed" / "ward_model.py").write_text(MODULE.format(activation="ReLU"))
    text = recipe_text("ditto", tmp_path / "data", model="ward_model:Net", num_rounds=2, precision="float64")
    with Federation(network, tmp_path / "fed", text, tmp_path / "data", CLIENTS, quorum=3) as loop:
        modules = [loop.home(i) / "modules" / "ward_model.py" for i in range(CLIENTS)]
        for module in modules:
            assert module.is_file()
            module.unlink()
        loop.server()
        for i in range(CLIENTS):
            loop.client(i)
        run = started(loop)
        words = "'ward_model:Net': cannot be imported: No module named 'ward_model'"
        loop.until(lambda: sum(words in why for why in unused(loop)) == CLIENTS, 120, "three refusals")
        said = "The first round waits for 3 clients; 0 can be used so far."
        assert waits(loop).startswith(said) and played(loop) == 0 and run.poll() is None

        for module, activation in zip(modules, ("ReLU", "ReLU", "Tanh"), strict=True):
            module.write_text(MODULE.format(activation=activation))
        words = "it runs model code that gives other outputs than the server's for the same weights"
        loop.until(lambda: any(words in why for why in unused(loop)), 180, "the refusal of other code")
        loop.until(lambda: "Stage 0 (round 0, train) needs" in waits(loop), 60, "the server that waits")
        assert "client-2" in waits(loop) and played(loop) == 0 and run.poll() is None

        modules[2].write_text(MODULE.format(activation="ReLU"))
        assert run.wait(600) == 0, run.stdout.read() if run.stdout else ""
        assert unused(loop) == []
        every_round_had_updates(loop, 2, at_least=3)
        sound(loop)


def unused(loop: Federation) -> list[str]:
    """Why nodes are not used, by the word of the server."""
    return list(status(loop)["server_app"].get("unused", {}).values())


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
        ended = status(loop)
        assert ended["run"]["status"] == "finished:failed" and ended["server_app"]["rounds_without_update"] == 0
        assert "deployment.quorum_timeout" in ended["run"]["details"] and waits(loop) == ""
        done = f"{ended['server_app']['stage']} of 3 stages are done; no run is under way"
        assert done in loop.command("collect", str(loop.folder), check=False).stderr
        network.restore("server")
        again(loop)
        every_round_had_updates(loop, 3, at_least=2)
