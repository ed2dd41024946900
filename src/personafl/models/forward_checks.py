"""What a forward pass does besides computing outputs, found before a module is trained.

A stack calls a module once for the rows of all clients. That is right only if the forward pass treats every number of
rows alike, registers no hooks on gradients, which would see the rows of all clients, and remembers nothing from one
call to the next, since calls of a stack are not steps of a client.
"""

from __future__ import annotations

import copy
import functools
import itertools
import random
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from types import CellType, FunctionType, GeneratorType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from personafl.core import rng
from personafl.core.errors import UserError
from personafl.core.torch_internals import forward_hooks, is_hooked

ROWS = 6  # of the recording that the others are compared with: two clients with three examples each
OTHER_ROWS = (3, 2**20)  # an odd number, and a power of two that is larger than any stack
_GRADIENT_HOOKS = ("register_hook", "register_post_accumulate_grad_hook", "retain_grad", "grad_fn")


_RECURRENT = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)
_LIBRARIES = ("torch.nn.", "personafl.models.")
_DATA = ("builtins", "collections", "itertools", "numpy", "random", "torch")
"""Where the types of data are defined."""


def is_library_code(module: nn.Module) -> bool:
    """Return whether all forward passes within a module are PyTorch's or this package's, which need no check."""
    return all(type(m).__module__.startswith(_LIBRARIES) and "forward" not in vars(m) for m in module.modules())


def has_hooks(module: nn.Module) -> bool:
    """Return whether anybody registered a hook on a module or one of its layers."""
    return any(is_hooked(m) for m in module.modules())


def copy_module(module: nn.Module) -> nn.Module:
    """Copy a module. Activations that an earlier call left in it are kept without their graph."""
    try:
        return copy.deepcopy(module, activations(module))
    except (TypeError, copy.Error) as e:  # of a generator, a file or a lock, for example
        raise UserError(
            f"{type(module).__name__} holds something that cannot be copied ({e}); keep it elsewhere"
        ) from e


def activations(module: nn.Module) -> dict[int, Any]:
    """Return what a forward pass left in a module, by id and without its graph, as `copy.deepcopy` takes it."""

    def walk(value: Any) -> Iterator[Tensor]:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, dict | list | tuple):
            for v in value.values() if isinstance(value, dict) else value:
                yield from walk(v)

    stored = (t for m in module.modules() for value in vars(m).values() for t in walk(value))
    return {id(t): t.detach() for t in stored if not t.is_leaf}


class _DeviationError(Exception):
    """A call that is not the one recorded for another number of rows."""


class _Recorder(TorchFunctionMode):
    """Notes every PyTorch function a forward pass calls, and compares with the calls for another number of rows."""

    def __init__(self, rows: int, expected: _Recorder | None = None) -> None:
        super().__init__()
        self.rows, self.expected = rows, expected
        self.calls: list[tuple[str, Any]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = _name(func)
        self.calls.append((name, _outline((args, kwargs))))
        if self.expected is not None and not self._as_expected():
            raise _DeviationError(name)
        if _on_meta((args, kwargs)):
            args, kwargs = _move_to_meta(args), _move_to_meta(kwargs)  # constants may lie elsewhere
        return _recurrent_outputs(*args) if func in _RECURRENT else func(*args, **kwargs)

    def _as_expected(self) -> bool:
        assert self.expected is not None
        place = len(self.calls) - 1
        if place >= len(self.expected.calls):
            return False
        (name, given), (other, before) = self.calls[place], self.expected.calls[place]
        return name == other and self._corresponds(before, given)

    def _corresponds(self, before: Any, given: Any) -> bool:
        """Return whether two arguments are equal, or in the same ratio as the numbers of rows."""
        assert self.expected is not None
        if type(before) is not type(given):
            return False
        if isinstance(before, tuple):
            pairs = zip(before, given, strict=False)
            return len(before) == len(given) and all(self._corresponds(a, b) for a, b in pairs)
        if isinstance(before, int) and not isinstance(before, bool):
            return bool(before == given or before * self.rows == given * self.expected.rows)
        return bool(before == given)


def _on_meta(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.is_meta
    values = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return any(_on_meta(v) for v in values)


def _move_to_meta(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value if value.is_meta else value.to("meta")
    if isinstance(value, dict):
        return {k: _move_to_meta(v) for k, v in value.items()}
    return type(value)(map(_move_to_meta, value)) if type(value) in (list, tuple) else value


def _recurrent_outputs(x: Tensor, states: Any, weights: Any, *options: Any) -> Any:
    """Outputs of the right shapes; going through all steps in time would take long."""
    last = states if isinstance(states, tuple) else (states,)
    ways = 2 if options[4] else 1
    return x.new_empty(*x.shape[:2], ways * last[0].shape[2], requires_grad=torch.is_grad_enabled()), *last


def _name(func: Any) -> str:
    """The name of a function, or of the attribute of a tensor that is read or set."""
    name = getattr(func, "__name__", repr(func))
    return str(getattr(func.__self__, "__name__", name)) if name in ("__get__", "__set__") else name


def _outline(value: Any) -> Any:
    """Return an argument with the shapes of tensors in place of their numbers."""
    if isinstance(value, Tensor):
        return tuple(value.shape)
    if isinstance(value, dict):
        return tuple((str(k), _outline(v)) for k, v in value.items())
    if isinstance(value, list | tuple | set):
        return tuple(_outline(v) for v in value)
    if isinstance(value, slice):
        return tuple(_outline(v) for v in (value.start, value.stop, value.step))
    return value if isinstance(value, bool | int | float | str | type(None)) else type(value).__name__


_RECORDING = threading.Lock()


class RowChecks:
    """Whether the rows of several clients may go through a module in one call, for any number of rows.

    The forward pass is recorded on the meta device, where nothing is computed, for several numbers of rows. The same
    functions must be called each time, with arguments that are equal or grow with the number of rows. Numbers of rows
    that come up during training are checked when they first do.
    """

    def __init__(self, module: nn.Module, example: Tensor) -> None:
        self.name, self.shape, self.dtype = type(module).__name__, example.shape[1:], example.dtype
        self.module = copy.deepcopy(module).to("meta")
        self.references: dict[bool, _Recorder] = {}
        self.checked: set[tuple[bool, int, int]] = set()
        self.compared: set[tuple[bool, int, int]] = set()
        self.largest = {True: 0, False: 0}  # rows of a stack that was compared, in training and in evaluation

    def __deepcopy__(self, memo: dict[int, Any]) -> RowChecks:
        return self  # nothing in it depends on weights

    def reason_not_to_stack(self) -> str | None:
        """Say why the rows of several clients must not go through the module in one call; None if they may."""
        for training in (True, False):
            self.references[training] = reference = _Recorder(ROWS)
            try:
                self._record(reference, training)
            except Exception as e:
                return f"its forward pass cannot be recorded without data ({type(e).__name__})"
            hooks = [name for name, _ in reference.calls if name in _GRADIENT_HOOKS]
            if hooks:
                return f"its forward pass uses {hooks[0]}, which would see the gradients of all clients"
            for rows in OTHER_ROWS:
                if reason := self._deviation(rows, training):
                    return reason
        return None

    def check(self, clients: int, rows: int, training: bool, compare: Callable[[], str | None] | None) -> None:
        """Refuse a stack whose rows do not go through the module as those of each client alone.

        The forward pass is recorded for this number of rows. Numbers are compared if no stack of that many clients and
        rows each has been, both to the next power of two, or if the stack has more rows than any that has been: ragged
        clients make many shapes, and a comparison takes as long as two steps.

        Args:
            clients: How many are in the stack.
            rows: Of each client.
            training: Whether the stack is in training.
            compare: Says how outputs or gradients differ from those of each client alone; None where nothing can be
                compared now.
        """
        shape = training, clients, rows
        if shape in self.checked:
            return
        with _RECORDING:
            reason = self._deviation(clients * rows, training)
        size = training, (clients - 1).bit_length(), (rows - 1).bit_length()
        if reason is None and (size not in self.compared or clients * rows > self.largest[training]):
            if compare is None:
                return
            if difference := compare():
                mode = "training" if training else "evaluation"
                reason = f"{difference} ({clients} clients with {rows} rows each, in {mode})"
        if reason:
            raise UserError(
                f"{self.name}: {reason}, so the rows of several clients cannot go through it in one call; train stacks "
                "of one client instead (--chunk 1, or Machine(chunk=1))"
            )
        self.compared.add(size)
        self.largest[training] = max(self.largest[training], clients * rows)
        self.checked.add(shape)

    def _deviation(self, rows: int, training: bool) -> str | None:
        reference = self.references[training]
        recorder = _Recorder(rows, reference)
        try:
            self._record(recorder, training)
            if len(recorder.calls) == len(reference.calls):
                return None
            call = reference.calls[len(recorder.calls)][0]
        except _DeviationError as e:
            call = str(e)
        except Exception as e:
            call = type(e).__name__
        return f"its forward pass depends on the number of rows ({call} differs between {ROWS} and {rows} rows)"

    def _record(self, recorder: _Recorder, training: bool) -> None:
        module = copy.deepcopy(self.module).train(training)  # a call may leave something in it
        x = torch.empty(recorder.rows, *self.shape, dtype=self.dtype, device="meta")
        # Always with gradients: `no_grad` within the module is otherwise called with other arguments.
        with torch.enable_grad(), torch.device("meta"), recorder:
            module(x)


def refuse_state(module: nn.Module, example: Tensor, rows: int = 2) -> None:
    """Refuse a module that remembers something from one call of its forward pass to the next.

    What it holds after calls with inputs a, b, a must be what it holds after a alone, and after a, b what it holds
    after b: activations may be stored, and so may tables that are made once. Buffers and parameters are looked at
    elsewhere.

    Args:
        module: The module.
        example: Two inputs.
        rows: How many rows each call has, of one of these inputs.

    Raises:
        UserError: The module remembers something.
    """
    first, second = example[[0] * rows], example[[1] * rows]
    for training in (True, False):
        known = copy.deepcopy(module).train(training), copy.deepcopy(module).train(training)
        expected = [_call(m, x) for m, x in zip(known, (first, second), strict=True)]
        after = _call(known[0], second), _call(known[0], first)
        for before, now in zip(reversed(expected), after, strict=True):
            for name, value in now.items():
                if name not in before or not _equal(before[name], value):
                    raise UserError(
                        f"{type(module).__name__}: {name} changes from one call of the forward pass to the next; all "
                        "clients of a stack would share it. Keep counters, averages and random streams outside of the "
                        "module; attributes may hold what the last call computed"
                    )


def refuse_dependence_on_first_call(module: nn.Module, example: Tensor) -> None:
    """Refuse a module that keeps what its first call computed, such as a weight that is normalised once.

    It must give the same outputs whether or not it was called before, with another input and other weights.

    Args:
        module: The module.
        example: Two inputs.

    Raises:
        UserError: The outputs differ.
    """
    first, second = example[[0, 0]], example[[1, 1]]
    for training in (True, False):
        fresh, again, called = (copy.deepcopy(module).train(training) for _ in range(3))
        _outputs(called, first)
        for m in (fresh, again, called):
            _set_weights(m, module)
        outputs = [_outputs(m, second) for m in (fresh, again, called)]
        if _equal(outputs[0], outputs[1]) and not _close(outputs[2], outputs[0]):
            raise UserError(
                f"{type(module).__name__}: its outputs depend on what an earlier call of the forward pass was given "
                "or on the weights it had then; all clients of a stack would share that. Compute what depends on "
                "weights or inputs in every call"
            )


@torch.no_grad()
def _set_weights(module: nn.Module, original: nn.Module) -> None:
    """Give a module the buffers of another one, and its weights, each changed a little."""
    draw = torch.Generator().manual_seed(0)
    for t, value in zip(module.buffers(), original.buffers(), strict=False):
        if t.shape == value.shape:
            t.copy_(value)
    for t, value in zip(module.parameters(), original.parameters(), strict=False):
        if t.shape == value.shape and t.is_floating_point():
            noise = torch.rand(t.shape, generator=draw).to(t)
            t.copy_(value + (0.1 * value.abs() + 0.01) * noise)


def _call(module: nn.Module, x: Tensor) -> dict[str, Any]:
    """Call a module, always with the same random numbers, and return what it holds then."""
    _outputs(module, x)
    return dict(_attributes(module))


def _outputs(module: nn.Module, x: Tensor) -> Any:
    """Call a module, always with the same random numbers of PyTorch."""
    with rng.torch_generator():
        torch.manual_seed(0)
        return module(x.clone())


def _close(a: Any, b: Any) -> bool:
    """Whether outputs are equal but for rounding; anything but two real tensors of one shape counts as equal."""
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)) or a.shape != b.shape or a.is_complex():
        return True
    a, b = a.detach().double(), b.detach().double()
    largest = float(b.abs().nan_to_num(0.0, 0.0, 0.0).max()) if b.numel() else 0.0
    return torch.allclose(a, b, rtol=1e-3, atol=1e-3 * largest, equal_nan=True)


def _attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """What a module and its layers hold that are neither parameters, buffers nor layers, described and copied.

    Attributes of their classes are among it, the global variables that the functions of these classes use, and what
    hooks remember.
    """
    yield from _attributes_within(module, {id(m) for m in module.modules()})


def _attributes_within(module: nn.Module, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """The same, but for objects whose ids have been seen."""
    plain = vars(nn.Module())
    for prefix, m in module.named_modules():
        for name, value in vars(m).items():
            if name not in plain:
                yield f"attribute {f'{prefix}.{name}'.lstrip('.')!r}", _snapshot(value, seen)
        if hooks := forward_hooks(m):
            place = f"of layer {prefix!r}" if prefix else "of the module"
            yield f"what the forward hooks {place} remember", _snapshot(hooks, seen)
        for kind in type(m).__mro__:
            yield from _class_attributes(kind, seen)


def _class_attributes(kind: type, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """Attributes of a class of the user's, and the variables that its functions use."""
    package = kind.__module__.partition(".")[0]
    if (
        package in _DATA
        or package in sys.stdlib_module_names
        or kind.__module__.startswith(_LIBRARIES)
        or id(kind) in seen
    ):
        return
    seen.add(id(kind))
    for name, value in list(vars(kind).items()):
        if isinstance(value, FunctionType):
            yield f"a variable of {kind.__name__}.{name}", _variables(value, seen)
        elif not name.startswith("__") and not hasattr(value, "__get__"):
            yield f"attribute {name!r} of class {kind.__name__}", _snapshot(value, seen)


def _variables(function: FunctionType, seen: set[int]) -> list[Any]:
    """Copy what a function has beside its arguments: variables of functions around it, global ones, and defaults.

    Of global variables, only data and what the function's own module defines are looked at: no loggers and the like.
    """
    cells = [cell.cell_contents for cell in function.__closure__ or () if cell != CellType()]
    used = (function.__globals__[n] for n in function.__code__.co_names if n in function.__globals__)
    own = (v for v in used if _defined_in(v) in (function.__module__, *_DATA))
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    return [_snapshot(v, seen) for v in (*cells, *own, *defaults)]


def _defined_in(value: Any) -> str:
    """The module that defines a function, or the first part of the name of that which defines the type of a value."""
    if isinstance(value, FunctionType | type):
        return value.__module__
    whole = type(value).__module__
    return first if (first := whole.partition(".")[0]) in _DATA else whole


def _snapshot(value: Any, seen: set[int]) -> Any:
    """A copy of what can be compared later: numbers, texts, arrays, random streams, and what is made of them."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, bool | int | float | complex | str | bytes | bytearray | type(None)):
        return bytes(value) if isinstance(value, bytearray) else value
    if isinstance(value, np.ndarray | np.generic):
        return value.copy()
    if isinstance(value, ModuleType) or id(value) in seen:
        return type(value)
    if isinstance(value, type):
        return dict(_class_attributes(value, seen))
    seen.add(id(value))
    if isinstance(value, nn.Module):  # in a list or behind a variable, so that nobody else looks at it
        buffers = {n: t.detach().clone() for n, t in value.named_buffers()}
        return {
            "attributes": dict(_attributes_within(value, seen | {id(m) for m in value.modules()})),
            "buffers": buffers,
        }
    if isinstance(value, GeneratorType):
        frame = value.gi_frame
        return None if frame is None else [frame.f_lasti, _snapshot(dict(frame.f_locals), seen)]
    if isinstance(value, Iterator) and type(value).__module__ in ("builtins", "itertools"):
        try:
            return _snapshot(value.__reduce__(), seen)
        except TypeError:  # where it stands is not known
            return type(value)
    if isinstance(value, FunctionType):
        return _variables(value, seen)
    if isinstance(value, functools.partial):
        return _snapshot([value.func, value.args, value.keywords], seen)
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.random.Generator):
        return _snapshot(value.bit_generator.state, seen)
    if isinstance(value, itertools.count):
        return repr(value)
    if isinstance(value, dict):
        return {k: _snapshot(v, seen) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset | deque):
        return [_snapshot(v, seen) for v in value]
    if (owner := getattr(value, "__self__", None)) is not None and not isinstance(owner, ModuleType):
        return _snapshot(owner, seen)  # of a method
    slots = [n for kind in type(value).__mro__ for n in vars(kind).get("__slots__", ()) if hasattr(value, n)]
    held = {n: getattr(value, n) for n in slots} | getattr(value, "__dict__", {})
    of_class = dict(_class_attributes(type(value), seen))
    return of_class | {n: _snapshot(v, seen) for n, v in held.items()} if held or of_class else type(value)


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and bool(torch.allclose(a, b, equal_nan=True))
    if isinstance(a, np.ndarray | np.generic) and isinstance(b, np.ndarray | np.generic):
        return a.shape == b.shape and bool(np.array_equal(a, b) or np.all((a == b) | ((a != a) & (b != b))))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_equal(a[k], b[k]) for k in a)
    if isinstance(a, Sequence) and not isinstance(a, str | bytes) and isinstance(b, Sequence):
        return len(a) == len(b) and all(_equal(v, w) for v, w in zip(a, b, strict=True))
    return bool(a == b or (a != a and b != b))
