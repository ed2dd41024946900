"""Ways to divide a data set over clients: labels and a generator in, index lists out."""

from __future__ import annotations

import copy
import dataclasses
import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import overload

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Rows(Sequence[Indices]):
    """The rows of many clients in one array: a million clients are no million arrays."""

    flat: Indices  # [sum of lengths]
    first: Indices  # [clients + 1]

    @classmethod
    def of(cls, parts: Sequence[Indices]) -> Rows:
        if isinstance(parts, Rows):
            return parts
        flat = np.concatenate(parts).astype(np.int64) if len(parts) else np.zeros(0, np.int64)
        return cls.cut(flat, np.array([len(p) for p in parts], np.int64))

    @classmethod
    def cut(cls, flat: Indices, sizes: Indices) -> Rows:
        """An array cut into runs of these sizes."""
        return cls(flat, np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64))

    @property
    def sizes(self) -> Indices:
        return np.diff(self.first)

    def holders(self) -> Indices:
        """The client of each entry of `flat`."""
        return np.repeat(np.arange(len(self)), self.sizes)

    def sorted(self) -> Rows:
        """Each client's rows in rising order."""
        span = int(self.flat.max(initial=0)) + 1
        return Rows(np.sort(self.holders() * span + self.flat) % span, self.first)

    def taken(self, ids: Indices) -> Rows:
        """The rows of these clients, in this order."""
        sizes = self.sizes[ids]
        cut = Rows.cut(self.flat, sizes)
        return Rows(self.flat[np.repeat(self.first[ids] - cut.first[:-1], sizes) + np.arange(cut.first[-1])], cut.first)

    def __len__(self) -> int:
        return len(self.first) - 1

    @overload
    def __getitem__(self, at: int) -> Indices: ...
    @overload
    def __getitem__(self, at: slice) -> Rows: ...
    def __getitem__(self, at: int | slice) -> Indices | Rows:
        if isinstance(at, slice):
            return self.taken(np.arange(len(self))[at])
        place = range(len(self))[at]
        return self.flat[self.first[place] : self.first[place + 1]]

    def __iter__(self) -> Iterator[Indices]:
        return (self.flat[a:b] for a, b in zip(self.first[:-1], self.first[1:], strict=True))


@dataclass(frozen=True)
class Parts:
    """Who holds which rows, and what is worth reporting about how it came about."""

    rows: Sequence[Indices]
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
    samples_per_client: int = 0  # what each client gets (dominant); 0: 600, or fewer where those do not suffice
    uniform_share: float = 0.2  # of it, over all classes alike
    test_samples_per_class: int = 0  # the same for a test part that is dealt; 0: all
    test_samples_per_client: int = 0  # 0: half of what is for training, or fewer where that does not suffice
    most_per_client: int = 600  # where samples_per_client is 0
    part: str = "data set"  # what is divided, in messages

    def of(self, rows: Indices, part: str = "data set") -> Ask:
        """The same asked of these rows only."""
        clients, sources = (None if ids is None else ids[rows] for ids in (self.clients, self.sources))
        draw = copy.deepcopy(self.rng)  # so that asking again gives the same
        return dataclasses.replace(
            self, labels=self.labels[rows], clients=clients, sources=sources, rng=draw, part=part
        )

    def of_test(self, rows: Indices, most: int) -> Ask:
        """The same asked of the rows of a test part, of which a client gets so many unless told."""
        return dataclasses.replace(
            self.of(rows, "test part"),
            samples_per_class=self.test_samples_per_class,
            samples_per_client=self.test_samples_per_client,
            most_per_client=most,
        )

    @property
    def least(self) -> int:
        """The fewest samples a client may have: 40 (10 test samples at a quarter), or half the average if less."""
        return max(2, int(min(10 / 0.25, len(self.labels) / self.num_clients / 2)))


def iid(ask: Ask) -> Parts:
    """Shuffle and deal equally."""
    order = ask.rng.permutation(len(ask.labels))
    each, more = divmod(len(order), ask.num_clients)
    return Parts(Rows.cut(order, each + (np.arange(ask.num_clients) < more)).sorted())


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
    return _top_up(_behind_one_another(flat, sizes), ask)


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
    return _top_up(_behind_one_another(flat, sizes), ask)


def _by_share(shares: NDArray[np.float64], count: int) -> Indices:
    """How many of `count` samples each client gets."""
    ends = np.cumsum(shares)
    cuts = (ends / ends[-1] * count).astype(np.int64)
    cuts[-1] = count
    sizes: Indices = np.diff(cuts, prepend=0)
    return sizes


def _behind_one_another(flat: list[Indices], sizes: list[Indices]) -> Rows:
    """Clients' runs of every class, class behind class."""
    who = np.concatenate([np.repeat(np.arange(len(s)), s) for s in sizes])
    return Rows.cut(np.concatenate(flat)[np.argsort(who, kind="stable")], np.sum(sizes, 0))


def _top_up(rows: Rows, ask: Ask) -> Parts:
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
        rows = Rows.of([changed.get(c, own) for c, own in enumerate(rows)])
    return Parts(rows.sorted(), {"samples_moved": moved})


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


def _check_places(name: str, ask: Ask, classes: int, *, distinct: bool = False, cover: bool = True) -> None:
    """Refuse numbers of classes per client that leave a class without holder, or a client without enough classes."""
    if cover and ask.num_clients * ask.classes_per_client < classes:
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
    ends[-1] = total
    return Parts(Rows.cut(ask.rng.permutation(total), np.diff(ends, prepend=0)).sorted(), {"clients_lifted": lifted})


def dominant(ask: Ask) -> Parts:
    """Groups of clients with a few classes that dominate, the rest of their samples of all classes alike.

    As FedPAC: with three of ten classes {0,1,2}, {2,3,4}, {4,5,6}, {6,7,8}, {8,9,0}, client by client in turn; of each
    client's 600 samples a share of 0.2 is uniform. Departure: where samples run out, that code uses some again; here
    clients have fewer, or a number that was asked for is refused.
    """
    present, labels = np.unique(ask.labels, return_inverse=True)
    run = ask.classes_per_client
    _check_places("dominant", ask, len(present), distinct=True, cover=False)
    groups = max(1, -(-len(present) // max(1, run - 1)))
    have = np.bincount(labels)
    who = np.arange(ask.num_clients) % groups
    times = np.bincount(who, minlength=groups)  # clients of each group

    def lacking(each: int) -> NDArray[np.bool_]:
        found: NDArray[np.bool_] = times @ _wanted(ask, each, groups, len(present)) > have
        return found

    most = next((n for n in range(ask.most_per_client, 1, -1) if not lacking(n).any()), 0)
    each = ask.samples_per_client or most
    if (short := lacking(each or 2)).any():
        setting = "test_samples_per_client" if ask.part == "test part" else "samples_per_client"
        raise ValueError(
            f"dominant: {ask.num_clients} clients x {each or 2} samples need more of class {present[short.argmax()]} "
            f"than the {ask.part} has; use fewer clients{f', or at most {most} {setting}' if most else ''}"
        )
    flat = [ask.rng.permutation(np.flatnonzero(labels == k)) for k in range(len(present))]
    sizes = _wanted(ask, each, groups, len(present))[who].T
    used = [mine[: s.sum()] for mine, s in zip(flat, sizes, strict=True)]
    left_out = len(labels) - ask.num_clients * each
    return Parts(_behind_one_another(used, list(sizes)).sorted(), {"samples_left_out": left_out})


def _wanted(ask: Ask, each: int, groups: int, classes: int) -> Indices:
    """Samples per group and class `[groups, classes]` of a client that has `each`; last classes take what is left."""
    run = ask.classes_per_client
    uniform = int(each * ask.uniform_share)
    out = np.full((groups, classes), uniform // classes)
    out[:, -1] += uniform % classes
    at = (np.arange(groups)[:, None] * max(1, run - 1) + np.arange(run)) % classes
    rest = each - uniform
    for place in range(run):
        out[np.arange(groups), at[:, place]] += rest // run + (rest % run if place == run - 1 else 0)
    return out


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
    "dirichlet-client": Rule(
        dirichlet_client,
        frozenset({"num_clients", "alpha"}),
        "each client's classes by its own Dirichlet(alpha) draw (FedPHP's code)",
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
    "dominant": Rule(
        dominant,
        frozenset(
            {"num_clients", "classes_per_client", "samples_per_client", "uniform_share", "test_samples_per_client"}
        ),
        "a few classes dominate, the rest is uniform (FedPAC)",
        repeats=True,
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
            f"num_clients={ask.num_clients}: the {ask.part} has {len(ask.labels)} samples, two are needed per client"
        )
    return PARTITIONS[name].make(ask)


def dealt(name: str, ask: Ask, test: NDArray[np.bool_]) -> tuple[Parts, Sequence[Indices]]:
    """Divide the training rows by a rule of `REPEATED`, and a test part's rows so that clients have the same classes.

    Natural clients that lack either part are left out.
    """
    if name == "natural":
        return _natural_both(ask, test)
    train, tests = np.flatnonzero(~test), np.flatnonzero(test)
    if not np.array_equal(np.unique(ask.labels[train]), np.unique(ask.labels[tests])):
        raise ValueError("data.official_test='dealt': the training and the test part have different classes")
    first = partition(name, ask.of(train, "training part"))
    second = partition(name, ask.of_test(tests, len(first.rows[0]) // 2))
    left_out = {n: first.notes[n] + second.notes.get(n, 0) for n in first.notes}
    return Parts(_among(train, first.rows), left_out), _among(tests, second.rows)


def _among(chosen: Indices, parts: Sequence[Indices]) -> Rows:
    """The rows of a data set that places among chosen ones stand for."""
    rows = Rows.of(parts)
    return Rows(chosen[rows.flat], rows.first)


def trained_on(name: str, ask: Ask, test: NDArray[np.bool_]) -> Parts:
    """Divide the training rows by a named rule and leave a test part to nobody."""
    train = np.flatnonzero(~test)
    found = partition(name, ask.of(train, "training part"))
    return Parts(_among(train, found.rows), found.notes)


def _natural_both(ask: Ask, test: NDArray[np.bool_]) -> tuple[Parts, Sequence[Indices]]:
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
