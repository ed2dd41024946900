import numpy as np
import pytest
import torch

from personafl.core import rng

IDS = torch.tensor([3, 5, 9])


def test_words_are_splitmix64():
    # The first three outputs of the published generator at seed 0.
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert [w % 2**64 for w in rng.bits(torch.tensor(0), 3).tolist()] == published


def test_all_ways_to_mix_give_the_same_words():
    """By Python's numbers, by NumPy's, and by PyTorch's, which a GPU takes."""
    words = torch.randint(-(2**63), 2**63 - 1, (64,))
    expected = [rng._mix_int(w) for w in words.tolist()]
    assert rng._mix(words).tolist() == expected
    assert rng._mixed(words.numpy().copy()).tolist() == expected
    assert [int(rng._mixed(w)[0]) for w in words.numpy()[:, None].copy()] == expected


@pytest.mark.parametrize("count", [0, 1, 2, 30])
@pytest.mark.parametrize("numbers", [0, 1, 4, 9])
def test_numbered_streams_are_those_one_level_below(count, numbers):
    keys, passed = rng.key(3, "batches", torch.arange(count)), torch.arange(count) * 2
    for behind in (0, 5, passed):
        found = torch.from_numpy(rng.numbered(keys, np.arange(numbers), behind))
        column = behind if isinstance(behind, int) else behind[:, None]
        assert found.shape == (count, numbers) and found.dtype == torch.int64
        assert torch.equal(found, rng.extend(keys[:, None], torch.arange(numbers) + column))


@pytest.mark.parametrize("count", [0, 1, 2, 30])
def test_several_purposes_at_once_are_each_alone(count):
    ids, purposes = torch.arange(count), ("draws", "batches", "noise")
    found = rng.keys(3, purposes, 7, ids)
    assert found.shape == (3, count) and found.dtype == torch.int64
    for purpose, mine in zip(purposes, found, strict=True):
        assert torch.equal(mine, rng.key(3, purpose, 7, ids))


def test_a_stream_is_the_same_alone_and_in_a_stack():
    stacked = rng.bits(rng.key(7, "batches", 2, IDS), 6)  # [3, 6]
    for row, client in enumerate(IDS.tolist()):
        assert torch.equal(stacked[row], rng.bits(rng.key(7, "batches", 2, client), 6))
        assert torch.equal(stacked[row : row + 1], rng.bits(rng.key(7, "batches", 2, IDS[row : row + 1]), 6))


def test_a_stream_does_not_depend_on_the_order_of_the_stack():
    turned = torch.tensor([2, 0, 1])
    assert torch.equal(rng.key(7, "batches", 2, IDS[turned]), rng.key(7, "batches", 2, IDS)[turned])


def test_asking_for_more_words_keeps_the_first_ones():
    keys = rng.key(0, "noise", IDS)
    assert torch.equal(rng.bits(keys, 20)[:, :7], rng.bits(keys, 7))


def test_keys_differ_in_seed_purpose_round_client_and_epoch():
    keys = [
        int(rng.extend(rng.key(seed, purpose, rnd, client), epoch))
        for seed in range(3)
        for purpose in ("batches", "probe", "noise")
        for rnd in range(3)
        for client in range(3)
        for epoch in range(-1, 3)
    ]
    assert len(set(keys)) == 3 * 3 * 3 * 3 * 4


def test_the_place_of_a_part_matters():
    assert rng.key(0, "noise", 1, 2) != rng.key(0, "noise", 2, 1)
    assert rng.key(1, "noise", 0) != rng.key(0, "noise", 1)


def test_no_two_of_many_clients_share_a_key():
    assert len(rng.key(0, "batches", 4, torch.arange(100_000)).unique()) == 100_000


def test_a_part_equal_to_its_key_still_makes_a_stream():
    assert int(rng.extend(torch.tensor(5), 5)) % 2**64 == 0xE220A8397B1DCDAF  # SplitMix64's first word from seed 0


def test_extend_takes_one_part_per_key():
    keys = rng.key(0, "noise", IDS)
    both = rng.extend(keys.unsqueeze(1), torch.tensor([[0, 1], [4, 5], [2, 3]]))  # [3, 2]
    assert both[1, 1] == rng.extend(keys[1], 5)
    assert both[2, 0] == rng.extend(keys[2], 2)


@pytest.mark.parametrize(("dtype", "resolution"), [(torch.float32, 24), (torch.float64, 53)])
def test_uniform_lies_on_the_grid_of_its_type_below_one(dtype, resolution):
    draws = rng.uniform(rng.key(0, "noise", IDS), 5000, dtype)
    assert draws.dtype == dtype
    assert draws.min() >= 0
    assert draws.max() < 1
    steps = draws.double() * 2**resolution
    assert torch.equal(steps, steps.floor())


def test_single_precision_draws_are_the_double_ones_cut_off():
    keys = rng.key(0, "noise", IDS)
    cut = (rng.uniform(keys, 100) * 2**24).floor() / 2**24
    assert torch.equal(rng.uniform(keys, 100, torch.float32).double(), cut)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_uniform_has_the_moments_of_a_uniform_draw(dtype):
    draws = rng.uniform(rng.key(1, "noise", torch.arange(4)), 10_000, dtype).double()  # 40,000 in all
    # The mean has standard error sqrt(1/12 / 40000) = 0.00144, the variance sqrt((1/80 - 1/144) / 40000) = 0.00037.
    assert draws.mean() == pytest.approx(1 / 2, abs=5 * 0.00144)
    assert draws.var() == pytest.approx(1 / 12, abs=5 * 0.00037)


def test_neighbouring_clients_are_uncorrelated():
    draws = rng.uniform(rng.key(1, "noise", torch.arange(6)), 10_000)
    correlation = torch.corrcoef(draws) - torch.eye(6, dtype=torch.float64)
    assert correlation.abs().max() < 5 / 100  # five standard errors of 1 / sqrt(10000)


def test_order_is_a_permutation_of_the_real_places_then_the_unused_ones():
    counts = torch.tensor([5, 1, 3])
    order = rng.order(rng.key(0, "batches", IDS), counts, 6)
    for row, n in enumerate(counts.tolist()):
        assert sorted(order[row, :n].tolist()) == list(range(n))
        assert order[row, n:].tolist() == list(range(n, 6))


def test_order_does_not_depend_on_the_padding_width():
    keys, counts = rng.key(0, "batches", IDS), torch.tensor([5, 1, 3])
    narrow, wide = rng.order(keys, counts, 5), rng.order(keys, counts, 40)
    for row, n in enumerate(counts.tolist()):
        assert torch.equal(narrow[row, :n], wide[row, :n])
        alone = rng.order(keys[row : row + 1], counts[row : row + 1], n)
        assert torch.equal(narrow[row, :n], alone[0])


def test_order_of_several_epochs_is_that_of_each():
    keys, counts = rng.key(0, "batches", IDS), torch.tensor([5, 4, 3])
    epochs = torch.stack([rng.extend(keys, e) for e in range(2)], 1)  # [3, 2]
    order = rng.order(epochs, counts.unsqueeze(1), 5)  # [3, 2, 5]
    assert torch.equal(order[:, 1], rng.order(rng.extend(keys, 1), counts, 5))
    assert not torch.equal(order[:, 0], order[:, 1])


def test_all_orders_are_equally_likely():
    orders = rng.order(rng.key(0, "batches", torch.arange(6000)), torch.full((6000,), 3), 3)
    seen = torch.unique(orders, dim=0, return_counts=True)[1]
    assert len(seen) == 6  # 3! orders, each expected 1000 times with deviation sqrt(6000 * 1/6 * 5/6) = 28.9
    assert (seen - 1000).abs().max() < 5 * 28.9


def test_generators_of_one_key_agree_and_of_others_do_not():
    def draw(*parts):
        return rng.generator(*parts).integers(0, 2**60, 4)

    assert np.array_equal(draw(0, "shift", 1, 2), draw(0, "shift", 1, 2))
    for other in ((1, "shift", 1, 2), (0, "split", 1, 2), (0, "shift", 2, 1), (0, "shift", 1)):
        assert not np.array_equal(draw(0, "shift", 1, 2), draw(*other))


def test_keys_of_several_purposes_are_those_of_each():
    both = rng.keys(7, ("batches", "noise"), 2, IDS)
    assert both.shape == (2, 3)
    for found, purpose in zip(both, ("batches", "noise"), strict=True):
        assert torch.equal(found, rng.key(7, purpose, 2, IDS))


def test_an_order_without_unused_places_needs_no_counts():
    keys = rng.key(0, "batches", IDS)
    assert torch.equal(rng.order(keys, None, 6), rng.order(keys, torch.full((3,), 6), 6))


def test_mixing_leaves_keys_as_they_were():
    keys = rng.key(0, "batches", IDS)
    before = keys.clone()
    rng.extend(keys, 3), rng.extend(keys, "noise"), rng.bits(keys, 4), rng.extend(0, keys)
    assert torch.equal(keys, before)


def test_whole_numbers_of_any_kind_are_the_same_key() -> None:
    want = rng.key(0, "noise", 3, torch.tensor([1, 2, 70]))
    assert rng.key(np.int64(0), "noise", np.int32(3), torch.tensor([1, 2, 70], dtype=torch.int32)).equal(want)
    assert rng.key(0, "noise", 3, torch.tensor([1, 2, 70], dtype=torch.uint8)).equal(want)
