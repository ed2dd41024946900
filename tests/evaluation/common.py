"""Images, a model and runs that tests of several evaluations share."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from personafl import (
    Algorithm,
    Ditto,
    DMPFLPlus,
    Evaluation,
    Federation,
    LocalOnly,
    Machine,
    Simulation,
    Source,
    StackedModel,
)
from personafl.experiment import Client
from tests import worlds

SIZES = (37, 8, 21, 14, 4, 30)  # a quarter of each is for testing: 9, 2, 5, 4, 1, 8


ASKED = Evaluation(
    eval_every=100,
    draws=2,
    degrees=(0.5, 1.0),
    corruptions=("all",),
    severities=(1, 5),
    rotations=(-20.0, 0.0, 90.0),
    matrix=True,
)


def federation(channels: int = 1, as_bytes: bool = False) -> Federation:
    """Images of three classes, each a bright band somewhere in noise."""
    draw = torch.Generator().manual_seed(0)
    rows = sum(SIZES)
    y = torch.randint(3, (rows,), generator=draw)
    x = torch.rand(rows, channels, 8, 8, generator=draw) * 0.7
    for i, k in enumerate(y.tolist()):
        x[i, :, 2 * k : 2 * k + 3] += 0.25
    source = Source("bands", (x * 255).to(torch.uint8) if as_bytes else x, y, 3)
    return Federation.build(source, np.split(np.arange(rows), np.cumsum(SIZES)[:-1]), seed=0)


class Flat(nn.Module):
    """One hidden layer over all pixels; with `norm`, statistics of the batch."""

    def __init__(self, channels: int = 1, norm: bool = False) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(channels * 64, 10), nn.Linear(10, 3)
        self.norm = nn.BatchNorm1d(10) if norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.first(x.flatten(1))).relu())  # type: ignore[no-any-return]


def played(
    algorithm: Algorithm,
    fed: Federation | None = None,
    *,
    evaluation: Evaluation = ASKED,
    norm: bool = False,
    chunk: int = 0,
) -> Simulation:
    fed = fed or federation()
    channels = fed.source.x.shape[1]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = Flat(channels, norm)
    model = StackedModel(module, torch.rand(2, channels, 8, 8), policy="drop" if norm else "average")
    training = worlds.training(num_rounds=4, lr=0.3)
    sim = Simulation(fed, model, algorithm, training, evaluation, machine=Machine(chunk=chunk))
    sim.run()
    return sim


def own_rows(sim: Simulation, client: int) -> Tensor:
    return sim.federation.examples("test", torch.tensor([client])).rows[0]


def accuracy(sim: Simulation, client: int, images: Tensor, labels: Tensor) -> float:
    """Of a client's model on images shown one by one."""
    mine = Client(client, sim, sim.deployed_models(sim.model, torch.tensor([client])))
    right = [int(mine.predict(x[None]).argmax()) == int(y) for x, y in zip(images, labels, strict=True)]
    return sum(right) / len(right)


METHODS = [LocalOnly(), Ditto(), DMPFLPlus(iterations=1, allocation="erk")]
