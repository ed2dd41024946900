"""Image sets, as bytes `[N, channels, height, width]`, from the files of their official distributions.

`check=False` also takes copies that were cut down or otherwise changed.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from personafl.core import rng
from personafl.core.errors import UserError
from personafl.data.checksums import DataError
from personafl.data.dataset import Array, Source, from_arrays, official_test_mask
from personafl.data.formats import (
    leaf_inputs,
    read_cifar_binary,
    read_cifar_python,
    read_idx,
    read_leaf,
    read_npz,
    read_pictures,
)
from personafl.data.locate import DatasetFiles, obtain
from personafl.data.prepared_cache import prepared_arrays
from personafl.storage.npz import read_npy


def _counts(found: DatasetFiles, y: Array, per_class: int, classes: int, what: str) -> None:
    """Where a checksum is not known: at least every class must occur as often as it should."""
    held = np.bincount(y, minlength=classes)
    wrong = np.flatnonzero(held != per_class)
    if len(wrong):
        raise DataError(
            f"{found.folder} is corrupted: {held[wrong[0]]} {what} examples of class {wrong[0]} in place of {per_class}"
        )


def _idx_set(found: DatasetFiles) -> dict[str, Array]:
    xs, ys = [], []
    for split in ("train", "t10k"):
        xs.append(read_idx(found.path(f"{split}-images-idx3-ubyte"), 3))
        ys.append(read_idx(found.path(f"{split}-labels-idx1-ubyte"), 1))
        if len(xs[-1]) != len(ys[-1]):
            raise DataError(
                f"{found.folder} is swapped: {split} has {len(xs[-1])} images but {len(ys[-1])} labels, "
                "so one of the files is of the other split"
            )
    test = official_test_mask(len(xs[0]), len(xs[1]))
    return {"x": np.concatenate(xs)[:, None], "y": np.concatenate(ys), "test": test}


def mnist(*, check: bool = True) -> Source:
    """70,000 digits; clients are the writers where QMNIST's label files (or the writers as .npy) lie beside them.

    No writer of the official test set is in the training set.
    """
    found = obtain("mnist")
    inputs = sorted(p for p in found.folder.iterdir() if "idx" in p.name or p.suffix == ".npy")

    def build() -> dict[str, Array]:
        if check:
            found.check()
        out = _idx_set(found)
        count = len(out["x"])
        tests = int(out["test"].sum())
        who = [_writers(found, "train", count - tests, out["y"]), _writers(found, "test", tests, out["y"][-tests:])]
        if who[0] is not None and who[1] is not None:
            out["clients"] = np.concatenate([who[0], who[1]])
        return out

    return from_arrays("mnist", prepared_arrays("mnist", found.root, inputs, build, check=check), 10, "mcmahan-cnn")


def _writers(found: DatasetFiles, split: str, count: int, y: Array) -> NDArray[np.int64] | None:
    """Who wrote each digit: row i of QMNIST's labels (class, NIST partition, writer, ...) describes image i."""
    ready = found.folder / f"qmnist-{split}-writers.npy"
    official = found.path(f"qmnist-{split}-labels-idx2-int")
    if official.exists():
        rows = read_idx(official, 2)[:count]  # QMNIST has 50,000 more test digits than MNIST
        if len(rows) == count and not np.array_equal(rows[:, 0], y[:count]):
            raise DataError(f"{official} is swapped: its classes are not those of the {split} images")
        ids, path = rows[:, 2], official
    elif ready.exists():
        try:
            ids, path = read_npy(ready), ready
        except UserError as e:
            raise DataError(f"{e}; delete it and get it again") from None
    else:
        return None
    if len(ids) != count:
        raise DataError(f"{path} names {len(ids)} writers for {count} {split} images")
    return np.asarray(ids, np.int64)


def fmnist(*, check: bool = True) -> Source:
    """Fashion-MNIST: 70,000 pieces of clothing in the files and shapes of MNIST."""
    found = obtain("fmnist")
    inputs = sorted(p for p in found.folder.iterdir() if "idx" in p.name)

    def build() -> dict[str, Array]:
        if check:
            found.check()
        return _idx_set(found)

    return from_arrays("fmnist", prepared_arrays("fmnist", found.root, inputs, build, check=check), 10, "mcmahan-cnn")


def _cifar(name: str, classes: int, check: bool, key: str, per_class: int) -> Source:
    found = obtain(name)
    names = list(found.layout.files)  # the test file is last

    def build() -> dict[str, Array]:
        if check:
            found.check()
        paths = [found.path(n) for n in names]
        if found.kind == "binary":
            parts = [read_cifar_binary(p, 1 if classes == 10 else 2, classes) for p in paths]
        else:
            parts = [read_cifar_python(p, key, classes) for p in paths]
        y = np.concatenate([p[1] for p in parts])
        test = official_test_mask(len(y) - len(parts[-1][1]), len(parts[-1][1]))
        if check:
            _counts(found, y[~test], per_class, classes, "training")
            _counts(found, y[test], 10_000 // classes, classes, "test")
        return {"x": np.concatenate([p[0] for p in parts]), "y": y, "test": test}

    inputs = [found.path(n) for n in names]
    held = prepared_arrays(name, found.root, inputs, build, check=check, kind=found.kind)
    return from_arrays(name, held, classes, "cifar-cnn")


def cifar10(*, check: bool = True) -> Source:
    """60,000 colour images of ten things, from the binary or the Python batches."""
    return _cifar("cifar10", 10, check, "labels", 5000)


def cifar100(*, check: bool = True) -> Source:
    """60,000 colour images of a hundred things (the fine labels), from the binary or the Python files."""
    return _cifar("cifar100", 100, check, "fine_labels", 500)


def cifar10_c() -> Source:
    """The 10,000 test images of CIFAR-10, corrupted, each client's by a kind of its own at severity 5.

    CIFAR-10-C was made of these images; `client_corruption.py` corrupts them. A half of each class, the same in every
    call, is the training part and the other the test part (`data.official_test`): CO-PFL does not say which are which.
    """
    found = cifar10()
    assert found.test is not None
    rows = np.flatnonzero(found.test)
    x, y = (t[torch.from_numpy(rows)] for t in (found.x, found.y))
    return Source("cifar10-c", x, y, found.classes, "cifar-cnn", test=_halves(y.numpy(), found.classes))


def _halves(labels: NDArray[np.int64], classes: int) -> NDArray[np.bool_]:
    """True for half of the rows of each class."""
    out = np.zeros(len(labels), np.bool_)
    for k in range(classes):
        mine = np.flatnonzero(labels == k)
        out[rng.generator(0, "cifar10-c", k).permutation(mine)[len(mine) // 2 :]] = True
    return out


def _class_folders(folder: Path) -> Iterator[tuple[str, list[Path]]]:
    for home in sorted(p for p in folder.iterdir() if p.is_dir()):
        yield home.name, sorted(p for p in home.iterdir() if p.suffix.lower() in {".png", ".jpg", ".jpeg"})


_CINIC = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def cinic10(*, check: bool = True) -> Source:
    """CINIC-10: 270,000 images of CIFAR-10's classes; the validation third counts as training data.

    Sources: 0 an image of CIFAR-10, 1 a shrunken one of ImageNet.
    """
    found = obtain("cinic10")
    homes = [found.folder / s / c for s in ("train", "valid", "test") for c in _CINIC]
    for home in homes:
        if not home.is_dir():
            raise DataError(f"{found.folder} is not whole: there is no folder {home}; unpack the archive again")

    def build() -> dict[str, Array]:
        paths, y, test = [], [], []
        for i, home in enumerate(homes):
            mine = sorted(home.glob("*.png"))
            if check and len(mine) != 9000:
                raise DataError(f"{home} is not whole: {len(mine)} images in place of 9000; unpack the archive again")
            paths += mine
            y += [i % 10] * len(mine)
            test += [i >= 20] * len(mine)
        source = [0 if p.name.startswith("cifar10") else 1 for p in paths]
        return {"x": read_pictures(paths, 32), "y": np.array(y), "test": np.array(test), "sources": np.array(source)}

    return from_arrays("cinic10", prepared_arrays("cinic10", found.root, homes, build, check=check), 10, "cifar-cnn")


def mini_imagenet(size: int = 84, *, check: bool = True) -> Source:
    """mini-ImageNet: 100 classes of 600 images; the published split is by class, so no test set is marked."""
    found = obtain("mini-imagenet")

    def listed() -> list[tuple[str, list[Path]]]:
        if found.kind == "folder":
            return sorted(pair for s in ("train", "val", "test") for pair in _class_folders(found.folder / s))
        rows: dict[str, list[Path]] = {}
        for s in ("train", "val", "test"):
            with (found.folder / f"{s}.csv").open(newline="") as f:
                for row in csv.DictReader(f):
                    rows.setdefault(row["label"], []).append(found.folder / "images" / row["filename"])
        return sorted(rows.items())

    def build() -> dict[str, Array]:
        classes = listed()
        if check and (len(classes) != 100 or any(len(p) != 600 for _, p in classes)):
            bad = next((f"{len(p)} images of class {c}" for c, p in classes if len(p) != 600), "")
            raise DataError(
                f"{found.folder} is not whole: {bad or f'{len(classes)} classes'}; there should be 100 classes of 600"
            )
        y = np.repeat(np.arange(len(classes)), [len(p) for _, p in classes])
        return {"x": read_pictures([p for _, ps in classes for p in ps], size), "y": y}

    inputs = [found.path(n) for n in found.layout.files]
    if found.kind == "folder":
        inputs = sorted(p for home in inputs for p in home.iterdir() if p.is_dir())
    arrays = prepared_arrays("mini-imagenet", found.root, inputs, build, check=check, size=size)
    return from_arrays("mini-imagenet", arrays, int(arrays["y"].max()) + 1, "resnet18")


def _femnist_row(x: Any, y: Any) -> tuple[Array, Array]:
    grey = np.asarray(x, np.float32).reshape(len(x), 1, 28, 28)
    labels = np.asarray(y, np.int64)
    if len(labels) and not 0 <= labels.min() <= labels.max() < 62:
        raise UserError(f"labels {labels.min()}..{labels.max()} are not in 0..61")
    return np.rint(grey * 255).clip(0, 255).astype(np.uint8), labels


def femnist() -> Source:
    """LEAF's FEMNIST: digits, capital and small letters (62 classes) by writer, dark on white as LEAF has them."""
    found = obtain("femnist")
    arrays = prepared_arrays("femnist", found.root, leaf_inputs(found), lambda: read_leaf(found, _femnist_row))
    return from_arrays("femnist", arrays, 62, "leaf-cnn")


_MEDMNIST = {"pneumoniamnist": 2, "pathmnist": 9, "octmnist": 4, "tissuemnist": 8}


def medmnist(name: str) -> Source:
    """A MedMNIST file: its validation part counts as training data; grey images have one channel."""
    found = obtain(name)
    path = found.path(f"{name}.npz")
    held = read_npz(path)
    xs, ys = [], []
    for split in ("train", "val", "test"):
        x, y = held.get(f"{split}_images", held.get(f"x_{split}")), held.get(f"{split}_labels", held.get(f"y_{split}"))
        if x is None or y is None:
            raise DataError(f"{path} has no {split}_images and {split}_labels: it has {', '.join(sorted(held))}")
        if x.dtype != np.uint8 or len(x) != len(y) or x.ndim not in (3, 4):
            raise DataError(f"{path} is corrupted: {split} has images {x.dtype} {x.shape} and labels {y.shape}")
        xs.append(x[:, None] if x.ndim == 3 else np.ascontiguousarray(x.transpose(0, 3, 1, 2)))
        ys.append(y.reshape(-1).astype(np.int64))
    y = np.concatenate(ys)
    if y.min() < 0 or y.max() >= _MEDMNIST[name]:
        raise DataError(f"{path} is swapped or corrupted: label {y.max()} is not in 0..{_MEDMNIST[name] - 1}")
    test = official_test_mask(len(ys[0]) + len(ys[1]), len(ys[2]))
    return from_arrays(name, {"x": np.concatenate(xs), "y": y, "test": test}, _MEDMNIST[name], "small-cnn")


def pneumoniamnist() -> Source:
    """5,856 chest X-rays of children, healthy or with pneumonia."""
    return medmnist("pneumoniamnist")
