"""Who takes part in a stage, and who is evaluated: functions of seed and round, the same for every method."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from personafl.core import rng
from personafl.core.types import Stage, Training


class Clients(Protocol):
    """How many clients take part, and how many examples each trains on."""

    @property
    def num_clients(self) -> int: ...

    def train_sizes(self, ids: Tensor) -> Tensor: ...


def largest_first(clients: Clients, ids: Tensor) -> Tensor:
    """These clients by number of training examples, equal ones by id: the order every stack has."""
    ids = ids.sort().values
    return ids[clients.train_sizes(ids).argsort(descending=True, stable=True)]


def cohort(clients: Clients, training: Training, stage: Stage) -> Tensor:
    """The clients of a stage, largest first."""
    count = clients.num_clients
    if stage.who == "nobody":
        return torch.zeros(0, dtype=torch.int64)
    if stage.who == "all":
        return largest_first(clients, torch.arange(count))
    draw = rng.generator(training.seed, "cohort", stage.number)
    return largest_first(clients, torch.from_numpy(draw.choice(count, training.cohort(count), replace=False)))


def evaluated(clients: Clients, training: Training, most: int) -> Tensor:
    """A sample of so many clients, the same in every round, largest first; all where there are no more."""
    count = clients.num_clients
    if most >= count:
        return largest_first(clients, torch.arange(count))
    pick = rng.generator(training.seed, "scored").choice(count, most, replace=False)
    return largest_first(clients, torch.from_numpy(pick))
