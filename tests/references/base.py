"""What the slow references have in common: data, streams, gradients of one model, means of a few."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from personafl.core.types import Training
from personafl.data.federated import Federation
from tests import reference
from tests.reference import Optimiser, Params, Stream

HEAD = ("head.weight", "head.bias")

Loss = Callable[[Params, Tensor], Tensor]
"""The loss of a model on the rows of one minibatch."""


class Reference:
    """A method, one client and one minibatch at a time, in float64; for modules without dropout.

    A subclass takes its settings by their public names, plays rounds, and answers with the logits
    of the model a client is judged by and of the server's model. Running statistics are known to
    FedAvg, Ditto, FedRep, FedPHP, CO-PFL and DM-PFL: tensors of a model that training moves and no
    gradient does.
    """

    weights: str = "examples"  # what a mean over clients weighs them by: "examples" or "uniform"

    def __init__(self, module: nn.Module, federation: Federation, training: Training) -> None:
        self.network, self.federation, self.training = reference.Network(module), federation, training
        self.x, self.y = federation.source.x.double(), federation.source.y
        self.running = list(reference.running(module))
        self.initial = reference.initial(module) | reference.copied(reference.running(module))
        self.names = [name for name in self.initial if name not in self.running]
        self.body = [name for name in self.names if name not in HEAD]
        self.clients = range(federation.num_clients)
        self.acted = Counter[str]()  # steps in which momentum, weight decay and the clip changed something
        self.own_statistics: list[Params] | None = None  # every client's, where they do not travel
        self.tracked: Params = {}  # the running statistics after the last gradient

    def keep_statistics(self) -> None:
        """Running statistics are to stay with the clients; to be said before the first round."""
        self.own_statistics = [{n: self.initial[n] for n in self.running} for _ in self.clients]

    def seen_by(self, c: int, model: Params) -> Params:
        """A model with the client's own running statistics, where it has some."""
        return model if self.own_statistics is None else {**model, **self.own_statistics[c]}

    # What a subclass answers

    def play(self, number: int) -> None:
        """One round: its clients, then the server."""
        raise NotImplementedError

    def finish(self) -> None:
        """What follows the last round."""

    def evaluated(self, c: int, x: Tensor) -> Tensor:
        """Logits of the model a client is judged by."""
        raise NotImplementedError

    def common(self, x: Tensor) -> Tensor | None:
        """Logits of the server's model, where it has a complete one."""
        raise NotImplementedError

    # Data and streams

    def cohort(self, number: int) -> list[int]:
        """S_t."""
        return reference.sampled(self.federation, self.training, number)

    def rows(self, c: int) -> Tensor:
        """A client's training rows."""
        return reference.rows_of(self.federation, "train", c)

    def lr(self, number: int) -> float:
        """The learning rate of a round."""
        return reference.rate(self.training, number)

    def batches(self, c: int, number: int, epoch: int, purpose: str = "batches") -> list[Tensor]:
        """The minibatches (rows of the source) of one local epoch; `epoch` counts over a client's whole session."""
        order = reference.shuffled(self.rows(c), self.training, purpose, number, c, epoch)
        return reference.minibatches(order, self.training.batch_size)

    def stream(self, c: int, number: int, purpose: str = "batches") -> Stream:
        """A client's minibatches of one session."""
        return Stream(self.rows(c), self.training, number, c, purpose)

    def optimiser(self) -> Optimiser:
        """The optimiser of one model in one session."""
        return Optimiser(self.training, self.acted)

    # One model

    def forward(self, params: Params, x: Tensor) -> tuple[Tensor, Tensor]:
        """Features (what enters the head) and logits, differentiable in the parameters."""
        entering: list[Tensor] = []
        head = self.network.module.get_submodule("head")
        hook = head.register_forward_pre_hook(lambda _, inputs: entering.append(inputs[0]))
        logits: Tensor = functional_call(self.network.module, params, (x.double(),))
        hook.remove()
        return entering[0], logits

    def features(self, params: Params, x: Tensor) -> Tensor:
        """What enters the head, as numbers."""
        with torch.no_grad():
            return self.forward(params, x)[0]

    def logits(self, params: Params, x: Tensor) -> Tensor:
        """Outputs, as numbers."""
        return self.network.logits(params, x)

    def cross_entropy(self, params: Params, rows: Tensor) -> Tensor:
        """F: the mean cross-entropy over a minibatch."""
        return F.cross_entropy(self.forward(params, self.x[rows])[1], self.y[rows])

    def gradient(self, loss: Loss, at: Params, rows: Tensor) -> Params:
        """The gradient of a loss on a minibatch; zero for what the loss does not depend on."""
        self.network.module.train()
        leaves = {n: p.detach().clone().requires_grad_() for n, p in at.items() if n not in self.running}
        self.tracked = {n: at[n].clone() for n in self.running if n in at}
        value = loss({**leaves, **self.tracked}, rows)
        found = torch.autograd.grad(value, list(leaves.values()), allow_unused=True, materialize_grads=True)
        return dict(zip(leaves, found, strict=True))

    def step(
        self, optimiser: Optimiser, params: Params, gradient: Params, lr: float, moving: Iterable[str] | None = None
    ) -> Params:
        """A step on the moving tensors (None: on all that have a gradient)."""
        return optimiser.step(params, gradient, lr, dict.fromkeys(gradient if moving is None else moving))

    def train(
        self,
        c: int,
        number: int,
        start: Params,
        *,
        loss: Loss | None = None,
        moving: Iterable[str] | None = None,
        batches: Sequence[Tensor] | None = None,
        lr: float | None = None,
    ) -> Params:
        """SGD on minibatches (None: a usual session's) with a loss (None: F), on the moving tensors (None: all)."""
        moving = None if moving is None else list(moving)
        params, optimiser = dict(self.seen_by(c, start)), self.optimiser()
        for rows in self.stream(c, number).turn() if batches is None else batches:
            gradient = self.gradient(loss or self.cross_entropy, params, rows)
            params = (
                self.step(optimiser, params, gradient, self.lr(number) if lr is None else lr, moving) | self.tracked
            )
        if self.own_statistics is not None:
            self.own_statistics[c] = {n: params[n] for n in self.running}
        return params

    # Several models

    def shares(self, clients: Sequence[int]) -> list[int]:
        """What a mean weighs these clients by: n_c, or 1 each."""
        return [len(self.rows(c)) if self.weights == "examples" else 1 for c in clients]

    def mean(self, models: Sequence[Params], clients: Sequence[int], names: Iterable[str] | None = None) -> Params:
        """sum n_c w_c / sum n_c, or the uniform mean where a method has it."""
        return reference.weighted_mean(list(models), self.shares(clients), self.names if names is None else list(names))

    def moved(self, old: Params, mean: Params) -> Params:
        """w + eta_g (mean - w) for the tensors that were averaged; the others stay."""
        eta = self.training.server_lr
        return {name: w + eta * (mean[name] - w) if name in mean else w for name, w in old.items()}
