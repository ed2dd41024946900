"""The `inherit` slot: a private model that remembers, and teaches the one just downloaded.

Li, Zhan, Shao, Li, Song, "FedPHP: Federated Personalization with Inherited Private Models", ECML-PKDD 2021. A client
keeps an inherited private model (HPM) theta_p. In a session the downloaded model learns from it,

    (1 - lambda) loss + lambda transfer(downloaded, HPM)

and afterwards theta_p <- (1 - mu_k) trained + mu_k theta_p, with mu_k = mu z_k / (Q T) after z_k earlier sessions. The
first session has mu_k = 0, so the HPM keeps no trace of the random initialisation: the order of Algorithm 1 and of the
authors' code, whose bound of 0.9 on it is kept too. Around a method with several models the one without prefix, which
travels, is taught and inherited.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from personafl.core import tree
from personafl.core.algorithm import Algorithm, require_classes
from personafl.core.criteria import divergence
from personafl.core.errors import UserError
from personafl.core.local_work import ClientState, LocalWork, Loss, Turn, own_loss
from personafl.core.tree import choose
from personafl.core.types import Batch, Download, Model, Params, Payload, Round, Task, per_example
from personafl.plugins.mmd import mmd
from personafl.plugins.wrapper import MethodWrapper

_MOST = 0.9  # of the HPM that a session may keep under Mu-A
TRANSFERS = ("mmd", "kd", "l2", "prox")
MOMENTA = ("mu-a", "mu-b", "mu-c")
ANSWERS = ("inherited", "personalised", "both")


@dataclass(frozen=True)
class Inherit:
    """A private model inherited from session to session, which teaches the one just downloaded (FedPHP)."""

    transfer: str = field(
        default="mmd", metadata={"help": "how it teaches: features (mmd, l2), outputs (kd) or weights (prox)"}
    )
    weight: float = field(default=0.01, metadata={"help": "share of the teaching in the loss (lambda)"})
    temperature: float = field(default=4.0, metadata={"help": "of the softened outputs (tau), for kd"})
    momentum: str = field(
        default="mu-a", metadata={"help": "how much is kept: grows with selections, constant, or with rounds to 1"}
    )
    rate: float = field(default=0.9, metadata={"help": "the momentum's final (mu-a) or constant (mu-b) value (mu)"})
    answers: str = field(default="inherited", metadata={"help": "which model predicts"})

    def __post_init__(self) -> None:
        for name, possible in (("transfer", TRANSFERS), ("momentum", MOMENTA), ("answers", ANSWERS)):
            if getattr(self, name) not in possible:
                raise UserError(f"{name}={getattr(self, name)!r}: possible are {', '.join(possible)}")
        for name in ("weight", "rate"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(f"{name}={getattr(self, name)}: must be in [0, 1]")
        if self.temperature <= 0:
            raise UserError(f"temperature={self.temperature}: must be greater than 0")

    def around(self, method: Algorithm) -> Inherited:
        if self.transfer in ("mmd", "l2") and self.weight:
            method.features()
        task = method.setup.training.task
        if self.transfer == "kd" and self.weight:
            require_classes(task, "inherit.transfer='kd'", "probabilities of classes")
        if self.answers == "both":
            require_classes(task, "inherit.answers='both'", "probabilities of classes")
        return Inherited.around(method, slot=self)


@dataclass(frozen=True, kw_only=True)
class Inherited(MethodWrapper):
    """A method whose clients each keep an inherited private model."""

    prefix: ClassVar[str] = "inherited"
    plugin_point: ClassVar[str] = "inherit"

    slot: Inherit

    def needs_all_rounds(self) -> bool:
        return self.slot.momentum != "mu-b" or super().needs_all_rounds()

    def init_clients(self, params: Params, ids: Tensor) -> Params:
        return super().init_clients(params, ids) | self._begin(params, ids)

    def _begin(self, params: Params, ids: Tensor) -> Params:
        model = tree.select(params, self.info.shapes)
        sessions = torch.zeros((), dtype=torch.int32, device=next(iter(model.values())).device)
        mine = model | {"aux/sessions": sessions}
        if self.slot.answers != "inherited":
            mine |= tree.prefixed(model, "last")
        return self.own(tree.stack(mine, len(ids)))

    def newcomer(self, params: Params, down: Download, ids: Tensor) -> Params:
        received = tree.select(tree.values(down.shared), self.info.shapes)
        return super().newcomer(params, down, ids) | self._begin(params | received, ids)

    def welcome(self) -> str:
        return self.base.welcome() or "newcomer"

    def start(self, kept: Params, down: Payload, rnd: Round) -> ClientState:
        local = super().start(kept, down, rnd)
        return replace(local, fixed=local.fixed | self.own(self.mine(kept)))

    def turns(self, local: ClientState, rnd: Round) -> list[LocalWork]:
        plays = super().turns(local, rnd)
        return [self._taught(p) if isinstance(p, Turn) and self.slot.weight else p for p in plays]

    def _taught(self, turn: Turn) -> Turn:
        then = None if turn.then is None else self._taught(turn.then)
        pulls = tuple(replace(p, weight=(1 - self.slot.weight) * p.weight) for p in turn.pulls)
        taught = partial(self._loss, turn.loss)
        return replace(turn, loss=taught, pulls=pulls, then=then)

    def _loss(self, loss: Loss, task: Task, local: ClientState, batch: Batch) -> Tensor:
        share, transfer = self.slot.weight, self.slot.transfer
        teacher = tree.select(self.mine(local.fixed), self.info.shapes)
        if transfer == "prox":
            weights = tree.select(teacher, self.info.parameters)
            pull = tree.squared_distance(tree.select(local.params, weights), weights)
            return (1 - share) * loss(task, local, batch) + share * pull
        if loss is own_loss:  # one forward pass gives the loss and what is compared
            h, out = self._seen(task.model, local.params, batch, batch.keys)
            own = batch.mean(per_example(task.criterion, out, batch.y))
        else:
            own = loss(task, local, batch)
            statistics = {n: t.clone() for n, t in local.params.items() if n in self.info.buffers}
            h, out = self._seen(task.model, local.params | statistics, batch, batch.keys)
        with torch.no_grad():
            h_p, out_p = self._seen(task.model, teacher, batch, None)
        if transfer == "kd":
            tau = self.slot.temperature
            term = tau**2 * batch.mean(divergence(out_p / tau, out / tau))
        elif transfer == "l2":
            term = batch.mean((h - h_p).square().sum(-1)) / 2
        else:
            term = mmd(h, h_p, batch)
        return (1 - share) * own + share * term

    def _seen(self, model: Model, params: Params, batch: Batch, keys: Tensor | None) -> tuple[Tensor, Tensor]:
        """Features and outputs; for `kd` outputs alone, so that any model will do."""
        if self.slot.transfer == "kd":
            out = model(params, batch.x, batch.valid, keys)
            return out, out
        return model.features(params, batch.x, batch.valid, keys)

    def keep(self, kept: Params, local: ClientState, rnd: Round) -> Params:
        mine = self.mine(kept)
        trained, before = tree.select(local.params, self.info.shapes), mine["aux/sessions"]
        mu = self._momentum(before, rnd)
        new = {}
        for n, t in trained.items():
            share = tree.column(mu, t).to(t.dtype)
            new[n] = (1 - share) * t + share * mine[n]
        new["aux/sessions"] = before + 1
        if self.slot.answers != "inherited":
            new |= tree.prefixed(trained, "last")
        assert local.steps is not None
        went = local.steps.to(before.device) > 0  # a stage that only hands something over is no session
        return super().keep(kept, local, rnd) | self.own(choose(went, new, mine))

    def _momentum(self, sessions: Tensor, rnd: Round) -> Tensor:
        """mu_k of each client, `[C]` float64, from its number of earlier sessions."""
        training, form = self.setup.training, self.slot.momentum
        if form == "mu-a":
            expected = training.join_ratio * training.num_rounds  # Q T sessions, of which there may be a fraction
            return (self.slot.rate * sessions.double() / expected).clamp(max=_MOST)
        share = self.slot.rate if form == "mu-b" else min(rnd.number / training.num_rounds, 1.0)  # or t / T
        return torch.full_like(sessions, share, dtype=torch.float64)

    # Prediction

    def personal(self, kept: Params, down: Payload) -> Params:
        mine = self.mine(kept)
        inherited = tree.select(mine, self.info.shapes)
        if self.slot.answers == "inherited":
            return inherited
        base = tree.select(super().personal(kept, down), self.info.shapes)
        last = choose(mine["aux/sessions"] > 0, tree.under(mine, "last"), base)
        return last if self.slot.answers == "personalised" else inherited | tree.prefixed(last, "last")

    def after_training(self, kept: Params, local: ClientState, down: Payload, rnd: Round) -> Params:
        return self.personal(kept, down)

    def downloaded_model(self, kept: Params, down: Payload, rnd: Round) -> Params | None:
        """theta_s^k before training: theta_{t+1} in Eq. 4."""
        return self._alone(super().start(kept, down, rnd).params)

    def personalised_model(self, kept: Params, local: ClientState, down: Payload, rnd: Round) -> Params | None:
        """theta_s^k after training, whichever model predicts."""
        return self._alone(local.params)

    def _alone(self, params: Params) -> Params:
        """One model, in a form that `answer` takes."""
        model = tree.select(params, self.info.shapes)
        return model | tree.prefixed(model, "last") if self.slot.answers == "both" else model

    def answer(self, model: Model, own: Params, x: Tensor, valid: Tensor | None = None) -> Tensor:
        if self.slot.answers != "both":
            return model(own, x, valid)
        models = (tree.select(own, self.info.shapes), tree.under(own, "last"))
        return torch.stack([model(m, x, valid).softmax(-1) for m in models]).mean(0).log()

    def evaluated(self, when: str) -> str:
        own = {
            "inherited": "the client's inherited private model",
            "personalised": "the model the client last trained",
            "both": "the mean of the client's inherited and last trained model",
        }[self.slot.answers]
        return own if self.rule is None else self.rule.words(own)
