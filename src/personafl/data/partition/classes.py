"""Rules by `classes_per_client`: a few classes per client, or a few that dominate."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from personafl.data.partition.terms import Ask, Parts, behind_one_another, share
from personafl.data.ragged import Indices


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
    return share(ask, ask.labels, _count(dealt, present))


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
    return share(ask, ask.labels, dealt, ask.samples_per_class)


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
    return Parts(behind_one_another(used, list(sizes)).sorted(), {"samples_left_out": left_out})


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


def _count(slots: Indices, groups: Indices) -> Indices:
    """How often each group is dealt to each client, `[groups, clients]`, from clients' slots `[clients, s]`."""
    out = np.zeros((len(groups), len(slots)), np.int64)
    np.add.at(out, (np.searchsorted(groups, slots), np.arange(len(slots))[:, None]), 1)
    return out


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
