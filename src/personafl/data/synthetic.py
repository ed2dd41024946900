"""Four interleaved classes in the plane, after FedPeWS's Synthetic-32K and -3.2K.

Tastan et al., "FedPeWS: Personalized Warmup via Subnetworks for Enhanced Heterogeneous Federated
Learning": four classes, each of four Gaussian clusters, features [x, y, x^2, y^2, xy], 8,000 or 800
training points per class. The paper does not publish centres and covariances, nor the size of its global test
set. Here the sixteen centres are a 4 x 4 grid of spacing 2 whose classes form a Latin square, so that every row
and column holds every class; the standard deviation is 0.3 in both directions; and the test part has a quarter
as many points as the training part. Every call gives the same points.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from personafl.core import rng
from personafl.data.dataset import Source, official_test_mask

_CLASSES = np.array([[0, 1, 2, 3], [2, 3, 0, 1], [1, 0, 3, 2], [3, 2, 1, 0]])  # class of the cluster at (row, column)


def _planar(name: str, per_class: int, test_per_class: int = 0) -> Source:
    draw = rng.generator(0, "synthetic")
    x, y = _points(draw, per_class // 4)
    x_test, y_test = _points(draw, test_per_class // 4)
    features, labels = torch.from_numpy(np.concatenate([x, x_test])), torch.from_numpy(np.concatenate([y, y_test]))
    mask = official_test_mask(len(y), len(y_test)) if test_per_class else None
    return Source(name, features, labels, 4, test=mask, model="pews-mlp")


def _points(draw: np.random.Generator, each: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Features and classes of so many points of every cluster."""
    features = np.empty((16 * each, 5), np.float32)
    for cluster, (row, column) in enumerate(np.ndindex(4, 4)):
        x, y = (np.array([column, row]) * 2.0 - 3.0 + draw.normal(0, 0.3, (each, 2))).T  # centred at 0
        features[cluster * each : (cluster + 1) * each] = np.stack([x, y, x * x, y * y, x * y], 1)
    return features, np.repeat(_CLASSES.ravel(), each)


def synthetic_32k() -> Source:
    """32,000 training points, 8,000 of each class; and 8,000 test points."""
    return _planar("synthetic-32k", 8000, 2000)


def synthetic_3_2k() -> Source:
    """3,200 training points, 800 of each class; and 800 test points."""
    return _planar("synthetic-3.2k", 800, 200)


def synthetic_1m() -> Source:
    """1,000,000 points of the same kind, for a hundred thousand clients."""
    return _planar("synthetic-1m", 250_000)


def synthetic_10m() -> Source:
    """10,000,000 points of the same kind, for a million clients."""
    return _planar("synthetic-10m", 2_500_000)
