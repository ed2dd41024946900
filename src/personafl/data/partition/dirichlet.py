"""Partitions by Dirichlet(alpha) draws: of classes over clients, of clients or groups over classes, of sizes."""

from __future__ import annotations

import heapq
from typing import Annotated

import numpy as np

from personafl.core.errors import UserError
from personafl.data.partition.dealing import collect, cut_by_share
from personafl.data.partition.partitioner import PartitionRequest, PartitionResult, Setting, partitioner
from personafl.data.ragged import Indices, Ragged

Alpha = Annotated[
    float,
    Setting("of the Dirichlet draws; the smaller, the more skewed", "greater than 0", lambda v: v > 0),
]
SelfBalancing = Annotated[
    bool, Setting("whether a client that has its fair share of all samples gets nothing of later classes")
]

Groups = Annotated[
    tuple[int, ...],
    Setting(
        "how many clients each group has, in the order of clients; empty: five groups, as equal as can be",
        "at least 1 each",
        lambda v: min(v, default=1) >= 1,
    ),
]
GlobalGroups = Annotated[
    int, Setting("how many of the first groups have the classes of all data", "at least 0", lambda v: v >= 0)
]


@partitioner()
def dirichlet(
    request: PartitionRequest, *, alpha: Alpha = 0.3, self_balancing: SelfBalancing = True
) -> PartitionResult:
    """Deal each class by its own Dirichlet(alpha) vector over clients (DM-PFL, FedPeWS).

    As DM-PFL's comparison code: a client that already holds its fair share gets nothing of later
    classes. The paper's text (Appendix A.1.3) has no such limit: `self_balancing = false`. Departure: where
    that code draws again until every client has `least` samples, which may never happen, clients
    below it take samples from the largest holders.
    """
    total = len(request.labels)
    fair = total / request.num_clients
    held = np.zeros(request.num_clients, np.int64)
    flat, sizes = [], []
    for k in np.unique(request.labels):
        mine = request.rng.permutation(np.flatnonzero(request.labels == k))
        open_to = held < fair if self_balancing else np.ones(request.num_clients, np.bool_)
        shares = request.rng.dirichlet(np.full(request.num_clients, alpha)) * open_to
        if shares.sum() <= 0:  # all of the class would go to clients that are full
            shares = open_to.astype(float)
        flat.append(mine)
        sizes.append(cut_by_share(shares, len(mine)))
        held += sizes[-1]
    return _top_up(collect(flat, sizes), request)


@partitioner()
def dirichlet_client(request: PartitionRequest, *, alpha: Alpha = 0.3) -> PartitionResult:
    """Give each client a Dirichlet(alpha) vector over classes and deal classes in proportion (FedPHP's code).

    As FedRepo: vectors of clients, normalised over clients class by class. Departures: no sample is
    lost by rounding, and clients that code leaves out for having fewer than five samples take some as in `dirichlet`.
    """
    present = np.unique(request.labels)
    wanted = request.rng.dirichlet(np.full(len(present), alpha), request.num_clients)  # [clients, classes]
    flat, sizes = [], []
    for k, shares in zip(present, wanted.T, strict=True):
        flat.append(request.rng.permutation(np.flatnonzero(request.labels == k)))
        sizes.append(cut_by_share(shares if shares.sum() > 0 else np.ones_like(shares), len(flat[-1])))
    return _top_up(collect(flat, sizes), request)


@partitioner()
def grouped(
    request: PartitionRequest, *, groups: Groups = (), alpha: Alpha = 0.3, global_groups: GlobalGroups = 0
) -> PartitionResult:
    """Give each group of clients a Dirichlet(alpha) vector over classes, alike for its members (DM-PFL's Fig. 6).

    The first `global_groups` have the classes of all data instead: of each class a client gets its equal part, and
    what is left goes to the other groups' clients in proportion to their vectors. Nobody has fewer than `least`
    samples, as in `dirichlet`.
    """
    count = request.num_clients
    members = groups or tuple(len(part) for part in np.array_split(np.arange(count), min(5, count)))
    if sum(members) != count:
        raise UserError(f"grouped: groups={list(groups)}: {sum(members)} clients in all, but num_clients={count}")
    if global_groups > len(members):
        raise UserError(f"grouped: global_groups={global_groups}: there are {len(members)} groups; use at most that")
    present = np.unique(request.labels)
    wanted = np.repeat(request.rng.dirichlet(np.full(len(present), alpha), len(members)), members, axis=0)
    first = sum(members[:global_groups])
    if first < count:  # [clients, classes], as shares of a class
        wanted[:, wanted[first:].sum(0) <= 0] = 1  # a class that is in no vector
        wanted[first:] *= (1 - first / count) / wanted[first:].sum(0)
    wanted[:first] = 1 / count
    flat = [request.rng.permutation(np.flatnonzero(request.labels == k)) for k in present]
    sizes = [cut_by_share(shares, len(mine)) for shares, mine in zip(wanted.T, flat, strict=True)]
    return _top_up(collect(flat, sizes), request)


@partitioner(needs_classes=False)
def quantity(request: PartitionRequest, *, alpha: Alpha = 0.3) -> PartitionResult:
    """Labels as in the whole, sizes by one Dirichlet(alpha) draw.

    Clients that would have fewer than `least` samples have that many, at the cost of what others have above it.
    """
    total = len(request.labels)
    above = request.rng.dirichlet(np.full(request.num_clients, alpha)) * total - request.least
    room = total - request.num_clients * request.least
    lifted = int((above < 0).sum())
    above = above.clip(min=0)
    extra = above * (room / above.sum()) if room else np.zeros(request.num_clients)
    ends = np.cumsum(extra).astype(np.int64) + request.least * np.arange(1, request.num_clients + 1)
    ends[-1] = total
    return PartitionResult(
        Ragged.cut(request.rng.permutation(total), np.diff(ends, prepend=0)).sorted(), {"clients_lifted": lifted}
    )


def _top_up(rows: Ragged, request: PartitionRequest) -> PartitionResult:
    """Let clients below the least take samples from the largest holders, one of the holder's classes at a time."""
    sizes, moved = rows.sizes, 0
    changed: dict[int, Indices] = {}
    largest = [(-n, c) for c, n in enumerate(sizes.tolist())]  # with outdated entries
    heapq.heapify(largest)
    for needy in np.flatnonzero(sizes < request.least).tolist():
        while (need := request.least - int(sizes[needy])) > 0:
            while -largest[0][0] != sizes[largest[0][1]]:
                heapq.heappop(largest)
            donor = largest[0][1]
            held = changed.get(donor, rows[donor])
            labels = request.labels[held]
            counts = np.bincount(labels)
            k = int(counts.argmax())
            take = min(need, int(counts[k]), int(sizes[donor]) - request.least)
            gone = request.rng.choice(held[labels == k], take, replace=False)
            changed[donor] = np.setdiff1d(held, gone)
            changed[needy] = np.concatenate([changed.get(needy, rows[needy]), gone])
            sizes[[donor, needy]] += (-take, take)
            for c in (donor, needy):
                heapq.heappush(largest, (-int(sizes[c]), c))
            moved += take
    if changed:
        rows = Ragged.of([changed.get(c, own) for c, own in enumerate(rows)])
    return PartitionResult(rows.sorted(), {"samples_moved": moved})
