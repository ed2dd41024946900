"""The papers' data splits on the real sets, client by client, where $PERSONAFL_DATA has them."""

import functools
import os

import numpy as np
import pytest
import torch

from personafl import config, experiment
from personafl.data import DATASETS
from personafl.data.locate import find


@functools.cache
def real(name):
    """A real set, once for all tests; the test is skipped where it is not at hand."""
    if not os.environ.get("PERSONAFL_DATA"):
        pytest.skip("PERSONAFL_DATA does not name a folder with real data")
    for part in {"cifar-mnist": ("cifar10", "mnist")}.get(name, (name,)):
        if find(part) is None:
            pytest.skip(f"{part} is not in {os.environ['PERSONAFL_DATA']}")
    return DATASETS[name]()


def divided(name, **data):
    chosen = config.load({"data": {"dataset": name, **data}, "algorithms": [{"name": "fedavg"}]})
    return experiment.federation(chosen, real(name))


def counts(federation, split):
    """Samples per client and class of a split."""
    source = federation.source
    rows = [federation.examples(split, torch.tensor([c])).rows[0] for c in range(federation.everybody)]
    return np.array([np.bincount(source.y[r].numpy(), minlength=source.classes) for r in rows])


def everything(federation):
    return np.concatenate([federation.drawn(s).values.numpy() for s in ("train", "validation", "test")])


# DM-PFL: train and test parts together, a hundred clients, a quarter of each for testing


@pytest.mark.parametrize("alpha", [0.3, 0.1])
@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_dm_pfls_dirichlet(name, alpha):
    split = divided(name, partition="dirichlet", num_clients=100, alpha=alpha)
    assert np.array_equal(np.sort(everything(split)), np.arange(60_000))  # all of it, nothing twice
    sizes = split.sizes("train") + split.sizes("test")
    assert sizes.min() >= 40  # least = min(10 / 0.25, 60,000 / 100 / 2)
    assert torch.equal(split.sizes("test"), (sizes / 4).round().long())
    held = split.class_counts()
    assert held.sum(0).tolist() == [60_000 // split.source.classes] * split.source.classes
    if name == "cifar10":  # of ten classes a client holds a few, fewer with the smaller alpha
        own = (held / held.sum(1, keepdims=True)).max(1).mean()
        assert (own > 0.5) if alpha == 0.1 else (0.3 < own < 0.6)


def test_dm_pfls_pathological_groups():
    split = divided("cifar10", partition="pathological", num_clients=100, classes_per_client=2)
    held = split.class_counts()
    assert np.array_equal(np.sort(everything(split)), np.arange(60_000))
    for client, own in enumerate(held):
        assert set(np.flatnonzero(own)) == {2 * (client // 20), 2 * (client // 20) + 1}  # five groups of twenty
    for k in range(10):
        mine = held[:, k][held[:, k] > 0]
        # an average of 6000 / 20 = 300: nineteen clients have 30 to 299, on average 164.5, the last the rest:
        # 1 - 19 * 164.5 / 6000 = 48 %, with a deviation of sqrt(19) * 78 / 6000 = 5.7 %
        assert len(mine) == 20 and mine[:-1].min() >= 30 and mine[:-1].max() < 300
        assert abs(mine[-1] / 6000 - 0.48) < 4 * 0.057
    richest = np.sort(held.sum(1))[-5:].sum()  # one client in twenty holds about half
    assert abs(richest / 60_000 - 0.48) < 4 * 0.057 / np.sqrt(10)


def test_dm_pfls_har_by_subject():
    split = divided("har", partition="natural")
    assert split.num_clients == 30
    sizes = split.sizes("train") + split.sizes("test")
    assert (int(sizes.min()), int(sizes.max()), int(sizes.sum())) == (281, 409, 10_299)
    recordings = split.source.groups
    for c in range(30):  # windows of one recording overlap: they are all for training or all for testing
        train, test = (split.examples(s, torch.tensor([c])).rows[0].numpy() for s in ("train", "test"))
        assert not set(recordings[train]) & set(recordings[test])
        assert 0.15 < len(test) / (len(train) + len(test)) < 0.35


# FedPHP: the training part shared by label, a fifth of each client's for testing; the server's model on the test part


@pytest.mark.parametrize(("name", "classes", "each"), [("cifar10", 5, 100), ("cifar100", 20, 25)])
def test_fedphps_label_splits(name, classes, each):
    """Cifar10-100-5 and Cifar100-100-20."""
    options = {"partition": "classes", "num_clients": 100, "classes_per_client": classes}
    split = divided(name, **options, test_share=0.2, official_test="global")
    assert split.sizes("train").tolist() == [400] * 100
    assert split.sizes("test").tolist() == [100] * 100
    held = split.class_counts()
    assert set(held.ravel()) == {0, each} and ((held > 0).sum(1) == classes).all()
    assert np.array_equal(np.sort(everything(split)), np.arange(50_000))
    assert split.official.tolist() == list(range(50_000, 60_000))  # the original test set


def test_fedphps_disjoint_classes():
    """Cifar100-20-5: twenty clients, five classes each, none shared."""
    split = divided("cifar100", partition="classes", num_clients=20, classes_per_client=5, test_share=0.2)
    held = split.class_counts() > 0
    assert (held.sum(0) == 1).all() and (held.sum(1) == 5).all()


def test_fedphps_dirichlet():
    """FedRepo's: vectors of clients, normalised over clients class by class."""
    split = divided("cifar10", partition="dirichlet-client", num_clients=100, alpha=1.0, official_test="global")
    held = split.class_counts()
    assert held.sum(0).tolist() == [5000] * 10 and split.notes == {"samples_moved": 0}
    # every client wants the same in all: sizes stay near 500, unlike those of a Dirichlet draw over clients
    assert held.sum(1).min() > 250 and held.sum(1).max() < 1000


# CO-PFL and FedSelect: shards of 50 training and 100 test samples of each of two classes


def test_co_pfls_shards():
    options = {"classes_per_client": 2, "samples_per_class": 50, "test_samples_per_class": 100}
    split = divided("cifar10", partition="shards", num_clients=10, official_test="dealt", **options)
    train, test = counts(split, "train"), counts(split, "test")
    assert ((train == 50).sum(1) == 2).all() and (train.sum(1) == 100).all()
    assert ((test == 100).sum(1) == 2).all() and (test.sum(1) == 200).all()
    assert np.array_equal(train > 0, test > 0)  # the same slots
    assert ((train > 0).sum(0) == 2).all()  # every class is on two clients
    assert split.drawn("train").values.max() < 50_000 <= split.drawn("test").values.min()
    rows = everything(split)
    assert len(np.unique(rows)) == len(rows) == 10 * (100 + 200)
    assert split.notes == {"samples_left_out": 60_000 - 3000}


# FedPAC: twenty clients of 600 training and 300 test samples


def test_fedpacs_dominant_classes():
    split = divided("cifar10", partition="dominant", official_test="dealt")
    groups = [{0, 1, 2}, {2, 3, 4}, {4, 5, 6}, {6, 7, 8}, {8, 9, 0}]
    train, test = counts(split, "train"), counts(split, "test")
    assert split.num_clients == 20
    for client in range(20):
        dominant = np.array([k in groups[client % 5] for k in range(10)])
        assert train[client].tolist() == (12 + 160 * dominant).tolist()  # 20 % of 600 over ten classes, 80 % over three
        assert test[client].tolist() == (6 + 80 * dominant).tolist()


# FedPeWS: by source, by class


@pytest.mark.parametrize(("name", "classes", "each"), [("synthetic-32k", 4, 8000), ("synthetic-3.2k", 4, 800)])
@pytest.mark.parametrize("clients", [2, 4])
def test_fedpews_classes_of_synthetic_points(name, classes, each, clients):
    chosen = {"dataset": name, "partition": "by-class", "num_clients": clients}
    common = {"official_test": "global", "test_share": 0.0}
    split = experiment.federation(config.load({"data": chosen | common, "algorithms": [{"name": "fedavg"}]}))
    # two clients: even and odd classes; four: one class each; all of a class is for training
    held = [[each if k % clients == c else 0 for k in range(classes)] for c in range(clients)]
    assert counts(split, "train").tolist() == held
    assert counts(split, "test").tolist() == [[each // 4] * classes] * clients


def test_fedpews_sources():
    """CIFAR-MNIST: a client with the ten classes of either, 400 training and 200 test samples of each."""
    split = divided("cifar-mnist", partition="by-source", official_test="dealt")
    assert counts(split, "train").tolist() == [[400] * 10 + [0] * 10, [0] * 10 + [400] * 10]
    assert counts(split, "test").tolist() == [[200] * 10 + [0] * 10, [0] * 10 + [200] * 10]


def test_fedpews_classes_without_overlap():
    """NOC: CIFAR-100 over twenty clients, five classes each."""
    split = divided("cifar100", partition="by-class", num_clients=20, official_test="dealt")
    train, test = counts(split, "train"), counts(split, "test")
    assert set(train.ravel()) == {0, 500} and set(test.ravel()) == {0, 100}
    assert ((train > 0).sum(0) == 1).all() and ((train > 0).sum(1) == 5).all()
    assert np.array_equal(train > 0, test > 0)


# By writer and by role


def test_mnist_by_writer():
    data = real("mnist")
    if data.clients is None:
        pytest.skip("the writers do not lie beside MNIST")
    split = divided("mnist", partition="natural")
    assert split.num_clients == 539 + 297  # no writer of the test set is in the training set
    assert int((split.sizes("train") + split.sizes("test")).sum()) == 70_000
    with pytest.raises(ValueError, match="no natural client has both training and test samples"):
        divided("mnist", partition="natural", official_test="dealt")
    trained = divided("mnist", partition="natural", official_test="global")
    assert trained.num_clients == 539 and len(trained.official) == 10_000


def test_har_keeps_its_recordings_where_its_test_subjects_are_left_out():
    split = divided("har", partition="natural", official_test="global")
    assert split.num_clients == 30 - 9 and len(split.official) == 2947
