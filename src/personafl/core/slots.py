"""The slots every method has, and the registries of what may fill them.

A slot is a setting of every method: `weights` says what a client counts, `inherit` gives it a model that outlives
rounds, `robust` protects the server's mean from some of the clients, `inference` says which of a client's models
answers. Nothing here knows a filling; `personafl.slots` registers those that are shipped, and anybody may add one, in a
line: `WEIGHTS["mine"] = ...`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

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
    """A method's outputs `[C, B, K]`: of a client's own model and of the global one."""

    def answer(self, model: Model, own: Params, x: Tensor, valid: Tensor | None = None) -> Tensor: ...

    def common_answer(self, model: Model, common: Params, x: Tensor, valid: Tensor | None = None) -> Tensor: ...


class Inference(Protocol):
    """A rule that joins the outputs of `deployed` (own model) and `deployed["global/..."]`."""

    def measure(self, method: Answers, deployed: Params, sweep: Sweep) -> Params:
        """Per-client numbers the rule needs, taken from the training data."""
        ...

    def predict(self, method: Answers, model: Model, deployed: Params, x: Tensor) -> Tensor: ...


WEIGHTS: dict[str, Wrap | None] = {"examples": None, "uniform": None}
"""What a client counts in the server's mean: its number of examples, one, or what a filling makes of it."""

INHERIT: dict[str, type[Filling]] = {}
"""A model a client inherits from session to session, by name; the first is meant where a recipe gives no name."""

ROBUST: dict[str, type[Filling]] = {}
"""How the server's mean is made robust, by name; the first is meant where a recipe gives no name."""

INFERENCE: dict[str, Inference | None] = {"own": None}
"""Which of a client's models answers: its own, or what a rule makes of that and the global one."""
