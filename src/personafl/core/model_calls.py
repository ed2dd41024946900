"""How often a loss calls the model, and how gradients pass back through each call: what a step costs.

A loss may run several models, run one without gradients, or differentiate its own gradients, as MAML does. So it is
called once on a minibatch of one client, with a model that notes its calls. Every parameter a call is given passes
through a function that changes nothing; where that function's backward runs, gradients reach the parameter. That
function's gradient passes through another one, which notes where gradients of gradients arrive.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from personafl.core import tree
from personafl.core.model_around import ModelAround
from personafl.core.types import Model, Params

INPUT, FEATURES, OUTPUT = "<input>", "<features>", "<output>"


@dataclass(frozen=True)
class BackwardPass:
    """Gradients that pass back through a call once."""

    order: int  # 0: through the call; 1: through a backward pass of it, for a gradient of a gradient; and so on
    reached: frozenset[str]  # the parameters of the call that they come to, and INPUT, FEATURES and OUTPUT


@dataclass(frozen=True)
class ModelCall:
    """One forward pass of a loss, and the backward passes through it."""

    sources: Mapping[str, str]  # parameter to the tensor of the client's state that it is, or was computed from
    examples: float  # of which it takes so many for each one of the minibatch
    backward: tuple[BackwardPass, ...]


def observe(model: Model, state: Params, run: Callable[[Model], int]) -> tuple[ModelCall, ...]:
    """Run something with a model that notes its calls.

    Args:
        model: The model.
        state: The tensors of the clients that `run` may give to the model, by name.
        run: What calls the model, takes all gradients that are to be noted, and returns how many examples it had.
    """
    with _BackwardRuns() as runs:
        noting = _NotingModel(model, state, runs)
        examples = run(noting)
    return tuple(call.summary(examples) for call in noting.calls)


class _BackwardRuns(TorchFunctionMode):
    """Numbers the times that gradients are asked for."""

    number = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.autograd.grad, torch.autograd.backward, Tensor.backward):
            self.number += 1
        return func(*args, **(kwargs or {}))


@dataclass
class _Call:
    """A call so far."""

    runs: _BackwardRuns
    sources: dict[str, str]
    examples: int
    reached: dict[tuple[int, int], set[str]] = field(default_factory=dict)  # by run and order

    def mark(self, name: str, tensor: Tensor, order: int = 0) -> Tensor:
        return _Marked.apply(tensor, self, name, order) if tensor.requires_grad else tensor  # type: ignore[no-untyped-call]

    def summary(self, examples: int) -> ModelCall:
        passes = [BackwardPass(order, frozenset(names)) for (_, order), names in self.reached.items()]
        return ModelCall(self.sources, self.examples / examples, tuple(passes))


class _Marked(torch.autograd.Function):
    """A tensor as it is; its gradient notes that it has come."""

    @staticmethod
    def forward(tensor: Tensor, call: _Call, name: str, order: int) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.call, ctx.name, ctx.order = inputs

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        call: _Call = ctx.call
        call.reached.setdefault((call.runs.number, ctx.order), set()).add(ctx.name)
        return call.mark(ctx.name, grads[0], ctx.order + 1), None, None, None


class _NotingModel(ModelAround):
    """A model that notes its calls."""

    def __init__(self, model: Model, state: Params, runs: _BackwardRuns) -> None:
        super().__init__(model)
        self.names, self.runs = {id(t): n for n, t in state.items()}, runs
        self.calls: list[_Call] = []

    def __call__(self, params: Params, x: Tensor, valid: Tensor | None = None, keys: Tensor | None = None) -> Tensor:
        call, params, x = self._begin(params, x)
        return call.mark(OUTPUT, self.model(params, x, valid, keys))

    def features(
        self,
        params: Params,
        x: Tensor,
        valid: Tensor | None = None,
        keys: Tensor | None = None,
        change: Callable[[Tensor], Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        call, params, x = self._begin(params, x)
        z, out = self.model.features(params, x, valid, keys, change)
        return call.mark(FEATURES, z), call.mark(OUTPUT, out)

    def _begin(self, params: Params, x: Tensor) -> tuple[_Call, Params, Tensor]:
        used = tree.select(params, self.info.parameters)
        call = _Call(self.runs, {n: self._source(n, t) for n, t in used.items()}, x.shape[0] * x.shape[1])
        self.calls.append(call)
        return call, params | {n: call.mark(n, t) for n, t in used.items()}, call.mark(INPUT, x)

    def _source(self, name: str, tensor: Tensor) -> str:
        """The tensor of the client's state that a parameter is, or that of the same model it was computed from."""
        if id(tensor) in self.names:
            return self.names[id(tensor)]
        todo, seen = [tensor.grad_fn], set[Any]()
        for node in todo:  # which grows: the nearest are looked at first
            if node is None or node in seen:
                continue
            seen.add(node)
            leaf = self.names.get(id(getattr(node, "variable", None)))
            if leaf is not None:
                prefix = tree.prefix_of(leaf)
                return f"{prefix}/{name}" if prefix else name
            todo += [before for before, _ in node.next_functions]
        return ""  # of none that trains


def identity(thing: object) -> Hashable:
    """What tells a loss from another one that may call the model in another way.

    Functions made anew in every round are equal if their code and what they hold is. Of tensors only shapes count.
    """
    match thing:
        case functools.partial():
            return identity(thing.func), identity(thing.args), identity(thing.keywords)
        case None | bool() | int() | float() | str():
            return type(thing), thing
        case Tensor():
            return tuple(thing.shape), thing.dtype
        case tuple() | list():
            return tuple(identity(part) for part in thing)
        case dict():
            return tuple((n, identity(part)) for n, part in thing.items())
    if (owner := getattr(thing, "__self__", None)) is not None and hasattr(thing, "__func__"):
        return identity(thing.__func__), _Same(owner)
    if (code := getattr(thing, "__code__", None)) is not None:
        cells = tuple(_content(cell) for cell in getattr(thing, "__closure__", None) or ())
        return code, identity(cells), identity(getattr(thing, "__defaults__", None))
    return _Same(thing)


def _content(cell: Any) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


@dataclass(frozen=True, eq=False)
class _Same:
    """An object that equals itself alone."""

    thing: object

    def __hash__(self) -> int:
        return id(self.thing)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.thing is self.thing
