"""Ways to divide a data set over clients: labels and a generator in, index lists out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Parts:
    """Who holds which rows, and what is worth reporting about how it came about."""

    rows: list[Indices]
    notes: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Ask:
    """What a partition is asked for; a rule looks at what it needs."""

    labels: NDArray[np.int64]
    classes: int
    num_clients: int  # 0: as many as there are (natural)
    alpha: float
    classes_per_client: int
    clients: NDArray[np.int64] | None
    rng: np.random.Generator

    @property
    def least(self) -> int:
        """The fewest samples a client may have: 40 (10 test samples at a quarter), or half the average if less."""
        return max(2, int(min(10 / 0.25, len(self.labels) / self.num_clients / 2)))


def iid(ask: Ask) -> Parts:
    """Shuffle and deal equally."""
    order = ask.rng.permutation(len(ask.labels))
    return Parts([np.sort(p) for p in np.array_split(order, ask.num_clients)])


def dirichlet(ask: Ask) -> Parts:
    """Deal each class by its own Dirichlet(alpha) vector over clients.

    As DM-PFL's comparison code: a client that already holds its fair share gets nothing of later
    classes. Departure: where that code draws again until every client has `least` samples, which
    may never happen, clients below it take samples from the largest holders.
    """
    total = len(ask.labels)
    fair = total / ask.num_clients
    held = np.zeros(ask.num_clients, np.int64)
    rows: list[list[Indices]] = [[] for _ in range(ask.num_clients)]
    for k in range(ask.classes):
        mine = ask.rng.permutation(np.flatnonzero(ask.labels == k))
        if not len(mine):
            continue
        shares = ask.rng.dirichlet(np.full(ask.num_clients, ask.alpha)) * (held < fair)
        if shares.sum() <= 0:  # all of the class would go to clients that are full
            shares = (held < fair).astype(float)
        ends = np.cumsum(shares)
        cuts = (ends / ends[-1] * len(mine)).astype(int)[:-1]
        for client, part in enumerate(np.split(mine, cuts)):
            rows[client].append(part)
            held[client] += len(part)
    return _top_up([np.concatenate(r) for r in rows], ask)


def _top_up(rows: list[Indices], ask: Ask) -> Parts:
    """Let clients below the least take samples from the largest holders, one of the holder's classes at a time."""
    counts = np.array([np.bincount(ask.labels[r], minlength=ask.classes) for r in rows])  # [clients, K]
    moved = 0
    for needy in np.flatnonzero(counts.sum(1) < ask.least):
        while (need := ask.least - int(counts[needy].sum())) > 0:
            sizes = counts.sum(1)
            donor = int(sizes.argmax())
            k = int(counts[donor].argmax())
            take = min(need, int(counts[donor, k]), int(sizes[donor]) - ask.least)
            pool = rows[donor][ask.labels[rows[donor]] == k]
            gone = ask.rng.choice(pool, take, replace=False)
            rows[donor] = np.setdiff1d(rows[donor], gone)
            rows[needy] = np.concatenate([rows[needy], gone])
            counts[donor, k] -= take
            counts[needy, k] += take
            moved += take
    return Parts([np.sort(r) for r in rows], {"samples_moved": moved})


def pathological(ask: Ask) -> Parts:
    """A few classes per client, neighbours in groups of the same classes, quantities skewed.

    As DM-PFL's comparison code: class by class, the first clients with a free place hold it; all of them but
    the last get between a tenth of the average and the average, the last gets the rest.
    """
    if ask.num_clients * ask.classes_per_client < ask.classes:
        raise ValueError(
            f"pathological: {ask.num_clients} clients x {ask.classes_per_client} classes cannot hold "
            f"the data's {ask.classes} classes; use more of either"
        )
    places = np.full(ask.num_clients, ask.classes_per_client)
    rows: list[list[Indices]] = [[] for _ in range(ask.num_clients)]
    for k in range(ask.classes):
        holders = -(-int(places.sum()) // (ask.classes - k))  # the same for every class where it divides evenly
        free = np.flatnonzero(places > 0)[:holders]
        mine = ask.rng.permutation(np.flatnonzero(ask.labels == k))
        average = len(mine) / len(free)
        low = max(1, int(average / 10))
        sizes = ask.rng.integers(low, max(low + 1, int(average)), len(free) - 1)
        for client, part in zip(free, np.split(mine, np.cumsum(sizes)), strict=True):
            rows[client].append(part)
            places[client] -= 1
    return Parts([np.sort(np.concatenate(r)) for r in rows])


def natural(ask: Ask) -> Parts:
    """The clients the data came from; those with fewer than four samples are left out."""
    if ask.clients is None:
        raise ValueError(
            "partition='natural': this data set has no natural clients; try dirichlet, pathological or iid"
        )
    order = np.argsort(ask.clients, kind="stable")
    groups = np.split(order, np.flatnonzero(np.diff(ask.clients[order])) + 1)
    usable = [g.astype(np.int64) for g in groups if len(g) >= 4]
    if ask.num_clients > len(usable):
        raise ValueError(f"num_clients={ask.num_clients}: the data set has {len(usable)} natural clients")
    if ask.num_clients:
        usable = [usable[i] for i in np.sort(ask.rng.choice(len(usable), ask.num_clients, replace=False))]
    return Parts(usable, {"clients_left_out": len(groups) - len(usable)})


@dataclass(frozen=True)
class Rule:
    """A partition `personafl list partitions` shows, and the settings it uses."""

    make: Callable[[Ask], Parts]
    uses: frozenset[str]
    summary: str


PARTITIONS: dict[str, Rule] = {
    "iid": Rule(iid, frozenset({"num_clients"}), "shuffled and dealt equally"),
    "dirichlet": Rule(
        dirichlet, frozenset({"num_clients", "alpha"}), "each class dealt by a Dirichlet(alpha) draw over clients"
    ),
    "pathological": Rule(
        pathological,
        frozenset({"num_clients", "classes_per_client"}),
        "few classes per client, in groups, quantities skewed",
    ),
    "natural": Rule(natural, frozenset({"num_clients"}), "the clients the data came from"),
}


def partition(name: str, ask: Ask) -> Parts:
    """Divide by a named rule, with the checks common to all."""
    if ask.num_clients < 1 and name != "natural":
        raise ValueError(f"num_clients={ask.num_clients}: must be at least 1")
    if ask.num_clients > len(ask.labels) // 2:
        raise ValueError(
            f"num_clients={ask.num_clients}: the data set has {len(ask.labels)} samples, two are needed per client"
        )
    return PARTITIONS[name].make(ask)
