"""FedNova: local updates normalised by how many steps made them.

Wang, Liu, Liang, Joshi, Poor, "Tackling the Objective Inconsistency Problem in Heterogeneous Federated
Optimization", NeurIPS 2020. A client sends d = (w - w_i) / a_i and a_i; the server steps by
tau_eff sum p_i d_i with tau_eff = sum p_i a_i. For SGD a_i is the number of steps, with momentum rho
(tau - rho (1 - rho^tau) / (1 - rho)) / (1 - rho).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from personafl.core import tree
from personafl.core.algorithm import Algorithm, Local
from personafl.core.types import Params, Payload, Round


@dataclass(frozen=True, kw_only=True)
class FedNova(Algorithm):
    """FedAvg in which clients with more steps do not pull further for it."""

    evaluates: ClassVar[str] = "the global model"

    def start(self, kept: Params, down: Payload, rnd: Round) -> Local:
        sent = tree.values(down)
        return Local(params=sent | kept, fixed=tree.prefixed(tree.select(sent, self.info.parameters), "received"))

    def upload(self, local: Local, rnd: Round) -> Payload:
        assert local.steps is not None
        received = tree.under(local.fixed, "received")
        like = next(iter(received.values()))
        training = self.setup.training
        tau, rho = local.steps.to(like.device).double(), training.momentum if training.optimizer == "sgd" else 0.0
        a = (tau - rho * (1 - rho**tau) / (1 - rho)) / (1 - rho)
        a = a.to(like.dtype)
        d = {n: (w - local.params[n]) / tree.column(a, w) for n, w in received.items()}
        return dict(super().upload(local, rnd)) | dict(d) | {"count/a": a}

    def updates(self, server: Params, upload: Payload) -> Params:
        sent = tree.values(upload)
        return {n: sent[n] * tree.column(sent["count/a"], sent[n]) for n in self.info.parameters}

    def aggregate(self, server: Params, sums: Params, rnd: Round) -> Params:
        total = sums["count/weight"]
        tau = sums["count/a"] / total
        rate = self.setup.training.server_lr
        mean = super().aggregate(tree.exclude(server, self.info.parameters), sums, rnd)  # running statistics
        step = {n: (server[n] - rate * tau * sums[n] / total).to(server[n].dtype) for n in self.info.parameters}
        return server | mean | step
