"""Ways to divide a data set over clients, by name: labels and a generator in, index lists out.

`partitioner.py` has what a partition is asked and answers, and how it declares its settings.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from personafl.core.errors import UserError
from personafl.data.partition.by_attribute import by_class, by_source, natural
from personafl.data.partition.classes import classes, dominant, pathological, shards
from personafl.data.partition.dirichlet import dirichlet, dirichlet_client, grouped, quantity
from personafl.data.partition.iid import iid
from personafl.data.partition.partitioner import Partitioner, PartitionRequest, PartitionResult, Setting
from personafl.data.ragged import Indices, Ragged

__all__ = [
    "PARTITIONS",
    "PartitionRequest",
    "PartitionResult",
    "Partitioner",
    "Setting",
    "deal_test_parts",
    "declared_settings",
    "knows_clients",
    "partition",
    "partition_train",
    "partition_train_and_test",
]

PARTITIONS: dict[str, Partitioner] = {
    "iid": iid,
    "dirichlet": dirichlet,
    "dirichlet-client": dirichlet_client,
    "grouped": grouped,
    "pathological": pathological,
    "classes": classes,
    "shards": shards,
    "quantity": quantity,
    "dominant": dominant,
    "natural": natural,
    "by-class": by_class,
    "by-source": by_source,
}
"""What `data.partition` may name; the keywords of each are settings of `[data]`."""


def declared_settings(name: str = "") -> dict[str, Setting]:
    """The settings of all partitions, each as the named one declares it or else as the first that does."""
    out: dict[str, Setting] = {}
    for found in (*([PARTITIONS[name]] if name in PARTITIONS else []), *PARTITIONS.values()):
        out = found.settings | out
    return out


def knows_clients(name: object) -> bool:
    """Whether a partition takes the clients the data say they have."""
    return isinstance(name, str) and name in PARTITIONS and PARTITIONS[name].knows_clients


def deal_test_parts() -> list[str]:
    """The partitions that may deal a test part too."""
    return [name for name, found in PARTITIONS.items() if found.deals_test_part]


def partition(name: str, request: PartitionRequest, **settings: Any) -> PartitionResult:
    """Divide by a named partition."""
    return PARTITIONS[name](request, **settings)


def partition_train(name: str, request: PartitionRequest, test: NDArray[np.bool_], **settings: Any) -> PartitionResult:
    """Divide the training rows and leave a test part to nobody."""
    train = np.flatnonzero(~test)
    found = partition(name, request.subset(train, "training part"), **settings)
    return PartitionResult(_among(train, found.rows), found.notes)


def partition_train_and_test(
    name: str, request: PartitionRequest, test: NDArray[np.bool_], **settings: Any
) -> tuple[PartitionResult, Sequence[Indices]]:
    """Divide the training rows by one of `deal_test_parts`, and the test rows so that clients have the same classes.

    Natural clients that lack either part are left out.
    """
    if name == "natural":
        return _natural_both(request, test)
    train, tests = np.flatnonzero(~test), np.flatnonzero(test)
    if not np.array_equal(np.unique(request.labels[train]), np.unique(request.labels[tests])):
        raise UserError("data.official_test='dealt': the training and the test part have different classes")
    first = partition(name, request.subset(train, "training part"), **settings)
    second = partition(name, request.subset(tests, "test part", len(first.rows[0])), **settings)
    left_out = {n: first.notes[n] + second.notes.get(n, 0) for n in first.notes}
    return PartitionResult(_among(train, first.rows), left_out), _among(tests, second.rows)


def _natural_both(request: PartitionRequest, test: NDArray[np.bool_]) -> tuple[PartitionResult, Sequence[Indices]]:
    """Natural clients with rows in both parts."""
    if request.clients is None:
        natural(request)  # says so
    ids = np.asarray(request.clients)
    both = np.intersect1d(ids[test & (ids >= 0)], ids[~test])
    if not len(both):
        raise UserError("data.official_test='dealt': no natural client has both training and test samples")
    rows = np.flatnonzero(np.isin(ids, both))
    found = natural(request.subset(rows))
    lacking = len(np.unique(ids[ids >= 0])) - len(both)
    notes = {"clients_left_out": found.notes["clients_left_out"] + lacking}
    held = [rows[r] for r in found.rows]
    return PartitionResult([r[~test[r]] for r in held], notes), [r[test[r]] for r in held]


def _among(chosen: Indices, parts: Sequence[Indices]) -> Ragged:
    """The rows of a data set that places among chosen ones stand for."""
    rows = Ragged.of(parts)
    return Ragged(torch.from_numpy(chosen)[rows.values], rows.offsets)
