"""The slots every method has, and the registries of what may fill them.

A slot is a setting of every method: `weights` says what a client counts, `inherit` gives it a model that outlives
rounds, `robust` protects the server's mean from some of the clients, `prior_free` keeps clients' label frequencies out
of training, `inference` says how a client answers. Nothing here knows a filling; `personafl.plugins` registers those
that are shipped, and anybody may add one, in a line: `WEIGHTS["mine"] = ...`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Protocol

from torch import Tensor

from personafl.core.types import Model, Params, Sweep

Wrap = Callable[[Any], Any]
"""A bound method to one with this filling around it."""


class Filling(Protocol):
    """Settings of what fills the `inherit` or `robust` slot: a frozen dataclass, written as a table in a recipe."""

    def around(self, method: Any) -> Any:
        """The bound method with this filling around it."""
        ...


class Answers(Protocol):
    """A method's outputs `[C, B, K]` of all clients' own models, and of the global one as they hold it."""

    def both_answers(
        self, model: Model, deployed: Params, x: Tensor, valid: Tensor | None = None
    ) -> tuple[Tensor, Tensor]: ...


class Inference(Protocol):
    """A rule that makes a client's answers from the outputs of its own model and of the global one.

    A frozen dataclass whose fields are settings: a recipe names it, or gives a table with its name.
    """

    together: ClassVar[bool]  # whether an answer goes by the other inputs at hand, or by those before it
    in_turn: ClassVar[bool]  # whether inputs are answered one after the other, and what is learnt from them lasts
    class_labels_for: ClassVar[str]  # what it needs one class per example for, a noun phrase; empty: any task

    @property
    def asks_global(self) -> bool:
        """Whether it looks at the global model's outputs; else it is given the own model's in their place."""
        ...

    @property
    def asks_validation(self) -> str:
        """The setting because of which `measure` looks at validation data; empty: it does not."""
        ...

    def words(self, own: str) -> str:
        """What answers, where the client's own model is called this."""
        ...

    def measure(self, method: Answers, deployed: Params, sweep: Sweep) -> Params:
        """Per-client numbers `[C, ...]` the rule needs, taken from the client's data, under names of its own."""
        ...

    def decide(
        self, deployed: Params, own: Tensor, common: Tensor, valid: Tensor | None = None
    ) -> tuple[Tensor, Params]:
        """Answers `[C, B, K]` from both models' outputs, and what changed of the numbers it keeps.

        `valid` `[C, B]` says which inputs are no padding; None: all.
        """
        ...


WEIGHTS: dict[str, Wrap | None] = {"examples": None, "uniform": None}
"""What a client counts in the server's mean: its number of examples, one, or what a filling makes of it."""

INHERIT: dict[str, type[Filling]] = {}
"""A model a client inherits from session to session, by name; the first is meant where a recipe gives no name."""

ROBUST: dict[str, type[Filling]] = {}
"""How the server's mean is made robust, by name; the first is meant where a recipe gives no name."""

INFERENCE: dict[str, type[Inference] | None] = {"own": None}
"""How a client answers: by its own model, or by a rule that asks the global one, too."""
