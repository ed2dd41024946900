"""Every method through Flower's own records and apps, against the simulator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from flwr.app import Context, RecordDict

from personafl import ALGORITHMS
from personafl.deployment.coordinator import Coordinator
from personafl.deployment.flower import client_app, server_app
from personafl.deployment.flower.in_process import RUN, InProcessGrid
from tests.deployment import worlds

SLOTTED: list[dict[str, Any]] = [
    {"name": "fedpews", "base": {"name": "dm-pfl", "iterations": 1, "allocation": "erk"}},
    {"name": "fedrep", "weights": "cowa"},
    {"name": "fedavg", "inherit": {}},
    {"name": "fedavg", "robust": "median"},
    {"name": "scaffold", "weights": "examples"},
    {"name": "ditto", "prior_free": True, "inference": "batch"},
    {
        "name": "dm-pfl",
        "iterations": 1,
        "allocation": "erk",
        "prior_free": True,
        "inference": {"name": "stream", "window": 8},
    },
    {"name": "ditto", "inference": "mixture"},
]


def through_flower(text: str, root: Path, monkeypatch: pytest.MonkeyPatch) -> Coordinator:
    """A whole run of the two apps."""
    home = root / "server"
    home.mkdir()
    (home / "recipe.toml").write_text(text)
    (home / "deployment.toml").write_text("[deployment]\nclients = 4\n")
    started = {}
    for i in range(4):
        path = root / f"c{i}.toml"
        path.write_text(f'[client]\nid = "c{i}"\ndata = "recipe:{i}"\nstate = "c{i}"\nthreads = 1\n')
        started[100 + i] = {"client": str(path)}
    made: list[Coordinator] = []

    def making(*given: Any, **more: Any) -> Coordinator:
        made.append(Coordinator(*given, **more))
        return made[-1]

    monkeypatch.setattr(server_app, "Coordinator", making)
    grid = InProcessGrid(client_app.app, started, {"folder": str(home)})
    server_app.app(grid, Context(RUN, 1, {}, RecordDict(), {"folder": str(home)}))
    return made[0]


@pytest.mark.parametrize("method", [*sorted(ALGORITHMS), *SLOTTED], ids=str)
def test_a_method_gives_the_simulator_s_numbers(
    method: str | dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = worlds.recipe(method)
    server = through_flower(text, tmp_path, monkeypatch)
    worlds.same_run(server, tmp_path, worlds.simulated(text))
    assert [m.closed for m in server.roster.members] == [True] * 4
    assert {m.acknowledged for m in server.roster.members} != {-1}


@pytest.mark.parametrize("rule", ["batch", "stream"])
@pytest.mark.parametrize(
    ("setting", "kept"), [({"calibrate": True}, "labels/temperature"), ({"wary": 2.0}, "labels/lead")]
)
def test_clients_fit_their_answers_to_validation_data_as_in_the_simulator(
    rule: str, setting: dict[str, Any], kept: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = {"name": "ditto", "prior_free": True, "inference": {"name": rule} | setting}
    text = worlds.recipe(method, data={"validation_share": 0.3}, training={"local_epochs": 10, "lr": 0.3})
    server = through_flower(text, tmp_path, monkeypatch)
    sim = worlds.simulated(text)
    worlds.same_run(server, tmp_path, sim)
    fitted = sim.deployed_models(sim.model, sim.everybody)[kept]
    sim._held = lambda ids: lambda split: sim.federation.examples("train", ids)  # type: ignore[method-assign]
    on_training_data = sim.deployed_models(sim.model, sim.everybody)[kept]
    assert (fitted != on_training_data).any()  # so a client that took these would be seen


def test_bytes_are_those_of_our_blobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is counted is what stands in Flower's arrays, up and down."""
    seen = {"up": 0, "down": 0}
    push = InProcessGrid.push_messages

    def counting(self: InProcessGrid, messages: Any) -> Any:
        held = list(messages)
        ids = list(push(self, held))
        for message, number in zip(held, ids, strict=True):
            reply = self.ready[number]
            for way, found in (("down", message), ("up", reply)):
                seen[way] += sum(len(a.data) for a in found.content.array_records["blobs"].values())
        return ids

    monkeypatch.setattr(InProcessGrid, "push_messages", counting)
    server = through_flower(worlds.recipe("dm-pfl"), tmp_path, monkeypatch)
    totals = server.state.totals
    assert seen["up"] == totals.up_bytes > 0
    assert seen["down"] == totals.down_bytes + server.state.evaluation_bytes
