"""Scores of every client's model on test data, example by example."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from personafl.core import batches, tree
from personafl.core.algorithm import Algorithm
from personafl.core.local import floating
from personafl.core.types import Batch, Examples, Model, Params, Payload, Task, per_example
from personafl.data.federated import Federation
from personafl.data.shift import Shift, mixed

Predict = Callable[[Model, Params, Tensor], Tensor]
"""Outputs `[C, B, K]` of a stack of clients, from a model, what they hold and inputs."""


@torch.no_grad()
def deployed(algorithm: Algorithm, task: Task, own: Params, down: Payload, train: Examples) -> Params:
    """A stack of clients ready to predict with these models of their own."""

    def sweep(measure: Callable[[Model, Batch], Params]) -> Params:
        return batches.sums(train, batches.SWEEP, dtype, functools.partial(measure, task.model))

    ready = algorithm.deploy(own, down)
    dtype = floating(ready)
    return algorithm.calibrate(ready, sweep)


@torch.no_grad()
def scores(predict: Predict, task: Task, ready: Params, data: Examples) -> list[Tensor]:
    """Per client the score of each of its examples, in order, on the host."""
    out = torch.zeros(data.rows.shape, dtype=torch.float32)
    for batch, first in batches.in_order(data, batches.SWEEP, floating(ready)):
        k, size = batch.x.shape[:2]
        model = _Ignoring(task.model, batch.valid)
        logits = predict(model, tree.take(ready, slice(k)), batch.x)
        out[:k, first : first + size] = per_example(task.metric, logits, batch.y).cpu()
    return [row[: int(n)] for row, n in zip(out, data.count, strict=True)]


class _Ignoring:
    """A model told which of its inputs are padding, for those that look at a whole batch."""

    def __init__(self, model: Model, valid: Tensor | None) -> None:
        self.model, self.valid, self.info = model, valid, model.info

    def __call__(self, params: Params, x: Tensor, valid: Tensor | None = None, keys: Tensor | None = None) -> Tensor:
        return self.model(params, x, self.valid if valid is None else valid, keys)

    def features(
        self,
        params: Params,
        x: Tensor,
        valid: Tensor | None = None,
        keys: Tensor | None = None,
        change: Callable[[Tensor], Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        return self.model.features(params, x, self.valid if valid is None else valid, keys, change)


def with_shift(federation: Federation, shift: Shift, ids: Tensor) -> Examples:
    """Clients' own test rows followed by the rows of every draw: one pass gives the scores of all degrees."""
    own, count = federation.splits["test"].padded(ids)
    total = count * (1 + len(shift.rows))
    rows = own.new_zeros(len(ids), int(total.max()))
    for i, c in enumerate(ids.tolist()):
        n = int(count[i])
        parts = [own[i, :n], *(r.flat[int(r.first[c]) : int(r.first[c + 1])].to(own.device) for r in shift.rows)]
        rows[i, : n * len(parts)] = torch.cat(parts)
    return Examples(federation.source.x, federation.source.y, rows, total, ids)


def at_degree(federation: Federation, shift: Shift, ids: Tensor, draw: int, degree: float) -> Examples:
    """The shifted test sets themselves, for models that look at a batch as a whole."""
    rows, count = federation.splits["test"].padded(ids)
    rows = rows.clone()
    for i, c in enumerate(ids.tolist()):
        part = slice(int(shift.rows[draw].first[c]), int(shift.rows[draw].first[c + 1]))
        foreign, places = shift.rows[draw].flat[part].to(rows.device), shift.places[draw].flat[part].to(rows.device)
        rows[i, : int(count[i])] = mixed(rows[i, : int(count[i])], foreign, places, degree)
    return Examples(federation.source.x, federation.source.y, rows, count, ids)


def by_degree(found: list[Tensor], shift: Shift, ids: Tensor, degrees: tuple[float, ...]) -> Tensor:
    """Accuracy per draw, degree and client `[draws, degrees, C]`, from the scores of `with_shift`."""
    draws = len(shift.rows)
    out = torch.zeros(draws, len(degrees), len(ids), dtype=torch.float64)
    for i, c in enumerate(ids.tolist()):
        parts = found[i].double().view(1 + draws, -1)  # [1 + draws, n]
        for d in range(draws):
            places = shift.places[d].flat[int(shift.places[d].first[c]) : int(shift.places[d].first[c + 1])]
            for j, degree in enumerate(degrees):
                out[d, j, i] = mixed(parts[0], parts[1 + d], places, degree).mean()
    return out
