"""Blurs, shifts and lookups on stacks of images `[N, C, H, W]`, of which each comes out the same in every batch."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

Border = Literal["clamp", "mirror", "symmetric", "black"]
Kernel = Sequence[float]


def floor_to_byte(x: Tensor) -> Tensor:
    """The whole bytes of images in [0, 1].

    What is a whole byte but for the rounding of float32, some 1e-4 after a hundred sums, is one, on any device. Glass
    blur's narrowest filter takes multiples of 3.3e-4 away, and those count, as in the published code.
    """
    return (x * 255 + 2**-12).floor()


def round_to_byte(x: Tensor) -> Tensor:
    """Rounded to bytes, still in [0, 1]."""
    return (x * 255 + 0.5).floor() / 255


def grid(height: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Row and column of each pixel, `[H, 1]` and `[1, W]`."""
    return torch.arange(height, device=device).unsqueeze(1), torch.arange(width, device=device).unsqueeze(0)


def border_index(at: Tensor, size: int, border: Border) -> Tensor:
    """The pixels that stand for those beyond the border: aaa|abc (clamp), dcb|abc (mirror), cba|abc (symmetric)."""
    if border == "mirror" and size > 1:
        at = at % (2 * size - 2)
        return torch.minimum(at, 2 * size - 2 - at)
    if border == "symmetric":
        at = at % (2 * size)
        return torch.minimum(at, 2 * size - 1 - at)
    return at.clamp(0, size - 1)


def gaussian_kernel(sigma: float, reach: int) -> list[float]:
    """A Gaussian's weights at -reach to reach, summing to 1."""
    weights = [math.exp(-0.5 * (i / sigma) ** 2) if i else 1.0 for i in range(-reach, reach + 1)]
    return [w / sum(weights) for w in weights]


def padded(x: Tensor, dim: int, reach: int, border: Border) -> Tensor:
    size = x.shape[dim]
    return x.index_select(dim, border_index(torch.arange(-reach, size + reach, device=x.device), size, border))


def blur(x: Tensor, kernel: Kernel, border: Border) -> Tensor:
    """The same symmetric filter along rows and columns.

    Products and sums are separate steps here and below: fused ones would round by the place in the batch.
    """
    for dim in (-2, -1):
        size = x.shape[dim]
        wide = padded(x, dim, len(kernel) // 2, border)
        x = wide.narrow(dim, 0, size) * kernel[0]
        for i, weight in enumerate(kernel[1:], 1):
            x += wide.narrow(dim, i, size) * weight
    return x


def gaussian(x: Tensor, sigma: float, truncate: float, border: Border) -> Tensor:
    return blur(x, gaussian_kernel(sigma, int(truncate * sigma + 0.5)), border)


@functools.cache
def disc_kernel(radius: float, sigma: float) -> list[tuple[int, int, float]]:
    """A disc smoothed by a 3 x 3 Gaussian: offsets down and right, and weights."""
    reach = int(radius) + 2  # a rim of zeros
    y, x = grid(2 * reach + 1, 2 * reach + 1, torch.device("cpu"))
    disc = ((y - reach) ** 2 + (x - reach) ** 2 <= radius**2).double()
    disc = blur(disc / disc.sum(), gaussian_kernel(sigma, 1), "clamp")
    return [(int(i), int(j), float(disc[i, j])) for i, j in disc.nonzero()]


def motion(x: Tensor, angle: Tensor, radius: float, sigma: float) -> Tensor:
    """ImageMagick's motion blur: half a Gaussian over 2 * radius + 1 pixels in each image's direction in degrees."""
    n, channels, height, width = x.shape
    kernel = [math.exp(-0.5 * (i / sigma) ** 2) for i in range(int(2 * radius) + 1)]
    turn = angle.double().deg2rad().view(-1, 1, 1)
    sin, cos = turn.sin(), turn.cos()
    y, xs = grid(height, width, x.device)
    flat, out = x.flatten(2), torch.zeros_like(x).flatten(2)
    for i, weight in enumerate(kernel):
        down, right = (i * sin - 0.5).ceil().long(), (i * cos - 0.5).ceil().long()
        at = (y + down).clamp(0, height - 1) * width + (xs + right).clamp(0, width - 1)  # [N, H, W]
        out += flat.gather(2, at.view(n, 1, -1).expand(-1, channels, -1)) * (weight / sum(kernel))
    return round_to_byte(out.view_as(x))


def zoom(x: Tensor, factor: float) -> Tensor:
    """The middle enlarged linearly to the image's size, its corner pixels staying corner pixels."""
    for dim in (-2, -1):
        size = x.shape[dim]
        crop = math.ceil(size / factor)
        full = max(size, round(crop * factor))
        at = (np.arange(size) + (full - size) // 2) * (max(crop - 1, 0) / max(full - 1, 1))
        low = np.minimum(at.astype(np.int64), crop - 1)
        high = np.minimum(low + 1, crop - 1)
        first = (size - crop) // 2
        share = torch.tensor(at - low, dtype=x.dtype, device=x.device)
        share = share.unsqueeze(-1) if dim == -2 else share
        low_at, high_at = (torch.tensor(i + first, device=x.device) for i in (low, high))
        x = x.index_select(dim, low_at) * (1 - share) + x.index_select(dim, high_at) * share
    return x


def sample(x: Tensor, rows: Tensor, columns: Tensor, border: Border) -> Tensor:
    """Bilinear values `[N, C, ...]` at fractional rows and columns `[N, ...]`."""
    n, channels, height, width = x.shape
    flat, out = x.flatten(2), x.new_zeros(n, channels, *rows.shape[1:])
    top, left = rows.floor(), columns.floor()
    down, right = (rows - top).to(x.dtype), (columns - left).to(x.dtype)
    for i, vertical in enumerate((1 - down, down)):
        y = top.long() + i
        for j, horizontal in enumerate((1 - right, right)):
            xs = left.long() + j
            weight = vertical * horizontal
            if border == "black":
                weight = weight * ((y >= 0) & (y < height) & (xs >= 0) & (xs < width))
            at = border_index(y, height, border) * width + border_index(xs, width, border)
            value = flat.gather(2, at.view(n, 1, -1).expand(-1, channels, -1)).view_as(out)
            out += value * weight.unsqueeze(1)
    return out
