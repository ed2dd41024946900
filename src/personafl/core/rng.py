"""Random streams keyed by (seed, purpose, round, client, ...).

A stream is a function of its key alone, so a draw does not depend on which clients share a
stack, on their order, or on the device: everything is exact 64-bit integer arithmetic
(SplitMix64: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014),
done for a whole stack at once.
"""

from __future__ import annotations

import functools
import hashlib
import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
MIX1 = 0xBF58476D1CE4E5B9 - (1 << 64)
MIX2 = 0x94D049BB133111EB - (1 << 64)
_WORD = (1 << 64) - 1
_ROUNDS = ((np.uint64(30), np.uint64(MIX1 & _WORD)), (np.uint64(27), np.uint64(MIX2 & _WORD)))
_LAST = np.uint64(31)
_SHARED = threading.RLock()


def _shift(z: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _mix(z: Tensor) -> Tensor:
    """SplitMix64's mix of words that nobody else looks at."""
    if z.device.type == "cpu":
        return _mixed_in_place(z)
    z = (z ^ _shift(z, 30)) * MIX1
    z = (z ^ _shift(z, 27)) * MIX2
    return z ^ _shift(z, 31)


def _mixed_in_place(z: Tensor) -> Tensor:
    """The same on the host, where NumPy has unsigned words: fewer operations, each in a fraction of PyTorch's time."""
    words = z.numpy().view(np.uint64)
    for bits, factor in _ROUNDS:
        words ^= words >> bits
        words *= factor
    words ^= words >> _LAST
    return z


def key(seed: int, purpose: str, *parts: int | Tensor) -> Tensor:
    """The key of a stream: a 64-bit integer, or one per client where a part is a tensor of ids."""
    rest = [p if isinstance(p, Tensor) else int(p) for p in (seed, *parts)]
    known: list[int] = []
    while rest and isinstance(first := rest[0], int):  # the round's part costs nothing beside the clients'
        known, rest = [*known, first], rest[1:]
    word = _word(purpose, known)
    if not rest:
        return torch.tensor(word)
    out = extend(word, rest[0])
    for part in rest[1:]:
        out = extend(out, part)
    return out


def keys(seed: int, purposes: Sequence[str], rnd: int, ids: Tensor) -> Tensor:
    """The keys of several purposes at once, `[P, C]`: one pass over few numbers costs as much as over one."""
    words = torch.tensor([_word(purpose, (seed, rnd)) for purpose in purposes])
    return extend(words.unsqueeze(1), ids)


def _word(purpose: str, parts: Sequence[int]) -> int:
    """A key of numbers alone."""
    word = purpose_key(purpose)
    for part in parts:
        word = _mix_int((word ^ int(part)) + GOLDEN)
    return word


@functools.cache
def purpose_key(name: str) -> int:
    """What a purpose adds to a key."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little", signed=True)


def _mix_int(z: int) -> int:
    """`_mix` of one number."""
    z &= _WORD
    z = ((z ^ (z >> 30)) * MIX1) & _WORD
    z = ((z ^ (z >> 27)) * MIX2) & _WORD
    z ^= z >> 31
    return z - (1 << 64) if z >> 63 else z


def extend(keys: int | Tensor, part: int | str | Tensor) -> Tensor:
    """The keys of the streams one level below; one of the two is a tensor."""
    part = part.long() if isinstance(part, Tensor) else part
    words = (keys ^ (purpose_key(part) if isinstance(part, str) else part)) + GOLDEN
    assert isinstance(words, Tensor)
    return _mix(words)


def bits(keys: Tensor, count: int) -> Tensor:
    """The first `count` words of each stream: `[..., count]` int64."""
    place = torch.arange(1, count + 1, device=keys.device)
    return _mix(keys.unsqueeze(-1) + place * GOLDEN)


def uniform(keys: Tensor, count: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Uniform in [0, 1): `[..., count]`."""
    resolution = 24 if dtype == torch.float32 else 53
    return _shift(bits(keys, count), 64 - resolution).to(dtype) * 2.0**-resolution


def normal(keys: Tensor, count: int) -> Tensor:
    """Standard normal by Box and Muller's transform: `[..., count]` float64."""
    a, b = uniform(keys, 2 * count).view(*keys.shape, 2, count).unbind(-2)
    return (-2 * torch.log1p(-a)).sqrt() * (2 * math.pi * b).cos()


def order(keys: Tensor, counts: Tensor | None, width: int) -> Tensor:
    """Each stream's random permutation of `0..counts-1`, padded to `width` by the unused places (None: no place is)."""
    words = bits(keys, width)
    if counts is None:
        return words.argsort(dim=-1, stable=True)
    unused = torch.arange(width, device=keys.device) >= counts.unsqueeze(-1)
    return words.masked_fill(unused, torch.iinfo(torch.int64).max).argsort(dim=-1, stable=True)


def generator(seed: int, purpose: str, *parts: int) -> np.random.Generator:
    """A NumPy generator for what is drawn once on the host: partitions, cohorts, donors."""
    return np.random.Generator(np.random.PCG64(_word(purpose, (seed, *parts)) & _WORD))


@contextmanager
def torch_generator(device: torch.device | None = None) -> Iterator[None]:
    """PyTorch's own generator, for modules that know no other; one thread has it at a time, and leaves it as it was."""
    with _SHARED, torch.random.fork_rng(devices=[device] if device is not None and device.type == "cuda" else []):
        yield
