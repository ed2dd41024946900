"""How often each class occurs at a client, for losses and rules that go by it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from personafl.core.local_work import ClientState, DataPass
from personafl.core.types import Batch, Params, Task

SMOOTHING = 1.0  # examples every class is taken to have beside those that are there


def label_counts(batch: Batch, classes: int) -> Tensor:
    """How many examples of each class every client has in a minibatch: `[C, K]`."""
    hit = batch.y.unsqueeze(2) == torch.arange(classes, device=batch.y.device)
    return (hit if batch.valid is None else hit & batch.valid.unsqueeze(2)).sum(1)


def log_frequencies(counts: Tensor) -> Tensor:
    """log pi of counts `[C, K]`, pi(k) = (n_k + s) / (n + s K)."""
    smooth = counts + SMOOTHING
    return (smooth / smooth.sum(1, keepdim=True)).log()


def label_pass(name: str, classes: int, made_of: Callable[[Tensor], Tensor]) -> DataPass:
    """Leaves in `fixed`, under this name, what is made of each client's label counts `[C, K]`; runs no model."""

    def counted(task: Task, local: ClientState, batch: Batch) -> Params:
        return {"examples": label_counts(batch, classes)}

    def noted(local: ClientState, sums: Params) -> ClientState:
        dtype = next(t.dtype for t in local.params.values() if t.is_floating_point())
        return replace(local, fixed=local.fixed | {name: made_of(sums["examples"]).to(dtype)})

    return DataPass(counted, noted)
