"""Who takes part in a stage, and who is evaluated: functions of seed and round, the same for every method."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
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
    return _by_size(clients, np.sort(ids.numpy()))


def _by_size(clients: Clients, rising: NDArray[np.int64]) -> Tensor:
    """The same of clients by rising id; with NumPy, which takes a fraction of PyTorch's time over few."""
    sizes = clients.train_sizes(torch.from_numpy(rising)).numpy()
    return torch.from_numpy(rising[np.argsort(-sizes, kind="stable")])


def cohort(clients: Clients, training: Training, stage: Stage) -> Tensor:
    """The clients of a stage, largest first."""
    count = clients.num_clients
    if stage.who == "nobody":
        return torch.zeros(0, dtype=torch.int64)
    size = count if stage.who == "all" else training.cohort(count)
    if size == count:  # nothing to draw
        return _by_size(clients, np.arange(count))
    draw = rng.generator(training.seed, "cohort", stage.number)
    return _by_size(clients, np.sort(draw.choice(count, size, replace=False)))


def evaluated(clients: Clients, training: Training, most: int) -> Tensor:
    """A sample of so many clients, the same in every round, largest first; all where there are no more."""
    count = clients.num_clients
    if most >= count:
        return _by_size(clients, np.arange(count))
    return _by_size(clients, np.sort(rng.generator(training.seed, "scored").choice(count, most, replace=False)))
