"""Data sets by name, and how they are divided over clients."""

from __future__ import annotations

from collections.abc import Callable

from personafl.data.dataset import Source, arrays
from personafl.data.digits import digits
from personafl.data.federated import Federation
from personafl.data.images import (
    cifar10,
    cifar10_c,
    cifar100,
    cinic10,
    femnist,
    fmnist,
    mini_imagenet,
    mnist,
    pneumoniamnist,
)
from personafl.data.mixed import cifar_mnist, pot_mnist
from personafl.data.partition import PARTITIONS
from personafl.data.signals import har, har_features, wisdm
from personafl.data.synthetic import synthetic_1m, synthetic_3_2k, synthetic_10m, synthetic_32k
from personafl.data.text import shakespeare

__all__ = ["DATASETS", "PARTITIONS", "Federation", "Source", "arrays"]

DATASETS: dict[str, Callable[[], Source]] = {
    "digits": digits,
    "synthetic-32k": synthetic_32k,
    "synthetic-3.2k": synthetic_3_2k,
    "synthetic-1m": synthetic_1m,
    "synthetic-10m": synthetic_10m,
    "mnist": mnist,
    "fmnist": fmnist,
    "femnist": femnist,
    "cifar10": cifar10,
    "cifar100": cifar100,
    "cinic10": cinic10,
    "mini-imagenet": mini_imagenet,
    "har": har,
    "har-features": har_features,
    "wisdm": wisdm,
    "shakespeare": shakespeare,
    "cifar-mnist": cifar_mnist,
    "pot-mnist": pot_mnist,
    "pneumoniamnist": pneumoniamnist,
    "cifar10-c": cifar10_c,
}
"""What `data.dataset` may name; official test parts stand behind the training parts, and `Source.test` marks them."""
