import pytest

from personafl.core.types import Layer
from personafl.engine import cost
from personafl.sparse.allocation import RULES, erk, feddst, feddst_first_dense, uniform_first_dense

# DM-PFL's CIFAR CNN: conv5 3-64, conv5 64-64, fc 1600-384-192-10 on images of 32, 28 (14), 10 (5) pixels.
CIFAR = (
    Layer("conv1", "conv1.bias", (64, 3, 5, 5), macs=64 * 28 * 28 * 75, outputs=64 * 28 * 28),
    Layer("conv2", "conv2.bias", (64, 64, 5, 5), macs=64 * 10 * 10 * 1600, outputs=64 * 10 * 10),
    Layer("fc1", "fc1.bias", (384, 1600), macs=384 * 1600, outputs=384),
    Layer("fc2", "fc2.bias", (192, 384), macs=192 * 384, outputs=192),
    Layer("fc3", "fc3.bias", (10, 192), macs=10 * 192, outputs=10),
)
WEIGHTS = [4800, 102_400, 614_400, 73_728, 1920]


def plain(name, *shape):
    return Layer(name, None, shape, macs=1, outputs=1)


def densities(keep):
    return [round(keep[layer.weight] / layer.weights, 3) for layer in CIFAR]


def flops(keep):
    """Forward FLOP of one example."""
    return sum(cost.forward(layer, keep[layer.weight] / layer.weights) for layer in CIFAR)


def test_the_network_has_the_sizes_of_the_paper():
    assert [layer.weights for layer in CIFAR] == WEIGHTS
    assert sum(layer.size for layer in CIFAR) == 797_962


@pytest.mark.parametrize(
    ("sparsity", "bar"),
    [(0.0, 2.94437), (0.3, 2.28408), (0.4, 2.06353), (0.5, 1.84298), (0.6, 1.62241), (0.7, 1.40185), (0.8, 1.18130)],
)
def test_the_default_rule_gives_the_bars_of_the_papers_figure_5b(sparsity, bar):
    assert flops(feddst_first_dense(CIFAR, sparsity)) / 1e7 == pytest.approx(bar, abs=1e-5)


def test_no_other_rule_gives_the_bar_at_one_half():
    for rule in (erk, feddst, uniform_first_dense):
        assert flops(rule(CIFAR, 0.5)) / 1e7 != pytest.approx(1.84298, abs=1e-3)


def test_the_default_rule_at_one_half():
    keep = feddst_first_dense(CIFAR, 0.5)
    assert list(keep.values()) == [4800, 50_798, 305_372, 36_888, 1058]
    assert densities(keep) == [1, 0.496, 0.497, 0.5, 0.551]


def test_the_default_rule_by_hand():
    # sizes 6 and 12; ratios (2 + 3) / 6 and (3 + 4) / 12; s_2 (1 - 7/12) 12 = 0.25 * 18, so s_2 = 0.375
    layers = (plain("a", 2, 3), plain("b", 3, 4))
    assert feddst_first_dense(layers, 0.25) == {"a": 6, "b": 7}  # floor(0.625 * 12 = 7.5)


def test_feddst_counts_biases_in_a_layers_size():
    # n = 12 + 3 = 15: s = 0.2 * 15 / ((1 - 7/12) 15) (1 - 7/12) = 0.2, and floor(0.8 * 15) = 12 of 12 weights
    assert feddst((Layer("a", "a.bias", (3, 4), 12, 3),), 0.2) == {"a": 12}


def test_feddst_is_almost_uniform():
    assert densities(feddst(CIFAR, 0.5)) == [0.513, 0.499, 0.5, 0.503, 0.554]


def test_erk_follows_rigl():
    keep = erk(CIFAR, 0.5)
    assert densities(keep) == [1, 0.202, 0.484, 1, 1]
    budget = sum(WEIGHTS) // 2
    assert budget - 2 <= sum(keep.values()) <= budget  # two layers are rounded down


def test_erk_by_hand():
    # ratios 4/4 and 20/100; 52 = e (1 * 4 + 0.2 * 100) gives e = 2.17 and a density past 1 for the first layer;
    # dense, it leaves 48 = e 0.2 * 100, e = 2.4, density 0.48
    assert erk((plain("a", 2, 2), plain("b", 10, 10)), 0.5) == {"a": 4, "b": 48}


def test_erk_of_a_convolution_uses_all_its_dimensions():
    # ratios (2 + 2 + 3 + 3) / 36 = 10/36 and (6 + 6) / 36: shares 10 and 12 of a budget of 18 or 72 / 4
    keep = erk((plain("conv", 2, 2, 3, 3), plain("fc", 6, 6)), 0.75)
    assert keep == {"conv": 8, "fc": 9}  # floor(18 * 10 / 22 = 8.18), floor(18 * 12 / 22 = 9.82)


def test_uniform_leaves_the_first_layer_dense():
    assert list(uniform_first_dense(CIFAR, 0.5).values()) == [4800, 51_200, 307_200, 36_864, 960]


@pytest.mark.parametrize(("sparsity", "kept"), [(0.5, 500), (0.8, 200), (0.9, 100)])
def test_uniform_keeps_its_share_exactly_where_it_is_whole(sparsity, kept):
    assert uniform_first_dense((plain("a", 2, 2), plain("b", 10, 100)), sparsity)["b"] == kept


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_no_sparsity_keeps_everything(rule):
    assert list(rule(CIFAR, 0.0).values()) == WEIGHTS


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_a_layer_keeps_between_nothing_and_everything_and_less_at_higher_sparsity(rule):
    before = WEIGHTS
    for sparsity in (0.1, 0.3, 0.5, 0.7, 0.9, 0.99):
        keep = list(rule(CIFAR, sparsity).values())
        assert all(0 <= k <= b for k, b in zip(keep, before, strict=True))
        assert sum(keep) < sum(before)
        before = keep


def test_rules_are_known_by_name():
    assert list(RULES) == ["feddst_first_dense", "erk", "uniform_first_dense", "feddst"]
