"""A small federation twice: simulated, and played by nodes that answer within the process."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import tempfile
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from personafl import Simulation, config
from personafl.core.types import Params, Stage
from personafl.data import DATASETS, Source
from personafl.deployment import node as node_module
from personafl.deployment.coordinator import Coordinator
from personafl.deployment.federation_spec import build_parts
from personafl.deployment.local_model import MODEL
from personafl.deployment.messages import Failure, Reply, Request, Transport
from personafl.deployment.node import Node
from personafl.deployment.private_state import PrivateState
from personafl.deployment.settings import ClientSettings, Deployment
from personafl.deployment.tensor_files import read_tensors
from personafl.experiment import run_setup

RECIPE: dict[str, Any] = {
    "data": {"dataset": "digits", "num_clients": 4, "partition": "dirichlet", "alpha": 0.3},
    "model": {"name": "mlp"},
    "training": {
        "num_rounds": 4,
        "join_ratio": 0.5,
        "local_epochs": 1,
        "batch_size": 32,
        "lr": 0.1,
        "precision": "float64",
    },
    "evaluation": {"shift": "none", "eval_every": 2},
}
SETTINGS: dict[str, dict[str, Any]] = {  # four rounds are few
    "dm-pfl": {"iterations": 1, "allocation": "erk"},
    "dm-pfl-plus": {"iterations": 1, "allocation": "erk"},
    "feddst": {"allocation": "erk"},
}
Spoil = Callable[[int, Request, Callable[[Request], Reply]], Reply | Failure]


def recipe(method: str | dict[str, Any], **changes: Mapping[str, Any]) -> str:
    """The recipe of one method as TOML, with other values in some sections."""
    table = {section: {**RECIPE[section], **changes.get(section, {})} for section in RECIPE}
    entry = {"name": method, **SETTINGS.get(method, {})} if isinstance(method, str) else method
    return config.dump(config.load({**table, "algorithms": [entry]}))


class InProcess:
    """Nodes that answer at once; `spoil` may do something else with a request."""

    def __init__(self, nodes: Mapping[int, Node], spoil: Spoil | None = None) -> None:
        self.held, self.online, self.spoil = dict(nodes), set(nodes), spoil
        self.log: list[tuple[int, Request, Reply | Failure]] = []

    def nodes(self) -> list[int]:
        return sorted(self.online)

    def key(self, node: int) -> str:
        return str(node)

    def exchange(self, requests: Mapping[int, Request], timeout: float) -> dict[int, Reply | Failure]:
        found: dict[int, Reply | Failure] = {}
        for n, request in requests.items():
            if n not in self.online:
                found[n] = Failure("offline")
            elif self.spoil is None:
                found[n] = self.held[n].answer(request)
            else:
                found[n] = self.spoil(n, request, self.held[n].answer)
            self.log.append((n, request, found[n]))
        return found


def nodes(root: Path, count: int = 4) -> dict[int, Node]:
    """Nodes 100, 101, ... that hold the clients of the recipe's data."""
    return {
        100 + i: Node(ClientSettings(id=f"c{i}", data=f"recipe:{i}", state=str(root / f"c{i}"), threads=1))
        for i in range(count)
    }


class SimulatedTime:
    """Time that passes only while the server sleeps; `events` happen at their seconds."""

    def __init__(self, events: Mapping[float, Callable[[], object]] | None = None) -> None:
        self.now, self.events = 0.0, dict(events or {})

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        for at in sorted(at for at in self.events if at <= self.now):
            self.events.pop(at)()

    def after(self, seconds: float, event: Callable[[], object]) -> None:
        """Have something happen so many seconds from now."""
        self.events[self.now + seconds] = event


def coordinator(folder: Path, settings: Deployment, text: str, transport: Transport) -> Coordinator:
    """A server to which an hour of waiting is an instant."""
    time = SimulatedTime()
    return Coordinator(folder, settings, text, transport, sleep=time.sleep, clock=time.clock)


def deployed(
    text: str, root: Path, count: int = 4, spoil: Spoil | None = None, **settings: Any
) -> tuple[Coordinator, InProcess]:
    """A server and its nodes, ready to run."""
    transport = InProcess(nodes(root, count), spoil)
    made = Deployment(**({"clients": 4} | settings))
    return coordinator(root / "server-folder", made, text, transport), transport


def later(server: Coordinator, seconds: float, event: Callable[[], object]) -> None:
    """Have something happen after the server has slept for so many seconds from now."""
    time = getattr(server.sleep, "__self__")  # noqa: B009
    assert isinstance(time, SimulatedTime)
    time.after(seconds, event)


def simulation(text: str) -> Simulation:
    with tempfile.TemporaryDirectory() as home:
        path = Path(home) / "recipe.toml"
        path.write_text(text)
        made = config.load(path)
    return run_setup.simulation(made, made.algorithms[0])


def simulated(text: str) -> Simulation:
    sim = simulation(text)
    sim.run()
    return sim


def simulated_without(text: str, absent: Mapping[int, Collection[int]]) -> Simulation:
    """A simulation in which these clients are not there, by place in the schedule."""
    sim = simulation(text)
    whole = sim.cohort

    def cohort(stage: Stage) -> Tensor:
        ids = whole(stage)
        return ids[~torch.isin(ids, torch.tensor(list(absent.get(sim.played, ())), dtype=torch.int64))]

    setattr(sim, "cohort", cohort)  # noqa: B010
    sim.run()
    return sim


def before_stages(server: Coordinator, then: Mapping[int, Callable[[], object]]) -> None:
    """Have things happen before stages, by place in the schedule; before the closing exchange under -1."""
    stage, close = server._stage, server._close

    def staged() -> None:
        then.get(server.state.played, lambda: None)()
        stage()

    def closed() -> str:
        then.get(-1, lambda: None)()
        return close()

    setattr(server, "_stage", staged)  # noqa: B010
    setattr(server, "_close", closed)  # noqa: B010


@functools.cache
def _digits() -> Source:
    whole = DATASETS["digits"]()
    return dataclasses.replace(whole, x=whole.x[:400].clone(), y=whole.y[:400].clone())


BUILT = functools.cache(build_parts)


def quicken(patch: pytest.MonkeyPatch) -> None:
    """Read the digits once and take 400 of them, and let nodes build a model once: a third of the time."""
    made = _digits()
    patch.setitem(DATASETS, "digits", lambda: made)
    patch.setattr(node_module, "build_parts", BUILT)


# Comparisons


def kept(server: Coordinator, root: Path, name: str) -> Params | None:
    """What a client has on its disk behind the last stage of it that counts."""
    member = server.roster.named(name)
    assert member is not None
    return PrivateState(root / name, server.experiment, name).load(member.acknowledged)


def final(server: Coordinator, root: Path, name: str) -> Params:
    """What a client was left to predict with."""
    home = root / name / server.experiment / name / MODEL
    about = json.loads((home / "model.json").read_text())
    return read_tensors(home / "deployed.safetensors", about["tensors"])


def alike(mine: Any, theirs: Any) -> bool:
    """Whether two values JSON could have are equal, numbers to 1e-9: sums in float64, in another order."""
    if isinstance(mine, dict) and isinstance(theirs, dict):
        return mine.keys() == theirs.keys() and all(alike(mine[k], theirs[k]) for k in mine)
    if isinstance(mine, float) and isinstance(theirs, float):
        return math.isclose(mine, theirs, rel_tol=1e-9, abs_tol=1e-9) or (math.isnan(mine) and math.isnan(theirs))
    return bool(mine == theirs)


def same(mine: Params, theirs: Params) -> None:
    """Two sets of tensors are equal, masks and counts to the bit, numbers to 1e-9."""
    assert mine.keys() == theirs.keys()
    for n, t in theirs.items():
        assert mine[n].dtype == t.dtype and mine[n].shape == t.shape, n
        if t.is_floating_point():
            torch.testing.assert_close(mine[n], t, rtol=1e-9, atol=1e-9)
        else:
            assert torch.equal(mine[n], t), n


def rows_of(sim: Simulation) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k != "seconds"} for row in sim.rows]


def same_state(server: Coordinator, root: Path, sim: Simulation) -> None:
    """The server, what it knows of clients and what they keep are those of a simulation."""
    same(server.server, dict(sim.server))
    for m in server.roster.members[: server.settings.clients]:
        one = torch.tensor([m.number])
        same(server.records.gather(one), dict(sim.known.gather(one)))
        if m.acknowledged >= 0:
            held = kept(server, root, m.name)
            assert held is not None
            same(held, dict(sim.store.gather(one)))


def same_run(server: Coordinator, root: Path, sim: Simulation) -> None:
    """A deployment came to what a simulation came to: tensors everywhere, bytes, cost, rows."""
    same_state(server, root, sim)
    mine, theirs = server.state.totals, sim.totals
    assert (mine.up_bytes, mine.down_bytes) == (theirs.up_bytes, theirs.down_bytes)
    for n in ("paper_bytes", "flops", "dense_flops"):
        assert math.isclose(getattr(mine, n), getattr(theirs, n), rel_tol=1e-12), n
    rows = server.results.rows()
    assert len(rows) == len(sim.rows)
    for row, wanted in zip(rows, rows_of(sim), strict=True):
        apart = {k: (row.get(k), wanted.get(k)) for k in row | wanted if not alike(row.get(k), wanted.get(k))}
        assert not apart, (row["round"], apart)
