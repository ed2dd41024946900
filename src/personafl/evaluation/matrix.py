"""Every client's model on every client's test set, and what that says about shift.

A row is a client's model, a column a client's test set. Where an answer depends on the sample alone, the accuracy under
`donor` shift, expected over donors and draws, follows: of n test places k = round(degree * n) are replaced, each kept
one scores as the client's own set does on average, each replaced one as the mean of the other sets. It does so for
metrics that are means over examples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from personafl.core.errors import UserError
from personafl.core.types import Examples, Metric
from personafl.data.federated import Federation
from personafl.evaluation.settings import Evaluation

Score = Callable[[Examples], list[Tensor]]
"""Per client of a stack, the score of each of its examples."""

ROWS = 4096  # test rows scored together
LIMIT = {"cpu": 10**6, "cuda": 10**8}  # entries


def check(evaluation: Evaluation, federation: Federation, device: str) -> None:
    """Refuse a matrix of very many entries."""
    clients = federation.num_clients
    models = min(evaluation.clients, clients) if isinstance(evaluation.clients, int) else clients
    kind = device.partition(":")[0]
    if evaluation.matrix and models * clients > LIMIT[kind]:
        raise UserError(
            f"evaluation.matrix=true: {models} models on {clients} clients' test sets are {models * clients:,} "
            f"evaluations, at most {LIMIT[kind]:,} on a {kind}; score a sample of clients (evaluation.clients=100)"
            + ("" if kind == "cuda" else ", or use a GPU")
        )


def against_all(score: Score, federation: Federation, ids: Tensor, *, per_sample: bool, metric: Metric) -> Tensor:
    """The rows `[C, clients]` of these clients; test sets are scored together unless an answer looks at its batch."""
    out = torch.zeros(len(ids), federation.num_clients, dtype=torch.float64)
    for hosts in _blocks(federation.sizes("test")[: federation.num_clients].tolist(), ROWS if per_sample else 0):
        data = federation.examples("test", hosts)
        flat = torch.cat([r[: int(n)] for r, n in zip(data.rows, data.count, strict=True)])
        total = data.count.sum().expand(len(ids))
        found = score(federation.examples_at(flat.expand(len(ids), -1), total, ids))
        for i, scores in enumerate(found):
            parts = torch.split(scores, data.count.tolist())
            out[i, hosts] = torch.stack([metric.of_client(p) for p in parts])
    return out


def _blocks(sizes: Sequence[int], most: int) -> Iterator[Tensor]:
    """Clients in order, as many at a time as together have no more than so many rows, and at least one."""
    first, rows = 0, 0
    for c, size in enumerate(sizes):
        if c > first and rows + size > most:
            yield torch.arange(first, c)
            first, rows = c, 0
        rows += size
    yield torch.arange(first, len(sizes))


def expected(
    matrix: NDArray[np.float64], ids: NDArray[np.int64], sizes: NDArray[np.int64], degrees: Sequence[float]
) -> NDArray[np.float64]:
    """Accuracy `[C, degrees]` under `donor` shift, expected over donors and draws.

    `matrix` `[C, clients]` has the rows of clients `ids`, whose test sets have these sizes.
    """
    own = matrix[np.arange(len(ids)), ids]  # [C]
    others = (matrix.sum(1) - own) / (matrix.shape[1] - 1)
    replaced = np.array([[round(d * n) / n for d in degrees] for n in sizes.tolist()])  # [C, degrees]
    out: NDArray[np.float64] = own[:, None] * (1 - replaced) + others[:, None] * replaced
    return out
