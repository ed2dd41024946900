"""Loaders on tiny files in every official layout, and on the real sets where $PERSONAFL_DATA has them."""

import gzip
import hashlib
import http.server
import io
import json
import os
import pickle
import tarfile
import threading
import zipfile

import numpy as np
import pytest
import torch
from PIL import Image

from personafl.data import catalogue, download, files, formats, images, mixed, signals, text
from personafl.data.catalogue import Entry, Known, Layout, Remote
from personafl.data.files import DataError, MissingDataError


@pytest.fixture
def home(tmp_path, monkeypatch):
    """An empty data folder, nothing in the cache, and no network."""
    monkeypatch.setenv("PERSONAFL_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PERSONAFL_OFFLINE", "1")
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


def put(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def idx(array, code=8):
    kind = {8: ">u1", 12: ">i4"}[code]
    head = bytes([0, 0, code, array.ndim]) + np.array(array.shape, ">u4").tobytes()
    return head + array.astype(kind).tobytes()


def md5(content):
    return hashlib.md5(content).hexdigest()


# --- what is missing


def test_what_is_missing_is_explained_in_one_message(home):
    with pytest.raises(MissingDataError) as e:
        images.cifar10()
    told = str(e.value)
    for needed in ("CIFAR-10", "cifar-10-batches-bin/", "test_batch.bin", "cifar-10-batches-py/", "PERSONAFL_OFFLINE"):
        assert needed in told
    assert "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz" in told
    assert str(home) in told and str(files.user_cache()) in told


def test_what_is_missing_of_a_set_that_is_half_there_is_named(home):
    put(home / "cifar-10-batches-bin" / "data_batch_1.bin", b"x")
    put(home / "cifar-10-binary.tar.gz.part", b"1234")
    with pytest.raises(MissingDataError) as e:
        images.cifar10()
    assert "cifar-10-batches-bin lacks data_batch_2.bin, data_batch_3.bin" in str(e.value)
    assert "cifar-10-binary.tar.gz.part is half-downloaded (4 bytes)" in str(e.value)


def test_the_named_folder_comes_before_the_cache(home):
    put(files.user_cache() / "wisdm.npz", b"")
    assert files.look("wisdm").root == files.user_cache()
    put(home / "wisdm.npz", b"")
    assert files.look("wisdm").root == home


def test_without_a_named_folder_downloads_go_to_the_cache(home, monkeypatch):
    monkeypatch.delenv("PERSONAFL_DATA")
    assert files.places() == [files.user_cache()]


# --- what is damaged


def test_a_file_is_truncated_swapped_too_long_or_corrupted(tmp_path):
    right, other = b"right", b"other"
    known = Known(5, (md5(right),))
    path = put(tmp_path / "a.bin", right)
    files.verify(path, known)
    put(path, right[:3])
    with pytest.raises(DataError, match=r"a\.bin is truncated: 3 of 5 bytes"):
        files.verify(path, known)
    put(path, other)
    with pytest.raises(DataError, match=r"a\.bin is swapped: it holds what belongs into b\.bin"):
        files.verify(path, known, {"b.bin": Known(None, (md5(other),))})
    with pytest.raises(DataError, match=r"a\.bin is corrupted: its checksum is"):
        files.verify(path, known)
    put(path, b"a longer one")
    with pytest.raises(DataError, match="is swapped: it holds what belongs into c"):
        files.verify(path, known, {"b.bin": Known(), "c": Known(12)})
    put(path, right + b"!")
    with pytest.raises(DataError, match="6 bytes in place of 5"):
        files.verify(path, known)


def test_a_file_may_have_a_sha256_in_place_of_an_md5(tmp_path):
    path = put(tmp_path / "a", b"right")
    files.verify(path, Known(None, (hashlib.sha256(b"right").hexdigest(),)))
    with pytest.raises(DataError, match="corrupted"):
        files.verify(path, Known(None, (hashlib.sha256(b"wrong").hexdigest(),)))


# --- the prepared form


def test_what_is_prepared_is_built_once_and_again_when_an_input_changes(home):
    source = put(home / "raw", b"1")
    built = []

    def build():
        built.append(source.read_bytes())
        return {"x": np.frombuffer(built[-1], np.uint8)}

    for _ in range(2):
        assert files.prepared("toy", home, [source], build)["x"].tolist() == [49]
    assert built == [b"1"]
    put(source, b"22")
    assert files.prepared("toy", home, [source], build)["x"].tolist() == [50, 50]
    files.prepared("toy", home, [source], build, size=3)
    assert built == [b"1", b"22", b"22"]


def test_a_damaged_prepared_file_is_made_anew(home):
    source, right = put(home / "raw", b"1"), {"x": np.arange(1000)}
    files.prepared("toy", home, [source], lambda: right)
    path = home / ".prepared" / "toy.npz"
    whole = path.read_bytes()
    at = whole.index(np.arange(500, 510).tobytes())
    for damaged in (whole[:-100], whole[:at] + b"!" + whole[at + 1 :], b""):
        path.write_bytes(damaged)
        assert np.array_equal(files.prepared("toy", home, [source], lambda: right)["x"], right["x"])
        assert path.read_bytes()[-100:] == whole[-100:]


def test_what_cannot_be_kept_beside_the_data_is_kept_in_the_cache(home):
    source = put(home / "raw", b"1")
    put(home / ".prepared", b"a file where the folder should be")
    files.prepared("toy", home, [source], lambda: {"x": np.arange(3)})
    assert (files.user_cache() / "prepared" / "toy.npz").exists()


# --- idx


DIGITS = {"train": (np.arange(3 * 28 * 28).reshape(3, 28, 28) % 251, np.array([3, 1, 4]))}
DIGITS["t10k"] = (255 - DIGITS["train"][0][:2], np.array([1, 5]))


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


def test_damaged_idx_files_are_named(tmp_path):
    whole = idx(DIGITS["train"][0])
    zipped = gzip.compress(whole)
    for content, told in (
        (whole[:-1], r"truncated: 2,367 of 2,368 bytes"),  # 16 + 3 * 784 = 2368
        (whole[:6], "truncated: its head has 6 of 16 bytes"),
        (whole + b"!", "corrupted"),
        (idx(DIGITS["train"][1]), "swapped: it holds an array of 1 dimensions, not of 3"),
        (b"<html>", "not an idx file: it begins with 3c68746d"),
        (b"", "not an idx file: it begins with nothing"),
        (zipped[:-20], "truncated: its gzip stream ends early"),
        (zipped[:-8] + b"12345678", "corrupted"),
    ):
        with pytest.raises(DataError, match=told):
            formats.read_idx(put(tmp_path / "file", content), 3)


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


# --- CIFAR


PIXELS = np.random.default_rng(0).integers(0, 256, (12, 3072), dtype=np.uint8)
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


def test_a_pickle_may_hold_arrays_of_every_protocol(tmp_path):
    for protocol in range(2, 6):
        path = put(tmp_path / "b", pickle.dumps({"data": PIXELS, b"labels": [1] * 12, "name": b"raw"}, protocol))
        assert np.array_equal(formats.read_cifar_python(path, "labels", 10)[0].reshape(12, -1), PIXELS)


class Harm:
    def __reduce__(self):
        return os.mkdir, ("harm",)


def test_a_pickle_that_would_run_code_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for harmful in (Harm(), {"data": Harm()}, {"data": np.array([Harm()], object)}):
        with pytest.raises(DataError, match=r"not a data batch: it asks for \w+\.mkdir"):
            formats.read_pickle(put(tmp_path / "b", pickle.dumps(harmful)))
    assert not (tmp_path / "harm").exists()


def test_damaged_cifar_files_are_named(tmp_path):
    path = tmp_path / "file"
    whole = np.c_[np.arange(12, dtype=np.uint8), PIXELS].tobytes()
    with pytest.raises(DataError, match=r"truncated: 36,875 bytes are not a whole number of 3073-byte examples"):
        formats.read_cifar_binary(put(path, whole[:-1]), 1, 100)
    with pytest.raises(DataError, match=r"label 11 is not in 0\.\.9"):
        formats.read_cifar_binary(put(path, whole), 1, 10)
    batch = pickle.dumps({"data": PIXELS, "labels": [1] * 12})
    for content, told in (
        (batch[:-1000], "is truncated"),
        (b"", "is truncated"),
        (pickle.dumps([1]), "holds a list, not a dictionary"),
        (pickle.dumps({"data": PIXELS}), "not a data batch with data and labels: it has data"),
        (pickle.dumps({"data": PIXELS[:, 1:], "labels": [1] * 12}), "is corrupted: data uint8"),
        (pickle.dumps({"data": PIXELS, "labels": [-1] * 12}), "is corrupted: labels -1"),
        (b"<html>" * 10, "is"),
    ):
        with pytest.raises(DataError, match=told):
            formats.read_cifar_python(put(path, content), "labels", 10)


def test_swapped_batches_are_named(home, monkeypatch):
    folder, contents = home / "cifar-10-batches-bin", {f"{n}.bin": bytes([i]) * 3073 for i, n in enumerate(BATCHES)}
    layout = Layout("cifar-10-batches-bin", {n: Known(3073, (md5(c),)) for n, c in contents.items()})
    monkeypatch.setitem(catalogue.CATALOGUE, "cifar10", Entry("CIFAR-10", {"binary": layout}))
    for name, content in contents.items():
        put(folder / name, content)
    put(folder / "data_batch_2.bin", contents["test_batch.bin"])
    with pytest.raises(DataError, match=r"data_batch_2\.bin is swapped: it holds what belongs into test_batch\.bin"):
        images.cifar10()
    put(folder / "data_batch_2.bin", contents["data_batch_2.bin"][:-1] + b"!")
    with pytest.raises(DataError, match=r"data_batch_2\.bin is corrupted"):
        images.cifar10()


# --- folders of pictures


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


# --- LEAF


def leaf(folder, train, test):
    for split, data in (("train", train), ("test", test)):
        held = {"users": list(data), "num_samples": [len(d["y"]) for d in data.values()], "user_data": data}
        put(folder / split / f"all_data_{split}.json", json.dumps(held))


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


def test_leaf_shakespeare_is_taken_as_it_is(home):
    run = "ab\n" + "z" * 77
    leaf(home / "shakespeare", {"PLAY_HAMLET": {"x": [run], "y": ["é"]}}, {"PLAY_HAMLET": {"x": [run], "y": ["}"]}})
    got = text.shakespeare()
    assert "".join(text.ALPHABET[c] for c in got.x[0]) == run
    assert got.y.tolist() == [1, 79] and got.clients.tolist() == [0, 0]  # an unknown character is a blank
    leaf(home / "shakespeare", {"A": {"x": [run[1:]], "y": ["a"]}}, {})
    with pytest.raises(DataError, match="example 0 has 79 characters in place of 80"):
        text.shakespeare()


# --- text


def test_the_alphabet_has_eighty_different_characters():
    assert len(text.ALPHABET) == len(set(text.ALPHABET)) == 80


def test_windows_are_the_eighty_characters_before_each():
    spoken = "".join(chr(ord("a") + i % 26) for i in range(100))
    x, y = text.windows(spoken)
    assert x.shape == (99, 80)  # every character but the first is foretold
    assert "".join(text.ALPHABET[c] for c in x[0]) == " " * 79 + "a" and text.ALPHABET[y[0]] == "b"
    assert "".join(text.ALPHABET[c] for c in x[98]) == spoken[19:99] and text.ALPHABET[y[98]] == spoken[99]
    assert np.array_equal(text.windows(spoken, 7)[0], x[::7])


def test_blocks_are_whole_speeches_of_a_thousand_characters_or_more():
    speeches = ["a" * 600, "b" * 600, "c" * 1000, "d" * 10]
    assert text.blocks(speeches) == ["a" * 600 + "\n" + "b" * 600, "c" * 1000 + "\n" + "d" * 10]
    assert text.blocks(["a", "b"]) == ["a\nb"] and text.blocks([]) == []


def test_roles_are_clients_and_their_last_speeches_are_for_testing(home):
    roles = [
        {"play": "P", "role": "ONCE", "speeches": ["Alone."]},
        {"play": "P", "role": "TWICE", "speeches": ["One two.", "Three."]},
        {"play": "P", "role": "OFTEN", "speeches": ["x" * 1000] * 9 + ["y" * 500]},
    ]
    put(home / "shakespeare" / "roles.json", json.dumps(roles))
    got = text.shakespeare()
    # 8 and 6 characters give 7 and 5 windows; of ten speeches two are for testing: 1,501 characters with the newline
    assert [int(((got.clients == c) & (got.test == t)).sum()) for c in (1, 2) for t in (0, 1)] == [7, 5, 8 * 999, 1500]
    assert 0 not in got.clients and got.x.shape[1] == 80 and got.classes == 80
    assert np.unique(got.groups[got.clients == 2]).size == 8 + 1 and np.unique(got.groups).size == 2 + 9
    put(home / "shakespeare" / "roles.json", '[{"role": 1}]')
    with pytest.raises(DataError, match="is not a list of"):
        text.shakespeare()


# --- signals


def write_har(folder, split, x, y, subject):
    names = [f"{k}_{a}" for k in ("body_acc", "body_gyro", "total_acc") for a in "xyz"]
    for c, name in enumerate(names):
        lines = io.StringIO()
        np.savetxt(lines, x[:, c], fmt="%.7e")
        put(folder / split / "Inertial Signals" / f"{name}_{split}.txt", lines.getvalue())
    put(folder / split / f"y_{split}.txt", "".join(f"{k}\n" for k in y))
    put(folder / split / f"subject_{split}.txt", "".join(f"{k}\n" for k in subject))


def recording(seed, count):
    """Windows that overlap by half: `[count, 9, 128]`."""
    raw = np.random.default_rng(seed).normal(size=(9, 64 * (count + 1))).astype(np.float32)
    return np.stack([raw[:, 64 * i : 64 * i + 128] for i in range(count)])


def test_har_has_signals_subjects_and_recordings(home):
    folder = home / "UCI HAR Dataset"
    train, test = np.concatenate([recording(0, 3), recording(1, 2)]), recording(2, 2)
    write_har(folder, "train", train, [1, 1, 1, 6, 6], [3, 3, 3, 3, 3])
    write_har(folder, "test", test, [2, 2], [4, 4])
    got = signals.har()
    assert got.x.shape == (7, 9, 128) and got.x.dtype == torch.float32
    assert np.allclose(got.x.numpy(), np.concatenate([train, test]), rtol=1e-6)
    assert got.y.tolist() == [0, 0, 0, 5, 5, 1, 1] and got.clients.tolist() == [3] * 5 + [4] * 2
    assert got.groups.tolist() == [0, 0, 0, 1, 1, 2, 2] and got.test.tolist() == [False] * 5 + [True] * 2


def test_a_recording_ends_with_the_person_or_one_channel_that_does_not_go_on():
    x = recording(0, 4)
    assert signals.segments(x, np.array([1, 1, 1, 1])).tolist() == [0, 0, 0, 0]
    assert signals.segments(x, np.array([1, 1, 2, 2])).tolist() == [0, 0, 1, 1]
    x[1, 8, 64] += 1
    assert signals.segments(x, np.array([1, 1, 1, 1])).tolist() == [0, 0, 1, 1]


def test_har_features_are_used_where_there_are_some(home):
    folder = home / "UCI HAR Dataset"
    write_har(folder, "train", recording(0, 2), [1, 1], [1, 1])
    write_har(folder, "test", recording(1, 1), [2], [2])
    with pytest.raises(DataError, match="the 561 features are not in this copy"):
        signals.har(features=True)
    for split, rows in (("train", 2), ("test", 1)):
        put(folder / split / f"X_{split}.txt", (" ".join(["0.5"] * 561) + "\n") * rows)
    got = signals.har(features=True)
    assert got.x.shape == (3, 561) and got.groups.tolist() == [0, 0, 1]
    assert signals.har().x.shape == (3, 9, 128)


def test_har_features_alone_group_runs_of_one_activity(home):
    folder = home / "UCI HAR Dataset"
    for split, y, who in (("train", [1, 1, 2, 2], [1, 1, 1, 5]), ("test", [2], [2])):
        put(folder / split / f"X_{split}.txt", (" ".join(["0.5"] * 561) + "\n") * len(y))
        put(folder / split / f"y_{split}.txt", "".join(f"{k}\n" for k in y))
        put(folder / split / f"subject_{split}.txt", "".join(f"{k}\n" for k in who))
    assert signals.har(features=True).groups.tolist() == [0, 0, 1, 2, 3]
    with pytest.raises(DataError, match="no Inertial Signals; use features=True"):
        signals.har()


def test_damaged_har_files_are_named(home):
    folder = home / "UCI HAR Dataset"
    write_har(folder, "train", recording(0, 2), [1, 1], [1, 1])
    write_har(folder, "test", recording(1, 1), [2], [2])
    path = folder / "train" / "Inertial Signals" / "body_gyro_y_train.txt"
    whole = path.read_bytes()
    line = len(whole) // 2
    for content, told in (
        (whole[:-40], "is truncated or corrupted"),
        (whole[:line], "is truncated: 1 of 2 windows"),
        (b"", "is truncated: it is empty"),
        (b"1 2 3\n1 2 3\n", "3 numbers to a line in place of 128"),
    ):
        put(path, content)
        with pytest.raises(DataError, match=rf"body_gyro_y_train\.txt {told}|{told}"):
            signals.har()
    path.unlink()
    with pytest.raises(DataError, match=r"body_gyro_y_train\.txt is missing"):
        signals.har()


ARFF = """@relation activity
@attribute "UNIQUE_ID" numeric
@attribute "user" numeric
@attribute "X0" numeric
@attribute "XPEAK" numeric
@attribute "class" { "Walking" , "Jogging" }
@data
1,33,1.0,10,Jogging
2,33,2.0,?,"Walking"
3,17,3.0,30,Standing
"""


def test_wisdm_is_read_from_arff(home):
    put(home / "WISDM_ar_v1.1" / "WISDM_ar_v1.1_transformed.arff", ARFF)
    got = signals.wisdm(standardise=False)
    assert got.x.tolist() == [[1, 10], [2, 20], [3, 30]]  # ? becomes the mean of 10 and 30
    assert got.y.tolist() == [1, 0, 5] and got.clients.tolist() == [33, 33, 17] and got.classes == 6
    scaled = signals.wisdm().x
    assert torch.allclose(scaled, torch.tensor([-(1.5**0.5), 0.0, 1.5**0.5]).unsqueeze(1).expand(3, 2))


def test_wisdm_is_read_from_npz(home):
    np.savez(home / "wisdm.npz", x=np.ones((2, 43), np.float32), y=np.array([0, 5]), user=np.array([1, 36]))
    got = signals.wisdm()
    assert got.x.tolist() == [[0.0] * 43] * 2 and got.clients.tolist() == [1, 36]
    np.savez(home / "wisdm.npz", x=np.ones((2, 43)))
    with pytest.raises(DataError, match=r"wisdm\.npz has no y, user: it has x"):
        signals.wisdm()
    put(home / "wisdm.npz", (home / "wisdm.npz").read_bytes()[:-30])
    with pytest.raises(DataError, match=r"wisdm\.npz is truncated or corrupted"):
        signals.wisdm()


def test_damaged_arff_lines_are_named(tmp_path):
    for content, told in (
        (ARFF[:-12], "line 10 has 4 of 5 fields"),
        (ARFF.replace("Standing", "Flying"), "line 10: activity 'Flying' is not one of Walking"),
        (ARFF.replace("3.0", "3.x"), "corrupted at line 10"),
        (ARFF[: ARFF.index("1,33")], "nothing after its head"),
    ):
        with pytest.raises(DataError, match=told):
            signals.read_arff(put(tmp_path / "a.arff", content))


# --- MedMNIST and what is made of several sets


def write_medmnist(path, classes, train, test, shape=(28, 28)):
    held = {}
    for split, count in (("train", train), ("val", 1), ("test", test)):
        y = np.repeat(np.arange(classes), count)
        held[f"{split}_images"] = np.broadcast_to(y.reshape(-1, *[1] * len(shape)), (len(y), *shape)).astype(np.uint8)
        held[f"{split}_labels"] = y[:, None].astype(np.uint8)
    np.savez(path, **held)


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
    with pytest.raises(DataError, match="not an npz file of plain arrays"):
        images.pneumoniamnist()


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


def test_entries_of_another_length_are_refused():
    with pytest.raises(DataError, match="toy: 2 examples but 3 entries in groups"):
        files.Loaded("toy", torch.zeros(2, 1), torch.zeros(2), 1, groups=np.zeros(3, np.int64))


# --- downloads


class Server(http.server.BaseHTTPRequestHandler):
    """Files by name; `cut` ends that many answers early, `ranges` may be refused."""

    held: dict
    asked: list
    cut = 0
    ranges = True

    def do_GET(self):
        cls, name = type(self), self.path.strip("/").split("?")[0]
        asked = self.headers.get("Range")
        cls.asked.append((name, asked))
        if name not in cls.held:
            self.send_error(404)
            return
        body = cls.held[name]
        start = int(asked[6:-1]) if asked and cls.ranges else 0
        if start >= len(body) and start:
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{len(body)}")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_response(206 if asked and cls.ranges else 200)
        if asked and cls.ranges:
            self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        self.send_header("Content-Length", str(len(body) - start))
        self.end_headers()
        if cls.cut:
            cls.cut -= 1
            self.wfile.write(body[start : start + (len(body) - start) // 2])
            self.close_connection = True
            return
        self.wfile.write(body[start:])

    def log_message(self, *args):
        pass


@pytest.fixture
def server(monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    kind = type("Held", (Server,), {"held": {}, "asked": []})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), kind) as running:
        kind.url = f"http://127.0.0.1:{running.server_port}/"  # type: ignore[attr-defined]
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        yield kind
        running.shutdown()
        thread.join()


BODY = bytes(range(256)) * 4000  # several blocks


def remote(server, body=BODY, known=True):
    server.held["big file.bin".replace(" ", "+")] = body
    return Remote(f"{server.url}big+file.bin?download=1", Known(len(BODY), (md5(BODY),)) if known else Known())


def test_a_download_is_verified_and_told(server, tmp_path):
    told = []
    path = download.download(remote(server), tmp_path / "to", lambda *t: told.append(t))
    assert path == tmp_path / "to" / "big file.bin" and path.read_bytes() == BODY
    assert told[0] == ("big file.bin", 0, len(BODY)) and told[-1] == ("big file.bin", len(BODY), len(BODY))
    assert [p.name for p in path.parent.iterdir()] == ["big file.bin"]
    download.download(remote(server), tmp_path / "to")
    assert len(server.asked) == 1  # what is there is not fetched again


def test_an_interrupted_download_goes_on_where_it_stopped(server, tmp_path):
    server.cut = 2
    assert download.download(remote(server), tmp_path).read_bytes() == BODY
    half, rest = len(BODY) // 2, len(BODY) // 4
    assert [r for _, r in server.asked] == [None, f"bytes={half}-", f"bytes={half + rest}-"]


def test_a_download_that_failed_is_resumed_by_the_next_call(server, tmp_path):
    server.cut = 1
    with pytest.raises(download.UnreachableError, match=r"ended early; 512,000 bytes are kept in .*\.part"):
        download.download(remote(server), tmp_path, tries=1)
    assert not (tmp_path / "big file.bin").exists()
    assert download.download(remote(server), tmp_path).read_bytes() == BODY
    assert server.asked[-1][1] == "bytes=512000-"


def test_a_download_stopped_by_hand_is_resumed(server, tmp_path):
    def stop(name, have, total):
        if have:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        download.download(remote(server), tmp_path, stop)
    have = (tmp_path / "big file.bin.part").stat().st_size
    assert 0 < have < len(BODY)
    assert download.download(remote(server), tmp_path).read_bytes() == BODY
    assert server.asked[-1][1] == f"bytes={have}-"


def test_a_server_without_ranges_gives_all_of_it_again(server, tmp_path):
    server.ranges = False
    put(tmp_path / "big file.bin.part", BODY[:1000])
    assert download.download(remote(server), tmp_path).read_bytes() == BODY


def test_a_half_that_does_not_fit_is_thrown_away(server, tmp_path):
    for half in (b"?" * 1000, BODY + b"too long", b"?" * len(BODY)):
        put(tmp_path / "big file.bin.part", half)
        path = download.download(remote(server), tmp_path)
        assert path.read_bytes() == BODY
        path.unlink()


def test_a_half_that_is_whole_only_gets_its_name(server, tmp_path):
    put(tmp_path / "big file.bin.part", BODY)
    assert download.download(remote(server), tmp_path).read_bytes() == BODY


def test_without_a_checksum_a_download_starts_clean(server, tmp_path):
    put(tmp_path / "big file.bin.part", b"?" * 1000)
    assert download.download(remote(server, known=False), tmp_path).read_bytes() == BODY
    assert server.asked == [("big+file.bin", None)]


def test_what_is_not_the_file_is_not_kept(server, tmp_path):
    with pytest.raises(DataError, match=r"what came is not the file: .* corrupted"):
        download.download(remote(server, BODY[:-1] + b"!"), tmp_path)
    with pytest.raises(download.UnreachableError, match="the server says 404"):
        download.download(Remote(f"{server.url}nothing"), tmp_path)
    assert not list(tmp_path.iterdir())
    put(tmp_path / "big file.bin", BODY[:10])
    with pytest.raises(DataError, match="is truncated: 10 of"):
        download.download(remote(server), tmp_path)


def test_nobody_at_the_other_end_is_told(tmp_path):
    with pytest.raises(download.UnreachableError, match="refused"):
        download.download(Remote("http://127.0.0.1:9/x"), tmp_path)


def archive(kind, members):
    out = io.BytesIO()
    if kind == "zip":
        with zipfile.ZipFile(out, "w") as z:
            for name, content in members.items():
                z.writestr(name, content)
    else:
        with tarfile.open(fileobj=out, mode="w:gz") as t:
            for name, content in members.items():
                info = tarfile.TarInfo(name)
                info.size = len(content)
                t.addfile(info, io.BytesIO(content))
    return out.getvalue()


def test_a_set_is_downloaded_and_unpacked_on_first_use(server, home, monkeypatch):
    rows = np.c_[np.zeros(2, np.uint8), np.array([1, 2], np.uint8), PIXELS[:2]].tobytes()
    body = archive("tar", {"cifar-100-binary/train.bin": rows, "cifar-100-binary/test.bin": rows})
    server.held["cifar-100-binary.tar.gz"] = body
    entry = Entry(
        "CIFAR-100",
        catalogue.CATALOGUE["cifar100"].layouts,
        (Remote(f"{server.url}cifar-100-binary.tar.gz", Known(len(body), (md5(body),))),),
    )
    monkeypatch.setitem(catalogue.CATALOGUE, "cifar100", entry)
    with pytest.raises(MissingDataError, match="turned off by PERSONAFL_OFFLINE"):
        images.cifar100(check=False)
    monkeypatch.delenv("PERSONAFL_OFFLINE")
    for _ in range(2):
        assert images.cifar100(check=False).y.tolist() == [1, 2, 1, 2]
    assert len(server.asked) == 1 and not (home / "cifar-100-binary.tar.gz").exists()


def test_a_download_that_fails_says_what_to_put_where(server, home, monkeypatch):
    entry = Entry("WISDM", catalogue.CATALOGUE["wisdm"].layouts, (Remote(f"{server.url}gone.tar.gz"),))
    monkeypatch.setitem(catalogue.CATALOGUE, "wisdm", entry)
    monkeypatch.delenv("PERSONAFL_OFFLINE")
    with pytest.raises(MissingDataError, match=r"the download failed: .* 404") as e:
        signals.wisdm()
    assert "WISDM_ar_v1.1_transformed.arff" in str(e.value)


def test_archives_inside_archives_are_unpacked_and_none_leaves_its_folder(tmp_path):
    inner = archive("zip", {"UCI HAR Dataset/train/y_train.txt": b"1\n", "../out.txt": b""})
    path = put(tmp_path / "to" / "har.zip", archive("zip", {"UCI HAR Dataset.zip": inner}))
    download.unpack(path, tmp_path / "to")
    assert (tmp_path / "to" / "UCI HAR Dataset" / "train" / "y_train.txt").read_bytes() == b"1\n"
    assert not (tmp_path / "to" / "UCI HAR Dataset.zip").exists() and not (tmp_path / "out.txt").exists()
    path = put(tmp_path / "to" / "bad.tar.gz", archive("tar", {"../out.txt": b""}))
    with pytest.raises(DataError, match=r"bad\.tar\.gz: cannot be unpacked"):
        download.unpack(path, tmp_path / "to")
    assert not (tmp_path / "out.txt").exists()
    with pytest.raises(DataError, match="cannot be unpacked"):
        download.unpack(put(path, path.read_bytes()[:30]), tmp_path / "to")


# --- the real sets


def real(name):
    """Skip where a real set is not at hand."""
    if not os.environ.get("PERSONAFL_DATA"):
        pytest.skip("PERSONAFL_DATA does not name a folder with real data")
    if files.look(name) is None:
        pytest.skip(f"{name} is not in {os.environ['PERSONAFL_DATA']}")


def sha256(array):
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


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


def test_real_cifar10_once_prepared_is_not_read_again(monkeypatch):
    real("cifar10")
    first = images.cifar10()

    def again(*_):
        raise AssertionError("the official files were read or hashed a second time")

    monkeypatch.setattr(images, "read_cifar_binary", again)
    monkeypatch.setattr(images, "read_cifar_python", again)
    monkeypatch.setattr(files, "digest", again)
    assert torch.equal(images.cifar10().x, first.x)


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


def test_real_har_has_857_recordings_of_one_person_and_activity_each():
    real("har")
    got = signals.har()
    assert np.bincount(got.y).tolist() == [1722, 1544, 1406, 1777, 1906, 1944]
    assert got.x.shape == (10299, 9, 128) and torch.isfinite(got.x).all()
    assert np.unique(got.clients[got.test]).tolist() == [2, 4, 9, 10, 12, 13, 18, 20, 24]
    assert int(got.test.sum()) == 2947 and np.unique(got.clients).tolist() == list(range(1, 31))
    assert sha256(got.y.numpy()) == "08ffc234f9407d20092453dd92ed1047b7dd428a486c48cbb6c29a6fd2945377"
    if files.look("har").kind == "signals":
        assert sha256(got.x.numpy()) == "d8fcf4e316361ee85c8808f9cbd6abc48f42b7f9a2ac97fc344096fa8190af5f"
        assert len(np.unique(got.groups)) == 857
        assert got.groups is not None and got.clients is not None
        assert len(np.unique(np.stack([got.groups, got.clients, got.y.numpy()]), axis=1).T) == 857
    held = np.bincount(got.clients)[1:]
    assert (held.min(), held.max()) == (281, 409)


def test_no_half_of_a_real_har_window_is_in_two_recordings():
    real("har")
    got = signals.har()
    where: dict[bytes, int] = {}
    for group, window in zip(got.groups.tolist(), got.x.numpy(), strict=True):
        for half in (window[:, :64], window[:, 64:]):
            assert where.setdefault(half.tobytes(), group) == group


def test_real_wisdm():
    real("wisdm")
    got = signals.wisdm()
    assert np.bincount(got.y).tolist() == [2081, 1625, 632, 528, 306, 246] and got.x.shape == (5418, 43)
    assert np.unique(got.clients).tolist() == list(range(1, 37))
    held = np.bincount(got.clients)[1:]
    assert (held.min(), held.max()) == (60, 273)
    assert sha256(got.y.numpy()) == "dd051ee5712c20bef5b5313faa923945320ba2834e313c698c778bef680d6139"
    assert sha256(got.clients) == "fb4df1c039faf01c38dcabb4fc1c82feae7edb6e61b66df36938b8d90f16dd6b"
    assert torch.allclose(got.x.mean(0), torch.zeros(43), atol=1e-4)
    # standardised numbers may differ in their last bit from machine to machine
    assert got.x[[0, 1000, 5417], [0, 20, 42]].tolist() == pytest.approx([-0.746406, -0.962417, -3.559701], abs=1e-5)


def test_real_pneumoniamnist():
    real("pneumoniamnist")
    got = images.pneumoniamnist()
    y = got.y.numpy()
    assert np.bincount(y[~got.test]).tolist() == [1214 + 135, 3494 + 389]
    assert np.bincount(y[got.test]).tolist() == [234, 390] and got.x.shape == (5856, 1, 28, 28)
    assert sha256(got.x.numpy()) == "0c60a76a46b82c37314f4249c837496a6b8315421ea270cd24bd8896176e298e"
    assert sha256(y) == "277ee9b5d2e894fd020920b6db07f1947f04b9484695b36af3eed9e02edca569"


def test_real_shakespeare_by_role():
    real("shakespeare")
    if files.look("shakespeare").kind != "roles":
        pytest.skip("the counts are those of roles.json, not of LEAF's files")
    got = text.shakespeare(stride=10)
    both = [np.unique(got.clients[m]) for m in (got.test, ~got.test)]
    assert len(both[0]) == len(both[1]) == 1129  # every role with two or more speeches trains and is tested
    assert 0.18 < got.test.mean() < 0.22
    whole = text.shakespeare()
    assert len(whole.y) == 4_263_489 and torch.equal(whole.x[0], got.x[0])
    assert sha256(whole.x.numpy()) == "f231f09dcdd37531e015e3dd839469dc796549811f02d0869e4c0aec1e517f97"
    assert sha256(whole.y.numpy()) == "2d191af9f9bb15af1a4047b725a527d59b286adc7a8307b10fc147dbdb9cd94e"
    assert np.bincount(whole.y)[:4].tolist() == [102381, 696251, 9006, 0]


def test_real_cifar_mnist():
    real("cifar10")
    real("mnist")
    got, again = mixed.cifar_mnist(), mixed.cifar_mnist()
    assert got.x.shape == (12000, 3, 32, 32) and got.classes == 20
    assert np.bincount(got.y[~torch.tensor(got.test)]).tolist() == [400] * 20
    assert np.bincount(got.y[torch.tensor(got.test)]).tolist() == [200] * 20
    assert np.array_equal(got.sources, (got.y >= 10).numpy()) and torch.equal(got.x, again.x)
