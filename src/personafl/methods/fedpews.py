"""FedPeWS: a warm-up in which every client trains a subnetwork that it learns, then any method.

Tastan, Horvath, Takac, Nandakumar, "FedPeWS: Personalized Warmup via Subnetworks for Enhanced Heterogeneous Federated
Learning", 2024, Algorithm 1. A client has a score s per hidden unit; units are on with probability sigma(s). On every
minibatch it first moves s (weights fixed) by the loss minus lambda |sigma(s) - theta|^2, theta the mean of the others'
probabilities, then the weights (s fixed) under a fresh draw; it sends the weights of a last draw.

Choices, as docs/algorithms/fedpews.md says: `ste = "parameter"` multiplies the weights on both sides of a unit, as the
paper's x G(s), `"activation"` its activation (they differ in the gradient of s alone); clients send the change of
sigma(s), so the server's theta is a sum.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from personafl.core import rng, tree
from personafl.core.errors import UserError
from personafl.core.local_work import ClientState, Turn, whole
from personafl.core.optim import SGD
from personafl.core.settings import setting
from personafl.core.types import Batch, Download, Params, Payload, Round, Task
from personafl.methods.warmup import Gated, WarmUp


@dataclass(frozen=True, kw_only=True)
class FedPeWS(WarmUp):
    """A warm-up in which clients learn which units are theirs."""

    diversity_weight: float = setting(2.0, "push of unit probabilities away from the others' (lambda)")
    score_lr: float = setting(0.1, "learning rate of the unit scores (eta_s)")
    score_init: float = setting(0.0, "unit scores at first (s_0)")
    ste: str = setting(
        "parameter", "what a unit's draw multiplies, for the gradient of scores", ("activation", "parameter")
    )

    def check(self) -> None:
        super().check()
        if self.diversity_weight < 0 or self.score_lr < 0:
            raise UserError("diversity_weight and score_lr must not be negative")

    def _theta(self, params: Params) -> Params:
        like = next(iter(params.values()))
        first = torch.sigmoid(torch.tensor(self.score_init, dtype=like.dtype))
        return {layer.weight: like.new_full((layer.shape[0],), float(first)) for layer in self.hidden}

    def init_clients(self, params: Params, ids: Tensor) -> Params:
        like = next(iter(params.values()))
        scores = {layer.weight: like.new_full((layer.shape[0],), self.score_init) for layer in self.hidden}
        return super().init_clients(params, ids) | self.own(tree.stack(tree.prefixed(scores, "score"), len(ids)))

    def newcomer(self, params: Params, down: Download, ids: Tensor) -> Params:
        scores = tree.under(self.init_clients(params, ids), self.prefix)
        return super().newcomer(params, down, ids) | self.own(scores)

    def start(self, kept: Params, down: Payload, rnd: Round) -> ClientState:
        local = super().start(kept, down, rnd)
        if rnd.phase != "warm-up":
            return local
        mine, clients = self.mine(local.fixed), self.setup.num_clients
        scores = tree.under(mine, "score")
        last = {n: s.sigmoid() for n, s in scores.items()}
        others = {n: (clients * t - last[n]) / max(clients - 1, 1) for n, t in tree.under(mine, "theta").items()}
        fixed = local.fixed | self.own(tree.prefixed(others, "others") | tree.prefixed(last, "last"))
        return replace(local, params=local.params | tree.prefixed(scores, "score"), fixed=fixed)

    def _turn(self, usual: Turn) -> Turn:
        weights = super()._turn(usual)
        names = [f"score/{layer.weight}" for layer in self.hidden]
        scores = self.usual_turn(
            whole(names),
            loss=self._scored,
            count_calls=False,  # units are multiplied by way of weights, which are none of the subnetwork's
            lr=self.score_lr,
            optimizer=SGD(),
            active=lambda local: tree.prefixed(self._active(local), "score"),
        )
        return replace(scores, then=weights)

    def _odds(self, local: ClientState) -> Params:
        return {n: s.sigmoid() for n, s in tree.under(local.params, "score").items()}

    def _draw(self, local: ClientState, keys: Tensor) -> tuple[Params, Params]:
        """Unit probabilities, and which units are on."""
        odds, on = {}, {}
        for i, layer in enumerate(self.hidden):
            odds[layer.weight] = local.params[f"score/{layer.weight}"].sigmoid()
            stream = rng.extend(rng.extend(keys, "units"), i)
            on[layer.weight] = rng.uniform(stream, layer.shape[0]) < odds[layer.weight].detach().double()
        return odds, on

    def _units(self, local: ClientState, keys: Tensor) -> Params:
        return self._draw(local, keys)[1]

    def _scored(self, task: Task, local: ClientState, batch: Batch) -> Tensor:
        """Procedure I: the drawn subnetwork's loss, straight through to the scores, less the distance to the others."""
        odds, on = self._draw(local, batch.keys)
        through = {n: on[n].to(p.dtype) + p - p.detach() for n, p in odds.items()}
        gated = Gated(task.model, self.layers, through, inputs_only=self.ste == "activation")
        apart = tree.squared_distance(odds, tree.under(self.mine(local.fixed), "others"))
        return replace(task, model=gated).loss(local.params, batch) - self.diversity_weight * apart

    def upload(self, local: ClientState, rnd: Round) -> Payload:
        out = super().upload(local, rnd)
        if rnd.phase != "warm-up":
            return out
        last = tree.under(self.mine(local.fixed), "last")
        change = {n: local.params[f"score/{n}"].sigmoid() - t for n, t in last.items()}
        return out | dict(self.own(tree.prefixed(change, "change")))

    def keep(self, kept: Params, local: ClientState, rnd: Round) -> Params:
        new = super().keep(kept, local, rnd)
        return (
            new | self.own(tree.prefixed(tree.under(local.params, "score"), "score")) if rnd.phase == "warm-up" else new
        )

    def summands(self, upload: Payload, weights: Tensor, rnd: Round) -> Params:
        return super().summands(upload, weights, rnd) | self._changes(upload)

    def _changes(self, upload: Payload) -> Params:
        """Those of clients' probabilities, of which theta is the sum over N."""
        return {n: t for n, t in tree.values(upload).items() if n.startswith(f"{self.prefix}/change/")}

    def lasting(self, upload: Payload, examples: Tensor, rnd: Round) -> Params:
        return super().lasting(upload, examples, rnd) | self._changes(upload)

    def withdraw(self, server: Params, lasting: Params) -> Params:
        gone = tree.under(self.mine(lasting), "change")
        if not gone or not tree.under(self.mine(server), "theta"):
            return super().withdraw(server, lasting)
        theta = tree.under(self.mine(server), "theta")
        left = {n: (theta[n] - t / self.setup.num_clients).to(theta[n].dtype) for n, t in gone.items()}
        return super().withdraw(server, lasting) | self.own(tree.prefixed(left, "theta"))

    def aggregate(self, server: Params, sums: Params, rnd: Round) -> Params:
        new = super().aggregate(server, sums, rnd)
        if rnd.phase != "warm-up":
            return new
        theta, change = (tree.under(self.mine(t), p) for t, p in ((server, "theta"), (sums, "change")))
        moved = {n: (t + change[n] / self.setup.num_clients).to(t.dtype) for n, t in theta.items()}
        return new | self.own(tree.prefixed(moved, "theta"))
