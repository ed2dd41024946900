"""A few classes per client."""

import numpy as np
import pytest

from personafl.data.partition import partition, partition_train_and_test
from tests.data.partition.common import assert_covers, balanced, held_counts, request, two_parts


def test_pathological_makes_five_groups_of_twenty_with_the_same_two_classes():
    labels = balanced(600)
    rows = partition("pathological", request(labels, 100)).rows
    assert len(rows) == 100
    assert_covers(rows, 6000)
    for client, own in enumerate(rows):
        group = client // 20
        assert set(labels[own]) == {2 * group, 2 * group + 1}


def test_pathological_quantities_are_skewed():
    labels = balanced(600)
    rows = partition("pathological", request(labels, 100)).rows
    for k in range(10):
        holders = [int((labels[r] == k).sum()) for r in rows if (labels[r] == k).any()]
        # an average of 600 / 20 = 30: nineteen holders get 3 to 29, the last one the rest
        assert len(holders) == 20
        assert all(3 <= n <= 29 for n in holders[:-1])
        assert holders[-1] == 600 - sum(holders[:-1])
        assert holders[-1] >= 600 - 19 * 29


def test_pathological_quantities_of_the_papers_text():
    """A tenth of the clients hold half of all samples, nine tenths the other half (DM-PFL, Appendix A.1.3)."""
    labels = balanced(6000)
    rows = partition("pathological", request(labels, 100), half_held_by=0.1).rows
    assert_covers(rows, 60_000)
    counts = held_counts(labels, rows)
    for client, own in enumerate(counts):
        assert set(np.flatnonzero(own)) == {2 * (client // 20), 2 * (client // 20) + 1}  # the groups are as they were
    for k in range(10):
        mine = counts[:, k][counts[:, k] > 0]
        # of twenty clients the last two hold 3000 of 6000
        assert len(mine) == 20 and mine[:18].sum() == mine[18:].sum() == 3000
        # Parts in proportion to numbers in [0.1, 1]: none is ten times another, but for what cutting to whole numbers
        # takes or adds, less than one sample each.
        for half in (mine[:18], mine[18:]):
            assert half.max() - 1 < 10 * (half.min() + 1)
    large = np.arange(100) % 20 >= 18
    assert large.sum() == 10 and counts[large].sum() == counts[~large].sum() == 30_000


def test_pathological_quantities_of_the_papers_text_are_uniform():
    sizes = []
    for seed in range(200):
        rows = partition("pathological", request(balanced(6000, 2), 20, seed=seed, classes=2), half_held_by=0.1).rows
        sizes += [len(r) for r in rows[:18]]
    # A client's 6000 / 18 = 333 on average are the sum of two classes' parts, each 3000 / 18 = 166.7 times U(0.1, 1)
    # over the mean of eighteen such numbers. U(0.1, 1) has mean 0.55, deviation 0.9 / sqrt(12) = 0.26, so a part
    # deviates by 166.7 * 0.26 / 0.55 * sqrt(17 / 18) = 76.6 (a share of a fixed sum, to first order), two by 108.
    assert np.mean(sizes) == 6000 / 18
    assert abs(np.std(sizes) / 108 - 1) < 0.05  # 3600 numbers give a deviation within 2 %, the ratio is off by as much


def test_pathological_halves_of_few_clients_and_samples():
    # two clients per class: one half each, whatever the share; odd samples go to the last
    rows = partition("pathological", request(np.arange(18) % 2, 2, classes=2), half_held_by=0.4).rows
    assert held_counts(np.arange(18) % 2, rows, 2).tolist() == [[4, 4], [5, 5]]
    # six clients, 10 samples of each class: five of them for the first five, one each
    rows = partition("pathological", request(np.arange(20) % 2, 6, classes=2), half_held_by=0.1).rows
    assert held_counts(np.arange(20) % 2, rows, 2).tolist() == [[1, 1]] * 5 + [[5, 5]]
    with pytest.raises(ValueError, match=r"half_held_by=1: must be in \[0, 1\)"):
        partition("pathological", request(balanced(10), 5), half_held_by=1)


def test_pathological_deals_uneven_numbers_of_places():
    labels = balanced(60, classes=4)
    rows = partition("pathological", request(labels, 3, classes=4), classes_per_client=2).rows
    # six places over four classes: at most two holders each; class 0 goes to 0 and 1, class 1 too, 2 and 3 to client 2
    assert [set(labels[r]) for r in rows] == [{0, 1}, {0, 1}, {2, 3}]
    assert_covers(rows, 240)


def test_pathological_without_classes_is_refused():
    with pytest.raises(ValueError, match="classes_per_client=0: must be at least 1"):
        partition("pathological", request(balanced(10), 4), classes_per_client=0)
    with pytest.raises(ValueError, match="4 clients x 2 classes cannot hold the data's 10 classes"):
        partition("pathological", request(balanced(10), 4))


@pytest.mark.parametrize(("classes", "per_client", "each"), [(10, 5, 100), (100, 20, 25)])
def test_fedphps_label_split_has_the_published_counts(classes, per_client, each):
    """Cifar10-100-5 and Cifar100-100-20: 500 samples a client, of 5 or 20 classes in equal parts."""
    labels = balanced(50_000 // classes, classes)
    rows = partition("classes", request(labels, 100, classes=classes), classes_per_client=per_client).rows
    assert_covers(rows, 50_000)
    counts = held_counts(labels, rows, classes)
    assert set(counts.ravel()) == {0, each}
    assert ((counts > 0).sum(1) == per_client).all()
    assert ((counts > 0).sum(0) == 100 * per_client // classes).all()  # every class has as many clients
    # two clients in a row make up one order of ten classes, five of a hundred
    together = counts.reshape(-1, classes // per_client, classes).sum(1)
    assert (together == each).all()


def test_twenty_clients_of_five_classes_share_a_hundred_without_overlap():
    labels = balanced(20, 100)
    counts = held_counts(labels, partition("classes", request(labels, 20, classes=100), classes_per_client=5).rows, 100)
    assert ((counts > 0).sum(0) == 1).all() and ((counts > 0).sum(1) == 5).all()


@pytest.mark.parametrize("name", ["classes", "shards"])
@pytest.mark.parametrize(("clients", "per_client"), [(7, 3), (10, 7), (3, 4), (13, 9), (5, 10), (500, 5), (1, 10)])
def test_a_clients_classes_differ_and_no_sample_is_lost(name, clients, per_client):
    labels = balanced(600)
    for seed in range(3):
        rows = partition(name, request(labels, clients, seed=seed), classes_per_client=per_client).rows
        assert_covers(rows, 6000)
        held = held_counts(labels, rows) > 0
        assert (held.sum(1) == per_client).all()
        # as many holders for every class, or one more where they do not divide evenly
        assert set(held.sum(0)) <= {clients * per_client // 10, -(-clients * per_client // 10)}


def test_shards_are_those_of_fedselect_and_co_pfl():
    """Ten clients of two classes, 50 training and 100 test samples of each; every class on two clients."""
    training, test = (
        partition("shards", request(balanced(n), 10), samples_per_class=most) for n, most in ((5000, 50), (1000, 100))
    )
    for parts, n, most in ((training, 5000, 50), (test, 1000, 100)):
        counts = held_counts(balanced(n), parts.rows)
        assert ((counts == most).sum(1) == 2).all() and ((counts == most).sum(0) == 2).all()
        assert counts.sum() == 20 * most  # nothing but that
        assert len(np.unique(np.concatenate(parts.rows))) == 20 * most  # and no sample twice
        assert parts.notes == {"samples_left_out": 10 * n - 20 * most}
    classes = [[set(balanced(n)[r]) for r in p.rows] for p, n in ((training, 5000), (test, 1000))]
    assert classes[0] == classes[1]  # the same slots


def test_shards_follow_their_seed_and_differ_between_clients():
    labels = balanced(100)
    first, again, other = (partition("shards", request(labels, 10, seed=s)).rows for s in (3, 3, 4))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert any(not np.array_equal(a, b) for a, b in zip(first, other, strict=True))
    assert len({frozenset(labels[r]) for r in first}) > 5  # unlike pathological, which makes five groups


@pytest.mark.parametrize("name", ["classes", "shards"])
def test_class_splits_that_cannot_be_are_refused(name):
    with pytest.raises(ValueError, match=f"{name}: 3 clients x 2 classes cannot hold the data's 10 classes"):
        partition(name, request(balanced(10), 3))
    with pytest.raises(ValueError, match=f"{name}: classes_per_client=11: the data have 10 classes"):
        partition(name, request(balanced(10), 3), classes_per_client=11)


@pytest.mark.parametrize("name", ["classes", "shards", "by-class"])
def test_classes_without_samples_are_not_dealt(name):
    labels = np.repeat([1, 4, 7], 20)
    settings = {} if name == "by-class" else {"classes_per_client": 1}
    rows = partition(name, request(labels, 3, classes=10), **settings).rows
    assert_covers(rows, 60)
    assert [len(r) for r in rows] == [20, 20, 20]


def test_dominant_classes_are_fedpacs():
    labels = balanced(5000)
    parts = partition("dominant", request(labels, 20), classes_per_client=3)
    counts = held_counts(labels, parts.rows)
    groups = [{0, 1, 2}, {2, 3, 4}, {4, 5, 6}, {6, 7, 8}, {8, 9, 0}]
    for client, own in enumerate(counts):
        # 600 samples: 120 of all ten classes, 480 of three
        assert own.tolist() == [12 + (160 if k in groups[client % 5] else 0) for k in range(10)]
    assert len(np.unique(np.concatenate(list(parts.rows)))) == 20 * 600
    assert parts.notes == {"samples_left_out": 50_000 - 12_000}


def test_a_dealt_test_part_has_the_dominant_classes_too():
    labels, test = two_parts(5000, 1000)
    parts, tests = partition_train_and_test("dominant", request(labels, 20), test, classes_per_client=3)
    wanted, had = held_counts(labels, tests), held_counts(labels, parts.rows)
    assert (wanted * 2 == had).all()  # 300 and 600


def test_a_dealt_test_part_gives_what_it_has_and_says_when_more_is_asked_of_it():
    labels, test = two_parts(5000, 100)
    parts, tests = partition_train_and_test("dominant", request(labels, 10), test, classes_per_client=3)
    assert {len(r) for r in parts.rows} == {600}
    assert {len(r) for r in tests} == {77}  # not 300: ten clients of 100 samples per class, as below
    with pytest.raises(ValueError, match=r"than the test part has; .* at most 77 test_samples_per_client"):
        partition_train_and_test("dominant", request(labels, 10), test, test_samples_per_client=150)
    with pytest.raises(ValueError, match="num_clients=501: the test part has 1000 samples"):
        partition_train_and_test("iid", request(labels, 501), test)
    with pytest.raises(ValueError, match="num_clients=25001: the training part has 50000 samples"):
        partition_train_and_test("iid", request(labels, 25001), test)


def test_odd_numbers_go_to_the_last_class():
    # 25 samples, a fifth uniform: 5 over 4 classes are 1 each and one more, 20 over 3 are 6 and two more
    labels = balanced(100, 4)
    parts = partition("dominant", request(labels, 2, classes=4), classes_per_client=3, samples_per_client=25)
    assert held_counts(labels, parts.rows, 4).tolist() == [[7, 7, 9, 2], [9, 1, 7, 8]]


def test_dominant_clients_have_fewer_samples_where_600_do_not_suffice():
    labels = balanced(100)
    parts = partition("dominant", request(labels, 10), classes_per_client=3)
    # 77 = 15 uniform (one of each class, five more of class 9) + 20 + 20 + 22; class 9 is then used up by ten clients
    # with 6 and two with 20 more. 78 would be 21 more, 80 seven for each, 100 too many of class 0.
    assert {len(r) for r in parts.rows} == {77}
    assert held_counts(labels, parts.rows)[:, 9].sum() == 10 * 6 + 2 * 20
    with pytest.raises(ValueError, match=r"10 clients x 150 samples need more of class 0 .* at most \d\d samples_per_"):
        partition("dominant", request(labels, 10), classes_per_client=3, samples_per_client=150)
    with pytest.raises(ValueError, match="classes_per_client=11: the data have 10 classes"):
        partition("dominant", request(labels, 10), classes_per_client=11)
