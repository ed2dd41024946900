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
