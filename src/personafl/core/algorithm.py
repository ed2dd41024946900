"""The abstract algorithm: what makes one method differ from another, as pure functions.

A round, and the hooks in its order:

    schedule    which stages there are, who takes part in each, what travels
    download    what the cohort receives
    start       the local model(s) before training
    turns       local work: which loss, which positions move, for how long
    upload      what travels back
    keep        what the client stores until it is next asked
    screen      what the server uses of the uploads, where it compares them
    weigh       what each client counts in the server's sums
    summands    the named sums over clients that the server needs
    remember    what the server knows of each client until it is next asked
    aggregate   the new server state from those sums
    personal    the client's own model
    deploy      what it holds when it predicts
    answer      its own model's outputs
    predict     its outputs

State and payloads are plain named tensors. What is not in `down` or in an upload does not cross
the network; what is not in `kept` is forgotten. Client-side hooks never reduce over the client axis.

The class begins with the dozen hooks that most methods need. The others follow in groups by what they are for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from personafl.core import rng, tree
from personafl.core.errors import UserError
from personafl.core.local_work import ClientState, LocalWork, Turn, whole
from personafl.core.method_settings import FROM_TRAINING, MethodSettings
from personafl.core.plugin_points import INFERENCE, Inference
from personafl.core.torch_internals import foreach
from personafl.core.types import (
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
    Training,
)


@dataclass(frozen=True, kw_only=True, repr=False)
class Algorithm(MethodSettings):
    """A federated method. The defaults are those of a model split into a shared and a private part."""

    evaluates: ClassVar[str] = "the client's own model"
    newcomers: ClassVar[str] = "the global model"  # what a client gets that joins after training
    compares_features: ClassVar[bool] = False  # whether the model must have a head that is a layer of its own
    class_labels_for: ClassVar[str] = ""  # what it needs one class per example for, a noun phrase; empty: any task

    bound: Setup | None = field(default=None, repr=False, compare=False)

    def bind(self, setup: Setup) -> Self:
        """The same method, told which model, training and number of clients it is for."""
        own = {n: value for n in FROM_TRAINING if (value := getattr(self, n)) is not None}
        training = dataclasses.replace(setup.training, **own)
        bound = dataclasses.replace(self, bound=dataclasses.replace(setup, training=training))
        if self.compares_features:
            bound.features()
        bound.check_task()
        return bound

    def check_task(self) -> None:
        """Raise `UserError` where the task at hand is none for this method."""
        require_classes(self.setup.training.task, self.called, self.class_labels_for)
        require_classes(self.setup.training.task, "prior_free", "class frequencies" if self.prior_free else "")
        if (rule := self.rule) is not None:
            require_classes(self.setup.training.task, f"inference={self.inference!r}", rule.class_labels_for)

    @property
    def setup(self) -> Setup:
        if self.bound is None:
            raise RuntimeError(f"{type(self).__name__} is not bound to a model yet; call bind(setup) first")
        return self.bound

    @property
    def called(self) -> str:
        """The method's name, for messages."""
        return type(self).__name__

    @property
    def info(self) -> ModelInfo:
        return self.setup.model

    # The hooks a new method meets first: what is private, which rounds and state there are, and a round in its order:
    # what is sent, trained, sent back and kept, how the server combines the uploads, and which model predicts.

    def private(self) -> frozenset[str]:
        """The names that never leave the client, running statistics aside."""
        return frozenset()

    def schedule(self) -> list[Stage]:
        """The stages of a run: by default every round trains a sample of the clients."""
        return [Stage(number=t) for t in range(self.setup.training.num_rounds)]

    def init_server(self, params: Params) -> Params:
        """The server's state before the first round, given the common initial model."""
        return tree.exclude(params, self.stays_on_client())

    def init_clients(self, params: Params, ids: Tensor) -> Params:
        """What clients keep before they first take part, given the common initial model: `[C, ...]`."""
        return tree.stack(tree.select(params, self.stays_on_client()), len(ids))

    def download(self, server: Params, known: Params, rnd: Round) -> Download:
        """What the cohort receives, from the server's state and its rows of these clients: by default the state."""
        return Download(shared=dict(server))

    def start(self, kept: Params, down: Payload, rnd: Round) -> ClientState:
        """The local model(s) before training."""
        return ClientState(params=tree.values(down) | kept)

    def turns(self, local: ClientState, rnd: Round) -> list[LocalWork]:
        """Local work, in order."""
        own = [n for n in self.info.parameters if n in self.private()]
        return [self.usual_turn(whole(own if rnd.phase == "newcomer" and own else self.info.parameters))]

    def upload(self, local: ClientState, rnd: Round) -> Payload:
        """What travels back."""
        return dict(tree.select(local.params, self.travels()))

    def keep(self, kept: Params, local: ClientState, rnd: Round) -> Params:
        """What the client stores until it is next asked, under the names it had before."""
        return kept | tree.select(local.params, kept)

    def aggregate(self, server: Params, sums: Params, rnd: Round) -> Params:
        """The weighted mean of the uploads, approached by the server's learning rate."""
        means, weight = [sums[n] for n in server], sums["aux/weight"]
        if means:  # on a GPU all in one go, if one number stands for all
            means = foreach("div", means, weight) if weight.dim() == 0 else [t / weight for t in means]
        targets = tree.converted(dict(zip(server, means, strict=True)), server)
        return {n: self.approach(old, targets[n]) for n, old in server.items()}

    def personal(self, kept: Params, down: Payload) -> Params:
        """The client's own model, from what it keeps and what the server last sent: `[C, ...]`."""
        return tree.select(tree.values(down) | kept, self.info.shapes)

    def answer(self, model: Model, own: Params, x: Tensor, valid: Tensor | None = None) -> Tensor:
        """Outputs of the client's own model: `[C, B, K]`."""
        return model(own, x, valid)

    # Helpers that methods call and do not override

    def usual_turn(
        self, moves: Moves | Callable[[ClientState], Moves], epochs: float | None = None, **changes: Any
    ) -> Turn:
        """A turn of the usual length: the recipe's local epochs or steps, or this many epochs."""
        training = self.setup.training
        if epochs is None and training.local_steps:
            return Turn(moves=moves, **({"steps": training.local_steps} | changes))
        return Turn(moves=moves, epochs=training.local_epochs if epochs is None else epochs, **changes)

    def approach(self, old: Tensor, target: Tensor) -> Tensor:
        """A server step: all the way at the usual learning rate of 1."""
        rate = self.setup.training.server_lr
        return target if rate == 1.0 else old + rate * (target - old)

    def own_head(self) -> frozenset[str]:
        """The head's names, for methods that need one and a body beneath it."""
        if not 0 < len(self.info.head) < len(self.info.parameters):
            part = "all" if self.info.head else "none"
            raise UserError(
                f"{type(self).__name__} needs a head and a body; model.head covers {part} of the parameters"
            )
        return self.info.head

    def features(self) -> int:
        """How many numbers enter the head, for methods that look at them."""
        if not self.info.features:
            raise UserError(
                f"{type(self).__name__} needs the features that enter the model's head, and this model does not expose "
                f"them: {self.info.without_features}. model.head names the parameters of the head "
                "(fedphp.inherit.transfer=prox takes any model)"
            )
        return self.info.features

    def server_stream(self, purpose: str, rnd: Round | None = None) -> Tensor:
        """Return the random stream of what the server draws for a purpose, to be given to the functions of `rng`.

        The stream depends on the run's seed, the purpose and the round alone. So hooks that draw the same in a round
        agree, and so do simulations, ranks, deployments and resumed runs. Whoever knows the seed can draw it too: it
        is no secret.

        Args:
            purpose: What is drawn. Two purposes have two streams.
            rnd: The round in which it is drawn; None for what is drawn before the first.
        """
        stream = rng.key(self.setup.training.seed, "server")
        if rnd is not None:
            stream = rng.extend(rng.extend(stream, rnd.number + 1), rnd.phase)
        return rng.extend(stream, purpose)

    # Personal state: what stays on a client and what travels, where `private` is not enough

    def stays_on_client(self) -> frozenset[str]:
        local_statistics = self.info.buffers if self.info.policy == "local" else frozenset()
        return self.private() | local_statistics

    def travels(self) -> frozenset[str]:
        """The names that `upload` sends: the model's but for what stays; of what a method adds, what it says."""
        return frozenset(self.info.shapes) - self.stays_on_client()

    # Aggregation: which uploads the server uses, how they are weighted, and which sums over clients it needs

    def needs_uploads(self) -> bool:
        """Whether `weigh` and `remember` must see the uploads of the whole cohort as one stack."""
        return False

    def not_averaged(self) -> bool:
        """Whether the server computes no weighted mean of the uploads, or needs that mean unchanged.

        Such a method cannot be combined with `robust`.
        """
        return False

    def screen(self, server: Params, upload: Payload, rnd: Round) -> tuple[Tensor | None, Payload]:
        """The uploads as the server will use them, and the rows they are of, None for all; by default as they came.

        Asked where `needs_uploads`.
        """
        return None, upload

    def weigh(self, server: Params, known: Params, upload: Payload, examples: Tensor, rnd: Round) -> Tensor:
        """What each client counts, `[C]`; by default its number of examples, or one."""
        return torch.ones_like(examples) if self.weights == "uniform" else examples

    def summands(self, upload: Payload, weights: Tensor, rnd: Round) -> Params:
        """Per-client terms `[C, ...]` of the sums the server works with; `weights` `[C]` are what clients count.

        Here and elsewhere what is no part of a model has a name under `aux/`, which no parameter has.
        """
        sent = tree.values(upload)
        counts = {kind: weights.to(kind) for kind in {t.dtype for t in sent.values()}}
        if len(counts) == weights.shape[0] == 1:  # a lone client: on a GPU all in one go
            terms = foreach("mul", list(sent.values()), next(iter(counts.values())).squeeze())
            return {**dict(zip(sent, terms, strict=True)), "aux/weight": weights}
        return {n: t * tree.column(counts[t.dtype], t) for n, t in sent.items()} | {"aux/weight": weights}

    def without_uploads(self, server: Params, rnd: Round) -> Params:
        """The server's new state after a round that brought no update: the old one."""
        return server

    # Masks: methods whose clients send some positions of a tensor only, or have masks of their own

    def init_coverage(self, params: Params) -> Params:
        """`coverage` before any upload, by the names of tensors of which clients send some positions only: ones."""
        return {}

    def coverage(self, sums: Params) -> Params:
        """How much of all clients' weight stands behind each position of the means just taken, in [0, 1].

        Of tensors of which clients send some positions only; of truth values, where it is all or nothing.
        """
        total = sums["aux/weight"].clamp(min=torch.finfo(torch.float64).tiny)
        return {n: t / total for n, t in tree.under(sums, "covered").items()}

    def client_masks(self, kept: Params, down: Payload) -> Params:
        """Clients' own masks by tensor, `[C, ...]` bool, and under `global/` the server's; for the summary of a run."""
        return {}

    # Per-client server state: what the server knows of each client, one row each

    def init_known(self, params: Params, ids: Tensor) -> Params:
        """What the server knows of clients before they first take part: `[C, ...]`, by default nothing."""
        return {}

    def remember(self, known: Params, upload: Payload, weights: Tensor, rnd: Round) -> Params:
        """What the server knows of these clients from now on, under the names it had before."""
        return known

    # Training: what depends on the stage or on the number of rounds

    def needs_all_rounds(self) -> bool:
        """Whether training depends on the number of rounds, so that it can neither stop early nor be continued."""
        return False

    def training_at(self, stage: Stage) -> Training:
        """How local training goes in a stage, where turns say nothing else."""
        return self.setup.training

    def rate(self, stage: Stage) -> float:
        """The learning rate of a stage."""
        return self.setup.training.rate(stage.number)

    # Deployment: clients that join after training, and clients that lose their state

    def newcomer(self, params: Params, down: Download, ids: Tensor) -> Params:
        """What clients keep that join now: what others began with, the received model in the initial one's place."""
        return self.init_clients(params | tree.select(tree.values(down.shared), self.info.shapes), ids)

    def welcome(self) -> str:
        """The phase of the session a newcomer plays, nothing where it takes the model as it is."""
        return "newcomer" if self.stays_on_client() else ""

    def lasting(self, upload: Payload, examples: Tensor, rnd: Round) -> Params:
        """What of these uploads stays in the server's state for good, where that adds up over rounds: `[C, ...]`."""
        return {}

    def withdraw(self, server: Params, lasting: Params) -> Params:
        """The server's state without what a client added to it for good; `lasting` is the sum of that, `[...]`."""
        return server

    # Evaluation: which models are compared, and what is recorded of a round

    def common(self, down: Payload) -> Params | None:
        """The server's model as the client received it, None where a method has no complete one."""
        sent = tree.values(down)
        return tree.select(sent, self.info.shapes) if sent.keys() >= self.info.shapes.keys() else None

    def after_training(self, kept: Params, local: ClientState, down: Payload, rnd: Round) -> Params:
        """The client's model right after local training, for evaluation before aggregation."""
        return tree.select(local.params, self.info.shapes)

    def downloaded_model(self, kept: Params, down: Payload, rnd: Round) -> Params | None:
        """The model a session begins with, for `before` in a row; None where it is the one that `personal` gives."""
        return None

    def personalised_model(self, kept: Params, local: ClientState, down: Payload, rnd: Round) -> Params | None:
        """The model a session trained, which `delta` in a row compares the next downloaded one with.

        None where it is the one that `after_training` gives.
        """
        return None

    def notes(self, server: Params) -> dict[str, float]:
        """Numbers of the server's state worth a place in the record of a round."""
        return {}

    def evaluated(self, when: str) -> str:
        """Which model is scored, in words."""
        own = self.evaluates if when == "after_aggregation" else "the client's model right after local training"
        return own if self.rule is None else self.rule.words(own)

    # Inference: how a client predicts, by its own model or by a rule that asks the global one as well

    @property
    def rule(self) -> Inference | None:
        """By what rule a client answers; None: by its own model."""
        if not isinstance(self.inference, str):
            return self.inference
        kind = INFERENCE[self.inference]
        return None if kind is None else kind()

    def without_common(self, called: str) -> UserError:
        """The refusal of `inference` where a method, called so, has no complete global model."""
        told = self.inference
        if not isinstance(told, str):
            told = next((n for n, kind in INFERENCE.items() if kind is type(told)), type(told).__name__)
        return UserError(f"inference={told!r} needs a global model, which {called} has not")

    def deploy(self, own: Params, down: Payload) -> Params:
        """All a client needs to predict: its own model, and the common one where inference asks for it."""
        if self.rule is None or not self.rule.asks_global:
            return own
        statistics: Payload = {n: own[n] for n in self.info.buffers if n in own}  # the client's, where none travel
        common = self.common(statistics | down)
        if common is None:
            raise self.without_common(self.called)
        return own | tree.prefixed(common, "global")

    def calibrate(self, deployed: Params, sweep: Sweep) -> Params:
        """Add what must be measured on the client's training data before it can predict."""
        return deployed if self.rule is None else deployed | self.rule.measure(self, deployed, sweep)

    def common_answer(self, model: Model, common: Params, x: Tensor, valid: Tensor | None = None) -> Tensor:
        """Outputs of the global model: `[C, B, K]`."""
        return model(common, x, valid)

    def predict(self, model: Model, deployed: Params, x: Tensor) -> Tensor:
        """Outputs of the client: `[C, B, K]`."""
        if self.rule is None:
            return self.answer(model, deployed, x)
        return self.rule.decide(deployed, *self.both_answers(model, deployed, x))[0]

    def respond(self, model: Model, deployed: Params, x: Tensor) -> tuple[Tensor, Params]:
        """The same, and what changed of `deployed` by these inputs, where they are answered in turn."""
        if self.rule is None or not self.rule.in_turn:
            return self.predict(model, deployed, x), {}
        return self.rule.decide(deployed, *self.both_answers(model, deployed, x))

    def both_answers(
        self, model: Model, deployed: Params, x: Tensor, valid: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """What a rule decides by, `[C, B, K]` each: outputs of the client's own model and of the global one.

        Of the own one twice, where the rule does not ask for a global one.
        """
        own, common = tree.without(deployed, "global"), tree.under(deployed, "global")
        answer = self.answer(model, own, x, valid)
        return answer, self.common_answer(model, common, x, valid) if common else answer


def require_classes(task: str, what: str, needed_for: str) -> None:
    """Raise `UserError` if `what` needs one class per example and the task is not classification."""
    if needed_for and task not in ("auto", "classification"):
        raise UserError(
            f"{what} needs one class per example for {needed_for}. Examples of the task {task!r} have no single class. "
            "Use another method or setting for this task."
        )
