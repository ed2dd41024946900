"""Partitions by what each example says of itself: its class, its source, or its client."""

from __future__ import annotations

import numpy as np

from personafl.core.errors import UserError
from personafl.data.partition.dealing import share_equally
from personafl.data.partition.partitioner import PartitionRequest, PartitionResult, partitioner


@partitioner(deals_test_part=True)
def by_class(request: PartitionRequest) -> PartitionResult:
    """Whole classes dealt in turn, without overlap (FedPeWS).

    As there: even and odd classes for two clients, one class each for as many clients as classes, and its NOC.
    """
    present = np.unique(request.labels)
    if request.num_clients > len(present):
        raise UserError(
            f"by-class: {request.num_clients} clients cannot share {len(present)} classes without overlap; "
            f"use at most {len(present)} clients, or classes or shards"
        )
    turn = np.arange(len(present)) % request.num_clients
    return share_equally(request, request.labels, (turn[:, None] == np.arange(request.num_clients)).astype(np.int64))


@partitioner(deals_test_part=True, knows_clients=True, needs_classes=False)
def by_source(request: PartitionRequest) -> PartitionResult:
    """One client per source of a mixed data set (FedPeWS), or several that share a source equally, in turn."""
    if request.sources is None:
        raise UserError("partition='by-source': this data set has one source; try by-class, dirichlet or iid")
    count = len(np.unique(request.sources))
    clients = request.num_clients or count
    if clients < count:
        raise UserError(f"num_clients={clients}: the data set has {count} sources, use at least as many clients")
    held = np.arange(count)[:, None] == np.arange(clients) % count
    return share_equally(request, request.sources, held.astype(np.int64))


@partitioner(deals_test_part=True, knows_clients=True, needs_classes=False)
def natural(request: PartitionRequest) -> PartitionResult:
    """The clients the data came from."""
    if request.clients is None:
        raise UserError("partition='natural': this data set has no natural clients; try dirichlet, pathological or iid")
    order = np.argsort(request.clients, kind="stable").astype(np.int64)
    order = order[request.clients[order] >= 0]
    groups = np.split(order, np.flatnonzero(np.diff(request.clients[order])) + 1)
    chosen = groups
    if request.num_clients > len(groups):
        raise UserError(f"num_clients={request.num_clients}: the data set has {len(groups)} natural clients")
    if request.num_clients:
        chosen = [groups[i] for i in np.sort(request.rng.choice(len(groups), request.num_clients, replace=False))]
    return PartitionResult(chosen, {"clients_left_out": len(groups) - len(chosen)})
