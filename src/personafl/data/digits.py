"""Handwritten digits, 8 x 8 pixels, embedded in scikit-learn: nothing is downloaded.

E. Alpaydin, C. Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning Repository, 1998.
"""

from __future__ import annotations

import torch

from personafl.data.dataset import Source


def digits() -> Source:
    """1,797 grey images of ten digits, scaled to [0, 1]."""
    from sklearn.datasets import load_digits  # slow to import

    raw = load_digits()
    x = torch.tensor(raw.images, dtype=torch.float32).unsqueeze(1) / 16  # [N, 1, 8, 8]
    return Source("digits", x, torch.tensor(raw.target, dtype=torch.int64), 10, model="mlp")
