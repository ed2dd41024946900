"""Random streams keyed by (seed, purpose, round, client, ...).

A stream is a function of its key alone, so a draw does not depend on which clients share a
stack, on their order, or on the device: everything is exact 64-bit integer arithmetic
(SplitMix64: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014),
done for a whole stack at once, or for a few numbers one by one, which is faster.
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
from numpy.typing import NDArray
from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
MIX1 = 0xBF58476D1CE4E5B9 - (1 << 64)
MIX2 = 0x94D049BB133111EB - (1 << 64)
_WORD = (1 << 64) - 1
_ROUNDS = ((np.uint64(30), np.uint64(MIX1 & _WORD)), (np.uint64(27), np.uint64(MIX2 & _WORD)))
_LAST = np.uint64(31)
FEW = 8  # numbers that Python mixes faster than NumPy
_SHARED = threading.RLock()
Words = NDArray[np.int64]


def _shift(z: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _mix(z: Tensor) -> Tensor:
    """SplitMix64's mix, on a GPU."""
    z = (z ^ _shift(z, 30)) * MIX1
    z = (z ^ _shift(z, 27)) * MIX2
    return z ^ _shift(z, 31)


def _mixed(z: Words) -> Words:
    """The same on the host, over the words that are given: NumPy has unsigned ones, and takes a fraction of PyTorch's
    time over few.

    A few are mixed as Python's own numbers, which is faster still.
    """
    if z.size <= FEW:
        return np.array([_mix_int(word) for word in z.ravel().tolist()], np.int64).reshape(z.shape)
    words = z.view(np.uint64)
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
    words = [_word(purpose, (seed, rnd)) for purpose in purposes]
    if len(words) * ids.shape[0] > FEW:
        return extend(torch.tensor(words).unsqueeze(1), ids)
    each = ids.tolist()
    mixed = [_mix_int((word ^ client) + GOLDEN) for word in words for client in each]
    return torch.from_numpy(np.array(mixed, np.int64).reshape(len(words), len(each)))


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
    part = purpose_key(part) if isinstance(part, str) else part.long() if isinstance(part, Tensor) else part
    if not any(isinstance(t, Tensor) and t.is_cuda for t in (keys, part)):
        held, more = (t.numpy() if isinstance(t, Tensor) else t for t in (keys, part))
        return torch.from_numpy(_extend_on_host(held, more))
    words = (keys ^ part) + GOLDEN
    assert isinstance(words, Tensor)
    return _mix(words)


def _extend_on_host(keys: int | Words, part: int | Words) -> Words:
    return _mixed(np.asarray(np.add(np.bitwise_xor(keys, part), GOLDEN)))


def numbered(keys: Tensor, numbers: Words, behind: int | Tensor = 0) -> Words:
    """The streams of these numbers one level below each of a host's keys, behind so many (of each): `[C, N]`."""
    count = keys.shape[0]
    if count * len(numbers) > FEW:
        first = behind if isinstance(behind, int) else behind.numpy()[:, None]
        return _extend_on_host(keys.numpy()[:, None], numbers + first)
    passed = [behind] * count if isinstance(behind, int) else behind.tolist()
    each, words = numbers.tolist(), zip(keys.tolist(), passed, strict=True)
    mixed = [_mix_int((word ^ (number + so_many)) + GOLDEN) for word, so_many in words for number in each]
    return np.array(mixed, np.int64).reshape(count, len(each))


def bits(keys: Tensor, count: int) -> Tensor:
    """The first `count` words of each stream: `[..., count]` int64."""
    if keys.device.type == "cpu":
        return torch.from_numpy(_bits_on_host(keys.numpy(), count))
    return _mix(keys.unsqueeze(-1) + torch.arange(1, count + 1, device=keys.device) * GOLDEN)


def _bits_on_host(keys: Words, count: int) -> Words:
    return _mixed(keys[..., None] + np.arange(1, count + 1) * GOLDEN)


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
    if keys.device.type == "cpu":
        return torch.from_numpy(order_on_host(keys.numpy(), None if counts is None else counts.numpy(), width))
    words = bits(keys, width)
    if counts is not None:
        unused = torch.arange(width, device=keys.device) >= counts.unsqueeze(-1)
        words = words.masked_fill(unused, torch.iinfo(torch.int64).max)
    return words.argsort(dim=-1, stable=True)


def order_on_host(keys: Words, counts: Words | None, width: int) -> Words:
    """`order` of NumPy's arrays."""
    words = _bits_on_host(keys, width)
    if counts is not None:
        words = np.where(np.arange(width) < counts[..., None], words, np.iinfo(np.int64).max)
    return words.argsort(-1, kind="stable")


def generator(seed: int, purpose: str, *parts: int) -> np.random.Generator:
    """A NumPy generator for what is drawn once on the host: partitions, cohorts, donors."""
    return np.random.Generator(np.random.PCG64(_word(purpose, (seed, *parts)) & _WORD))


@contextmanager
def torch_generator(device: torch.device | None = None) -> Iterator[None]:
    """PyTorch's own generator, for modules that know no other; one thread has it at a time, and leaves it as it was."""
    with _SHARED, torch.random.fork_rng(devices=[device] if device is not None and device.type == "cuda" else []):
        yield
