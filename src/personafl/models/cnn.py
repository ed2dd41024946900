"""Convolutional networks."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from personafl.core.errors import UserError


class CNN(nn.Module):
    """Convolutions, each with ReLU and 2x2 max-pooling, then linear layers with ReLU between them.

    `kernel` and `padding` are one number, or one per convolution; `pooled` says which convolutions have the pooling,
    by default all. `map_dropout` is the share of feature maps dropped behind the last convolution, `dropout` the
    shares of inputs dropped before the first linear layers.
    """

    def __init__(
        self,
        image: tuple[int, int, int],
        channels: tuple[int, ...],
        hidden: tuple[int, ...],
        classes: int,
        kernel: int | tuple[int, ...],
        padding: int | tuple[int, ...],
        *,
        pooled: tuple[bool, ...] | None = None,
        activation: Callable[[Tensor], Tensor] = F.relu,
        map_dropout: float = 0.0,
        dropout: tuple[float, ...] = (),
        head_bias: bool = True,
    ) -> None:
        super().__init__()
        depth = (image[0], *channels)
        shapes = zip(pairwise(depth), _each(kernel, channels), _each(padding, channels), strict=True)
        self.convs = nn.ModuleList(nn.Conv2d(i, o, k, padding=p) for (i, o), k, p in shapes)
        self.pooled = pooled or (True,) * len(channels)
        self.activation = activation
        self.map_drop = nn.Dropout2d(map_dropout) if map_dropout else None
        sizes = (self._features(image), *hidden)
        self.fcs = nn.ModuleList(nn.Linear(i, o) for i, o in pairwise(sizes))
        self.head = nn.Linear(sizes[-1], classes, bias=head_bias)
        self.drops = nn.ModuleList(nn.Dropout(p) for p in dropout)

    def _features(self, image: tuple[int, int, int]) -> int:
        """How many numbers the convolutions make of an image."""
        try:
            with torch.no_grad():
                return self.encode(torch.zeros(1, *image)).shape[1]
        except RuntimeError:
            raise UserError(
                f"images of {image[1]} x {image[2]} are too small for {len(self.convs)} convolutions with "
                f"{sum(self.pooled)} poolings; use larger images or another model"
            ) from None

    def encode(self, x: Tensor) -> Tensor:
        for place, (conv, pooled) in enumerate(zip(self.convs, self.pooled, strict=True), 1):
            x = self.activation(conv(x))
            if self.map_drop is not None and place == len(self.convs):
                x = self.map_drop(x)
            if pooled:
                x = F.max_pool2d(x, 2)
        return x.flatten(1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.encode(x)
        for place, fc in enumerate(self.fcs):
            x = self.activation(fc(self._drop(x, place)))
        out: Tensor = self.head(self._drop(x, len(self.fcs)))
        return out

    def _drop(self, x: Tensor, place: int) -> Tensor:
        out: Tensor = self.drops[place](x) if place < len(self.drops) else x
        return out


def _each(value: int | tuple[int, ...], layers: tuple[int, ...]) -> tuple[int, ...]:
    return (value,) * len(layers) if isinstance(value, int) else value
