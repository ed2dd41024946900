"""The server of a deployment: the simulator's numbers under every setting, and whatever its clients do."""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tools.fuzz import sealed
from torch import Tensor, nn

from personafl.core import tree, wire
from personafl.core.errors import UserError
from personafl.core.types import Params
from personafl.deployment import coordinator as module
from personafl.deployment import federation_spec as world_module
from personafl.deployment import membership
from personafl.deployment import node as node_module
from personafl.deployment.coordinator import Coordinator
from personafl.deployment.federation_spec import FORMAT, VERSION
from personafl.deployment.messages import Failure, Reply, Request
from personafl.deployment.node import Node
from personafl.deployment.settings import Deployment
from personafl.storage.lock import locked
from tests.deployment import worlds
from tests.deployment.worlds import InProcess, Spoil


class Normed(nn.Module):
    """A network with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.norm(self.first(x.flatten(1))).relu())
        return out


class Recurrent(nn.Module):
    """A row of pixels a step."""

    def __init__(self) -> None:
        super().__init__()
        self.cells, self.last = nn.LSTM(8, 6, batch_first=True), nn.Linear(6, 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.cells(x.flatten(0, 1))[0][:, -1])
        return out


def priced() -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Real targets of four clients."""
    draw = np.random.default_rng(0)
    x = draw.normal(3.0, 2.0, (96, 5)).astype(np.float32)
    return x, (x @ np.arange(5) + draw.normal(size=96)).astype(np.float32), np.repeat(np.arange(4), 24)


def in_dollars() -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    x, y, clients = priced()
    return x, 200_000 + 10_000 * y, clients


HERE = "tests.deployment.test_coordinator"
SMALL = "tests.deployment.test_server_files:Small"
PRICES = {"dataset": f"{HERE}:priced", "partition": "natural", "alpha": 0.5, "num_clients": 4}
WORLDS: dict[str, tuple[str | dict[str, Any], dict[str, dict[str, Any]]]] = {
    "everybody in every round, each evaluated": (
        "fedper",
        {"training": {"join_ratio": 1.0, "num_rounds": 2}, "evaluation": {"eval_every": 1}},
    ),
    "validation and training loss": (
        "ditto",
        {"data": {"validation_share": 0.2}, "evaluation": {"train_loss": True}, "training": {"num_rounds": 2}},
    ),
    "after local training": ("fedrep", {"evaluation": {"when": "after_local", "eval_every": 1, "train_loss": True}}),
    "after local training, by another model": ("fedphp", {"evaluation": {"when": "after_local", "eval_every": 1}}),
    "after local training, with rounds of nobody": (
        "dm-pfl",
        {"evaluation": {"when": "after_local", "eval_every": 1}, "training": {"num_rounds": 5}},
    ),
    "the cohort is evaluated": ("fedavg-ft", {"evaluation": {"clients": "selected", "eval_every": 1}}),
    "two clients are evaluated": ("fedpac", {"evaluation": {"clients": 2, "eval_every": 1}}),
    "a target is reached": (
        "fedavg-ft",
        {"training": {"target": 0.02, "num_rounds": 6}, "evaluation": {"eval_every": 2}},
    ),
    "no patience": (
        "fedrep",
        {
            "data": {"validation_share": 0.2},
            "training": {"patience": 1, "num_rounds": 8, "lr": 1e-9},
            "evaluation": {"eval_every": 1},
        },
    ),
    "standardised": ("fedphp", {"data": {"normalize": "standardize"}}),
    "batch norm, averaged": ("fedavg", {"model": {"name": f"{HERE}:Normed", "buffers": "average"}}),
    "batch norm, at the client": ("fedrep", {"model": {"name": f"{HERE}:Normed", "buffers": "local"}}),
    "an LSTM": ("dm-pfl", {"model": {"name": f"{HERE}:Recurrent"}}),
    "prices": ("fedavg", {"data": PRICES, "training": {"lr": 0.01}}),
    "prices in dollars": (
        "ditto",
        {"data": {**PRICES, "dataset": f"{HERE}:in_dollars"}, "evaluation": {"metric": "mae", "train_loss": True}},
    ),
    "prices, a mask": ("dm-pfl", {"data": PRICES, "training": {"lr": 0.01}}),
    "decaying rate": ("scaffold", {"training": {"lr_decay": 0.9, "momentum": 0.0}}),
}


@pytest.mark.parametrize("which", WORLDS)
@pytest.mark.filterwarnings("ignore:only 0.99:UserWarning")
def test_a_setting_gives_the_simulator_s_numbers(which: str, tmp_path: Path) -> None:
    method, changes = WORLDS[which]
    text = worlds.recipe(method, **changes)
    server, _ = worlds.deployed(text, tmp_path)
    server.run()
    sim = worlds.simulated(text)
    worlds.same_run(server, tmp_path, sim)
    assert server.state.rounds == sim.rounds
    stops = {"a target is reached", "no patience"}
    assert (sim.rounds < sim.training.num_rounds) == (which in stops)


# Clients that are not there, or not heard


def test_a_deployment_stops_where_everybody_has_diverged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """After as many rounds as a simulation; a client that diverges sends no upload, which a simulation counts."""
    training = {"lr": 1e30, "join_ratio": 1.0, "num_rounds": 8}
    text = worlds.recipe("fedavg", training=training, evaluation={"eval_every": 8})
    server, _ = worlds.deployed(text, tmp_path)
    with pytest.raises(UserError, match=r"stopped after round \d, since every client diverged: lower training\.lr"):
        server.run()
    sim = worlds.simulated(text)
    worlds.same_state(server, tmp_path, sim)
    assert server.state.rounds == sim.rounds < 8
    summary = json.loads((server.results.folder / "summary.json").read_text())
    assert summary["stopped"] == {"by": "diverged", "on": "training", "rounds": sim.rounds}
    assert summary["without_model"] == []
    row, wanted = server.results.rows()[-1], sim.rows[-1]
    assert row["stopped"] == wanted["stopped"] == "diverged"
    assert worlds.alike(row["personal"], wanted["personal"])
    assert "since every client diverged: lower training.lr" in caplog.text


def position(request: Request) -> int:
    """The stage a request is about; -1 where it plays none."""
    plays = request.told.get("plays") or [{"position": -1}]
    return int(plays[-1]["position"])


def first_of(text: str, place: int) -> int:
    """The first client of a stage."""
    sim = worlds.simulation(text)
    return int(sim.cohort(sim.schedule[place])[0])


def unheard(client: int, place: int, *, works: bool) -> Spoil:
    """The reply of a client to a stage is lost, before or behind its work."""

    def spoil(node: int, request: Request, answer: Callable[[Request], Reply]) -> Reply | Failure:
        if node != 100 + client or request.kind != "work" or position(request) != place:
            return answer(request)
        if works:
            answer(request)
        return Failure("no answer within 1 s")

    return spoil


@pytest.mark.parametrize(
    ("method", "works"), [("scaffold", True), ("fedrep", True), ("fedpews", True), ("ditto", False)]
)
def test_a_reply_that_is_lost_is_that_of_a_client_that_was_not_there(method: str, works: bool, tmp_path: Path) -> None:
    """What it came to meanwhile is gone back from, and it takes part again."""
    text = worlds.recipe(method, training={"join_ratio": 0.75})
    client = first_of(text, 1)
    server, _ = worlds.deployed(text, tmp_path, spoil=unheard(client, 1, works=works))
    server.run()
    worlds.same_state(server, tmp_path, worlds.simulated_without(text, {1: [client]}))
    row = server.results.rows()[1]
    assert row["failed"] == [{"client": client, "why": "no answer within 1 s"}]
    assert row["dropped"] == 1 and row["clients"] == 3
    assert server.roster.members[client].acknowledged >= 0


def test_who_is_offline_is_skipped_and_comes_back_with_its_state(tmp_path: Path) -> None:
    text = worlds.recipe("scaffold", training={"join_ratio": 1.0})
    server, transport = worlds.deployed(text, tmp_path)
    worlds.before_stages(server, {1: lambda: transport.online.discard(102), 3: lambda: transport.online.add(102)})
    server.run()
    worlds.same_state(server, tmp_path, worlds.simulated_without(text, {1: [2], 2: [2]}))
    assert [r.get("dropped") for r in server.results.rows()] == [None, 1, 1, None]
    assert server.roster.members[2].lost == 0


def test_who_is_offline_is_waited_for_where_that_is_set(tmp_path: Path) -> None:
    text = worlds.recipe("fedavg", training={"join_ratio": 1.0, "num_rounds": 2})
    server, transport = worlds.deployed(text, tmp_path, offline="wait", wait=60.0)
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            transport.online.add(101)

    server.sleep = sleep
    worlds.before_stages(server, {1: lambda: transport.online.discard(101)})
    server.run()
    assert slept == [1.0] * 3
    worlds.same_run(server, tmp_path, worlds.simulated(text))


def test_a_wait_has_an_end(tmp_path: Path) -> None:
    text = worlds.recipe("fedavg", training={"join_ratio": 1.0, "num_rounds": 2})
    server, transport = worlds.deployed(text, tmp_path, offline="wait", wait=0.01)
    worlds.before_stages(server, {1: lambda: transport.online.discard(101)})
    server.run()
    worlds.same_state(server, tmp_path, worlds.simulated_without(text, {1: [1]}))


# Stages that wait for enough updates


def test_a_stage_without_enough_clients_waits_and_is_played_with_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Ten minutes in which everybody is away take no round; the wait is said once, with names."""
    caplog.set_level("INFO", "personafl")
    text = worlds.recipe("scaffold", training={"join_ratio": 1.0})
    server, transport = worlds.deployed(text, tmp_path)
    everybody = set(transport.online)

    def leave() -> None:
        transport.online.clear()
        worlds.later(server, 600, lambda: transport.online.update(everybody))

    worlds.before_stages(server, {1: leave})
    server.run()
    worlds.same_run(server, tmp_path, worlds.simulated(text))
    wait = (
        "Stage 1 (round 1, train) needs 2 clients and 0 of its 4 can be used now. Missing: c0, c1, c2, c3. "
        "The server waits."
    )
    assert caplog.messages.count(wait) == 1
    assert caplog.messages.count("enough clients are there: the run goes on") == 1
    assert server.state.without_update == 0


@pytest.mark.parametrize(
    ("quorum", "here", "waits"), [(0, 1, True), (0, 2, False), (3, 2, True), (3, 3, False), (1, 1, False)]
)
def test_a_quorum_of_zero_is_half_of_the_sampled_clients(quorum: int, here: int, waits: bool, tmp_path: Path) -> None:
    text = worlds.recipe("fedavg", training={"join_ratio": 1.0, "num_rounds": 2}, model={"name": SMALL})
    server, transport = worlds.deployed(text, tmp_path, quorum=quorum)
    seen: list[str] = []

    def leave() -> None:
        transport.online = set(range(100, 100 + here))
        worlds.later(server, 60, lambda: (seen.append(server.waits), transport.online.update(range(100, 104))))

    worlds.before_stages(server, {1: leave})
    server.run()
    assert server.results.rows()[1]["clients"] == (4 if waits else here)
    assert any(f"{here} of its 4 can be used now" in said for said in seen) == waits


def test_the_wait_for_a_quorum_ends_the_run_so_that_it_can_be_resumed(tmp_path: Path) -> None:
    """The next run waits for `start` clients again, and comes to what an undisturbed one would have come to."""
    text = worlds.recipe("dm-pfl", training={"join_ratio": 1.0})
    server, transport = worlds.deployed(text, tmp_path, quorum_timeout=300.0)
    worlds.before_stages(server, {2: transport.online.clear})
    with pytest.raises(UserError) as e:
        server.run()
    said = str(e.value)
    assert "needs 2 clients and 0 of its 4 can be used now. Missing: c0, c1, c2, c3." in said
    assert "The server has waited for 300 seconds (deployment.quorum_timeout)" in said
    assert "personafl deploy start resumes the run" in said
    assert server.state.played == 2 and not server.state.finished

    again, transport = worlds.deployed(text, tmp_path, quorum_timeout=300.0)
    transport.online = {100, 101, 102}
    worlds.later(again, 500, lambda: transport.online.add(103))
    again.run()
    worlds.same_run(again, tmp_path, worlds.simulated(text))


def test_a_resumed_run_ends_where_too_few_clients_come(tmp_path: Path) -> None:
    text = worlds.recipe("fedavg", training={"join_ratio": 1.0}, model={"name": SMALL})
    server, transport = worlds.deployed(text, tmp_path, quorum_timeout=60.0)
    worlds.before_stages(server, {1: transport.online.clear})
    with pytest.raises(UserError):
        server.run()
    again, transport = worlds.deployed(text, tmp_path, start_timeout=60.0, start=3)
    transport.online = {100, 102}
    words = r"2 of 3 clients came within 60 seconds \(deployment\.start and .*\)\. Missing: c1, c3\."
    with pytest.raises(UserError, match=words):
        again.run()
    assert again.state.played == 1


def test_clients_that_all_fail_alike_pause_the_run_with_their_message(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A module that is missing everywhere is no round played, and the run goes on once it is there."""
    text = worlds.recipe("fedavg", training={"join_ratio": 1.0}, model={"name": SMALL})
    missing = [False]

    def spoil(node: int, request: Request, answer: Callable[[Request], Reply]) -> Reply:
        return Reply({"error": "No module named 'wards'"}) if missing[0] else answer(request)

    server, _ = worlds.deployed(text, tmp_path, spoil=spoil)

    def remove() -> None:
        missing[0] = True
        worlds.later(server, 200, lambda: missing.__setitem__(0, False))

    worlds.before_stages(server, {1: remove})
    server.run()
    assert "All 4 clients fail alike: No module named 'wards'. The server waits." in caplog.text
    assert [row["clients"] for row in server.results.rows()] == [4] * 4
    assert "kept_model" not in server.results.rows()[1] and server.state.without_update == 0
    worlds.same_state(server, tmp_path, worlds.simulated(text))


def test_before_the_first_round_a_failure_of_all_clients_is_shown(tmp_path: Path) -> None:
    text = worlds.recipe("fedavg", training={"num_rounds": 1}, model={"name": SMALL})
    missing = [True]

    def spoil(node: int, request: Request, answer: Callable[[Request], Reply]) -> Reply:
        bad = missing[0] and request.kind == "describe"
        return Reply({"error": "No module named 'wards'"}) if bad else answer(request)

    server, _ = worlds.deployed(text, tmp_path, spoil=spoil)
    seen: list[str] = []

    def look() -> None:
        seen.append(json.loads((server.folder / "server" / "roster.json").read_text())["waits"])
        missing[0] = False

    worlds.later(server, 20.0, look)
    server.run()
    why = "All 4 that came cannot be used: No module named 'wards'."
    assert seen == [f"The first round waits for 4 clients; 0 can be used so far. {why}"]


@pytest.mark.parametrize("busy", [False, True])
def test_clients_that_are_there_and_never_play_end_the_run_at_the_limit(busy: bool, tmp_path: Path) -> None:
    """What they are asked in vain does not count: neither bytes that are not sent, nor the stage that is not played."""
    text = worlds.recipe("fedavg", training={"join_ratio": 1.0, "num_rounds": 2}, model={"name": SMALL})

    def spoil(node: int, request: Request, answer: Callable[[Request], Reply]) -> Reply | Failure:
        if position(request) != 1:
            return answer(request)
        if busy:
            return Failure("still at an earlier request", busy=True, sent=False)
        return Reply({"error": "No space left on device"})

    server, _ = worlds.deployed(text, tmp_path, spoil=spoil, quorum_timeout=300.0)
    why = "still at an earlier request" if busy else "No space left on device"
    with pytest.raises(UserError, match=f"All 4 clients fail alike: {why}. The server has waited for 300 seconds"):
        server.run()
    slept = getattr(server.sleep, "__self__").now  # noqa: B009
    assert 300 <= slept < 340
    again, _ = worlds.deployed(text, tmp_path)
    again.run()
    worlds.same_run(again, tmp_path, worlds.simulated(text))


def test_a_new_update_gives_a_stage_its_time_anew(tmp_path: Path) -> None:
    """Four clients come one after the other, each 200 s after the last: 600 s in all, with a limit of 300."""
    text = worlds.recipe("fedavg", training={"join_ratio": 1.0, "num_rounds": 2}, model={"name": SMALL})
    ready = {100}

    def spoil(node: int, request: Request, answer: Callable[[Request], Reply]) -> Reply | Failure:
        if position(request) == 1 and node not in ready:
            return Reply({"error": "its sensor is off"})
        return answer(request)

    server, _ = worlds.deployed(text, tmp_path, spoil=spoil, quorum=4, quorum_timeout=300.0)

    def come() -> None:
        for i in (1, 2, 3):
            worlds.later(server, 200 * i, lambda i=i: ready.add(100 + i))  # type: ignore[misc]

    worlds.before_stages(server, {1: come})
    server.run()
    worlds.same_state(server, tmp_path, worlds.simulated(text))


def test_a_stage_without_a_quorum_is_left_out_where_the_operator_wants_that(tmp_path: Path) -> None:
    """Of a cohort of one whose client is gone for good; the round counts as one without an update."""
    text = worlds.recipe("scaffold", training={"join_ratio": 0.25, "num_rounds": 4})
    sim = worlds.simulation(text)
    cohorts = [int(sim.cohort(stage)[0]) for stage in sim.schedule]
    gone = cohorts[1]
    absent = {at: [gone] for at in range(1, 4) if cohorts[at] == gone}
    assert cohorts[3] != gone
    server, transport = worlds.deployed(text, tmp_path, quorum_timeout=60.0, without_quorum="skip")
    worlds.before_stages(server, {1: lambda: transport.online.discard(100 + gone)})
    server.run()
    row = server.results.rows()[1]
    assert row["kept_model"] == "it was left out, since too few clients played it within deployment.quorum_timeout"
    summary = json.loads((server.results.folder / "summary.json").read_text())
    assert summary["rounds_without_update"] == {"count": len(absent), "last": 0}
    worlds.same_state(server, tmp_path, worlds.simulated_without(text, absent))


def test_a_round_that_is_left_out_tells_nothing_of_the_one_before(tmp_path: Path) -> None:
    text = worlds.recipe("fedrep", evaluation={"when": "after_local", "eval_every": 1})
    server, transport = worlds.deployed(text, tmp_path, quorum_timeout=60.0, without_quorum="skip")
    everybody = set(transport.online)
    worlds.before_stages(server, {2: transport.online.clear, 3: lambda: transport.online.update(everybody)})
    server.run()
    rows = server.results.rows()
    assert "before" in rows[1] and "before" not in rows[2] and "before" in rows[3]


def test_training_without_uploads_that_is_left_out_counts_as_a_round_without_an_update(tmp_path: Path) -> None:
    """Nobody is there for the last two of three rounds; the next run would begin at the end."""
    text = worlds.recipe("local", training={"join_ratio": 1.0, "num_rounds": 3})
    server, transport = worlds.deployed(text, tmp_path, quorum_timeout=60.0, without_quorum="skip")
    everybody = set(transport.online)
    worlds.before_stages(server, {1: transport.online.clear, -1: lambda: transport.online.update(everybody)})
    with pytest.raises(UserError, match=r"^The last 2 rounds had no update .* too few clients played it within"):
        server.run()
    rows = server.results.rows()
    assert ["kept_model" in row for row in rows] == [False, True, True]
    summary = json.loads((server.results.folder / "summary.json").read_text())
    assert summary["rounds_without_update"] == {"count": 2, "last": 2}


def test_a_stage_whose_quorum_diverged_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    """Of four clients one is finite, and half of them are needed; the row says how many diverged."""
    text = worlds.recipe("fedavg", training={"join_ratio": 1.0, "num_rounds": 3}, model={"name": SMALL})

    def spoil(node: int, request: Request, answer: Callable[[Request], Reply]) -> Reply:
        if position(request) == 1 and node != 100:
            return Reply({"diverged": "its loss is not finite"})
        return answer(request)

    server, _ = worlds.deployed(text, tmp_path, spoil=spoil)
    models: list[Params] = []
    keep = lambda: models.append({n: t.clone() for n, t in server.server.items()})  # noqa: E731
    worlds.before_stages(server, {1: keep, 2: keep})
    server.run()
    assert all(torch.equal(models[0][n], models[1][n]) for n in models[0])
    row = server.results.rows()[1]
    assert row["clients"] == 4 and row["diverged"] == 3
    assert row["kept_model"] == "the training of 3 clients diverged, and 2 updates were needed"
    assert server.state.without_update == 1 and server.state.last_without_update == 0


def diverging(nodes: set[int]) -> Spoil:
    """Training that diverges at these nodes for as long as they are in the set."""

    def spoil(node: int, request: Request, answer: Callable[[Request], Reply]) -> Reply:
        if node in nodes and position(request) >= 0:
            return Reply({"diverged": "its loss is not finite"})
        return answer(request)

    return spoil


def test_a_quorum_that_diverges_again_and_again_ends_the_run_before_the_third_round(tmp_path: Path) -> None:
    """All four clients are needed and one always diverges; the run continues with a quorum of three."""
    text = worlds.recipe("fedavg", training={"join_ratio": 1.0, "num_rounds": 4}, model={"name": SMALL})
    server, transport = worlds.deployed(text, tmp_path, spoil=diverging({101}), quorum=4)
    words = (
        r"^Stage 2 \(round 2, train\) would be round 3 in a row without an update: the training of 1 client diverged, "
        r"and 4 updates were needed\. The training of c1 diverged; lower training\.lr.* start resumes the run"
    )
    with pytest.raises(UserError, match=words):
        server.run()
    again = worlds.coordinator(server.folder, server.settings, text, transport)
    with pytest.raises(UserError, match=r"^Stage 2 .* round 3 in a row"):
        again.run()
    assert again.state.played == 2 and again.state.without_update == 2
    assert dataclasses.asdict(again.state.totals) == dataclasses.asdict(server.state.totals)
    fewer = dataclasses.replace(server.settings, quorum=3)
    last = worlds.coordinator(server.folder, fewer, text, transport)
    last.run()
    assert ["kept_model" in row for row in last.results.rows()] == [True, True, False, False]
    summary = json.loads((server.results.folder / "summary.json").read_text())
    assert summary["rounds_without_update"] == {"count": 2, "last": 0} and "not_completed" not in summary


def test_a_quorum_that_diverges_is_left_out_where_the_operator_wants_that(tmp_path: Path) -> None:
    text = worlds.recipe("fedavg", training={"join_ratio": 1.0, "num_rounds": 4}, model={"name": SMALL})
    server, _ = worlds.deployed(text, tmp_path, spoil=diverging({101}), quorum=4, without_quorum="skip")
    with pytest.raises(UserError, match=r"^The last 4 rounds had no update"):
        server.run()


@pytest.mark.parametrize(("stages", "last"), [({1, 2}, 2), ({1}, 0)])
def test_rounds_without_uploads_in_which_everybody_diverges_are_counted(
    stages: set[int], last: int, tmp_path: Path
) -> None:
    """Three rounds of Local, in some of which everybody diverges."""
    text = worlds.recipe("local", training={"join_ratio": 1.0, "num_rounds": 3}, model={"name": SMALL})
    nodes: set[int] = set()
    server, transport = worlds.deployed(text, tmp_path, spoil=diverging(nodes))
    everybody = set(transport.online)
    change = {n: functools.partial(nodes.update, everybody) if n in stages else nodes.clear for n in range(3)}
    worlds.before_stages(server, change)
    if last:
        with pytest.raises(UserError, match=r"^The last 2 rounds had no update .* all its clients diverged"):
            server.run()
    else:
        server.run()
    summary = json.loads((server.results.folder / "summary.json").read_text())
    assert summary["rounds_without_update"] == {"count": len(stages), "last": last}
    assert ("not_completed" in summary) == bool(last)


def test_a_round_without_uploads_does_not_make_up_for_those_without_an_update(tmp_path: Path) -> None:
    """FedSelect ends with a round that stays at the clients; in the one before it everybody diverges."""
    text = worlds.recipe("fedselect", training={"join_ratio": 1.0, "num_rounds": 3}, model={"name": SMALL})
    nodes: set[int] = set()
    server, transport = worlds.deployed(text, tmp_path, spoil=diverging(nodes))
    last = len(worlds.simulation(text).schedule) - 1
    assert not worlds.simulation(text).schedule[last].up
    everybody = set(transport.online)
    worlds.before_stages(server, {last - 1: lambda: nodes.update(everybody), last: nodes.clear})
    with pytest.raises(UserError, match=r"^The last round had no update .* all its clients diverged"):
        server.run()
    assert server.state.without_update == 1


def test_a_node_that_does_not_say_who_it_is_holds_up_the_run_once(tmp_path: Path) -> None:
    """It has two minutes the first time; after that its answer is looked for, and it is used once it comes."""
    text = worlds.recipe("fedavg", training={"join_ratio": 1.0, "num_rounds": 2}, model={"name": SMALL})
    silent = {103}

    def spoil(node: int, request: Request, answer: Callable[[Request], Reply]) -> Reply | Failure:
        if node in silent and request.kind == "hello":
            return Failure("no answer within 120 s", busy=True)
        return answer(request)

    server, transport = worlds.deployed(text, tmp_path, spoil=spoil)
    waits: list[float] = []
    exchange = transport.exchange

    def timed(requests: Mapping[int, Request], timeout: float) -> dict[int, Reply | Failure]:
        if 103 in requests and requests[103].kind == "hello":
            waits.append(timeout)
        return exchange(requests, timeout)

    transport.exchange = timed  # type: ignore[method-assign]
    worlds.later(server, 100.0, silent.clear)
    server.run()
    assert waits == [120.0, 1.0, 1.0, 1.0, 1.0]  # at 0, 30, 60, 90 and 120 seconds
    assert not server.members.silent and server.state.without_update == 0


def test_a_resumed_run_shows_nothing_of_what_the_last_one_waited_for(tmp_path: Path) -> None:
    text = worlds.recipe("fedavg", training={"join_ratio": 1.0, "num_rounds": 2}, model={"name": SMALL})
    server, transport = worlds.deployed(text, tmp_path, quorum_timeout=60.0)
    worlds.before_stages(server, {1: transport.online.clear})
    with pytest.raises(UserError, match="needs 2 clients and 0 of its 4 can be used now"):
        server.run()
    roster = tmp_path / "server-folder" / "server" / "roster.json"
    assert json.loads(roster.read_text())["waits"] == ""
    roster.write_text(json.dumps(json.loads(roster.read_text()) | {"waits": "Stage 1 needs", "unused": {"1": "x"}}))
    shown: list[tuple[str, dict[str, str]]] = []

    def spoil(node: int, request: Request, answer: Callable[[Request], Reply]) -> Reply:
        status = json.loads(roster.read_text())
        shown.append((status["waits"], status["unused"]))
        return answer(request)

    again, _ = worlds.deployed(text, tmp_path, spoil=spoil)
    again.run()
    assert shown and set(map(str, shown)) == {"('', {})"}


def test_a_run_goes_on_with_fewer_clients_as_its_message_says(tmp_path: Path) -> None:
    text = worlds.recipe("fedavg", training={"join_ratio": 1.0, "num_rounds": 2}, model={"name": SMALL})
    server, transport = worlds.deployed(text, tmp_path, quorum_timeout=60.0)
    worlds.before_stages(server, {1: lambda: transport.online.intersection_update({102})})
    with pytest.raises(UserError, match=r"lower deployment\.start and deployment\.quorum first"):
        server.run()
    again, transport = worlds.deployed(text, tmp_path, start=1, quorum=1)
    transport.online.intersection_update({102})
    again.run()
    assert [row["clients"] for row in again.results.rows()] == [4, 1]


def test_training_that_stays_at_the_client_waits_for_one_of_them(tmp_path: Path) -> None:
    text = worlds.recipe("local", training={"join_ratio": 1.0})
    server, transport = worlds.deployed(text, tmp_path)
    everybody = set(transport.online)
    seen: list[str] = []

    def leave() -> None:
        transport.online.clear()
        worlds.later(server, 60, lambda: (seen.append(server.waits), transport.online.update(everybody)))

    worlds.before_stages(server, {1: leave})
    server.run()
    assert seen[0].startswith("Stage 1 (round 1, train) needs 1 client and 0 of its 4 can be used now.")
    worlds.same_run(server, tmp_path, worlds.simulated(text))


def test_a_wait_is_no_longer_shown_once_the_stage_is_played(tmp_path: Path) -> None:
    text = worlds.recipe("fedavg", training={"join_ratio": 1.0, "num_rounds": 2}, model={"name": SMALL})
    shown: list[str] = []

    def spoil(node: int, request: Request, answer: Callable[[Request], Reply]) -> Reply:
        if position(request) == 1:
            shown.append(json.loads((tmp_path / "server-folder" / "server" / "roster.json").read_text())["waits"])
        return answer(request)

    server, transport = worlds.deployed(text, tmp_path, spoil=spoil)
    everybody = set(transport.online)

    def leave() -> None:
        transport.online.clear()
        worlds.later(server, 60, lambda: transport.online.update(everybody))

    worlds.before_stages(server, {1: leave})
    server.run()
    assert shown == [""] * 4


def test_clients_that_cannot_take_the_final_model_are_named_with_their_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The results are there all the same, and the next run gives the others their models."""
    text = worlds.recipe("fedavg", model={"name": SMALL})
    full = [True]

    def spoil(node: int, request: Request, answer: Callable[[Request], Reply]) -> Reply:
        if request.told.get("close") is not None and full[0]:
            return Reply({"error": "No space left on device"})
        return answer(request)

    server, _ = worlds.deployed(text, tmp_path, spoil=spoil, quorum_timeout=100.0)
    with pytest.raises(
        UserError, match=r"0 so far\. All 4 clients fail alike: No space left on device\. The server has"
    ):
        server.run()
    assert caplog.text.count("client c1 has no final model") == 1
    summary = json.loads((server.results.folder / "summary.json").read_text())
    assert summary["without_model"] == ["c0", "c1", "c2", "c3"] and not server.state.finished
    full[0] = False
    again, _ = worlds.deployed(text, tmp_path, spoil=spoil)
    again.run()
    assert again.state.finished


def test_a_client_that_fails_is_asked_again_only_where_its_update_is_needed(tmp_path: Path) -> None:
    """Three of four updates are enough for half; with a quorum of four the last one is asked for again."""
    text = worlds.recipe("fedavg", training={"join_ratio": 1.0, "num_rounds": 2}, model={"name": SMALL})
    for quorum, asked in ((0, 1), (4, 2)):
        failures = iter([True])

        def spoil(
            node: int,
            request: Request,
            answer: Callable[[Request], Reply],
            failures: Any = failures,
        ) -> Reply | Failure:
            if node == 101 and position(request) == 1 and next(failures, False):
                return Failure("no answer within 1 s")
            return answer(request)

        server, transport = worlds.deployed(text, tmp_path / str(quorum), spoil=spoil, quorum=quorum)
        server.run()
        assert sum(n == 101 and position(r) == 1 for n, r, _ in transport.log) == asked
        assert server.results.rows()[1].get("dropped") == (1 if quorum == 0 else None)


def test_stages_without_uploads_go_on_as_their_method_says(tmp_path: Path) -> None:
    """Fine-tuning of all clients waits for nobody: who is away makes up for it at the end."""
    text = worlds.recipe("fedavg-ft")
    server, transport = worlds.deployed(text, tmp_path, quorum=4, quorum_timeout=60.0)
    last = len(worlds.simulation(text).schedule) - 1
    everybody = set(transport.online)

    def back() -> None:
        transport.online.update(everybody)

    worlds.before_stages(server, {last: transport.online.clear, -1: back})
    server.run()
    assert server.results.rows()[-1]["clients"] == 0
    worlds.same_state(server, tmp_path, worlds.simulated(text))


def test_a_run_whose_last_rounds_had_no_update_is_not_completed(tmp_path: Path) -> None:
    """Everybody's training diverges in the last two of four rounds; the model is that of round 2."""
    text = worlds.recipe("fedavg", training={"join_ratio": 1.0}, model={"name": SMALL})

    def spoil(node: int, request: Request, answer: Callable[[Request], Reply]) -> Reply:
        return Reply({"diverged": "its loss is not finite"}) if position(request) >= 2 else answer(request)

    server, _ = worlds.deployed(text, tmp_path, spoil=spoil)
    words = r"The last 2 rounds had no update and left the model as it was\. The reason: the training of all"
    with pytest.raises(UserError, match=words):
        server.run()
    summary = json.loads((server.results.folder / "summary.json").read_text())
    assert summary["rounds_without_update"] == {"count": 2, "last": 2}
    assert [row.get("kept_model") for row in server.results.rows()] == [None, None, *["no update was left"] * 2]
    worlds.same(
        server.server,
        dict(
            worlds.simulated(
                worlds.recipe("fedavg", training={"join_ratio": 1.0, "num_rounds": 2}, model={"name": SMALL})
            ).server
        ),
    )


def test_a_round_without_update_in_between_is_counted_and_forgiven(tmp_path: Path) -> None:
    text = worlds.recipe("fedavg", training={"join_ratio": 1.0}, model={"name": SMALL})

    def spoil(node: int, request: Request, answer: Callable[[Request], Reply]) -> Reply:
        return Reply({"diverged": "its loss is not finite"}) if position(request) == 1 else answer(request)

    server, _ = worlds.deployed(text, tmp_path, spoil=spoil)
    server.run()
    summary = json.loads((server.results.folder / "summary.json").read_text())
    assert summary["rounds_without_update"] == {"count": 1, "last": 0}


def test_a_run_does_not_end_before_enough_clients_have_the_final_model(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = worlds.recipe("fedavg", model={"name": SMALL})
    server, transport = worlds.deployed(text, tmp_path)

    def leave() -> None:
        transport.online = {103}
        worlds.later(server, 120, lambda: transport.online.add(100))

    worlds.before_stages(server, {-1: leave})
    server.run()
    assert [m.closed for m in server.roster.members] == [True, False, False, True]
    wait = "All rounds are played. The run ends once 2 clients have the final model; 1 so far. Missing: c0, c1, c2."
    assert wait in caplog.text


def test_the_summary_is_of_the_final_models(tmp_path: Path) -> None:
    """Its accuracy is that of the models clients were left with, not that of the last row with scores."""
    text = worlds.recipe("fedavg", training={"join_ratio": 1.0}, evaluation={"eval_every": 4, "clients": 2})
    server, _ = worlds.deployed(text, tmp_path)
    server.run()
    summary = json.loads((server.results.folder / "summary.json").read_text())
    scores = [m.scores["own"] for m in server.roster.members]
    assert summary["final"]["clients"] == 4
    assert math.isclose(summary["final"]["personal"]["mean"], sum(scores) / 4)
    two = [server.roster.members[n].scores["own"] for n in server._evaluated()]
    assert len(two) == 2 and math.isclose(summary["accuracy"]["personal"]["mean"], sum(two) / 2)


def test_a_node_that_is_gone_is_no_longer_listed_as_unused(tmp_path: Path) -> None:
    text = worlds.recipe("fedavg", model={"name": SMALL})
    server, transport = worlds.deployed(text, tmp_path)
    renamed(transport, 104, 101, "c1")
    listed: list[bool] = []
    worlds.before_stages(
        server,
        {
            0: lambda: transport.online.add(104),
            2: lambda: (listed.append("104" in server.members.unused), transport.online.discard(104)),
        },
    )
    server.run()
    assert listed == [True] and server.members.unused == {}


# Who comes when


def test_numbers_follow_the_natural_order_of_names(tmp_path: Path) -> None:
    text = worlds.recipe("local", training={"num_rounds": 1})
    server, transport = worlds.deployed(text, tmp_path)
    for node, name in zip((100, 101, 102, 103), ("c10", "c9", "b", "c2"), strict=True):
        settings = dataclasses.replace(transport.held[node].settings, id=name)
        transport.held[node] = Node(settings)
    server.run()
    assert [m.name for m in server.roster.members] == ["b", "c2", "c9", "c10"]
    assert [m.number for m in server.roster.members] == [0, 1, 2, 3]


@pytest.mark.parametrize("method", ["fedavg-ft", "fedrep", "fedper", "dm-pfl", "scaffold"])
def test_a_late_first_timer_begins_as_the_others_began(method: str, tmp_path: Path) -> None:
    """And plays the stages of all clients that it missed, before anything else."""
    text = worlds.recipe(method, training={"join_ratio": 1.0})
    server, transport = worlds.deployed(text, tmp_path, start=3)
    transport.online.discard(103)
    schedule = worlds.simulation(text).schedule
    come = len(schedule) - 1
    worlds.before_stages(server, {come: lambda: transport.online.add(103)})
    server.run()
    asked = [r.told for n, r, _ in transport.log if n == 103 and r.kind == "work"]
    owed = [i for i, s in enumerate(schedule[:come]) if s.who == "all"]
    now = [come] if schedule[come].who != "nobody" else []
    played = [p["position"] for told in asked for p in told["plays"]]
    assert played == owed + now
    assert asked[0]["begin"] == "fresh" and server.roster.members[3].lost == 0
    if not owed:
        worlds.same_state(server, tmp_path, worlds.simulated_without(text, {at: [3] for at in range(come)}))
    assert server.roster.members[3].closed


@pytest.mark.parametrize("method", ["fedavg-ft", "fedrep"])
def test_who_missed_the_last_stage_of_all_plays_it_at_the_end(method: str, tmp_path: Path) -> None:
    """The server's model has not changed since, so it comes to what it would have come to."""
    text = worlds.recipe(method)
    server, transport = worlds.deployed(text, tmp_path)
    last = len(worlds.simulation(text).schedule) - 1
    worlds.before_stages(server, {last: lambda: transport.online.discard(100), -1: lambda: transport.online.add(100)})
    server.run()
    if method == "fedavg-ft":
        worlds.same_state(server, tmp_path, worlds.simulated(text))
        assert server.roster.members[0].acknowledged == last
    assert server.roster.members[0].closed


NEWCOMERS: dict[str, Any] = {"data": {"num_clients": 6, "unseen_ratio": 0.34}, "training": {"lr_decay": 0.8}}


@pytest.mark.parametrize("method", ["fedrep", "dm-pfl", "fedavg", "fedphp"])
def test_clients_beyond_the_number_are_the_simulator_s_newcomers(method: str, tmp_path: Path) -> None:
    changes: dict[str, Any] = NEWCOMERS | {"data": NEWCOMERS["data"] | {"normalize": "standardize"}}
    text = worlds.recipe(method, **changes)
    server, transport = worlds.deployed(text, tmp_path, count=6)
    transport.online.discard(105)
    worlds.before_stages(server, {2: lambda: transport.online.add(105)})
    server.run()
    sim = worlds.simulated(text)
    worlds.same_run(server, tmp_path, sim)
    for n in (4, 5):
        worlds.same(worlds.final(server, tmp_path, f"c{n}"), sim.newcomer_models(sim.model, torch.tensor([n])))
    told = json.loads((server.results.folder / "summary.json").read_text())
    assert worlds.alike(told["accuracy"]["unseen"], sim.newcomers())


# Clients that lose what they kept


def control(params: dict[str, Tensor]) -> dict[str, Tensor]:
    return tree.under(params, "control") or tree.under(params, "own")


def mean_of_clients(server: Coordinator, root: Path, one: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Any:
    """The mean over all N of what each client holds, those that have begun anew with what a client begins with."""
    algorithm, rows = server.parts.algorithm, []
    for m in server.roster.members:
        fresh = algorithm.init_clients(server.parts.initial, torch.tensor([m.number]))
        held = worlds.kept(server, root, m.name) if m.acknowledged >= 0 else fresh
        assert held is not None
        rows.append(one(held))
    return {n: torch.cat([r[n] for r in rows]).mean(0) for n in rows[0]}


def probabilities(params: dict[str, Tensor]) -> dict[str, Tensor]:
    return {n: t.sigmoid() for n, t in params.items() if "/score/" in n}


@pytest.mark.parametrize("how", ["hello", "middle", "damaged"])
@pytest.mark.parametrize("method", ["scaffold", "fedpews", "fedpac"])
def test_nothing_of_a_client_that_lost_its_state_stays_at_the_server(method: str, how: str, tmp_path: Path) -> None:
    """SCAFFOLD's control is the mean of the c_i, FedPeWS's theta that of the probabilities, right after."""
    entry = {"name": "fedpews", "warmup_share": 0.99} if method == "fedpews" else method
    text = worlds.recipe(entry, training={"join_ratio": 1.0})
    server, transport = worlds.deployed(text, tmp_path)
    seen: list[int] = []

    def check() -> None:
        if method == "scaffold":
            wanted, mine = mean_of_clients(server, tmp_path, control), control(server.server)
        elif method == "fedpews":
            wanted = mean_of_clients(server, tmp_path, probabilities)
            mine = {n.replace("/theta/", "/score/"): t for n, t in server.server.items() if "/theta/" in n}
        else:
            wanted, mine = {}, {}
        assert mine.keys() == wanted.keys() and (method == "fedpac" or mine)
        for n, t in wanted.items():
            torch.testing.assert_close(mine[n], t, rtol=0, atol=1e-12)
        seen.append(server.state.played)

    lost = server.lost

    def losing(member: Any) -> None:
        lost(member)
        assert member.number not in server.records
        check()

    def lose() -> None:
        check()
        for path in sorted((tmp_path / "c1").rglob("kept-*")):
            if how == "damaged":
                path.write_bytes(path.read_bytes()[:-1] + b"!")
            else:
                path.unlink()
        if how == "hello":
            server.members.met.pop(101)

    setattr(server, "lost", losing)  # noqa: B010
    worlds.before_stages(server, {2: lose, 3: check})
    server.run()
    assert seen == [2, 2, 3]
    member = server.roster.members[1]
    assert member.lost == 1 and member.closed and member.acknowledged == 3 and not member.anew
    begun = [r.told["begin"] for n, r, _ in transport.log if n == 101 and r.kind == "work"]
    assert begun.count("newcomer") == 1


# Who is not let in


def renamed(transport: InProcess, node: int, like: int, name: str) -> None:
    """A further node, with the data of another and a name of its own."""
    old = transport.held[like].settings
    transport.held[node] = Node(dataclasses.replace(old, id=name, state=f"{old.state}-{node}"))


def test_a_name_that_is_taken_is_not_given_twice(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    server, transport = worlds.deployed(worlds.recipe("fedavg"), tmp_path)
    renamed(transport, 104, 101, "c1")
    worlds.before_stages(server, {0: lambda: transport.online.add(104), 2: lambda: transport.online.discard(101)})
    server.run()
    assert [m.node for m in server.roster.members] == [100, 101, 102, 103]
    assert "node 104 is not used: client c1 is bound to another key than that of this node" in caplog.text
    assert not [r for n, r, _ in transport.log if n == 104 and r.kind != "hello"]


def test_without_binding_the_newest_node_of_a_name_is_the_client(tmp_path: Path) -> None:
    """With its state, if that is on the disk it shares with the old one."""
    text = worlds.recipe("scaffold", training={"join_ratio": 1.0})
    server, transport = worlds.deployed(text, tmp_path, bind=False)
    transport.held[104] = transport.held[101]
    worlds.before_stages(server, {2: lambda: (transport.online.add(104), transport.online.discard(101))})
    server.run()
    assert server.roster.members[1].node == 104 and server.roster.members[1].lost == 0
    worlds.same_run(server, tmp_path, worlds.simulated(text))


def told(**changes: Any) -> Callable[[Reply], Reply]:
    return lambda reply: Reply(reply.told | changes, reply.blob)


def formed(**changes: Any) -> Callable[[Reply], Reply]:
    return lambda reply: Reply(reply.told | {"form": reply.told["form"] | changes}, reply.blob)


REFUSED: dict[str, tuple[str, Callable[[Reply], Reply], str]] = {
    "another format": ("hello", told(version="0.0", format=7), "it has format 7 (personafl '0.0') and this is"),
    "a format as text": ("hello", told(format="1"), "it has format '1' (personafl"),
    "no format": ("hello", lambda r: Reply({k: v for k, v in r.told.items() if k != "format"}), "it has format 0"),
    "no name": ("hello", told(client="../x"), "its name is '../x'"),
    "another shape": ("describe", formed(shape=[1, 8, 9]), "shape (1, 8, 9), others have (1, 8, 8)"),
    "another type": ("describe", formed(dtype="uint8"), "dtype 'uint8', others have 'float32'"),
    "another task": ("describe", formed(task="regression"), "task 'regression', others have 'classification'"),
    "text labels": ("describe", formed(class_names=list("abcdefghij")), "labels that are numbers where others' are"),
    "another normalisation": ("describe", told(normalize="half"), "data.normalize='half' for its data, others 'none'"),
    "nothing": ("describe", lambda r: Reply({}), "what it tells of its data cannot be understood"),
    "an error": ("describe", lambda r: Reply({"error": "a\nb"}), "client c0 is not used: a b"),
    "no answer": ("hello", lambda r: Reply({"error": "busy"}), "node 100 is not used: busy"),
}


@pytest.mark.parametrize(
    ("which", "late"),
    [*((w, False) for w in REFUSED), *((w, True) for w in ("another format", "another shape", "an error"))],
)
def test_a_client_that_does_not_fit_is_set_aside(
    which: str, late: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The first by name, so that it is not what others are compared with; it does not get a number, either."""
    kind, change, why = REFUSED[which]

    def spoil(node: int, request: Request, answer: Callable[[Request], Reply]) -> Reply:
        return change(answer(request)) if node == 100 and request.kind == kind else answer(request)

    text = worlds.recipe("fedavg", training={"num_rounds": 1}, model={"name": SMALL})
    server, transport = worlds.deployed(text, tmp_path, spoil=spoil, start=3)
    if late:
        transport.online.discard(100)
        worlds.before_stages(server, {0: lambda: transport.online.add(100)})
    server.run()
    assert why in caplog.text and all("\n" not in r.getMessage() for r in caplog.records)
    assert [m.name for m in server.roster.members] == ["c1", "c2", "c3"]
    assert server.state.finished


def test_who_was_set_aside_is_asked_again_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "RETRY", -1.0)
    times = iter(range(100))

    def spoil(node: int, request: Request, answer: Callable[[Request], Reply]) -> Reply:
        if node == 103 and request.kind == "describe" and next(times) < 2:
            return Reply({"error": "its data cannot be used; its log has why"})
        return answer(request)

    text = worlds.recipe("fedavg", training={"num_rounds": 1})
    server, _ = worlds.deployed(text, tmp_path, spoil=spoil)
    server.run()
    worlds.same_run(server, tmp_path, worlds.simulated(text))


def test_too_few_clients_end_the_wait(tmp_path: Path) -> None:
    server, transport = worlds.deployed(worlds.recipe("fedavg"), tmp_path, start_timeout=0.01)
    transport.online = {100, 101}
    with pytest.raises(UserError, match=r"2 of 4 clients came within 0\.01 s"):
        server.run()


def test_a_method_that_must_know_all_examples_needs_everybody_at_the_start(tmp_path: Path) -> None:
    text = worlds.recipe({"name": "scaffold", "weights": "examples"})
    server, transport = worlds.deployed(text, tmp_path, start=3)
    transport.online.discard(100)
    with pytest.raises(UserError, match="must know how many examples all clients have together"):
        server.run()


def test_patience_without_validation_data_is_refused(tmp_path: Path) -> None:
    server, _ = worlds.deployed(worlds.recipe("fedavg", training={"patience": 2}), tmp_path)
    with pytest.raises(UserError, match=r"training\.patience=2: needs validation data"):
        server.run()


def flat() -> Any:
    x, y = np.arange(24, dtype=np.float32).reshape(12, 2), np.arange(12) % 2
    return (x[:8], y[:8]), (x[8:], y[8:])


def test_what_are_no_images_is_not_augmented(tmp_path: Path) -> None:
    text = worlds.recipe("fedavg", training={"augment": "crop-flip"})
    server, transport = worlds.deployed(text, tmp_path)
    for node in transport.held.values():
        node.settings = dataclasses.replace(node.settings, data=f"{HERE}:flat")
    words = r"training\.augment='crop-flip': what the clients hold is no set of images, .* shape \(2,\); use none"
    with pytest.raises(UserError, match=words):
        server.run()
    assert not any(request.kind == "work" for _, request, _ in transport.log)


def test_who_is_back_after_a_restart_is_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "personafl")
    text = worlds.recipe("fedavg", training={"num_rounds": 2})
    server, transport = worlds.deployed(text, tmp_path, start=3)
    transport.online.discard(103)

    def end() -> None:
        raise KeyboardInterrupt

    worlds.before_stages(server, {1: end})
    with pytest.raises(KeyboardInterrupt):
        server.run()
    assert "3 clients are there: c0, c1, c2" in caplog.messages
    caplog.clear()
    again, transport = worlds.deployed(text, tmp_path, start=3)
    transport.online.discard(101)
    again.run()
    assert [line for line in caplog.messages if line.startswith("back:") or "is there" in line] == [
        "back: c0, c2",
        "client c3 is there, number 3",
    ]


# Text labels


def sorted_by_name(kinds: str, count: int = 12) -> Any:
    """Points that lie where their label says."""
    draw = np.random.default_rng(len(kinds))
    y = np.array([kinds[i % len(kinds)] for i in range(count)])
    return (draw.normal(size=(count, 3)) + np.array([ord(c) for c in y])[:, None]).astype(np.float32), y


def named_abc(client: str) -> Any:
    kinds = {"c0": "ab", "c1": "bc", "c2": "ca", "c3": "abd"}[client]
    return sorted_by_name(kinds), sorted_by_name(kinds, 6)


def lettered(tmp_path: Path, **settings: Any) -> tuple[Coordinator, InProcess]:
    text = worlds.recipe("fedavg", data={"normalize": "none"}, training={"num_rounds": 1, "lr": 0.001})
    server, transport = worlds.deployed(text, tmp_path, **settings)
    for node in transport.held.values():
        node.settings = dataclasses.replace(node.settings, data=f"{HERE}:named_abc")
    return server, transport


def test_labels_are_those_of_all_clients(tmp_path: Path) -> None:
    server, _ = lettered(tmp_path)
    server.run()
    assert server.world is not None and server.world.form.class_names == ("a", "b", "c", "d")
    assert server.state.finished


def test_given_labels_are_the_only_ones(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    server, _ = lettered(tmp_path, labels=("c", "b", "a"), start=3)
    server.run()
    assert server.world is not None and server.world.form.class_names == ("c", "b", "a")
    assert [m.name for m in server.roster.members] == ["c0", "c1", "c2"]
    assert "client c3 is not used: labels that were not agreed on" in caplog.text


def test_a_late_client_with_another_label_is_not_used(tmp_path: Path) -> None:
    server, transport = lettered(tmp_path, start=3)
    transport.online.discard(103)
    worlds.before_stages(server, {0: lambda: transport.online.add(103)})
    server.run()
    assert [m.name for m in server.roster.members] == ["c0", "c1", "c2"]


# The end


def test_a_second_run_closes_for_those_that_were_absent(tmp_path: Path) -> None:
    text = worlds.recipe("fedrep")
    server, transport = worlds.deployed(text, tmp_path)
    worlds.before_stages(server, {-1: lambda: transport.online.discard(102)})
    server.run()
    first = json.loads((server.results.folder / "summary.json").read_text())
    assert first["without_model"] == ["c2"] and not server.state.finished
    again, transport = worlds.deployed(text, tmp_path)
    again.run()
    second = json.loads((again.results.folder / "summary.json").read_text())
    assert second["without_model"] == [] and again.state.finished
    worked = {n for n, r, _ in transport.log if r.kind == "work"}
    assert worked == {102}
    sim = worlds.simulated(text)
    worlds.same_state(again, tmp_path, sim)
    for n in range(4):
        theirs = sim.deployed_models(sim.model, torch.tensor([n]))
        worlds.same(worlds.final(again, tmp_path, f"c{n}"), theirs)


def test_what_a_run_began_with_cannot_be_changed(tmp_path: Path) -> None:
    server, _ = worlds.deployed(worlds.recipe("fedavg", training={"num_rounds": 1}), tmp_path)
    server.run()
    for text, other_settings, what in (
        (worlds.recipe("fedavg", training={"num_rounds": 2}), {}, "recipe.toml"),
        (server.recipe, {"clients": 5}, "deployment.clients"),
    ):
        other, _ = worlds.deployed(text, tmp_path, **other_settings)
        with pytest.raises(UserError, match=f"{what} is not what experiment {server.experiment} began with"):
            other.run()


def as_by(version: str, patch: pytest.MonkeyPatch) -> None:
    """Let servers and nodes be of another version of the package."""
    for where in (module, membership, world_module, node_module):
        patch.setattr(where, "VERSION", version)


def stopped(text: str, root: Path, version: str, stages: int = 2) -> Coordinator:
    """A run by a version of the package, whose server was killed."""
    with pytest.MonkeyPatch.context() as patch:
        as_by(version, patch)
        server, _ = worlds.deployed(text, root)
        worlds.before_stages(server, {stages: killed})
        with pytest.raises(KeyboardInterrupt):
            server.run()
    return server


def killed() -> None:
    raise KeyboardInterrupt


def test_another_version_of_the_same_format_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With the state that clients keep, and to the numbers of a run of one version."""
    caplog.set_level(logging.INFO, logger="personafl")
    text = worlds.recipe("ditto")
    begun = stopped(text, tmp_path, "0.0.7")
    server, _ = worlds.deployed(text, tmp_path)
    server.run()
    assert server.experiment == begun.experiment and server.state.finished
    worlds.same_run(server, tmp_path, worlds.simulated(text))
    assert f"it began with personafl 0.0.7 and goes on with {VERSION}" in caplog.text


def test_clients_of_other_versions_of_the_same_format_take_part(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="personafl")

    def spoil(node: int, request: Request, answer: Callable[[Request], Reply]) -> Reply:
        with pytest.MonkeyPatch.context() as patch:
            if node < 102:
                as_by("0.0.7", patch)
            return answer(request)

    text = worlds.recipe("ditto")
    server, _ = worlds.deployed(text, tmp_path, spoil=spoil)
    server.run()
    worlds.same_run(server, tmp_path, worlds.simulated(text))
    assert caplog.text.count("runs personafl 0.0.7, this is") == 2


def test_an_experiment_of_another_format_does_not_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where nothing else of what it wrote can be read."""
    text = worlds.recipe("ditto")
    begun = stopped(text, tmp_path, "0.0.7")
    path = tmp_path / "server-folder" / "server" / "state.json"
    held = json.loads(path.read_text())
    held["numbers"]["world"] |= {"format": FORMAT + 1, "unheard": "of"}
    path.write_text(json.dumps(held))
    other, transport = worlds.deployed(text, tmp_path)
    why = (
        rf"experiment {begun.experiment} has format {FORMAT + 1} \(personafl '0\.0\.7'\) and this is "
        rf"personafl \S+ with format {FORMAT}; install versions of the same format"
    )
    with pytest.raises(UserError, match=why):
        other.run()
    assert not transport.log


# Other code


class Bent(nn.Module):
    """A network whose code a test changes."""

    activation = staticmethod(torch.relu)

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 8), nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(type(self).activation(self.first(x.flatten(1))))
        return out


@contextmanager
def other_code() -> Iterator[None]:
    """Within this, the model has the same weights and gives other outputs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Bent, "activation", staticmethod(torch.tanh))
        patch.setattr(node_module, "build_parts", world_module.build_parts)  # not what is held
        yield


OTHER = "it runs model code that gives other outputs than the server's for the same weights (largest difference "


@pytest.mark.parametrize("begin", [0, 2], ids=["from the start", "after a restart"])
def test_a_client_with_other_model_code_does_not_take_part(
    begin: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It has the server's weights. It is refused at its first work, or as soon as it has another model."""
    text = worlds.recipe("scaffold", training={"join_ratio": 1.0}, model={"name": f"{HERE}:Bent"})

    def spoil(node: int, request: Request, answer: Callable[[Request], Reply]) -> Reply:
        if node != 101 or not server.world or server.state.played < begin:
            return answer(request)
        with other_code():
            return answer(request)

    server, _ = worlds.deployed(text, tmp_path, spoil=spoil)
    server.run()
    absent = {place: [1] for place in range(begin, 4)}
    worlds.same_state(server, tmp_path, worlds.simulated_without(text, absent))
    assert [m.closed for m in server.roster.members] == [True, False, True, True]
    assert f"stage {begin}: client c1: {OTHER}" in caplog.text
    assert server.members.unused["101"].startswith(OTHER)  # as deploy status shows it


def test_a_late_client_with_other_model_code_is_found_before_it_works(tmp_path: Path) -> None:
    text = worlds.recipe("fedavg", training={"num_rounds": 2}, model={"name": f"{HERE}:Bent"})

    def spoil(node: int, request: Request, answer: Callable[[Request], Reply]) -> Reply:
        if node != 103:
            return answer(request)
        with other_code():
            return answer(request)

    server, transport = worlds.deployed(text, tmp_path, spoil=spoil, start=3)
    transport.online.discard(103)
    worlds.before_stages(server, {0: lambda: transport.online.add(103)})
    server.run()
    assert {r.kind for n, r, _ in transport.log if n == 103} == {"hello", "describe"}
    assert server.members.unused["103"].startswith(OTHER)


def test_a_server_with_other_model_code_does_not_go_on(tmp_path: Path) -> None:
    text = worlds.recipe("fedavg", training={"num_rounds": 2}, model={"name": f"{HERE}:Bent"})
    begun = stopped(text, tmp_path, VERSION, stages=1)
    other, transport = worlds.deployed(text, tmp_path)
    with (
        other_code(),
        pytest.raises(
            UserError, match=f"The model code at the server has changed since experiment {begun.experiment} "
        ),
    ):
        other.run()
    assert not transport.log


# Clients that send what they should not


def packed(request: Request, reply: Reply, **numbers: int) -> bytes:
    """The same update under other numbers."""
    found = wire.read(reply.blob)
    return wire.pack(found.payload, **({"stage": found.stage, "examples": found.examples} | numbers))


def nan(request: Request, reply: Reply) -> Reply:
    payload = dict(wire.read(reply.blob).payload)
    first = next(iter(payload))
    assert isinstance(payload[first], Tensor)
    payload[first] = torch.full_like(payload[first], torch.nan)  # type: ignore[arg-type]
    found = wire.read(reply.blob)
    return Reply(reply.told, wire.pack(payload, stage=found.stage, examples=found.examples))


def huge(request: Request, reply: Reply) -> Reply:
    """A few bytes that claim a masked tensor of 2^40 numbers."""
    name = b"layers.0.weight"
    body = wire._NUMBERS.pack(1, 7, 1) + len(name).to_bytes(2, "little") + name + bytes([1, 2, 2])
    return Reply(reply.told, sealed(body + (2**20).to_bytes(4, "little") * 2 + bytes(4)))


BAD: dict[str, tuple[Callable[[Request, Reply], Reply], str]] = {
    "cut short": (lambda q, r: Reply(r.told, r.blob[:-7]), "its header says"),
    "nothing": (lambda q, r: Reply(r.told, b""), "not a personafl message"),
    "another version": (lambda q, r: Reply(r.told, r.blob[:3] + b"9" + r.blob[4:]), "a message of version b'9'"),
    "huge": (huge, "is over the limit of"),
    "not finite": (nan, "not all values are finite"),
    "more examples": (lambda q, r: Reply(r.told, packed(q, r, examples=10**6)), "an update of 1000000 examples from"),
    "another stage": (lambda q, r: Reply(r.told, packed(q, r, stage=0)), "an update of stage 0 in stage 1"),
    "an error": (lambda q, r: Reply({"error": "Disk full\nreally"}), "Disk full really"),
    "empty": (lambda q, r: Reply({}), "not a personafl message"),
    "diverged": (lambda q, r: Reply({"diverged": "its loss is not finite"}), "its loss is not finite"),
    "lost twice": (lambda q, r: Reply({"lost": True}), "it lost what it kept"),
    "numbers": (lambda q, r: Reply(r.told | {"work": {"loss": 10**400}}, r.blob), "its numbers cannot be understood"),
}


@pytest.mark.parametrize("which", BAD)
def test_a_bad_update_is_refused_and_the_client_goes_back(
    which: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    change, why = BAD[which]
    text = worlds.recipe("scaffold", training={"join_ratio": 0.75, "num_rounds": 3}, model={"name": SMALL})
    client = first_of(text, 1)

    def spoil(node: int, request: Request, answer: Callable[[Request], Reply]) -> Reply:
        reply = answer(request)
        return change(request, reply) if node == 100 + client and position(request) == 1 else reply

    server, _ = worlds.deployed(text, tmp_path, spoil=spoil)
    server.run()
    row = server.results.rows()[1]
    (found,) = row.get("quarantined", []) + row.get("failed", [])
    assert found["client"] == client and why in found["why"]
    assert any(f"stage 1: client c{client}: " in r.getMessage() and why in r.getMessage() for r in caplog.records)
    if which != "lost twice":
        worlds.same_state(server, tmp_path, worlds.simulated_without(text, {1: [client]}))
    assert server.state.finished


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.sampled_from([0, 1, -1, 3, 2**31, 2**63, 10**400, 0.5, -0.0, 1e308, math.inf, -math.inf, math.nan])
    | st.sampled_from(["", "x", "1", "../..", "none", "standardize", "float32", "a\nb", "\x00", "NaN"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["own", "loss", "x"]), inner, max_size=2)
    ),
    max_leaves=4,
)
FIELDS = {
    "hello": ["client", "version", "stages", "error"],
    "describe": [
        *("form", "sizes", "normalize", "moments", "error"),
        *(
            f"form.{n}"
            for n in ("shape", "dtype", "task", "target", "classes", "class_names", "feature_names", "model", "columns")
        ),
        *("sizes.train", "sizes.validation", "sizes.test", "moments.count", "moments.mean", "moments.squares"),
    ],
    "work": [
        *("work", "scores", "judged", "lost", "diverged", "error"),
        *("work.flops", "work.dense_flops", "work.loss", "work.steps", "judged.before", "judged.own", "judged.finite"),
        *(
            "scores.own",
            "scores.finite",
            "scores.common",
            "scores.validation",
            "scores.train_loss",
            "judged.validation",
        ),
    ],
}


class Replayed:
    """Nodes that say again what was once said, so that a run costs what the server does."""

    def __init__(self, log: list[tuple[int, Request, Reply | Failure]], field: str, value: Any) -> None:
        self.said = {(n, r.kind, position(r), "close" in r.told): reply for n, r, reply in log}
        self.kind, self.path, self.value = field.split(":")[0], field.split(":")[1].split("."), value

    def nodes(self) -> list[int]:
        return [100, 101, 102, 103]

    def key(self, node: int) -> str:
        return str(node)

    def exchange(self, requests: Any, timeout: float) -> dict[int, Reply | Failure]:
        return {n: self._reply(n, r) for n, r in requests.items()}

    def _reply(self, node: int, request: Request) -> Reply | Failure:
        key = (node, request.kind, position(request), "close" in request.told)
        reply = self.said.get(key, Reply({"error": "not known"}))
        if node != 100 or request.kind != self.kind or not isinstance(reply, Reply):
            return reply
        told = json.loads(json.dumps(reply.told))
        inner = told if len(self.path) == 1 else told.setdefault(self.path[0], {})
        inner[self.path[-1]] = self.value
        return Reply(json.loads(json.dumps(told)), reply.blob)


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, Request, Reply | Failure]]:
    """All that is said in a run in which everything there is to say is said."""
    with pytest.MonkeyPatch.context() as patch:
        worlds.quicken(patch)
        server, transport = worlds.deployed(EVERYTHING(), tmp_path_factory.mktemp("said"))
        server.run()
    return transport.log


def EVERYTHING() -> str:  # noqa: N802
    return worlds.recipe(
        "fedavg",
        data={"validation_share": 0.2, "normalize": "standardize"},
        training={"join_ratio": 1.0, "num_rounds": 2},
        evaluation={"eval_every": 1, "when": "after_local", "train_loss": True},
        model={"name": SMALL},
    )


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    field=st.sampled_from([f"{kind}:{name}" for kind, names in FIELDS.items() for name in names]),
    value=JSON,
)
def test_whatever_a_client_tells_the_others_go_on(
    said: list[tuple[int, Request, Reply | Failure]],
    field: str,
    value: Any,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "build_parts", worlds.BUILT)
    logging.getLogger("personafl").setLevel(logging.ERROR)
    root = tmp_path_factory.mktemp("told")
    server = worlds.coordinator(root, Deployment(clients=4, start=3), EVERYTHING(), Replayed(said, field, value))
    try:
        server.run()
    finally:
        logging.getLogger("personafl").setLevel(logging.NOTSET)
    others = [m for m in server.roster.members if m.name in ("c1", "c2", "c3")]
    assert len(others) == 3 and all(m.closed and m.acknowledged >= 0 for m in others)
    assert server.state.played == len(server.schedule) == 2
    for row in server.results.rows():
        json.loads(json.dumps(row), parse_constant=lambda name: pytest.fail(f"{name} in a row"))


# Data that must not be told


def secretive(client: str) -> Any:
    raise {"c0": ValueError, "c1": OSError, "c2": UserError, "c3": SystemExit}[client]("patient 4711")


def test_nothing_of_what_went_wrong_with_data_reaches_the_server(tmp_path: Path) -> None:
    server, transport = worlds.deployed(worlds.recipe("fedavg"), tmp_path, start_timeout=0.01)
    for node in transport.held.values():
        node.settings = dataclasses.replace(node.settings, data=f"{HERE}:secretive")
    with pytest.raises(UserError, match="0 of 4 clients came"):
        server.run()
    replies = [reply for _, request, reply in transport.log if request.kind == "describe"]
    assert len(replies) == 4
    for reply in replies:
        assert isinstance(reply, Reply) and reply.told["error"] and "4711" not in str(reply)


def test_a_new_key_of_the_same_name_is_the_client_and_another_s_is_not(tmp_path: Path) -> None:
    """A node that registers anew has another number; what a name is bound to is that of the key."""
    server, transport = worlds.deployed(worlds.recipe("ditto"), tmp_path)
    keys = {100: "c0", 101: "c1", 102: "c2", 103: "c3", 200: "c1", 201: "c3"}
    transport.key = keys.__getitem__  # type: ignore[method-assign, assignment]

    def change() -> None:
        transport.held[200], transport.held[201] = transport.held[101], transport.held[102]
        transport.online = {100, 102, 103, 200}

    def steal() -> None:  # client c2 by the key of c3
        transport.online = {100, 103, 200, 201}

    worlds.before_stages(server, {1: change, 3: steal})
    server.run()
    members = server.roster.members
    assert [m.closed for m in members] == [True, True, False, True] and members[1].node == 200
    assert "its key is keys/c3.pub, so it can only be client c3, and it calls itself c2" in server.members.unused["201"]


def test_a_name_that_nobody_has_had_belongs_to_its_key(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The first that comes with a name does not get it."""
    server, transport = worlds.deployed(worlds.recipe("fedavg", training={"num_rounds": 1}), tmp_path, start=3)
    keys = {100: "c9", 101: "c1", 102: "c2", 103: "c3"}
    transport.key = keys.__getitem__  # type: ignore[method-assign, assignment]
    server.run()
    assert [m.name for m in server.roster.members] == ["c1", "c2", "c3"]
    why = (
        "its key is keys/c9.pub, so it can only be client c9, and it calls itself c0; "
        'set id = "c9" in its client.toml, or deployment.bind = false'
    )
    assert server.members.unused["100"] == why and f"node 100 is not used: {why}" in caplog.text
    assert "client c0 is refused, since its key is that of client c9 at the server, keys/c9.pub" in caplog.text
    told = json.loads((tmp_path / "server-folder" / "server" / "roster.json").read_text())
    assert told["unused"]["100"] == why


def test_a_node_whose_key_is_not_known_is_refused(tmp_path: Path) -> None:
    server, transport = worlds.deployed(worlds.recipe("fedavg", training={"num_rounds": 1}), tmp_path, start=3)
    keys = {100: "", 101: "c1", 102: "c2", 103: "c3"}
    transport.key = keys.__getitem__  # type: ignore[method-assign, assignment]
    server.run()
    assert (
        server.members.unused["100"]
        == "it calls itself c0, and its key is not in the server's keys/; keys/c0.pub has to be"
    )


def test_without_binding_any_key_will_do(tmp_path: Path) -> None:
    text = worlds.recipe("fedavg", training={"num_rounds": 1})
    server, transport = worlds.deployed(text, tmp_path, bind=False)
    transport.key = lambda node: "c9"  # type: ignore[method-assign]
    server.run()
    worlds.same_run(server, tmp_path, worlds.simulated(text))


def test_who_has_other_data_than_before_is_asked_about_them_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    grown = {"train": 7}

    def spoil(node: int, request: Request, answer: Callable[[Request], Reply]) -> Reply | Failure:
        reply = answer(request)
        if node == 100 and request.kind == "describe" and not grown.get("told"):
            grown["told"] = 1
            return Reply(reply.told | {"sizes": reply.told["sizes"] | {"train": reply.told["sizes"]["train"] - 1}})
        return reply

    text = worlds.recipe("fedavg", training={"join_ratio": 1.0})
    server, _ = worlds.deployed(text, tmp_path, spoil=spoil)
    server.run()
    rows = server.results.rows()
    assert [r["clients"] for r in rows] == [4] * 4 and not any("quarantined" in r for r in rows)
    assert "examples from a client that has" in caplog.text  # it is asked anew in the same round


def test_two_servers_do_not_share_a_folder(tmp_path: Path) -> None:
    server, _ = worlds.deployed(worlds.recipe("fedavg"), tmp_path)
    with locked(tmp_path / "server-folder" / "server"), pytest.raises(UserError, match="is writing to this folder"):
        server.run()


@pytest.mark.parametrize(
    ("own", "validation"), [({"own": 1.5}, False), ({"own": 1e6}, False), ({"validation": 1.0}, True)]
)
def test_scores_are_what_a_metric_can_be(own: dict[str, float], validation: bool, tmp_path: Path) -> None:
    def spoil(node: int, request: Request, answer: Callable[[Request], Reply]) -> Reply | Failure:
        reply = answer(request)
        if node == 100 and reply.told.get("scores"):
            return Reply(reply.told | {"scores": reply.told["scores"] | own}, reply.blob)
        return reply

    server, _ = worlds.deployed(worlds.recipe("fedavg"), tmp_path, spoil=spoil)
    server.run()
    last = server.results.rows()[-1]
    assert last["personal"]["mean"] <= 1 and "validation" not in last
    assert server.roster.members[0].closed == validation  # scores without data for them are left out, others refused
