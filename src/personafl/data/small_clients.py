"""Natural clients that have too few samples for a training and a test part."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from personafl.core.errors import UserError
from personafl.data.dataset import Source
from personafl.data.federated import share_sizes, too_few
from personafl.data.ragged import Indices

SmallClients = Literal["refuse", "drop"]
OfficialTest = Literal["pooled", "dealt", "global"]


def without_small_clients(
    source: Source, small: SmallClients, official_test: OfficialTest, test_share: float, validation_share: float
) -> tuple[Indices | None, int]:
    """The natural client of each example, -1 where it is left out for its size, and how many clients that are.

    A client needs a training part and the others that are asked for; where the test part that data come with is
    dealt, it needs samples there. One that is all in a test part for the server's model is no client.
    """
    clients = source.clients
    if clients is None:
        return None, 0
    dealt = official_test == "dealt"
    shares = (0.0 if dealt else test_share, validation_share)
    apart = np.zeros(len(clients), np.bool_) if source.test is None or official_test == "pooled" else source.test
    everybody = np.unique(clients if dealt else clients[~apart])
    lacking = _too_small(source, ~apart, shares)
    bad = np.flatnonzero(lacking | ~np.isin(np.arange(len(lacking)), clients[apart]) if dealt else lacking)
    bad = np.intersect1d(bad, everybody)
    if len(bad) == len(everybody):
        what = "both training and test samples" if dealt else "enough samples for the parts that are asked for"
        raise UserError(f"data.partition='natural': no natural client has {what}")
    if len(bad) and small == "refuse":
        why = _why(source, int(bad[0]), ~apart, shares) if lacking[bad[0]] else "has no test samples"
        others = f" ({len(bad)} such clients in all)" if len(bad) > 1 else ""
        pooled = ", data.official_test=pooled splits test samples off" if dealt else ""
        raise UserError(
            f"{source.name}: client {_name(source, int(bad[0]))} {why}{others}; "
            f"data.small_clients=drop leaves such clients out{pooled}"
        )
    return np.where(np.isin(clients, bad), -1, clients), len(bad)


def _too_small(source: Source, rows: NDArray[np.bool_], shares: tuple[float, float]) -> NDArray[np.bool_]:
    """Which clients these rows do not give every part: `[clients]`."""
    clients = np.asarray(source.clients)
    count = int(clients.max()) + 1
    if source.groups is not None:
        pairs = np.unique(np.stack([clients[rows], source.groups[rows]]), axis=1)
        return np.asarray(np.bincount(pairs[0], minlength=count) < 1 + sum(s > 0 for s in shares))
    sizes = np.bincount(clients[rows], minlength=count)
    return np.asarray(sizes - share_sizes(shares[0], sizes) - share_sizes(shares[1], sizes) < 1)


def _why(source: Source, client: int, rows: NDArray[np.bool_], shares: tuple[float, float]) -> str:
    mine = np.flatnonzero((np.asarray(source.clients) == client) & rows)
    said = too_few(len(mine), *shares)
    if source.groups is None or len(mine) < 2:
        return said
    return f"{said}: its samples form {len(np.unique(source.groups[mine]))} groups that are never split apart"


def _name(source: Source, client: int) -> str:
    return str(client) if source.names is None else source.names[client]
