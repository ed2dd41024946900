"""The abstract algorithm: what makes one method differ from another, as pure functions.

A round, and the hooks in its order:

    schedule    which stages there are, who takes part in each, what travels
    download    what the cohort receives
    start       the local model(s) before training
    turns       local work: which loss, which positions move, for how long
    upload      what travels back
    keep        what the client stores until it is next asked
    summands    the named sums over clients that the server needs
    aggregate   the new server state from those sums
    deploy      what a client holds when it predicts
    predict     its outputs

State and payloads are plain named tensors. What is not in `down` or in an upload does not cross
the network; what is not in `kept` is forgotten. Client-side hooks never reduce over the client axis.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from personafl.core import tree
from personafl.core.inference import INFERENCE, Inference
from personafl.core.optim import Optimizer
from personafl.core.types import (
    Batch,
    Download,
    Model,
    ModelInfo,
    Moves,
    Params,
    Payload,
    Round,
    Setup,
    Stage,
    Sweep,
    Task,
)


@dataclass(frozen=True)
class Local:
    """A stack of clients at work."""

    params: Params  # [C, ...] what can be trained, and running statistics
    fixed: Params = field(default_factory=dict)  # [C, ...] what losses and hooks look at: anchors, masks, counters
    steps: Tensor | None = None  # [C] optimiser steps of this session, once it has been played


Masks = Mapping[str, Tensor]
"""Name to active positions, `[C, ...]` bool."""

Loss = Callable[[Task, Local, Batch], Tensor]
"""Each client's loss on its minibatch: `[C]`."""


def own_loss(task: Task, local: Local, batch: Batch) -> Tensor:
    """The task's loss of the model without prefix: what most methods minimise."""
    return task.loss(local.params, batch)


@dataclass(frozen=True)
class Turn:
    """Minibatch training: which loss, which positions move, for how long.

    `moves` and `active` may be functions of the local state, asked when the turn begins: an earlier
    turn may have changed the masks.
    """

    moves: Moves | Callable[[Local], Moves]
    loss: Loss = own_loss
    epochs: float = 0.0
    steps: int = 0  # minibatches, where epochs are not what is counted
    least: int = 0  # minibatches, where a fraction of an epoch would round to fewer
    lr: float | None = None  # None: the round's
    optimizer: Optimizer | None = None  # None: the recipe's
    active: Masks | Callable[[Local], Masks] = field(default_factory=dict)  # what the model runs under, for its cost
    teachers: int = 0  # further models the loss only runs forward, for its cost


@dataclass(frozen=True)
class Probe:
    """The gradient on one minibatch of its own, handed to `update`, which may change the local state."""

    names: Sequence[str]
    update: Callable[[Local, Params], Local]
    first: bool = False  # on the minibatch the next turn begins with, instead of one of its own
    loss: Loss = own_loss
    active: Masks | Callable[[Local], Masks] = field(default_factory=dict)


def setting(default: Any, help: str, choices: Sequence[str] = ()) -> Any:
    """A method's own hyper-parameter, with the sentence `personafl info` prints."""
    return field(default=default, metadata={"help": help, "choices": tuple(choices)})


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """A federated method. The defaults are those of a model split into a shared and a private part."""

    evaluates: ClassVar[str] = "the client's own model"

    lr: float = setting(0.0, "learning rate of this method; 0 takes the recipe's")
    weights: str = setting("examples", "what a client counts in the server's mean", ("examples", "uniform"))
    inference: str = setting("own", "which of a client's models answers", tuple(INFERENCE))
    bound: Setup | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        for f in self.settings():
            choices, value = f.metadata.get("choices"), getattr(self, f.name)
            if choices and value not in choices:
                raise ValueError(f"{f.name}={value!r}: possible are {', '.join(choices)}")
        if self.lr < 0:
            raise ValueError(f"lr={self.lr}: must be greater than 0, or 0 for the recipe's")
        self.check()

    @classmethod
    def settings(cls) -> tuple[dataclasses.Field[Any], ...]:
        """The fields a recipe may set."""
        return tuple(f for f in dataclasses.fields(cls) if f.name != "bound")

    def check(self) -> None:
        """Raise ValueError for impossible settings."""

    def bind(self, setup: Setup) -> Self:
        """The same method, told which model, training and number of clients it is for."""
        own = dataclasses.replace(setup.training, lr=self.lr or setup.training.lr)
        return dataclasses.replace(self, bound=dataclasses.replace(setup, training=own))

    @property
    def setup(self) -> Setup:
        if self.bound is None:
            raise RuntimeError(f"{type(self).__name__} is not bound to a model yet; call bind(setup) first")
        return self.bound

    @property
    def info(self) -> ModelInfo:
        return self.setup.model

    # What there is

    def private(self) -> frozenset[str]:
        """The names that never leave the client, running statistics aside."""
        return frozenset()

    def own_head(self) -> frozenset[str]:
        """The head's names, for methods that need one and a body beneath it."""
        if not 0 < len(self.info.head) < len(self.info.parameters):
            part = "all" if self.info.head else "none"
            raise ValueError(
                f"{type(self).__name__} needs a head and a body; model.head covers {part} of the parameters"
            )
        return self.info.head

    def _stays(self) -> frozenset[str]:
        local_statistics = self.info.buffers if self.info.policy == "local" else frozenset()
        return self.private() | local_statistics

    def schedule(self) -> list[Stage]:
        """The stages of a run: by default every round trains a sample of the clients."""
        return [Stage(number=t) for t in range(self.setup.training.num_rounds)]

    def init_server(self, params: Params) -> Params:
        """The server's state before the first round, given the common initial model."""
        return tree.exclude(params, self._stays())

    def init_clients(self, params: Params, server: Params, ids: Tensor) -> Params:
        """What clients keep before they first take part, given the initial model and server state: `[C, ...]`."""
        return tree.stack(tree.select(params, self._stays()), len(ids))

    # A round

    def download(self, server: Params, ids: Tensor, rnd: Round) -> Download:
        """What the cohort receives: by default all the server has."""
        return Download(shared=dict(server))

    def start(self, kept: Params, down: Payload, rnd: Round) -> Local:
        """The local model(s) before training."""
        return Local(params=tree.values(down) | kept)

    def turns(self, local: Local, rnd: Round) -> list[Turn | Probe]:
        """Local work, in order."""
        return [self.session(whole(self.info.parameters))]

    def session(self, moves: Moves | Callable[[Local], Moves], epochs: float | None = None, **changes: Any) -> Turn:
        """A turn of the usual length: the recipe's local epochs or steps, or this many epochs."""
        training = self.setup.training
        if epochs is None and training.local_steps:
            return Turn(moves=moves, **({"steps": training.local_steps} | changes))
        return Turn(moves=moves, epochs=training.local_epochs if epochs is None else epochs, **changes)

    def upload(self, local: Local, rnd: Round) -> Payload:
        """What travels back."""
        return dict(tree.exclude(local.params, self._stays()))

    def keep(self, kept: Params, local: Local, rnd: Round) -> Params:
        """What the client stores until it is next asked, under the names it had before."""
        return tree.select(local.params, kept)

    def summands(self, upload: Payload, weights: Tensor, rnd: Round) -> Params:
        """Per-client terms `[C, ...]` of the sums the server works with; `weights` are example counts `[C]`.

        Here and elsewhere what is no part of a model has a name under `count/`, which no parameter has.
        """
        weights = self.weigh(weights)
        sent = tree.values(upload)
        return {n: t * tree.column(weights, t).to(t.dtype) for n, t in sent.items()} | {"count/weight": weights}

    def weigh(self, examples: Tensor) -> Tensor:
        """What each client counts, from its number of examples `[C]`."""
        return examples if self.weights == "examples" else torch.ones_like(examples)

    def aggregate(self, server: Params, sums: Params, rnd: Round) -> Params:
        """The weighted mean of the uploads, approached by the server's learning rate."""
        return {n: self.approach(old, (sums[n] / sums["count/weight"]).to(old.dtype)) for n, old in server.items()}

    def approach(self, old: Tensor, target: Tensor) -> Tensor:
        """A server step: all the way at the usual learning rate of 1."""
        rate = self.setup.training.server_lr
        return target if rate == 1.0 else old + rate * (target - old)

    # Prediction

    def personal(self, kept: Params, down: Payload) -> Params:
        """The client's own model, from what it keeps and what the server last sent: `[C, ...]`."""
        return tree.select(tree.values(down) | kept, self.info.shapes)

    def common(self, down: Payload) -> Params | None:
        """The server's model as the client received it, None where a method has no complete one."""
        sent = tree.values(down)
        return tree.select(sent, self.info.shapes) if sent.keys() >= self.info.shapes.keys() else None

    def trained(self, kept: Params, local: Local, down: Payload, rnd: Round) -> Params:
        """The client's model right after local training, for evaluation before aggregation."""
        return tree.select(local.params, self.info.shapes)

    def evaluated(self, when: str) -> str:
        """Which model is scored, in words."""
        own = self.evaluates if when == "after_aggregation" else "the client's model right after local training"
        adaptive = self.inference != type(self).inference or when != "after_aggregation"
        return f"per sample the global model, or {own}" if self._inference is not None and adaptive else own

    @property
    def _inference(self) -> Inference | None:
        return INFERENCE[self.inference]

    def deploy(self, own: Params, down: Payload) -> Params:
        """All a client needs to predict: its own model, and the common one where inference asks for it."""
        if self._inference is None:
            return own
        common = self.common(down)
        if common is None:
            raise ValueError(f"inference={self.inference!r} needs a global model, which {type(self).__name__} has not")
        return own | tree.prefixed(common, "global")

    def calibrate(self, deployed: Params, sweep: Sweep) -> Params:
        """Add what must be measured on the client's training data before it can predict."""
        return deployed if self._inference is None else deployed | self._inference.measure(deployed, sweep)

    def predict(self, model: Model, deployed: Params, x: Tensor) -> Tensor:
        """Outputs of the client's model: `[C, B, K]`."""
        own = tree.select(deployed, self.info.shapes)
        return model(own, x) if self._inference is None else self._inference.predict(model, deployed, x)


def whole(names: Sequence[str]) -> dict[str, Tensor | None]:
    """Moves in which these tensors move as a whole."""
    return dict.fromkeys(names)


def choose(which: Tensor, yes: Mapping[str, Tensor], no: Mapping[str, Tensor]) -> Params:
    """Per client, one of two stacked trees of the same names; `which` is `[C]` bool."""
    return {n: torch.where(tree.column(which, yes[n]), yes[n], no[n]) for n in yes}
