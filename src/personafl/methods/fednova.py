"""FedNova: local updates normalised by how many steps made them.

Wang, Liu, Liang, Joshi, Poor, "Tackling the Objective Inconsistency Problem in Heterogeneous Federated
Optimization", NeurIPS 2020, with the authors' code. After tau steps from w a client is at
w_i = w - eta sum_k a_k g_k, where the vector a depends on the local solver alone. It sends a_i = ||a||_1 and
d_i = (w - w_i) / a_i; the server steps by tau_eff sum p_i d_i with tau_eff = sum p_i a_i. For SGD a_i is the number of
steps, with momentum rho (tau - rho (1 - rho^tau) / (1 - rho)) / (1 - rho), with a proximal term
mu / 2 ||w_i - w||^2 in the loss (1 - (1 - eta mu)^tau) / (eta mu).

With a proximal term tau_eff is what it would be without, so that the pull does not shorten the server's step: without
momentum sum p_i tau_i, as in the authors' code. `server_momentum` is that code's slow momentum (Wang, Tantia, Ballas,
Rabbat, "SlowMo", ICLR 2020): u <- beta u + tau_eff sum p_i d_i / eta, w <- w - eta_g eta u.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from personafl.core import tree
from personafl.core.algorithm import Algorithm
from personafl.core.errors import UserError
from personafl.core.local_work import ClientState, LocalWork, Pull, whole
from personafl.core.settings import setting
from personafl.core.types import Download, Params, Payload, Round


@dataclass(frozen=True, kw_only=True)
class FedNova(Algorithm):
    """FedAvg in which clients with more steps do not pull further for it."""

    evaluates: ClassVar[str] = "the global model"

    proximal_weight: float = setting(0.0, "how strongly a local model is pulled to the received one (mu)")
    server_momentum: float = setting(0.0, "momentum of the server's steps (beta)")

    def check(self) -> None:
        if self.proximal_weight < 0:
            raise UserError(f"proximal_weight={self.proximal_weight}: must not be negative")
        if not 0 <= self.server_momentum < 1:
            raise UserError(f"server_momentum={self.server_momentum}: must be in [0, 1)")

    def not_averaged(self) -> bool:
        return True  # uploads are moves divided by their numbers of steps

    def init_server(self, params: Params) -> Params:
        server = super().init_server(params)
        if not self.server_momentum:
            return server
        return server | {f"momentum/{n}": torch.zeros_like(params[n]) for n in self.info.parameters}

    def download(self, server: Params, known: Params, rnd: Round) -> Download:
        return super().download(tree.without(server, "momentum"), known, rnd)

    def start(self, kept: Params, down: Payload, rnd: Round) -> ClientState:
        sent = tree.values(down)
        return ClientState(params=sent | kept, fixed=tree.prefixed(tree.select(sent, self.info.parameters), "received"))

    def turns(self, local: ClientState, rnd: Round) -> list[LocalWork]:
        return [self.usual_turn(whole(self.info.parameters), pulls=(Pull("received", self.proximal_weight),))]

    def _length(self, steps: Tensor, pull: float) -> Tensor:
        """||a||_1 of each number of steps, `[C]` float64, for the momentum rho and a pull of eta mu.

        a_k is where a gradient of one, taken in step k, has brought the model by the end. In the step after it the
        model has moved by 1; from then on its velocity is rho times that of the step before, less the pull.
        """
        training = self.setup.training
        rho, pull = (training.momentum, pull) if training.optimizer == "sgd" else (0.0, 0.0)
        moved, velocity, lengths = 1.0, 1.0, [0.0]
        for _ in range(max(steps.tolist(), default=0)):
            lengths.append(lengths[-1] + abs(moved))
            velocity = rho * velocity - pull * moved
            moved += velocity
        return torch.tensor(lengths, dtype=torch.float64)[steps.long()]

    def upload(self, local: ClientState, rnd: Round) -> Payload:
        assert local.steps is not None
        received = tree.under(local.fixed, "received")
        like = next(iter(received.values()))
        a = self._length(local.steps, rnd.lr * self.proximal_weight).to(like)
        d = {n: (w - local.params[n]) / tree.column(a, w) for n, w in received.items()}
        out = dict(super().upload(local, rnd)) | dict(d) | {"aux/a": a}
        return out | {"aux/tau": self._length(local.steps, 0.0).to(like)} if self.proximal_weight else out

    def aggregate(self, server: Params, sums: Params, rnd: Round) -> Params:
        total = sums["aux/weight"]
        tau = sums["aux/tau" if self.proximal_weight else "aux/a"] / total
        rate, beta = self.setup.training.server_lr, self.server_momentum
        model = tree.without(server, "momentum")
        mean = super().aggregate(tree.exclude(model, self.info.parameters), sums, rnd)  # running statistics
        move = {n: tau * sums[n] / total for n in self.info.parameters}
        if beta:
            u = {n: beta * server[f"momentum/{n}"] + t / rnd.lr for n, t in move.items()}
            mean |= {f"momentum/{n}": t.to(server[n].dtype) for n, t in u.items()}
            move = {n: rnd.lr * t for n, t in u.items()}
        step = {n: (server[n] - rate * t).to(server[n].dtype) for n, t in move.items()}
        return server | mean | step
