"""Data sets by name, and how they are divided over clients."""

from __future__ import annotations

from collections.abc import Callable

from personafl.data.client_corruption import cifar10_c
from personafl.data.digits import digits
from personafl.data.federated import Federation, Source, arrays
from personafl.data.partition import PARTITIONS
from personafl.data.real import REAL
from personafl.data.synthetic import synthetic_1m, synthetic_3_2k, synthetic_10m, synthetic_32k

__all__ = ["DATASETS", "PARTITIONS", "Federation", "Source", "arrays"]

DATASETS: dict[str, Callable[[], Source]] = {
    "digits": digits,
    "synthetic-32k": synthetic_32k,
    "synthetic-3.2k": synthetic_3_2k,
    "synthetic-1m": synthetic_1m,
    "synthetic-10m": synthetic_10m,
    **REAL,
    "cifar10-c": cifar10_c,
}
