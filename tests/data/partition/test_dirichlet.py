"""Dirichlet draws, one by one and many clients at once."""

import dataclasses
import itertools

import numpy as np
import pytest

from personafl import config, experiment
from personafl.core import rng
from personafl.core.errors import UserError
from personafl.data.partition import partition
from tests.data.partition.common import assert_covers, balanced, held_counts, request


@pytest.mark.parametrize("alpha", [0.01, 0.1, 1.0, 100.0])
def test_dirichlet_deals_every_sample_once_and_enough_to_everybody(alpha):
    question = request(balanced(200), 20)
    parts = partition("dirichlet", question, alpha=alpha)
    assert question.least == 40  # min(40, 2000 / 20 / 2 = 50)
    assert len(parts.rows) == 20
    assert_covers(parts.rows, 2000)
    assert min(map(len, parts.rows)) >= 40


def test_dirichlet_of_many_clients_and_small_alpha_ends_and_reports_what_it_moved():
    parts = partition("dirichlet", request(balanced(6000), 500), alpha=0.01)
    assert_covers(parts.rows, 60_000)
    assert min(map(len, parts.rows)) >= 40
    # With ten classes of a few large shares each, most of 500 clients are below 40 before samples are moved.
    assert 10_000 < parts.notes["samples_moved"] <= 500 * 40


def test_dirichlet_moves_nothing_where_everybody_has_enough():
    assert partition("dirichlet", request(balanced(200), 10), alpha=100.0).notes == {"samples_moved": 0}


def test_moved_samples_are_counted():
    # Two samples per client are the least, and 10 samples for five clients leave no choice: two each.
    parts = partition("dirichlet", request(np.zeros(10, int), 5, classes=1), alpha=0.01)
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

    asked = dataclasses.replace(request(balanced(6000), 500), rng=Counting(np.random.PCG64(0)))
    parts = partition("dirichlet", asked, alpha=0.1)
    assert Counting.calls == 10
    assert min(len(r) for r in parts.rows) >= asked.least == 40
    assert_covers(parts.rows, 60_000)


def test_small_alpha_concentrates_and_large_alpha_spreads():
    def top_share(alpha):
        labels = balanced(200)
        rows = partition("dirichlet", request(labels, 20), alpha=alpha).rows
        return np.mean([np.bincount(labels[r]).max() / len(r) for r in rows])

    assert top_share(0.05) > 0.6
    assert top_share(100.0) < 0.3  # ten equal classes would be 0.1


def test_dirichlet_is_a_function_of_its_seed():
    def rows(seed):
        return partition("dirichlet", request(balanced(100), 10, seed=seed), alpha=0.1).rows

    assert all(np.array_equal(a, b) for a, b in zip(rows(3), rows(3), strict=True))
    assert any(not np.array_equal(a, b) for a, b in zip(rows(3), rows(4), strict=True))


def test_a_client_with_its_fair_share_gets_nothing_of_later_classes():
    labels = balanced(100)
    drawn = [partition("dirichlet", request(labels, 10, seed=seed), alpha=1.0) for seed in range(20)]
    untouched = [parts for parts in drawn if not parts.notes["samples_moved"]]
    assert len(untouched) > 5
    for parts in untouched:
        for rows in parts.rows:
            held = labels[rows]
            assert (held < held.max()).sum() < 100  # 1000 samples over 10 clients, before its last class


def test_without_balancing_clients_have_what_was_drawn():
    """DM-PFL's text: each class in proportion to its own draw, whatever a client has already."""
    labels = balanced(2000)
    parts = partition("dirichlet", request(labels, 20), alpha=1.0, self_balancing=False)
    assert parts.notes == {"samples_moved": 0}
    counts, draw = held_counts(labels, parts.rows), request(labels, 20).rng
    for k in range(10):
        draw.permutation(2000)
        wanted = draw.dirichlet(np.ones(20)) * 2000
        assert np.abs(counts[:, k] - wanted).max() < 1  # cut to whole numbers
    assert_covers(parts.rows, 20_000)


def test_sizes_spread_as_the_draws_do_unless_they_are_balanced():
    labels = balanced(2000)

    def spread(**settings):
        rows = [partition("dirichlet", request(labels, 20, seed=s), alpha=1.0, **settings).rows for s in range(40)]
        return np.sqrt(np.mean([np.var([len(r) for r in own]) for own in rows]))

    # A client's share of a class has variance (1 / 20)(19 / 20) / (20 alpha + 1) = 0.00226; ten classes of 2000 give
    # sizes with a deviation of 2000 sqrt(10 * 0.00226) = 301 around 1000. Over 40 * 19 free sizes that is known to
    # 1 / sqrt(2 * 760) = 2.6 %.
    assert abs(spread(self_balancing=False) / 301 - 1) < 4 * 0.026
    # Balanced, a client passes 1000 only by the last class it gets something of, so sizes lie nearer together.
    assert spread() < 0.8 * 301


def test_dirichlet_accepts_classes_nobody_has():
    parts = partition("dirichlet", request(np.zeros(10, int), 1, classes=3))
    assert_covers(parts.rows, 10)


@pytest.mark.parametrize("alpha", [0.01, 0.5, 100.0])
def test_quantity_skews_sizes_and_not_labels(alpha):
    labels = balanced(600)
    parts = partition("quantity", request(labels, 20), alpha=alpha)
    assert_covers(parts.rows, 6000)
    sizes = np.array([len(r) for r in parts.rows])
    assert sizes.min() >= 40  # the least: min(40, 6000 / 20 / 2)
    largest = parts.rows[int(sizes.argmax())]  # at least 300 samples, so about 30 or more per class
    assert np.abs(np.bincount(labels[largest], minlength=10) / len(largest) - 0.1).max() < 0.08
    assert (sizes.max() > 1000) == (alpha < 1)  # Dirichlet(100) over 20 clients: 300, deviation about 30


def test_quantity_is_the_draw_itself_where_everybody_has_enough():
    question = request(balanced(600), 20)
    shares = rng.generator(0, "partition").dirichlet(np.full(20, 100.0)) * 6000
    parts = partition("quantity", question, alpha=100.0)
    assert parts.notes == {"clients_lifted": 0}
    assert np.abs([len(r) for r in parts.rows] - shares).max() <= 1  # whole samples


def test_quantity_with_two_samples_each_leaves_no_choice():
    parts = partition("quantity", request(np.zeros(10, int), 5), alpha=0.01)
    assert [len(r) for r in parts.rows] == [2] * 5


def slow_iid(request, _):
    return [np.sort(p) for p in np.array_split(request.rng.permutation(len(request.labels)), request.num_clients)]


def slow_quantity(request, alpha):
    total = len(request.labels)
    above = request.rng.dirichlet(np.full(request.num_clients, alpha)) * total - request.least
    above, room = above.clip(min=0), total - request.num_clients * request.least
    extra = above * (room / above.sum()) if room else np.zeros(request.num_clients)
    ends = np.cumsum(extra).astype(np.int64) + request.least * np.arange(1, request.num_clients + 1)
    return [np.sort(p) for p in np.split(request.rng.permutation(total), ends[:-1])]


def slow_dirichlet(request, alpha):
    held = np.zeros(request.num_clients, np.int64)
    fair = len(request.labels) / request.num_clients
    rows: list[list[int]] = [[] for _ in range(request.num_clients)]
    for k in range(request.classes):
        mine = request.rng.permutation(np.flatnonzero(request.labels == k))
        if not len(mine):
            continue
        shares = request.rng.dirichlet(np.full(request.num_clients, alpha)) * (held < fair)
        if shares.sum() <= 0:
            shares = (held < fair).astype(float)
        ends = np.cumsum(shares)
        for client, part in enumerate(np.split(mine, (ends / ends[-1] * len(mine)).astype(int)[:-1])):
            rows[client].append(part)
            held[client] += len(part)
    return slow_top_up([np.concatenate(r) for r in rows], request)


def slow_top_up(rows, request):
    counts = np.array([np.bincount(request.labels[r], minlength=request.classes) for r in rows])
    sizes = counts.sum(1)
    for needy in np.flatnonzero(sizes < request.least):
        while (need := request.least - int(sizes[needy])) > 0:
            donor = int(sizes.argmax())
            k = int(counts[donor].argmax())
            take = min(need, int(counts[donor, k]), int(sizes[donor]) - request.least)
            gone = request.rng.choice(rows[donor][request.labels[rows[donor]] == k], take, replace=False)
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
            settings = {} if name == "iid" else {"alpha": alpha}
            fast = partition(name, request(labels, clients, seed=seed), **settings).rows
            expected = slow(request(labels, clients, seed=seed), alpha)
            assert [r.tolist() for r in fast] == [r.tolist() for r in expected]


@pytest.mark.parametrize("alpha", [0.1, 1.0])
def test_dirichlet_of_clients_deals_classes_in_proportion_to_what_clients_want(alpha):
    labels = balanced(600)
    rows = partition("dirichlet-client", request(labels, 30), alpha=alpha).rows
    assert_covers(rows, 6000)
    wanted = request(labels, 30).rng.dirichlet(np.full(10, alpha), 30)
    expected = wanted / wanted.sum(0) * 600  # [clients, classes]
    assert expected.sum(1).min() > 41  # so that nobody has to take samples of others
    assert np.abs(held_counts(labels, rows) - expected).max() <= 1


def test_the_two_dirichlet_draws_differ():
    labels = balanced(600)
    a, b = (partition(n, request(labels, 30)).rows for n in ("dirichlet", "dirichlet-client"))
    assert [len(r) for r in a] != [len(r) for r in b]


def wanted_by_groups(members, alpha, first, classes, seed=0):
    """Every client's share of every class: the equal part for the first, what is left by their groups' vectors."""
    draws = rng.generator(seed, "partition").dirichlet([alpha] * classes, len(members))
    vectors = [draws[g] for g, size in enumerate(members) for _ in range(size)]
    count = len(vectors)
    out = []
    for c in range(count):
        own = []
        for k in range(classes):
            others = sum(vectors[d][k] for d in range(first, count))
            own.append(1 / count if c < first else vectors[c][k] / others * (count - first) / count)
        out.append(own)
    return np.array(out)


@pytest.mark.parametrize(
    ("groups", "global_groups", "alpha"),
    [((4, 4, 4, 4, 4), 0, 0.5), ((15, 1, 1, 1, 1, 1), 1, 0.5), ((3, 2, 5, 2), 2, 0.5), ((2, 4), 2, 0.1)],
    ids=["five-of-four", "fifteen-like-all", "two-like-all", "all-like-all"],
)
def test_members_of_a_group_have_the_same_part_of_every_class(groups, global_groups, alpha):
    labels = np.concatenate([balanced(400), np.zeros(100, int)])  # 500 of class 0
    settings = {"groups": groups, "global_groups": global_groups, "alpha": alpha}
    parts = partition("grouped", request(labels, sum(groups)), **settings)
    assert_covers(parts.rows, 4100)
    assert parts.notes == {"samples_moved": 0}
    counts = held_counts(labels, parts.rows)
    shares = wanted_by_groups(groups, alpha, sum(groups[:global_groups]), 10)
    assert (np.abs(counts - shares * [500, *[400] * 9]) <= 1).all()  # rounded
    first = np.cumsum([0, *groups[:-1]])  # client of each group
    for a, b in itertools.combinations(range(len(groups)), 2):
        unlike = np.abs(counts[first[a]] - counts[first[b]]).max()
        assert unlike > 10 or b < global_groups  # these have the same classes


def test_without_sizes_there_are_five_groups_as_equal_as_can_be():
    labels = balanced(200)
    for clients, sizes in ((20, (4, 4, 4, 4, 4)), (12, (3, 3, 2, 2, 2)), (3, (1, 1, 1))):
        found, told = (partition("grouped", request(labels, clients), groups=g).rows for g in ((), sizes))
        assert all(np.array_equal(a, b) for a, b in zip(found, told, strict=True))


def test_groups_follow_their_seed_and_leave_nobody_with_too_little():
    labels = balanced(100)
    first, again, other = (partition("grouped", request(labels, 20, seed=s), alpha=0.01) for s in (2, 2, 4))
    assert all(np.array_equal(a, b) for a, b in zip(first.rows, again.rows, strict=True))
    assert any(not np.array_equal(a, b) for a, b in zip(first.rows, other.rows, strict=True))
    assert_covers(first.rows, 1000)
    assert min(map(len, first.rows)) >= request(labels, 20).least == 25
    assert first.notes["samples_moved"] > 0  # at this seed a group's class is another's too


def test_a_class_that_no_group_drew_is_shared_by_all_of_them():
    """Of Dirichlet(1e-300) vectors each is all in one class, so two groups draw one or two of ten classes."""
    labels = balanced(100)
    vectors = rng.generator(0, "partition").dirichlet([1e-300] * 10, 2)
    drawn = {int(k) for k in np.flatnonzero(vectors.sum(0))}
    assert 1 <= len(drawn) <= 2
    counts = held_counts(labels, partition("grouped", request(labels, 4), groups=(2, 2), alpha=1e-300).rows)
    for k in set(range(10)) - drawn:
        assert counts[:, k].tolist() == [25, 25, 25, 25]
    for k in drawn:
        assert counts[:, k].tolist() == [25 if len(drawn) == 1 else 50 * int(vectors[c // 2, k]) for c in range(4)]


def test_groups_that_cannot_be_are_refused():
    def asked(**settings):
        partition("grouped", request(balanced(100), 20), **settings)

    with pytest.raises(UserError, match=r"grouped: groups=\[4, 4\]: 8 clients in all, but num_clients=20"):
        asked(groups=(4, 4))
    with pytest.raises(UserError, match=r"groups=\[20, 0\]: must be at least 1 each"):
        asked(groups=(20, 0))
    with pytest.raises(UserError, match="grouped: global_groups=6: there are 5 groups; use at most that"):
        asked(global_groups=6)
    with pytest.raises(UserError, match="global_groups=-1: must be at least 0"):
        asked(global_groups=-1)


def test_a_recipe_has_groups_as_a_list(tmp_path):
    own = ["data.partition=grouped", "data.groups=[15,1,1,1,1,1]", "data.global_groups=1", "data.alpha=0.1"]
    chosen = config.load(None, own)
    assert chosen.data.partition_settings == {"groups": (15, 1, 1, 1, 1, 1), "global_groups": 1, "alpha": 0.1}
    (tmp_path / "recipe.toml").write_text(config.dump(chosen))
    assert config.load(tmp_path / "recipe.toml").data == chosen.data
    counts = experiment.federation(chosen).class_counts()
    whole = counts.sum(0) / counts.sum()
    apart = [float(abs(own / own.sum() - whole).sum()) for own in counts]
    assert max(apart[:15]) < 0.1 < 0.5 < min(apart[15:])
    with pytest.raises(UserError, match=r"data\.groups=\[4, 0\]: must be at least 1 each"):
        config.load(None, ["data.partition=grouped", "data.groups=[4,0]"])
