"""The discrepancy of two batches, by numbers derived in sight and by a double loop."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from personafl.core.types import Batch
from personafl.plugins.mmd import mmd


def batch(a: Tensor, count: list[int] | None = None) -> Batch:
    number = torch.tensor(count or [a.shape[1]] * a.shape[0])
    valid = None if count is None else torch.arange(a.shape[1]) < number.unsqueeze(1)
    return Batch(a, a, valid, number, torch.zeros(a.shape[0]))


def points(*values: float) -> Tensor:
    """One client's features, a number each."""
    return torch.tensor(values, dtype=torch.float64).view(1, -1, 1)


def kernel(square: float, width: float) -> float:
    return sum(math.exp(-square / (width * 2**i / 4)) for i in range(5))


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_one_example_each_has_no_discrepancy_and_no_gradient() -> None:
    for far in (3.0, 0.01):
        a = points(0.0).requires_grad_()
        found = mmd(a, points(far), batch(a.detach()))
        (grad,) = torch.autograd.grad(found.sum(), a)
        assert found.tolist() == [0.0]
        assert not grad.any()


def test_two_examples_each_by_hand() -> None:
    """a = 0, 2 and b = 1, 3: ordered pairs at distance^2 1 (6 of them), 4 (4), 9 (2): b = 40 / 12."""
    a, b, width = points(0.0, 2.0), points(1.0, 3.0), 40 / 12
    same = (2 * 5 + 2 * kernel(4, width)) * 2  # XX and YY: 0-2 and 1-3
    across = 3 * kernel(1, width) + kernel(9, width)  # 0-1, 2-1, 2-3 and 0-3
    assert float(mmd(a, b, batch(a))) == pytest.approx((same - 2 * across) / 4)


def test_the_same_features_are_no_distance_apart() -> None:
    a = random(3, 4, 5)
    assert mmd(a, a.clone(), batch(a)).abs().max() < 1e-12
    order = [2, 0, 3, 1]
    assert mmd(a, a[:, order], batch(a)).abs().max() < 1e-12


@pytest.mark.parametrize("rows", [1, 3])
def test_all_points_in_one_place_give_zero_and_a_gradient_that_is_a_number(rows: int) -> None:
    a = torch.ones(2, rows, 4, dtype=torch.float64, requires_grad=True)
    found = mmd(a, torch.ones(2, rows, 4, dtype=torch.float64), batch(a.detach()))
    (grad,) = torch.autograd.grad(found.sum(), a)
    assert found.tolist() == [0.0, 0.0]
    assert not grad.any()


def test_a_client_of_one_example_has_none_beside_one_of_two() -> None:
    """The second client's second place is padding."""
    a, b = random(2, 2, 3).requires_grad_(), random(2, 2, 3).flip(0)
    found = mmd(a, b, batch(b, [2, 1]))
    (grad,) = torch.autograd.grad(found.sum(), a)
    assert grad.isfinite().all()
    assert float(found[0].detach()) > 0
    assert grad[0].any()
    assert float(found[1].detach()) == 0.0
    assert not grad[1].any()


def test_a_step_against_the_gradient_brings_features_together() -> None:
    a, b = points(0.0, 1.0).requires_grad_(), points(5.0, 6.0)
    (grad,) = torch.autograd.grad(mmd(a, b, batch(b)).sum(), a)
    assert (grad < 0).all()


def test_padding_is_ignored_in_value_and_gradient() -> None:
    a, b = random(2, 4, 3), random(2, 4, 3).flip(0)
    for c, n in enumerate((4, 2)):
        alone = a[c : c + 1, :n].clone().requires_grad_()
        expected = mmd(alone, b[c : c + 1, :n], batch(alone.detach()))
        for junk in (0.0, 1e6):
            x, y = a.clone(), b.clone()
            x[1, 2:], y[1, 2:] = junk, -junk
            x.requires_grad_()
            found = mmd(x, y, batch(x.detach(), [4, 2]))
            (grad,) = torch.autograd.grad(found[c], x)
            torch.testing.assert_close(found[c], expected[0])
            torch.testing.assert_close(grad[c, :n], torch.autograd.grad(expected, alone, retain_graph=True)[0][0])
            assert not grad[c, n:].any()


def test_the_origin_does_not_matter() -> None:
    a, b = random(2, 4, 3), random(2, 4, 3).flip(1)
    for shift in (1.0, 1e6):
        torch.testing.assert_close(mmd(a + shift, b + shift, batch(a)), mmd(a, b, batch(a)), rtol=1e-6, atol=1e-9)


def test_the_scale_does_not_matter_for_widths_follow_it() -> None:
    a, b = random(1, 4, 3), random(1, 4, 3).flip(1)
    torch.testing.assert_close(mmd(100 * a, 100 * b, batch(a)), mmd(a, b, batch(a)))


def test_clients_of_a_stack_do_not_see_each_other() -> None:
    a, b = random(3, 4, 2), random(3, 4, 2).flip(0)
    together = mmd(a, b, batch(a))
    for c in range(3):
        torch.testing.assert_close(mmd(a[c : c + 1], b[c : c + 1], batch(a[c : c + 1]))[0], together[c])


@pytest.mark.parametrize("apart", [1e-4, 1e-2, 1.0])
def test_in_float32_the_gradient_is_right_also_near_the_other_features(apart: float) -> None:
    """Against a sum over plain differences in float64 of the same float32 features, wide and far from the origin.

    What is left is the rounding of the answer, half of 1.2e-7 of each entry; by float32 distances the gradient is off
    by 6e-4 here at 1e-4, where squared distances of pairs are 1e-8 of the others.
    """
    b = (3 + random(2, 6, 200).relu()).float()
    a = (b + apart * random(2, 6, 200).flip(2)).float()
    x = a.clone().requires_grad_()
    found = mmd(x, b, batch(a))
    (grad,) = torch.autograd.grad(found.sum(), x)

    wide = a.double().requires_grad_()
    joint = torch.cat([wide, b.double()], 1)
    distance = (joint.unsqueeze(2) - joint.unsqueeze(1)).square().sum(-1)
    width = (distance.sum((1, 2)) / (12 * 12 - 12)).detach().view(-1, 1, 1)
    k = sum(torch.exp(-distance / (width * 2**i / 4)) for i in range(5))
    means = [k[:, s, t].mean((1, 2)) for s in (slice(6), slice(6, None)) for t in (slice(6), slice(6, None))]
    expected = means[0] + means[3] - means[1] - means[2]
    (exact,) = torch.autograd.grad(expected.sum(), wide)

    assert found.dtype == grad.dtype == torch.float32
    assert float((grad.double() - exact).norm() / exact.norm()) < 2e-7
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=0)


def test_the_discrepancy_by_a_double_loop_and_without_padding() -> None:
    draw = torch.Generator().manual_seed(0)
    a, b = (torch.randn(2, 4, 3, generator=draw, dtype=torch.float64) for _ in range(2))
    count = torch.tensor([4, 2])
    valid = torch.arange(4) < count.unsqueeze(1)
    batch = Batch(a, a, valid, count, torch.zeros(2))
    for c, n in enumerate(count.tolist()):
        points = [*a[c, :n], *b[c, :n]]
        d = torch.tensor([[float((p - q).square().sum()) for q in points] for p in points], dtype=torch.float64)
        width = d.sum() / (len(points) ** 2 - len(points))
        k = sum(torch.exp(-d / (width * 2**i / 4)) for i in range(5))
        expected = (k[:n, :n] + k[n:, n:] - k[:n, n:] - k[n:, :n]).mean()
        torch.testing.assert_close(mmd(a, b, batch)[c], expected, rtol=1e-10, atol=1e-10)
    assert mmd(a, a, batch).abs().max() < 1e-12


def test_features_far_from_the_origin_are_compared_as_those_around_it() -> None:
    """Multiples of 2^-20 moved by 2^25, exactly; their squares would leave nothing of differences of about one."""
    a, b = ((random(4, 5, 3) * 2**20).round() / 2**20).split(2)
    near, far = (mmd(a + shift, b + shift, batch(a)) for shift in (0.0, 2.0**25))
    assert near.min() > 0.1
    torch.testing.assert_close(far, near, rtol=1e-9, atol=0)  # the middle is rounded, but the same for all points


def test_a_client_without_examples_has_no_discrepancy_and_no_gradient() -> None:
    a = random(2, 3, 2).requires_grad_()
    found = mmd(a, a.detach() + 1, batch(a.detach(), [3, 0]))
    (grad,) = torch.autograd.grad(found.sum(), a)
    assert found[0] > 0 and found[1] == 0
    assert grad[0].any() and not grad[1].any()
