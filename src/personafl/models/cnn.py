"""Convolutional networks."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn


class CNN(nn.Module):
    """Convolutions, each with ReLU and 2x2 max-pooling, then linear layers with ReLU between them."""

    def __init__(
        self,
        image: tuple[int, int, int],
        channels: tuple[int, ...],
        hidden: tuple[int, ...],
        classes: int,
        kernel: int,
        padding: int,
    ) -> None:
        super().__init__()
        depth = (image[0], *channels)
        self.convs = nn.ModuleList(nn.Conv2d(i, o, kernel, padding=padding) for i, o in pairwise(depth))
        with torch.no_grad():
            features = self.encode(torch.zeros(1, *image)).shape[1]
        sizes = (features, *hidden)
        self.fcs = nn.ModuleList(nn.Linear(i, o) for i, o in pairwise(sizes))
        self.head = nn.Linear(sizes[-1], classes)

    def encode(self, x: Tensor) -> Tensor:
        for conv in self.convs:
            x = nn.functional.max_pool2d(conv(x).relu(), 2)
        return x.flatten(1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.encode(x)
        for fc in self.fcs:
            x = fc(x).relu()
        out: Tensor = self.head(x)
        return out
