"""The small federation that engine and references play in."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from personafl.core.types import Training
from personafl.data import Federation, Source
from personafl.models import CNN, MLP

CLASSES = 4
SIZES = (17, 12, 9, 6, 2)  # rows per client; three quarters of them for training: 13, 9, 7, 4, 1
TRAINING = Training(
    num_rounds=3, join_ratio=0.6, local_epochs=2, batch_size=4, lr=0.2, lr_decay=0.9, precision="float64", seed=0
)


def federation_of(shape: tuple[int, ...], sizes: tuple[int, ...] = SIZES) -> Federation:
    """Overlapping clusters, one per class; every client has mostly two classes."""
    g = torch.Generator().manual_seed(11)
    centres = torch.randn(CLASSES, *shape, generator=g)
    labels, first, parts = [], 0, []
    for c, size in enumerate(sizes):
        anything, own = torch.randint(CLASSES, (size,), generator=g), torch.randint(2, (size,), generator=g)
        labels.append(torch.where(torch.rand(size, generator=g) < 0.15, anything, (c + own) % CLASSES))
        parts.append(np.arange(first, first + size))
        first += size
    y = torch.cat(labels)
    x = centres[y] + 1.2 * torch.randn(len(y), *shape, generator=g)
    return Federation.build(Source("clusters", x, y, CLASSES), parts, seed=5, test_share=0.25)


def world(kind: str, sizes: tuple[int, ...] = SIZES) -> tuple[nn.Module, Federation]:
    """A network and a federation for it: an MLP, a CNN, or an MLP most of whose first units never fire."""
    torch.manual_seed(7)
    if kind == "cnn":
        return CNN((1, 8, 8), (3, 4), (10,), CLASSES, kernel=3, padding=1), federation_of((1, 8, 8), sizes)
    module = MLP(8, 14, 12, CLASSES)
    if kind == "idle":
        # Zero gradients, and weights that stay as equal as they begin: powers of two, whose means are exact.
        with torch.no_grad():
            module.get_parameter("layers.0.bias")[4:] = -64
            module.get_parameter("layers.0.weight")[4:] = 1 / 8
            module.get_parameter("layers.1.weight")[:, 4:] = 1 / 8
    return module, federation_of((8,), sizes)
