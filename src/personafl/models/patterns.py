"""Patterns of layers that one call can do: found in any folded module, whoever wrote it.

    convolution, ReLU [, 2x2 max-pooling, before or behind the ReLU]    `conv_relu`
    batch norm [, something added,] ReLU                                `norm_relu`
    linear, ReLU, linear, ReLU, ..., linear                             `linears`

The module's forward is recorded by `torch.fx`, with the layers of `models/layers.py` as they are and the user's own
modules by what they do, once in training mode and once in evaluation. What is between two layers of a pattern must
be used there alone. A module that cannot be recorded, or of which a recording would not be the same, is left alone.
"""

from __future__ import annotations

import copy
import functools
import inspect
import operator
import random
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.fx.node import map_aggregate

from personafl import accel
from personafl.core.torch_internals import is_hooked
from personafl.models.layers import (
    Stacked,
    StackedBatchNorm,
    StackedConv,
    StackedLinear,
    conv_relu,
    drop_by_client,
    linears,
    norm_relu,
)

Forward = Callable[[nn.Module, Tensor], Tensor]
_RELUS = {F.relu, F.relu_, torch.relu, torch.relu_, "relu", "relu_"}
_SUMS = {operator.add, operator.iadd, torch.add, "add", "add_"}
_IN_PLACE = {operator.iadd, "add_"}
_POOLING = {"kernel_size": 2, "stride": 2, "padding": 0, "dilation": 1, "ceil_mode": False, "return_indices": False}
DROPPING: dict[Any, int | None] = {
    torch.dropout: None,
    F.dropout: None,
    F.dropout1d: 3,
    F.dropout2d: 4,
    F.dropout3d: 5,
}
"""Functions that drop numbers, and the axes of a batch whose channels they drop, if they do."""
_one_at_a_time = threading.Lock()  # a recording changes `nn.Module` while it lasts


@dataclass(frozen=True)
class FusedForward:
    """A module's forward with its patterns as one call each; None for a mode in which there are none.

    It holds no tensor and no module: those of the module it is called with are used, by their names.
    """

    training: Forward | None
    evaluation: Forward | None

    def __deepcopy__(self, memo: object) -> FusedForward:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Recorded functions cannot be pickled; who holds this records them again."""
        return FusedForward, (None, None)

    def __call__(self, module: nn.Module, x: Tensor) -> Tensor:
        forward = self.training if module.training else self.evaluation
        out: Tensor = module(x) if forward is None else forward(module, x)
        return out


def fused_forward(folded: nn.Module) -> FusedForward | None:
    """The forward of a folded module with its patterns as one call each; None where none was found."""
    if not accel.ENABLED or not _worth_a_look(folded) or any(is_hooked(m) for m in folded.modules()):
        return None
    with _one_at_a_time:
        if not _recordings_can_be_trusted():
            return None
        training, evaluation = (_fused(folded, training) for training in (True, False))
    return None if training is evaluation is None else FusedForward(training, evaluation)


def _worth_a_look(folded: nn.Module) -> bool:
    """Whether there may be a pattern: a layer that has one, or a forward that may drop numbers, around some layer."""
    return not isinstance(folded, Stacked) and any(isinstance(m, Stacked) for m in folded.modules())


class _NotTheSameError(Exception):
    """A recording that would not always do what the module does."""


class _Root(nn.Module):
    """Calls a module with one argument, so that its further ones have their defaults."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Any:
        return self.module(x)


class _Proxy(fx.Proxy):
    """What is recorded; `x += y` as what it is, in the memory and type of x."""


def _in_place(name: str) -> Callable[[fx.Proxy, Any], Any]:
    def record(self: fx.Proxy, other: Any) -> Any:
        return self.tracer.create_proxy("call_function", getattr(operator, name), (self, other), {})

    return record


for _operator in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "matmul"):
    setattr(_Proxy, f"__i{_operator}__", _in_place(f"i{_operator}"))


class _Tracer(fx.Tracer):
    """Records operations, but none whose gradient or precision is decided by something it does not see.

    Meanwhile modules of the whole process are called by way of it: those of other threads go on as ever.
    """

    proxy_buffer_attributes = True  # what is computed from a buffer is computed anew in every call

    def __init__(self) -> None:
        super().__init__()
        self.modes, self.thread = _modes(), threading.get_ident()

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, Stacked) or super().is_leaf_module(m, module_qualified_name)

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if threading.get_ident() != self.thread:
            return forward(*args, **kwargs)
        return super().call_module(m, forward, args, kwargs)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        if _modes() != self.modes:
            raise _NotTheSameError("a context manager")
        bodies = _bodies_of_autograd_functions()
        if any(frame.f_code in bodies for frame in _frames()):
            raise _NotTheSameError("an autograd function, which has a gradient of its own")
        return super().create_node(*args, **kwargs)


def _bodies_of_autograd_functions(above: Any = torch.autograd.Function) -> set[CodeType]:
    """The code of the `forward` of every autograd function that has been defined, however it is called."""
    bodies = set()
    for function in above.__subclasses__():
        body = inspect.unwrap(function.forward)  # code of a decorator is not that of one function alone
        while isinstance(body, functools.partial):
            body = inspect.unwrap(body.func)
        code = getattr(body, "__code__", None) or getattr(type(body).__call__, "__code__", None)
        bodies |= _bodies_of_autograd_functions(function) | ({code} if isinstance(code, CodeType) else set())
    return bodies


def _modes() -> tuple[bool, ...]:
    """What context managers may have changed: a recording does not hold them."""
    autocast = (torch.is_autocast_enabled(device) for device in ("cpu", "cuda"))
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *autocast


def _frames() -> Iterator[FrameType]:
    """What is being executed, from the caller out to where the recording began."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not _recorded.__code__:
        yield frame
        frame = frame.f_back


def _fused(folded: nn.Module, training: bool) -> Forward | None:
    root = _Root(copy.deepcopy(folded).train(training))  # a forward may leave things behind in its module
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            before = torch.random.get_rng_state(), random.getstate()
            graph = _recorded(root)
            if not torch.equal(before[0], torch.random.get_rng_state()) or before[1] != random.getstate():
                return None  # what was drawn, or decided by it, is a constant now
    except Exception:  # whatever the module's own code makes of what is no tensor
        return None
    if not sum(change(graph, root.module) for change in (_fuse_convs, _fuse_norms, _fuse_linears, _key_dropouts)):
        return None
    return cast(Forward, type(fx.GraphModule(root.module, graph)).forward)


class _Doubled(torch.autograd.Function):
    """A function with a gradient of its own, for the probes. Its body runs with gradients, not as usual without."""

    @staticmethod
    @torch.enable_grad()
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


class _Probe(nn.Module):
    """A module of which it is known what a recording must be."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.layer = kind, nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x).relu()
        if self.kind == "autograd function":
            return cast(Tensor, _Doubled.apply(x))  # type: ignore[no-untyped-call]
        with torch.set_grad_enabled(torch.is_grad_enabled() == (self.kind != "context manager")):
            return x + 1


@functools.cache
@torch.enable_grad()
def _recordings_can_be_trusted() -> bool:
    """Whether recordings are what they must be with this version of PyTorch: of modules with known ones."""
    try:
        plain, x = _Probe("plain"), torch.tensor([-1.0, 2.0])
        graph = _recorded(_Root(plain))
        calls = [(node.op, node.target) for node in graph.nodes][1:-1]
        trusted = calls == [("call_module", "layer"), ("call_method", "relu"), ("call_function", operator.add)]
        trusted = trusted and type(fx.GraphModule(plain, graph)).forward(plain, x).tolist() == [1, 3]
        for kind in ("autograd function", "context manager"):
            try:
                _recorded(_Root(_Probe(kind)))
                trusted = False
            except _NotTheSameError:
                pass
    except Exception:
        trusted = False
    if not trusted:
        warnings.warn(
            f"forward passes cannot be recorded with PyTorch {torch.__version__} as with the versions this package was "
            "tested with; models run without fused layers, which is slower",
            stacklevel=2,
        )
    return trusted


def _recorded(root: _Root) -> fx.Graph:
    """The forward of a root's module as a graph, by the module's own names."""
    before = _attributes(root)
    graph = _Tracer().trace(root)
    after = _attributes(root)
    if len(before) != len(after) or any(a is not b for a, b in zip(before, after, strict=True)):
        raise _NotTheSameError("a forward that changes its module")
    for node in graph.nodes:
        if node.op in ("call_module", "get_attr"):
            first, _, rest = node.target.partition(".")
            if first != "module" or not rest:
                raise _NotTheSameError("a tensor made in the forward is a constant, with a device and a dtype")
            node.target = rest
        map_aggregate((node.args, node.kwargs), _refuse_places)
        if node.op == "output" and not isinstance(node.args[0], fx.Node):
            raise _NotTheSameError("an output that is no tensor")
    return graph


def _refuse_places(constant: Any) -> Any:
    if isinstance(constant, torch.device | torch.dtype):
        raise _NotTheSameError("a device or dtype, which may have been asked of a tensor that is moved later")
    return constant


def _attributes(root: nn.Module) -> list[Any]:
    """What the modules hold, also within containers."""
    found: list[Any] = []
    for m in root.modules():
        for value in (m, *vars(m).values()):
            found.append(value)
            if isinstance(value, dict):
                found += value.values()
            elif isinstance(value, list | tuple | set):
                found += value
    return found


def _fuse_convs(graph: fx.Graph, module: nn.Module) -> int:
    """Replace convolutions with what follows them; how many were."""
    blocks = []
    for conv in list(graph.nodes):
        found = _module(conv, module)
        if not isinstance(found, StackedConv) or type(found.original) is not nn.Conv2d or not _has_one_input(conv):
            continue
        run = [conv]
        while (node := _only_user(run[-1])) is not None and len(run) < 3:
            if not (_is_relu(node, module) or _is_pool(node, module)):
                break
            run.append(node)
        kinds = ["relu" if _is_relu(node, module) else "pool" for node in run[1:]]
        if kinds[:1] == ["relu"] and kinds[1:] != ["pool"]:
            run, kinds = run[:2], kinds[:1]
        if sorted(kinds) in (["relu"], ["pool", "relu"]):
            blocks.append(_replace(graph, run, conv_relu, run[:1], {"then": tuple(kinds)}))
    for block in blocks:
        if block.users and all(user in blocks for user in block.users):
            with graph.inserting_before(block):
                into = [graph.create_node("get_attr", cast(fx.Node, user.args[0]).target) for user in block.users]
            block.kwargs = {**block.kwargs, "into": into}
    return len(blocks)


def _fuse_norms(graph: fx.Graph, module: nn.Module) -> int:
    """Replace batch norms with the ReLU behind them, and what is added in between; how many were."""
    blocks = 0
    for norm in list(graph.nodes):
        if not isinstance(_module(norm, module), StackedBatchNorm) or not _has_one_input(norm):
            continue
        relu, between = _only_user(norm), None
        if relu is None or not _is_relu(relu, module):
            between = _sum_with(norm) if _called_once(norm, module) else None
            relu = None if between is None else _only_user(between[0])
        if relu is None or not _is_relu(relu, module):
            continue
        place, added = (norm, None) if between is None else between
        with graph.inserting_before(place):  # there the other summand is what it is when it is added
            layer = graph.create_node("get_attr", norm.target)
            options: dict[str, Any] = {} if added is None else {"added": added, "in_place": place.target in _IN_PLACE}
            block = graph.call_function(norm_relu, (layer, norm.args[0]), options)
        relu.replace_all_uses_with(block)
        for node in dict.fromkeys((relu, place, norm)):
            graph.erase_node(node)
        blocks += 1
    return blocks


def _called_once(norm: fx.Node, module: nn.Module) -> bool:
    """Whether a norm has one call: running statistics go by the order of several."""
    return sum(_module(node, module) is _module(norm, module) for node in norm.graph.nodes) == 1


def _sum_with(norm: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """The sum that alone uses a norm, whose input nothing else does, and the other summand."""
    (given,), users = norm.all_input_nodes, list(norm.users)
    if len(users) != 1 or len(given.users) != 1:
        return None
    total = users[0]
    known = total.op in ("call_function", "call_method") and total.target in _SUMS and not total.kwargs
    if not known or len(total.args) != 2 or len(total.all_input_nodes) != 2:
        return None
    first, second = total.all_input_nodes
    if second is norm and total.target in _IN_PLACE:
        return None  # the other one is what changes
    return total, second if first is norm else first


def _fuse_linears(graph: fx.Graph, module: nn.Module) -> int:
    """Replace linear layers with ReLU between them, each layer at most once in a run; how many runs were."""

    def linear(node: fx.Node | None) -> StackedLinear | None:
        found = None if node is None or not _has_one_input(node) else _module(node, module)
        return found if isinstance(found, StackedLinear) else None

    blocks, taken = 0, set()
    for first in list(graph.nodes):
        layer = linear(first)
        if layer is None or first in taken:
            continue
        run, layers = [first], [layer]
        while (relu := _only_user(run[-1])) is not None and _is_relu(relu, module):
            node = _only_user(relu)
            layer = linear(node)
            if node is None or layer is None or layer in layers:
                break
            run += [relu, node]
            layers.append(layer)
        taken.update(run)
        if len(layers) > 1:
            _replace(graph, run, linears, run[::2], {})
            blocks += 1
    return blocks


def _key_dropouts(graph: fx.Graph, module: nn.Module) -> int:
    """Let functional dropout draw from each client's own stream, as `nn.Dropout` does; how many now do."""
    name = next(n for n, m in module.named_modules() if isinstance(m, Stacked))  # any of them knows the clients
    found = 0
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target not in DROPPING:
            continue
        given = dict(zip(("input", "p", "training", "inplace"), node.args, strict=False)) | node.kwargs
        if given.get("train", given.get("training", True)) is not True or given.get("inplace", False):
            continue
        with graph.inserting_before(node):
            layer = graph.create_node("get_attr", name)
            options = {"p": given.get("p", 0.5), "axes": DROPPING[node.target]}
            drawn = graph.call_function(drop_by_client, (layer, given["input"]), options)
        node.replace_all_uses_with(drawn)
        graph.erase_node(node)
        found += 1
    return found


def _replace(graph: fx.Graph, run: list[fx.Node], call: Any, layers: list[fx.Node], options: dict[str, Any]) -> fx.Node:
    """One call in place of a run of nodes, where the first was: its input may be changed in place behind that."""
    with graph.inserting_before(run[0]):
        held = [graph.create_node("get_attr", node.target) for node in layers]
        given = held[0] if call is conv_relu else held
        block = graph.call_function(call, (given, run[0].args[0]), options)
    run[-1].replace_all_uses_with(block)
    for node in reversed(run):
        graph.erase_node(node)
    return block


def _module(node: fx.Node, module: nn.Module) -> nn.Module | None:
    return module.get_submodule(cast(str, node.target)) if node.op == "call_module" else None


def _has_one_input(node: fx.Node) -> bool:
    return len(node.args) == 1 and isinstance(node.args[0], fx.Node) and not node.kwargs


def _only_user(node: fx.Node) -> fx.Node | None:
    """The node that alone uses this one's output, as its only input."""
    users = list(node.users)
    return users[0] if len(users) == 1 and users[0].args[:1] == (node,) and users[0].all_input_nodes == [node] else None


def _is_relu(node: fx.Node, module: nn.Module) -> bool:
    if node.op == "call_module":
        return type(_module(node, module)) is nn.ReLU
    return node.op in ("call_function", "call_method") and node.target in _RELUS


def _is_pool(node: fx.Node, module: nn.Module) -> bool:
    """Whether it is 2x2 max-pooling, the windows beside one another and inside the image."""
    if node.op == "call_function" and node.target is F.max_pool2d:
        options = dict(zip(_POOLING, node.args[1:], strict=False)) | node.kwargs
    elif type(found := _module(node, module)) is nn.MaxPool2d:
        options = {n: getattr(found, n) for n in _POOLING}
    else:
        return False
    options["stride"] = options.get("stride") or options["kernel_size"]
    return all(_both(options.get(n, usual)) == usual for n, usual in _POOLING.items())


def _both(size: Any) -> Any:
    """The number that a size is in both directions."""
    if not isinstance(size, tuple | list):
        return size
    return size[0] if len(set(size)) == 1 else None
