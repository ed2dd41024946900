import math

import pytest
import torch

from personafl.core import criteria
from personafl.core.types import Batch, per_example


@pytest.mark.parametrize("padded", [False, True])
def test_the_slope_of_cross_entropy_is_what_autograd_finds(padded):
    draw = torch.Generator().manual_seed(0)
    out = (5 * torch.randn(3, 4, 6, generator=draw, dtype=torch.float64)).requires_grad_()
    count = torch.tensor([4, 2, 1]) if padded else torch.full((3,), 4)
    valid = torch.arange(4) < count.unsqueeze(1) if padded else None
    y = torch.randint(6, (3, 4), generator=draw)
    batch = Batch(torch.zeros(3, 4), y, valid, count, torch.zeros(3, dtype=torch.int64))
    expected = batch.mean(per_example(criteria.cross_entropy, out, y))
    (slope,) = torch.autograd.grad(expected.sum(), [out])
    loss, found = criteria.CRITERION_GRADIENTS[criteria.cross_entropy](out.detach(), batch)
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(found, slope, rtol=1e-13, atol=1e-15)


def test_huge_logits_do_not_overflow():
    out = torch.tensor([[[1000.0, 0.0], [0.0, -1000.0]]])  # softmax (1, 0) twice; labels 0 and 1
    batch = Batch(torch.zeros(1, 2), torch.tensor([[0, 1]]), None, torch.tensor([2]), torch.zeros(1, dtype=torch.int64))
    loss, slope = criteria.CRITERION_GRADIENTS[criteria.cross_entropy](out, batch)
    assert loss.tolist() == [500.0]  # (0 + 1000) / 2
    assert slope.tolist() == [[[0.0, 0.0], [0.5, -0.5]]]


def test_errors_of_regression_by_hand():
    out, y = torch.tensor([[1.0, 4.0], [0.5, 0.0]]), torch.tensor([[0.0, 1.0], [0.0, 0.0]])
    assert criteria.mse(out, y).tolist() == [5.0, 0.125]  # (1 + 9) / 2, 0.25 / 2
    assert criteria.mae(out, y).tolist() == [2.0, 0.25]
    assert criteria.huber(out, y).tolist() == [1.5, 0.0625]  # (1/2 + 5/2) / 2, (1/8) / 2


@pytest.mark.parametrize("loss", [criteria.mse, criteria.mae, criteria.huber])
def test_a_column_of_outputs_meets_its_own_targets_only(loss):
    """[3, 1] less [3] would be [3, 3]."""
    out, y = torch.tensor([0.0, 1.0, 2.0]), torch.tensor([0.0, 1.0, 2.0])
    for o in (out, out.unsqueeze(1)):
        for t in (y, y.unsqueeze(1)):
            assert loss(o, t).tolist() == [0.0, 0.0, 0.0]
    with pytest.raises(ValueError, match=r"targets of shape \(3,\)"):
        loss(torch.zeros(3, 2), y)


def test_bce_by_hand():
    """Logit 0 costs log 2 either way; logit log 3 is a probability of 3/4."""
    out, y = torch.tensor([[0.0, math.log(3)], [math.log(3), 0.0]]), torch.tensor([[1, 1], [0, 0]], dtype=torch.uint8)
    expected = [(math.log(2) + math.log(4 / 3)) / 2, (math.log(4) + math.log(2)) / 2]
    assert criteria.bce(out, y).tolist() == pytest.approx(expected)


def test_a_sequence_s_loss_is_the_mean_over_positions_that_have_a_target():
    """Uniform logits over four tokens cost log 4 a position; a token at three times the odds of each other log 2."""
    out = torch.zeros(3, 3, 4, requires_grad=True)
    with torch.no_grad():
        out[1, 0, 2] = math.log(3)
    y = torch.tensor([[0, 1, 2], [2, 3, -100], [-100, -100, -100]])
    loss = criteria.sequence_cross_entropy(out, y)
    assert loss.tolist() == pytest.approx([math.log(4), (math.log(2) + math.log(4)) / 2, 0.0])
    loss.sum().backward()
    assert out.grad[1, 2].abs().sum() == 0 and out.grad[2].abs().sum() == 0
    with pytest.raises(ValueError, match="one prediction per position"):
        criteria.sequence_cross_entropy(out[:, 0], y)
