import dataclasses

import numpy as np
import pytest

from personafl.core import rng
from personafl.data.partition import PARTITIONS, REPEATED, Ask, Rows, dealt, partition


def ask(
    labels,
    num_clients,
    *,
    seed=0,
    classes=10,
    alpha=0.3,
    classes_per_client=2,
    clients=None,
    sources=None,
    most=0,
    **more,
):
    return Ask(
        labels=np.asarray(labels),
        classes=classes,
        num_clients=num_clients,
        alpha=alpha,
        classes_per_client=classes_per_client,
        clients=None if clients is None else np.asarray(clients),
        rng=rng.generator(seed, "partition"),
        sources=None if sources is None else np.asarray(sources),
        samples_per_class=most,
        **more,
    )


def balanced(per_class, classes=10):
    """Labels in a mixed order."""
    return np.arange(per_class * classes) % classes


def assert_covers(rows, total):
    """Every sample has exactly one holder."""
    assert np.array_equal(np.sort(np.concatenate(rows)), np.arange(total))


@pytest.mark.parametrize("alpha", [0.01, 0.1, 1.0, 100.0])
def test_dirichlet_deals_every_sample_once_and_enough_to_everybody(alpha):
    question = ask(balanced(200), 20, alpha=alpha)
    parts = partition("dirichlet", question)
    assert question.least == 40  # min(40, 2000 / 20 / 2 = 50)
    assert len(parts.rows) == 20
    assert_covers(parts.rows, 2000)
    assert min(map(len, parts.rows)) >= 40


def test_dirichlet_of_many_clients_and_small_alpha_ends_and_reports_what_it_moved():
    parts = partition("dirichlet", ask(balanced(6000), 500, alpha=0.01))
    assert_covers(parts.rows, 60_000)
    assert min(map(len, parts.rows)) >= 40
    # With ten classes of a few large shares each, most of 500 clients are below 40 before samples are moved.
    assert 10_000 < parts.notes["samples_moved"] <= 500 * 40


def test_dirichlet_moves_nothing_where_everybody_has_enough():
    assert partition("dirichlet", ask(balanced(200), 10, alpha=100.0)).notes == {"samples_moved": 0}


def test_moved_samples_are_counted():
    # Two samples per client are the least, and 10 samples for five clients leave no choice: two each.
    parts = partition("dirichlet", ask(np.zeros(10, int), 5, classes=1, alpha=0.01))
    assert [len(r) for r in parts.rows] == [2] * 5
    # A Dirichlet(0.01) draw gives one client nearly everything, so about eight had to move.
    assert 6 <= parts.notes["samples_moved"] <= 8


def test_dirichlet_over_500_clients_draws_each_class_once():
    """Where the comparison code draws everything again until all clients have enough, which may be never."""

    class Counting(np.random.Generator):
        calls = 0

        def dirichlet(self, alpha):  # type: ignore[override]
            Counting.calls += 1
            return super().dirichlet(alpha)

    asked = dataclasses.replace(ask(balanced(6000), 500, alpha=0.1), rng=Counting(np.random.PCG64(0)))
    parts = partition("dirichlet", asked)
    assert Counting.calls == 10
    assert min(len(r) for r in parts.rows) >= asked.least == 40
    assert_covers(parts.rows, 60_000)


def test_small_alpha_concentrates_and_large_alpha_spreads():
    def top_share(alpha):
        labels = balanced(200)
        rows = partition("dirichlet", ask(labels, 20, alpha=alpha)).rows
        return np.mean([np.bincount(labels[r]).max() / len(r) for r in rows])

    assert top_share(0.05) > 0.6
    assert top_share(100.0) < 0.3  # ten equal classes would be 0.1


def test_dirichlet_is_a_function_of_its_seed():
    def rows(seed):
        return partition("dirichlet", ask(balanced(100), 10, seed=seed, alpha=0.1)).rows

    assert all(np.array_equal(a, b) for a, b in zip(rows(3), rows(3), strict=True))
    assert any(not np.array_equal(a, b) for a, b in zip(rows(3), rows(4), strict=True))


def test_a_client_with_its_fair_share_gets_nothing_of_later_classes():
    labels = balanced(100)
    drawn = [partition("dirichlet", ask(labels, 10, seed=seed, alpha=1.0)) for seed in range(20)]
    untouched = [parts for parts in drawn if not parts.notes["samples_moved"]]
    assert len(untouched) > 5
    for parts in untouched:
        for rows in parts.rows:
            held = labels[rows]
            assert (held < held.max()).sum() < 100  # 1000 samples over 10 clients, before its last class


def test_dirichlet_accepts_classes_nobody_has():
    parts = partition("dirichlet", ask(np.zeros(10, int), 1, classes=3))
    assert_covers(parts.rows, 10)


@pytest.mark.parametrize(
    ("samples", "clients", "least"),
    [(4000, 20, 40), (800, 20, 20), (30, 10, 2), (20, 10, 2)],  # min(40, half the average), never below 2
)
def test_the_least_a_client_may_have(samples, clients, least):
    assert ask(np.zeros(samples, int), clients).least == least


def test_pathological_makes_five_groups_of_twenty_with_the_same_two_classes():
    labels = balanced(600)
    rows = partition("pathological", ask(labels, 100)).rows
    assert len(rows) == 100
    assert_covers(rows, 6000)
    for client, own in enumerate(rows):
        group = client // 20
        assert set(labels[own]) == {2 * group, 2 * group + 1}


def test_pathological_quantities_are_skewed():
    labels = balanced(600)
    rows = partition("pathological", ask(labels, 100)).rows
    for k in range(10):
        holders = [int((labels[r] == k).sum()) for r in rows if (labels[r] == k).any()]
        # an average of 600 / 20 = 30: nineteen holders get 3 to 29, the last one the rest
        assert len(holders) == 20
        assert all(3 <= n <= 29 for n in holders[:-1])
        assert holders[-1] == 600 - sum(holders[:-1])
        assert holders[-1] >= 600 - 19 * 29


def test_pathological_deals_uneven_numbers_of_places():
    labels = balanced(60, classes=4)
    rows = partition("pathological", ask(labels, 3, classes=4, classes_per_client=2)).rows
    # six places over four classes: at most two holders each; class 0 goes to 0 and 1, class 1 too, 2 and 3 to client 2
    assert [set(labels[r]) for r in rows] == [{0, 1}, {0, 1}, {2, 3}]
    assert_covers(rows, 240)


def test_pathological_without_classes_is_refused():
    with pytest.raises(ValueError, match="4 clients x 0 classes"):
        partition("pathological", ask(balanced(10), 4, classes_per_client=0))


def test_iid_deals_equally():
    labels = balanced(103)
    rows = partition("iid", ask(labels, 4)).rows
    assert_covers(rows, 1030)
    assert sorted(map(len, rows)) == [257, 257, 258, 258]
    for own in rows:  # about 26 of each class, deviation below 5
        assert np.abs(np.bincount(labels[own], minlength=10) - 26).max() < 25


def held_counts(labels, rows, classes=10):
    """Samples per client and class."""
    return np.array([np.bincount(labels[r], minlength=classes) for r in rows])


@pytest.mark.parametrize(("classes", "per_client", "each"), [(10, 5, 100), (100, 20, 25)])
def test_fedphps_label_split_has_the_published_counts(classes, per_client, each):
    """Cifar10-100-5 and Cifar100-100-20: 500 samples a client, of 5 or 20 classes in equal parts."""
    labels = balanced(50_000 // classes, classes)
    rows = partition("classes", ask(labels, 100, classes=classes, classes_per_client=per_client)).rows
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
    counts = held_counts(labels, partition("classes", ask(labels, 20, classes=100, classes_per_client=5)).rows, 100)
    assert ((counts > 0).sum(0) == 1).all() and ((counts > 0).sum(1) == 5).all()


@pytest.mark.parametrize("name", ["classes", "shards"])
@pytest.mark.parametrize(("clients", "per_client"), [(7, 3), (10, 7), (3, 4), (13, 9), (5, 10), (500, 5), (1, 10)])
def test_a_clients_classes_differ_and_no_sample_is_lost(name, clients, per_client):
    labels = balanced(600)
    for seed in range(3):
        rows = partition(name, ask(labels, clients, seed=seed, classes_per_client=per_client)).rows
        assert_covers(rows, 6000)
        held = held_counts(labels, rows) > 0
        assert (held.sum(1) == per_client).all()
        # as many holders for every class, or one more where they do not divide evenly
        assert set(held.sum(0)) <= {clients * per_client // 10, -(-clients * per_client // 10)}


def test_shards_are_those_of_fedselect_and_co_pfl():
    """Ten clients of two classes, 50 training and 100 test samples of each; every class on two clients."""
    training, test = (partition("shards", ask(balanced(n), 10, most=most)) for n, most in ((5000, 50), (1000, 100)))
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
    first, again, other = (partition("shards", ask(labels, 10, seed=s)).rows for s in (3, 3, 4))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert any(not np.array_equal(a, b) for a, b in zip(first, other, strict=True))
    assert len({frozenset(labels[r]) for r in first}) > 5  # unlike pathological, which makes five groups


@pytest.mark.parametrize("name", ["classes", "shards"])
def test_class_splits_that_cannot_be_are_refused(name):
    with pytest.raises(ValueError, match=f"{name}: 3 clients x 2 classes cannot hold the data's 10 classes"):
        partition(name, ask(balanced(10), 3))
    with pytest.raises(ValueError, match=f"{name}: classes_per_client=11: the data have 10 classes"):
        partition(name, ask(balanced(10), 3, classes_per_client=11))


@pytest.mark.parametrize("name", ["classes", "shards", "by-class"])
def test_classes_without_samples_are_not_dealt(name):
    labels = np.repeat([1, 4, 7], 20)
    rows = partition(name, ask(labels, 3, classes=10, classes_per_client=1)).rows
    assert_covers(rows, 60)
    assert [len(r) for r in rows] == [20, 20, 20]


@pytest.mark.parametrize("alpha", [0.01, 0.5, 100.0])
def test_quantity_skews_sizes_and_not_labels(alpha):
    labels = balanced(600)
    parts = partition("quantity", ask(labels, 20, alpha=alpha))
    assert_covers(parts.rows, 6000)
    sizes = np.array([len(r) for r in parts.rows])
    assert sizes.min() >= 40  # the least: min(40, 6000 / 20 / 2)
    largest = parts.rows[int(sizes.argmax())]  # at least 300 samples, so about 30 or more per class
    assert np.abs(np.bincount(labels[largest], minlength=10) / len(largest) - 0.1).max() < 0.08
    assert (sizes.max() > 1000) == (alpha < 1)  # Dirichlet(100) over 20 clients: 300, deviation about 30


def test_quantity_is_the_draw_itself_where_everybody_has_enough():
    question = ask(balanced(600), 20, alpha=100.0)
    shares = rng.generator(0, "partition").dirichlet(np.full(20, 100.0)) * 6000
    parts = partition("quantity", question)
    assert parts.notes == {"clients_lifted": 0}
    assert np.abs([len(r) for r in parts.rows] - shares).max() <= 1  # whole samples


def test_quantity_with_two_samples_each_leaves_no_choice():
    parts = partition("quantity", ask(np.zeros(10, int), 5, alpha=0.01))
    assert [len(r) for r in parts.rows] == [2] * 5


def test_by_class_is_even_and_odd_for_two_clients_and_one_class_each_for_four():
    labels = balanced(8, 4)
    two, four = (partition("by-class", ask(labels, n, classes=4)).rows for n in (2, 4))
    assert [set(labels[r]) for r in two] == [{0, 2}, {1, 3}]
    assert [set(labels[r]) for r in four] == [{0}, {1}, {2}, {3}]
    assert_covers(two, 32)
    assert_covers(four, 32)


def test_by_class_deals_a_hundred_classes_to_twenty_clients_without_overlap():
    labels = balanced(6, 100)
    counts = held_counts(labels, partition("by-class", ask(labels, 20, classes=100)).rows, 100)
    assert ((counts == 6).sum(0) == 1).all() and ((counts == 6).sum(1) == 5).all()
    assert counts.sum() == 600


def test_by_class_with_more_clients_than_classes_is_refused():
    with pytest.raises(
        ValueError, match="by-class: 11 clients cannot share 10 classes without overlap; use at most 10"
    ):
        partition("by-class", ask(balanced(10), 11))


def test_by_source_gives_every_source_a_client():
    origin = np.array([7, 3, 7, 3, 3, 7])
    parts = partition("by-source", ask(np.zeros(6, int), 0, sources=origin))
    assert [r.tolist() for r in parts.rows] == [[1, 3, 4], [0, 2, 5]]


def test_several_clients_share_a_source_equally():
    origin = np.repeat([0, 1], [40, 20])
    rows = partition("by-source", ask(np.zeros(60, int), 5, sources=origin)).rows
    assert_covers(rows, 60)
    # source 0 to clients 0, 2 and 4; source 1 to 1 and 3
    assert [set(origin[r]) for r in rows] == [{0}, {1}, {0}, {1}, {0}]
    assert [len(r) for r in rows] == [14, 10, 13, 10, 13]


def test_by_source_is_refused_without_sources_or_with_too_few_clients():
    with pytest.raises(ValueError, match="by-source': this data set has one source; try by-class"):
        partition("by-source", ask(np.zeros(10, int), 2))
    with pytest.raises(ValueError, match="num_clients=2: the data set has 3 sources, use at least"):
        partition("by-source", ask(np.zeros(9, int), 2, sources=np.arange(9) % 3))


def test_natural_clients_keep_their_samples():
    who = np.array([5, 9, 5, 9, 5, 9, 5, 9, 9])
    parts = partition("natural", ask(np.zeros(9, int), 0, clients=who))
    assert [r.tolist() for r in parts.rows] == [[0, 2, 4, 6], [1, 3, 5, 7, 8]]
    assert parts.notes == {"clients_left_out": 0}


def test_natural_clients_of_fewer_than_four_samples_are_left_out():
    who = np.array([0, 0, 0, 1, 1, 1, 1, 2])
    parts = partition("natural", ask(np.zeros(8, int), 0, clients=who))
    assert [r.tolist() for r in parts.rows] == [[3, 4, 5, 6]]
    assert parts.notes == {"clients_left_out": 2}


def test_a_number_of_natural_clients_is_drawn():
    who = np.repeat(np.arange(20), 5)

    def chosen(seed):
        rows = partition("natural", ask(np.zeros(100, int), 6, seed=seed, clients=who)).rows
        assert all(len(set(who[r])) == 1 for r in rows)
        return [int(who[r[0]]) for r in rows]

    assert len(set(chosen(0))) == 6
    assert chosen(0) == chosen(0)
    assert chosen(0) != chosen(1)


def test_more_natural_clients_than_there_are_is_refused():
    with pytest.raises(ValueError, match="num_clients=3: the data set has 2 natural clients"):
        partition("natural", ask(np.zeros(10, int), 3, clients=np.repeat([0, 1], 5)))


def test_natural_without_clients_is_refused():
    with pytest.raises(ValueError, match="no natural clients; try dirichlet"):
        partition("natural", ask(np.zeros(10, int), 2))


@pytest.mark.parametrize("name", list(PARTITIONS))
def test_too_many_clients_are_refused(name):
    with pytest.raises(ValueError, match="num_clients=6: the data set has 10 samples"):
        partition(name, ask(np.zeros(10, int), 6, clients=np.arange(10), sources=np.arange(10)))


@pytest.mark.parametrize("name", sorted(set(PARTITIONS) - {"natural", "by-source"}))
def test_rules_that_do_not_know_their_clients_need_a_number(name):
    with pytest.raises(ValueError, match="num_clients=0: must be at least 1"):
        partition(name, ask(balanced(10), 0))


@pytest.mark.parametrize("name", list(PARTITIONS))
def test_a_rule_uses_only_the_settings_it_names(name):
    question = ask(balanced(40), 5, clients=np.arange(400) % 8, sources=np.arange(400) % 3)
    other = dataclasses.replace(
        question,
        rng=rng.generator(0, "partition"),
        alpha=question.alpha if "alpha" in PARTITIONS[name].uses else 50.0,
        classes_per_client=question.classes_per_client if "classes_per_client" in PARTITIONS[name].uses else 5,
        samples_per_class=0 if "samples_per_class" in PARTITIONS[name].uses else 5,
    )
    first, second = partition(name, question).rows, partition(name, other).rows
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


# A test part dealt by the same rule


def two_parts(train_per_class=30, test_per_class=12, classes=10):
    """Labels of a training part, then of a test part, and which is which."""
    labels = np.concatenate([balanced(train_per_class, classes), balanced(test_per_class, classes)])
    return labels, np.arange(len(labels)) >= train_per_class * classes


@pytest.mark.parametrize("name", ["shards", "classes", "by-class"])
def test_a_test_part_goes_to_the_clients_that_hold_its_classes(name):
    labels, test = two_parts()
    parts, tests = dealt(name, ask(labels, 10, most=6, test_samples_per_class=4), test)
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
    parts, _ = dealt("classes", ask(labels, 10), test)
    alone = partition("classes", ask(labels[~test], 10))  # the training part comes first: rows count the same
    assert [r.tolist() for r in parts.rows] == [r.tolist() for r in alone.rows]


def test_sources_keep_their_test_part():
    labels, test = two_parts()
    sources = np.arange(len(labels)) % 3
    parts, tests = dealt("by-source", ask(labels, 6, sources=sources), test)
    for c in range(6):
        assert set(sources[parts.rows[c]]) == set(sources[tests[c]]) == {c % 3}


def test_natural_clients_keep_their_given_rows_and_need_both_parts():
    clients = np.array([0, 0, 0, 1, 1, 1, 2, 2, 0, 0, 1, 3, 3])
    test = np.arange(13) >= 8  # client 2 has no test rows, client 3 no training rows
    parts, tests = dealt("natural", ask(np.zeros(13, int), 0, clients=clients), test)
    assert [r.tolist() for r in parts.rows] == [[0, 1, 2], [3, 4, 5]]
    assert [r.tolist() for r in tests] == [[8, 9], [10]]
    assert parts.notes == {"clients_left_out": 2}
    with pytest.raises(ValueError, match="no natural client has both training and test samples"):
        dealt("natural", ask(np.zeros(13, int), 0, clients=test.astype(int)), test)


def test_parts_with_different_classes_cannot_be_dealt_alike():
    labels, test = two_parts()
    labels[test] = labels[test].clip(max=8)
    with pytest.raises(ValueError, match="different classes"):
        dealt("shards", ask(labels, 10), test)


def test_rules_whose_draws_depend_on_quantities_are_not_repeated():
    assert set(REPEATED) == {"iid", "classes", "shards", "dominant", "natural", "by-class", "by-source"}


# Many clients in one array: the same as client by client


def slow_iid(ask):
    return [np.sort(p) for p in np.array_split(ask.rng.permutation(len(ask.labels)), ask.num_clients)]


def slow_quantity(ask):
    total = len(ask.labels)
    above = ask.rng.dirichlet(np.full(ask.num_clients, ask.alpha)) * total - ask.least
    above, room = above.clip(min=0), total - ask.num_clients * ask.least
    extra = above * (room / above.sum()) if room else np.zeros(ask.num_clients)
    ends = np.cumsum(extra).astype(np.int64) + ask.least * np.arange(1, ask.num_clients + 1)
    return [np.sort(p) for p in np.split(ask.rng.permutation(total), ends[:-1])]


def slow_dirichlet(ask):
    held = np.zeros(ask.num_clients, np.int64)
    fair = len(ask.labels) / ask.num_clients
    rows: list[list[int]] = [[] for _ in range(ask.num_clients)]
    for k in range(ask.classes):
        mine = ask.rng.permutation(np.flatnonzero(ask.labels == k))
        if not len(mine):
            continue
        shares = ask.rng.dirichlet(np.full(ask.num_clients, ask.alpha)) * (held < fair)
        if shares.sum() <= 0:
            shares = (held < fair).astype(float)
        ends = np.cumsum(shares)
        for client, part in enumerate(np.split(mine, (ends / ends[-1] * len(mine)).astype(int)[:-1])):
            rows[client].append(part)
            held[client] += len(part)
    return slow_top_up([np.concatenate(r) for r in rows], ask)


def slow_top_up(rows, ask):
    counts = np.array([np.bincount(ask.labels[r], minlength=ask.classes) for r in rows])
    sizes = counts.sum(1)
    for needy in np.flatnonzero(sizes < ask.least):
        while (need := ask.least - int(sizes[needy])) > 0:
            donor = int(sizes.argmax())
            k = int(counts[donor].argmax())
            take = min(need, int(counts[donor, k]), int(sizes[donor]) - ask.least)
            gone = ask.rng.choice(rows[donor][ask.labels[rows[donor]] == k], take, replace=False)
            rows[donor] = np.setdiff1d(rows[donor], gone)
            rows[needy] = np.concatenate([rows[needy], gone])
            counts[donor, k] -= take
            counts[needy, k] += take
            sizes[[donor, needy]] += (-take, take)
    return [np.sort(r) for r in rows]


@pytest.mark.parametrize(
    ("name", "slow"), [("iid", slow_iid), ("quantity", slow_quantity), ("dirichlet", slow_dirichlet)]
)
@pytest.mark.parametrize(("clients", "per_class"), [(1, 5), (7, 30), (40, 30), (90, 21)])
def test_all_clients_at_once_are_the_same_as_one_by_one(name, slow, clients, per_class):
    labels = np.setdiff1d(np.arange(per_class * 10), [3]) % 10
    labels = labels[labels != 6]  # a class nobody has
    for seed in range(3):
        for alpha in (0.05, 1.0):
            fast = partition(name, ask(labels, clients, seed=seed, alpha=alpha)).rows
            expected = slow(ask(labels, clients, seed=seed, alpha=alpha))
            assert [r.tolist() for r in fast] == [r.tolist() for r in expected]


def test_rows_behave_as_a_list_of_arrays():
    parts = [np.array([5, 2]), np.array([], int), np.array([9, 1, 4])]
    rows = Rows.of(parts)
    assert len(rows) == 3 and [r.tolist() for r in rows] == [p.tolist() for p in parts]
    assert rows[-1].tolist() == [9, 1, 4] and rows.sizes.tolist() == [2, 0, 3]
    assert rows.holders().tolist() == [0, 0, 2, 2, 2]
    assert [r.tolist() for r in rows.sorted()] == [[2, 5], [], [1, 4, 9]]
    assert [r.tolist() for r in rows.taken(np.array([2, 0, 1]))] == [[9, 1, 4], [5, 2], []]
    assert [r.tolist() for r in rows[1:]] == [[], [9, 1, 4]]
    with pytest.raises(IndexError):
        rows[3]


# FedPAC's and FedPHP's


def test_dominant_classes_are_fedpacs():
    labels = balanced(5000)
    parts = partition("dominant", ask(labels, 20, classes_per_client=3))
    counts = held_counts(labels, parts.rows)
    groups = [{0, 1, 2}, {2, 3, 4}, {4, 5, 6}, {6, 7, 8}, {8, 9, 0}]
    for client, own in enumerate(counts):
        # 600 samples: 120 of all ten classes, 480 of three
        assert own.tolist() == [12 + (160 if k in groups[client % 5] else 0) for k in range(10)]
    assert len(np.unique(np.concatenate(list(parts.rows)))) == 20 * 600
    assert parts.notes == {"samples_left_out": 50_000 - 12_000}


def test_a_dealt_test_part_has_the_dominant_classes_too():
    labels, test = two_parts(5000, 1000)
    parts, tests = dealt("dominant", ask(labels, 20, classes_per_client=3), test)
    wanted, had = held_counts(labels, tests), held_counts(labels, parts.rows)
    assert (wanted * 2 == had).all()  # 300 and 600


def test_a_dealt_test_part_gives_what_it_has_and_says_when_more_is_asked_of_it():
    labels, test = two_parts(5000, 100)
    parts, tests = dealt("dominant", ask(labels, 10, classes_per_client=3), test)
    assert {len(r) for r in parts.rows} == {600}
    assert {len(r) for r in tests} == {77}  # not 300: ten clients of 100 samples per class, as below
    asked = dataclasses.replace(ask(labels, 10, classes_per_client=3), test_samples_per_client=150)
    with pytest.raises(ValueError, match=r"than the test part has; .* at most 77 test_samples_per_client"):
        dealt("dominant", asked, test)
    with pytest.raises(ValueError, match="num_clients=501: the test part has 1000 samples"):
        dealt("iid", ask(labels, 501), test)
    with pytest.raises(ValueError, match="num_clients=25001: the training part has 50000 samples"):
        dealt("iid", ask(labels, 25001), test)


def test_odd_numbers_go_to_the_last_class():
    # 25 samples, a fifth uniform: 5 over 4 classes are 1 each and one more, 20 over 3 are 6 and two more
    labels = balanced(100, 4)
    parts = partition("dominant", ask(labels, 2, classes=4, classes_per_client=3, samples_per_client=25))
    assert held_counts(labels, parts.rows, 4).tolist() == [[7, 7, 9, 2], [9, 1, 7, 8]]


def test_dominant_clients_have_fewer_samples_where_600_do_not_suffice():
    labels = balanced(100)
    parts = partition("dominant", ask(labels, 10, classes_per_client=3))
    # 77 = 15 uniform (one of each class, five more of class 9) + 20 + 20 + 22; class 9 is then used up by ten clients
    # with 6 and two with 20 more. 78 would be 21 more, 80 seven for each, 100 too many of class 0.
    assert {len(r) for r in parts.rows} == {77}
    assert held_counts(labels, parts.rows)[:, 9].sum() == 10 * 6 + 2 * 20
    with pytest.raises(ValueError, match=r"10 clients x 150 samples need more of class 0 .* at most \d\d samples_per_"):
        partition("dominant", ask(labels, 10, classes_per_client=3, samples_per_client=150))
    with pytest.raises(ValueError, match="classes_per_client=11: the data have 10 classes"):
        partition("dominant", ask(labels, 10, classes_per_client=11))


@pytest.mark.parametrize("alpha", [0.1, 1.0])
def test_dirichlet_of_clients_deals_classes_in_proportion_to_what_clients_want(alpha):
    labels = balanced(600)
    rows = partition("dirichlet-client", ask(labels, 30, alpha=alpha)).rows
    assert_covers(rows, 6000)
    wanted = ask(labels, 30).rng.dirichlet(np.full(10, alpha), 30)
    expected = wanted / wanted.sum(0) * 600  # [clients, classes]
    assert expected.sum(1).min() > 41  # so that nobody has to take samples of others
    assert np.abs(held_counts(labels, rows) - expected).max() <= 1


def test_the_two_dirichlet_draws_differ():
    labels = balanced(600)
    a, b = (partition(n, ask(labels, 30)).rows for n in ("dirichlet", "dirichlet-client"))
    assert [len(r) for r in a] != [len(r) for r in b]
