"""Four interleaved classes in the plane, after FedPeWS's Synthetic-32K and -3.2K.

Tastan et al., "FedPeWS: Personalized Warmup via Subnetworks for Enhanced Heterogeneous Federated
Learning": four classes, each of four Gaussian clusters, features [x, y, x^2, y^2, xy], 8,000 or 800
points per class. The paper does not publish centres and covariances. Here the sixteen centres are a 4 x 4
grid of spacing 2 whose classes form a Latin square, so that every row and column holds every class; the
standard deviation is 0.3 in both directions. Every call gives the same points.
"""

from __future__ import annotations

import numpy as np
import torch

from personafl.core import rng
from personafl.data.federated import Source

_CLASSES = np.array([[0, 1, 2, 3], [2, 3, 0, 1], [1, 0, 3, 2], [3, 2, 1, 0]])  # class of the cluster at (row, column)


def _planar(name: str, per_class: int) -> Source:
    draw = rng.generator(0, "synthetic")
    row, column = np.divmod(np.arange(16), 4)
    centres = np.stack([column, row], 1) * 2.0 - 3.0  # [16, 2], centred at 0
    which = np.repeat(np.arange(16), per_class // 4)
    points = centres[which] + draw.normal(0, 0.3, (len(which), 2))
    x, y = points.T
    features = np.stack([x, y, x * x, y * y, x * y], 1)
    labels = _CLASSES[row[which], column[which]]
    return Source(name, torch.tensor(features, dtype=torch.float32), torch.tensor(labels), 4, model="pews-mlp")


def synthetic_32k() -> Source:
    """32,000 points: 8,000 of each class."""
    return _planar("synthetic-32k", 8000)


def synthetic_3_2k() -> Source:
    """3,200 points: 800 of each class."""
    return _planar("synthetic-3.2k", 800)
