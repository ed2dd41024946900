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
from personafl.data.dataset import Source

_CLASSES = np.array([[0, 1, 2, 3], [2, 3, 0, 1], [1, 0, 3, 2], [3, 2, 1, 0]])  # class of the cluster at (row, column)


def _planar(name: str, per_class: int) -> Source:
    draw = rng.generator(0, "synthetic")
    each = per_class // 4
    features = np.empty((16 * each, 5), np.float32)
    for cluster, (row, column) in enumerate(np.ndindex(4, 4)):
        x, y = (np.array([column, row]) * 2.0 - 3.0 + draw.normal(0, 0.3, (each, 2))).T  # centred at 0
        features[cluster * each : (cluster + 1) * each] = np.stack([x, y, x * x, y * y, x * y], 1)
    labels = np.repeat(_CLASSES.ravel(), each)
    return Source(name, torch.from_numpy(features), torch.from_numpy(labels), 4, model="pews-mlp")


def synthetic_32k() -> Source:
    """32,000 points: 8,000 of each class."""
    return _planar("synthetic-32k", 8000)


def synthetic_3_2k() -> Source:
    """3,200 points: 800 of each class."""
    return _planar("synthetic-3.2k", 800)


def synthetic_1m() -> Source:
    """1,000,000 points of the same kind, for a hundred thousand clients."""
    return _planar("synthetic-1m", 250_000)


def synthetic_10m() -> Source:
    """10,000,000 points of the same kind, for a million clients."""
    return _planar("synthetic-10m", 2_500_000)
