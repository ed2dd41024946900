"""Networks by name, as functions of the data's shape; any `nn.Module` of one's own by dotted path."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch.nn.functional as F
from torch import nn

from personafl.core.errors import UserError
from personafl.models.cnn import CNN
from personafl.models.lstm import CharLSTM, TokenLSTM
from personafl.models.mlp import MLP
from personafl.models.resnet import ResNet18
from personafl.models.stacked import StackedModel
from personafl.models.vgg import TFCNN, VGG8, VGG11, planned

__all__ = ["CNN", "MLP", "MODELS", "CharLSTM", "ModelEntry", "ResNet18", "StackedModel", "TokenLSTM"]

Build = Callable[[tuple[int, ...], int], nn.Module]
"""The shape of an example and the number of classes to a fresh module."""


@dataclass(frozen=True)
class ModelEntry:
    """A network `personafl list models` shows."""

    build: Build
    summary: str


def _image(shape: tuple[int, ...], name: str) -> tuple[int, int, int]:
    if len(shape) != 3:
        raise UserError(f"model.name={name!r} wants images (channels, height, width); the data have shape {shape}")
    return shape[0], shape[1], shape[2]


MODELS: dict[str, ModelEntry] = {
    "mlp": ModelEntry(lambda s, k: MLP(math.prod(s), 128, 64, k), "fc inputs-128-64-classes, ReLU"),
    "pews-mlp": ModelEntry(
        lambda s, k: MLP(math.prod(s), 32, 64, 128, 32, k), "fc inputs-32-64-128-32-classes, ReLU (FedPeWS)"
    ),
    "har-dnn": ModelEntry(
        lambda s, k: MLP(math.prod(s), 256, 128, k), "fc inputs-256-128-classes, ReLU (DM-PFL on HAR)"
    ),
    "small-cnn": ModelEntry(
        lambda s, k: CNN(_image(s, "small-cnn"), (16, 32), (64,), k, kernel=3, padding=1),
        "conv3 16, pool, conv3 32, pool, fc 64-classes",
    ),
    "cifar-cnn": ModelEntry(
        lambda s, k: CNN(_image(s, "cifar-cnn"), (64, 64), (384, 192), k, kernel=5, padding=0),
        "conv5 64, pool, conv5 64, pool, fc 1600-384-192-classes (DM-PFL on CIFAR-10)",
    ),
    "mcmahan-cnn": ModelEntry(
        lambda s, k: CNN(_image(s, "mcmahan-cnn"), (32, 64), (512,), k, kernel=5, padding=2),
        "padded conv5 32, pool, conv5 64, pool, fc 3136-512-classes (FedAvg's paper, DM-PFL on MNIST)",
    ),
    "mnist-cnn": ModelEntry(
        lambda s, k: CNN(_image(s, "mnist-cnn"), (64, 64), (128, 64), k, kernel=5, padding=0, map_dropout=0.5),
        "conv5 64, pool, conv5 64, dropout2d, pool, fc 1024-128-64-classes (unofficial DM-PFL on MNIST)",
    ),
    "leaf-cnn": ModelEntry(
        lambda s, k: CNN(_image(s, "leaf-cnn"), (32, 64), (2048,), k, kernel=5, padding=2),
        "padded conv5 32, pool, conv5 64, pool, fc 3136-2048-classes (LEAF, FedPHP on FEMNIST)",
    ),
    "fedpac-cnn": ModelEntry(
        lambda s, k: CNN(
            _image(s, "fedpac-cnn"), (16, 32, 64), (128,), k, (5, 5, 3), (0, 1, 1), activation=F.leaky_relu
        ),
        "conv5 16, conv5 32, conv3 64, each with pool, fc 576-128-classes, leaky ReLU (FedPAC)",
    ),
    "fedrep-cnn": ModelEntry(
        lambda s, k: CNN(_image(s, "fedrep-cnn"), (64, 64), (120, 64), k, kernel=5, padding=0),
        "conv5 64, pool, conv5 64, pool, fc 1600-120-64-classes (FedRep)",
    ),
    "pfllib-cnn": ModelEntry(
        lambda s, k: CNN(_image(s, "pfllib-cnn"), (32, 64), (512,), k, kernel=5, padding=0),
        "conv5 32, pool, conv5 64, pool, fc 1024-512-classes (PFLlib)",
    ),
    "dropout-cnn": ModelEntry(
        lambda s, k: CNN(
            _image(s, "dropout-cnn"), (32, 64), (128,), k, 3, 0, pooled=(False, True), dropout=(0.25, 0.5)
        ),
        "conv3 32, conv3 64, pool, dropout, fc 128, dropout, fc classes (Adaptive Federated Optimization)",
    ),
    "tfcnn": ModelEntry(
        lambda s, k: planned(_image(s, "tfcnn"), TFCNN, k), "conv3 32, 64, 64, each with pool, fc without bias (FedPHP)"
    ),
    "tfcnn-fc": ModelEntry(
        lambda s, k: planned(_image(s, "tfcnn-fc"), TFCNN, k, (128,)),
        "conv3 32, 64, 64, each with pool, fc 1024-128-classes (FedPHP's code)",
    ),
    "vgg11": ModelEntry(
        lambda s, k: planned(_image(s, "vgg11"), VGG11, k), "VGG-11 without norms, fc 512-classes without bias (FedPHP)"
    ),
    "vgg11-fc": ModelEntry(
        lambda s, k: planned(_image(s, "vgg11-fc"), VGG11, k, (512, 512), (0, 0.5, 0.5)),
        "VGG-11 without norms, fc 512-512-512-classes with dropout (FedPHP's code)",
    ),
    "vgg8-fc": ModelEntry(
        lambda s, k: planned(_image(s, "vgg8-fc"), VGG8, k, (512, 512), (0, 0.5, 0.5)),
        "VGG-8 without norms, fc 512-512-512-classes with dropout (FedPHP's code)",
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
    "token-lstm": ModelEntry(
        lambda s, k: TokenLSTM(k), "embedding 8, two LSTM layers of 256, fc 256-tokens at every position"
    ),
}
