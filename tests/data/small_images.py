"""Images that tests of corruptions share."""

import torch

from personafl.core import rng


def keys(count, seed=0):
    return rng.key(seed, "test", torch.arange(count))


def constant(byte, count=2, channels=3, size=32):
    return torch.full((count, channels, size, size), byte, dtype=torch.uint8)


def impulse(size=32):
    """One white pixel in the middle of black."""
    x = torch.zeros(1, 1, size, size)
    x[0, 0, size // 2, size // 2] = 1
    return x


def ramp(size=32):
    """Brighter by one byte from column to column."""
    return torch.arange(size, dtype=torch.uint8).expand(1, 3, size, size).contiguous()
