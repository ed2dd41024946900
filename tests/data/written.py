"""Files as data sets come in, written by tests, and what several tests of data share."""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from personafl import config
from personafl.data.locate import find


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


DIGITS = {"train": (np.arange(3 * 28 * 28).reshape(3, 28, 28) % 251, np.array([3, 1, 4]))}


DIGITS["t10k"] = (255 - DIGITS["train"][0][:2], np.array([1, 5]))


PIXELS = np.random.default_rng(0).integers(0, 256, (12, 3072), dtype=np.uint8)


class Harm:
    def __reduce__(self):
        return os.mkdir, ("harm",)


def leaf(folder, train, test):
    for split, data in (("train", train), ("test", test)):
        held = {"users": list(data), "num_samples": [len(d["y"]) for d in data.values()], "user_data": data}
        put(folder / split / f"all_data_{split}.json", json.dumps(held))


def write_medmnist(path, classes, train, test, shape=(28, 28)):
    held = {}
    for split, count in (("train", train), ("val", 1), ("test", test)):
        y = np.repeat(np.arange(classes), count)
        held[f"{split}_images"] = np.broadcast_to(y.reshape(-1, *[1] * len(shape)), (len(y), *shape)).astype(np.uint8)
        held[f"{split}_labels"] = y[:, None].astype(np.uint8)
    np.savez(path, **held)


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


def real(name):
    """Skip where a real set is not at hand."""
    if not os.environ.get("PERSONAFL_DATA"):
        pytest.skip("PERSONAFL_DATA does not name a folder with real data")
    if find(name) is None:
        pytest.skip(f"{name} is not in {os.environ['PERSONAFL_DATA']}")


def sha256(array):
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


class Bomb:
    """Unpickling it would write a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, (f"touch {self.path}",)


def recipe_of(dataset: str, **data: Any) -> config.Recipe:
    held = {"dataset": dataset, "partition": "natural", **data}
    return config.load({"data": held, "training": {"num_rounds": 1}, "algorithms": [{"name": "local"}]})
