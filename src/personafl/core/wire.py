"""The codec: a payload as bytes, and its exact size without packing.

A message is a header and one entry per tensor, little-endian:

    magic "PFL1", number of entries u16
    per entry: name length u16, name, dtype u8, encoding u8, rank u8, dimensions u32 each,
               [number of values u32 unless dense], [mask], values

Truth values are bits. A masked tensor carries its mask in the shortest of three ways: as bits, as a list of positions
(u16 if they fit, else u32), or, where it holds all positions between some rows and some columns (units that are on), as
the bits of those; or not at all where the receiver knows it. No pickle; decoding checks names, types, shapes and
lengths before it allocates.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from typing import Final

import numpy as np
import torch
from torch import Tensor

from personafl.core import tree
from personafl.core.types import Masked, Payload

_MAGIC: Final = b"PFL1"
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
LIMIT: Final = 1 << 30  # numbers in one tensor: a header may claim what its bytes do not show
_DENSE, _BITS, _PLACES, _KNOWN, _UNITS = range(5)


class WireError(ValueError):
    """A message that is not what it should be."""


def pack(payload: Payload) -> bytes:
    """One client's payload (no client axis) as bytes."""
    out = [_MAGIC, struct.pack("<H", len(payload))]
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
                out.append(np.packbits(flat.numpy(), bitorder="little").tobytes())
            elif encoding == _UNITS:
                out += [_raw(side[0].cpu()) for side in _sides(mask[None])]
            elif encoding == _PLACES:
                out.append(flat.nonzero().flatten().numpy().astype(_place_type(flat.numel())).tobytes())
            values = values.flatten()[flat]
        out.append(_raw(values))
    return b"".join(out)


def size(payload: Payload) -> int:
    """How many bytes `pack` would make of one client's payload."""
    rows: Payload = {
        n: Masked(t.values[None], t.mask[None], t.known) if isinstance(t, Masked) else t[None]
        for n, t in payload.items()
    }
    return int(sizes(rows, 1)[0])


def sizes(payload: Payload, count: int) -> Tensor:
    """How many bytes `pack` would make of each client's row of a stacked payload: `[C]` int64."""
    total = torch.full((count,), len(_MAGIC) + 2, dtype=torch.int64)
    for name, entry in payload.items():
        values = entry.values if isinstance(entry, Masked) else entry
        numel = values[0].numel()
        total += 2 + len(name.encode()) + 3 + 4 * (values.dim() - 1)
        if not isinstance(entry, Masked):
            total += _length(numel, values.dtype)
            continue
        nnz = tree.flat(entry.mask).sum(1).cpu()
        total += 4 + (-(-nnz // 8) if values.dtype == torch.bool else nnz * values.element_size())
        if not entry.known:
            total += _mask_sizes(entry.mask, nnz).min(0).values
    return total


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


def unpack(blob: bytes, masks: Mapping[str, Tensor] | None = None) -> Payload:
    """The payload in these bytes; `masks` are those the receiver is supposed to know."""
    read = _Reader(blob)
    if read.take(4, "magic") != _MAGIC:
        raise WireError("not a personafl message: it does not begin with PFL1")
    payload: Payload = {}
    for _ in range(read.number("<H", "number of entries")):
        raw = read.take(read.number("<H", "name length"), "name")
        try:
            name = raw.decode()
        except UnicodeDecodeError:
            raise WireError(f"a name is not UTF-8: {raw[:20]!r}") from None
        if name in payload:
            raise WireError(f"{name}: sent twice")
        payload[name] = _entry(read, name, masks or {})
    if read.left:
        raise WireError(f"{read.left} bytes are left over behind the last entry")
    return payload


def _entry(read: _Reader, name: str, known: Mapping[str, Tensor]) -> Tensor | Masked:
    code, encoding, rank = struct.unpack("<BBB", read.take(3, f"{name}: type"))
    if code not in _BY_CODE or encoding > _UNITS:
        raise WireError(f"{name}: unknown type {code} or encoding {encoding}")
    if rank > 16:
        raise WireError(f"{name}: {rank} dimensions are over the limit of 16")
    dtype = _BY_CODE[code]
    shape = struct.unpack(f"<{rank}I", read.take(4 * rank, f"{name}: shape"))
    numel = math.prod(shape)
    if math.prod(d for d in shape if d) > LIMIT:
        raise WireError(f"{name}: shape {shape} is over the limit of {LIMIT} numbers")
    if encoding == _DENSE:
        return read.values(numel, dtype, name).view(shape)
    nnz = read.number("<I", f"{name}: number of values")
    if nnz > numel:
        raise WireError(f"{name}: {nnz} values for {numel} positions")
    if encoding == _BITS:
        bits = np.frombuffer(read.take(-(-numel // 8), f"{name}: mask"), np.uint8)
        mask = torch.from_numpy(np.unpackbits(bits, count=numel, bitorder="little").astype(bool))
    elif encoding == _PLACES:
        kind = _place_type(numel)
        places = np.frombuffer(read.take(nnz * kind.itemsize, f"{name}: positions"), kind).astype(np.int64)
        if nnz and (places[-1] >= numel or (np.diff(places) <= 0).any()):
            raise WireError(f"{name}: positions do not rise within 0..{numel - 1}")
        read.check(_length(nnz, dtype), name)  # before allocating what the header claims
        mask = torch.zeros(numel, dtype=torch.bool)
        mask[torch.from_numpy(places)] = True
    elif encoding == _UNITS:
        if rank < 2:
            raise WireError(f"{name}: a mask of rows and columns for {rank} dimensions")
        rows, columns = (read.values(n, torch.bool, f"{name}: mask") for n in shape[:2])
        read.check(_length(nnz, dtype), name)
        mask = (rows.unsqueeze(1) & columns).view(*shape[:2], *[1] * (rank - 2)).expand(shape).flatten()
    else:
        if name not in known or tuple(known[name].shape) != shape:
            raise WireError(f"{name}: sent without its mask, and no mask of shape {shape} is known here")
        mask = known[name].cpu().flatten()
    if int(mask.sum()) != nnz:
        raise WireError(f"{name}: the mask has {int(mask.sum())} positions, {nnz} values were announced")
    values = torch.zeros(numel, dtype=dtype)
    values[mask] = read.values(nnz, dtype, name)
    return Masked(values.view(shape), mask.view(shape), encoding == _KNOWN)


class _Reader:
    def __init__(self, blob: bytes) -> None:
        self.blob, self.at = memoryview(blob), 0

    @property
    def left(self) -> int:
        return len(self.blob) - self.at

    def check(self, count: int, what: str) -> None:
        if count > self.left:
            raise WireError(f"{what}: {count} bytes expected, {self.left} are left")

    def take(self, count: int, what: str) -> bytes:
        self.check(count, what)
        self.at += count
        return bytes(self.blob[self.at - count : self.at])

    def number(self, form: str, what: str) -> int:
        return int(struct.unpack(form, self.take(struct.calcsize(form), what))[0])

    def values(self, count: int, dtype: torch.dtype, name: str) -> Tensor:
        raw = self.take(_length(count, dtype), f"{name}: values")
        if dtype == torch.bool:
            bits = np.unpackbits(np.frombuffer(raw, np.uint8), bitorder="little")
            if bits[count:].any():
                raise WireError(f"{name}: bits are set behind the last truth value")
            return torch.from_numpy(bits[:count].astype(bool))
        out = torch.empty(count, dtype=dtype)  # PyTorch's own memory: products may depend on how factors are aligned
        out.view(torch.uint8).numpy()[:] = np.frombuffer(raw, np.uint8)
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


def _raw(values: Tensor) -> bytes:
    if values.dtype == torch.bool:
        return np.packbits(values.reshape(-1).numpy(), bitorder="little").tobytes()
    return values.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()
