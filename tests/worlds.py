"""Small federations and models the tests share."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from personafl import Algorithm, Evaluation, Federation, Simulation, Source, StackedModel, Training
from personafl.core.types import Params, Payload, Round
from personafl.engine.server_round import ServerRound
from personafl.models import CNN, MLP
from personafl.simulation.machine import Machine

SIZES = (37, 8, 21, 14, 4, 30)  # rows per client, three quarters of them for training: 28, 6, 16, 10, 3, 22
QUIET = Evaluation(shift="none", eval_every=10_000)


def federation(kind: str = "mlp", sizes: tuple[int, ...] = SIZES, seed: int = 0) -> Federation:
    """Ragged clients over three separable classes; images for the CNN, vectors for the MLP."""
    draw = torch.Generator().manual_seed(seed)
    rows = sum(sizes)
    shape = (6,) if kind == "mlp" else (1, 8, 8)
    y = torch.randint(3, (rows,), generator=draw)
    x = torch.randn(rows, *shape, generator=draw) + y.view(-1, *[1] * len(shape))
    parts = np.split(np.arange(rows), np.cumsum(sizes)[:-1])
    return Federation.build(Source("toy", x, y, 3), parts, seed)


def module(kind: str = "mlp") -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return MLP(6, 12, 8, 3) if kind == "mlp" else CNN((1, 8, 8), (4, 6), (10,), 3, kernel=3, padding=1)


@functools.cache
def stacked(kind: str, **options: str) -> StackedModel:
    """Made and checked once; a simulation takes a copy, and so does who wants to change it."""
    return StackedModel(module(kind), federation(kind).source.x[:2], **options)  # type: ignore[arg-type]


def model(kind: str = "mlp", **options: str) -> StackedModel:
    return stacked(kind, **options).copy()


def training(**changes: object) -> Training:
    usual = Training(num_rounds=8, join_ratio=0.5, local_epochs=2, batch_size=5, lr=0.1, precision="float64")
    return dataclasses.replace(usual, **changes)  # type: ignore[arg-type]


def simulation(algorithm: Algorithm, kind: str = "mlp", fed: Federation | None = None, **options: object) -> Simulation:
    """A quiet float64 simulation; fields of `Training` and of `Machine` may be changed, and loss, metric and faults."""
    own = {k: options.pop(k) for k in ("criterion", "metric", "faults") if k in options}
    where = {f.name: options.pop(f.name) for f in dataclasses.fields(Machine) if f.name in options}
    evaluation = options.pop("evaluation", QUIET)
    chosen = options.pop("model", None) or stacked(kind)
    return Simulation(
        fed or federation(kind), chosen, algorithm, training(**options), evaluation, machine=Machine(**where), **own
    )  # type: ignore[arg-type]


def watch_uploads(sim: Simulation, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Tensor, Payload, Round]]:
    """The clients, uploads and rounds that reach the server's side of a simulation, as they come."""
    seen: list[tuple[Tensor, Payload, Round]] = []
    reduce = ServerRound.reduce

    def watched(stage: ServerRound, ids: Tensor, upload: Payload) -> Params:
        if stage.records is sim.known:
            seen.append((ids, upload, stage.rnd))
        return reduce(stage, ids, upload)

    monkeypatch.setattr(ServerRound, "reduce", watched)
    return seen
