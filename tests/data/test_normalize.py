"""What inputs are normalised by."""

from __future__ import annotations

import dataclasses
from functools import reduce
from typing import Any

import numpy as np
import pytest
import torch

from personafl.core.errors import UserError
from personafl.core.normalization import Normalization
from personafl.data import DATASETS, Federation, Source, normalize
from personafl.data.normalize import Moments, moments, normalized, settled, standardization
from tests.data.written import real


def federation(x: Any, *, unseen: int = 0) -> Federation:
    """Clients of four rows each, of which the first two in `train` count."""
    x = torch.as_tensor(x)
    source = Source("toy", x, torch.zeros(len(x), dtype=torch.int64), 1)
    return Federation.build(source, np.split(np.arange(len(x)), len(x) // 4), 0, test_share=0.5, unseen=unseen)


def of(fed: Federation, setting: normalize.Setting) -> Normalization:
    found = normalized(fed, setting).source.normalization
    assert found is not None
    return found


# The setting


def test_lists_and_numbers_are_taken_as_they_come() -> None:
    assert normalize.checked([0.5, 2]) == ((0.5,), (2.0,))
    assert normalize.checked([[0.1, 0.2], (0.5,)]) == ((0.1, 0.2), (0.5,))
    assert normalize.checked("half") == "half"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("halve", "data.normalize='halve': no such normalisation; did you mean half?"),
        ([0.5], r"data.normalize=\[0.5\]: must be auto, standardize, half, none, or \[mean, std\]"),
        (True, "data.normalize=True: must be auto"),
        ([["a"], [1]], "data.normalize='a': must be a number"),
        ([[0.1, 0.2], [1, 1, 1]], "2 means for 3 deviations"),
        ([0, 0], "must be greater than 0"),
    ],
)
def test_what_is_no_normalisation_is_refused(value: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        normalize.checked(value)


def test_every_shipped_set_has_its_choice() -> None:
    assert normalize.SHIPPED.keys() == DATASETS.keys()
    for name, choice in normalize.SHIPPED.items():
        assert normalize.checked(choice if isinstance(choice, str) else list(choice)) == choice, name


@pytest.mark.parametrize("name", ["digits", "synthetic-3.2k"])
def test_shipped_sets_keep_what_they_were_without_constants(name: str) -> None:
    assert settled(name, DATASETS[name]()) == "none"


def test_auto_goes_by_what_the_data_are() -> None:
    pictures = federation(torch.zeros(4, 1, 2, 2, dtype=torch.uint8)).source
    tokens = federation(torch.zeros(4, 3, dtype=torch.int64)).source
    assert settled("./photos", pictures) == "standardize"
    assert settled("./wards", federation(torch.zeros(4, 3)).source) == "standardize"
    assert settled("./texts", tokens) == "none"
    own = dataclasses.replace(pictures, normalization=Normalization((0.25,), (2.0,), axes=3))
    assert settled(own, own) == ((0.25,), (2.0,))
    assert settled("cifar10", pictures) == normalize.SHIPPED["cifar10"]


def test_a_setting_becomes_what_examples_carry() -> None:
    fed = federation(torch.zeros(8, 3, 2, 2, dtype=torch.uint8))
    assert of(fed, "half") == Normalization((0.5,), (0.5,), axes=3)
    assert of(fed, ((0.1, 0.2, 0.3), (1.0,))) == Normalization((0.1, 0.2, 0.3), (1.0,), axes=3)
    assert normalized(fed, "half").examples("test", torch.tensor([0])).normalization == of(fed, "half")
    assert normalized(fed, "none") is fed
    assert normalized(normalized(fed, "half"), "none").source.normalization is None


def test_what_does_not_fit_the_examples_is_refused() -> None:
    pictures = federation(torch.zeros(4, 3, 2, 2, dtype=torch.uint8))
    with pytest.raises(UserError, match=r"2 entries for examples of toy, of shape \(3, 2, 2\); give one, or one for"):
        normalized(pictures, ((0.1, 0.2), (1.0, 1.0)))
    for setting in ("half", "standardize", ((0.5,), (0.5,))):
        with pytest.raises(UserError, match="examples of toy are whole numbers; use none"):
            normalized(federation(torch.zeros(4, 3, dtype=torch.int64)), setting)


# Statistics


def test_statistics_are_of_training_rows_of_clients_that_take_part() -> None:
    """All other rows are a million: of the test parts, and of the client held out."""
    blank = federation(torch.zeros(12, 2), unseen=1)
    x = torch.full((12, 2), 1e6)
    for c, values in enumerate(([[1.0, 5.0], [3.0, 5.0]], [[5.0, 5.0], [7.0, 5.0]])):
        x[blank.rows("train", c)] = torch.tensor(values)
    found = of(federation(x, unseen=1), "standardize")
    # 1, 3, 5, 7: mean 4, squares 9 + 1 + 1 + 9 = 20, variance 5; the second column is constant
    assert found.mean == pytest.approx((4.0, 5.0), rel=1e-15)
    assert found.std == pytest.approx((5**0.5, 1.0), rel=1e-15)


def test_images_are_by_channel_in_units_of_scaled_pixels() -> None:
    x = torch.zeros(4, 2, 1, 2, dtype=torch.uint8)
    x[:, 0, 0, 0], x[:, 1] = 102, 255  # channel 0: as many pixels of 0.4 as of 0, channel 1: all 1
    found = of(federation(x), "standardize")
    assert found.axes == 3
    assert found.mean == pytest.approx((0.2, 1.0), rel=1e-15)
    assert found.std == pytest.approx((0.2, 1.0), rel=1e-15)


@pytest.mark.parametrize(
    ("shape", "kind", "entries"),
    [
        ((6,), torch.float32, 6),  # columns
        ((6,), torch.uint8, 1),  # pixels in a row
        ((3, 6), torch.float32, 1),  # channels and steps or steps and features, which nothing tells apart
        ((3, 4, 4), torch.float32, 3),
        ((2, 4, 4, 4), torch.uint8, 2),
        ((), torch.float32, 1),
    ],
)
def test_what_shares_a_mean(shape: tuple[int, ...], kind: torch.dtype, entries: int) -> None:
    draw = torch.Generator().manual_seed(0)
    x = torch.randint(256, (8, *shape), generator=draw).to(kind)
    found = of(federation(x), "standardize")
    assert (len(found.mean), len(found.std), found.axes) == (entries, entries, len(shape))
    assert found.fits(x)


def test_sums_of_clients_give_what_all_rows_together_give() -> None:
    """Also where means are large: about a mean of 1e6, float64 holds squares of 1e-3 to 1e-16 * 1e12 at worst if they
    were taken about zero, and to about 1e-13 of themselves as they are."""
    draw = torch.Generator().manual_seed(0)
    x = 1e6 + torch.randn(600, 3, generator=draw, dtype=torch.float64) * torch.tensor([1e-3, 1.0, 1e3])
    parts = torch.split(x, [1, 99, 200, 300])
    found = standardization(map(moments, parts), x)
    assert found.mean == pytest.approx(x.mean(0).tolist(), rel=1e-14)
    assert found.std == pytest.approx(x.std(0, correction=0).tolist(), rel=1e-6)
    order = standardization(map(moments, reversed(parts)), x)
    assert order.std == pytest.approx(found.std, rel=1e-6)


def test_blocks_give_what_a_client_gives_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(40, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    whole = moments(x)
    monkeypatch.setattr(normalize, "BLOCK", 7 * 48)  # seven images at a time
    parts = moments(x)
    assert whole.count == parts.count == 40 * 16
    np.testing.assert_allclose(parts.mean, whole.mean, rtol=0, atol=1e-15)
    np.testing.assert_allclose(parts.squares, whole.squares, rtol=1e-13)


def test_a_constant_that_is_no_round_number_has_deviation_one() -> None:
    x = torch.full((1000, 1), 0.1)
    parts = [moments(part) for part in torch.split(x, 7)]
    assert standardization(parts, x).std == (1.0,)
    varied = x.clone()
    varied[0] = torch.nextafter(varied[0], torch.tensor(1.0))  # the least that float32 can differ by
    assert standardization([moments(varied)], x).std[0] < 1e-8


def test_moments_are_added_in_any_grouping() -> None:
    told = ((1, 2.0, 0.0), (3, 4.0, 6.0), (2, 0.0, 2.0))
    one, two, three = (Moments(n, np.array([mean]), np.array([squares])) for n, mean, squares in told)
    left, right = (one + two) + three, one + (two + three)
    # 2, 4 - 3^.5, 4, 4 + 3^.5, -1, 1: sum 14, of 6; squares 4 + 54 + 2 less 14^2 / 6
    for found in (left, right, reduce(Moments.__add__, (three, two, one))):
        assert found.count == 6
        assert found.mean[0] == pytest.approx(14 / 6, rel=1e-15)
        assert found.squares[0] == pytest.approx(60 - 14**2 / 6, rel=1e-14)


@pytest.mark.parametrize("name", ["mnist", "cifar10"])
def test_published_constants_are_those_of_the_training_part(name: str) -> None:
    real(name)
    source = DATASETS[name]()
    assert source.test is not None
    rows = torch.from_numpy(np.flatnonzero(~source.test))
    found = standardization([moments(source.x[rows])], source.x)
    for mine, published in zip((found.mean, found.std), normalize.SHIPPED[name], strict=True):
        assert mine == pytest.approx(published, abs=5e-5)  # published with four digits
