"""A small federation twice: simulated, and played by nodes that answer within the process."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from personafl import Simulation, config
from personafl.deployment.coordinator import Coordinator
from personafl.deployment.messages import Failure, Reply, Request
from personafl.deployment.node import Node
from personafl.deployment.settings import ClientSettings, Deployment
from personafl.experiment import build

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
Spoil = Callable[[int, Request, Callable[[Request], Reply]], Reply | Failure]


def recipe(method: str | dict[str, Any], **changes: Mapping[str, Any]) -> str:
    """The recipe of one method as TOML, with other values in some sections."""
    table = {section: {**RECIPE[section], **changes.get(section, {})} for section in RECIPE}
    entry = {"name": method} if isinstance(method, str) else method
    return config.dump(config.load({**table, "algorithms": [entry]}))


class InProcess:
    """Nodes that answer at once; `spoil` may do something else with a request."""

    def __init__(self, nodes: Mapping[int, Node], spoil: Spoil | None = None) -> None:
        self.held, self.online, self.spoil = dict(nodes), set(nodes), spoil
        self.log: list[tuple[int, Request, Reply | Failure]] = []

    def nodes(self) -> list[int]:
        return sorted(self.online)

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


def deployed(
    text: str, root: Path, count: int = 4, spoil: Spoil | None = None, **settings: Any
) -> tuple[Coordinator, InProcess]:
    """A server and its nodes, ready to run."""
    transport = InProcess(nodes(root, count), spoil)
    made = Deployment(**({"clients": 4} | settings))
    return Coordinator(root / "server-folder", made, text, transport, sleep=lambda s: None), transport


def simulated(text: str) -> Simulation:
    path = Path(tempfile.mkdtemp()) / "recipe.toml"
    path.write_text(text)
    made = config.load(path)
    sim = build.simulation(made, made.algorithms[0])
    sim.run()
    return sim
