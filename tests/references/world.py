"""The small federation that engine and references play in."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from personafl.core.types import Training
from personafl.data import Federation, Source
from personafl.models import CNN, MLP

CLASSES = 4
SIZES = (17, 12, 9, 6, 2)  # rows per client; three quarters of them for training: 13, 9, 7, 4, 1
TRAINING = Training(
    num_rounds=3, join_ratio=0.6, local_epochs=2, batch_size=4, lr=0.2, lr_decay=0.9, precision="float64", seed=0
)


class Normed(nn.Module):
    """An MLP with a batch norm, whose running statistics do not begin as those of most data."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second, self.head = (
            nn.Linear(8, 10),
            nn.BatchNorm1d(10, momentum=0.3),
            nn.Linear(10, 9),
            nn.Linear(9, CLASSES),
        )
        with torch.no_grad():
            self.norm.weight.copy_(torch.linspace(0.5, 1.5, 10))
            self.norm.bias.copy_(torch.linspace(-0.3, 0.3, 10))
            self.norm.get_buffer("running_mean").copy_(torch.linspace(-1.0, 1.0, 10))
            self.norm.get_buffer("running_var").copy_(torch.linspace(0.5, 2.0, 10))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.second(self.norm(self.first(x)).relu()).relu())
        return out


class Recurrent(nn.Module):
    """Two layers of an LSTM, then a GRU."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 3, num_layers=2, batch_first=True)
        self.gru, self.head = nn.GRU(3, 3, batch_first=True), nn.Linear(3, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.gru(self.lstm(x)[0])[0][:, -1])
        return out


class Attention(nn.Module):
    """Two layers of a transformer's encoder."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(4, 2, 5, dropout=0.0, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 2), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.encoder(x).mean(1))
        return out


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
    """A network and a federation for it: an MLP, a CNN, an MLP whose first units hardly fire, one with a norm, or one
    over sequences of three.
    """
    torch.manual_seed(7)
    if kind in ("recurrent", "attention"):
        return (Recurrent if kind == "recurrent" else Attention)(), federation_of((3, 4), sizes)
    if kind == "norm":
        return Normed(), federation_of((8,), sizes)
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
