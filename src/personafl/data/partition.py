"""Ways to divide a data set over clients: labels and a generator in, index lists out."""

from __future__ import annotations

import copy
import dataclasses
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
    num_clients: int  # 0: as many as there are (natural, by-source)
    alpha: float
    classes_per_client: int
    clients: NDArray[np.int64] | None
    rng: np.random.Generator
    sources: NDArray[np.int64] | None = None  # [N] which data set each example came from
    samples_per_class: int = 0  # the most a client keeps of each of its classes (shards); 0: all

    def of(self, rows: Indices) -> Ask:
        """The same asked of these rows only."""
        clients, sources = (None if ids is None else ids[rows] for ids in (self.clients, self.sources))
        draw = copy.deepcopy(self.rng)  # so that asking again gives the same
        return dataclasses.replace(self, labels=self.labels[rows], clients=clients, sources=sources, rng=draw)

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
    sizes, moved = counts.sum(1), 0
    for needy in np.flatnonzero(sizes < ask.least):
        while (need := ask.least - int(sizes[needy])) > 0:
            donor = int(sizes.argmax())
            k = int(counts[donor].argmax())
            take = min(need, int(counts[donor, k]), int(sizes[donor]) - ask.least)
            pool = rows[donor][ask.labels[rows[donor]] == k]
            gone = ask.rng.choice(pool, take, replace=False)
            rows[donor] = np.setdiff1d(rows[donor], gone)
            rows[needy] = np.concatenate([rows[needy], gone])
            counts[donor, k] -= take
            counts[needy, k] += take
            sizes[[donor, needy]] += (-take, take)
            moved += take
    return Parts([np.sort(r) for r in rows], {"samples_moved": moved})


def pathological(ask: Ask) -> Parts:
    """A few classes per client, neighbours in groups of the same classes, quantities skewed.

    As DM-PFL's comparison code: class by class, the first clients with a free place hold it; all of them but
    the last get between a tenth of the average and the average, the last gets the rest.
    """
    _check_places("pathological", ask, ask.classes)
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


def classes(ask: Ask) -> Parts:
    """A few classes per client, every class with as many clients, and shared equally by them.

    As FedPHP's label split: random orders of the classes behind one another, cut into runs of `classes_per_client`.
    Departure: where a run ends one order and begins the next, the next is drawn so that its classes differ.
    """
    present, run = np.unique(ask.labels), ask.classes_per_client
    _check_places("classes", ask, len(present), distinct=True)
    slots: list[int] = []
    while len(slots) < ask.num_clients * run:
        begun = slots[len(slots) // run * run :]
        first = ask.rng.permutation(np.setdiff1d(present, begun))[: run - len(begun)]
        slots += [*first, *ask.rng.permutation(np.setdiff1d(present, first))]
    dealt = np.reshape(slots[: ask.num_clients * run], (ask.num_clients, run))
    return _share(ask, ask.labels, _count(dealt, present))


def shards(ask: Ask) -> Parts:
    """A few shards of classes per client, dealt at random.

    As FedSelect's code, and so CO-PFL's: each class is cut into `classes_per_client * num_clients / classes` shards, a
    shuffled list of them is dealt, and of each at most `samples_per_class` samples are used. Departures: a class dealt
    twice to a client is swapped with another client's, so that its classes differ; where that quotient is no whole
    number, some classes have one shard more. Who holds what is drawn first: the same key gives the same holders on a
    training and a test set.
    """
    present = np.unique(ask.labels)
    _check_places("shards", ask, len(present), distinct=True)
    each, more = divmod(ask.num_clients * ask.classes_per_client, len(present))
    slots = np.concatenate([np.repeat(present, each), ask.rng.permutation(present)[:more]])
    dealt = _count(ask.rng.permutation(slots).reshape(ask.num_clients, -1), present)
    _swap_repeated(dealt, ask.rng)
    return _share(ask, ask.labels, dealt, ask.samples_per_class)


def _swap_repeated(dealt: Indices, rng: np.random.Generator) -> None:
    """Swap slots `[groups, clients]` until nobody has a group twice; every swap leaves fewer repetitions, so this ends.

    The partner lacks the group. It gives one its new owner lacks, or one it has twice itself: of partners without
    repetitions at least two of their groups are new to a client that has one twice.
    """
    while len(repeated := np.argwhere(dealt > 1)):
        for k, client in repeated:
            while dealt[k, client] > 1:
                other = rng.choice(np.flatnonzero(dealt[k] == 0))
                useful = (dealt[:, other] > 0) & ((dealt[:, client] == 0) | (dealt[:, other] > 1))
                back = rng.choice(np.flatnonzero(useful))
                dealt[[k, back], client] += (-1, 1)
                dealt[[k, back], other] += (1, -1)


def _count(slots: Indices, groups: Indices) -> Indices:
    """How often each group is dealt to each client, `[groups, clients]`, from clients' slots `[clients, s]`."""
    out = np.zeros((len(groups), len(slots)), np.int64)
    np.add.at(out, (np.searchsorted(groups, slots), np.arange(len(slots))[:, None]), 1)
    return out


def _share(ask: Ask, kinds: NDArray[np.int64], held: Indices, most: int = 0) -> Parts:
    """Share the samples of each kind equally among its holders `[kinds, clients]`; each keeps `most` of it, or all."""
    rows: list[list[Indices]] = [[] for _ in range(held.shape[1])]
    for kind, holders in zip(np.unique(kinds), held, strict=True):
        mine = ask.rng.permutation(np.flatnonzero(kinds == kind))
        who = np.flatnonzero(holders)
        for client, part in zip(who, np.array_split(mine, len(who)), strict=True):
            rows[client].append(part[: most or None])
    left_out = len(kinds) - sum(len(p) for r in rows for p in r)
    return Parts([np.sort(np.concatenate(r)) for r in rows], {"samples_left_out": left_out} if most else {})


def _check_places(name: str, ask: Ask, classes: int, *, distinct: bool = False) -> None:
    """Refuse numbers of classes per client that leave a class without holder, or a client without enough classes."""
    if ask.num_clients * ask.classes_per_client < classes:
        raise ValueError(
            f"{name}: {ask.num_clients} clients x {ask.classes_per_client} classes cannot hold "
            f"the data's {classes} classes; use more of either"
        )
    if distinct and ask.classes_per_client > classes:
        raise ValueError(
            f"{name}: classes_per_client={ask.classes_per_client}: the data have {classes} classes; use at most that"
        )


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
    parts = np.split(ask.rng.permutation(total), ends[:-1])
    return Parts([np.sort(p) for p in parts], {"clients_lifted": lifted})


def by_class(ask: Ask) -> Parts:
    """Whole classes dealt in turn, none to two clients.

    As FedPeWS: even and odd classes for two clients, one class each for as many clients as classes, and its NOC.
    """
    present = np.unique(ask.labels)
    if ask.num_clients > len(present):
        raise ValueError(
            f"by-class: {ask.num_clients} clients cannot share {len(present)} classes without overlap; "
            f"use at most {len(present)} clients, or classes or shards"
        )
    turn = np.arange(len(present)) % ask.num_clients
    return _share(ask, ask.labels, (turn[:, None] == np.arange(ask.num_clients)).astype(np.int64))


def by_source(ask: Ask) -> Parts:
    """One client per source of a mixed data set (FedPeWS), or several that share a source equally, in turn."""
    if ask.sources is None:
        raise ValueError("partition='by-source': this data set has one source; try by-class, dirichlet or iid")
    count = len(np.unique(ask.sources))
    clients = ask.num_clients or count
    if clients < count:
        raise ValueError(f"num_clients={clients}: the data set has {count} sources, use at least as many clients")
    held = np.arange(count)[:, None] == np.arange(clients) % count
    return _share(ask, ask.sources, held.astype(np.int64))


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
    repeats: bool = False  # asked with the same key, it deals the classes of another set to the same clients


PARTITIONS: dict[str, Rule] = {
    "iid": Rule(iid, frozenset({"num_clients"}), "shuffled and dealt equally", repeats=True),
    "dirichlet": Rule(
        dirichlet, frozenset({"num_clients", "alpha"}), "each class dealt by a Dirichlet(alpha) draw over clients"
    ),
    "pathological": Rule(
        pathological,
        frozenset({"num_clients", "classes_per_client"}),
        "few classes per client, in groups, quantities skewed",
    ),
    "classes": Rule(
        classes,
        frozenset({"num_clients", "classes_per_client"}),
        "few classes per client, each shared equally by its holders (FedPHP)",
        repeats=True,
    ),
    "shards": Rule(
        shards,
        frozenset({"num_clients", "classes_per_client", "samples_per_class", "test_samples_per_class"}),
        "few shards per client, dealt at random, of limited size (FedSelect, CO-PFL)",
        repeats=True,
    ),
    "quantity": Rule(
        quantity, frozenset({"num_clients", "alpha"}), "labels as in the whole, sizes by a Dirichlet(alpha) draw"
    ),
    "natural": Rule(natural, frozenset({"num_clients"}), "the clients the data came from", repeats=True),
    "by-class": Rule(
        by_class, frozenset({"num_clients"}), "whole classes dealt in turn, without overlap (FedPeWS)", repeats=True
    ),
    "by-source": Rule(
        by_source, frozenset({"num_clients"}), "the data sets a mixed one was made of (FedPeWS)", repeats=True
    ),
}

KNOW_THEIR_CLIENTS = frozenset({"natural", "by-source"})
"""Rules that need no `num_clients`."""

REPEATED = tuple(n for n, r in PARTITIONS.items() if r.repeats)
"""Rules that may deal a test part too."""


def partition(name: str, ask: Ask) -> Parts:
    """Divide by a named rule, with the checks common to all."""
    if ask.num_clients < 1 and name not in KNOW_THEIR_CLIENTS:
        raise ValueError(f"num_clients={ask.num_clients}: must be at least 1")
    if ask.num_clients > len(ask.labels) // 2:
        raise ValueError(
            f"num_clients={ask.num_clients}: the data set has {len(ask.labels)} samples, two are needed per client"
        )
    return PARTITIONS[name].make(ask)


def dealt(name: str, ask: Ask, test: NDArray[np.bool_], most: int = 0) -> tuple[Parts, list[Indices]]:
    """Divide the training rows by a rule of `REPEATED`, and a test part's rows so that clients have the same classes.

    `most` is the test part's `samples_per_class`. Natural clients that lack either part are left out.
    """
    if name == "natural":
        return _natural_both(ask, test)
    train, tests = np.flatnonzero(~test), np.flatnonzero(test)
    if not np.array_equal(np.unique(ask.labels[train]), np.unique(ask.labels[tests])):
        raise ValueError("data.official_test='dealt': the training and the test part have different classes")
    first = partition(name, ask.of(train))
    second = partition(name, dataclasses.replace(ask.of(tests), samples_per_class=most))
    left_out = {n: first.notes[n] + second.notes.get(n, 0) for n in first.notes}
    return Parts([train[r] for r in first.rows], left_out), [tests[r] for r in second.rows]


def _natural_both(ask: Ask, test: NDArray[np.bool_]) -> tuple[Parts, list[Indices]]:
    """Natural clients with rows in both parts."""
    if ask.clients is None:
        natural(ask)  # says so
    ids = np.asarray(ask.clients)
    both = np.intersect1d(ids[test], ids[~test])
    if not len(both):
        raise ValueError("data.official_test='dealt': no natural client has both training and test samples")
    rows = np.flatnonzero(np.isin(ids, both))
    found = partition("natural", ask.of(rows))
    lacking = len(np.unique(ids)) - len(both)
    notes = {"clients_left_out": found.notes["clients_left_out"] + lacking}
    held = [rows[r] for r in found.rows]
    return Parts([r[~test[r]] for r in held], notes), [r[test[r]] for r in held]
