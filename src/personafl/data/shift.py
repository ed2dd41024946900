"""Test-time shift: part of a client's test set replaced by somebody else's data.

`donor`: each client draws another client and takes samples of that client's test set. `pool`: the samples
come from all clients' test sets together. `label`: they do, but their classes follow a mix that the client draws,
so that P(y) changes and P(x | y) does not. At degree p, the first round(p * n) of a client's n test places,
in a random order of its own, are replaced, so what is replaced at a small degree is replaced at every
larger one. All methods and degrees of a run see the same draws.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from personafl.core import rng
from personafl.data.federated import Federation, Indices, Ragged

PROTOCOLS = ("donor", "pool", "label", "none")


@dataclass(frozen=True)
class Shift:
    """The draws of a protocol. Per draw and client: where replacements come from, and in which order places go."""

    protocol: str
    rows: list[Ragged]  # per draw: the row that would replace each test place, in the order they are replaced
    places: list[Ragged]  # per draw: the test places in that order
    donors: Tensor  # [draws, clients]; -1 where nobody in particular gives

    @property
    def draws(self) -> int:
        return len(self.donors)

    def of(self, draw: int, client: int) -> tuple[Tensor, Tensor]:
        """The rows that replace a client's samples in a draw, and the places they go to, in that order."""
        rows, places = self.rows[draw], self.places[draw]
        part = slice(int(rows.first[client]), int(rows.first[client + 1]))
        return rows.flat[part], places.flat[part]

    def digest(self) -> str:
        """A short hash of all draws."""
        h = hashlib.sha256(self.protocol.encode())
        for ragged in (*self.rows, *self.places):
            h.update(ragged.flat.cpu().numpy().tobytes())
        return h.hexdigest()[:16]


def draw(federation: Federation, protocol: str, seed: int, draws: int = 5) -> Shift:
    """Draw the shifted test sets of a run."""
    if protocol not in ("donor", "pool", "label"):
        raise ValueError(f"evaluation.shift={protocol!r}: possible are {', '.join(PROTOCOLS)}")
    test, clients = federation.drawn("test"), federation.num_clients
    if protocol == "donor" and clients < 2:
        raise ValueError("evaluation.shift='donor': one client alone has no donor; use shift='none'")
    flat, first = test.flat.cpu().numpy(), test.first.numpy()
    everybody = flat[: first[clients]]  # not those held out
    by_class = _by_class(everybody, federation.source.y.cpu().numpy()) if protocol == "label" else []
    rows, places = [], []
    donors = np.full((draws, clients), -1)
    for d in range(draws):
        new, order = [], []
        for c in range(clients):
            draw_c = rng.generator(seed, "shift", d, c)
            size = int(first[c + 1] - first[c])
            pool = everybody
            if protocol == "donor":
                other = int(draw_c.integers(clients - 1))
                donors[d, c] = other + (other >= c)
                pool = flat[first[donors[d, c]] : first[donors[d, c] + 1]]
            new.append(_choice(draw_c, pool, size) if protocol != "label" else _remixed(draw_c, by_class, size))
            order.append(draw_c.permutation(size))
        rows.append(Ragged.of(new))
        places.append(Ragged.of(order))
    return Shift(protocol, rows, places, torch.from_numpy(donors))


def _by_class(rows: Indices, labels: Indices) -> list[Indices]:
    """Rows of each class there is."""
    return [rows[labels[rows] == k] for k in np.unique(labels[rows])]


def _choice(draw: np.random.Generator, pool: Indices, size: int) -> Indices:
    """So many rows of a pool, none of them twice unless it is too small."""
    return draw.choice(pool, size, replace=len(pool) < size)


def _remixed(draw: np.random.Generator, by_class: list[Indices], size: int) -> Indices:
    """Rows whose classes follow a mix from Dirichlet(1); within a class they are like any other."""
    mix = draw.dirichlet(np.ones(len(by_class)))
    which = draw.choice(len(by_class), size, p=mix)
    out = np.zeros(size, np.int64)
    for k in np.unique(which):
        out[which == k] = _choice(draw, by_class[k], int((which == k).sum()))
    return out


def mixed(own: Tensor, foreign: Tensor, places: Tensor, degree: float) -> Tensor:
    """Scores of one client's shifted test set: `own` at the places kept, `foreign` at those replaced; all `[n]`."""
    count = round(degree * len(own))
    out = own.clone()
    out[places[:count]] = foreign[:count]
    return out
