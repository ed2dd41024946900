"""Several image sets as one, each with labels of its own: CIFAR-MNIST and Path-OCT-Tissue, after FedPeWS.

Tastan et al., "FedPeWS: Personalized Warmup via Subnetworks for Enhanced Heterogeneous Federated Learning":
20 labels, 400 training and 200 test images of each, MNIST resized to 32 x 32 and repeated to three channels, one
client per source. For Path-OCT-Tissue the paper says "same details". Which images are taken is not published:
here a draw that is the same in every call.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from personafl.core import rng
from personafl.core.errors import UserError
from personafl.data.dataset import Source
from personafl.data.images import cifar10, medmnist, mnist

Take = tuple[int, int]
"""Training and test images of each class."""


def colour32(x: Tensor) -> Tensor:
    """Byte images `[N, 1 or 3, h, w]` as `[N, 3, 32, 32]`: bilinear, then grey repeated."""
    if x.shape[-2:] != (32, 32):
        x = F.interpolate(x.float(), (32, 32), mode="bilinear", align_corners=False).round().to(torch.uint8)
    return x.expand(-1, 3, -1, -1).contiguous()


def join(name: str, parts: Sequence[Source], take: Take | None = (400, 200)) -> Source:
    """Image sets with official test sets behind one another: labels count on, `sources` tells them apart."""
    xs, ys, tests, sources = [], [], [], []
    first = 0
    for source, part in enumerate(parts):
        assert part.test is not None
        rows = np.arange(len(part.y)) if take is None else _draw(name, part, take, first)
        xs.append(colour32(part.x[torch.from_numpy(rows)]))
        ys.append(part.y[torch.from_numpy(rows)] + first)
        tests.append(part.test[rows])
        sources.append(np.full(len(rows), source))
        first += part.classes
    return Source(
        name,
        torch.cat(xs),
        torch.cat(ys),
        first,
        "pews-cnn",
        test=np.concatenate(tests),
        sources=np.concatenate(sources),
    )


def _draw(name: str, part: Source, take: Take, first: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Rows of so many training and test images of every class, in the order of the set."""
    labels, rows = part.y.numpy(), []
    assert part.test is not None
    for k in range(part.classes):
        for late, wanted in enumerate(take):
            pool = np.flatnonzero((labels == k) & (part.test == bool(late)))
            if len(pool) < wanted:
                split = "test" if late else "training"
                raise UserError(
                    f"{name}: class {k} of {part.name} has {len(pool)} {split} images, {wanted} are asked for; "
                    "take fewer, or take=None for all"
                )
            rows.append(rng.generator(0, name, first + k, late).choice(pool, wanted, replace=False))
    return np.sort(np.concatenate(rows))


def cifar_mnist(take: Take | None = (400, 200)) -> Source:
    """CIFAR-10 (labels 0-9, source 0) and MNIST (10-19, source 1), 32 x 32 in colour; `take=None` for all images."""
    return join("cifar-mnist", [cifar10(), mnist()], take)


def pot_mnist(take: Take | None = (400, 200)) -> Source:
    """PathMNIST (labels 0-8), OCTMNIST (9-12) and TissueMNIST (13-20), 32 x 32 in colour; `take=None` for all."""
    return join("pot-mnist", [medmnist(n) for n in ("pathmnist", "octmnist", "tissuemnist")], take)
