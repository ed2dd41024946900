"""Who takes part in a stage, and who is evaluated: functions of seed and round, the same for every method."""

from __future__ import annotations

import torch
from torch import Tensor

from personafl.core import rng
from personafl.core.types import Stage, Training
from personafl.data.federated import Federation


def largest_first(federation: Federation, ids: Tensor) -> Tensor:
    """These clients by number of training examples, equal ones by id: the order every stack has."""
    ids = ids.sort().values
    sizes = federation.splits["train"].lengths(ids)
    return ids[sizes.argsort(descending=True, stable=True)]


def cohort(federation: Federation, training: Training, stage: Stage) -> Tensor:
    """The clients of a stage, largest first."""
    clients = federation.num_clients
    if stage.who == "nobody":
        return torch.zeros(0, dtype=torch.int64)
    if stage.who == "all":
        return largest_first(federation, torch.arange(clients))
    draw = rng.generator(training.seed, "cohort", stage.number)
    return largest_first(federation, torch.from_numpy(draw.choice(clients, training.cohort(clients), replace=False)))


def evaluated(federation: Federation, training: Training, count: int) -> Tensor:
    """A sample of so many clients, the same in every round, largest first; all where there are no more."""
    clients = federation.num_clients
    if count >= clients:
        return largest_first(federation, torch.arange(clients))
    pick = rng.generator(training.seed, "scored").choice(clients, count, replace=False)
    return largest_first(federation, torch.from_numpy(pick))
