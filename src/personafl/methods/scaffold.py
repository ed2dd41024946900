"""SCAFFOLD: control variates against client drift.

Karimireddy, Kale, Mohri, Reddi, Stich, Suresh, "SCAFFOLD: Stochastic Controlled Averaging for Federated
Learning", ICML 2020, Algorithm 1 with option II. All control variates begin at zero; the server's moves by
|S| / N of the mean change, as in the paper. The correction enters as a linear term of the loss, and option II takes
(x - y) / (K eta) for the mean gradient: both hold for plain SGD, so neither momentum, clipping nor another optimiser of
the recipe is taken, unless they are set on the method itself.

So c is always the mean of all c_i, which corrections that cancel over the clients need: the uniform one, or by
examples with `weights = "examples"`. Contributions (`cowa`) change from round to round and weigh the model alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from personafl.core import tree
from personafl.core.algorithm import Algorithm
from personafl.core.errors import UserError
from personafl.core.local_work import ClientState, LocalWork, whole
from personafl.core.types import Batch, OptimizerName, Params, Payload, Round, Setup, Task


@dataclass(frozen=True, kw_only=True)
class Scaffold(Algorithm):
    """FedAvg whose local gradients are corrected by how far a client's differ from the average."""

    evaluates: ClassVar[str] = "the global model"

    optimizer: OptimizerName | None = "sgd"
    momentum: float | None = 0.0
    grad_clip: float | None = 0.0
    weights: str = "uniform"

    def bind(self, setup: Setup) -> Self:
        if self.weights == "examples" and not setup.num_examples:
            raise UserError("weights='examples': Scaffold must know how many examples all clients have together")
        return super().bind(setup)

    def not_averaged(self) -> bool:
        return True  # the control variates are sums of changes over clients

    def init_server(self, params: Params) -> Params:
        zero = {n: torch.zeros_like(params[n]) for n in self.info.parameters}
        return super().init_server(params) | tree.prefixed(zero, "control")

    def init_clients(self, params: Params, ids: Tensor) -> Params:
        zero = {f"own/{n}": torch.zeros_like(params[n]) for n in self.info.parameters}
        return super().init_clients(params, ids) | tree.stack(zero, len(ids))

    def start(self, kept: Params, down: Payload, rnd: Round) -> ClientState:
        sent = tree.values(down)
        model = tree.select(sent, self.info.shapes)
        fixed = tree.prefixed(tree.select(sent, self.info.parameters), "received")
        fixed |= tree.prefixed(tree.under(sent, "control"), "control") | tree.prefixed(tree.under(kept, "own"), "own")
        return ClientState(params=model | tree.select(kept, self.stays_on_client()), fixed=fixed)

    def turns(self, local: ClientState, rnd: Round) -> list[LocalWork]:
        return [self.usual_turn(whole(self.info.parameters), loss=self._corrected)]

    def _corrected(self, task: Task, local: ClientState, batch: Batch) -> Tensor:
        """The gradient of <c - c_i, y> is the correction of the local step."""
        c, own = tree.under(local.fixed, "control"), tree.under(local.fixed, "own")
        drift = [tree.flat((c[n] - own[n]) * local.params[n]).sum(1) for n in c]
        return task.loss(local.params, batch) + torch.stack(drift).sum(0)

    def _new_control(self, local: ClientState, rnd: Round) -> Params:
        """Option II: c_i - c + (x - y) / (K eta)."""
        assert local.steps is not None
        c, own, x = (tree.under(local.fixed, p) for p in ("control", "own", "received"))
        scale = 1 / (local.steps.to(next(iter(x.values())).device).double() * rnd.lr)
        return {n: own[n] - c[n] + (x[n] - local.params[n]) * tree.column(scale, c[n]).to(c[n].dtype) for n in c}

    def upload(self, local: ClientState, rnd: Round) -> Payload:
        new, own = self._new_control(local, rnd), tree.under(local.fixed, "own")
        change = tree.prefixed({n: new[n] - own[n] for n in new}, "control")
        return dict(super().upload(local, rnd)) | dict(change)

    def keep(self, kept: Params, local: ClientState, rnd: Round) -> Params:
        return super().keep(kept, local, rnd) | tree.prefixed(self._new_control(local, rnd), "own")

    def lasting(self, upload: Payload, examples: Tensor, rnd: Round) -> Params:
        """The changes of c_i, as they enter c."""
        count = examples if self.weights == "examples" else torch.ones_like(examples)
        change = {n: t for n, t in tree.values(upload).items() if n.startswith("control/")}
        return {n: t * tree.column(count, t).to(t.dtype) for n, t in change.items()}

    def withdraw(self, server: Params, lasting: Params) -> Params:
        return server | {n: (server[n] - t / self._everybody).to(server[n].dtype) for n, t in lasting.items()}

    @property
    def _everybody(self) -> int:
        """|S| / N of the mean over S is the sum over N; by examples all there are take N's place."""
        return self.setup.num_examples if self.weights == "examples" else self.setup.num_clients

    def summands(self, upload: Payload, weights: Tensor, rnd: Round) -> Params:
        control = self.lasting(upload, weights, rnd)
        return super().summands(tree.exclude(upload, control), weights, rnd) | control

    def aggregate(self, server: Params, sums: Params, rnd: Round) -> Params:
        model = super().aggregate(tree.select(server, self.info.shapes), sums, rnd)
        everybody, held = self._everybody, {n: c for n, c in server.items() if n.startswith("control/")}
        control = {n: (c + sums[n] / everybody).to(c.dtype) for n, c in held.items()}
        return server | model | control
