"""Fully connected networks."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor, nn

from personafl.models.layers import linears


class MLP(nn.Module):
    """Linear layers with ReLU between them; the input is flattened."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(i, o) for i, o in pairwise(sizes[:-1]))
        self.head = nn.Linear(sizes[-2], sizes[-1])

    def forward(self, x: Tensor) -> Tensor:
        return linears([*self.layers, self.head], x.flatten(1))
