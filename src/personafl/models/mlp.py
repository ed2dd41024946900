"""Fully connected networks."""

from __future__ import annotations

from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn


class MLP(nn.Module):
    """Linear layers with ReLU between them; the input is flattened."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(i, o) for i, o in pairwise(sizes[:-1]))
        self.head = nn.Linear(sizes[-2], sizes[-1])

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        for layer in self.layers:
            x = F.relu(layer(x))
        out: Tensor = self.head(x)
        return out
