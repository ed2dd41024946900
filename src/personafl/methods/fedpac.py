"""FedPAC: features aligned over clients, and for each client the best mixture of everybody's heads.

Xu, Tong, Huang, "Personalized Federated Learning with Feature Alignment and Classifier Collaboration", ICLR 2023,
Algorithm 1. Before training a client measures its class frequencies p_k, mean features mu_k, h_k = p_k mu_k and the
variance V = (sum_k p_k E|f|^2_k - sum_k p_k^2 |mu_k|^2) / n. Then it trains the head, then the body with features
pulled to the global prototype of their class. The server gives client i the head sum_j a_ij head_j, a_i minimising a'
P a over the simplex, P_jl = [j = l] V_j + sum_k <h_ik - h_jk, h_ik - h_lk>. Weights below 0.001 are dropped, as in
the authors' code. A head is combined over the clients of one round; who was not among them keeps the head it has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from personafl.core import tree
from personafl.core.algorithm import Algorithm
from personafl.core.errors import UserError
from personafl.core.local_work import ClientState, DataPass, LocalWork, own_loss, whole
from personafl.core.method_settings import FROM_TRAINING
from personafl.core.settings import setting
from personafl.core.tree import choose
from personafl.core.types import Batch, Download, Params, Payload, Round, Task, per_example
from personafl.methods import simplex


@dataclass(frozen=True, kw_only=True)
class FedPAC(Algorithm):
    """A shared body with class prototypes; each client's head is a mixture of all heads of a round."""

    evaluates: ClassVar[str] = "the global body under the client's combined head"
    newcomers: ClassVar[str] = "the global body under the initial head, trained for a session"
    from_recipe: ClassVar[tuple[str, ...]] = (*FROM_TRAINING, "head_lr")
    class_labels_for: ClassVar[str] = "the mean features of each class"

    alignment_weight: float = setting(1.0, "pull of features to the prototype of their class (lambda)")
    head_epochs: float = setting(1.0, "epochs of the head before the body's")
    head_lr: float | None = setting(0.1, "learning rate of the head in every round (recipe: the round's)")

    def check(self) -> None:
        for name in ("alignment_weight", "head_epochs"):
            if getattr(self, name) < 0:
                raise UserError(f"{name}={getattr(self, name)}: must not be negative")
        if self.head_lr is not None and self.head_lr <= 0:
            raise UserError(f"head_lr={self.head_lr}: must be greater than 0")

    def needs_uploads(self) -> bool:
        return True

    def not_averaged(self) -> bool:
        return True  # the server mixes the heads for each client

    # State

    def init_server(self, params: Params) -> Params:
        head = self.own_head()
        shared, first = super().init_server(params), next(iter(params.values()))
        classes = {
            "prototype/mean": first.new_zeros(self.info.outputs, self.features()),
            "prototype/have": torch.zeros(self.info.outputs, dtype=torch.bool, device=first.device),
        }
        return tree.exclude(shared, head) | tree.prefixed(tree.select(params, head), "first") | classes

    def init_known(self, params: Params, ids: Tensor) -> Params:
        head = {n: torch.zeros_like(t) for n, t in tree.select(params, self.own_head()).items()}
        given = torch.zeros((), dtype=torch.bool, device=next(iter(head.values())).device)
        return tree.stack(head | {"aux/given": given}, len(ids))

    def init_clients(self, params: Params, ids: Tensor) -> Params:
        head = tree.select(params, self.own_head())
        joined = torch.zeros((), dtype=torch.bool, device=next(iter(head.values())).device)
        mine = tree.stack(tree.prefixed(head, "own") | {"aux/joined": joined}, len(ids))
        return super().init_clients(params, ids) | mine

    def welcome(self) -> str:
        return "newcomer"

    # A round

    def download(self, server: Params, known: Params, rnd: Round) -> Download:
        first = tree.stack(tree.under(server, "first"), tree.rows(known))
        head: Payload = dict(choose(known["aux/given"], tree.select(known, first), first))
        return Download(shared=dict(tree.without(server, "first")), own=head)

    def start(self, kept: Params, down: Payload, rnd: Round) -> ClientState:
        sent = tree.values(down)
        count, (classes, size) = tree.rows(kept), (self.info.outputs, self.features())
        like = next(iter(sent.values()))
        sums = {"count": like.new_zeros(count, classes), "square": like.new_zeros(count, classes)}
        sums["sum"] = like.new_zeros(count, classes, size)
        fixed = tree.prefixed(sums, "before") | tree.prefixed(sums, "after")
        fixed |= {n: t for n, t in sent.items() if n.startswith("prototype/")}
        return ClientState(tree.select(sent, self.info.shapes) | tree.select(kept, self.stays_on_client()), fixed)

    def turns(self, local: ClientState, rnd: Round) -> list[LocalWork]:
        head = [n for n in self.info.parameters if n in self.info.head]
        body = [n for n in self.info.parameters if n not in self.info.head]
        if rnd.phase == "newcomer":
            return [self.usual_turn(whole(head), lr=self.head_lr)]
        loss = self._aligned if rnd.number and self.alignment_weight else own_loss
        return [
            DataPass(self._by_class, self._noted("before")),
            self.usual_turn(whole(head), self.head_epochs, lr=self.head_lr),
            self.usual_turn(whole(body), loss=loss),
            DataPass(self._by_class, self._noted("after")),
        ]

    def _by_class(self, task: Task, local: ClientState, batch: Batch) -> Params:
        """Per class the number of examples and the sums of their features and of the features' squared lengths."""
        z, _ = task.model.features(local.params, batch.x, batch.valid)
        member = one_hot(batch.y, self.info.outputs).to(z.dtype)  # [C, B, K]
        if batch.valid is not None:
            member = member * batch.valid.unsqueeze(2)
        square = (member * z.square().sum(-1, keepdim=True)).sum(1)
        return {"count": member.sum(1), "sum": member.transpose(1, 2) @ z, "square": square}

    def _noted(self, when: str) -> Callable[[ClientState, Params], ClientState]:
        def update(local: ClientState, sums: Params) -> ClientState:
            like = local.fixed[f"{when}/sum"]
            return replace(local, fixed=local.fixed | tree.prefixed({n: t.to(like) for n, t in sums.items()}, when))

        return update

    def _means(self, local: ClientState, when: str) -> Params:
        """mu_k and n_k."""
        found = tree.under(local.fixed, when)
        return {"mean": found["sum"] / found["count"].clamp(min=1).unsqueeze(2), "count": found["count"]}

    def _aligned(self, task: Task, local: ClientState, batch: Batch) -> Tensor:
        z, out = task.model.features(local.params, batch.x, batch.valid, batch.keys)
        have = local.fixed["prototype/have"].unsqueeze(2)
        prototype = torch.where(have, local.fixed["prototype/mean"], self._means(local, "before")["mean"])
        target = prototype.gather(1, batch.y.unsqueeze(2).expand(-1, -1, z.shape[2]))  # [C, B, D]
        away = (z - target).square().mean(-1)
        return batch.mean(per_example(task.criterion, out, batch.y) + self.alignment_weight * away)

    def upload(self, local: ClientState, rnd: Round) -> Payload:
        before, seen = tree.under(local.fixed, "before"), self._means(local, "before")
        n = before["count"].sum(1).clamp(min=1)
        p = before["count"] / n.unsqueeze(1)  # [C, K]
        h = p.unsqueeze(2) * seen["mean"]
        variance = ((before["square"] / n.unsqueeze(1)).sum(1) - h.square().sum((1, 2))) / n
        mine = {"stat/h": h, "stat/variance": variance} | tree.prefixed(self._means(local, "after"), "prototype")
        return dict(super().upload(local, rnd)) | dict(mine)

    def keep(self, kept: Params, local: ClientState, rnd: Round) -> Params:
        if rnd.phase != "newcomer":
            return super().keep(kept, local, rnd)
        head = tree.prefixed(tree.select(local.params, self.info.head), "own")
        return super().keep(kept, local, rnd) | head | {"aux/joined": torch.ones_like(kept["aux/joined"])}

    def summands(self, upload: Payload, weights: Tensor, rnd: Round) -> Params:
        sent = tree.values(upload)
        body = {n: t for n, t in sent.items() if n in self.info.shapes and n not in self.info.head}
        number = sent["prototype/count"]
        classes = {"prototype/mean": sent["prototype/mean"] * number.unsqueeze(2), "prototype/count": number}
        return super().summands(dict(body), weights, rnd) | classes

    def aggregate(self, server: Params, sums: Params, rnd: Round) -> Params:
        body = tree.select(server, self.info.shapes)
        number = sums["prototype/count"].unsqueeze(1)
        old = server["prototype/mean"]
        mean = torch.where(number > 0, sums["prototype/mean"] / number.clamp(min=1), old.double()).to(old.dtype)
        have = server["prototype/have"] | (number > 0).squeeze(1)
        return server | super().aggregate(body, sums, rnd) | {"prototype/mean": mean, "prototype/have": have}

    def remember(self, known: Params, upload: Payload, weights: Tensor, rnd: Round) -> Params:
        sent = tree.values(upload)
        mix = mixture(sent["stat/h"].flatten(1), sent["stat/variance"]).to(sent["stat/h"])  # [C, C]
        heads = {n: torch.einsum("ij,j...->i...", mix, sent[n]) for n in self.info.head}
        return known | heads | {"aux/given": torch.ones_like(known["aux/given"])}

    # Prediction

    def personal(self, kept: Params, down: Payload) -> Params:
        given = super().personal(kept, down)
        own = tree.under(kept, "own")
        return given | choose(kept["aux/joined"], own, tree.select(given, own))

    def common(self, down: Payload) -> Params | None:
        return None


def mixture(h: Tensor, variance: Tensor) -> Tensor:
    """a_ij: how much of client j's head client i takes, from `h` `[C, M]` and V `[C]`: `[C, C]` float64."""
    h, variance = h.double().cpu(), variance.double().cpu()
    rows = []
    for mine in h:
        apart = mine - h
        form = torch.diag(variance) + apart @ apart.T
        size, axes = torch.linalg.eigh(form)
        if float(size[0]) < -1e-9 * float(size[-1]):
            form = axes @ torch.diag(torch.where(size < 0.01, 0, size)) @ axes.T
        a = simplex.least(form)
        a = torch.where(a < 1e-3, 0, a)
        rows.append(a / a.sum())
    return torch.stack(rows)
