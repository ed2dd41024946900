"""Inputs brought to a common scale."""

from __future__ import annotations

import pytest
import torch

from personafl.core.errors import UserError
from personafl.core.normalization import Normalization

EXACT = {"rtol": 0, "atol": 1e-15}  # float64: a product and a sum of numbers below 4


def test_bytes_are_scaled_and_normalised_by_channel() -> None:
    images = torch.tensor([[[[0, 51]], [[255, 102]]]], dtype=torch.uint8)  # [1, 2, 1, 2]
    found = Normalization((0.2, 0.5), (0.1, 0.25), axes=3)(images, torch.float64)
    # channel 0: 0, 0.2 less 0.2 over 0.1; channel 1: 1, 0.4 less 0.5 over 0.25
    expected = torch.tensor([[[[-2, 0]], [[2, -0.4]]]], dtype=torch.float64)
    torch.testing.assert_close(found, expected, **EXACT)


def test_floats_are_normalised_by_column_and_stay_what_they_were() -> None:
    table = torch.tensor([[[1.0, 10.0], [3.0, 30.0]]], dtype=torch.float64)  # a client with two examples
    before = table.clone()
    found = Normalization((1.0, 20.0), (2.0, 10.0))(table, torch.float64)
    torch.testing.assert_close(found, torch.tensor([[[0.0, -1.0], [1.0, 1.0]]], dtype=torch.float64), **EXACT)
    assert torch.equal(table, before)


@pytest.mark.parametrize(("mean", "std"), [((0.5,), (0.5, 0.25)), ((0.5, 0.5), (0.5,)), ((0.5,), (0.5,))])
def test_one_number_is_for_all(mean: tuple[float, ...], std: tuple[float, ...]) -> None:
    x = torch.tensor([[0.0, 1.0]], dtype=torch.float64)
    found = Normalization(mean, std)(x, torch.float64)
    torch.testing.assert_close(found, (x - 0.5) / torch.tensor(std, dtype=torch.float64), **EXACT)


def test_an_example_may_be_one_number() -> None:
    found = Normalization((2.0,), (4.0,), axes=0)(torch.tensor([[2.0, 6.0]]), torch.float64)
    assert found.tolist() == [[0, 1]]


def test_every_byte_in_float32_is_within_rounding() -> None:
    """The scale is rounded twice, the product and the sum once each: four halves of 1.2e-7 of numbers below 5."""
    pixels = torch.arange(256, dtype=torch.uint8)
    one = Normalization((0.1307,), (0.3081,), axes=0)
    found = one(pixels, torch.float32)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), (pixels.double() / 255 - 0.1307) / 0.3081, rtol=0, atol=1.2e-6)


def test_one_object_serves_bytes_and_floats_in_any_precision() -> None:
    one = Normalization((0.5,), (0.5,))
    for dtype in (torch.float64, torch.float32, torch.float64):
        assert one(torch.tensor([255], dtype=torch.uint8), dtype).dtype == dtype
        assert one(torch.tensor([0.75]), dtype).tolist() == [0.5]


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(UserError, match="2 means for 3 deviations"):
        Normalization((0.0, 0.0), (1.0, 1.0, 1.0))
    with pytest.raises(UserError, match="0 means for 1 deviations"):
        Normalization((), (1.0,))
    with pytest.raises(UserError, match=r"std=\[1.0, 0.0\]: must be greater than 0"):
        Normalization((0.0,), (1.0, 0.0))


def test_it_knows_which_examples_it_goes_with() -> None:
    by_channel = Normalization((0.0,) * 3, (1.0,) * 3, axes=3)
    assert by_channel.fits(torch.zeros(2, 3, 8, 8))
    assert not by_channel.fits(torch.zeros(2, 1, 8, 8))
    assert not by_channel.fits(torch.zeros(2, 3))
    assert Normalization((0.0,), (1.0,), axes=3).fits(torch.zeros(2, 3, 8, 8))
    assert Normalization((0.0,), (1.0,), axes=0).fits(torch.zeros(2))
