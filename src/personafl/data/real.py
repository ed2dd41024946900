"""Real data sets as the rest of the package takes them: each loader's arrays, and the network that goes with them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from personafl.data import images, mixed, signals, text
from personafl.data.federated import Source
from personafl.data.files import Loaded

_LOADERS: dict[str, tuple[Callable[[], Loaded], str]] = {
    "mnist": (images.mnist, "mcmahan-cnn"),
    "fmnist": (images.fmnist, "mcmahan-cnn"),
    "femnist": (images.femnist, "leaf-cnn"),
    "cifar10": (images.cifar10, "cifar-cnn"),
    "cifar100": (images.cifar100, "cifar-cnn"),
    "cinic10": (images.cinic10, "cifar-cnn"),
    "mini-imagenet": (images.mini_imagenet, "resnet18"),
    "har": (signals.har, "har-dnn"),
    "wisdm": (signals.wisdm, "mlp"),
    "shakespeare": (text.shakespeare, "char-lstm"),
    "cifar-mnist": (mixed.cifar_mnist, "pews-cnn"),
    "pot-mnist": (mixed.pot_mnist, "pews-cnn"),
    "pneumoniamnist": (images.pneumoniamnist, "small-cnn"),
}


def _source(name: str) -> Source:
    load, model = _LOADERS[name]
    found = load()
    x = found.x.to(torch.int16) if name == "shakespeare" else found.x  # bytes are images, which are scaled
    return Source(name, x, found.y, found.classes, model, found.clients, found.sources, found.groups, found.test)


def _described(name: str) -> Callable[[], Source]:
    made: Callable[[], Source] = partial(_source, name)
    made.__doc__ = _LOADERS[name][0].__doc__
    return made


REAL: dict[str, Callable[[], Source]] = {name: _described(name) for name in _LOADERS}
"""Official train and test parts behind one another; `Source.test` tells them apart."""
