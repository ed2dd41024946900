"""Several image sets as one."""

import numpy as np
import pytest
import torch

from personafl.data import mixed
from tests.data.written import real, write_medmnist


def test_pot_mnist_counts_labels_on_and_takes_so_many_of_each_class(home):
    write_medmnist(home / "pathmnist.npz", 9, 4, 3, (28, 28, 3))
    write_medmnist(home / "octmnist.npz", 4, 4, 3)
    write_medmnist(home / "tissuemnist.npz", 8, 4, 3)
    got = mixed.pot_mnist(take=(3, 2))
    assert got.x.shape == (21 * 5, 3, 32, 32) and got.x.dtype == torch.uint8 and got.classes == 21
    assert np.bincount(got.y[~torch.tensor(got.test)]).tolist() == [3] * 21
    assert np.bincount(got.y[torch.tensor(got.test)]).tolist() == [2] * 21
    assert np.bincount(got.sources).tolist() == [9 * 5, 4 * 5, 8 * 5]
    first = torch.tensor([0, 9, 13])[torch.tensor(got.sources)]
    assert torch.equal(got.x[:, 2, 31, 31].long(), got.y - first)  # a constant image stays constant
    assert len(mixed.pot_mnist(take=None).y) == 21 * (4 + 1 + 3)
    with pytest.raises(ValueError, match="class 0 of pathmnist has 3 test images, 4 are asked for"):
        mixed.pot_mnist(take=(3, 4))


def test_grey_images_are_resized_and_repeated():
    x = torch.zeros(1, 1, 28, 28, dtype=torch.uint8)
    x[..., 14:] = 200
    out = mixed.colour32(x)
    assert out.shape == (1, 3, 32, 32) and torch.equal(out[:, 0], out[:, 2])
    # column j of 32 lies at (j + 1/2) * 28/32 - 1/2 of 28: 15 at 13.0625, 16 at 13.9375 between 13 (0) and 14 (200)
    assert out[0, 0, 5, 14:18].tolist() == [0, 12, 188, 200]
    same = torch.arange(3 * 32 * 32).reshape(1, 3, 32, 32).to(torch.uint8)
    assert torch.equal(mixed.colour32(same), same)


def test_real_cifar_mnist():
    real("cifar10")
    real("mnist")
    got, again = mixed.cifar_mnist(), mixed.cifar_mnist()
    assert got.x.shape == (12000, 3, 32, 32) and got.classes == 20
    assert np.bincount(got.y[~torch.tensor(got.test)]).tolist() == [400] * 20
    assert np.bincount(got.y[torch.tensor(got.test)]).tolist() == [200] * 20
    assert np.array_equal(got.sources, (got.y >= 10).numpy()) and torch.equal(got.x, again.x)
