"""What faulty clients send in place of what the method's hooks gave."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from personafl.core import rng, tree
from personafl.core.algorithm import ClientState
from personafl.core.faults import Fault, Faults
from personafl.core.types import Masked, Params, Payload
from personafl.engine.admission import Update


def sent(fault: Fault, honest: Update) -> list[Update]:
    """What a client with a fault sends that an admission can see: one update, or two."""
    if fault == "duplicate":
        return [honest, honest]
    if fault == "stale":
        return [dataclasses.replace(honest, stage=honest.stage - 1)]
    return [dataclasses.replace(honest, payload=_damaged(fault, honest.payload))]


def _damaged(fault: Fault, payload: Payload) -> Payload:
    if fault == "empty":
        return {}
    name = next(n for n, t in tree.values(payload).items() if t.is_floating_point() and t.numel())
    entry = payload[name]
    if fault == "names":
        return tree.exclude(payload, [name]) | {f"{name}.other": entry}
    if fault == "shape":
        return payload | {name: _mapped(entry, longer=True)}
    return payload | {name: _mapped(entry, value=math.nan if fault == "nan" else math.inf)}


def _mapped(entry: Tensor | Masked, *, longer: bool = False, value: float = 0.0) -> Tensor | Masked:
    """The entry with one more axis, or with a value in place of its first."""

    def changed(t: Tensor, to: float | bool) -> Tensor:
        if longer:
            return t[None]
        t = t.clone(memory_format=torch.contiguous_format)
        t.view(-1)[0] = to
        return t

    if not isinstance(entry, Masked):
        return changed(entry, value)
    return tree.view(changed(entry.values, value), changed(entry.mask, True), entry.known)


def attacking(faults: Faults, begun: Params, local: ClientState, which: Tensor, keys: Tensor) -> ClientState:
    """Clients after training, some of whose models (`which`, `[C]` bool) moved as an attack has it.

    `begun` are the model's parameters before training. With u = trained - begun, `sign-flip` leaves a client at
    begun - strength u, `noise` at begun + strength |u| z, z a random direction by the client's stream of `keys` `[C]`.
    """
    moved = {n: local.params[n] - t for n, t in begun.items()}
    if faults.fault == "sign-flip":
        aimed = {n: -t for n, t in moved.items()}
    else:
        aimed = _as_long(moved, {n: _noise(rng.extend(keys, n), t) for n, t in moved.items()})
    column = {n: tree.column(which, t) for n, t in begun.items()}
    new = {n: torch.where(column[n], t + faults.strength * aimed[n], local.params[n]) for n, t in begun.items()}
    return dataclasses.replace(local, params=local.params | new)


def _noise(keys: Tensor, like: Tensor) -> Tensor:
    """Normal where the client's tensor moved, so that nothing moves outside of a mask."""
    drawn = rng.normal(keys, like[0].numel()).view(like.shape).to(like)
    return torch.where(like != 0, drawn, 0)


def _as_long(own: Params, other: Params) -> Params:
    """Each client's second vector at the length of its first."""
    wanted, found = (
        torch.stack([tree.flat(t).double().square().sum(1) for t in p.values()]).sum(0).sqrt() for p in (own, other)
    )
    scale = torch.where(found > 0, wanted / found.clamp(min=torch.finfo(found.dtype).tiny), 0)
    return {n: t * tree.column(scale, t).to(t.dtype) for n, t in other.items()}
