"""Ways to deal samples that several partitions have in common."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from personafl.data.partition.partitioner import PartitionRequest, PartitionResult
from personafl.data.ragged import Indices, Ragged


def cut_by_share(shares: NDArray[np.float64], count: int) -> Indices:
    """How many of `count` samples each client gets."""
    ends = np.cumsum(shares)
    cuts = (ends / ends[-1] * count).astype(np.int64)
    cuts[-1] = count
    sizes: Indices = np.diff(cuts, prepend=0)
    return sizes


def collect(classes: list[Indices], sizes: list[Indices]) -> Ragged:
    """What clients get of every class, `sizes` of each in turn, client by client."""
    who = np.concatenate([np.repeat(np.arange(len(s)), s) for s in sizes])
    return Ragged.cut(np.concatenate(classes)[np.argsort(who, kind="stable")], np.sum(sizes, 0))


def share_equally(request: PartitionRequest, kinds: NDArray[np.int64], held: Indices, most: int = 0) -> PartitionResult:
    """Share the samples of each kind equally among its holders `[kinds, clients]`; each keeps `most` of it, or all."""
    rows: list[list[Indices]] = [[] for _ in range(held.shape[1])]
    for kind, holders in zip(np.unique(kinds), held, strict=True):
        mine = request.rng.permutation(np.flatnonzero(kinds == kind))
        who = np.flatnonzero(holders)
        for client, part in zip(who, np.array_split(mine, len(who)), strict=True):
            rows[client].append(part[: most or None])
    left_out = len(kinds) - sum(len(p) for r in rows for p in r)
    return PartitionResult([np.sort(np.concatenate(r)) for r in rows], {"samples_left_out": left_out} if most else {})
