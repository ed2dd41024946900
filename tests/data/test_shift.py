import numpy as np
import pytest
import torch

from personafl.core import rng
from personafl.data import Federation, Source, federated, shift

SIZES = (40, 8, 20, 12)  # a quarter of each is for testing: 10, 2, 5, 3


@pytest.fixture(scope="module")
def federation():
    total = sum(SIZES)
    source = Source("toy", torch.arange(float(total)).unsqueeze(1), torch.zeros(total, dtype=torch.int64), 1)
    return Federation.build(source, np.split(np.arange(total), np.cumsum(SIZES)[:-1]), seed=0)


def of(ragged, client):
    return ragged.values[ragged.offsets[client] : ragged.offsets[client + 1]].tolist()


def donors_of(drawn):
    """Everybody's, `[draws, clients]`."""
    return drawn.donors_of(torch.arange(drawn.federation.num_clients))


def own(federation, client):
    return of(federation.splits["test"], client)


def test_a_donor_is_never_oneself_and_anybody_else(federation):
    donors = donors_of(shift.draw(federation, "donor", seed=0, draws=60))
    assert donors.shape == (60, 4)
    for client in range(4):
        assert set(donors[:, client].tolist()) == {0, 1, 2, 3} - {client}


def test_donors_are_drawn_uniformly(federation):
    donors = donors_of(shift.draw(federation, "donor", seed=0, draws=600))
    for client in range(4):
        counts = torch.bincount(donors[:, client], minlength=4)
        counts = counts[torch.arange(4) != client]
        # 200 expected of each of three, deviation sqrt(600 * 1/3 * 2/3) = 11.5
        assert (counts - 200).abs().max() < 5 * 11.5


def test_replacements_are_of_the_donors_test_set(federation):
    drawn = shift.draw(federation, "donor", seed=0, draws=10)
    for d, rows in enumerate(drawn.rows):
        for client in range(4):
            assert set(of(rows, client)) <= set(own(federation, int(donors_of(drawn)[d, client])))
            assert len(of(rows, client)) == len(own(federation, client))


def test_places_are_an_order_of_ones_own_test_set(federation):
    for places in shift.draw(federation, "donor", seed=0, draws=5).places:
        for client in range(4):
            assert sorted(of(places, client)) == list(range(len(own(federation, client))))


def test_a_sample_is_drawn_twice_only_if_the_donor_is_too_small(federation):
    drawn = shift.draw(federation, "donor", seed=0, draws=30)
    enough, too_small = 0, 0
    for d, rows in enumerate(drawn.rows):
        for client in range(4):
            mine, donor = own(federation, client), own(federation, int(donors_of(drawn)[d, client]))
            new = of(rows, client)
            if len(donor) >= len(mine):
                enough += 1
                assert len(set(new)) == len(mine)
            else:
                too_small += 1
                assert len(set(new)) <= len(donor) < len(mine)
    assert enough > 0
    assert too_small > 0


def test_the_pool_is_everybodys_test_data(federation):
    drawn = shift.draw(federation, "pool", seed=0, draws=60)
    assert (donors_of(drawn) == -1).all()
    everybody = {row for client in range(4) for row in own(federation, client)}
    for client in range(4):
        new = [of(rows, client) for rows in drawn.rows]
        assert set().union(*new) == everybody  # oneself included
        assert all(len(set(rows)) == len(rows) for rows in new)  # 20 rows are enough for each


def test_draws_are_a_function_of_the_seed(federation):
    digest = shift.draw(federation, "donor", seed=0, draws=5).digest()
    assert digest == shift.draw(federation, "donor", seed=0, draws=5).digest()
    assert digest != shift.draw(federation, "donor", seed=1, draws=5).digest()
    assert digest != shift.draw(federation, "pool", seed=0, draws=5).digest()


def test_asking_for_more_draws_keeps_the_first_ones(federation):
    few, many = (shift.draw(federation, "donor", seed=0, draws=n) for n in (2, 5))
    assert len(many.rows) == 5
    for d in range(2):
        assert torch.equal(few.rows[d].values, many.rows[d].values)
        assert torch.equal(few.places[d].values, many.places[d].values)
    assert not torch.equal(many.rows[0].values, many.rows[1].values)


def test_one_client_alone_has_no_donor():
    source = Source("toy", torch.zeros(8, 1), torch.zeros(8, dtype=torch.int64), 1)
    single = Federation.build(source, [np.arange(8)], seed=0)
    with pytest.raises(ValueError, match="one client alone has no donor"):
        shift.draw(single, "donor", seed=0, draws=5)
    assert len(of(shift.draw(single, "pool", seed=0, draws=5).rows[0], 0)) == 2


@pytest.fixture(scope="module")
def labelled():
    """Two large clients and a small one; four classes of which the clients have none, most or all of the third."""
    sizes = (4000, 4000, 12)
    labels = np.concatenate([np.arange(4000) % 2, 2 + np.arange(4000) % 3 // 2, np.arange(12) % 4])
    source = Source("toy", torch.zeros(sum(sizes), 1), torch.from_numpy(labels), 5)  # nobody has class 4
    return Federation.build(source, np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1]), seed=0)


def test_under_label_shift_classes_follow_a_mix_the_client_draws(labelled):
    drawn = shift.draw(labelled, "label", seed=3, draws=4)
    assert (donors_of(drawn) == -1).all()
    mixes = []
    for d in range(4):
        for client in (0, 1):
            mix = rng.generator(3, "shift", d, client).dirichlet(np.ones(4))  # over the classes there are
            counts = np.bincount(labelled.source.y[drawn.of(d, client)[0]], minlength=5)
            assert counts.sum() == 1000 and counts[4] == 0
            chi_square = ((counts[:4] - 1000 * mix) ** 2 / (1000 * mix)).sum()
            assert chi_square < 21.1  # three degrees of freedom: exceeded once in ten thousand
            mixes.append(mix)
    assert np.std(mixes, 0).min() > 0.05  # every client and draw has another


def test_under_label_shift_samples_of_a_class_are_like_any_other(labelled):
    # All clients' test rows of a class are as likely, and none comes twice while there are enough.
    pool = [row for client in range(3) for row in own(labelled, client)]
    drawn = shift.draw(labelled, "label", seed=0, draws=1)
    for client in range(3):
        new = of(drawn.rows[0], client)
        assert set(new) <= set(pool)
    classes = labelled.source.y.numpy()
    ones = [r for r in pool if classes[r] == 1]
    new = [of(r, 2) for r in shift.draw(labelled, "label", seed=0, draws=400).rows]  # three places
    taken = [r for rows in new for r in rows if classes[r] == 1]
    # 1,200 places, a quarter of them of class 1 on average; halves of the class are as likely
    half = sum(r in set(ones[: len(ones) // 2]) for r in taken)
    assert abs(half - len(taken) / 2) < 5 * np.sqrt(len(taken)) / 2
    assert 200 < len(taken) < 400


def test_label_shift_is_nested_in_its_degree(labelled):
    rows, places = shift.draw(labelled, "label", seed=0, draws=1).of(0, 2)
    before = torch.tensor(own(labelled, 2))
    for count in (1, 2, 3):
        now = shift.mix_scores(torch.tensor(own(labelled, 2)), rows, places, count / 3)
        assert torch.equal(now[places[:count]], rows[:count])
        assert torch.equal(now[places[: count - 1]], before[places[: count - 1]])
        before = now


OWN, FOREIGN, PLACES = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]), -torch.arange(1.0, 6.0), torch.tensor([3, 0, 4, 1, 2])


def test_degree_zero_is_ones_own_test_set():
    assert torch.equal(shift.mix_scores(OWN, FOREIGN, PLACES, 0.0), OWN)


def test_degree_one_is_all_foreign():
    out = shift.mix_scores(OWN, FOREIGN, PLACES, 1.0)
    assert sorted(out.tolist()) == sorted(FOREIGN.tolist())
    assert out.mean() == FOREIGN.mean()


def test_a_degree_in_between_replaces_its_share_in_order():
    # 0.4 of five places: the first two of the order, places 3 and 0, by the first two foreign scores
    assert shift.mix_scores(OWN, FOREIGN, PLACES, 0.4).tolist() == [-2, 2, 3, -1, 5]


def test_what_is_replaced_at_a_degree_is_replaced_at_every_larger_one():
    before = shift.mix_scores(OWN, FOREIGN, PLACES, 0.0)
    for degree, count in ((0.2, 1), (0.4, 2), (0.6, 3), (0.8, 4), (1.0, 5)):
        now = shift.mix_scores(OWN, FOREIGN, PLACES, degree)
        assert (now < 0).sum() == count
        assert torch.equal(now[before < 0], before[before < 0])
        before = now


def test_mixing_leaves_its_inputs_alone():
    scores = OWN.clone()
    shift.mix_scores(scores, FOREIGN, PLACES, 1.0)
    assert torch.equal(scores, OWN)


# Client by client


def slow(federation, protocol, seed, draws):
    """All draws in plain loops: replacements and places per draw and client."""
    tests = [own(federation, c) for c in range(federation.num_clients)]
    pool = np.array([row for rows in tests for row in rows])
    labels = federation.source.y.numpy()
    kinds = [pool[labels[pool] == k] for k in np.unique(labels[pool])]
    out = []
    for d in range(draws):
        for c, mine in enumerate(tests):
            key, size = rng.generator(seed, "shift", d, c), len(mine)
            if protocol == "donor":
                other = int(key.integers(len(tests) - 1))
                theirs = np.array(tests[other + (other >= c)])
                new = key.choice(theirs, size, replace=len(theirs) < size)
            elif protocol == "pool":
                new = key.choice(pool, size, replace=len(pool) < size)
            else:
                which = key.choice(len(kinds), size, p=key.dirichlet(np.ones(len(kinds))))
                new = np.zeros(size, int)
                for k in np.unique(which):
                    count = int((which == k).sum())
                    new[which == k] = key.choice(kinds[k], count, replace=len(kinds[k]) < count)
            out.append((new.tolist(), key.permutation(size).tolist()))
    return out


@pytest.mark.parametrize("protocol", ["donor", "pool", "label"])
@pytest.mark.parametrize("later", [False, True])
def test_draws_of_one_client_are_those_of_all(labelled, protocol, later, monkeypatch):
    expected, built = slow(labelled, protocol, 5, 3), labelled
    if later:
        monkeypatch.setattr(federated, "LAZY_FROM", 1)
        built = Federation.build(labelled.source, np.split(np.arange(8012), [4000, 8000]), seed=0)
        assert isinstance(built.splits["test"], federated.LazySplit)
    drawn = shift.draw(built, protocol, seed=5, draws=3)
    asked = [(d, c) for d in range(3) for c in range(labelled.num_clients)]
    found = {at: tuple(t.tolist() for t in drawn.of(*at)) for at in reversed(asked)}  # in any order
    assert [found[at] for at in asked] == expected
    assert [of(drawn.rows[d], c) for d, c in asked] == [new for new, _ in expected]
    assert torch.equal(drawn.donors_of(torch.tensor([2, 0])), donors_of(drawn)[:, [2, 0]])


def test_every_draw_is_made_once_and_none_for_the_hash_of_very_many(federation, monkeypatch):
    made = []
    real = shift.Shift._drawn
    monkeypatch.setattr(shift.Shift, "_drawn", lambda self, *at: made.append(at) or real(self, *at))
    drawn = shift.draw(federation, "donor", seed=0, draws=2)
    first = drawn.digest()
    assert (drawn.digest(), len(drawn.places), len(drawn.of(1, 0))) == (first, 2, 2)
    assert sorted(made) == [(d, c) for d in range(2) for c in range(federation.num_clients)]
    monkeypatch.setattr(federated, "LAZY_FROM", federation.num_clients)  # drawn at once, as from a file
    made.clear()
    assert shift.draw(federation, "donor", seed=0, draws=2).digest() != first
    assert made == []


def test_the_hash_of_very_many_clients_draws_tells_protocols_and_seeds_apart(federation, monkeypatch):
    monkeypatch.setattr(federated, "LAZY_FROM", 1)
    total = sum(SIZES)
    many = Federation.build(federation.source, np.split(np.arange(total), np.cumsum(SIZES)[:-1]), seed=0)
    asked = (("donor", 0, 5), ("pool", 0, 5), ("donor", 1, 5), ("donor", 0, 4))
    assert len({shift.draw(many, p, seed=s, draws=d).digest() for p, s, d in asked}) == 4
