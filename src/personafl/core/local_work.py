"""What a client does in a round: the parts of local work, as a method describes them.

A method's `turns` returns a list of `Turn` (training), `GradientPass`, `DataPass` and `StateUpdate`; the one training
loop, `engine/local.py`, carries them out in order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from personafl.core import tree
from personafl.core.errors import UserError
from personafl.core.optim import Optimizer
from personafl.core.types import Batch, Moves, Params, Task


@dataclass(frozen=True)
class ClientState:
    """A stack of clients at work."""

    params: Params  # [C, ...] what can be trained, and running statistics
    fixed: Params = field(default_factory=dict)  # [C, ...] what losses and hooks look at: anchors, masks, counters
    steps: Tensor | None = None  # [C] optimiser steps of this session, once it has been played
    ids: Tensor | None = None  # [C] on the host, once the session has begun
    keys: Tensor | None = None  # [C] each client's random stream of the session, for what hooks draw after training


Masks = Mapping[str, Tensor]
"""Name to active positions, `[C, ...]` bool; or to their share, `[C]`, where only what they cost is asked."""

Loss = Callable[[Task, ClientState, Batch], Tensor]
"""Each client's loss on its minibatch: `[C]`."""


def own_loss(task: Task, local: ClientState, batch: Batch) -> Tensor:
    """The task's loss of the model without prefix: what most methods minimise."""
    return task.loss(local.params, batch)


@dataclass(frozen=True)
class Turn:
    """Minibatch training: which loss, which positions move, for how long.

    `moves` and `active` may be functions of the local state, asked when the turn begins: an earlier
    turn may have changed the masks. Turns of one session take their minibatches from one sequence of
    epochs, each turn beginning with the next whole one; those of another `stream` have their own.
    """

    moves: Moves | Callable[[ClientState], Moves]
    loss: Loss = own_loss
    epochs: float = 0.0
    steps: int = 0  # minibatches, where epochs are not what is counted
    least: int = 0  # minibatches, where a fraction of an epoch would round to fewer
    minibatches: int = 1  # that a step sees, each from an order of its own: the loss has further ones in `batch.others`
    lr: float | None = None  # None: the round's
    optimizer: Optimizer | None = None  # None: that of `Algorithm.training_at`
    active: Masks | Callable[[ClientState], Masks] = field(
        default_factory=dict
    )  # what the model runs under, for its cost
    flops: float = 0.0  # of one example outside the model, for its cost
    count_calls: bool = True  # for its cost, count the loss's calls of the model; else a training step of what moves
    added: str = ""  # where in `fixed` the numbers `[C, K]` are that are added to outputs in the loss
    pulls: tuple[Pull, ...] = ()  # added to the loss
    stream: str = "batches"
    memory: str = ""  # where in `fixed` the optimiser's state is found and left; empty: it lasts for the session
    then: Turn | None = None  # a second update on each of the same minibatches; its length is this turn's

    def __post_init__(self) -> None:
        if type(self.minibatches) is not int or self.minibatches < 1:
            raise UserError(f"Turn(minibatches={self.minibatches!r}): must be a whole number, at least 1")


@dataclass(frozen=True)
class Pull:
    """A proximal term of a turn's loss, weight / 2 ||w - anchor||^2 of every client; its gradient needs no autograd."""

    toward: str  # the prefix of the anchors in `fixed`
    weight: float
    of: str = ""  # the prefix of what is pulled in `params`

    def __post_init__(self) -> None:
        if not all(isinstance(name, str) for name in (self.toward, self.of)) or not self.toward:
            raise UserError(f"Pull({self.toward!r}, of={self.of!r}): prefixes are texts, such as 'anchor'")
        if isinstance(self.weight, bool) or not isinstance(self.weight, int | float) or not 0 <= self.weight < math.inf:
            raise UserError(f"Pull({self.toward!r}, {self.weight!r}): the weight must be a number, not negative")

    def anchors(self, fixed: Params, moving: Collection[str]) -> Params:
        """What it pulls these parameters to, under their names."""
        to = f"{self.of}/" if self.of else ""
        held = {f"{to}{n}": t for n, t in tree.under(fixed, self.toward).items() if f"{to}{n}" in moving}
        if not held:
            raise UserError(f"{self}: nothing to pull, the turn moves no {to}X for which `fixed` has {self.toward}/X")
        return held

    def term(self, local: ClientState) -> Tensor:
        """The term of each client, `[C]`, for a loss that must contain it."""
        held = self.anchors(local.fixed, local.params)
        return self.weight / 2 * tree.squared_distance(tree.select(local.params, held), held)


@dataclass(frozen=True)
class GradientPass:
    """The gradient on one minibatch of its own, handed to `update`, which may change the local state."""

    names: Sequence[str]
    update: Callable[[ClientState, Params], ClientState]
    first: bool = False  # on the minibatch the next turn begins with, instead of one of its own
    loss: Loss = own_loss
    active: Masks | Callable[[ClientState], Masks] = field(default_factory=dict)
    flops: float = 0.0  # of one example outside the model, for its cost
    count_calls: bool = True  # as of a turn
    added: str = ""  # as of a turn


@dataclass(frozen=True)
class DataPass:
    """A pass over the client's training data without training: sums of what is measured, handed to `update`."""

    measure: Callable[[Task, ClientState, Batch], Params]  # per-client terms `[C, ...]` of each minibatch
    update: Callable[[ClientState, Params], ClientState]


@dataclass(frozen=True)
class StateUpdate:
    """A change of the local state between turns."""

    update: Callable[[ClientState], ClientState]


LocalWork = Turn | GradientPass | DataPass | StateUpdate
"""What a session of local work can consist of."""


def whole(names: Sequence[str]) -> dict[str, Tensor | None]:
    """Moves in which these tensors move as a whole."""
    return dict.fromkeys(names)
