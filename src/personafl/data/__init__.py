"""Data sets by name, and how they are divided over clients. What reads a data set is imported when it is asked for."""

from __future__ import annotations

from collections.abc import Callable

from personafl.core.lazy import Registry
from personafl.data.dataset import Source, arrays
from personafl.data.federated import Federation
from personafl.data.partition import PARTITIONS

__all__ = ["DATASETS", "PARTITIONS", "Federation", "Source", "arrays"]

DATASETS: Registry[Callable[[], Source]] = Registry(
    {
        "digits": "personafl.data.digits:digits",
        "synthetic-32k": "personafl.data.synthetic:synthetic_32k",
        "synthetic-3.2k": "personafl.data.synthetic:synthetic_3_2k",
        "synthetic-1m": "personafl.data.synthetic:synthetic_1m",
        "synthetic-10m": "personafl.data.synthetic:synthetic_10m",
        "mnist": "personafl.data.images:mnist",
        "fmnist": "personafl.data.images:fmnist",
        "femnist": "personafl.data.images:femnist",
        "cifar10": "personafl.data.images:cifar10",
        "cifar100": "personafl.data.images:cifar100",
        "cinic10": "personafl.data.images:cinic10",
        "mini-imagenet": "personafl.data.images:mini_imagenet",
        "har": "personafl.data.signals:har",
        "har-features": "personafl.data.signals:har_features",
        "wisdm": "personafl.data.signals:wisdm",
        "shakespeare": "personafl.data.text:shakespeare",
        "cifar-mnist": "personafl.data.mixed:cifar_mnist",
        "pot-mnist": "personafl.data.mixed:pot_mnist",
        "pneumoniamnist": "personafl.data.images:pneumoniamnist",
        "cifar10-c": "personafl.data.images:cifar10_c",
    }
)
"""What `data.dataset` may name; official test parts stand behind the training parts, and `Source.test` marks them."""
