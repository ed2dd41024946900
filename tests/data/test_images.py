"""Image sets from tiny files in every official layout, and the real ones where $PERSONAFL_DATA has them."""

import gzip
import json
import pickle

import numpy as np
import pytest
import torch
from PIL import Image

from personafl.data import catalogue, images
from personafl.data.catalogue import Entry, FileSpec, Layout
from personafl.data.checksums import DataError
from tests.data.written import DIGITS, PIXELS, Harm, idx, leaf, md5, put, real, sha256, write_medmnist


def write_idx(folder, zipped=False):
    for split, (x, y) in DIGITS.items():
        for name, array in ((f"{split}-images-idx3-ubyte", x), (f"{split}-labels-idx1-ubyte", y)):
            put(folder / (name + ".gz" * zipped), gzip.compress(idx(array)) if zipped else idx(array))


@pytest.mark.parametrize("zipped", [False, True])
def test_mnist_is_read_from_idx_files(home, zipped):
    write_idx(home / "MNIST" / "raw", zipped)
    got = images.mnist(check=False)
    assert got.x.dtype == torch.uint8 and got.x.shape == (5, 1, 28, 28)
    assert np.array_equal(got.x[:3, 0].numpy(), DIGITS["train"][0])
    assert got.y.tolist() == [3, 1, 4, 1, 5] and got.test.tolist() == [False] * 3 + [True] * 2
    assert got.clients is None


def test_fmnist_is_read_like_mnist(home):
    write_idx(home / "FashionMNIST" / "raw")
    assert images.fmnist(check=False).y.tolist() == [3, 1, 4, 1, 5]


def test_official_qmnist_labels_give_the_writers(home):
    folder = home / "MNIST" / "raw"
    write_idx(folder)
    train = np.array([[3, 0, 70, 0, 0, 0, 0, 0], [1, 0, 71, 0, 0, 0, 0, 0], [4, 0, 70, 0, 0, 0, 0, 0]])
    test = np.array([[1, 4, 80, 0, 0, 0, 0, 0], [5, 4, 81, 0, 0, 0, 0, 0], [9, 4, 99, 0, 0, 0, 0, 0]])  # one too many
    put(folder / "qmnist-train-labels-idx2-int.gz", gzip.compress(idx(train, 12)))
    put(folder / "qmnist-test-labels-idx2-int", idx(test, 12))
    assert images.mnist(check=False).clients.tolist() == [70, 71, 70, 80, 81]


def test_writers_may_be_a_plain_array(home):
    folder = home / "MNIST" / "raw"
    write_idx(folder)
    np.save(folder / "qmnist-train-writers.npy", np.array([7, 8, 7], np.int16))
    np.save(folder / "qmnist-test-writers.npy", np.array([9, 9], np.int16))
    assert images.mnist(check=False).clients.tolist() == [7, 8, 7, 9, 9]
    np.save(folder / "qmnist-test-writers.npy", np.array([9], np.int16))
    with pytest.raises(DataError, match="names 1 writers for 2 test images"):
        images.mnist(check=False)


def test_writers_of_other_digits_are_noticed(home):
    folder = home / "MNIST" / "raw"
    write_idx(folder)
    swapped = np.zeros((3, 8), int)
    put(folder / "qmnist-train-labels-idx2-int", idx(swapped, 12))
    put(folder / "qmnist-test-labels-idx2-int", idx(swapped, 12))
    with pytest.raises(DataError, match="swapped: its classes are not those of the train images"):
        images.mnist(check=False)


def test_images_and_labels_of_different_splits_are_noticed(home):
    folder = home / "mnist"
    write_idx(folder)
    put(folder / "train-labels-idx1-ubyte", idx(DIGITS["t10k"][1]))
    with pytest.raises(DataError, match="swapped: train has 3 images but 2 labels"):
        images.mnist(check=False)


def test_a_checked_mnist_must_be_the_official_one(home):
    write_idx(home / "MNIST" / "raw")
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte is truncated: 2,368 of 47,040,016 bytes"):
        images.mnist()


BATCHES = [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]


def python2(batch):
    """A batch as Python 2 with an old numpy wrote it."""
    return pickle.dumps(batch, protocol=2).replace(b"numpy._core.multiarray", b"numpy.core.multiarray")


@pytest.mark.parametrize("kind", ["binary", "python"])
def test_cifar10_is_read_from_both_official_forms(home, kind):
    labels = np.arange(12) % 10
    for i, name in enumerate(BATCHES):
        x, y = PIXELS[2 * i : 2 * i + 2], labels[2 * i : 2 * i + 2]
        if kind == "binary":
            put(home / "cifar-10-batches-bin" / f"{name}.bin", np.c_[y.astype(np.uint8), x].tobytes())
        else:
            put(home / "cifar-10-batches-py" / name, python2({b"data": x, b"labels": y.tolist()}))
    got = images.cifar10(check=False)
    assert np.array_equal(got.x.reshape(12, -1).numpy(), PIXELS) and got.x.shape == (12, 3, 32, 32)
    assert got.y.tolist() == labels.tolist() and got.test.tolist() == [False] * 10 + [True] * 2


@pytest.mark.parametrize("kind", ["binary", "python"])
def test_cifar100_has_the_fine_labels(home, kind):
    coarse, fine = np.arange(12) + 1, np.arange(12) * 9
    for name, rows in (("train", slice(0, 8)), ("test", slice(8, 12))):
        if kind == "binary":
            raw = np.c_[coarse[rows].astype(np.uint8), fine[rows].astype(np.uint8), PIXELS[rows]]
            put(home / "cifar-100-binary" / f"{name}.bin", raw.tobytes())
        else:
            batch = {"data": PIXELS[rows], "coarse_labels": coarse[rows].tolist(), "fine_labels": fine[rows].tolist()}
            put(home / "cifar-100-python" / name, python2(batch))
    got = images.cifar100(check=False)
    assert got.y.tolist() == fine.tolist() and int(got.test.sum()) == 4
    assert np.array_equal(got.x.reshape(12, -1).numpy(), PIXELS)


def test_swapped_batches_are_named(home, monkeypatch):
    folder, contents = home / "cifar-10-batches-bin", {f"{n}.bin": bytes([i]) * 3073 for i, n in enumerate(BATCHES)}
    layout = Layout("cifar-10-batches-bin", {n: FileSpec(3073, (md5(c),)) for n, c in contents.items()})
    monkeypatch.setitem(catalogue.CATALOGUE, "cifar10", Entry("CIFAR-10", {"binary": layout}))
    for name, content in contents.items():
        put(folder / name, content)
    put(folder / "data_batch_2.bin", contents["test_batch.bin"])
    with pytest.raises(DataError, match=r"data_batch_2\.bin is swapped: it holds what belongs into test_batch\.bin"):
        images.cifar10()
    put(folder / "data_batch_2.bin", contents["data_batch_2.bin"][:-1] + b"!")
    with pytest.raises(DataError, match=r"data_batch_2\.bin is corrupted"):
        images.cifar10()


def picture(path, grey, size=32):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (size, size), (grey, 0, 0)).save(path)


def test_cinic10_is_read_from_its_folders(home):
    for s, split in enumerate(("train", "valid", "test")):
        for k, name in enumerate(images._CINIC):
            picture(home / "CINIC-10" / split / name / "cifar10-train-1.png", 10 * s + k)
            picture(home / "CINIC-10" / split / name / "n02690373_10074.png", 100 + 10 * s + k)
    got = images.cinic10(check=False)
    assert got.x.shape == (60, 3, 32, 32) and got.y.tolist() == [k for _ in range(3) for k in range(10) for _ in "12"]
    assert got.x[:, 0, 0, 0].tolist() == [n for i in range(30) for n in (i, 100 + i)]
    assert got.test.tolist() == [False] * 40 + [True] * 20 and got.sources.tolist() == [0, 1] * 30
    with pytest.raises(DataError, match="airplane is not whole: 2 images in place of 9000"):
        images.cinic10()
    put(home / "CINIC-10" / "test" / "cat" / "a.png", b"\x89PNG")
    with pytest.raises(DataError, match=r"cat/a\.png is truncated or corrupted"):
        images.cinic10(check=False)


def test_mini_imagenet_is_read_from_class_folders_and_from_lists(home):
    folder = home / "mini-imagenet"
    for split, name in (("train", "n02"), ("val", "n03"), ("test", "n01")):
        picture(folder / split / name / "a.png", int(name[1:]) * 10, size=84)
    got = images.mini_imagenet(check=False)
    assert got.x.shape == (3, 3, 84, 84) and got.test is None
    assert got.x[:, 0, 0, 0].tolist() == [10, 20, 30] and got.y.tolist() == [0, 1, 2]  # n01, n02, n03
    for split in ("train", "val", "test"):
        put(folder / f"{split}.csv", f"filename,label\n{split}1.png,{split}\n")
        picture(folder / "images" / f"{split}1.png", len(split) * 10, size=100)
    got = images.mini_imagenet(size=16, check=False)
    assert got.x[:, 0, 0, 0].tolist() == [40, 50, 30] and got.x.shape == (3, 3, 16, 16)  # test, train, val
    with pytest.raises(DataError, match="1 images of class test; there should be 100 classes of 600"):
        images.mini_imagenet()


def test_femnist_is_read_from_leaf_files(home):
    black, grey = [0.0] * 784, [0.5] * 784
    leaf(
        home / "femnist" / "data",
        {"f1": {"x": [black, grey], "y": [61, 0]}, "f2": {"x": [grey], "y": [5]}},
        {"f2": {"x": [black], "y": [6]}},
    )
    got = images.femnist()
    assert got.x.shape == (4, 1, 28, 28) and got.x[:, 0, 0, 0].tolist() == [0, 128, 128, 0]  # rint(127.5) is even
    assert got.y.tolist() == [61, 0, 5, 6] and got.classes == 62
    assert got.clients.tolist() == [0, 0, 1, 1] and got.test.tolist() == [False, False, False, True]


def test_damaged_leaf_files_are_named(home):
    folder = home / "femnist"
    right = {"u": {"x": [[0.0] * 784], "y": [1]}}
    for wrong, told in (
        ({"u": {"x": [[0.0] * 783], "y": [1]}}, "corrupted at user u"),
        ({"u": {"x": [[0.0] * 784], "y": [62]}}, r"labels 62\.\.62 are not in 0\.\.61"),
        ({"u": {"x": [[0.0] * 784], "y": []}}, "user u has 1 examples but 0 labels"),
        ({"u": {"x": [[0.0] * 784]}}, "num_samples|corrupted at user u"),
    ):
        put(folder / "train" / "a.json", json.dumps({"user_data": wrong}))
        put(folder / "test" / "a.json", json.dumps({"user_data": right}))
        with pytest.raises(DataError, match=told):
            images.femnist()
    put(folder / "train" / "a.json", json.dumps({"user_data": right})[:-5])
    with pytest.raises(DataError, match=r"train/a\.json is truncated or corrupted"):
        images.femnist()
    (folder / "train" / "a.json").unlink()
    with pytest.raises(DataError, match=r"train holds no \.json file"):
        images.femnist()


def test_medmnist_is_read_from_npz_under_both_kinds_of_names(home):
    write_medmnist(home / "pneumoniamnist.npz", 2, 3, 2)
    got = images.pneumoniamnist()
    assert got.x.shape == (12, 1, 28, 28) and got.y.tolist() == [0, 0, 0, 1, 1, 1, 0, 1, 0, 0, 1, 1]
    assert got.test.tolist() == [False] * 8 + [True] * 4  # validation counts as training
    x, y = np.zeros((2, 28, 28), np.uint8), np.array([0, 1])
    parts = {f"{n}_{s}": v for n, v in (("x", x), ("y", y)) for s in ("train", "val", "test")}
    np.savez(home / "pneumoniamnist.npz", **parts)
    assert images.pneumoniamnist().y.tolist() == [0, 1] * 3
    write_medmnist(home / "pneumoniamnist.npz", 4, 1, 1)
    with pytest.raises(DataError, match=r"swapped or corrupted: label 3 is not in 0\.\.1"):
        images.pneumoniamnist()
    np.savez(home / "pneumoniamnist.npz", a=np.array([Harm()], object))
    with pytest.raises(DataError, match=r"truncated or corrupted: .* holds Python objects"):
        images.pneumoniamnist()


def test_real_cifar10():
    real("cifar10")
    got = images.cifar10()
    y, pixels = got.y.numpy(), got.x.permute(0, 2, 3, 1).numpy()
    assert np.bincount(y[~got.test]).tolist() == [5000] * 10 and np.bincount(y[got.test]).tolist() == [1000] * 10
    assert sha256(pixels[:50000]) == "47af8b02cfcfb6cdf3dbbd1969ad7f1b70f4413f6f80f437b020ee4e5bc8304a"
    assert sha256(pixels[50000:]) == "f9b1e2130bab680db56eb06d886f7f1ad0f1183907ceff4659d1735c890f5b04"
    assert sha256(y[:50000].astype(np.uint8)) == "2b7cd2f24487317614016b72ffd53071c3062f592f0eb300c18a770d41ae1253"
    assert sha256(y[50000:].astype(np.uint8)) == "cec8a24a1e92aa2ecaa0bbd3dbfa86bf6cd8759fbd209a832824c8cf0afca9d5"
    means = got.x[:50000].numpy().mean((0, 2, 3)) / 255
    assert np.allclose(means, [0.4914, 0.4822, 0.4465], atol=1e-4)


def test_real_cifar100():
    real("cifar100")
    got = images.cifar100()
    y = got.y.numpy()
    assert np.bincount(y[~got.test]).tolist() == [500] * 100 and np.bincount(y[got.test]).tolist() == [100] * 100
    assert got.x.shape == (60000, 3, 32, 32)
    # of both parts together, which copies made of pooled data have too: (5 * training mean + test mean) / 6
    assert np.allclose(got.x.numpy().mean((0, 2, 3)) / 255, [0.5074, 0.4867, 0.4411], atol=1e-4)


def test_real_mnist_with_writers():
    real("mnist")
    got = images.mnist()
    y = got.y.numpy()
    assert np.bincount(y[~got.test]).tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert np.bincount(y[got.test]).tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    assert sha256(got.x[:60000].numpy()) == "741c988805d008ac6e4c904b69001ba184c24b2c540a4ef403f4c71b676cf757"
    assert sha256(got.x[60000:].numpy()) == "6d87418db22cc8025d05968bec9bd5c3932904b23485740db143a061a2c9d161"
    assert sha256(y[:60000].astype(np.uint8)) == "1feba77c54802fa5339a11837ea4b2866434b83314ec45192930f1df69120c13"
    assert sha256(y[60000:].astype(np.uint8)) == "ddeff807876a9661a1110d45c266c86239a3a1b7d37da0c3716a7a683c852ff5"
    if got.clients is None:
        pytest.skip("the writers do not lie beside MNIST")
    train, test = (np.unique(got.clients[m], return_counts=True) for m in (~got.test, got.test))
    assert len(train[0]) == 539 and len(test[0]) == 297 and not np.intersect1d(train[0], test[0]).size
    assert (train[1].min(), train[1].max(), test[1].min(), test[1].max()) == (19, 131, 8, 130)


def test_real_pneumoniamnist():
    real("pneumoniamnist")
    got = images.pneumoniamnist()
    y = got.y.numpy()
    assert np.bincount(y[~got.test]).tolist() == [1214 + 135, 3494 + 389]
    assert np.bincount(y[got.test]).tolist() == [234, 390] and got.x.shape == (5856, 1, 28, 28)
    assert sha256(got.x.numpy()) == "0c60a76a46b82c37314f4249c837496a6b8315421ea270cd24bd8896176e298e"
    assert sha256(y) == "277ee9b5d2e894fd020920b6db07f1947f04b9484695b36af3eed9e02edca569"
