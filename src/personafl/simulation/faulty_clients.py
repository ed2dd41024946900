"""What faulty and slow clients do in a stage, in place of what the method's hooks gave."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from personafl.core import rng, tree, wire
from personafl.core.algorithm import Algorithm
from personafl.core.faults import Fault, Faults
from personafl.core.local_work import ClientState
from personafl.core.types import Download, Masked, Params, Payload, Round
from personafl.engine import admission
from personafl.engine.accounting import Refused
from personafl.engine.admission import Update
from personafl.engine.late_results import LateResults
from personafl.engine.local import Outcome
from personafl.engine.server_round import ServerRound


@dataclass(frozen=True)
class Misbehaviour:
    """What faulty and slow clients do once they have trained.

    Args:
        faults: What goes wrong.
        faulty: Which clients are faulty, `[clients]` bool.
        seed: The seed of the run.
        examples: How many examples each of these clients trains on.
    """

    faults: Faults
    faulty: Tensor
    seed: int
    examples: Callable[[Tensor], Tensor]

    def attack(
        self, algorithm: Algorithm, ids: Tensor, done: Outcome, kept: Params, received: Download, rnd: Round
    ) -> Payload:
        """Return what the clients of a stack send, those that attack in the same form as the others."""
        if not (rnd.stage.up and self.faults.attack and (which := self.faulty[ids]).any()):
            return done.upload
        begun = algorithm.start(kept, tree.received(received, len(ids)), rnd).params
        begun = {n: t for n, t in begun.items() if n in algorithm.info.parameters}
        keys = rng.key(self.seed, "attack", rnd.number, ids)
        device = next(iter(begun.values())).device
        local = attacking(self.faults, begun, done.local, which.to(device), keys.to(device))
        return algorithm.upload(local, rnd)

    def refuse_damaged(
        self, stage: ServerRound, ids: Tensor, upload: Payload, broken: Collection[int]
    ) -> tuple[list[Refused], int]:
        """Find the updates of faulty clients that the server refuses, and how many bytes they have beyond honest ones.

        Args:
            stage: The server's side of the stage.
            ids: The clients of a stack.
            upload: What the method's hooks have them send.
            broken: Rows of the stack that are refused already.
        """
        if not (stage.rnd.stage.up and self.faults.damage):
            return [], 0
        rows = self.faulty[ids].nonzero().flatten().tolist()
        sizes = self.examples(ids).tolist() if rows else []
        refused: list[Refused] = []
        more = 0
        for row in rows:
            if row in broken:
                continue
            honest = Update(int(ids[row]), stage.place, tree.row_of(upload, row), sizes[row])
            taken: list[int] = []
            for update in sent(self.faults.fault, honest):
                more += wire.size(update.payload)
                if why := admission.refusal(update, stage.schema, stage.place, sizes[row], taken=taken):
                    refused.append(Refused(update.client, why, counts=bool(taken)))
                else:
                    assert update.payload is honest.payload
                    taken.append(update.client)
            more -= wire.size(honest.payload)
        return refused, more

    def split_by_time(
        self, stage: ServerRound, ids: Tensor, refused: list[Refused], upload: Payload, kept: Params
    ) -> tuple[Tensor | None, LateResults | None]:
        """Return the rows of a stack whose session counts now, None for all, and what comes a stage later."""
        rnd = stage.rnd
        if not refused and not (rnd.stage.up and self.faults.straggler_ratio):
            return None, None
        late = self.faults.straggling(self.seed, rnd.number, ids) & rnd.stage.up
        out = torch.isin(ids, torch.tensor([r.client for r in refused if not r.counts], dtype=torch.int64))
        rows = (~out & ~late).nonzero().flatten()
        if self.faults.late != "stale" or not (put_off := (~out & late).nonzero().flatten()).numel():
            return rows, None
        return rows, LateResults(stage.place, rnd.phase, ids, upload, kept).rows(put_off)


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
