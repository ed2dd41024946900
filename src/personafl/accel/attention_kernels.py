"""Self-attention over short sequences in one launch (Triton, for GPUs).

A program has one head of one example: all queries, keys and values of a short sequence fit into a multiprocessor, so
scores are never written. They are read as one product gives them, `[N, length, 3 * heads * width]`, and gradients are
written so; the way back finds the scores again instead of keeping them.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd import Function

from personafl.accel.second_derivatives import differentiable_gradients, graph_requested
from personafl.core.types import Arithmetic

LONGEST, WIDEST = 128, 64  # positions of a sequence, numbers of a head
ROOM = 160 * 2**10
"""Bytes of its own memory that a program may have on GPUs these kernels are for: an A100 has 163 KiB and they need 128,
an H200 has 227 and they need 192; others have 64 or 99."""
_PRODUCTS: dict[Arithmetic, str] = {"float32": "tf32x3", "tf32": "tf32", "bf16": "tf32"}
"""How Triton takes products of float32 numbers in a precision; those of bf16 are taken as they are."""
_SIZES = ["L"]  # no constant of a kernel


@triton.jit
def _product(a, b, HOW: tl.constexpr):
    """The product of two matrices. Tensor cores cut off what a TF32 number has no bits for; here it is rounded."""
    if HOW == "tf32" and a.dtype == tl.float32:
        a, b = _rounded(a), _rounded(b)
    return tl.dot(a, b, input_precision=HOW)


@triton.jit
def _rounded(x):
    nearest = ((x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
    return tl.where(tl.abs(x) < float("inf"), nearest, x)  # what is no number stays none


@triton.jit
def _weights(q, k, place, L, scale, CAUSAL: tl.constexpr, HOW: tl.constexpr):
    """How much each query attends to each key."""
    scores = _product(q, tl.trans(k), HOW) * scale
    hidden = place[None, :] >= L
    if CAUSAL:
        hidden = hidden | (place[None, :] > place[:, None])
    scores = tl.where(hidden, float("-inf"), scores)
    shares = tl.exp(scores - tl.max(scores, 1)[:, None])
    return shares / tl.sum(shares, 1)[:, None]


@triton.jit
def _places(L, H: tl.constexpr, D: tl.constexpr, BL: tl.constexpr, BD: tl.constexpr):
    """Where this program's numbers are in `[N, L, H, D]`, by how many rows of it, and which of them there are."""
    example, head = tl.program_id(0) // H, tl.program_id(0) % H
    place, number = tl.arange(0, BL), tl.arange(0, BD)
    row = example.to(tl.int64) * L + place
    return place, row, head * D + number, (place < L)[:, None] & (number < D)[None, :]


@triton.jit(do_not_specialize=_SIZES)
def _attend(
    packed, out, L, scale,
    H: tl.constexpr, D: tl.constexpr, BL: tl.constexpr, BD: tl.constexpr, CAUSAL: tl.constexpr, HOW: tl.constexpr,
):  # fmt: skip
    place, row, column, there = _places(L, H, D, BL, BD)
    at = packed + row[:, None] * (3 * H * D) + column[None, :]
    q = tl.load(at, there, 0.0)
    k = tl.load(at + H * D, there, 0.0)
    v = tl.load(at + 2 * H * D, there, 0.0)
    shares = _weights(q, k, place, L, scale, CAUSAL, HOW)
    seen = _product(shares.to(v.dtype), v, HOW)
    tl.store(out + row[:, None] * (H * D) + column[None, :], seen.to(out.dtype.element_ty), there)


@triton.jit(do_not_specialize=_SIZES)
def _attend_back(
    packed, grad, out, L, scale,
    H: tl.constexpr, D: tl.constexpr, BL: tl.constexpr, BD: tl.constexpr, CAUSAL: tl.constexpr, HOW: tl.constexpr,
):  # fmt: skip
    place, row, column, there = _places(L, H, D, BL, BD)
    at = row[:, None] * (3 * H * D) + column[None, :]
    q = tl.load(packed + at, there, 0.0)
    k = tl.load(packed + at + H * D, there, 0.0)
    v = tl.load(packed + at + 2 * H * D, there, 0.0)
    g = tl.load(grad + row[:, None] * (H * D) + column[None, :], there, 0.0)
    shares = _weights(q, k, place, L, scale, CAUSAL, HOW)
    kind = out.dtype.element_ty
    for_v = _product(tl.trans(shares.to(v.dtype)), g, HOW)
    tl.store(out + at + 2 * H * D, for_v.to(kind), there)
    for_shares = _product(g, tl.trans(v), HOW)
    slope = shares * (for_shares - tl.sum(shares * for_shares, 1)[:, None]) * scale
    slope = slope.to(q.dtype)
    for_q = _product(slope, k, HOW)
    tl.store(out + at, for_q.to(kind), there)
    for_k = _product(tl.trans(slope), q, HOW)
    tl.store(out + at + H * D, for_k.to(kind), there)


class ShortAttention(Function):
    """Queries, keys and values `[N, L, 3 E]` side by side; what is seen, `[N, L, E]`."""

    @staticmethod
    def forward(ctx: Any, packed: Tensor, heads: int, causal: bool, how: Arithmetic) -> Tensor:
        ctx.save_for_backward(packed)
        ctx.rest = heads, causal, how
        out = packed.new_empty(*packed.shape[:2], packed.shape[2] // 3)
        _launch(_attend, packed, (packed, out), *ctx.rest)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (packed,) = ctx.saved_tensors
        if graph_requested():
            plain = functools.partial(_plain_attention, heads=ctx.rest[0], causal=ctx.rest[1])
            return *differentiable_gradients(plain, (packed,), [grad], (True,)), None, None, None
        out = torch.empty_like(packed)
        _launch(_attend_back, packed, (packed, grad.contiguous(), out), *ctx.rest)
        return out, None, None, None


def _plain_attention(packed: Tensor, *, heads: int, causal: bool) -> Tensor:
    """The same attention as operations that autograd knows."""
    query, key, value = packed.view(*packed.shape[:2], 3, heads, -1).permute(2, 0, 3, 1, 4)
    scores = query @ key.transpose(2, 3) * query.shape[-1] ** -0.5
    if causal:
        later = torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    return (scores.softmax(-1) @ value).transpose(1, 2).flatten(2)


def _launch(
    kernel: Any, packed: Tensor, tensors: tuple[Tensor, ...], heads: int, causal: bool, how: Arithmetic
) -> None:
    examples, length, width = packed.shape
    own = width // 3 // heads
    block = max(16, triton.next_power_of_2(length))
    kernel[(examples * heads,)](
        *tensors, length, own**-0.5, H=heads, D=own, BL=block, BD=max(16, triton.next_power_of_2(own)),
        CAUSAL=causal, HOW=_PRODUCTS[how], num_warps=8 if block > 64 else 4,
    )  # fmt: skip


def fits(packed: Tensor, heads: int) -> bool:
    """Whether these kernels have this attention."""
    kinds = (torch.float32, torch.bfloat16)
    return packed.is_cuda and packed.dtype in kinds and _short(packed.shape, heads) and _room(packed.device) >= ROOM


@functools.cache
def _room(device: torch.device) -> int:
    """Bytes that one program may have for itself."""
    found = triton.runtime.driver.active.utils.get_device_properties(device.index or 0)
    return int(found["max_shared_mem"])


def _short(shape: torch.Size, heads: int) -> bool:
    return 0 < shape[1] <= LONGEST and 0 < shape[2] // 3 // heads <= WIDEST and shape[0] > 0


def short_attention(packed: Tensor, heads: int, *, causal: bool, how: Arithmetic) -> Tensor:
    """What each position of a sequence sees of it, `[N, L, E]`, of queries, keys and values `[N, L, 3 E]`."""
    out: Tensor = ShortAttention.apply(packed.contiguous(), heads, causal, how)
    return out
