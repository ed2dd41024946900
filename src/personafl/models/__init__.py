"""Networks by name, as functions of the data's shape; any `nn.Module` of one's own by dotted path."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from personafl.models.cnn import CNN
from personafl.models.lstm import CharLSTM
from personafl.models.mlp import MLP
from personafl.models.resnet import ResNet18
from personafl.models.stacked import StackedModel

__all__ = ["CNN", "MLP", "MODELS", "CharLSTM", "ModelEntry", "ResNet18", "StackedModel"]

Build = Callable[[tuple[int, ...], int], nn.Module]
"""The shape of an example and the number of classes to a fresh module."""


@dataclass(frozen=True)
class ModelEntry:
    """A network `personafl list models` shows."""

    build: Build
    summary: str


def _image(shape: tuple[int, ...], name: str) -> tuple[int, int, int]:
    if len(shape) != 3:
        raise ValueError(f"model.name={name!r} wants images (channels, height, width); the data have shape {shape}")
    return shape[0], shape[1], shape[2]


MODELS: dict[str, ModelEntry] = {
    "mlp": ModelEntry(lambda s, k: MLP(math.prod(s), 128, 64, k), "fc inputs-128-64-classes, ReLU"),
    "pews-mlp": ModelEntry(
        lambda s, k: MLP(math.prod(s), 32, 64, 128, 32, k), "fc inputs-32-64-128-32-classes, ReLU (FedPeWS)"
    ),
    "small-cnn": ModelEntry(
        lambda s, k: CNN(_image(s, "small-cnn"), (16, 32), (64,), k, kernel=3, padding=1),
        "conv3 16, pool, conv3 32, pool, fc 64-classes",
    ),
    "cifar-cnn": ModelEntry(
        lambda s, k: CNN(_image(s, "cifar-cnn"), (64, 64), (384, 192), k, kernel=5, padding=0),
        "conv5 64, pool, conv5 64, pool, fc 1600-384-192-classes (DM-PFL on CIFAR-10)",
    ),
    "pews-cnn": ModelEntry(
        lambda s, k: CNN(_image(s, "pews-cnn"), (32, 64, 128), (), k, kernel=3, padding=1),
        "conv3 32, conv3 64, conv3 128, each with pool, fc 2048-classes (FedPeWS)",
    ),
    "resnet18": ModelEntry(
        lambda s, k: ResNet18(_image(s, "resnet18")[0], k), "ResNet-18, ImageNet stem (FedSelect, CO-PFL)"
    ),
    "resnet18-cifar": ModelEntry(
        lambda s, k: ResNet18(_image(s, "resnet18-cifar")[0], k, "cifar"), "ResNet-18, 3x3 stem without pooling"
    ),
    "char-lstm": ModelEntry(
        lambda s, k: CharLSTM(k), "embedding 8, two LSTM layers of 256, fc 256-classes (FedPHP on Shakespeare)"
    ),
}
