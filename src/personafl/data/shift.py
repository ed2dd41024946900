"""Test-time shift: part of a client's test set replaced by somebody else's data.

`donor`: each client draws another client and takes samples of that client's test set. `pool`: the samples
come from all clients' test sets together. At degree p, the first round(p * n) of a client's n test places,
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
from personafl.data.federated import Federation, Ragged

PROTOCOLS = ("donor", "pool", "none")


@dataclass(frozen=True)
class Shift:
    """The draws of a protocol. Per draw and client: where replacements come from, and in which order places go."""

    protocol: str
    rows: list[Ragged]  # per draw: the row that would replace each test place, in the order they are replaced
    places: list[Ragged]  # per draw: the test places in that order
    donors: Tensor  # [draws, clients]; -1 under `pool`

    def digest(self) -> str:
        """A short hash of all draws."""
        h = hashlib.sha256(self.protocol.encode())
        for ragged in (*self.rows, *self.places):
            h.update(ragged.flat.cpu().numpy().tobytes())
        return h.hexdigest()[:16]


def draw(federation: Federation, protocol: str, seed: int, draws: int = 5) -> Shift:
    """Draw the shifted test sets of a run."""
    if protocol not in ("donor", "pool"):
        raise ValueError(f"evaluation.shift={protocol!r}: possible are {', '.join(PROTOCOLS)}")
    test, clients = federation.drawn("test"), federation.num_clients
    if protocol == "donor" and clients < 2:
        raise ValueError("evaluation.shift='donor': one client alone has no donor; use shift='none'")
    flat, first = test.flat.cpu().numpy(), test.first.numpy()
    rows, places = [], []
    donors = np.full((draws, clients), -1)
    for d in range(draws):
        new, order = [], []
        for c in range(clients):
            draw_c = rng.generator(seed, "shift", d, c)
            size = int(first[c + 1] - first[c])
            pool = flat[: first[clients]]  # not of those held out
            if protocol == "donor":
                other = int(draw_c.integers(clients - 1))
                donors[d, c] = other + (other >= c)
                pool = flat[first[donors[d, c]] : first[donors[d, c] + 1]]
            new.append(draw_c.choice(pool, size, replace=len(pool) < size))
            order.append(draw_c.permutation(size))
        rows.append(Ragged.of(new))
        places.append(Ragged.of(order))
    return Shift(protocol, rows, places, torch.from_numpy(donors))


def mixed(own: Tensor, foreign: Tensor, places: Tensor, degree: float) -> Tensor:
    """Scores of one client's shifted test set: `own` at the places kept, `foreign` at those replaced; all `[n]`."""
    count = round(degree * len(own))
    out = own.clone()
    out[places[:count]] = foreign[:count]
    return out
