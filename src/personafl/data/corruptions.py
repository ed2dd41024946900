"""The corruptions of CIFAR-10-C at five severities, for any images, and rotation.

Hendrycks, Dietterich, "Benchmarking Neural Network Robustness to Common Corruptions and Perturbations", ICLR 2019.
`STANDARD` are the fifteen that the benchmark is scored by, which `all` and `per-client` mean; of the four further ones
that CIFAR-10-C comes with, Gaussian blur and speckle noise are here by name, as DM-PFL shows them. The parameters are
those of the CIFAR-10 version; lengths are pixels, but for the elastic transform's, which are shares
of the image. Operations are elementwise, or exact up to a rounding that hides the rest (the contrast's mean, JPEG's
transforms), so an image's result does not depend on its batch. They are done in float32. Draws are a
function of the image's key and the kind: severities share them, as degrees of shift do. Where the published code goes
through bytes, so does this. Departures:

- frost is a synthetic texture of each image's own in place of crops of photographs;
- normal numbers are one of 65,536 quantiles, so none lies beyond 4.4 deviations;
- the elastic transform is not rounded to 1/32 of a pixel, as OpenCV's affine step is.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from personafl.core import rng
from personafl.core.errors import UserError
from personafl.data import filters
from personafl.data.jpeg import jpeg_compression

SEVERITIES = (1, 2, 3, 4, 5)

# What each function below is called with, from severity 1 to 5.
PARAMETERS: dict[str, tuple[tuple[float, ...], ...]] = {
    "gaussian_noise": ((0.04,), (0.06,), (0.08,), (0.09,), (0.10,)),
    "shot_noise": ((500,), (250,), (100,), (75,), (50,)),
    "impulse_noise": ((0.01,), (0.02,), (0.03,), (0.05,), (0.07,)),
    "defocus_blur": ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1)),
    "glass_blur": ((0.05, 1, 1), (0.25, 1, 1), (0.4, 1, 1), (0.25, 1, 2), (0.4, 1, 2)),
    "motion_blur": ((6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5)),
    "zoom_blur": ((1.06,), (1.11,), (1.16,), (1.21,), (1.26,)),
    "snow": (
        (0.1, 0.2, 1, 0.6, 8, 3, 0.95),
        (0.1, 0.2, 1, 0.5, 10, 4, 0.9),
        (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
        (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85),
        (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
    ),
    "frost": ((1, 0.2), (1, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45)),
    "fog": ((0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75)),
    "brightness": ((0.05,), (0.1,), (0.15,), (0.2,), (0.3,)),
    "contrast": ((0.75,), (0.5,), (0.4,), (0.3,), (0.15,)),
    "elastic_transform": ((0, 0, 0.08), (0.05, 0.2, 0.07), (0.08, 0.06, 0.06), (0.1, 0.04, 0.05), (0.1, 0.03, 0.03)),
    "pixelate": ((0.95,), (0.9,), (0.85,), (0.75,), (0.65,)),
    "jpeg_compression": ((80,), (65,), (58,), (50,), (40,)),
    "speckle_noise": ((0.06,), (0.1,), (0.12,), (0.16,), (0.2,)),
    "gaussian_blur": ((0.4,), (0.6,), (0.7,), (0.8,), (1,)),
}


def corrupt(images: Tensor, kind: str, severity: int, keys: Tensor) -> Tensor:
    """Images `[N, C, H, W]`, bytes or floats in [0, 1], corrupted by the draws of their keys; bytes stay bytes."""
    if kind not in CORRUPTIONS:
        raise UserError(f"corruption {kind!r}: possible are {', '.join(CORRUPTIONS)}")
    if severity not in SEVERITIES:
        raise UserError(f"{kind}: severity {severity} is not one of 1 to 5")
    require_images(images, kind)
    if keys.shape != images.shape[:1] or keys.dtype != torch.int64:
        raise UserError(
            f"{kind}: {len(images)} images want as many int64 keys (rng.key), not {tuple(keys.shape)} {keys.dtype}"
        )
    if not len(images):
        return images.clone()
    function, parameters = CORRUPTIONS[kind], PARAMETERS[kind][severity - 1]
    own = rng.extend(keys.to(images.device), kind)

    def part(at: slice) -> Tensor:
        return _back(function(_unit(images[at]), own[at], *parameters).clamp(0, 1), images.dtype)

    # On a CPU, parts that fit in the cache and that PyTorch hardly divides further, one per thread: threads within
    # these small operations wait for each other longer than they work.
    size = max(1, (1 << 26 if images.is_cuda else 1 << 15) // images[0].numel())
    parts = [slice(i, i + size) for i in range(0, len(images), size)]
    threads = min(len(parts), 1 if images.is_cuda else torch.get_num_threads())
    if threads == 1:
        return torch.cat([part(at) for at in parts])
    with ThreadPoolExecutor(threads) as pool:
        return torch.cat(list(pool.map(part, parts)))


def rotate(images: Tensor, degrees: float | Tensor) -> Tensor:
    """Images `[N, C, H, W]` turned counter-clockwise about their centre, bilinearly, black coming in from outside.

    One angle for all or one per image; quarter turns of square images only move pixels.
    """
    require_images(images, "rotate", coloured=False)
    height, width = images.shape[2:]
    turn = torch.as_tensor(degrees, dtype=torch.float64, device=images.device).deg2rad().expand(len(images))
    y, x = filters.grid(height, width, images.device)
    y, x = y - (height - 1) / 2, x - (width - 1) / 2
    sin, cos = turn.sin().view(-1, 1, 1), turn.cos().view(-1, 1, 1)
    out = filters.sample(
        _unit(images), x * sin + y * cos + (height - 1) / 2, x * cos - y * sin + (width - 1) / 2, "black"
    )
    return _back(filters.round_to_byte(out) if images.dtype == torch.uint8 else out, images.dtype)


def require_images(images: Tensor, what: str, *, coloured: bool = True) -> None:
    """Refuse what are no images, in the words of who asked; `coloured` asks for one channel or three."""
    if images.dim() != 4:
        raise UserError(f"{what}: images must be [N, C, H, W], their shape is {tuple(images.shape)}")
    if images.dtype != torch.uint8:
        if not images.is_floating_point():
            raise UserError(f"{what}: images are {images.dtype}; possible are uint8 and floats in [0, 1]")
        if images.numel() and not (images.min() >= 0 and images.max() <= 1):
            raise UserError(
                f"{what}: float images must lie in [0, 1], these range from {float(images.min()):.3g} to "
                f"{float(images.max()):.3g}; give images that are not normalised"
            )
    if coloured and images.shape[1] not in (1, 3):
        raise UserError(
            f"{what}: images have {images.shape[1]} channels; possible are 1 (grey) and 3 (red, green, blue)"
        )


def _unit(images: Tensor) -> Tensor:
    """In [0, 1]."""
    return images.float() / 255 if images.dtype == torch.uint8 else images.float()


def _back(x: Tensor, dtype: torch.dtype) -> Tensor:
    """As the images came; to bytes by cutting off, as published, where a rounding error below a byte is that byte."""
    return filters.floor_to_byte(x).to(torch.uint8) if dtype == torch.uint8 else x.to(dtype)


# Draws


@functools.cache
def _quantiles() -> Tensor:
    """Of the normal distribution, at the middles of 65,536 equal parts."""
    middle = (torch.arange(1 << 16, dtype=torch.float64) + 0.5) / (1 << 16)
    quantiles: Tensor = torch.special.ndtri(middle)
    return quantiles.float()


def _normal(keys: Tensor, *shape: int) -> Tensor:
    """Normal numbers `[N, *shape]`; a lookup, since the last bits of a logarithm depend on the device and the batch."""
    count = math.prod(shape)
    places = rng.bits(keys, -(-count // 4)).view(torch.int16)[:, :count].int() + (1 << 15)
    return _quantiles().to(keys.device)[places].view(-1, *shape)


def _uniform(keys: Tensor, low: float, high: float, *shape: int) -> Tensor:
    return (rng.uniform(keys, math.prod(shape), torch.float32) * (high - low) + low).view(-1, *shape)


@functools.cache
def _poisson_table(peak: float) -> Tensor:
    """For the rates of the 256 bytes, `peak` for white: P(X <= k) in 2^-32 above byte * 2^32, all in one rising row."""
    rate = torch.arange(256, dtype=torch.float64).unsqueeze(1) * peak / 255
    k = torch.arange(int(peak + 8 * math.sqrt(peak) + 20), dtype=torch.float64)
    cumulative = (torch.xlogy(k, rate) - rate - torch.lgamma(k + 1)).exp().cumsum(1)
    cumulative[:, -1] = 1
    return (cumulative.clamp(max=1) * 2**32).round().long() + (torch.arange(256).unsqueeze(1) << 32)


def _poisson(keys: Tensor, x: Tensor, peak: float) -> Tensor:
    """Poisson numbers of rate `peak * x`: that of the byte below by a table, and that of the small rest."""
    table = _poisson_table(peak)
    byte = filters.floor_to_byte(x)
    word = rng.bits(keys, -(-x[0].numel() // 2)).view(torch.int32)[:, : x[0].numel()].long() & (2**32 - 1)
    row = byte.long()
    found = torch.searchsorted(table.view(-1).to(x.device), (row << 32) + word.view_as(row), right=True)
    count = found - row * table.shape[1]
    rest = x * 255 - byte
    rest = torch.where(rest > 2**-9, rest, 0).double() * peak / 255
    if rest.any():  # never of bytes
        draw = rng.uniform(rng.extend(keys, "rest"), x[0].numel()).view_as(x)
        weight = (-rest).exp()
        cumulative = weight
        for k in range(1, 24):  # the rate is below 2: a 24th event has probability 1e-17
            count = count + (draw >= cumulative)
            weight = weight * rest / k
            cumulative = cumulative + weight
    return count.to(x.dtype)


def _plasma(keys: Tensor, size: int, decay: float) -> Tensor:
    """Diamond-square height maps in [0, 1], `[N, S, S]` with S the next power of two, one draw for each cell."""
    side = max(2, 1 << (size - 1).bit_length())
    draw = _uniform(keys, -1, 1, side, side)
    out = torch.zeros_like(draw)
    step, wobble = side, 100.0
    while step >= 2:
        half = slice(step // 2, None, step)
        whole = slice(None, None, step)
        corner = out[:, whole, whole]
        square = corner + corner.roll(-1, 1)
        square = square + square.roll(-1, 2)
        out[:, half, half] = square / 4 + draw[:, half, half] * wobble**2
        middle = out[:, half, half]
        across = middle + middle.roll(1, 1) + corner + corner.roll(-1, 2)
        down = middle + middle.roll(1, 2) + corner + corner.roll(-1, 1)
        out[:, whole, half] = across / 4 + draw[:, whole, half] * wobble**2
        out[:, half, whole] = down / 4 + draw[:, half, whole] * wobble**2
        step, wobble = step // 2, wobble / decay
    out = out - out.amin((1, 2), keepdim=True)
    return out / out.amax((1, 2), keepdim=True)


# Corruptions: images `[N, C, H, W]` in [0, 1], their keys, and the parameters; [0, 1] is restored afterwards.


def gaussian_noise(x: Tensor, keys: Tensor, deviation: float) -> Tensor:
    """Add normal noise."""
    return x + _normal(keys, *x.shape[1:]) * deviation


def shot_noise(x: Tensor, keys: Tensor, photons: float) -> Tensor:
    """Count Poisson events, `photons` of them expected in white."""
    return _poisson(keys, x, photons) / photons


def impulse_noise(x: Tensor, keys: Tensor, share: float) -> Tensor:
    """Set a share of the values, each channel for itself, to black or white with equal probability."""
    count = x[0].numel()
    word = rng.bits(keys, -(-count // 2)).view(torch.int32)[:, :count].view_as(x)
    edge = 2**31 - round(share / 2 * 2**32)
    return x.masked_fill(word < -edge, 0).masked_fill(word >= edge, 1)


def defocus_blur(x: Tensor, keys: Tensor, radius: float, smoothing: float) -> Tensor:
    """Average over a smoothed disc."""
    disc = filters.disc_kernel(radius, smoothing)
    reach = int(radius) + 2
    wide = filters.padded(filters.padded(x, -2, reach, "mirror"), -1, reach, "mirror")
    out = torch.zeros_like(x)
    for down, right, weight in disc:
        out += wide[..., down : down + x.shape[2], right : right + x.shape[3]] * weight
    return out


def glass_blur(x: Tensor, keys: Tensor, sigma: float, distance: float, passes: float) -> Tensor:
    """Blur, let pixels take the place of neighbours, and blur again.

    The published code means to swap pixels from the lower right to the upper left, but swaps views of one array: the
    first pixel is overwritten and the second stays. Since its neighbour lies up or left, untouched so far, a pass is
    one lookup. Pixels in the first 1 + `distance` rows and columns stay.
    """
    n, channels, height, width = x.shape
    far = int(distance)
    x = filters.floor_to_byte(filters.gaussian(x, sigma, 4, "clamp")) / 255
    y, xs = filters.grid(height, width, x.device)
    moves = ((y > far) & (xs > far)).float()
    for i in range(int(passes)):
        # -distance to distance - 1, as NumPy's randint; up to `distance` = 1 the source is one not yet overwritten
        shift = _uniform(rng.extend(keys, i), -far, far, 2, height, width).floor() * moves
        at = (y + shift[:, 0]).long() * width + (xs + shift[:, 1]).long()
        x = x.flatten(2).gather(2, at.view(n, 1, -1).expand(-1, channels, -1)).view_as(x)
    return filters.gaussian(x, sigma, 4, "clamp")


def motion_blur(x: Tensor, keys: Tensor, radius: float, sigma: float) -> Tensor:
    """Smear in one direction within 45 degrees of the horizontal."""
    return filters.motion(x, _uniform(keys, -45, 45, 1), radius, sigma)


def zoom_blur(x: Tensor, keys: Tensor, end: float) -> Tensor:
    """The mean of the image and of itself enlarged by 1, 1.01, ... up to `end`."""
    factors = np.arange(1, end, 0.01)
    out = x.clone()
    for factor in factors:
        out += filters.zoom(x, float(factor))
    return out / (len(factors) + 1)


def snow(
    x: Tensor,
    keys: Tensor,
    mean: float,
    deviation: float,
    zoom: float,
    threshold: float,
    radius: float,
    sigma: float,
    keep: float,
) -> Tensor:
    """Whiten, and add falling flakes: normal noise enlarged, cut off below a threshold, smeared downwards."""
    flakes = filters.zoom(_normal(keys, 1, *x.shape[2:]) * deviation + mean, zoom)
    flakes = filters.floor_to_byte(torch.where(flakes < threshold, 0, flakes).clamp(0, 1)) / 255
    flakes = filters.motion(flakes, _uniform(rng.extend(keys, "angle"), -135, -45, 1), radius, sigma)
    white = torch.maximum(x, _grey(x) * 1.5 + 0.5)
    return x * keep + white * (1 - keep) + flakes + flakes.flip((2, 3))


def frost(x: Tensor, keys: Tensor, keep: float, share: float) -> Tensor:
    """Add ice: the bright contours of a height map, bluish where there is colour, instead of photographs."""
    height, width = x.shape[2:]
    heights = _plasma(keys, max(height, width), 2)[:, None, :height, :width]
    vein = (heights * 3 % 1 * 2 - 1).abs()  # from 1 at three heights to 0 between them
    ice = vein * vein * 0.7 + 0.3
    if x.shape[1] == 3:
        ice = ice * torch.tensor([0.85, 0.95, 1.0], device=x.device).view(3, 1, 1)
    return x * keep + ice * share


def fog(x: Tensor, keys: Tensor, thickness: float, decay: float) -> Tensor:
    """Add a height map, then scale back to the image's brightest value."""
    height, width = x.shape[2:]
    heights = _plasma(keys, max(height, width), decay)[:, None, :height, :width]
    peak = x.amax((1, 2, 3), keepdim=True)
    return (x + heights * thickness) * (peak / (peak + thickness))


def brightness(x: Tensor, keys: Tensor, more: float) -> Tensor:
    """Add to the value of hue, saturation, value: the largest channel grows, the others in proportion."""
    value = x.amax(1, keepdim=True)
    raised = (value + more).clamp(max=1)
    return torch.where(value > 0, x * (raised / value), raised)


def contrast(x: Tensor, keys: Tensor, share: float) -> Tensor:
    """Move towards each channel's mean."""
    mean = x.double().mean((2, 3), keepdim=True).to(x.dtype)  # float64 sums of bytes are exact
    return (x - mean) * share + mean


def elastic_transform(x: Tensor, keys: Tensor, stretch: float, smoothing: float, skew: float) -> Tensor:
    """Map three points of a square to shifted ones, then displace every pixel by a smooth random field."""
    height, width = x.shape[2:]
    size = min(height, width)
    y, xs = filters.grid(height, width, x.device)
    # The affine map that sends the shifted points b back to a, by Cramer's rule; x before y.
    centre = torch.tensor([width // 2, height // 2], dtype=torch.float64, device=x.device)
    corners = torch.tensor([[1.0, 1.0], [1.0, -1.0], [-1.0, -1.0]], dtype=torch.float64, device=x.device)
    a = (centre + corners * (size // 3)).expand(len(x), 3, 2)
    b = a + _uniform(rng.extend(keys, "skew"), -skew * size, skew * size, 3, 2)
    a, b = (p[..., None, None].movedim(0, 2) for p in (a, b))  # [3, 2, N, 1, 1]
    (a1, a2), (b1, b2) = (a[0] - a[1], a[2] - a[1]), (b[0] - b[1], b[2] - b[1])
    right, down = xs - b[1, 0], y - b[1, 1]
    area = b1[0] * b2[1] - b1[1] * b2[0]
    first, second = (right * b2[1] - down * b2[0]) / area, (down * b1[0] - right * b1[1]) / area
    at = [a[1, i] + first * a1[i] + second * a2[i] for i in (0, 1)]
    x = filters.sample(x, at[1], at[0], "mirror")
    if stretch:
        field = _uniform(rng.extend(keys, "field"), -1, 1, 2, height, width)
        field = filters.gaussian(field, smoothing * size, 3, "symmetric") * (stretch * size)
        x = filters.sample(x, y + field[:, 0], xs + field[:, 1], "symmetric")
    return x


def pixelate(x: Tensor, keys: Tensor, share: float) -> Tensor:
    """Shrink to a share of the size by Pillow's box filter, and enlarge again by repeating pixels."""
    x = filters.round_to_byte(x)
    for dim in (-1, -2):
        size = x.shape[dim]
        small = max(1, int(size * share))
        scale = size / small
        middle = (np.arange(small) + 0.5) * scale
        # Pillow takes a pixel whole or not at all: those whose centres lie within half a new pixel of the middle.
        offset = np.arange(size) + 0.5 - middle[:, None]  # [small, size]
        taken = (offset > -scale / 2) & (offset <= scale / 2)
        nearest = ((np.arange(size) + 0.5) * small / size).astype(np.int64)
        count = taken.sum(1)
        first = taken.argmax(1)
        view = (-1, 1) if dim == -2 else (-1,)
        out = torch.zeros_like(x)
        for i in range(int(count.max())):
            weight = torch.tensor(((i < count) / count)[nearest], dtype=x.dtype, device=x.device).view(view)
            at = torch.tensor(np.minimum(first + i, size - 1)[nearest], device=x.device)
            out += x.index_select(dim, at) * weight
        x = filters.round_to_byte(out)
    return x


def speckle_noise(x: Tensor, keys: Tensor, deviation: float) -> Tensor:
    """Add normal noise in proportion to each value."""
    return x + x * (_normal(keys, *x.shape[1:]) * deviation)


def gaussian_blur(x: Tensor, keys: Tensor, sigma: float) -> Tensor:
    """Average by a Gaussian, cut off at four deviations."""
    return filters.gaussian(x, sigma, 4, "clamp")


def _grey(x: Tensor) -> Tensor:
    if x.shape[1] == 1:
        return x
    return x[:, :1] * 0.299 + x[:, 1:2] * 0.587 + x[:, 2:] * 0.114


CORRUPTIONS: dict[str, Callable[..., Tensor]] = {
    f.__name__: f
    for f in (
        gaussian_noise,
        shot_noise,
        impulse_noise,
        defocus_blur,
        glass_blur,
        motion_blur,
        zoom_blur,
        snow,
        frost,
        fog,
        brightness,
        contrast,
        elastic_transform,
        pixelate,
        jpeg_compression,
        speckle_noise,
        gaussian_blur,
    )
}

STANDARD = tuple(CORRUPTIONS)[:15]
"""What `evaluation.corruptions = "all"` and `data.corruption = "per-client"` mean."""
