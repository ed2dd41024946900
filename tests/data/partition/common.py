"""Requests and counts that tests of several partitions share."""

import numpy as np

from personafl.core import rng
from personafl.data.partition import PartitionRequest


def request(labels, num_clients, *, seed=0, classes=10, clients=None, sources=None):
    return PartitionRequest(
        labels=np.asarray(labels),
        classes=classes,
        num_clients=num_clients,
        rng=rng.generator(seed, "partition"),
        clients=None if clients is None else np.asarray(clients),
        sources=None if sources is None else np.asarray(sources),
    )


def balanced(per_class, classes=10):
    """Labels in a mixed order."""
    return np.arange(per_class * classes) % classes


def assert_covers(rows, total):
    """Every sample has exactly one holder."""
    assert np.array_equal(np.sort(np.concatenate(rows)), np.arange(total))


def held_counts(labels, rows, classes=10):
    """Samples per client and class."""
    return np.array([np.bincount(labels[r], minlength=classes) for r in rows])


def two_parts(train_per_class=30, test_per_class=12, classes=10):
    """Labels of a training part, then of a test part, and which is which."""
    labels = np.concatenate([balanced(train_per_class, classes), balanced(test_per_class, classes)])
    return labels, np.arange(len(labels)) >= train_per_class * classes
