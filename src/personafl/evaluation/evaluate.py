"""Scores of every client's model on test data, example by example."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from personafl.core import hook_checks, tree
from personafl.core.algorithm import Algorithm
from personafl.core.model_wrapper import ModelAround
from personafl.core.types import Batch, Examples, Model, Params, Payload, Task, TrainedModel, TrainedTask
from personafl.data import batches
from personafl.data.federated import Federation
from personafl.data.shift import Shift, mix_scores

Held = Callable[[Literal["train", "validation"]], Examples]
"""A split of the clients' data."""
Predict = Callable[[Model, Params, Tensor], Tensor]
"""Outputs `[C, B, K]` of a stack of clients, from a model, what they hold and inputs."""


@torch.no_grad()
def deployed(algorithm: Algorithm, task: Task, own: Params, down: Payload, held: Held) -> Params:
    """A stack of clients ready to predict with these models of their own; few methods ask for data they hold."""

    def sweep(measure: Callable[[Model, Batch], Params], split: Literal["train", "validation"] = "train") -> Params:
        return batches.sums(held(split), batches.SWEEP, dtype, functools.partial(measure, task.model))

    hook_checks.check_client_model(algorithm, "personal or after_training", own)
    ready = algorithm.deploy(own, down)
    hook_checks.check_client_model(algorithm, "deploy", ready)
    dtype = tree.floating(ready)
    return algorithm.calibrate(ready, sweep)


@torch.no_grad()
def scores(predict: Predict, task: TrainedTask, ready: Params, data: Examples, activations: float) -> list[Tensor]:
    """Per client the score of each of its examples, `[n]` or `[n, S]`, on the device: to read them is to wait for it.

    A metric sees outputs and targets in the targets' own units, where training sees them normalised.
    On a GPU a forward pass takes as many examples as would leave so many bytes of `activations`, if all were kept.
    """

    units = data.target_normalization
    data = dataclasses.replace(data, target_normalization=None)

    def per_example(logits: Tensor, batch: Batch) -> Tensor:
        logits = logits if units is None else units.restore(logits, 2)
        found = task.metric.per_example(logits.flatten(0, 1), batch.y.flatten(0, 1))
        return found.view(*logits.shape[:2], *found.shape[1:]).float()

    out = _passed(predict, task, ready, data, activations, per_example)
    if out is None:  # nobody has an example
        out = torch.zeros(data.rows.shape, device=data.rows.device)
    return [row[:n] for row, n in zip(out.unbind(), data.count.tolist(), strict=True)]


@torch.no_grad()
def outputs(predict: Predict, task: TrainedTask, ready: Params, data: Examples, activations: float) -> Tensor:
    """What is predicted of each example, `[C, n, ...]`, zeros behind a client's last."""
    out = _passed(predict, task, ready, data, activations, lambda logits, _: logits)
    return torch.zeros(*data.rows.shape, 0, device=data.rows.device) if out is None else out


def both_outputs(algorithm: Algorithm, model: Model, ready: Params, x: Tensor) -> Tensor:
    """Outputs of clients' own models and of the global one, one behind the other: `[C, B, 2, K]`."""
    return torch.stack(algorithm.both_answers(model, ready, x), 2)


def _passed(
    predict: Predict,
    task: TrainedTask,
    ready: Params,
    data: Examples,
    activations: float,
    made: Callable[[Tensor, Batch], Tensor],
) -> Tensor | None:
    """What is made of the outputs of one pass over the examples, `[C, n, ...]`; None where nobody has any."""
    out: Tensor | None = None
    for batch, first in batches.in_order(data, _at_a_time(task.model, data, activations), tree.floating(ready)):
        k, size = batch.x.shape[:2]
        found = made(predict(_Ignoring(task.model, batch.valid), tree.take(ready, slice(k)), batch.x), batch)
        if out is None:
            out = found.new_zeros(*data.rows.shape, *found.shape[2:])
        out[:k, first : first + size] = found
    return out


def finite(ready: Params) -> Tensor:
    """Whether every number of each client's model is: `[C]`."""
    found = []
    for t in ready.values():
        if t.is_floating_point() and t.numel():
            rows = t[:1] if t.stride(0) == 0 else t  # one model for all
            ends = torch.stack(torch.aminmax(rows.reshape(len(rows), -1), dim=1))  # NaN where any is
            found.append(ends.isfinite().all(0).expand(len(t)))
    return torch.stack(found).all(0)


def on_host(found: list[Tensor]) -> list[Tensor]:
    """These rows on the host, in one copy."""
    if not found or not found[0].is_cuda:
        return found
    return list(torch.split(torch.cat(found).cpu(), [len(row) for row in found]))


def _at_a_time(model: TrainedModel, data: Examples, activations: float) -> int:
    """Examples of a client in one forward pass: on a GPU as many as fill it, where they do not look at one another."""
    if not data.rows.is_cuda or model.looks_at_batches:
        return batches.SWEEP
    each = 4 * max(model.info.activations, 1) * len(data.ids)
    return max(16, min(16384 // len(data.ids) + 1, int(activations / each)))


class _Ignoring(ModelAround):
    """A model told which of its inputs are padding, for those that look at a whole batch."""

    def __init__(self, model: Model, valid: Tensor | None) -> None:
        super().__init__(model)
        self.valid = valid

    def real(self, valid: Tensor | None) -> Tensor | None:
        return self.valid if valid is None else valid


def with_shift(federation: Federation, shift: Shift, ids: Tensor) -> Examples:
    """Clients' own test rows followed by the rows of every draw: one pass gives the scores of all degrees."""
    data = federation.examples("test", ids)
    total = data.count * (1 + shift.draws)
    rows = data.rows.new_zeros(len(ids), int(total.max()))
    for i, c in enumerate(ids.tolist()):
        n = int(data.count[i])
        drawn = [shift.of(d, c)[0].to(rows.device) for d in range(shift.draws)]
        rows[i, : n * (1 + len(drawn))] = torch.cat([data.rows[i, :n], *drawn])
    return dataclasses.replace(data, rows=rows, count=total)


def at_degree(federation: Federation, shift: Shift, ids: Tensor, draw: int, degree: float) -> Examples:
    """The shifted test sets themselves, for models that look at a batch as a whole."""
    data = federation.examples("test", ids)
    rows = data.rows.clone()
    for i, c in enumerate(ids.tolist()):
        foreign, places = (t.to(rows.device) for t in shift.of(draw, c))
        n = int(data.count[i])
        rows[i, :n] = mix_scores(rows[i, :n], foreign, places, degree)
    return dataclasses.replace(data, rows=rows)


def shifted(found: list[Tensor], shift: Shift, ids: Tensor, degrees: tuple[float, ...]) -> list[Tensor]:
    """Per client the scores of its shifted test sets `[n, draws, degrees, ...]`, from those of `with_shift`."""
    out = []
    for i, c in enumerate(ids.tolist()):
        own, *drawn = found[i].view(1 + shift.draws, -1, *found[i].shape[1:])
        curves = [
            torch.stack([mix_scores(own, foreign, shift.of(d, c)[1], p) for p in degrees], 1)
            for d, foreign in enumerate(drawn)
        ]
        out.append(torch.stack(curves, 1))
    return out
