"""The codec: a payload as bytes, and its exact size without packing.

A message is a header and one entry per tensor, little-endian:

    "PFL", version "3", length of the whole message u64, CRC-32 of what follows u32
    stage u32, examples u32, number of entries u16
    per entry: name length u16, name, dtype u8, encoding u8, rank u8, dimensions u32 each,
               [number of values u32 unless dense], [mask], values

The stage is the place in the schedule a message belongs to, the examples are those its sender trains on (0 from a
server): a client counts by them, and a server has no other way to know.

Truth values are bits. A masked tensor carries its mask in the shortest of three ways: as bits, as a list of positions
(u16 if they fit, else u32), or, where it holds all positions between some rows and some columns (units that are on), as
the bits of those; or not at all where the receiver knows it. No pickle.

The checksum finds accidents: every wrong bit, every burst of up to 32 bits, all but one in 2^32 of other damage. It is
no signature, since whoever writes a message can compute it; so all else is checked as if there were none. A few bytes
can claim a masked tensor of any size. So `unpack` counts the numbers of all entries against `limit` before it allocates
them. It takes at most 17 bytes for each number that allows, 32 for each byte of the message, and some 2 KiB for each of
at most 65,535 entries.
"""

from __future__ import annotations

import functools
import math
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from personafl.core import tree
from personafl.core.types import Masked, Payload

_MAGIC: Final = b"PFL"
_VERSION: Final = b"3"
_HEADER: Final = struct.Struct("<3scQI")
_NUMBERS: Final = struct.Struct("<IIH")  # stage, examples, entries
_FIXED: Final = _HEADER.size + _NUMBERS.size
_MOST: Final = 2**32 - 1  # the largest stage and number of examples
_DTYPES: Final = {
    torch.float32: 0,
    torch.float64: 1,
    torch.float16: 2,
    torch.bfloat16: 3,
    torch.bool: 4,
    torch.uint8: 5,
    torch.int32: 6,
    torch.int64: 7,
}
_BY_CODE: Final = {code: dtype for dtype, code in _DTYPES.items()}
LIMIT: Final = 1 << 26  # numbers of one message, unless a receiver says what it expects: 1.1 GiB at most
_MOST_AXES: Final = 16
_DENSE, _BITS, _PLACES, _KNOWN, _UNITS = range(5)


class WireError(ValueError):
    """A message that is not what it should be."""


@dataclass(frozen=True)
class Message:
    """What bytes were found to say."""

    payload: Payload
    stage: int
    examples: int


def pack(payload: Payload, *, stage: int = 0, examples: int = 0) -> bytes:
    """One client's payload (no client axis) as bytes."""
    for what, number, most in (
        ("stage", stage, _MOST),
        ("examples", examples, _MOST),
        ("tensors", len(payload), 65535),
    ):
        if not 0 <= number <= most:
            raise WireError(f"{number} {what} cannot be sent: at most {most}")
    out: list[bytes | memoryview] = [_NUMBERS.pack(stage, examples, len(payload))]
    for name, entry in payload.items():
        values, mask = (entry.values, entry.mask) if isinstance(entry, Masked) else (entry, None)
        values = values.detach().cpu()
        if values.dtype not in _DTYPES:
            raise WireError(f"{name}: tensors of type {values.dtype} cannot be sent")
        raw = name.encode()
        encoding = _DENSE if mask is None else _encoding(entry)
        out.append(struct.pack("<H", len(raw)) + raw)
        out.append(struct.pack("<BBB", _DTYPES[values.dtype], encoding, values.dim()))
        out.append(struct.pack(f"<{values.dim()}I", *values.shape))
        if mask is not None:
            flat = mask.cpu().flatten()
            out.append(struct.pack("<I", int(flat.sum())))
            if encoding == _BITS:
                out.append(_raw(flat))
            elif encoding == _UNITS:
                out += [_raw(side[0].cpu()) for side in _sides(mask[None])]
            elif encoding == _PLACES:
                out.append(flat.nonzero().flatten().numpy().astype(_place_type(flat.numel())).tobytes())
            values = values.flatten()[flat]
        out.append(_raw(values))
    checksum = 0
    for part in out:
        checksum = zlib.crc32(part, checksum)
    length = _HEADER.size + sum(map(len, out))
    return b"".join([_HEADER.pack(_MAGIC, _VERSION, length, checksum), *out])


def size(payload: Payload) -> int:
    """How many bytes `pack` would make of one client's payload."""
    total = _FIXED
    for name, entry in payload.items():
        if isinstance(entry, Masked):
            row = tree.view(entry.values[None], entry.mask[None], entry.known)
            total += _entry_size(name, entry.values.shape) + int(_masked_sizes(row)[0])
        else:
            total += _dense_size(name, entry.shape, entry.dtype)
    return total


def sizes(payload: Payload, count: int) -> Tensor:
    """How many bytes `pack` would make of each client's row of a stacked payload: `[C]` int64."""
    alike, masked = _sizes(payload)
    return sum(masked, torch.full((count,), alike, dtype=torch.int64))


def total_size(payload: Payload, count: int) -> int:
    """How many bytes those of all clients are."""
    alike, masked = _sizes(payload)
    return alike * count + sum(int(t.sum()) for t in masked)


def _sizes(payload: Payload) -> tuple[int, list[Tensor]]:
    """The bytes that all clients of a stack have in common, and those `[C]` that go by their masks."""
    total, masked = _FIXED, list[Tensor]()
    for name, entry in payload.items():
        if isinstance(entry, Masked):
            total += _entry_size(name, entry.values.shape[1:])
            masked.append(_masked_sizes(entry))
        else:
            total += _dense_size(name, entry.shape[1:], entry.dtype)
    return total, masked


def _entry_size(name: str, shape: torch.Size) -> int:
    """Bytes of an entry before its mask and values."""
    return 2 + len(name.encode()) + 3 + 4 * len(shape)


@functools.lru_cache(maxsize=1024)
def _dense_size(name: str, shape: torch.Size, dtype: torch.dtype) -> int:
    """Bytes of an entry without a mask."""
    return _entry_size(name, shape) + _length(shape.numel(), dtype)


def _masked_sizes(entry: Masked) -> Tensor:
    """Bytes of each client's mask and values, and of how many these are: `[C]` int64."""
    nnz = tree.flat(entry.mask).sum(1).cpu()
    kind = entry.values.dtype
    total = 4 + (-(-nnz // 8) if kind == torch.bool else nnz * kind.itemsize)
    return total if entry.known else total + _mask_sizes(entry.mask, nnz).min(0).values


def _sides(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Which rows and which columns of each client's mask `[C, O, I, ...]` hold anything."""
    table = mask.flatten(3).any(3) if mask.dim() > 3 else mask
    return table.any(2), table.any(1)


def _mask_sizes(mask: Tensor, nnz: Tensor) -> Tensor:
    """Bytes of each client's mask in the three ways it can be sent, in the order of preference: `[3, C]`."""
    numel = mask[0].numel()
    bits = torch.full_like(nnz, -(-numel // 8))
    places = nnz * _place_type(numel).itemsize
    units = torch.full_like(nnz, torch.iinfo(torch.int64).max)
    if mask.dim() > 2 and numel:  # all of the rows and columns between units that are on?
        rows, columns = (side.sum(1).cpu() for side in _sides(mask))
        rest = numel // (mask.shape[1] * mask.shape[2])
        whole = nnz == rows * columns * rest
        units = torch.where(whole, -(-mask.shape[1] // 8) + -(-mask.shape[2] // 8), units)
    return torch.stack([bits, places, units])


def numbers(payload: Payload) -> int:
    """How many numbers one client's payload has, masked ones included: the `limit` of a receiver that expects such."""
    return sum((t.values if isinstance(t, Masked) else t).numel() for t in payload.values())


def unpack(blob: bytes, masks: Mapping[str, Tensor] | None = None, *, limit: int = LIMIT) -> Payload:
    """The payload of a message."""
    return read(blob, masks, limit=limit).payload


def read(blob: bytes, masks: Mapping[str, Tensor] | None = None, *, limit: int = LIMIT) -> Message:
    """The message in these bytes, refused (`WireError`) where anything is wrong with them.

    `masks` are those the receiver is supposed to know, `limit` is how many numbers it allows in all.
    """
    reader = _Reader(_body(blob), limit)
    payload: Payload = {}
    stage, examples, entries = _NUMBERS.unpack(reader.take(_NUMBERS.size, "numbers"))
    for _ in range(entries):
        raw = bytes(reader.take(reader.number("<H", "name length"), "name"))
        try:
            name = raw.decode()
        except UnicodeDecodeError:
            raise WireError(f"a name is not UTF-8: {raw[:20]!r}") from None
        if name in payload:
            raise WireError(f"{_told(name)}: sent twice")
        payload[name] = _entry(reader, name, masks or {})
    if reader.left:
        raise WireError(f"{reader.left} bytes are left over behind the last entry")
    return Message(payload, stage, examples)


def _body(blob: bytes) -> memoryview:
    """What stands behind the header, if that fits it."""
    if blob[:3] != _MAGIC:
        raise WireError(f"not a personafl message: it begins with {blob[:3]!r}, not with {_MAGIC!r}")
    if (version := blob[3:4]) not in (b"", _VERSION):
        raise WireError(f"a message of version {version!r}, this receiver reads version {_VERSION!r}")
    if len(blob) < _HEADER.size:
        raise WireError(f"a message of {len(blob)} bytes ends within its header of {_HEADER.size}")
    *_, length, checksum = _HEADER.unpack_from(blob)
    if length != len(blob):
        raise WireError(f"a message of {len(blob)} bytes, its header says {length}")
    body = memoryview(blob)[_HEADER.size :]
    if (found := zlib.crc32(body)) != checksum:
        raise WireError(f"the checksum is {found:08x}, the header says {checksum:08x}: damaged on the way")
    return body


def _told(name: str) -> str:
    """A name in messages, which end up in logs."""
    return name if name.isprintable() and len(name) <= 60 else repr(name[:60])


def _entry(read: _Reader, name: str, known: Mapping[str, Tensor]) -> Tensor | Masked:
    told = _told(name)
    code, encoding, rank = struct.unpack("<BBB", read.take(3, f"{told}: type"))
    if code not in _BY_CODE or encoding > _UNITS:
        raise WireError(f"{told}: unknown type {code} or encoding {encoding}")
    if rank > _MOST_AXES:
        raise WireError(f"{told}: {rank} dimensions are over the limit of {_MOST_AXES}")
    dtype = _BY_CODE[code]
    shape = struct.unpack(f"<{rank}I", read.take(4 * rank, f"{told}: shape"))
    numel = read.claim(shape, told)
    if encoding == _DENSE:
        return read.values(numel, dtype, told).view(shape)
    nnz = read.number("<I", f"{told}: number of values")
    if nnz > numel:
        raise WireError(f"{told}: {nnz} values for {numel} positions")
    if encoding == _BITS:
        mask = read.values(numel, torch.bool, f"{told}: mask")
    elif encoding == _PLACES:
        kind = _place_type(numel)
        places: NDArray[Any] = np.frombuffer(read.take(nnz * kind.itemsize, f"{told}: positions"), kind)
        if nnz and (places[-1] >= numel or (places[1:] <= places[:-1]).any()):
            raise WireError(f"{told}: positions do not rise within 0..{numel - 1}")
        read.check(_length(nnz, dtype), told)  # before allocating what the header claims
        mask = torch.zeros(numel, dtype=torch.bool)
        mask.numpy()[places] = True
    elif encoding == _UNITS:
        if rank < 2:
            raise WireError(f"{told}: a mask of rows and columns for {rank} dimensions")
        rows, columns = (read.values(n, torch.bool, f"{told}: mask") for n in shape[:2])
        read.check(_length(nnz, dtype), told)
        mask = (rows.unsqueeze(1) & columns).view(*shape[:2], *[1] * (rank - 2)).expand(shape).flatten()
    else:
        if name not in known or tuple(known[name].shape) != shape:
            raise WireError(f"{told}: sent without its mask, and no mask of shape {shape} is known here")
        mask = known[name].cpu().flatten()
    if (count := int(mask.count_nonzero())) != nnz:  # `sum` would make 64-bit numbers of them first
        raise WireError(f"{told}: the mask has {count} positions, {nnz} values were announced")
    sent = read.values(nnz, dtype, told)
    values = torch.zeros(numel, dtype=dtype).masked_scatter_(mask, sent)
    return Masked(values.view(shape), mask.view(shape), encoding == _KNOWN)


class _Reader:
    """The body of a message from its front to its end, and how many numbers it may still claim."""

    def __init__(self, body: memoryview, limit: int) -> None:
        self.body, self.at, self.limit, self.claimed = body, 0, limit, 0

    @property
    def left(self) -> int:
        return len(self.body) - self.at

    def check(self, count: int, what: str) -> None:
        if count > self.left:
            raise WireError(f"{what}: {count} bytes expected, {self.left} are left")

    def claim(self, shape: tuple[int, ...], name: str) -> int:
        """How many numbers a tensor has, if there may be so many in all."""
        self.claimed += (numel := math.prod(shape))
        if max(self.claimed, math.prod(d for d in shape if d)) > self.limit:  # PyTorch multiplies around a zero, too
            before = f" behind {self.claimed - numel} others" if self.claimed > numel else ""
            raise WireError(f"{name}: shape {shape}{before} is over the limit of {self.limit} numbers in a message")
        return numel

    def take(self, count: int, what: str) -> memoryview:
        self.check(count, what)
        self.at += count
        return self.body[self.at - count : self.at]

    def number(self, form: str, what: str) -> int:
        return int(struct.unpack(form, self.take(struct.calcsize(form), what))[0])

    def values(self, count: int, dtype: torch.dtype, name: str) -> Tensor:
        raw = np.frombuffer(self.take(_length(count, dtype), f"{name}: values"), np.uint8)
        if dtype == torch.bool:
            bits = np.unpackbits(raw, bitorder="little")
            if bits[count:].any():
                raise WireError(f"{name}: bits are set behind the last truth value")
            return torch.from_numpy(bits[:count].view(np.bool_))
        out = torch.empty(count, dtype=dtype)  # PyTorch's own memory: products may depend on how factors are aligned
        out.view(torch.uint8).numpy()[:] = raw
        if dtype.is_floating_point and not torch.isfinite(out).all():
            raise WireError(f"{name}: not all values are finite")
        return out


def _encoding(entry: Tensor | Masked) -> int:
    assert isinstance(entry, Masked)
    if entry.known:
        return _KNOWN
    ways = _mask_sizes(entry.mask[None], entry.mask.sum().cpu()[None])
    return (_BITS, _PLACES, _UNITS)[int(ways[:, 0].argmin())]


def _place_type(numel: int) -> np.dtype[np.uint16] | np.dtype[np.uint32]:
    return np.dtype("<u2") if numel <= 1 << 16 else np.dtype("<u4")


def _length(count: int, dtype: torch.dtype) -> int:
    """Bytes of this many dense values."""
    return -(-count // 8) if dtype == torch.bool else count * dtype.itemsize


def _raw(values: Tensor) -> memoryview:
    """The bytes of dense values, in place where they lie in order."""
    if values.dtype == torch.bool:
        return np.packbits(values.reshape(-1).numpy(), bitorder="little").data
    return values.reshape(-1).contiguous().view(torch.uint8).numpy().data
