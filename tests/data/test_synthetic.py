import pytest
import torch

from personafl.data import DATASETS
from personafl.data.synthetic import synthetic_3_2k, synthetic_32k


@pytest.fixture(scope="module")
def points():
    return synthetic_3_2k()


@pytest.mark.parametrize(("make", "per_class"), [(synthetic_32k, 8000), (synthetic_3_2k, 800)])
def test_four_classes_of_equal_size(make, per_class):
    source = make()
    assert source.x.shape == (5 * per_class, 5)
    assert source.x.dtype == torch.float32
    assert torch.bincount(source.y[~source.test]).tolist() == [per_class] * 4
    assert torch.bincount(source.y[source.test]).tolist() == [per_class // 4] * 4
    assert source.classes == 4
    assert source.model == "pews-mlp"


def test_features_are_the_point_its_squares_and_its_product(points):
    x, y = points.x[:, 0], points.x[:, 1]
    torch.testing.assert_close(points.x[:, 2:], torch.stack([x * x, y * y, x * y], 1), rtol=1e-5, atol=1e-6)


def test_points_lie_around_a_grid_of_sixteen_centres(points):
    nearest = ((points.x[:, :2] + 3) / 2).round() * 2 - 3  # centres at -3, -1, 1, 3 in both directions
    centres, counts = nearest.unique(dim=0, return_counts=True)
    inside = counts > 10
    assert sorted(centres[inside].flatten().unique().tolist()) == [-3, -1, 1, 3]
    assert inside.sum() == 16
    # 250 points each; one point in 580 lies further than 1 from its centre in one direction (3.3 deviations, twice)
    assert (counts[inside] - 250).abs().max() <= 5
    spread = (points.x[:, :2] - nearest).std(0)
    assert spread.tolist() == pytest.approx([0.3, 0.3], abs=0.02)


def test_every_row_and_column_of_the_grid_holds_every_class(points):
    column, row = ((points.x[:, :2] + 3) / 2).round().clamp(0, 3).long().unbind(1)
    grid = torch.zeros(4, 4, 4)
    grid.index_put_((row, column, points.y), torch.ones(len(points.y)), accumulate=True)
    classes = grid.argmax(2)  # [4, 4]
    for line in (*classes, *classes.T):
        assert sorted(line.tolist()) == [0, 1, 2, 3]
    assert grid.amax(2).sum() / grid.sum() > 0.99  # a cluster is of one class


def test_every_call_gives_the_same_points(points):
    again = synthetic_3_2k()
    assert torch.equal(again.x, points.x)
    assert torch.equal(again.y, points.y)


def test_the_sets_are_known_by_name(points):
    assert DATASETS["synthetic-3.2k"]().name == points.name == "synthetic-3.2k"
    assert DATASETS["synthetic-32k"]().name == "synthetic-32k"
