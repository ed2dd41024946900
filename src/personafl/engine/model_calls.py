"""How often a loss calls the model, and how gradients pass back through each call: what a step costs.

A loss may run several models, run one without gradients, or differentiate its own gradients, as MAML does. So it is
called once on a minibatch of one client, with a model that notes its calls. Every parameter a call is given passes
through a function that changes nothing; where that function's backward runs, gradients reach the parameter. That
function's gradient passes through another one, which notes where gradients of gradients arrive.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import types
import weakref
from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from personafl.core import tree
from personafl.core.algorithm import Algorithm
from personafl.core.model_wrapper import ModelAround
from personafl.core.types import Model, ModelInfo, Params

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
    """What tells a loss from another one that may call the model in another way; it keeps no tensor and no owner alive.

    Functions made anew in every round are equal if their code and what they use is: what their closures and defaults
    hold, functions of their own module, and numbers, strings and the like among global variables. Dataclasses are
    compared by their fields, tensors by shape and dtype. Methods of a federation cannot change and equal themselves
    alone. Any other object does, too, as long as the numbers, strings and containers among its attributes stay as they
    are. So a loss that holds the round's number, as in a `Round`, differs from that of the next round; and one that
    counts how often it was called differs from itself.
    """
    return _identity(thing, {})


def _identity(thing: object, seen: dict[int, tuple[int, object]]) -> Hashable:
    """The same; what was `seen` before is named by its place, as a function may refer to itself."""
    if isinstance(thing, Tensor):
        return thing.shape, thing.dtype
    if isinstance(thing, _VALUES):
        return type(thing), thing
    if isinstance(thing, _CONSTANT):
        return _Same(thing)
    if id(thing) in seen:
        return seen[id(thing)][0]
    seen[id(thing)] = len(seen), thing  # which lives until all is done: no other object gets its id
    match thing:
        case functools.partial():
            return tuple(_identity(part, seen) for part in (thing.func, thing.args, thing.keywords))
        case tuple() | list():
            return type(thing), *[_identity(part, seen) for part in thing]
        case set() | frozenset():
            return type(thing), frozenset(_identity(part, seen) for part in thing)
        case dict():
            return type(thing), *[(_identity(n, seen), _identity(part, seen)) for n, part in thing.items()]
        case types.MethodType():
            return _identity(thing.__func__, seen), _identity(thing.__self__, seen)
        case types.FunctionType():
            own = [_content(cell) for cell in thing.__closure__ or ()], thing.__defaults__, thing.__kwdefaults__
            named = [thing.__globals__.get(name, None) for name in _names(thing.__code__)]
            others = [
                _identity(t, seen)
                if isinstance(t, types.FunctionType) and t.__globals__ is thing.__globals__
                else _at_a_glance(t)
                for t in named
            ]
            return thing.__code__, *[_identity(part, seen) for part in own], *others, _attributes(thing)
        case type() | types.ModuleType():
            return _Same(thing)
    if dataclasses.is_dataclass(thing):
        fields = {f.name: getattr(thing, f.name, None) for f in dataclasses.fields(thing)}
        return type(thing), *[_identity(part, seen) for part in fields.values()], _attributes(thing, fields)
    return _Same(thing), _attributes(thing)


_VALUES = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, np.generic)
_CONSTANT = (Algorithm, ModelInfo)
_MOST = 64  # parts of a container that are looked at


def _attributes(thing: object, known: Collection[str] = ()) -> tuple[Hashable, ...]:
    """An object's attributes, at a glance, but for those that are known."""
    own = getattr(thing, "__dict__", {})
    return tuple([(name, _at_a_glance(part)) for name, part in own.items() if name not in known])


def _at_a_glance(thing: object, deep: bool = True) -> Hashable:
    """A number or a string, or how many things a container has and the first of these; of any other thing, its type."""
    if isinstance(thing, _VALUES):
        return type(thing), thing
    if deep and isinstance(thing, (tuple, list, set, frozenset, dict)):
        parts = thing.items() if isinstance(thing, dict) else ((None, part) for part in thing)
        some = itertools.islice(parts, _MOST)
        return type(thing), len(thing), *[(_at_a_glance(n), _at_a_glance(part, False)) for n, part in some]
    return (type(thing),)


@functools.lru_cache(maxsize=256)
def _names(code: types.CodeType) -> tuple[str, ...]:
    """The names of global variables and of attributes in a function and in the functions within it."""
    inner = [name for part in code.co_consts if isinstance(part, types.CodeType) for name in _names(part)]
    return tuple(dict.fromkeys([*code.co_names, *inner]))


def _content(cell: Any) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


class _Same:
    """An object that equals itself alone, and nothing once it is gone."""

    __slots__ = ("hash", "thing")

    def __init__(self, thing: object) -> None:
        self.hash = id(thing)
        try:
            self.thing: Callable[[], object] = weakref.ref(thing)
        except TypeError:  # what cannot be referred to weakly equals nothing
            self.thing = lambda: None

    def __hash__(self) -> int:
        return self.hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and (mine := self.thing()) is not None and mine is other.thing()
