"""What a partition rule is asked and what it answers, and two ways to deal that several rules have in common."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from personafl.data.ragged import Indices, Ragged


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


def behind_one_another(flat: list[Indices], sizes: list[Indices]) -> Ragged:
    """Clients' runs of every class, class behind class."""
    who = np.concatenate([np.repeat(np.arange(len(s)), s) for s in sizes])
    return Ragged.cut(np.concatenate(flat)[np.argsort(who, kind="stable")], np.sum(sizes, 0))


def share(ask: Ask, kinds: NDArray[np.int64], held: Indices, most: int = 0) -> Parts:
    """Share the samples of each kind equally among its holders `[kinds, clients]`; each keeps `most` of it, or all."""
    rows: list[list[Indices]] = [[] for _ in range(held.shape[1])]
    for kind, holders in zip(np.unique(kinds), held, strict=True):
        mine = ask.rng.permutation(np.flatnonzero(kinds == kind))
        who = np.flatnonzero(holders)
        for client, part in zip(who, np.array_split(mine, len(who)), strict=True):
            rows[client].append(part[: most or None])
    left_out = len(kinds) - sum(len(p) for r in rows for p in r)
    return Parts([np.sort(np.concatenate(r)) for r in rows], {"samples_left_out": left_out} if most else {})
