"""COWA, a filling of the `weights` slot: clients weighed by what they contribute.

"CO-PFL: Contribution-Oriented Personalized Federated Learning for Heterogeneous Networks", Eqs. 8 to 10.
Client n counts

    Gamma_n = G_n + P_n,    alpha_n = Gamma_n / sum Gamma
    G_n = 1 - cos(delta_n, dbar)     how far its update points away from the others'
    P_n = CE of w_{-n} on its data   how badly the others' model explains its examples

Here `lagged` (the default): the others' move dbar = (D - alpha_n delta_n') / (1 - alpha_n) is taken from the server's
move D since the client last took part, with the update delta_n' it then sent, for D contains that one and not the
present delta_n, which the paper's indices would subtract; w_{-n} = (w - alpha_n w_n) / (1 - alpha_n) likewise. So the
client works both out by itself and the server needs sums only. `server` compares the present uploads with each other,
for which it must hold all of them. Scores are taken over the positions the client shares; where a method sends only
part of the model, w_{-n} has the client's own weights elsewhere. In a client's first session G_n is 1 and w_{-n} the
received model. Where positions are averaged over those who share them, alpha_n is the client's share of the whole and
lagged is an approximation; `server` is exact there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from personafl.core import tree
from personafl.core.algorithm import Algorithm, Local, Play, Survey
from personafl.core.errors import UserError
from personafl.core.types import Batch, Download, Model, Params, Payload, Round, Sweep, Task, per_example
from personafl.slots.wrapper import Part


@dataclass(frozen=True, kw_only=True)
class Contribution(Part):
    """A method whose clients count by contribution."""

    prefix: ClassVar[str] = "cowa"

    gradient: bool = True  # whether G_n counts
    prediction: bool = True  # whether P_n counts
    at_server: bool = False  # whether the server compares the present uploads

    @classmethod
    def around(cls, base: Algorithm, **settings: object) -> Self:
        if base.private() >= frozenset(base.info.parameters):
            raise UserError(f"weights={base.weights!r}: {base.called} sends nothing to be weighed")
        return super().around(base, **settings)

    def needs_uploads(self) -> bool:
        return self.at_server or super().needs_uploads()

    # State: the sum of scores of every round, each client's last score, and what a client last sent and saw

    def init_server(self, params: Params) -> Params:
        totals = torch.zeros(self.setup.training.num_rounds + 1, dtype=torch.float64, device=_like(params).device)
        return super().init_server(params) | self.own({"totals": totals})

    def init_known(self, params: Params, ids: Tensor) -> Params:
        last = torch.full((len(ids),), -1, dtype=torch.int64, device=_like(params).device)
        return super().init_known(params, ids) | self.own(
            {"score": torch.zeros_like(last, dtype=torch.float64), "round": last}
        )

    def init_clients(self, params: Params, ids: Tensor) -> Params:
        model = {n: params[n] for n in self.shared()}
        mine: Params = {"round": torch.full((), -1, dtype=torch.int32, device=_like(params).device)}
        for what in ("received", "sent"):
            mine |= tree.prefixed({n: torch.zeros_like(t) for n, t in model.items()}, what)
        for what in ("where", "had"):  # it uploaded, it received
            mine |= tree.prefixed({n: torch.ones_like(t, dtype=torch.bool) for n, t in model.items()}, what)
        return super().init_clients(params, ids) | self.own(tree.stack(mine, len(ids)))

    def newcomer(self, params: Params, down: Download, ids: Tensor) -> Params:
        return self.init_clients(params, ids) | super().newcomer(params, down, ids)

    # A round

    def _share(self, server: Params, known: Params, first: float) -> Tensor:
        """alpha of each client's last upload, `[C]`; `first` for one that never sent any."""
        totals, score, last = self.mine(server)["totals"], self.mine(known)["score"], self.mine(known)["round"]
        total = totals[last.clamp(min=0)]
        return torch.where((last >= 0) & (total > 0), score / total.clamp(min=torch.finfo(total.dtype).tiny), first)

    def download(self, server: Params, known: Params, rnd: Round) -> Download:
        down = super().download(server, known, rnd)
        share = self._share(server, known, 0.0) * self.setup.training.server_lr  # of the model it then helped to make
        mine: Payload = {f"{self.prefix}/share": share}
        return replace(down, own=down.own | mine)

    def start(self, kept: Params, down: Payload, rnd: Round) -> Local:
        local, sent = super().start(kept, down, rnd), tree.values(down)
        begin = {n: local.params[n] for n in self.shared()}
        masks = tree.masks(down)
        got = {n: masks.get(n, torch.ones_like(t, dtype=torch.bool)) for n, t in begin.items() if n in sent}
        now = {n: torch.where(m, sent[n], begin[n]) for n, m in got.items()}  # its own where the server sent nothing
        mine = self.mine(kept) | tree.prefixed(begin, "begin") | tree.prefixed(now, "now") | tree.prefixed(got, "got")
        share = sent[f"{self.prefix}/share"]
        mine |= {"share": share, "loss": torch.ones_like(share)}
        return replace(local, fixed=local.fixed | self.own(mine))

    def turns(self, local: Local, rnd: Round) -> list[Play]:
        plays = super().turns(local, rnd)
        return [Survey(self._others_loss(rnd), self._noted), *plays] if self.prediction and rnd.stage.up else plays

    def _others_loss(self, rnd: Round) -> Callable[[Task, Local, Batch], Params]:
        def measure(task: Task, local: Local, batch: Batch) -> Params:
            out = task.model(local.params | self._others(self.mine(local.fixed), rnd), batch.x, batch.valid)
            loss = batch.mean(per_example(task.criterion, out, batch.y))
            return {"loss": loss * batch.count, "count": batch.count}

        return measure

    def _others(self, mine: Params, rnd: Round) -> Params:
        """w_{-n}: the received model without what the client added to it in the round before."""
        share, now, got = mine["share"], tree.under(mine, "now"), tree.under(mine, "got")
        sent, where = tree.under(mine, "sent"), tree.under(mine, "where")
        just = (mine["round"] == rnd.number - 1) & (share < 1)
        share = torch.where(just, share, 0)
        out = {}
        for n, w in now.items():
            a = tree.column(share, w).to(w.dtype)
            out[n] = torch.where(where[n] & got[n], (w - a * sent[n]) / (1 - a), w)
        return out

    def _noted(self, local: Local, sums: Params) -> Local:
        return replace(local, fixed=local.fixed | self.own({"loss": sums["loss"] / sums["count"]}))

    def upload(self, local: Local, rnd: Round) -> Payload:
        out, mine = super().upload(local, rnd), self.mine(local.fixed)
        score = mine["loss"] if self.prediction else torch.zeros_like(mine["loss"])
        if self.gradient and not self.at_server:
            score = score + self._turned(mine, self._updates(local, out), self._positions(local, out))
        return out | self.own({"score": score})

    def _positions(self, local: Local, upload: Payload) -> Params:
        """The positions each client shares: those it uploads."""
        masks = tree.masks(upload)
        return {n: masks.get(n, torch.ones_like(local.params[n], dtype=torch.bool)) for n in self.shared()}

    def _updates(self, local: Local, upload: Payload) -> Params:
        """delta_n: the model before the session minus the model after it, where the client shares it."""
        begin = tree.under(self.mine(local.fixed), "begin")
        where = self._positions(local, upload)
        return {n: torch.where(where[n], w - local.params[n], 0) for n, w in begin.items()}

    def _turned(self, mine: Params, update: Params, where: Params) -> Tensor:
        """G_n, lagged: 1 in a client's first session."""
        share = mine["share"]
        now, got = tree.under(mine, "now"), tree.under(mine, "got")
        before, had, sent, sent_at = (tree.under(mine, p) for p in ("received", "had", "sent", "where"))
        alone = (mine["round"] < 0) | (share >= 1)
        others, compared = {}, {}
        for n, w in now.items():
            a = tree.column(torch.where(alone, 0, share), w).to(w.dtype)
            seen = where[n] & got[n] & had[n]
            old = torch.where(sent_at[n], before[n] - sent[n], 0)  # the update it sent then
            others[n] = torch.where(seen, before[n] - w - a * old, 0)  # over 1 - a, which turns no vector
            compared[n] = torch.where(seen, update[n], 0)
        return torch.where(alone, 1.0, _apart(compared, others))

    def keep(self, kept: Params, local: Local, rnd: Round) -> Params:
        new = super().keep(kept, local, rnd)
        if not rnd.stage.up:
            return new
        sent, mine = self.base.upload(local, rnd), self.mine(local.fixed)
        where = self._positions(local, sent)
        trained = {n: local.params[n] for n in where}
        mine = (
            tree.prefixed(tree.under(mine, "now"), "received")
            | tree.prefixed(tree.under(mine, "got"), "had")
            | tree.prefixed(trained, "sent")
            | tree.prefixed(where, "where")
        )
        return new | self.own(mine | {"round": torch.full_like(kept[f"{self.prefix}/round"], rnd.number)})

    def weigh(self, server: Params, known: Params, upload: Payload, examples: Tensor, rnd: Round) -> Tensor:
        score = tree.values(upload)[f"{self.prefix}/score"].to(examples.dtype)
        if not (self.gradient and self.at_server):
            return score
        share = self._share(server, known, 1 / len(examples))
        update, masks = self.updates(server, upload), tree.masks(upload)
        others = {}
        for n, t in update.items():
            mine = t * tree.column(share, t).to(t.dtype)
            rest = mine.sum(0) - mine
            others[n] = torch.where(masks[n], rest, 0) if n in masks else rest
        return score + _apart(update, others)

    def summands(self, upload: Payload, weights: Tensor, rnd: Round) -> Params:
        return super().summands(upload, weights, rnd) | self.own({"total": weights})

    def remember(self, known: Params, upload: Payload, weights: Tensor, rnd: Round) -> Params:
        last = torch.full_like(self.mine(known)["round"], rnd.number)
        return super().remember(known, upload, weights, rnd) | self.own({"score": weights, "round": last})

    def aggregate(self, server: Params, sums: Params, rnd: Round) -> Params:
        totals = self.mine(server)["totals"].clone()
        totals[rnd.number] = self.mine(sums)["total"]
        return super().aggregate(server, sums, rnd) | self.own({"totals": totals})

    # It changes no model, so prediction is the method's.

    def deploy(self, own: Params, down: Payload) -> Params:
        return self.base.deploy(own, self.theirs_of(down))

    def calibrate(self, deployed: Params, sweep: Sweep) -> Params:
        return self.base.calibrate(deployed, sweep)

    def predict(self, model: Model, deployed: Params, x: Tensor) -> Tensor:
        return self.base.predict(model, deployed, x)


def _apart(a: Params, b: Params) -> Tensor:
    """One minus the cosine of two stacked trees, `[C]` float64; 1 where either is zero."""
    dot, aa, bb = (
        torch.stack([(tree.flat(x[n]).double() * tree.flat(y[n]).double()).sum(1) for n in a]).sum(0)
        for x, y in ((a, b), (a, a), (b, b))
    )
    length = (aa * bb).sqrt()
    return torch.where(length > 0, 1 - dot / length.clamp(min=torch.finfo(length.dtype).tiny), 1.0)


def _like(params: Params) -> Tensor:
    return next(iter(params.values()))
