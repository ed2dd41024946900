"""COWA, a filling of the `weights` slot: clients weighed by what they contribute.

"CO-PFL: Contribution-Oriented Personalized Federated Learning for Heterogeneous Networks", Eqs. 8 to 10.
Client n counts

    Gamma_n = G_n + P_n,    alpha_n = Gamma_n / sum Gamma
    G_n = 1 - cos(delta_n, dbar_{-n})    how far its update points away from the others'
    P_n = CE of w_{-n} on its data       how badly the others' model explains its examples

w_{-n} is what the newest aggregation would have given without client n's upload. With s the client's share of the mean
of a position, w_n its upload, w' the model before that aggregation and eta the server's rate,

    w_{-n} = (w - s (w' + eta (w_n - w'))) / (1 - s),    w' where nobody else sent the position (s = 1)

which the client works out by itself, so that the server needs sums only. s is alpha_n where all clients send a
position. Where they send different ones (CO-PFL, DM-PFL, FedSelect, FedDST) it is alpha_n over the weight of those who
did, and that weight travels to the clients whose upload is in w. After a pause none is, and w_{-n} = w.

dbar_{-n} = w'_n - w_{-n}, the others' move since client n last began a session, from w'_n. It leaves out the update
which the client then sent and w contains, not the present delta_n, which the paper's indices would subtract. G_n
compares the positions that the client uploads, since those are what alpha_n weighs; with `everywhere` all
positions of which the client received the server's value, as Eq. 8 prints. Where a method sends only part of the model,
w_{-n} has the client's own weights elsewhere. In a client's first session G_n is 1 and w_{-n} the received model.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, Self

import torch
from torch import Tensor

from personafl.core import tree
from personafl.core.algorithm import Algorithm
from personafl.core.errors import UserError
from personafl.core.local_work import ClientState, DataPass, LocalWork
from personafl.core.types import Batch, Download, Masked, Params, Payload, Round, Task, per_example
from personafl.plugins.wrapper import TrainingWrapper


@dataclass(frozen=True, kw_only=True)
class Contribution(TrainingWrapper):
    """A method whose clients count by contribution."""

    prefix: ClassVar[str] = "cowa"
    plugin_point: ClassVar[str] = "weights"

    gradient: bool = True  # whether G_n counts
    prediction: bool = True  # whether P_n counts
    everywhere: bool = False  # whether Eq. 8 compares all positions, as printed, or those the client shares

    @classmethod
    def around(cls, base: Algorithm, **settings: object) -> Self:
        if base.private() >= frozenset(base.info.parameters):
            raise UserError(f"weights={base.weights!r}: {base.called} sends nothing to be weighed")
        return super().around(base, **settings)

    def not_averaged(self) -> bool:
        return True  # a client is compared with the mean of the others' uploads as they came

    @cached_property
    def _shared(self) -> list[str]:
        """The parameters that travel and that the server averages; FedPAC's heads are mixed for each client instead."""
        held = self.base.init_server({n: torch.zeros(s) for n, s in self.info.shapes.items()})
        stays = self.base.private()
        return [n for n in self.info.parameters if n not in stays and n in held]

    # State: the sum of scores of every round, which round's uploads are in the server's model and with how much weight
    # behind each position, each client's last score, and what a client last sent and saw

    def init_server(self, params: Params) -> Params:
        totals = torch.zeros(self.setup.training.num_rounds + 1, dtype=torch.float64, device=_like(params).device)
        newest = torch.full((), -1, dtype=torch.int64, device=totals.device)
        weight = tree.prefixed(self.base.init_coverage(params), "coverage")
        return super().init_server(params) | self.own({"totals": totals, "newest": newest} | weight)

    def init_known(self, params: Params, ids: Tensor) -> Params:
        last = torch.full((len(ids),), -1, dtype=torch.int64, device=_like(params).device)
        return super().init_known(params, ids) | self.own(
            {"score": torch.zeros_like(last, dtype=torch.float64), "round": last}
        )

    def init_clients(self, params: Params, ids: Tensor) -> Params:
        model = {n: params[n] for n in self._shared}
        mine: Params = {"round": torch.full((), -1, dtype=torch.int32, device=_like(params).device)}
        for what in ("received", "sent"):
            mine |= tree.prefixed({n: torch.zeros_like(t) for n, t in model.items()}, what)
        for what in ("where", "had"):  # it uploaded, it received
            mine |= tree.prefixed({n: torch.ones_like(t, dtype=torch.bool) for n, t in model.items()}, what)
        return super().init_clients(params, ids) | self.own(tree.stack(mine, len(ids)))

    def newcomer(self, params: Params, down: Download, ids: Tensor) -> Params:
        return self.init_clients(params, ids) | super().newcomer(params, down, ids)

    # A round

    def _share(self, server: Params, known: Params) -> Tensor:
        """alpha of each client's last upload, `[C]`; zero for one that never sent any."""
        totals, score, last = self.mine(server)["totals"], self.mine(known)["score"], self.mine(known)["round"]
        total = totals[last.clamp(min=0)]
        return torch.where((last >= 0) & (total > 0), score / total.clamp(min=torch.finfo(total.dtype).tiny), 0.0)

    def download(self, server: Params, known: Params, rnd: Round) -> Download:
        down, last = super().download(server, known, rnd), self.mine(known)["round"]
        inside = (last >= 0) & (last == self.mine(server)["newest"])  # whose upload is in the server's model
        shared: Payload = {}
        own: Payload = {"share": torch.where(inside, self._share(server, known), 0)}
        received = tree.masks(down.shared | down.own)
        for n, weight in tree.under(self.mine(server), "coverage").items():
            if weight.dtype == torch.bool:
                shared[f"coverage/{n}"] = weight
                continue
            some = (weight > 0) & (weight < 1)  # not all clients sent these positions
            if not some.any():
                continue
            rows = (some & received[n] if n in received else some).expand(len(last), *weight.shape)
            own[f"coverage/{n}"] = Masked(weight.expand_as(rows), rows & tree.column(inside, rows))
        return Download(down.shared | tree.prefixed(shared, self.prefix), down.own | tree.prefixed(own, self.prefix))

    def start(self, kept: Params, down: Payload, rnd: Round) -> ClientState:
        local, sent = super().start(kept, down, rnd), tree.values(down)
        begin = {n: local.params[n] for n in self._shared}
        masks = tree.masks(down)
        got = {n: masks.get(n, torch.ones_like(t, dtype=torch.bool)) for n, t in begin.items() if n in sent}
        now = {n: torch.where(m, sent[n], begin[n]) for n, m in got.items()}  # its own where the server sent nothing
        share, had = sent[f"{self.prefix}/share"], self.mine(kept)
        mine = {n: t for n, t in had.items() if n.startswith(("received/", "had/"))} | {"round": had["round"]}
        mine |= tree.prefixed(begin, "begin") | tree.prefixed(now, "now") | tree.prefixed(got, "got")
        mine |= tree.prefixed(self._others(had, now, got, share, tree.under(down, f"{self.prefix}/coverage")), "others")
        mine |= {"loss": torch.ones_like(share)}
        return replace(local, fixed=local.fixed | self.own(mine))

    def _others(self, mine: Params, now: Params, got: Params, share: Tensor, coverage: Payload) -> Params:
        """w_{-n}: the newest aggregation without the client, from what it kept (`mine`) and received."""
        eta = self.setup.training.server_lr
        before, had, sent, where = (tree.under(mine, p) for p in ("received", "had", "sent", "where"))
        out = {}
        for n, w in now.items():
            s = torch.where(where[n] & got[n], _share_of(share, coverage.get(n), w), 0)
            alike = before[n] + eta * (sent[n] - before[n])  # what the client alone would have made of the model
            rest = _less(w, s, alike, before[n])
            # A client that was not sent the old value takes it for the others'; its own goes out all the same.
            apart = _less(w, eta * s, sent[n], w)
            out[n] = torch.where(s > 0, torch.where(had[n], rest, apart), w)
        return out

    def turns(self, local: ClientState, rnd: Round) -> list[LocalWork]:
        plays = super().turns(local, rnd)
        return [DataPass(self._others_loss, self._noted), *plays] if self.prediction and rnd.stage.up else plays

    def _others_loss(self, task: Task, local: ClientState, batch: Batch) -> Params:
        others = tree.under(self.mine(local.fixed), "others")
        out = task.model(local.params | others, batch.x, batch.valid)
        loss = batch.mean(per_example(task.criterion, out, batch.y))
        return {"loss": loss * batch.count, "count": batch.count}

    def _noted(self, local: ClientState, sums: Params) -> ClientState:
        return replace(local, fixed=local.fixed | self.own({"loss": sums["loss"] / sums["count"]}))

    def upload(self, local: ClientState, rnd: Round) -> Payload:
        out, mine = super().upload(local, rnd), self.mine(local.fixed)
        score = mine["loss"] if self.prediction else torch.zeros_like(mine["loss"])
        if self.gradient:
            where = self._positions(local, {} if self.everywhere else out)
            score = score + self._turned(mine, self._updates(local, where), where)
        return out | self.own({"score": score})

    def _positions(self, local: ClientState, upload: Payload) -> Params:
        """The positions each client shares: those it uploads."""
        masks = tree.masks(upload)
        return {n: masks.get(n, torch.ones_like(local.params[n], dtype=torch.bool)) for n in self._shared}

    def _updates(self, local: ClientState, where: Params) -> Params:
        """delta_n: the model before the session minus the model after it, at these positions."""
        begin = tree.under(self.mine(local.fixed), "begin")
        return {n: torch.where(where[n], w - local.params[n], 0) for n, w in begin.items()}

    def _turned(self, mine: Params, update: Params, where: Params) -> Tensor:
        """G_n by what the client knows: 1 in its first session."""
        got, before, had, others = (tree.under(mine, p) for p in ("got", "received", "had", "others"))
        moved, compared = {}, {}
        for n, rest in others.items():
            seen = where[n] & got[n] & had[n]
            moved[n] = torch.where(seen, before[n] - rest, 0)
            compared[n] = torch.where(seen, update[n], 0)
        return torch.where(mine["round"] < 0, 1.0, _apart(compared, moved))

    def keep(self, kept: Params, local: ClientState, rnd: Round) -> Params:
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
        return tree.values(upload)[f"{self.prefix}/score"].to(examples.dtype)

    def summands(self, upload: Payload, weights: Tensor, rnd: Round) -> Params:
        return super().summands(upload, weights, rnd) | self.own({"total": weights})

    def remember(self, known: Params, upload: Payload, weights: Tensor, rnd: Round) -> Params:
        last = torch.full_like(self.mine(known)["round"], rnd.number)
        return super().remember(known, upload, weights, rnd) | self.own({"score": weights, "round": last})

    def aggregate(self, server: Params, sums: Params, rnd: Round) -> Params:
        mine = self.mine(server)
        totals, newest = mine["totals"].clone(), torch.full_like(mine["newest"], rnd.number)
        totals[rnd.number] = self.mine(sums)["total"]
        found, coverage = self.base.coverage(self.theirs(sums)), {}
        for n, old in tree.under(mine, "coverage").items():
            weight = found.get(n, torch.ones_like(old))
            if old.dtype != torch.bool:
                weight = torch.where(weight > 1 - 1e-12, 1, weight)  # sums of the same terms may differ by rounding
            coverage[f"coverage/{n}"] = weight.to(old.dtype)
        new = {"totals": totals, "newest": newest} | coverage
        return super().aggregate(server, sums, rnd) | self.own(new)


def _share_of(share: Tensor, coverage: Tensor | Masked | None, like: Tensor) -> Tensor:
    """Each client's share of the mean of each position `[C, ...]`, from its share of all weight `[C]`."""
    whole = tree.column(share, like).to(like.dtype)
    if isinstance(coverage, Masked):
        return whole / torch.where(coverage.mask, coverage.values, 1)
    return whole.expand_as(like) if coverage is None else torch.where(coverage, whole, 0)


def _less(mean: Tensor, share: Tensor, part: Tensor, alone: Tensor) -> Tensor:
    """A mean without the part that has this share of it; `alone` where what is left is lost in rounding."""
    left = 1 - share
    found = left > torch.finfo(mean.dtype).eps ** 0.5
    return torch.where(found, (mean - share * part) / torch.where(found, left, 1), alone)


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
