"""A warm-up on subnetworks before another method: what FedPeWS and FedPeWS-Fixed have in common.

For the first W rounds every client trains the hidden units that are on for it, and the server averages each weight over
those who had it. Then `base` takes over: its server begins with the warmed-up model, and its clients, where they keep
anything, receive it once (stage `hand-over`). In the warm-up a base that keeps nothing at its clients lends its loss
(FedProx's), which moves the subnetwork only.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import ClassVar, Self

import torch
from torch import Tensor

from personafl.core import tree
from personafl.core.algorithm import Algorithm
from personafl.core.errors import UserError
from personafl.core.local_work import ClientState, LocalWork, Loss, Pull, Turn, own_loss, whole
from personafl.core.model_wrapper import ModelAround
from personafl.core.plugin_points import Inference
from personafl.core.settings import setting
from personafl.core.types import (
    Batch,
    Download,
    Layer,
    Masked,
    Model,
    Params,
    Payload,
    Round,
    Setup,
    Stage,
    Task,
    Training,
)
from personafl.methods.fedavg import FedAvg
from personafl.plugins.assemble import assembled, require_common
from personafl.plugins.wrapper import MethodWrapper
from personafl.sparse import means, units


@dataclass(frozen=True, kw_only=True)
class WarmUp(MethodWrapper):
    """Subnetworks for the first rounds, then another method."""

    prefix: ClassVar[str] = "warm"
    evaluates: ClassVar[str] = "the global model"  # with another base what that evaluates
    newcomers: ClassVar[str] = "what its base method gives them"

    base: Algorithm = setting(FedAvg(weights="uniform"), "the method that is warmed up")
    weights: str = setting(
        "uniform", "what a client counts in the warm-up's mean; the base has its own", ("examples", "uniform")
    )
    warmup_share: float = setting(0.2, "share of the rounds that are warm-up (tau)")

    def check(self) -> None:
        if not 0 <= self.warmup_share < 1:
            raise UserError(f"warmup_share={self.warmup_share}: must be in [0, 1)")
        if isinstance(self.base, WarmUp):
            raise UserError("base: a warm-up cannot warm up another warm-up")
        if self.robust is not None:
            raise UserError("robust: a warm-up has no robust mean; set it on the base, whose rounds have one")
        if self.inherit is not None:
            if self.base.inherit is not None:
                raise UserError("inherit: set it here or on the base, not on both")
            replace(self.base, inherit=self.inherit)  # which refuses it where the base does

    def bind(self, setup: Setup) -> Self:
        mine = super().bind(setup)
        training, first = mine.setup.training, mine.warmup
        later = replace(
            training,
            num_rounds=training.num_rounds - first,
            lr=training.rate(first),
            lr_milestones=tuple(m - first for m in training.lr_milestones if m > first),
        )
        base = assembled(self.base, replace(mine.setup, training=later))
        units.require_chain(mine.info, type(self).__name__)
        bound = replace(mine, base=base, inference=base.inference if mine.inference == "own" else mine.inference)
        require_common(base, bound)
        return bound

    @property
    def rule(self) -> Inference | None:
        return super().rule if self.inference != "own" else self.base.rule

    @property
    def warmup(self) -> int:
        """W: how many rounds of warm-up there are; the base always has one left."""
        rounds = self.setup.training.num_rounds
        return min(round(self.warmup_share * rounds), rounds - 1)

    @property
    def layers(self) -> tuple[Layer, ...]:
        return self.info.layers

    @property
    def hidden(self) -> tuple[Layer, ...]:
        return self.info.layers[:-1]

    @cached_property
    def _base_keeps(self) -> bool:
        """Whether the base's clients keep anything."""
        return bool(self.base.init_clients(self._blank, torch.zeros(1, dtype=torch.int64)))

    @cached_property
    def _lends(self) -> bool:
        """Whether the base's loss can be had with the model alone: nothing kept, nothing else sent."""
        return not self._base_keeps and self.base.init_server(self._blank).keys() <= self.info.shapes.keys()

    @property
    def _blank(self) -> Params:
        return {n: torch.zeros(s) for n, s in self.info.shapes.items()}

    # Rounds

    def needs_all_rounds(self) -> bool:
        return self.warmup > 0 or super().needs_all_rounds()

    def schedule(self) -> list[Stage]:
        first = self.warmup
        later = [replace(s, number=s.number + first) for s in self.base.schedule()]
        if not first:
            return later
        hand_over = (
            [Stage(number=first, phase="hand-over", who="all", up=False, evaluated=False)] if self._base_keeps else []
        )
        return [*(Stage(number=t, phase="warm-up") for t in range(first)), *hand_over, *later]

    def inner_stage(self, stage: Stage) -> Stage:
        return replace(stage, number=stage.number - self.warmup)

    def training_at(self, stage: Stage) -> Training:
        return self.setup.training if stage.number < self.warmup else super().training_at(stage)

    def rate(self, stage: Stage) -> float:
        return self.setup.training.rate(stage.number) if stage.number < self.warmup else super().rate(stage)

    # State

    def init_server(self, params: Params) -> Params:
        model = tree.prefixed(tree.select(params, self.info.shapes), "x")
        return super().init_server(params) | self.own(model | tree.prefixed(self._theta(params), "theta"))

    def _theta(self, params: Params) -> Params:
        """The clients' mean unit probabilities before anybody trained; nothing where units are fixed."""
        return {}

    def _units(self, local: ClientState, keys: Tensor) -> Params:
        """Which units of each hidden layer are on, `[C, units]` bool."""
        raise NotImplementedError

    # A round of the warm-up

    def download(self, server: Params, known: Params, rnd: Round) -> Download:
        if rnd.phase not in ("warm-up", "hand-over"):
            return super().download(server, known, rnd)
        mine = self.mine(server)
        model = tree.under(mine, "x")
        on = torch.ones((), dtype=torch.bool, device=next(iter(model.values())).device)  # says that this is the warm-up
        theta = tree.prefixed(tree.under(mine, "theta"), "theta") if rnd.phase == "warm-up" else {}
        return Download(shared=dict(model | self.own(theta | {"on": on})))

    def start(self, kept: Params, down: Payload, rnd: Round) -> ClientState:
        if rnd.phase not in ("warm-up", "hand-over"):
            return super().start(kept, down, rnd)
        sent = self.theirs(down)
        lends = rnd.phase == "warm-up" and self._lends
        local = self.base.start({}, sent, rnd) if lends else ClientState(params=tree.values(sent))
        mine = self.mine(kept) | self.mine(tree.values(down))
        return replace(local, fixed=local.fixed | self.own(mine))

    def turns(self, local: ClientState, rnd: Round) -> list[LocalWork]:
        if rnd.phase == "hand-over":
            return []
        if rnd.phase != "warm-up":
            return super().turns(local, rnd)
        plays = self.base.turns(local, rnd) if self._lends else []
        lent = plays[0] if len(plays) == 1 and isinstance(plays[0], Turn) else None
        return [self._turn(lent or self.usual_turn(whole(self.info.parameters)))]

    def _turn(self, usual: Turn) -> Turn:
        """The usual turn on the subnetwork that is on in each step."""
        loss = partial(_with_pulls, usual.loss, usual.pulls) if usual.pulls else usual.loss
        return replace(usual, loss=partial(self._gated, loss), pulls=(), active=self._active)

    def _active(self, local: ClientState) -> Params:
        """How much of each tensor is on, for its cost."""
        return units.densities(self.layers, self._odds(local))

    def _odds(self, local: ClientState) -> Params:
        """With which probability the units of each hidden layer are on, `[C, units]`."""
        raise NotImplementedError

    def _gated(self, loss: Loss, task: Task, local: ClientState, batch: Batch) -> Tensor:
        """The loss of the subnetwork that is on in this step."""
        drawn = self._units(local, batch.keys)
        on = {n: u.to(batch.x.dtype) for n, u in drawn.items()}
        if loss is not own_loss:  # what else it holds moves the subnetwork only, too
            inside = units.positions(self.layers, drawn)
            still = {n: torch.where(m, local.params[n], local.params[n].detach()) for n, m in inside.items()}
            local = replace(local, params=local.params | still)
        return loss(replace(task, model=Gated(task.model, self.layers, on)), local, batch)

    def upload(self, local: ClientState, rnd: Round) -> Payload:
        if rnd.phase != "warm-up":
            return super().upload(local, rnd)
        assert local.keys is not None
        mask = units.positions(self.layers, self._units(local, local.keys))
        dense: Payload = dict(tree.select(local.params, self.info.shapes))
        return dense | {n: Masked(local.params[n], m) for n, m in mask.items()}

    def keep(self, kept: Params, local: ClientState, rnd: Round) -> Params:
        if rnd.phase == "warm-up":
            return kept
        if rnd.phase == "hand-over":
            received = {n: t[0] for n, t in local.params.items()}
            assert local.ids is not None
            return kept | self.base.init_clients(received, local.ids)
        return super().keep(kept, local, rnd)

    def screen(self, server: Params, upload: Payload, rnd: Round) -> tuple[Tensor | None, Payload]:
        return (None, upload) if rnd.phase == "warm-up" else super().screen(server, upload, rnd)

    def weigh(self, server: Params, known: Params, upload: Payload, examples: Tensor, rnd: Round) -> Tensor:
        if rnd.phase == "warm-up":
            return Algorithm.weigh(self, server, known, upload, examples, rnd)
        return super().weigh(server, known, upload, examples, rnd)

    def remember(self, known: Params, upload: Payload, weights: Tensor, rnd: Round) -> Params:
        return known if rnd.phase == "warm-up" else super().remember(known, upload, weights, rnd)

    def summands(self, upload: Payload, weights: Tensor, rnd: Round) -> Params:
        if rnd.phase != "warm-up":
            return super().summands(upload, weights, rnd)
        return Algorithm.summands(self, self.theirs(upload), weights, rnd) | means.covered(upload, weights)

    def aggregate(self, server: Params, sums: Params, rnd: Round) -> Params:
        if rnd.phase != "warm-up":
            return super().aggregate(server, sums, rnd)
        new = {}
        for n, x in tree.under(self.mine(server), "x").items():
            if f"covered/{n}" in sums:
                mean, held = means.mean(n, sums, x)
                new[n] = torch.where(held, self.approach(x, mean), x)  # a unit off everywhere keeps its weights
            else:
                new[n] = self.approach(x, (sums[n] / sums["aux/weight"]).to(x.dtype))
        return self._handed_over(server | self.own(tree.prefixed(new, "x")), rnd)

    def lasting(self, upload: Payload, examples: Tensor, rnd: Round) -> Params:
        return {} if rnd.phase == "warm-up" else super().lasting(upload, examples, rnd)

    def without_uploads(self, server: Params, rnd: Round) -> Params:
        if rnd.phase != "warm-up":
            return super().without_uploads(server, rnd)
        return self._handed_over(server, rnd)

    def _handed_over(self, server: Params, rnd: Round) -> Params:
        """After the last round of the warm-up the base begins with its model."""
        over = rnd.number == self.warmup - 1
        return server | (self.base.init_server(tree.under(self.mine(server), "x")) if over else {})

    # Prediction

    def _warming(self, down: Payload) -> bool:
        return any(n.startswith(self.prefix + "/") for n in down)

    def _warm(self, down: Payload) -> Params:
        """The received model, marked as one that answers by itself."""
        received = tree.values(down)
        return tree.select(received, self.info.shapes) | tree.select(received, [f"{self.prefix}/on"])

    def personal(self, kept: Params, down: Payload) -> Params:
        return self._warm(down) if self._warming(down) else super().personal(kept, down)

    def common(self, down: Payload) -> Params | None:
        return self._warm(down) if self._warming(down) else super().common(down)

    def client_masks(self, kept: Params, down: Payload) -> Params:
        return {} if self._warming(down) else super().client_masks(kept, down)

    def answer(self, model: Model, own: Params, x: Tensor, valid: Tensor | None = None) -> Tensor:
        return model(own, x, valid) if f"{self.prefix}/on" in own else super().answer(model, own, x, valid)

    def common_answer(self, model: Model, common: Params, x: Tensor, valid: Tensor | None = None) -> Tensor:
        warm = f"{self.prefix}/on" in common
        return model(common, x, valid) if warm else super().common_answer(model, common, x, valid)

    def after_training(self, kept: Params, local: ClientState, down: Payload, rnd: Round) -> Params:
        if rnd.phase in ("warm-up", "hand-over"):
            return self._warm(down) | tree.select(local.params, self.info.shapes)
        return super().after_training(kept, local, down, rnd)

    def downloaded_model(self, kept: Params, down: Payload, rnd: Round) -> Params | None:
        return None if self._warming(down) else super().downloaded_model(kept, down, rnd)

    def personalised_model(self, kept: Params, local: ClientState, down: Payload, rnd: Round) -> Params | None:
        return None if self._warming(down) else super().personalised_model(kept, local, down, rnd)


class Gated(ModelAround):
    """A model whose hidden units are multiplied by these numbers."""

    def __init__(self, model: Model, layers: tuple[Layer, ...], on: Params, *, inputs_only: bool = True) -> None:
        super().__init__(model)
        self.layers, self.on, self.inputs_only = layers, on, inputs_only

    def weights(self, params: Params) -> Params:
        return units.scaled(params, self.layers, self.on, inputs_only=self.inputs_only)


def _with_pulls(loss: Loss, pulls: tuple[Pull, ...], task: Task, local: ClientState, batch: Batch) -> Tensor:
    """A loss with a turn's proximal terms in it, so that what is still is not pulled."""
    return loss(task, local, batch) + torch.stack([pull.term(local) for pull in pulls]).sum(0)
