"""Rules by Dirichlet(alpha) draws: of classes over clients, of clients over classes, of sizes."""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray

from personafl.data.partition.terms import Ask, Parts, behind_one_another
from personafl.data.ragged import Indices, Ragged


def dirichlet(ask: Ask) -> Parts:
    """Deal each class by its own Dirichlet(alpha) vector over clients.

    As DM-PFL's comparison code: a client that already holds its fair share gets nothing of later
    classes. Departure: where that code draws again until every client has `least` samples, which
    may never happen, clients below it take samples from the largest holders.
    """
    total = len(ask.labels)
    fair = total / ask.num_clients
    held = np.zeros(ask.num_clients, np.int64)
    flat, sizes = [], []
    for k in np.unique(ask.labels):
        mine = ask.rng.permutation(np.flatnonzero(ask.labels == k))
        shares = ask.rng.dirichlet(np.full(ask.num_clients, ask.alpha)) * (held < fair)
        if shares.sum() <= 0:  # all of the class would go to clients that are full
            shares = (held < fair).astype(float)
        flat.append(mine)
        sizes.append(_by_share(shares, len(mine)))
        held += sizes[-1]
    return _top_up(behind_one_another(flat, sizes), ask)


def dirichlet_client(ask: Ask) -> Parts:
    """Deal each class in proportion to what clients want of it, each by its own Dirichlet(alpha) vector over classes.

    As FedPHP's code (FedRepo): vectors of clients, normalised over clients class by class. Departures: no sample is
    lost by rounding, and clients that code leaves out for having fewer than five samples take some as in `dirichlet`.
    """
    present = np.unique(ask.labels)
    wanted = ask.rng.dirichlet(np.full(len(present), ask.alpha), ask.num_clients)  # [clients, classes]
    flat, sizes = [], []
    for k, shares in zip(present, wanted.T, strict=True):
        flat.append(ask.rng.permutation(np.flatnonzero(ask.labels == k)))
        sizes.append(_by_share(shares if shares.sum() > 0 else np.ones_like(shares), len(flat[-1])))
    return _top_up(behind_one_another(flat, sizes), ask)


def quantity(ask: Ask) -> Parts:
    """Labels as in the whole, sizes by one Dirichlet(alpha) draw.

    Clients that would have fewer than `least` samples have that many, at the cost of what others have above it.
    """
    total = len(ask.labels)
    above = ask.rng.dirichlet(np.full(ask.num_clients, ask.alpha)) * total - ask.least
    room = total - ask.num_clients * ask.least
    lifted = int((above < 0).sum())
    above = above.clip(min=0)
    extra = above * (room / above.sum()) if room else np.zeros(ask.num_clients)
    ends = np.cumsum(extra).astype(np.int64) + ask.least * np.arange(1, ask.num_clients + 1)
    ends[-1] = total
    return Parts(Ragged.cut(ask.rng.permutation(total), np.diff(ends, prepend=0)).sorted(), {"clients_lifted": lifted})


def _by_share(shares: NDArray[np.float64], count: int) -> Indices:
    """How many of `count` samples each client gets."""
    ends = np.cumsum(shares)
    cuts = (ends / ends[-1] * count).astype(np.int64)
    cuts[-1] = count
    sizes: Indices = np.diff(cuts, prepend=0)
    return sizes


def _top_up(rows: Ragged, ask: Ask) -> Parts:
    """Let clients below the least take samples from the largest holders, one of the holder's classes at a time."""
    sizes, moved = rows.sizes, 0
    changed: dict[int, Indices] = {}
    largest = [(-n, c) for c, n in enumerate(sizes.tolist())]  # with outdated entries
    heapq.heapify(largest)
    for needy in np.flatnonzero(sizes < ask.least).tolist():
        while (need := ask.least - int(sizes[needy])) > 0:
            while -largest[0][0] != sizes[largest[0][1]]:
                heapq.heappop(largest)
            donor = largest[0][1]
            held = changed.get(donor, rows[donor])
            labels = ask.labels[held]
            counts = np.bincount(labels)
            k = int(counts.argmax())
            take = min(need, int(counts[k]), int(sizes[donor]) - ask.least)
            gone = ask.rng.choice(held[labels == k], take, replace=False)
            changed[donor] = np.setdiff1d(held, gone)
            changed[needy] = np.concatenate([changed.get(needy, rows[needy]), gone])
            sizes[[donor, needy]] += (-take, take)
            for c in (donor, needy):
                heapq.heappush(largest, (-int(sizes[c]), c))
            moved += take
    if changed:
        rows = Ragged.of([changed.get(c, own) for c, own in enumerate(rows)])
    return Parts(rows.sorted(), {"samples_moved": moved})
