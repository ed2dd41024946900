"""Convolutions, dropout and steps of LSTM layers of many clients in one launch (Triton, for GPUs).

Activations lie in memory as `[C, B, H, W, channels]`; a client's convolution is a matrix product of its image
patches, gathered while they are loaded and never written, with its own weights. ReLU and 2x2 max-pooling may be
part of it: then only what is left after the pooling is written, with one byte that says where it came from.
"""

from __future__ import annotations

import math
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.autograd import Function

from personafl.accel.second_derivatives import differentiable_gradients, graph_requested
from personafl.core.errors import UserError
from personafl.core.types import Arithmetic

_EMPTY = (0, 1, 1)
_TILE = {"BO": 32, "BJ": 32}  # of kernels that only move weights
_SMALL_TILE = {"BO": 32, "BJ": 8, "num_warps": 2}  # of one that adds many parts first: more programs, less of a wait
_BLOCK = {"BLOCK": 4096, "num_warps": 8}  # of those that look at numbers one by one
_PRODUCTS: dict[Arithmetic, str] = {"float32": "tf32x3", "tf32": "ieee", "bf16": "ieee"}
"""How Triton takes the products of a precision: float32 as three of TF32, which leaves float32's own rounding."""
_FACTORS: dict[Arithmetic, torch.dtype] = {"float32": torch.float32, "tf32": torch.float16, "bf16": torch.bfloat16}
"""The type of their factors. A float16 has the ten bits of a TF32 number behind the point, and tensor cores take it
twice as fast, and also across the sum; the range it lacks is made up for by a power of two for each client."""
PLAIN, RELU, POOL = 0, 1, 2  # what follows the convolution: nothing, ReLU, ReLU and pooling
_SIZES = [
    "B",
    "H",
    "W",
    "OH",
    "OW",
    "M",
    "N",
    "splits",
    "per_split",
    "stride",
    "threshold",
    "each",
]  # no constants of a kernel
_STRIDES = ["N", "of_gates", "of_before", "of_cell", "of_state"]
_LAYER = [*_SIZES, "CI", "CO", "T", "BIASED", "BACK"]  # nor of those that only move numbers


@triton.jit
def _factor(bits):
    """The power of two that brings numbers below 2^15 whose largest has these bits; 1 where that is not finite."""
    exponent = tl.where(bits >> 23 == 255, 141, tl.maximum(bits >> 23, 15))
    return ((268 - exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _inverse(bits):
    """And the one that takes it back."""
    exponent = tl.where(bits >> 23 == 255, 141, tl.maximum(bits >> 23, 15))
    return ((exponent - 14) << 23).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["row", "blocks", "x_each", "x_stride", "y_each", "y_stride"])
def _largest(x, y, top, row, blocks, x_each, x_stride, y_each, y_stride, BLOCK: tl.constexpr):
    """The bits of each client's largest number, signs aside: in this order they are in the order of the numbers.

    Of two stacks: so many `blocks` of each client are for the first one; the other's start a `row` further.
    """
    client = tl.program_id(1).to(tl.int64)
    block = tl.program_id(0)
    if block >= blocks:
        block -= blocks
        x = y
        x_each = y_each
        x_stride = y_stride
        top += row
    at = block * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + client * x_stride + at, mask=at < x_each, other=0.0)
    tl.atomic_max(top + client, tl.max(value.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=0))


@triton.jit(do_not_specialize=_SIZES)
def _scale(x, top, out, N, BLOCK: tl.constexpr):
    """Each client's N numbers by its power of two, as float16."""
    client = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + client * N + at, mask=at < N, other=0.0)
    tl.store(out + client * N + at, (value * _factor(tl.load(top + client))).to(tl.float16), mask=at < N)


@triton.jit
def _patch(
    x, row, column, base, inside, k, H, W,
    CI: tl.constexpr, KW: tl.constexpr, K: tl.constexpr, PAD: tl.constexpr,
):  # fmt: skip
    """Numbers `k` of the patches at these places `[m, k]`: tap by tap, and in each tap channel by channel."""
    tap = k // CI
    kh = tap // KW
    kw = tap % KW
    offset = (kh * W + kw) * CI + k % CI
    if CI % 16 == 0:
        offset = tl.max_contiguous(tl.multiple_of(offset, 16), 16)
    real = inside[:, None] & (k < K)[None, :]
    if PAD > 0:
        r = row[:, None] + kh[None, :]
        c = column[:, None] + kw[None, :]
        real = real & (r >= 0) & (r < H) & (c >= 0) & (c < W)
    return tl.load(x + base[:, None] + offset[None, :], mask=real, other=0.0)


@triton.jit(do_not_specialize=_SIZES)
def _forward(
    x, weight, bias, out, origin, x_top, weight_top, B, H, W, OH, OW,
    CI: tl.constexpr, CO: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, PAD: tl.constexpr,
    MODE: tl.constexpr, BACK: tl.constexpr, BIASED: tl.constexpr, PRECISION: tl.constexpr, SCALED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """out[m, n] = sum over k of patch[m, k] * weight[k, n]; OH, OW are what is written (pooled, where it pools).

    Where it takes gradients back, CI are the layer's outputs, CO its inputs, and its taps come in reverse. In memory
    the weights lie along k either way, [n, taps, CI] or [taps, n, CI]: tensor cores take TF32 factors only so.
    """
    client = tl.program_id(2).to(tl.int64)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    K: tl.constexpr = KH * KW * CI
    S: tl.constexpr = 2 if MODE == 2 else 1
    M = B * OH * OW
    image = m // (OH * OW)
    row = (m // OW) % OH * S - PAD
    column = m % OW * S - PAD
    base = ((image * H + row) * W + column) * CI
    inside = m < M
    x += client * B * H * W * CI
    weight += client * K * CO
    a0 = tl.zeros((BM, BN), dtype=tl.float32)
    a1 = a0
    a2 = a0
    a3 = a0
    for first in range(0, K, BK):
        k = first + tl.arange(0, BK)
        if BACK:
            at = ((KH * KW - 1 - k // CI)[:, None] * CO + n[None, :]) * CI + (k % CI)[:, None]
        else:
            at = n[None, :] * K + k[:, None]
        w = tl.load(weight + at, mask=(k < K)[:, None] & (n < CO)[None, :], other=0.0)
        p = _patch(x, row, column, base, inside, k, H, W, CI, KW, K, PAD)
        a0 = tl.dot(p, w, a0, input_precision=PRECISION)
        if MODE == 2:  # the other three places of the window
            p = _patch(x, row, column + 1, base + CI, inside, k, H, W, CI, KW, K, PAD)
            a1 = tl.dot(p, w, a1, input_precision=PRECISION)
            p = _patch(x, row + 1, column, base + W * CI, inside, k, H, W, CI, KW, K, PAD)
            a2 = tl.dot(p, w, a2, input_precision=PRECISION)
            p = _patch(x, row + 1, column + 1, base + (W + 1) * CI, inside, k, H, W, CI, KW, K, PAD)
            a3 = tl.dot(p, w, a3, input_precision=PRECISION)
    if MODE > 0:
        place = tl.zeros((BM, BN), dtype=tl.int32)
    if MODE == 2:
        over = (a1 > a0) | (a1 != a1)  # what is no number is to be seen, wherever it stands
        place = tl.where(over, 1, place)
        a0 = tl.where(over, a1, a0)
        over = (a2 > a0) | (a2 != a2)
        place = tl.where(over, 2, place)
        a0 = tl.where(over, a2, a0)
        over = (a3 > a0) | (a3 != a3)
        place = tl.where(over, 3, place)
        a0 = tl.where(over, a3, a0)
    if SCALED:
        a0 = a0 * _inverse(tl.load(x_top + client)) * _inverse(tl.load(weight_top + client))
    if BIASED:
        a0 += tl.load(bias + client * CO + n, mask=n < CO, other=0.0)[None, :]
    at = client * M * CO + m[:, None] * CO + n[None, :]
    real = inside[:, None] & (n < CO)[None, :]
    if MODE > 0:
        dead = a0 <= 0  # not where it is no number: a diverged client is to be seen
        tl.store(origin + at, tl.where(dead, 4, place).to(tl.uint8), mask=real)
        a0 = tl.where(dead, 0.0, a0)
    tl.store(out + at, a0, mask=real)


@triton.jit(do_not_specialize=_SIZES)
def _spread(
    grad, origin, out, top, M, each, H, W, OH, OW,
    CO: tl.constexpr, MODE: tl.constexpr, SCALED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """A gradient back to where it came from: through the pooling and the ReLU. H, W are the size before pooling.

    `each` of the M places are a client's.
    """
    m = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    real = (m < M)[:, None] & (n < CO)[None, :]
    at = m[:, None] * CO + n[None, :]
    g = tl.load(grad + at, mask=real, other=0.0)
    place = tl.load(origin + at, mask=real, other=4)
    if SCALED:
        g = g * _factor(tl.load(top + m // each, mask=m < M, other=0))[:, None]
    if MODE == 2:
        image = m // (OH * OW)
        base = (image * H + (m // OW) % OH * 2) * W + m % OW * 2
        to = base[:, None] * CO + n[None, :]
        tl.store(out + to, tl.where(place == 0, g, 0.0), mask=real)
        tl.store(out + to + CO, tl.where(place == 1, g, 0.0), mask=real)
        tl.store(out + to + W * CO, tl.where(place == 2, g, 0.0), mask=real)
        tl.store(out + to + (W + 1) * CO, tl.where(place == 3, g, 0.0), mask=real)
    else:
        tl.store(out + at, tl.where(place == 0, g, 0.0), mask=real)


@triton.jit(do_not_specialize=_SIZES)
def _for_weight(
    x, grad, out, for_bias, x_top, grad_top, B, H, W, OH, OW, splits, per_split,
    CI: tl.constexpr, CO: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, PAD: tl.constexpr,
    BIASED: tl.constexpr, PRECISION: tl.constexpr, SCALED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The gradient of the weights: out[k, n] = sum over places m of patch[m, k] * grad[m, n], in `splits` parts."""
    client = (tl.program_id(2) // splits).to(tl.int64)
    split = tl.program_id(2) % splits
    k = tl.program_id(0) * BK + tl.arange(0, BK)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    K: tl.constexpr = KH * KW * CI
    M = B * OH * OW
    x += client * B * H * W * CI
    grad += client * M * CO
    total = tl.zeros((BK, BN), dtype=tl.float32)
    sums = tl.zeros((BN,), dtype=tl.float32)
    for first in range(0, per_split, BM):
        m = split * per_split + first + tl.arange(0, BM)
        image = m // (OH * OW)
        row = (m // OW) % OH - PAD
        column = m % OW - PAD
        base = ((image * H + row) * W + column) * CI
        p = _patch(x, row, column, base, m < M, k, H, W, CI, KW, K, PAD)
        at = m[:, None] * CO + n[None, :]
        real = (m < M)[:, None] & (n < CO)[None, :]
        g = tl.load(grad + at, mask=real, other=0.0)
        if BIASED:
            sums += tl.sum(g.to(tl.float32), axis=0)
        total = tl.dot(tl.trans(p), g, total, input_precision=PRECISION)
    if SCALED:
        back = _inverse(tl.load(grad_top + client))
        total = total * back * _inverse(tl.load(x_top + client))
        sums = sums * back
    part = client * splits + split
    tl.store(out + part * K * CO + k[:, None] * CO + n[None, :], total, mask=(k < K)[:, None] & (n < CO)[None, :])
    if BIASED:
        tl.store(for_bias + part * CO + n, sums, mask=tl.program_id(0) * CO + n < CO)  # one column of tiles writes it


@triton.jit(do_not_specialize=_LAYER)
def _pack(weight, out, top, stride, CI, CO, T, BACK, SCALED: tl.constexpr, BO: tl.constexpr, BJ: tl.constexpr):
    """Each client's weights [O, I, T] as [O, T, I], or for the way back as [T, I, O]."""
    client = tl.program_id(2).to(tl.int64)
    j = tl.program_id(0) * BJ + tl.arange(0, BJ)
    o = tl.program_id(1) * BO + tl.arange(0, BO)
    J = CI * T
    real = (o < CO)[:, None] & (j < J)[None, :]
    w = tl.load(weight + client * stride + o[:, None] * J + j[None, :], mask=real, other=0.0)
    if SCALED:
        w = w * _factor(tl.load(top + client))
    row = j % T * CI + j // T
    to = tl.where(BACK > 0, row[None, :] * CO + o[:, None], o[:, None] * J + row[None, :])
    tl.store(out + client * J * CO + to, w, mask=real)


@triton.jit(do_not_specialize=_LAYER)
def _collect(
    parts, sums, for_weight, for_bias, splits, CI, CO, T, BIASED, BO: tl.constexpr, BJ: tl.constexpr
):  # fmt: skip
    """The parts [splits, T, I, O] of each client's gradient, added up as [O, I, T]; its bias's as well."""
    client = tl.program_id(2).to(tl.int64)
    j = tl.program_id(0) * BJ + tl.arange(0, BJ)
    o = tl.program_id(1) * BO + tl.arange(0, BO)
    J = CI * T
    real = (j < J)[:, None] & (o < CO)[None, :]
    row = j % T * CI + j // T
    of_bias = tl.program_id(0) * CO + o < CO * BIASED
    total = tl.zeros((BJ, BO), dtype=tl.float32)
    bias = tl.zeros((BO,), dtype=tl.float32)
    for split in range(splits):
        part = client * splits + split
        total += tl.load(parts + part * J * CO + row[:, None] * CO + o[None, :], mask=real, other=0.0)
        bias += tl.load(sums + part * CO + o, mask=of_bias, other=0.0)
    tl.store(for_weight + client * J * CO + o[None, :] * J + j[:, None], total, mask=real)
    tl.store(for_bias + client * CO + o, bias, mask=of_bias)


@triton.jit
def _mixed(z):
    """The last step of SplitMix64, as `core/rng` has it."""
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit(do_not_specialize=_SIZES)
def _drop(x, keys, out, N, threshold, share, BLOCK: tl.constexpr):
    """Keep a client's number where its stream's word for it, as 24 bits, is not below the threshold."""
    client = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    key = tl.load(keys + client).to(tl.uint64, bitcast=True)
    word = _mixed(key + (at + 1).to(tl.uint64) * 0x9E3779B97F4A7C15)
    kept = (word >> 40).to(tl.int32) >= threshold
    value = tl.load(x + client * N + at, mask=at < N, other=0.0)
    tl.store(out + client * N + at, tl.where(kept, tl.div_rn(value, share), 0.0), mask=at < N)


@triton.jit
def _tanh(x):
    return 2 * tl.sigmoid(2 * x) - 1


@triton.jit(do_not_specialize=_STRIDES)
def _lstm_forward(
    gates, before, cell, state, N, of_gates, of_before, of_cell, of_state, H: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """A step of a layer: N = B * H numbers of each client. Gates are left as they are behind their activation."""
    client = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = at < N
    gates += client * of_gates + at // H * (4 * H) + at % H
    let = tl.sigmoid(tl.load(gates, mask=real, other=0.0))
    keep = tl.sigmoid(tl.load(gates + H, mask=real, other=0.0))
    new = _tanh(tl.load(gates + 2 * H, mask=real, other=0.0))
    show = tl.sigmoid(tl.load(gates + 3 * H, mask=real, other=0.0))
    value = keep * tl.load(before + client * of_before + at, mask=real, other=0.0) + let * new
    tl.store(gates, let, mask=real)
    tl.store(gates + H, keep, mask=real)
    tl.store(gates + 2 * H, new, mask=real)
    tl.store(gates + 3 * H, show, mask=real)
    tl.store(cell + client * of_cell + at, value, mask=real)
    tl.store(state + client * of_state + at, show * _tanh(value), mask=real)


@triton.jit(do_not_specialize=_STRIDES)
def _lstm_backward(
    gates, before, cell, for_state, carried, for_cell, slopes, N, of_gates, of_before, of_cell, of_state,
    H: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The way back through a step; `carried` and `for_cell` are `[C, N]` in one piece."""
    client = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = at < N
    place = client * of_gates + at // H * (4 * H) + at % H
    let = tl.load(gates + place, mask=real, other=0.0)
    keep = tl.load(gates + place + H, mask=real, other=0.0)
    new = tl.load(gates + place + 2 * H, mask=real, other=0.0)
    show = tl.load(gates + place + 3 * H, mask=real, other=0.0)
    through = _tanh(tl.load(cell + client * of_cell + at, mask=real, other=0.0))
    own = client * N + at
    grad = tl.load(for_state + client * of_state + at, mask=real, other=0.0)
    grad += tl.load(carried + own, mask=real, other=0.0)
    down = tl.load(for_cell + own, mask=real, other=0.0) + grad * show * (1 - through * through)
    past = tl.load(before + client * of_before + at, mask=real, other=0.0)
    tl.store(slopes + place, down * new * let * (1 - let), mask=real)
    tl.store(slopes + place + H, down * past * keep * (1 - keep), mask=real)
    tl.store(slopes + place + 2 * H, down * let * (1 - new * new), mask=real)
    tl.store(slopes + place + 3 * H, grad * through * show * (1 - show), mask=real)
    tl.store(for_cell + own, down * keep, mask=real)


def lstm_forward(gates: Tensor, before: Tensor, cell: Tensor, state: Tensor) -> None:
    """A step of every client's layer: gates `[C, B, 4 H]`, all else `[C, B, H]`, each client's in one piece."""
    clients, size, width = cell.shape
    strides = (t.stride(0) for t in (gates, before, cell, state))
    grid = (triton.cdiv(size * width, 512), clients)
    _lstm_forward[grid](gates, before, cell, state, size * width, *strides, H=width, BLOCK=512)


def lstm_backward(
    gates: Tensor, before: Tensor, cell: Tensor, for_state: Tensor, carried: Tensor, for_cell: Tensor, slopes: Tensor
) -> None:
    """The way back through it; `for_cell` becomes the gradient of the cell's state before."""
    clients, size, width = cell.shape
    strides = (t.stride(0) for t in (gates, before, cell, for_state))
    grid = (triton.cdiv(size * width, 512), clients)
    given = (gates, before, cell, for_state, carried, for_cell, slopes, size * width, *strides)
    _lstm_backward[grid](*given, H=width, BLOCK=512)


def _power(n: int, low: int, high: int) -> int:
    """The power of two at or above `n`, between bounds."""
    return max(low, min(high, triton.next_power_of_2(n)))


@dataclass(frozen=True)
class _Factors:
    """Numbers as products take them, and, where they are scaled, the bits of each client's largest."""

    values: Tensor
    tops: Tensor | None

    @property
    def top(self) -> Tensor:
        """For a kernel, which does not look at it where nothing is scaled."""
        return self.values if self.tops is None else self.tops


def _tops(clients: int, *stacks: Tensor) -> Tensor:
    """The bits of each client's largest number in one or two stacks. Its part is in one piece; all may share it."""
    row = -(-clients // 4) * 4  # 16 bytes, as kernels are compiled for
    top = stacks[0].new_zeros(len(stacks), row, dtype=torch.int32)
    each = [x.numel() // clients for x in stacks]
    blocks = [triton.cdiv(n, _BLOCK["BLOCK"]) for n in each]
    strides = [x.stride(0) * (len(x) // clients) for x in stacks]
    sizes = (n for pair in zip(each, strides, strict=True) for n in pair)
    rest = () if len(stacks) == 2 else (0, 0)
    _largest[(sum(blocks), clients)](stacks[0], stacks[-1], top, row, blocks[0], *sizes, *rest, **_BLOCK)
    return top[:, :clients]


def _as_factors(x: Tensor, clients: int, how: Arithmetic, top: Tensor | None = None) -> _Factors:
    """`x` in memory as it lies, in the type of this precision; `top` are its tops, where they are known."""
    if how != "tf32":
        kind = _FACTORS[how]
        return _Factors(x.contiguous() if x.dtype == kind else x.new_empty(x.shape, dtype=kind).copy_(x), None)
    x = x.contiguous()
    top = _tops(clients, x)[0] if top is None else top
    out, each = torch.empty_like(x, dtype=torch.float16), x.numel() // clients
    _scale[(triton.cdiv(each, _BLOCK["BLOCK"]), clients)](x, top, out, each, **_BLOCK)
    return _Factors(out, top)


def _packed(weight: Tensor, how: Arithmetic, top: Tensor | None, *, back: bool) -> _Factors:
    """The weights `[C, O, I, K, K]` as the kernels want them: `[C, O, K, K, I]`, for the way back `[C, K, K, I, O]`."""
    clients, co, ci, kh, kw = weight.shape
    out = _Factors(torch.empty(weight.shape, dtype=_FACTORS[how], device=weight.device), top)
    grid = (triton.cdiv(ci * kh * kw, _TILE["BJ"]), triton.cdiv(co, _TILE["BO"]), clients)
    sizes = (weight.stride(0), ci, co, kh * kw, int(back))
    _pack[grid](weight, out.values, out.top, *sizes, SCALED=top is not None, **_TILE)
    return out


@dataclass(frozen=True)
class _Layer:
    """What the kernels of a convolution are made for."""

    inputs: int
    outputs: int
    size: int  # of the square kernel
    pad: int
    mode: int
    biased: bool
    how: Arithmetic
    back: bool = False  # from outputs to inputs

    def reverse(self) -> _Layer:
        """The convolution that takes a gradient to the input."""
        pad = self.size - 1 - self.pad
        return replace(self, inputs=self.outputs, outputs=self.inputs, pad=pad, mode=PLAIN, biased=False, back=True)

    @property
    def patch(self) -> int:
        return self.size * self.size * self.inputs

    @property
    def scaled(self) -> bool:
        return self.how == "tf32"

    def constants(self) -> dict[str, Any]:
        return {
            "CI": self.inputs, "CO": self.outputs, "KH": self.size, "KW": self.size, "PAD": self.pad,
            "BIASED": self.biased, "PRECISION": _PRODUCTS[self.how], "SCALED": self.scaled,
        }  # fmt: skip

    def tiles(self) -> tuple[dict[str, int], dict[str, int]]:
        """Of the forward kernel: where there are enough for a GPU, and where not; each is compiled by itself."""
        exact = self.how == "float32"
        wide = self.mode != POOL and self.outputs >= 128 and not exact
        columns = _power(self.outputs, 16, 128 if wide else 64)
        rows = 64 if self.mode == POOL or exact else 128
        rest = {"BN": columns, "BK": 32, "num_stages": 3}
        return {"BM": rows, "num_warps": 8 if wide else 4, **rest}, {"BM": 32, "num_warps": 4, **rest}

    def weight_tile(self) -> dict[str, int]:
        """Of the kernel for the weights' gradient: with 32-bit factors a small one, which older instructions take."""
        columns = _power(self.outputs, 16, 64)
        if self.how != "float32":
            return {"BM": 128, "BK": _power(self.patch, 32, 64), "BN": columns, "num_warps": 4, "num_stages": 3}
        if self.patch <= 32:
            return {"BM": 32, "BK": 32, "BN": min(columns, 32), "num_warps": 4, "num_stages": 4}
        return {"BM": 16, "BK": 64, "BN": columns, "num_warps": 2, "num_stages": 5}


def _convolved(
    layer: _Layer, x: _Factors, packed: _Factors, bias: Tensor | None, out: Tensor, origin: Tensor | None
) -> None:
    """x `[C * B, H, W, I]` under packed weights into `out`."""
    clients = len(packed.values)
    sizes = (x.values.shape[0] // clients, *x.values.shape[1:3], *out.shape[1:3])
    places, (large, small) = sizes[0] * sizes[3] * sizes[4], layer.tiles()
    columns = triton.cdiv(layer.outputs, large["BN"])
    tile = large if triton.cdiv(places, large["BM"]) * clients * columns >= 132 else small
    grid = (triton.cdiv(places, tile["BM"]), columns, clients)
    given = (x.values, packed.values, packed.values if bias is None else bias, out, out if origin is None else origin)
    _forward[grid](*given, x.top, packed.top, *sizes, MODE=layer.mode, BACK=layer.back, **tile, **layer.constants())


def _weight_gradient(layer: _Layer, x: _Factors, g: _Factors, clients: int) -> tuple[Tensor, Tensor | None]:
    """The gradients of weights `[C, O, I, K, K]` and biases, from inputs `[C * B, H, W, I]` and output gradients."""
    images = x.values
    sizes = (images.shape[0] // clients, *images.shape[1:3], *g.values.shape[1:3])
    places, k, co = sizes[0] * sizes[3] * sizes[4], layer.patch, layer.outputs
    tile = layer.weight_tile()
    columns = triton.cdiv(co, tile["BN"])
    tiles = clients * triton.cdiv(k, tile["BK"]) * columns
    splits = max(1, min(triton.cdiv(264, tiles), places // 256))
    per_split = triton.cdiv(places, tile["BM"] * splits) * tile["BM"]
    parts = images.new_empty(clients, splits, k, co, dtype=torch.float32)
    sums = images.new_empty(clients, splits, co, dtype=torch.float32)
    grid = (triton.cdiv(k, tile["BK"]), columns, clients * splits)
    given = (images, g.values, parts, sums, x.top, g.top)
    _for_weight[grid](*given, *sizes, splits, per_split, **tile, **layer.constants())
    for_weight = parts.new_empty(clients, co, layer.inputs, layer.size, layer.size)
    for_bias = parts.new_empty(clients, co) if layer.biased else None
    _collect[(triton.cdiv(k, _SMALL_TILE["BJ"]), triton.cdiv(co, _SMALL_TILE["BO"]), clients)](
        parts, sums, for_weight, parts if for_bias is None else for_bias, splits,
        layer.inputs, co, layer.size**2, int(layer.biased), **_SMALL_TILE,
    )  # fmt: skip
    return for_weight, for_bias


_compiled: set[Any] = set()
_one_at_a_time = threading.Lock()


def _compile(layer: _Layer, x: Tensor, weight: Tensor, dtype: torch.dtype) -> None:
    """Compile a layer's kernels at the same time, the first time it is seen, instead of each at its first launch.

    They are loaded one after the other: Triton's launchers are modules of one name, and Python gives two threads that
    load such a module again one and the same, so that a kernel could end up with the launcher of another.
    """
    key = (layer, x.dtype, weight.dtype, dtype, weight.device)
    if key in _compiled:
        return
    with _one_at_a_time, torch.cuda.device(weight.device):
        planned = _planned(layer, x, weight, dtype)

        def compiled(launch: _Launch) -> None:
            with torch.cuda.device(weight.device):  # every thread has a device of its own
                launch.kernel.warmup(*launch.given, grid=_EMPTY, **launch.constants)

        with ThreadPoolExecutor(len(planned)) as pool:
            list(pool.map(compiled, planned))
        for launch in planned:
            launch.kernel[_EMPTY](*launch.given, **launch.constants)  # an empty grid loads a kernel and runs nothing
        _compiled.add(key)


class _Launch(NamedTuple):
    """A kernel with arguments, of which tensors only stand for others of their type."""

    kernel: Any
    given: tuple[Any, ...]
    constants: dict[str, Any]


def _planned(layer: _Layer, x: Tensor, weight: Tensor, dtype: torch.dtype) -> list[_Launch]:
    """All kernels of a layer."""
    images = weight.new_empty(1, dtype=_FACTORS[layer.how])
    out, byte = images.new_empty(1, dtype=dtype), images.new_empty(1, dtype=torch.uint8)
    top = images.new_empty(1, dtype=torch.int32) if layer.scaled else images
    back = layer.reverse()

    def forward(of: _Layer, tile: dict[str, int], bias: Tensor, out: Tensor, origin: Tensor) -> _Launch:
        given = (images, images, bias, out, origin, top, top, 0, 0, 0, 0, 0)
        return _Launch(_forward, given, {"MODE": of.mode, "BACK": of.back, **tile, **of.constants()})

    bias, origin = weight if layer.biased else images, byte if layer.mode else out
    found = [forward(layer, tile, bias, out, origin) for tile in layer.tiles()]
    found += [forward(back, tile, images, x, x) for tile in back.tiles()]
    constants = {**layer.weight_tile(), **layer.constants()}
    found.append(_Launch(_for_weight, (images, images, weight, weight, top, top, *[0] * 7), constants))
    found.append(_Launch(_pack, (weight, images, top, *[0] * 5), {"SCALED": layer.scaled, **_TILE}))
    if layer.scaled:
        found.append(_Launch(_largest, (weight, weight, top, *[0] * 6), _BLOCK))
        found.append(_Launch(_scale, (weight, top, images, 0), _BLOCK))
    found.append(_Launch(_collect, (weight, weight, weight, weight, *[0] * 5), _SMALL_TILE))
    if layer.mode:
        tile = {"BM": 64, "BN": _power(layer.outputs, 16, 64), "num_warps": 4}
        own = {"CO": layer.outputs, "MODE": layer.mode, "SCALED": layer.scaled}
        found.append(_Launch(_spread, (out, byte, images, top, *[0] * 6), own | tile))
    return found


class Convolution(Function):
    """Stacked convolution with stride 1, then what `mode` says. x `[C * B, I, H, W]`, weight `[C, O, I, KH, KW]`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        pad: int,
        mode: int,
        how: Arithmetic,
        dtype: torch.dtype,
    ) -> Tensor:
        clients, co, ci, k = weight.shape[:4]
        layer = _Layer(ci, co, k, pad, mode, bias is not None, how)
        _compile(layer, x, weight, dtype)
        inputs = (x, weight, bias) if how == "float32" else ()  # elsewhere `x` would be kept beside its rounded copy
        if not weight[0].is_contiguous():
            weight = weight.contiguous()
        images = x.permute(0, 2, 3, 1)
        images = images.contiguous() if layer.scaled else images
        of_x, top = _tops(clients, images, weight) if layer.scaled else (None, None)
        factors = _as_factors(images, clients, how, of_x)
        oh, ow = x.shape[2] + 2 * pad - k + 1, x.shape[3] + 2 * pad - k + 1
        size = (oh // 2, ow // 2) if mode == POOL else (oh, ow)
        out = x.new_empty(len(x), *size, co, dtype=dtype)
        origin = x.new_empty(out.shape, dtype=torch.uint8) if mode else None
        own = None if bias is None else bias.contiguous()  # clients may share one row
        _convolved(layer, factors, _packed(weight, how, top, back=False), own, out, origin)
        ctx.save_for_backward(factors.values, of_x, weight, top, origin, *inputs)
        ctx.rest = (layer, (oh, ow), x.dtype)
        return out.permute(0, 3, 1, 2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        values, tops, weight, top, origin, *inputs = ctx.saved_tensors
        layer, size, dtype = ctx.rest
        if graph_requested():
            if not inputs:
                raise UserError(
                    f"precision={layer.how!r}: convolutions have no second derivatives at this precision; a loss that "
                    "calls torch.autograd.grad with create_graph=True needs training.precision='float32'"
                )
            wanted = ctx.needs_input_grad[:3]
            found = differentiable_gradients(partial(_plain_convolution, layer), inputs, [grad], wanted)
            return *found, None, None, None, None
        images, grad = _Factors(values, tops), grad.permute(0, 2, 3, 1)
        g = (
            _returned(grad, origin, layer, size, len(weight))
            if layer.mode
            else _as_factors(grad, len(weight), layer.how)
        )
        for_x = for_weight = for_bias = None
        if ctx.needs_input_grad[0]:
            for_x = torch.empty_like(values, dtype=dtype)
            _convolved(layer.reverse(), g, _packed(weight, layer.how, top, back=True), None, for_x, None)
            for_x = for_x.permute(0, 3, 1, 2)
        if ctx.needs_input_grad[1]:
            for_weight, for_bias = _weight_gradient(layer, images, g, len(weight))
        return for_x, for_weight, for_bias, None, None, None, None


def _plain_convolution(layer: _Layer, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The same convolution as operations that autograd knows."""
    biases = [None] * len(weight) if bias is None else bias.unbind()
    parts = zip(x.chunk(len(weight)), weight.unbind(), biases, strict=True)
    out = torch.cat([F.conv2d(images, w, b, padding=layer.pad) for images, w, b in parts])
    out = out.relu() if layer.mode else out
    return F.max_pool2d(out, 2) if layer.mode == POOL else out


def _returned(grad: Tensor, origin: Tensor, layer: _Layer, size: tuple[int, int], clients: int) -> _Factors:
    """The gradient before ReLU and pooling, `[C * B, *size, O]`."""
    grad = grad.contiguous()
    count, small_h, small_w, co = grad.shape
    odd = layer.mode == POOL and (size[0] % 2 or size[1] % 2)
    out = (grad.new_zeros if odd else grad.new_empty)(count, *size, co, dtype=_FACTORS[layer.how])
    found = _Factors(out, _tops(clients, grad)[0] if layer.scaled else None)
    places, columns = count * small_h * small_w, _power(co, 16, 64)
    _spread[(triton.cdiv(places, 64), triton.cdiv(co, columns))](
        grad, origin, out, found.top, places, places // clients, *size, small_h, small_w,
        CO=co, MODE=layer.mode, SCALED=layer.scaled, BM=64, BN=columns, num_warps=4,
    )  # fmt: skip
    return found


def fits(conv: nn.Conv2d) -> bool:
    """Whether these kernels have this convolution: stride 1, square, evenly padded."""
    kernel, pad = conv.kernel_size, conv.padding
    usual = (conv.stride, conv.dilation, conv.groups, conv.padding_mode) == ((1, 1), (1, 1), 1, "zeros")
    return usual and kernel[0] == kernel[1] and pad[0] == pad[1] and isinstance(pad[0], int) and pad[0] < kernel[0]


def convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, pad: int, mode: int, how: Arithmetic, dtype: torch.dtype
) -> Tensor:
    """Every client's convolution of its own images, and what follows it, as this type of number."""
    out: Tensor = Convolution.apply(x, weight, bias, pad, mode, how, dtype)
    return out


class Dropout(Function):
    """Each client's `[C, n]` numbers dropped with probability `p` by its own stream; the draws are made again on the
    way back instead of being kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, keys: Tensor, p: float) -> Tensor:
        ctx.save_for_backward(keys)
        ctx.p = p
        return _dropped(x, keys, p)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return dropout(grad, ctx.saved_tensors[0], ctx.p), None, None


def _dropped(x: Tensor, keys: Tensor, p: float) -> Tensor:
    x, keys = x.contiguous(), keys.contiguous()
    out = torch.empty_like(x)
    threshold = math.ceil(torch.tensor(p).item() * 2**24)  # a draw of 24 bits is below p where it is below this
    grid = (triton.cdiv(x.shape[1], 1024), x.shape[0])
    _drop[grid](x, keys, out, x.shape[1], threshold, 1 - p, BLOCK=1024)
    return out


def dropout(x: Tensor, keys: Tensor, p: float) -> Tensor:
    """`[C, n]` with some numbers zero and the others scaled up, drawn as `core.rng.uniform` draws in float32."""
    out: Tensor = Dropout.apply(x, keys, p)
    return out
