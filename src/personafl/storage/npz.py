"""Arrays of .npy and .npz files, read without trusting them.

No pickles. Room for an array is made only where the file has the bytes for it: as many as its header says, and of a
compressed file no more than deflate can make of what is there, 1032 times as much.
"""

from __future__ import annotations

import math
import zipfile
from collections.abc import Collection
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from personafl.core.errors import UserError

_RATIO = 1032  # what a byte of deflate can become
_HEADER = 10_000  # bytes of a header: what NumPy takes, too
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # those NumPy writes


def read_npz(path: Path, names: Collection[str] = ()) -> dict[str, NDArray[Any]]:
    """The arrays of a file, or those of these names that it has."""
    try:
        with zipfile.ZipFile(path) as archive:
            held = [n for n in archive.namelist() if n.endswith(".npy")]
            wanted = {n.removesuffix(".npy"): n for n in held if not names or n.removesuffix(".npy") in names}
            return {name: read_member(archive, member) for name, member in wanted.items()}
    except OSError as e:
        raise UserError(f"{path}: cannot be read: {e.strerror or e}") from None
    except Exception as e:  # a damaged file may raise anything
        raise UserError(f"{path}: not a readable .npz file: {told(e)}") from None


def npz_shapes(path: Path) -> dict[str, tuple[tuple[int, ...], int]]:
    """The shape of each array of a file and the bytes it takes in memory, by its header alone."""
    try:
        with zipfile.ZipFile(path) as archive:
            return {n.removesuffix(".npy"): _shape(archive, n) for n in archive.namelist() if n.endswith(".npy")}
    except OSError as e:
        raise UserError(f"{path}: cannot be read: {e.strerror or e}") from None
    except Exception as e:  # a damaged file may raise anything
        raise UserError(f"{path}: not a readable .npz file: {told(e)}") from None


def read_npy(path: Path) -> NDArray[Any]:
    """The array of a file."""
    try:
        with path.open("rb") as file:
            return _array(file, path.stat().st_size)
    except OSError as e:
        raise UserError(f"{path}: cannot be read: {e.strerror or e}") from None
    except Exception as e:
        raise UserError(f"{path}: not a readable .npy file: {told(e)}") from None


def read_member(archive: zipfile.ZipFile, member: str) -> NDArray[Any]:
    """An array of an open .npz file; raises anything where it is damaged."""
    check_member(archive, member)
    with archive.open(member) as file:
        return _array(file, archive.getinfo(member).file_size)


def check_member(archive: zipfile.ZipFile, member: str) -> None:
    """Refuse one that says it is longer than it can be."""
    info = archive.getinfo(member)
    if info.compress_type not in _METHODS:
        raise ValueError(f"{member} is compressed in a way that NumPy does not write")
    if info.file_size > info.compress_size * (1 if info.compress_type == zipfile.ZIP_STORED else _RATIO):
        raise ValueError(f"{member} claims {info.file_size} bytes, which its {info.compress_size} cannot become")


def told(e: Exception) -> str:
    """What an exception says, in one line."""
    return (str(e).splitlines() or [type(e).__name__])[0][:300]


def _shape(archive: zipfile.ZipFile, member: str) -> tuple[tuple[int, ...], int]:
    check_member(archive, member)
    with archive.open(member) as file:
        shape, kind = _header(file, archive.getinfo(member).file_size)
    return shape, math.prod(shape) * kind.itemsize


def _array(file: IO[bytes], size: int) -> NDArray[Any]:
    _, kind = _header(file, size)
    file.seek(0)
    found: NDArray[Any] = np.lib.format.read_array(file, allow_pickle=False)
    if kind.kind == "U" and found.size:  # Python would fall over characters that there are not
        codes = found.reshape(-1).view(np.dtype(np.uint32).newbyteorder(kind.byteorder))
        if (codes > 0x10FFFF).any() or ((codes >= 0xD800) & (codes < 0xE000)).any():
            raise ValueError("its text is damaged")
    return found


def _header(file: IO[bytes], size: int) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """The shape and type of an array in a file of so many bytes, where all of them are its numbers."""
    form = np.lib.format
    version = form.read_magic(file)
    header, length = (form.read_array_header_1_0, 2) if version == (1, 0) else (form.read_array_header_2_0, 4)
    said = file.read(length)
    if len(said) < length or int.from_bytes(said, "little") > _HEADER:
        raise ValueError("its header is damaged")
    file.seek(-length, 1)
    shape, _, kind = header(file)
    due = math.prod(shape) * kind.itemsize
    if kind.hasobject:
        raise ValueError("it holds Python objects, which only a pickle can make")
    if kind.kind not in "biufcUS":
        raise ValueError(f"it holds {str(kind)[:40]}, not numbers or text")
    if not kind.itemsize or not all(type(n) is int and n >= 0 for n in shape) or due != size - file.tell():
        raise ValueError(f"an array of shape {str(shape)[:60]} in {size} bytes")
    return shape, kind
