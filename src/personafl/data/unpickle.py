"""Pickles of arrays, numbers and Python's own containers, read without trusting them.

A pickle is a program for a stack machine that may call whatever it names. This is a machine of our own, for the
instructions that such data need. It hands out no class and no function of anybody's: what a pickle names is a name, of
which a fixed few stand for something, and arrays are made from their bytes here, with their type, shape and length
checked. So a file can neither run code nor have NumPy read what is not there, and what it takes is in proportion to
its length.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, Any

import numpy as np

from personafl.data.dataset import Array

_CODES = {"O8", "b1", *(f"{k}{n}" for k in "iu" for n in (1, 2, 4, 8)), "f2", "f4", "f8"}
_MOST_AXES = 32


class _DType:
    """A pickled dtype."""

    def __init__(self, code: object, *_: object) -> None:
        if not isinstance(code, str) or code not in _CODES:
            raise pickle.UnpicklingError(f"an array of {_told(code)}, not of numbers")
        self.code, self.order = code, "="

    def build(self, state: object) -> None:
        if not isinstance(state, tuple) or len(state) < 2:
            raise pickle.UnpicklingError("a damaged type of array")
        self.order = ">" if state[1] == ">" else "<"

    @property
    def objects(self) -> bool:
        return self.code == "O8"

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(self.order + self.code)


class PickledArray:
    """A pickled array, which is made from its bytes when these come."""

    value: Array | None = None

    def __init__(self, *_: object) -> None:
        pass

    def build(self, state: object) -> None:
        if not isinstance(state, tuple) or len(state) != 5:
            raise pickle.UnpicklingError("a damaged array")
        _, shape, kind, fortran, data = state
        self.value = _made(shape, kind, _bytes(data), "F" if fortran is True or fortran == 1 else "C")


def _told(value: object) -> str:
    """A value in messages: no more of it than a line takes."""
    return repr(value[:40]) if isinstance(value, str) else type(value).__name__


def _bytes(data: object) -> object:
    """Python 2's bytes, which are read as text."""
    try:
        return data.encode("latin1") if isinstance(data, str) else data
    except UnicodeEncodeError:
        raise pickle.UnpicklingError("text in place of an array's bytes") from None


def _made(shape: object, kind: object, data: object, order: object) -> Array:
    if not isinstance(kind, _DType) or not isinstance(data, list if kind.objects else (bytes, bytearray)):
        raise pickle.UnpicklingError("a damaged array")
    if not isinstance(shape, tuple) or len(shape) > _MOST_AXES or order not in ("C", "F"):
        raise pickle.UnpicklingError("a damaged array")
    if not all(type(n) is int and 0 <= n < 2**48 for n in shape):
        raise pickle.UnpicklingError("an array of a shape that cannot be")
    size, wanted = math.prod(shape), len(data)
    if wanted != size * (1 if kind.objects else kind.dtype.itemsize) or math.prod(n for n in shape if n) >= 2**48:
        raise pickle.UnpicklingError(f"an array of shape {shape} with {wanted} bytes or objects")
    if isinstance(data, list):
        held = np.empty(size, np.object_)
        for i, value in enumerate(data):
            held[i] = value
        return held.reshape(shape, order="F" if order == "F" else "C")
    numbers = np.frombuffer(data, kind.dtype).reshape(shape, order="F" if order == "F" else "C")
    return numbers.astype(kind.dtype.newbyteorder("="))


def _frombuffer(data: object = None, kind: object = None, shape: object = None, order: object = None) -> PickledArray:
    """How protocol 5 writes an array."""
    out = PickledArray()
    out.value = _made(shape, kind, data, order)
    return out


def _scalar(kind: object = None, data: object = b"", *_: object) -> Any:
    raw = _bytes(data)
    if not isinstance(kind, _DType) or kind.objects or not isinstance(raw, bytes) or len(raw) != kind.dtype.itemsize:
        raise pickle.UnpicklingError("a damaged number")
    return np.frombuffer(raw, kind.dtype)[0]


def _encode(text: object = None, encoding: object = None, *_: object) -> object:
    """How Python 3 writes bytes for Python 2."""
    if not isinstance(text, str) or encoding != "latin1":
        raise pickle.UnpicklingError(f"it asks for the encoding {_told(encoding)}")
    return _bytes(text)


_KNOWN: dict[str, Callable[..., Any] | None] = {
    "numpy dtype": _DType,
    "numpy ndarray": None,  # an argument only: it cannot be called
    "_codecs encode": _encode,
    **{f"numpy.{c}.multiarray _reconstruct": PickledArray for c in ("core", "_core")},
    **{f"numpy.{c}.multiarray scalar": _scalar for c in ("core", "_core")},
    **{f"numpy.{c}.numeric _frombuffer": _frombuffer for c in ("core", "_core")},
}


@dataclass(frozen=True)
class _Name:
    """A name of `_KNOWN`: all that a pickle gets to hold of what it asks for."""

    known: str


class _Machine:
    """The instructions of pickles that hold data."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.below: list[list[Any]] = []  # what was on the stack at each mark
        self.memo: dict[int, Any] = {}

    def run(self, raw: bytes) -> Any:
        """What a pickle leaves on the stack."""
        for code, arg, _ in pickletools.genops(io.BytesIO(raw)):
            if code.name in _LITERALS:
                self.stack.append(arg)
            elif (step := _STEPS.get(code.name)) is not None:
                step(self, arg)
            elif code.name not in _NOTHING:
                raise pickle.UnpicklingError(f"it has the instruction {code.name}, which no data need; refused")
        if len(self.stack) != 1 or self.below:
            raise pickle.UnpicklingError("damaged: it does not end in one value")
        return self.stack[0]

    def push(self, value: object) -> None:
        self.stack.append(value)

    def pop(self, kind: type | tuple[type, ...] = object) -> Any:
        if not self.stack or not isinstance(self.stack[-1], kind):
            raise pickle.UnpicklingError("damaged: an instruction does not find what it works on")
        return self.stack.pop()

    def top(self, kind: type | tuple[type, ...]) -> Any:
        found = self.pop(kind)
        self.stack.append(found)
        return found

    # Containers

    def mark(self, _: object) -> None:
        self.below.append(self.stack)
        self.stack = []

    def marked(self) -> list[Any]:
        """What is above the last mark."""
        if not self.below:
            raise pickle.UnpicklingError("damaged: there is no mark")
        found, self.stack = self.stack, self.below.pop()
        return found

    def tuple_of(self, count: int) -> None:
        found = [self.pop() for _ in range(count)]
        self.stack.append(tuple(reversed(found)))

    def put_items(self, into: dict[Any, Any], items: list[Any]) -> None:
        for key, value in zip(items[::2], items[1::2], strict=True):
            if not isinstance(key, (str, bytes, int)):  # the hash of nested tuples can take for ever
                raise pickle.UnpicklingError(f"a dictionary with a {type(key).__name__} for a key")
            into[key] = value

    def new_dict(self, _: object) -> None:
        items, made = self.marked(), dict[Any, Any]()
        self.put_items(made, items)
        self.stack.append(made)

    def append(self, _: object) -> None:
        value = self.pop()
        self.top(list).append(value)

    def appends(self, _: object) -> None:
        values = self.marked()
        self.top(list).extend(values)

    def set_item(self, _: object) -> None:
        value, key = self.pop(), self.pop()
        self.put_items(self.top(dict), [key, value])

    def set_items(self, _: object) -> None:
        items = self.marked()
        self.put_items(self.top(dict), items)

    # The memo

    def memoize(self, number: int | None) -> None:
        if number in self.memo:
            raise pickle.UnpicklingError(f"damaged: it numbers two things {number}")
        self.memo[len(self.memo) if number is None else number] = self.top(object)

    def get(self, number: int) -> None:
        if number not in self.memo:
            raise pickle.UnpicklingError(f"damaged: it has nothing of number {number}")
        self.stack.append(self.memo[number])

    # Names, and what they make

    def name(self, asked: str) -> None:
        if asked not in _KNOWN:
            told = ".".join(asked.split(" ", 1))[:80]
            told = told if told.isprintable() else repr(told)
            raise pickle.UnpicklingError(f"it asks for {told}, which no data need; refused")
        self.stack.append(_Name(asked))

    def stack_name(self, _: object) -> None:
        name, module = self.pop(str), self.pop(str)
        self.name(f"{module} {name}")

    def reduce(self, _: object) -> None:
        given, asked = self.pop(tuple), self.pop(_Name)
        make = _KNOWN[asked.known]
        if make is None or len(given) > 4:
            raise pickle.UnpicklingError(f"it calls {asked.known.replace(' ', '.')} in a way that no data need")
        self.stack.append(make(*given))

    def build(self, _: object) -> None:
        state = self.pop()
        self.top((_DType, PickledArray)).build(state)

    def outside(self, _: object) -> None:
        raise pickle.UnpicklingError("it refers to something outside the file; refused")


_NOTHING = {"PROTO", "FRAME", "STOP"}
_LITERALS = {
    *("NONE", "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
    *("STRING", "BINSTRING", "SHORT_BINSTRING", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8"),
    *("UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"),
}
_STEPS: dict[str, Callable[[_Machine, Any], None]] = {
    "NEWTRUE": lambda m, _: m.push(True),
    "NEWFALSE": lambda m, _: m.push(False),
    "EMPTY_LIST": lambda m, _: m.push([]),
    "EMPTY_DICT": lambda m, _: m.push({}),
    "EMPTY_TUPLE": lambda m, _: m.tuple_of(0),
    "TUPLE1": lambda m, _: m.tuple_of(1),
    "TUPLE2": lambda m, _: m.tuple_of(2),
    "TUPLE3": lambda m, _: m.tuple_of(3),
    "TUPLE": lambda m, _: m.push(tuple(m.marked())),
    "LIST": lambda m, _: m.push(m.marked()),
    "MARK": _Machine.mark,
    "DICT": _Machine.new_dict,
    "APPEND": _Machine.append,
    "APPENDS": _Machine.appends,
    "SETITEM": _Machine.set_item,
    "SETITEMS": _Machine.set_items,
    **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"), _Machine.memoize),
    **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), _Machine.get),
    "GLOBAL": _Machine.name,
    "STACK_GLOBAL": _Machine.stack_name,
    "REDUCE": _Machine.reduce,
    "BUILD": _Machine.build,
    **dict.fromkeys(("PERSID", "BINPERSID"), _Machine.outside),
}


def unpickle(file: IO[bytes]) -> Any:
    """What a pickle holds, its arrays as `PickledArray`, Python 2's bytes as text; else `pickle.UnpicklingError`."""
    try:
        return _Machine().run(file.read())
    except ValueError as e:  # of `genops`
        if any(word in str(e) for word in ("exhausted", "not enough", "remain", "no newline")):
            raise pickle.UnpicklingError(f"truncated: {e}") from None
        raise pickle.UnpicklingError(f"damaged: {e}") from None


def unwrap(value: Any) -> Any:
    """An array for its stand-in; anything else as it is."""
    if not isinstance(value, PickledArray):
        return value
    if value.value is None:
        raise pickle.UnpicklingError("an array without its bytes")
    return value.value


def numbers(value: object, name: str) -> Array:
    """An array, or a list of arrays or numbers, as one array of numbers."""
    value = unwrap(value)
    if isinstance(value, list) and value:
        held = [unwrap(v) for v in value]
        if not all(isinstance(v, (bool, int, float, np.generic, np.ndarray)) for v in held):
            raise pickle.UnpicklingError(f"{name} must be an array of numbers")
        parts = [v for v in held if isinstance(v, np.ndarray)]
        if len({id(v) for v in parts}) < len(parts):  # so that the whole is no longer than the file
            raise pickle.UnpicklingError(f"{name} holds one array twice")
        try:
            value = np.stack(parts) if len(parts) == len(held) else np.asarray(held)
        except (ValueError, OverflowError) as e:
            raise pickle.UnpicklingError(f"{name} must be an array of numbers: {e}") from None
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "fiub":
        raise pickle.UnpicklingError(f"{name} must be an array of numbers")
    return value
