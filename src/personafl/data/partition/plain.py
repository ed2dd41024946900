"""Rules that ask for nothing but a number of clients: dealt equally, by class, by source, or as the data came."""

from __future__ import annotations

import numpy as np

from personafl.data.partition.terms import Ask, Parts, share
from personafl.data.ragged import Ragged


def iid(ask: Ask) -> Parts:
    """Shuffle and deal equally."""
    order = ask.rng.permutation(len(ask.labels))
    each, more = divmod(len(order), ask.num_clients)
    return Parts(Ragged.cut(order, each + (np.arange(ask.num_clients) < more)).sorted())


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
    return share(ask, ask.labels, (turn[:, None] == np.arange(ask.num_clients)).astype(np.int64))


def by_source(ask: Ask) -> Parts:
    """One client per source of a mixed data set (FedPeWS), or several that share a source equally, in turn."""
    if ask.sources is None:
        raise ValueError("partition='by-source': this data set has one source; try by-class, dirichlet or iid")
    count = len(np.unique(ask.sources))
    clients = ask.num_clients or count
    if clients < count:
        raise ValueError(f"num_clients={clients}: the data set has {count} sources, use at least as many clients")
    held = np.arange(count)[:, None] == np.arange(clients) % count
    return share(ask, ask.sources, held.astype(np.int64))


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
