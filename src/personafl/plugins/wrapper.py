"""A method around another method: the base of plug-ins and of warm-ups.

Every hook of `Algorithm` is forwarded to the inner method, `base`, unless it is named in `NOT_FORWARDED`. The methods
that forward are generated from `Algorithm`, so a hook that is added there is forwarded, too. A wrapper overrides the
hooks that it changes.

What a wrapper adds has names under its own prefix, which the inner method never sees: its state, its payload entries,
its sums. In `ClientState` a wrapper adds to `fixed` only, because what is in `params` may be uploaded.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self, TypeVar

from torch import Tensor

from personafl.core import tree
from personafl.core.algorithm import Algorithm
from personafl.core.method_settings import FROM_TRAINING
from personafl.core.types import Download, Params, Payload, Round, Stage

T = TypeVar("T")

PREDICTION = ("deploy", "calibrate", "predict", "respond", "both_answers")
"""Hooks of prediction. A wrapper predicts by its own `personal` and `answer`, a `TrainingWrapper` by the method's."""

NOT_FORWARDED = frozenset(
    {
        *PREDICTION,
        *("bind", "check", "check_task"),  # done for the inner method when it was bound
        *("own_head", "features", "server_stream", "usual_turn", "approach", "without_common"),  # helpers, not hooks
    }
)
"""The functions of `Algorithm` that a wrapper does not forward."""

STATES = frozenset({"server", "known", "kept", "down", "upload", "sums", "lasting"})
"""The arguments of hooks in which a wrapper may have entries of its own."""

REPLACED = {
    "keep": "kept",
    "remember": "known",
    "aggregate": "server",
    "withdraw": "server",
    "without_uploads": "server",
}
"""The hooks that return the new value of a state, and which: what the wrapper has in it stays."""


@dataclass(frozen=True, kw_only=True)
class MethodWrapper(Algorithm):
    """A method that forwards the hooks of `base`, to be overridden where they differ."""

    prefix: ClassVar[str]
    plugin_point: ClassVar[str] = ""  # the setting that puts this plug-in around a method; empty: it is a method itself

    base: Algorithm

    @classmethod
    def around(cls, base: Algorithm, **settings: object) -> Self:
        """Return this wrapper around a method that is bound already."""
        same = {n: getattr(base, n) for n in (*FROM_TRAINING, "inference", "bound")}
        return cls(base=base, **same, **settings)  # type: ignore[arg-type]

    @property
    def called(self) -> str:
        return self.base.called

    def theirs(self, state: Mapping[str, T]) -> dict[str, T]:
        """Return what the inner method sees of a state or payload."""
        return tree.without(state, self.prefix)

    def mine(self, state: Params) -> Params:
        """Return what the wrapper added to a state, without its prefix."""
        return tree.under(state, self.prefix)

    def own(self, state: Params) -> Params:
        """Return the wrapper's state under the names it is kept by; inverse of `mine`."""
        return tree.prefixed(state, self.prefix)

    def inner_stage(self, stage: Stage) -> Stage:
        """Return a stage as the inner method counts it."""
        return stage

    def seen_by_base(self, name: str, value: Any) -> Any:
        """Return the argument of a hook, by its name, as the inner method sees it."""
        if name == "stage":
            return self.inner_stage(value)
        if isinstance(value, Round):
            stage = self.inner_stage(value.stage)
            return value if stage is value.stage else replace(value, stage=stage)
        if isinstance(value, Download):
            return Download(self.theirs(value.shared), self.theirs(value.own))
        return self.theirs(value) if name in STATES else value

    # Hooks that are not forwarded in the general way

    def screen(self, server: Params, upload: Payload, rnd: Round) -> tuple[Tensor | None, Payload]:
        mine = tree.exclude(upload, self.theirs(upload))
        rows, used = self.base.screen(self.theirs(server), self.theirs(upload), self.seen_by_base("rnd", rnd))
        return rows, used | (mine if rows is None else tree.rows_of(mine, rows))

    def evaluated(self, when: str) -> str:
        own = self.base.evaluated(when)
        return own if self.inference == self.base.inference or self.rule is None else self.rule.words(own)


@dataclass(frozen=True, kw_only=True)
class TrainingWrapper(MethodWrapper):
    """A wrapper that changes training or aggregation but no model: prediction is the inner method's, too."""


def _forwarding(name: str, hook: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that calls this hook of `base` with what the inner method sees of the arguments."""
    names = tuple(inspect.signature(hook).parameters)[1:]
    replaced = REPLACED.get(name)

    @functools.wraps(hook)
    def forward(self: MethodWrapper, *args: Any, **named: Any) -> Any:
        seen = [self.seen_by_base(n, value) for n, value in zip(names, args, strict=False)]
        result = getattr(self.base, name)(*seen, **{n: self.seen_by_base(n, value) for n, value in named.items()})
        if replaced is None:
            return result
        before = named[replaced] if replaced in named else args[names.index(replaced)]
        return before | result

    return forward


for _name, _hook in inspect.getmembers(Algorithm, inspect.isfunction):
    if _name in PREDICTION:
        setattr(TrainingWrapper, _name, _forwarding(_name, _hook))
    elif not _name.startswith("_") and _name not in NOT_FORWARDED and _name not in vars(MethodWrapper):
        setattr(MethodWrapper, _name, _forwarding(_name, _hook))


def responsible(method: Algorithm, holds: Callable[[Algorithm], bool]) -> str:
    """Return the name of that part of a method for which a hook is true, to begin an error message.

    Args:
        method: A bound method, possibly with plug-ins around it, for which the hook is true.
        holds: Calls the hook, such as `Algorithm.needs_all_rounds`, of the method it is given.

    Returns:
        The name of the method, such as "DMPFL", or of the plug-in, such as "The plug-in inherit of FedAvg".
    """
    while isinstance(method, MethodWrapper) and holds(method.base):
        method = method.base
    if isinstance(method, MethodWrapper):
        return f"The plug-in {method.plugin_point} of {method.called}" if method.plugin_point else type(method).__name__
    return method.called
