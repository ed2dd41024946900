import pytest
import torch

from personafl.sparse import masks


def bools(*rows):
    """Masks written as strings: `x` is active."""
    return torch.tensor([[ch == "x" for ch in row] for row in rows])


def test_top_k_takes_the_largest():
    assert torch.equal(masks.top_k(torch.tensor([[1.0, 4.0, 3.0, 2.0]]), 2), bools(".xx."))


def test_of_equal_scores_the_earlier_position_wins():
    scores = torch.tensor([[1.0, 1.0, 1.0, 1.0], [0.0, 2.0, 2.0, 2.0]])
    assert torch.equal(masks.top_k(scores, 2), bools("xx..", ".xx."))
    assert masks.top_k(torch.zeros(1, 1000), 137).sum() == 137
    assert masks.top_k(torch.zeros(1, 1000), 137)[0, :137].all()


def test_each_client_has_its_own_k():
    scores = torch.tensor([[1.0, 4.0, 3.0, 2.0]]).repeat(4, 1)
    expected = bools("....", ".x..", ".xxx", "xxxx")
    assert torch.equal(masks.top_k(scores, torch.tensor([0, 1, 3, 4])), expected)


def test_top_k_looks_at_a_tensor_as_a_whole():
    scores = torch.tensor([[[1.0, 8.0], [3.0, 6.0]], [[7.0, 2.0], [5.0, 4.0]]])
    out = masks.top_k(scores, 2)
    assert out.shape == (2, 2, 2)
    assert torch.equal(out.flatten(1), bools(".x.x", "x.x."))


def test_minus_infinity_is_never_taken():
    scores = torch.tensor([[-torch.inf, 1.0, -torch.inf, -5.0]])
    assert torch.equal(masks.top_k(scores, 3), bools(".x.x"))


def test_infinity_is_above_the_largest_number():
    scores = torch.tensor([[torch.finfo(torch.float32).max, torch.inf, 1.0]])
    assert masks.top_k(scores, 1).tolist() == [[False, True, False]]


def test_top_k_of_a_client_does_not_depend_on_the_stack():
    scores = torch.rand(5, 30, generator=torch.Generator().manual_seed(0)).round(decimals=1)  # many ties
    k = torch.tensor([3, 0, 30, 15, 7])
    stacked = masks.top_k(scores, k)
    assert torch.equal(masks.active(stacked), k)
    for c in range(5):
        assert torch.equal(masks.top_k(scores[c : c + 1], k[c : c + 1])[0], stacked[c])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_that_take_equally_many_take_what_sorting_would(dtype):
    g = torch.Generator().manual_seed(4)
    scores = torch.randint(-2, 3, (4, 12), generator=g).to(dtype)  # five values over twelve places: ties everywhere
    scores[0, :5], scores[1, 3], scores[2] = -torch.inf, torch.inf, 7
    possible = torch.tensor([7, 12, 12, 12])
    for k in range(13):
        out = masks.top_k(scores, k)
        assert torch.equal(out, masks.by_rank(scores, possible.clamp(max=k)))
        assert masks.active(out).tolist() == [min(k, 7), k, k, k]


@pytest.mark.parametrize("k", [torch.tensor([2, 2]), torch.tensor([2, 3])], ids=["equal k", "different k"])
def test_a_score_that_is_not_a_number_is_never_taken(k):
    scores = torch.tensor([[torch.nan, 3.0, 2.0, 1.0], [4.0, 3.0, 2.0, 1.0]])
    out = masks.top_k(scores, k)
    assert torch.equal(out[:1], bools(".xx."))
    assert masks.active(out).tolist() == k.tolist()


def test_active_counts_each_client():
    assert masks.active(bools("x.x.", "....", "xxxx")).tolist() == [2, 0, 4]


def test_prune_drops_the_smallest_active_magnitudes():
    weights = torch.tensor([[-9.0, 1.0, 0.1, -2.0, 3.0]])
    assert torch.equal(masks.prune(bools("xx.xx"), weights, torch.tensor([2])), bools("x...x"))
    assert torch.equal(masks.prune(bools("xx.xx"), weights, torch.tensor([0])), bools("xx.xx"))
    assert torch.equal(masks.prune(bools("xx.xx"), weights, torch.tensor([4])), bools("....."))


def test_an_active_weight_of_zero_is_still_active():
    assert torch.equal(masks.prune(bools("xxx."), torch.zeros(1, 4), torch.tensor([1])), bools("xx.."))


def test_readjust_spelled_out():
    mask = bools("xxxx....")
    weights = torch.tensor([[4.0, 1.0, 3.0, 2.0, 0.0, 0.0, 0.0, 0.0]])
    grads = torch.tensor([[0.0, 0.1, 0.0, 0.2, 0.5, 0.0, -0.9, 0.3]])
    # half of four go: positions 1 and 3; positions 6 and 4 come
    assert torch.equal(masks.readjust(mask, weights, grads, 0.5), bools("x.x.x.x."))


def test_a_pruned_position_may_come_straight_back():
    weights = torch.tensor([[4.0, 1.0, 3.0, 2.0, 0.0, 0.0]])
    grads = torch.tensor([[0.0, 0.8, 0.0, 0.1, 0.2, 0.1]])
    # pruned: positions 1 and 3; position 1 has the largest gradient, position 4 the next
    assert torch.equal(masks.readjust(bools("xxxx.."), weights, grads, 0.5), bools("xxx.x."))


def test_the_share_is_rounded_up():
    weights, grads = torch.tensor([[1.0, 2.0, 3.0, 0.0]]), torch.tensor([[0.0, 0.0, 0.0, 1.0]])
    # a tenth of three positions is one
    assert torch.equal(masks.readjust(bools("xxx."), weights, grads, 0.1), bools(".xxx"))
    assert torch.equal(masks.readjust(bools("xxx."), weights, grads, 0.0), bools("xxx."))


@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 1.0])
def test_readjust_keeps_the_number_of_active_positions(share):
    g = torch.Generator().manual_seed(1)
    mask = masks.top_k(torch.rand(6, 4, 10, generator=g), torch.tensor([0, 1, 7, 20, 39, 40]))
    out = masks.readjust(mask, torch.randn(6, 4, 10, generator=g), torch.randn(6, 4, 10, generator=g), share)
    assert masks.active(out).tolist() == [0, 1, 7, 20, 39, 40]
    assert torch.equal(out, mask) == (share == 0)


def test_regrowing_among_all_may_shrink_the_mask():
    weights = torch.tensor([[4.0, 1.0, 3.0, 2.0, 0.0, 0.0]])
    grads = torch.tensor([[9.0, 0.0, 8.0, 0.0, 1.0, 0.0]])
    # positions 1 and 3 go; the two largest gradients are at 0 and 2, which are active already
    assert torch.equal(masks.readjust(bools("xxxx.."), weights, grads, 0.5, "all"), bools("x.x..."))


def test_growing_elsewhere_bars_what_was_just_pruned():
    weights = torch.tensor([[4.0, 1.0, 3.0, 2.0, 0.0, 0.0]])
    grads = torch.tensor([[0.0, 0.8, 0.0, 0.9, 0.2, 0.1]])
    # positions 1 and 3 go and have the largest gradients, but only 4 and 5 were inactive before
    assert torch.equal(masks.readjust(bools("xxxx.."), weights, grads, 0.5, "elsewhere"), bools("x.x.xx"))
    # one position was inactive: one goes, though half of five, rounded up, would be three
    weights, grads = torch.tensor([[4.0, 1.0, 3.0, 2.0, 5.0, 0.0]]), torch.ones(1, 6)
    assert torch.equal(masks.readjust(bools("xxxxx."), weights, grads, 0.5, "elsewhere"), bools("x.xxxx"))


@pytest.mark.parametrize("scope", masks.SCOPES)
def test_a_dense_mask_stays_dense_where_pruned_positions_are_the_only_free_ones(scope):
    full = torch.ones(2, 10, dtype=torch.bool)
    g = torch.Generator().manual_seed(2)
    weights = torch.randn(2, 10, generator=g)
    out = masks.readjust(full, weights, 1 / weights, 0.3, scope)  # small weights, large gradients
    assert out.all()
    assert masks.readjust(full, weights, weights, 0.3).all()


def test_a_client_is_readjusted_by_its_own_numbers_alone():
    g = torch.Generator().manual_seed(3)
    mask = masks.top_k(torch.rand(3, 20, generator=g), torch.tensor([5, 10, 15]))
    weights, grads = torch.randn(3, 20, generator=g), torch.randn(3, 20, generator=g)
    stacked = masks.readjust(mask, weights, grads, 0.3)
    for c in range(3):
        own = slice(c, c + 1)
        assert torch.equal(masks.readjust(mask[own], weights[own], grads[own], 0.3)[0], stacked[c])
