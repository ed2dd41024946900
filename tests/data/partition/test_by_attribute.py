"""Partitions by class, source and client."""

import numpy as np
import pytest

from personafl.data.partition import partition
from tests.data.partition.common import assert_covers, balanced, held_counts, request


def test_by_class_is_even_and_odd_for_two_clients_and_one_class_each_for_four():
    labels = balanced(8, 4)
    two, four = (partition("by-class", request(labels, n, classes=4)).rows for n in (2, 4))
    assert [set(labels[r]) for r in two] == [{0, 2}, {1, 3}]
    assert [set(labels[r]) for r in four] == [{0}, {1}, {2}, {3}]
    assert_covers(two, 32)
    assert_covers(four, 32)


def test_by_class_deals_a_hundred_classes_to_twenty_clients_without_overlap():
    labels = balanced(6, 100)
    counts = held_counts(labels, partition("by-class", request(labels, 20, classes=100)).rows, 100)
    assert ((counts == 6).sum(0) == 1).all() and ((counts == 6).sum(1) == 5).all()
    assert counts.sum() == 600


def test_by_class_with_more_clients_than_classes_is_refused():
    with pytest.raises(
        ValueError, match="by-class: 11 clients cannot share 10 classes without overlap; use at most 10"
    ):
        partition("by-class", request(balanced(10), 11))


def test_by_source_gives_every_source_a_client():
    origin = np.array([7, 3, 7, 3, 3, 7])
    parts = partition("by-source", request(np.zeros(6, int), 0, sources=origin))
    assert [r.tolist() for r in parts.rows] == [[1, 3, 4], [0, 2, 5]]


def test_several_clients_share_a_source_equally():
    origin = np.repeat([0, 1], [40, 20])
    rows = partition("by-source", request(np.zeros(60, int), 5, sources=origin)).rows
    assert_covers(rows, 60)
    # source 0 to clients 0, 2 and 4; source 1 to 1 and 3
    assert [set(origin[r]) for r in rows] == [{0}, {1}, {0}, {1}, {0}]
    assert [len(r) for r in rows] == [14, 10, 13, 10, 13]


def test_by_source_is_refused_without_sources_or_with_too_few_clients():
    with pytest.raises(ValueError, match="by-source': this data set has one source; try by-class"):
        partition("by-source", request(np.zeros(10, int), 2))
    with pytest.raises(ValueError, match="num_clients=2: the data set has 3 sources, use at least"):
        partition("by-source", request(np.zeros(9, int), 2, sources=np.arange(9) % 3))


def test_natural_clients_keep_their_samples():
    who = np.array([5, 9, 5, 9, 5, 9, 5, 9, 9])
    parts = partition("natural", request(np.zeros(9, int), 0, clients=who))
    assert [r.tolist() for r in parts.rows] == [[0, 2, 4, 6], [1, 3, 5, 7, 8]]
    assert parts.notes == {"clients_left_out": 0}


def test_samples_of_no_natural_client_are_left_out():
    who = np.array([0, -1, 0, 1, -1, 1, 1, 2])
    parts = partition("natural", request(np.zeros(8, int), 0, clients=who))
    assert [r.tolist() for r in parts.rows] == [[0, 2], [3, 5, 6], [7]]
    with pytest.raises(ValueError, match="num_clients=4: the data set has 3 natural clients"):
        partition("natural", request(np.zeros(8, int), 4, clients=who))


def test_a_number_of_natural_clients_is_drawn():
    who = np.repeat(np.arange(20), 5)

    def chosen(seed):
        rows = partition("natural", request(np.zeros(100, int), 6, seed=seed, clients=who)).rows
        assert all(len(set(who[r])) == 1 for r in rows)
        return [int(who[r[0]]) for r in rows]

    assert len(set(chosen(0))) == 6
    assert chosen(0) == chosen(0)
    assert chosen(0) != chosen(1)


def test_more_natural_clients_than_there_are_is_refused():
    with pytest.raises(ValueError, match="num_clients=3: the data set has 2 natural clients"):
        partition("natural", request(np.zeros(10, int), 3, clients=np.repeat([0, 1], 5)))


def test_natural_without_clients_is_refused():
    with pytest.raises(ValueError, match="no natural clients; try dirichlet"):
        partition("natural", request(np.zeros(10, int), 2))
