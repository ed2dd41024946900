"""What clients keep between rounds, by client id.

Rows come into being when a client first takes part; until then a client is what `fresh` says it
is. So a round costs what its cohort costs, however many clients there are.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from torch import Tensor

from personafl.core.types import Params


class Store:
    """Client rows in memory."""

    def __init__(self, fresh: Callable[[Tensor], Params]) -> None:
        self._fresh = fresh
        self._lock = threading.Lock()  # stacks may run in several threads
        self._row: dict[int, int] = {}
        self._rows: Params = {}

    @property
    def ids(self) -> list[int]:
        """The clients that have a row."""
        return list(self._row)

    def gather(self, ids: Tensor) -> Params:
        """The rows of these clients, `[C, ...]`, not to be written to; clients without a row are fresh ones."""
        with self._lock:
            return self._gather(ids)

    def _gather(self, ids: Tensor) -> Params:
        known = [(i, self._row[c]) for i, c in enumerate(ids.tolist()) if c in self._row]
        if known and len(known) == len(ids):
            at = torch.tensor([row for _, row in known])
            return {n: t[at.to(t.device)] for n, t in self._rows.items()}
        out = self._fresh(ids)
        if not known or not out:
            return out
        at, rows = (torch.tensor(column) for column in zip(*known, strict=True))
        out = {n: t.clone() for n, t in out.items()}
        for n, t in out.items():
            t[at.to(t.device)] = self._rows[n][rows.to(t.device)]
        return out

    def scatter(self, ids: Tensor, kept: Params) -> None:
        """Store these clients' rows."""
        if kept:
            with self._lock:
                self._scatter(ids, kept)

    def _scatter(self, ids: Tensor, kept: Params) -> None:
        new = [c for c in ids.tolist() if c not in self._row]
        self._row |= {c: len(self._row) + i for i, c in enumerate(new)}
        rows = torch.tensor([self._row[c] for c in ids.tolist()])
        for n, t in kept.items():
            have = self._rows.get(n)
            if have is None or have.shape[0] < len(self._row):
                grown = t.new_zeros(max(len(self._row), 2 * have.shape[0] if have is not None else 0), *t.shape[1:])
                if have is not None:
                    grown[: have.shape[0]] = have
                self._rows[n] = grown
            self._rows[n][rows.to(t.device)] = t.detach()
