"""Ways to divide a data set over clients: labels and a generator in, index lists out.

Here are the rules by name and how one is used; `terms` has what they are asked and answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from personafl.data.partition import classes, dirichlet, plain
from personafl.data.partition.terms import Ask, Parts
from personafl.data.ragged import Indices, Ragged

__all__ = [
    "KNOW_THEIR_CLIENTS",
    "PARTITIONS",
    "REPEATED",
    "Ask",
    "Parts",
    "Rule",
    "dealt",
    "partition",
    "trained_on",
]


@dataclass(frozen=True)
class Rule:
    """A partition `personafl list partitions` shows, and the settings it uses."""

    make: Callable[[Ask], Parts]
    uses: frozenset[str]
    summary: str
    repeats: bool = False  # asked with the same key, it deals the classes of another set to the same clients


PARTITIONS: dict[str, Rule] = {
    "iid": Rule(plain.iid, frozenset({"num_clients"}), "shuffled and dealt equally", repeats=True),
    "dirichlet": Rule(
        dirichlet.dirichlet,
        frozenset({"num_clients", "alpha"}),
        "each class dealt by a Dirichlet(alpha) draw over clients",
    ),
    "dirichlet-client": Rule(
        dirichlet.dirichlet_client,
        frozenset({"num_clients", "alpha"}),
        "each client's classes by its own Dirichlet(alpha) draw (FedPHP's code)",
    ),
    "pathological": Rule(
        classes.pathological,
        frozenset({"num_clients", "classes_per_client"}),
        "few classes per client, in groups, quantities skewed",
    ),
    "classes": Rule(
        classes.classes,
        frozenset({"num_clients", "classes_per_client"}),
        "few classes per client, each shared equally by its holders (FedPHP)",
        repeats=True,
    ),
    "shards": Rule(
        classes.shards,
        frozenset({"num_clients", "classes_per_client", "samples_per_class", "test_samples_per_class"}),
        "few shards per client, dealt at random, of limited size (FedSelect, CO-PFL)",
        repeats=True,
    ),
    "quantity": Rule(
        dirichlet.quantity,
        frozenset({"num_clients", "alpha"}),
        "labels as in the whole, sizes by a Dirichlet(alpha) draw",
    ),
    "dominant": Rule(
        classes.dominant,
        frozenset(
            {"num_clients", "classes_per_client", "samples_per_client", "uniform_share", "test_samples_per_client"}
        ),
        "a few classes dominate, the rest is uniform (FedPAC)",
        repeats=True,
    ),
    "natural": Rule(plain.natural, frozenset({"num_clients"}), "the clients the data came from", repeats=True),
    "by-class": Rule(
        plain.by_class,
        frozenset({"num_clients"}),
        "whole classes dealt in turn, without overlap (FedPeWS)",
        repeats=True,
    ),
    "by-source": Rule(
        plain.by_source, frozenset({"num_clients"}), "the data sets a mixed one was made of (FedPeWS)", repeats=True
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


def trained_on(name: str, ask: Ask, test: NDArray[np.bool_]) -> Parts:
    """Divide the training rows by a named rule and leave a test part to nobody."""
    train = np.flatnonzero(~test)
    found = partition(name, ask.of(train, "training part"))
    return Parts(_among(train, found.rows), found.notes)


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


def _natural_both(ask: Ask, test: NDArray[np.bool_]) -> tuple[Parts, Sequence[Indices]]:
    """Natural clients with rows in both parts."""
    if ask.clients is None:
        plain.natural(ask)  # says so
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


def _among(chosen: Indices, parts: Sequence[Indices]) -> Ragged:
    """The rows of a data set that places among chosen ones stand for."""
    rows = Ragged.of(parts)
    return Ragged(torch.from_numpy(chosen)[rows.values], rows.offsets)
