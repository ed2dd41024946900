"""Pickles of arrays, numbers and Python's own containers, read without trusting them.

An ordinary unpickler calls whatever a file names. This one knows a fixed few names, puts stand-ins of its own in their
place, and makes arrays from their bytes itself, so a file can neither run code nor make NumPy read what is not there.
"""

from __future__ import annotations

import math
import pickle
from typing import IO, Any

import numpy as np

from personafl.data.dataset import Array

_CODES = {"O8", "b1", *(f"{k}{n}" for k in "iu" for n in (1, 2, 4, 8)), "f2", "f4", "f8"}


class _DType:
    """A stand-in for a pickled dtype."""

    def __init__(self, code: object, *_: object) -> None:
        if not isinstance(code, str) or code not in _CODES:
            raise pickle.UnpicklingError(f"an array of {str(code)[:20]}, not of numbers")
        self.code, self.order = code, "="

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.order = ">" if state[1] == ">" else "<"

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(object) if self.code == "O8" else np.dtype(self.order + self.code)


class PickledArray:
    """A stand-in for a pickled array, made from its bytes by us and not by what the pickle says."""

    value: Array

    def __init__(self, *_: object) -> None:
        pass

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, kind, fortran, data = state
        if isinstance(data, str):
            data = data.encode("latin1")  # Python 2's bytes
        self.value = _made(shape, kind, data, "F" if fortran else "C")


def _made(shape: Any, kind: Any, data: Any, order: Any) -> Array:
    whole = isinstance(kind, _DType) and type(data) in ((list,) if kind.code == "O8" else (bytes, bytearray))
    if not whole or order not in ("C", "F") or not all(type(n) is int and n >= 0 for n in shape):
        raise pickle.UnpicklingError("a damaged array")
    size = math.prod(shape)
    if len(data) != size * (1 if kind.code == "O8" else kind.dtype.itemsize):
        raise pickle.UnpicklingError(f"an array of shape {shape} with {len(data)} bytes or objects")
    if kind.code == "O8":
        flat = np.empty(size, object)
        flat[:] = data
        return flat.reshape(shape, order=order)
    numbers = np.frombuffer(data, kind.dtype).reshape(shape, order=order)
    return numbers.astype(kind.dtype.newbyteorder("="))


def _frombuffer(data: Any, kind: Any, shape: Any, order: Any, *_: object) -> PickledArray:
    """How protocol 5 writes an array."""
    out = PickledArray()
    out.value = _made(shape, kind, data, order)
    return out


def _scalar(kind: object, data: object = b"") -> Any:
    if isinstance(data, str):
        data = data.encode("latin1")
    if not isinstance(kind, _DType) or not isinstance(data, bytes) or len(data) != kind.dtype.itemsize:
        raise pickle.UnpicklingError("a damaged number")
    return np.frombuffer(data, kind.dtype)[0]


def _encode(text: object, encoding: object) -> bytes:
    """How Python 3 writes bytes for Python 2."""
    if not isinstance(text, str) or encoding != "latin1":
        raise pickle.UnpicklingError(f"it asks for the encoding {str(encoding)[:20]}")
    return text.encode("latin1")


_KNOWN: dict[tuple[str, str], Any] = {
    ("numpy", "dtype"): _DType,
    ("numpy", "ndarray"): "ndarray",  # an argument only: it cannot be called
    ("_codecs", "encode"): _encode,
    **{(f"numpy.{c}.multiarray", "_reconstruct"): PickledArray for c in ("core", "_core")},
    **{(f"numpy.{c}.multiarray", "scalar"): _scalar for c in ("core", "_core")},
    **{(f"numpy.{c}.numeric", "_frombuffer"): _frombuffer for c in ("core", "_core")},
}


class _ArrayUnpickler(pickle.Unpickler):
    """Whatever else a pickle asks for is refused by name."""

    def find_class(self, module: str, name: str) -> Any:
        try:
            return _KNOWN[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no data need; refused") from None

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("it refers to something outside the file; refused")


def unpickle(file: IO[bytes], encoding: str = "ASCII") -> Any:
    """What a pickle holds, its arrays as `PickledArray`; `encoding` is for text that Python 2 wrote."""
    return _ArrayUnpickler(file, encoding=encoding).load()


def unwrap(value: Any) -> Any:
    """An array for its stand-in; anything else as it is."""
    return value.value if isinstance(value, PickledArray) else value
