"""Read pickles of arrays, numbers and Python's own containers without trusting them.

The standard library's unpickler reads them, restricted to the instructions and names that data need. It is the one
written in Python, `pickle._Unpickler`: the one in C reserves memory for as many memo entries as a file claims, and a
dictionary key of deeply nested tuples crashes it. Nor are NumPy's own functions called, because a forged dtype lets
them read foreign memory. Arrays are made here from their bytes, after their type, shape and length are checked.
A file can neither run code nor make more bytes of arrays than it could hold.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, Any

import numpy as np

from personafl.data.dataset import Array
from personafl.storage.npz import told

_ALLOWED = """
    PROTO FRAME STOP MARK NONE NEWTRUE NEWFALSE INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT BINFLOAT
    STRING BINSTRING SHORT_BINSTRING BINBYTES SHORT_BINBYTES BINBYTES8 BYTEARRAY8
    UNICODE SHORT_BINUNICODE BINUNICODE BINUNICODE8
    EMPTY_LIST LIST APPEND APPENDS EMPTY_TUPLE TUPLE1 TUPLE2 TUPLE3 TUPLE EMPTY_DICT DICT SETITEM SETITEMS
    PUT BINPUT LONG_BINPUT MEMOIZE GET BINGET LONG_BINGET GLOBAL STACK_GLOBAL REDUCE BUILD
""".split()  # noqa: SIM905
_DTYPES = {"O8", "b1", *(f"{k}{n}" for k in "iu" for n in (1, 2, 4, 8)), "f2", "f4", "f8"}
_MOST_AXES = 32


@dataclass
class PickledArray:
    """An array, whose value comes after it in the pickle."""

    value: Array | None = None


class _PickledDType:
    """A dtype, whose byte order comes after it in the pickle."""

    def __init__(self, code: object, *_: object) -> None:
        if not isinstance(code, str) or code not in _DTYPES:
            raise pickle.UnpicklingError(f"it has an array of {_shown(code)}, not of numbers")
        self.dtype = np.dtype(code)


def _shown(value: object) -> str:
    """Text for a message, or the type of anything else, which may be too large to show."""
    return repr(value[:40]) if isinstance(value, str) else type(value).__name__


class _Dispatch(dict[int, Callable[[Any], None]]):
    """The functions for instructions; any other instruction is refused by name."""

    def __missing__(self, code: int) -> Callable[[Any], None]:
        name = next((op.name for op in pickletools.opcodes if ord(op.code) == code), code)
        raise pickle.UnpicklingError(f"it has the instruction {name}, which no data need; refused")


def _with_text_keys(load: Callable[[Any], None], keys: slice) -> Callable[[Any], None]:
    """The function of an instruction that fills a dictionary, for keys that are text.

    The hashes of numbers are known beforehand, so a file could choose them such that each takes longer than the last.
    """

    def checked(unpickler: Any) -> None:
        for key in unpickler.stack[keys]:
            if not isinstance(key, (str, bytes)):
                raise pickle.UnpicklingError(f"it has a dictionary with a {type(key).__name__} for a key")
        load(unpickler)

    return checked


def _numbered_in_order(load: Callable[[Any], None]) -> Callable[[Any], None]:
    """The function of an instruction that remembers a value under a number, as picklers do: one after the other."""

    def checked(unpickler: Any) -> None:
        known = len(unpickler.memo)
        load(unpickler)
        if len(unpickler.memo) > known and next(reversed(unpickler.memo)) not in (known, known + 1):
            raise pickle.UnpicklingError("it remembers values under numbers that no pickler gives")

    return checked


class _ArrayUnpickler(pickle._Unpickler):
    stack: list[Any]

    metastack: list[Any]

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream, encoding="latin1")
        self.bytes_left = 2 * stream.getbuffer().nbytes  # one copy as text, one as an array
        self.functions: dict[str, Callable[..., Any] | None] = {
            "numpy.dtype": _PickledDType,
            "numpy.ndarray": None,  # only an argument of _reconstruct
            "_codecs.encode": self.encode,  # how Python 3 writes bytes for Python 2
            **{f"numpy.{c}.multiarray._reconstruct": lambda *_: PickledArray() for c in ("core", "_core")},
            **{f"numpy.{c}.multiarray.scalar": self.scalar for c in ("core", "_core")},
            **{f"numpy.{c}.numeric._frombuffer": self.frombuffer for c in ("core", "_core")},
        }

    def find_class(self, module: str, name: str) -> Any:
        path = f"{module}.{name}"
        if path not in self.functions:
            shown = path[:80] if path[:80].isprintable() else repr(path[:80])
            raise pickle.UnpicklingError(f"it asks for {shown}, which no data need; refused")
        return self.functions[path]

    def load_stop(self) -> None:
        if len(self.stack) != 1 or self.metastack:
            raise pickle.UnpicklingError("it does not end with one value")
        pickle._Unpickler.dispatch[pickle.STOP[0]](self)  # type: ignore[arg-type]

    def load_reduce(self) -> None:
        arguments, function = self.stack.pop(), self.stack.pop()
        if not callable(function) or not isinstance(arguments, tuple) or len(arguments) > 4:
            raise pickle.UnpicklingError("it makes a call that no data need")
        self.stack.append(function(*arguments))

    def load_build(self) -> None:
        state, target = self.stack.pop(), self.stack[-1]
        if isinstance(target, _PickledDType) and isinstance(state, tuple):
            target.dtype = target.dtype.newbyteorder(">" if state[1] == ">" else "<")
        elif isinstance(target, PickledArray) and isinstance(state, tuple):
            _, shape, kind, fortran, data = state
            target.value = self.array(data, kind, shape, "F" if fortran in (True, 1) else "C")
        else:
            raise pickle.UnpicklingError("it changes something other than an array")

    def frombuffer(self, data: object, kind: object, shape: object, order: object) -> PickledArray:
        return PickledArray(self.array(data, kind, shape, order))

    def scalar(self, kind: object, data: object) -> Any:
        value = self.array(data, kind, (), "C")
        if value.dtype.hasobject:
            raise pickle.UnpicklingError("it has an object in place of a number")
        return value[()]

    def encode(self, text: object, encoding: object) -> bytes:
        if not isinstance(text, str) or encoding != "latin1":
            raise pickle.UnpicklingError(f"it asks for the encoding {_shown(encoding)}")
        self.take(len(text))
        return text.encode("latin1")

    def array(self, data: object, kind: object, shape: object, order: object) -> Array:
        if isinstance(data, str):  # Python 2's bytes
            data = self.encode(data, "latin1")
        if not isinstance(kind, _PickledDType) or not isinstance(data, list if kind.dtype.hasobject else bytes):
            raise pickle.UnpicklingError("it has a damaged array")
        if not isinstance(shape, tuple) or len(shape) > _MOST_AXES or order not in ("C", "F"):
            raise pickle.UnpicklingError("it has a damaged array")
        if not all(type(n) is int and 0 <= n < 2**48 for n in shape) or math.prod(n for n in shape if n) >= 2**48:
            raise pickle.UnpicklingError("it has an array of an impossible shape")
        if not data and shape and shape[0]:  # rows without anything in them, of which there could be any number
            raise pickle.UnpicklingError(f"it has an array of shape {shape}, whose rows are empty")
        if len(data) != math.prod(shape) * (1 if kind.dtype.hasobject else kind.dtype.itemsize):
            raise pickle.UnpicklingError(f"it has an array of shape {shape} with {len(data)} bytes or objects")
        self.take(len(data))
        if isinstance(data, list):
            flat = np.empty(len(data), np.object_)
            for i, value in enumerate(data):
                flat[i] = value
            return flat.reshape(shape)  # objects are written row by row, whatever the order of the array
        flat = np.frombuffer(data, kind.dtype).astype(kind.dtype.newbyteorder("="))
        return flat.reshape(shape, order="F" if order == "F" else "C")

    def take(self, count: int) -> None:
        """Refuse bytes that are used again and again, so that memory is in proportion to the file."""
        self.bytes_left -= count
        if self.bytes_left < 0:
            raise pickle.UnpicklingError("its arrays are larger than the file")

    dispatch = _Dispatch(
        {n: pickle._Unpickler.dispatch[n] for n in (ord(o.code) for o in pickletools.opcodes if o.name in _ALLOWED)}
    )
    dispatch |= {
        pickle.SETITEM[0]: _with_text_keys(dispatch[pickle.SETITEM[0]], slice(-2, -1)),
        pickle.SETITEMS[0]: _with_text_keys(dispatch[pickle.SETITEMS[0]], slice(None, None, 2)),
        pickle.DICT[0]: _with_text_keys(dispatch[pickle.DICT[0]], slice(None, None, 2)),
        pickle.PUT[0]: _numbered_in_order(dispatch[pickle.PUT[0]]),
        pickle.BINPUT[0]: _numbered_in_order(dispatch[pickle.BINPUT[0]]),
        pickle.LONG_BINPUT[0]: _numbered_in_order(dispatch[pickle.LONG_BINPUT[0]]),
        pickle.STOP[0]: load_stop,
        pickle.BYTEARRAY8[0]: dispatch[pickle.BINBYTES8[0]],  # does not make room for what is not there
        pickle.REDUCE[0]: load_reduce,
        pickle.BUILD[0]: load_build,
    }


def unpickle(file: IO[bytes]) -> Any:
    """Read a pickle, its arrays as `PickledArray` and Python 2's bytes as text.

    Raises:
        pickle.UnpicklingError: the pickle is damaged or asks for anything but data.
    """
    raw = file.read()
    stream = io.BytesIO(raw)
    try:
        return _ArrayUnpickler(stream).load()
    except MemoryError:
        raise
    except Exception as e:  # a damaged file may raise anything
        is_cut = isinstance(e, EOFError | struct.error) or "exhausted" in str(e)
        if is_cut or (stream.tell() == len(raw) and not raw.endswith(pickle.STOP)):
            raise pickle.UnpicklingError("truncated: it ends early") from None
        if isinstance(e, pickle.UnpicklingError):
            raise
        raise pickle.UnpicklingError(f"damaged: {told(e)}") from None


def unwrap(value: Any) -> Any:
    """Return the array of a `PickledArray`, and anything else as it is."""
    if not isinstance(value, PickledArray):
        return value
    if value.value is None:
        raise pickle.UnpicklingError("an array without its bytes")
    return value.value


def numbers(value: object, name: str) -> Array:
    """Return an array, or a list of arrays or numbers, as one array of numbers."""
    value = unwrap(value)
    if isinstance(value, list) and value:
        entries = [unwrap(v) for v in value]
        if not all(isinstance(v, (bool, int, float, np.generic, np.ndarray)) for v in entries):
            raise pickle.UnpicklingError(f"{name} must be an array of numbers")
        arrays = [v for v in entries if isinstance(v, np.ndarray)]
        if len({id(v) for v in arrays}) < len(arrays):  # so that the whole is no longer than the file
            raise pickle.UnpicklingError(f"{name} holds one array twice")
        try:
            value = np.stack(arrays) if len(arrays) == len(entries) else np.asarray(entries)
        except (ValueError, OverflowError) as e:
            raise pickle.UnpicklingError(f"{name} must be an array of numbers: {e}") from None
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "fiub":
        raise pickle.UnpicklingError(f"{name} must be an array of numbers")
    return value
