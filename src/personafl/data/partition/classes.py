"""Partitions by `classes_per_client`: a few classes per client, or a few that dominate."""

from __future__ import annotations

from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from personafl.core.errors import UserError
from personafl.data.partition.dealing import collect, cut_by_share, share_equally
from personafl.data.partition.partitioner import PartitionRequest, PartitionResult, Setting, partitioner
from personafl.data.ragged import Indices

ClassesPerClient = Annotated[int, Setting("how many classes a client holds", "at least 1", lambda v: v >= 1)]
HalfHeldBy = Annotated[
    float,
    Setting(
        "of a class's clients, the share that hold half of it (DM-PFL's text: 0.1); 0: the last has the rest",
        "in [0, 1)",
        lambda v: 0 <= v < 1,
    ),
]
SamplesPerClass = Annotated[
    int, Setting("the most a client keeps of each of its classes; 0: all", "0 (all) or more", lambda v: v >= 0)
]
TestSamplesPerClass = Annotated[
    int,
    Setting("the same of a test part that is dealt", "0 (all) or more", lambda v: v >= 0, of_test_part=True),
]
SamplesPerClient = Annotated[
    int,
    Setting("what each client gets; 0: 600, or fewer as fits", "0 (as fits) or more", lambda v: v >= 0),
]
TestSamplesPerClient = Annotated[
    int,
    Setting(
        "the same of a test part that is dealt; 0: half of those for training, or fewer as fits",
        "0 (half, or as fits) or more",
        lambda v: v >= 0,
        of_test_part=True,
    ),
]
UniformShare = Annotated[
    float, Setting("of a client's samples, over all classes alike", "in [0, 1]", lambda v: 0 <= v <= 1)
]


@partitioner()
def pathological(
    request: PartitionRequest, *, classes_per_client: ClassesPerClient = 2, half_held_by: HalfHeldBy = 0.0
) -> PartitionResult:
    """A few classes per client, neighbours in groups of the same classes, quantities skewed (DM-PFL).

    As DM-PFL's comparison code: class by class, the first clients with a free place hold it; all of them but
    the last get between a tenth of the average and the average, the last gets the rest. The last of each of its five
    groups, one client in twenty, so has about half of its group's samples. The paper's text (Appendix A.1.3) says one
    in ten: with `half_held_by = 0.1` the last tenth of a class's clients, at least one, hold half of it and the others
    the other half, both in uniform quantities of which none is ten times another.
    """
    _check_places("pathological", request, classes_per_client, request.classes)
    places = np.full(request.num_clients, classes_per_client)
    rows: list[list[Indices]] = [[] for _ in range(request.num_clients)]
    for k in range(request.classes):
        holders = -(-int(places.sum()) // (request.classes - k))  # the same for every class where it divides evenly
        free = np.flatnonzero(places > 0)[:holders]
        mine = request.rng.permutation(np.flatnonzero(request.labels == k))
        if half_held_by and len(free) > 1:
            sizes = _halves(len(mine), len(free), half_held_by, request.rng)[:-1]
        else:
            average = len(mine) / len(free)
            low = max(1, int(average / 10))
            sizes = request.rng.integers(low, max(low + 1, int(average)), len(free) - 1)
        for client, part in zip(free, np.split(mine, np.cumsum(sizes)), strict=True):
            rows[client].append(part)
            places[client] -= 1
    return PartitionResult([np.sort(np.concatenate(r)) for r in rows])


@partitioner(deals_test_part=True)
def classes(request: PartitionRequest, *, classes_per_client: ClassesPerClient = 2) -> PartitionResult:
    """A few classes per client, every class with as many clients, and shared equally by them (FedPHP).

    As FedPHP's label split: random orders of the classes behind one another, cut into runs of `classes_per_client`.
    Departure: where a run ends one order and begins the next, the next is drawn so that its classes differ.
    """
    present, run = np.unique(request.labels), classes_per_client
    _check_places("classes", request, classes_per_client, len(present), distinct=True)
    slots: list[int] = []
    while len(slots) < request.num_clients * run:
        begun = slots[len(slots) // run * run :]
        first = request.rng.permutation(np.setdiff1d(present, begun))[: run - len(begun)]
        slots += [*first, *request.rng.permutation(np.setdiff1d(present, first))]
    dealt = np.reshape(slots[: request.num_clients * run], (request.num_clients, run))
    return share_equally(request, request.labels, _count(dealt, present))


@partitioner(deals_test_part=True)
def shards(
    request: PartitionRequest,
    *,
    classes_per_client: ClassesPerClient = 2,
    samples_per_class: SamplesPerClass = 0,
    test_samples_per_class: TestSamplesPerClass = 0,
) -> PartitionResult:
    """A few shards of classes per client, dealt at random (FedSelect, CO-PFL).

    As FedSelect's code, and so CO-PFL's: each class is cut into `classes_per_client * num_clients / classes` shards, a
    shuffled list of them is dealt, and of each at most `samples_per_class` samples are used. Departures: a class dealt
    twice to a client is swapped with another client's, so that its classes differ; where that quotient is no whole
    number, some classes have one shard more. Who holds what is drawn first: the same key gives the same holders on a
    training and a test set.
    """
    present = np.unique(request.labels)
    _check_places("shards", request, classes_per_client, len(present), distinct=True)
    each, more = divmod(request.num_clients * classes_per_client, len(present))
    slots = np.concatenate([np.repeat(present, each), request.rng.permutation(present)[:more]])
    dealt = _count(request.rng.permutation(slots).reshape(request.num_clients, -1), present)
    _swap_repeated(dealt, request.rng)
    return share_equally(
        request, request.labels, dealt, test_samples_per_class if request.is_test else samples_per_class
    )


@partitioner(deals_test_part=True)
def dominant(
    request: PartitionRequest,
    *,
    classes_per_client: ClassesPerClient = 3,
    samples_per_client: SamplesPerClient = 0,
    uniform_share: UniformShare = 0.2,
    test_samples_per_client: TestSamplesPerClient = 0,
) -> PartitionResult:
    """Groups of clients with a few classes that dominate, the rest of all classes alike (FedPAC).

    As FedPAC: with three of ten classes {0,1,2}, {2,3,4}, {4,5,6}, {6,7,8}, {8,9,0}, client by client in turn; of each
    client's 600 samples a share of 0.2 is uniform. Departure: where samples run out, that code uses some again; here
    clients have fewer, or a number that was asked for is refused.
    """
    present, labels = np.unique(request.labels, return_inverse=True)
    run = classes_per_client
    _check_places("dominant", request, classes_per_client, len(present), distinct=True, cover=False)
    groups = max(1, -(-len(present) // max(1, run - 1)))
    have = np.bincount(labels)
    who = np.arange(request.num_clients) % groups
    times = np.bincount(who, minlength=groups)  # clients of each group

    def lacking(each: int) -> NDArray[np.bool_]:
        found: NDArray[np.bool_] = times @ _wanted(each, groups, len(present), run, uniform_share) > have
        return found

    limit = request.train_size // 2 if request.is_test else 600
    most = next((n for n in range(limit, 1, -1) if not lacking(n).any()), 0)
    each = (test_samples_per_client if request.is_test else samples_per_client) or most
    if (short := lacking(each or 2)).any():
        setting = "test_samples_per_client" if request.is_test else "samples_per_client"
        fewer = f"use fewer clients{f', or at most {most} {setting}' if most else ''}"
        raise UserError(
            f"dominant: {request.num_clients} clients x {each or 2} samples need more of class "
            f"{present[short.argmax()]} than the {request.part} has; {fewer}"
        )
    flat = [request.rng.permutation(np.flatnonzero(labels == k)) for k in range(len(present))]
    sizes = _wanted(each, groups, len(present), run, uniform_share)[who].T
    used = [mine[: s.sum()] for mine, s in zip(flat, sizes, strict=True)]
    left_out = len(labels) - request.num_clients * each
    return PartitionResult(collect(used, list(sizes)).sorted(), {"samples_left_out": left_out})


def _check_places(
    name: str,
    request: PartitionRequest,
    classes_per_client: int,
    classes: int,
    *,
    distinct: bool = False,
    cover: bool = True,
) -> None:
    """Refuse numbers of classes per client that leave a class without holder, or a client without enough classes."""
    if cover and request.num_clients * classes_per_client < classes:
        raise UserError(
            f"{name}: {request.num_clients} clients x {classes_per_client} classes cannot hold "
            f"the data's {classes} classes; use more of either"
        )
    if distinct and classes_per_client > classes:
        raise UserError(
            f"{name}: classes_per_client={classes_per_client}: the data have {classes} classes; use at most that"
        )


def _halves(count: int, clients: int, share: float, rng: np.random.Generator) -> Indices:
    """Samples per client: half for the first clients, half for the last `share` of them, each in parts by U(0.1, 1).

    Where there are enough, everybody has one at least.
    """
    last = min(clients - 1, max(1, round(share * clients)))
    out = []
    for members, samples in ((clients - last, count // 2), (last, count - count // 2)):
        least = int(samples >= members)
        out.append(least + cut_by_share(rng.uniform(0.1, 1, members), samples - least * members))
    return np.concatenate(out)


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


def _wanted(each: int, groups: int, classes: int, run: int, uniform_share: float) -> Indices:
    """Samples per group and class `[groups, classes]` of a client that has `each`; last classes take what is left."""
    uniform = int(each * uniform_share)
    out = np.full((groups, classes), uniform // classes)
    out[:, -1] += uniform % classes
    at = (np.arange(groups)[:, None] * max(1, run - 1) + np.arange(run)) % classes
    rest = each - uniform
    for place in range(run):
        out[np.arange(groups), at[:, place]] += rest // run + (rest % run if place == run - 1 else 0)
    return out
