"""Test-time shift: part of a client's test set replaced by somebody else's data.

`donor`: each client draws another client and takes samples of that client's test set. `pool`: the samples
come from all clients' test sets together. `label`: they do, but their classes follow a mix that the client draws:
P(y) changes, and P(x | y) is that of all clients together, which is the client's own only where clients' images of a
class are alike. At degree p, the first round(p * n) of a client's n test places,
in a random order of its own, are replaced, so what is replaced at a small degree is replaced at every
larger one. All methods and degrees of a run see the same draws.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from personafl.core import rng
from personafl.core.errors import UserError
from personafl.data import federated
from personafl.data.federated import Federation, LazySplit
from personafl.data.ragged import Indices, Ragged

PROTOCOLS = ("donor", "pool", "label", "none")
KEPT = 100_000  # draws of single clients, for evaluators that ask again


@dataclass(frozen=True)
class Shift:
    """The draws of a protocol. A client's are made when they are asked for; each is a function of its key alone."""

    federation: Federation
    protocol: str
    seed: int
    draws: int
    made: dict[tuple[int, int], tuple[Tensor, Tensor]] = field(default_factory=dict, repr=False, compare=False)

    def of(self, draw: int, client: int) -> tuple[Tensor, Tensor]:
        """The rows that replace a client's samples in a draw, and the places they go to, in that order."""
        found = self.made.get((draw, client))
        if found is None:
            if len(self.made) >= KEPT:
                self.made.clear()
            new, order = self._drawn(draw, client)
            found = self.made[draw, client] = torch.from_numpy(new), torch.from_numpy(order)
        return found

    def _drawn(self, draw: int, client: int) -> tuple[Indices, Indices]:
        key = rng.generator(self.seed, "shift", draw, client)
        size = int(self._first[client + 1] - self._first[client])
        if self.protocol == "donor":
            new = _choice(key, self._test(self._donor(key, client)), size)
        elif self.protocol == "pool":
            new = self._at(key.choice(self._pool, size, replace=self._pool < size))
        else:
            new = _remixed(key, self._by_class, size)
        return new, key.permutation(size)

    def _donor(self, key: np.random.Generator, client: int) -> int:
        other = int(key.integers(self.federation.num_clients - 1))
        return other + (other >= client)

    def donors_of(self, ids: Tensor) -> Tensor:
        """Who gives to these clients, `[draws, C]`; -1 where nobody in particular does."""
        if self.protocol != "donor":
            return torch.full((self.draws, len(ids)), -1)
        keys = ((rng.generator(self.seed, "shift", d, c), c) for d in range(self.draws) for c in ids.tolist())
        return torch.tensor([self._donor(key, c) for key, c in keys]).view(self.draws, len(ids))

    @property
    def rows(self) -> list[Ragged]:
        """Per draw the rows of everybody."""
        return [rows for rows, _ in self._all]

    @property
    def places(self) -> list[Ragged]:
        """Per draw the places of everybody."""
        return [places for _, places in self._all]

    @cached_property
    def _all(self) -> list[tuple[Ragged, Ragged]]:
        drawn = [[self.of(d, c) for c in self._everybody] for d in range(self.draws)]
        return [(Ragged.of([r.numpy() for r, _ in d]), Ragged.of([p.numpy() for _, p in d])) for d in drawn]

    def digest(self) -> str:
        """A short hash of all draws, or of what decides them where there are very many clients."""
        h = hashlib.sha256(self.protocol.encode())
        if isinstance(self.federation.splits["train"], LazySplit) or self.federation.everybody >= federated.LAZY_FROM:
            h.update(f"{self.federation.digest()} {self.seed} {self.draws}".encode())
        else:
            for ragged in (*self.rows, *self.places):
                h.update(ragged.values.numpy().tobytes())
        return h.hexdigest()[:16]

    # Everybody's test rows, those of clients held out aside

    @property
    def _everybody(self) -> range:
        return range(self.federation.num_clients)

    @cached_property
    def _first(self) -> Indices:
        return self.federation.splits["test"].offsets.numpy()

    @property
    def _pool(self) -> int:
        return int(self._first[self.federation.num_clients])

    @cached_property
    def _flat(self) -> Indices | None:
        """On the host; None where clients' are drawn one by one."""
        test = self.federation.splits["test"]
        return None if isinstance(test, LazySplit) else test.values.cpu().numpy()

    @cached_property
    def _by_class(self) -> list[Indices]:
        rows = self.federation.drawn("test").values.cpu().numpy()
        return _by_class(rows[: self._pool], self.federation.source.labels)

    def _test(self, client: int) -> Indices:
        test = self.federation.splits["test"]
        if isinstance(test, LazySplit):
            return test.client(client)
        assert self._flat is not None
        return self._flat[self._first[client] : self._first[client + 1]]

    def _at(self, places: Indices) -> Indices:
        """The rows at these places of all test sets behind one another."""
        if self._flat is not None:
            return self._flat[places]
        who = np.searchsorted(self._first, places, side="right") - 1
        return np.array([self._test(c)[p - self._first[c]] for c, p in zip(who, places, strict=True)], np.int64)


def draw(federation: Federation, protocol: str, seed: int, draws: int) -> Shift:
    """The shifted test sets of a run."""
    if protocol not in ("donor", "pool", "label"):
        raise UserError(f"evaluation.shift={protocol!r}: possible are {', '.join(PROTOCOLS)}")
    if federation.common_test is not None:
        raise UserError(
            f"evaluation.shift={protocol!r}: all clients are tested on the same data (data.test_share=0), so there are "
            "no other clients' samples to replace them by; set evaluation.shift=none"
        )
    if protocol == "donor" and federation.num_clients < 2:
        raise UserError("evaluation.shift='donor': one client alone has no donor; use shift='none'")
    return Shift(federation, protocol, seed, draws)


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


def mix_scores(own: Tensor, foreign: Tensor, places: Tensor, degree: float) -> Tensor:
    """Scores of a client's shifted test set: `own` at the places kept, `foreign` at those replaced; all `[n, ...]`."""
    count = round(degree * len(own))
    out = own.clone()
    out[places[:count]] = foreign[:count]
    return out
