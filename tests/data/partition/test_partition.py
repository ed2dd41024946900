"""Partitions by name, and test parts dealt in the same way as training parts."""

import numpy as np
import pytest

from personafl.data.partition import deal_test_parts, partition, partition_train_and_test
from tests.data.partition.common import request, two_parts


@pytest.mark.parametrize("name", ["shards", "classes", "by-class"])
def test_a_test_part_goes_to_the_clients_that_hold_its_classes(name):
    labels, test = two_parts()
    limits = {"samples_per_class": 6, "test_samples_per_class": 4} if name == "shards" else {}
    parts, tests = partition_train_and_test(name, request(labels, 10), test, **limits)
    for mine, theirs in zip(parts.rows, tests, strict=True):
        assert not test[mine].any()
        assert test[theirs].all()
        assert set(labels[mine]) == set(labels[theirs])
    together = np.concatenate([*parts.rows, *tests])
    assert len(np.unique(together)) == len(together)
    if name == "shards":  # two classes, six and four of each
        assert [len(r) for r in parts.rows] == [12] * 10
        assert [len(r) for r in tests] == [8] * 10
        assert parts.notes == {"samples_left_out": 300 - 120 + 120 - 80}
    else:
        assert len(together) == 420


def test_training_rows_are_those_of_the_training_part_alone():
    labels, test = two_parts()
    parts, _ = partition_train_and_test("classes", request(labels, 10), test)
    alone = partition("classes", request(labels[~test], 10))  # the training part comes first: rows count the same
    assert [r.tolist() for r in parts.rows] == [r.tolist() for r in alone.rows]


def test_sources_keep_their_test_part():
    labels, test = two_parts()
    sources = np.arange(len(labels)) % 3
    parts, tests = partition_train_and_test("by-source", request(labels, 6, sources=sources), test)
    for c in range(6):
        assert set(sources[parts.rows[c]]) == set(sources[tests[c]]) == {c % 3}


def test_natural_clients_keep_their_given_rows_and_need_both_parts():
    clients = np.array([0, 0, 0, 1, 1, 1, 2, 2, 0, 0, 1, 3, 3])
    test = np.arange(13) >= 8  # client 2 has no test rows, client 3 no training rows
    parts, tests = partition_train_and_test("natural", request(np.zeros(13, int), 0, clients=clients), test)
    assert [r.tolist() for r in parts.rows] == [[0, 1, 2], [3, 4, 5]]
    assert [r.tolist() for r in tests] == [[8, 9], [10]]
    assert parts.notes == {"clients_left_out": 2}
    parts, tests = partition_train_and_test(
        "natural", request(np.zeros(13, int), 0, clients=np.where(clients == 0, -1, clients)), test
    )
    assert [r.tolist() for r in parts.rows] == [[3, 4, 5]]
    with pytest.raises(ValueError, match="no natural client has both training and test samples"):
        partition_train_and_test("natural", request(np.zeros(13, int), 0, clients=test.astype(int)), test)


def test_parts_with_different_classes_cannot_be_dealt_alike():
    labels, test = two_parts()
    labels[test] = labels[test].clip(max=8)
    with pytest.raises(ValueError, match="different classes"):
        partition_train_and_test("shards", request(labels, 10), test)


def test_partitions_whose_draws_depend_on_quantities_are_not_repeated():
    assert set(deal_test_parts()) == {"iid", "classes", "shards", "dominant", "natural", "by-class", "by-source"}
