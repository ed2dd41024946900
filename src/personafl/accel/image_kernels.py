"""Minibatches of images in one launch (Triton, for GPUs): fetched, cut out and turned anew, and normalised.

`data/batches.py` says what an augmented image is; here is the same arithmetic, in the numbers of the same streams.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from personafl.core import rng

_BLOCK = {"BLOCK": 1024, "num_warps": 4}
_GOLDEN, _MIX1, _MIX2 = (tl.constexpr(n) for n in (rng.GOLDEN, rng.MIX1, rng.MIX2))


@triton.jit
def _mix(z):
    """`rng._mix` of one number."""
    z = (z ^ ((z >> 30) & 0x3FFFFFFFF)) * _MIX1
    z = (z ^ ((z >> 27) & 0x1FFFFFFFFF)) * _MIX2
    return z ^ ((z >> 31) & 0x1FFFFFFFF)


@triton.jit
def _uniform(key, place):
    """The number at a place of a stream, in [0, 1)."""
    word = _mix(key + place * _GOLDEN)
    return ((word >> 11) & 0x1FFFFFFFFFFFFF).to(tl.float64) * 1.1102230246251565e-16  # 2^-53


@triton.jit(do_not_specialize=["purpose", "size", "each"])
def _augment(
    x, rows, keys, table, out, purpose, size, each,
    H: tl.constexpr, W: tl.constexpr, PADDING: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A block of one image: pixel by pixel from where the cut and the turn have it, black outside."""
    at = tl.program_id(1).to(tl.int64)  # of the minibatch's images, client by client
    key = _mix((tl.load(keys + at // size) ^ purpose) + _GOLDEN)
    place = 3 * (at % size)
    down = (_uniform(key, place + 1) * (2 * PADDING + 1)).to(tl.int32) - PADDING
    right = (_uniform(key, place + 2) * (2 * PADDING + 1)).to(tl.int32) - PADDING
    turned = _uniform(key, place + 3) < 0.5
    pixel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = pixel < each
    channel = pixel // (H * W)
    row = pixel // W % H + down
    column = pixel % W
    column = tl.where(turned, W - 1 - column, column) + right
    there = real & (row >= 0) & (row < H) & (column >= 0) & (column < W)
    image = x + tl.load(rows + at) * each
    byte = tl.load(image + channel * (H * W) + row * W + column, mask=there, other=0).to(tl.int32)
    tl.store(out + at * each + pixel, tl.load(table + channel * 256 + byte, mask=real), mask=real)


def augmented(x: Tensor, rows: Tensor, keys: Tensor, table: Tensor, padding: int) -> Tensor:
    """Bytes `x` `[N, c, H, W]` at rows `[k, B]`, as the streams `keys` `[k]` cut and turn them: `[k, B, c, H, W]`.

    What a byte is for a model says the table, `[c, 256]`.
    """
    clients, size = rows.shape
    channels, height, width = x.shape[1:]
    each = channels * height * width
    out = torch.empty(clients, size, channels, height, width, dtype=table.dtype, device=x.device)
    _augment[triton.cdiv(each, _BLOCK["BLOCK"]), clients * size](
        x, rows.contiguous(), keys.contiguous(), table, out, rng.purpose_key("augment"), size, each,
        H=height, W=width, PADDING=padding, **_BLOCK,
    )  # fmt: skip
    return out
