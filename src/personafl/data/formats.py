"""Readers of file formats: every file that is not what it should be is named, with what is wrong with it."""

from __future__ import annotations

import gzip
import io
import json
import pickle
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from personafl.core.errors import UserError
from personafl.data.checksums import DataError
from personafl.data.dataset import Array
from personafl.data.image_folder import check_pixels
from personafl.data.locate import DatasetFiles
from personafl.data.unpickle import numbers, unpickle, unwrap
from personafl.storage import npz

_IDX_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


def read_idx(path: Path, dims: int) -> Array:
    """An idx file, plain or gzipped, whose array must have so many dimensions."""
    raw = path.read_bytes()
    if raw[:2] == b"\x1f\x8b":
        try:
            raw = gzip.decompress(raw)
        except EOFError:
            raise DataError(f"{path} is truncated: its gzip stream ends early; delete it and get it again") from None
        except (OSError, zlib.error) as e:
            raise DataError(f"{path} is corrupted ({e}); delete it and get it again") from None
    if len(raw) < 4 or raw[:2] != b"\0\0" or raw[2] not in _IDX_TYPES:
        raise DataError(f"{path} is not an idx file: it begins with {raw[:4].hex() or 'nothing'}")
    if raw[3] != dims:
        raise DataError(f"{path} is swapped: it holds an array of {raw[3]} dimensions, not of {dims}")
    head = 4 + 4 * dims
    if len(raw) < head:
        raise DataError(f"{path} is truncated: its head has {len(raw)} of {head} bytes; delete it and get it again")
    shape = np.frombuffer(raw[4:head], ">u4").astype(np.int64)
    kind = np.dtype(_IDX_TYPES[raw[2]])
    due = head + int(shape.prod()) * kind.itemsize
    if len(raw) < due:
        raise DataError(f"{path} is truncated: {len(raw):,} of {due:,} bytes; delete it and get it again")
    if len(raw) > due:
        raise DataError(f"{path} is corrupted: {len(raw):,} bytes, its header says {due:,}")
    return np.frombuffer(raw, kind, offset=head).reshape(shape).astype(kind.newbyteorder("="))


def read_cifar_binary(path: Path, labels: int, classes: int) -> tuple[Array, Array]:
    """Images and labels of a binary batch; of several label bytes the last counts (the fine one)."""
    raw = np.fromfile(path, np.uint8)
    row = labels + 3072
    if len(raw) % row or not len(raw):
        raise DataError(
            f"{path} is truncated: {len(raw):,} bytes are not a whole number of {row}-byte examples; get it again"
        )
    rows = raw.reshape(-1, row)
    y = rows[:, labels - 1].copy()
    if y.max() >= classes:
        raise DataError(f"{path} is corrupted or not what its name says: label {y.max()} is not in 0..{classes - 1}")
    return rows[:, labels:].reshape(-1, 3, 32, 32), y


def read_pickle(path: Path) -> dict[str, Any]:
    """The dictionary of a CIFAR batch for Python, its keys as text."""
    try:
        with path.open("rb") as f:
            held = unpickle(f)
        if not isinstance(held, dict):
            raise pickle.UnpicklingError(f"it holds a {type(held).__name__}, not a dictionary")
        return {k.decode("latin1") if isinstance(k, bytes) else str(k): unwrap(v) for k, v in held.items()}
    except pickle.UnpicklingError as e:
        word = "truncated" if "truncated" in str(e) else "not a data batch"
        raise DataError(f"{path} is {word}: {e}") from None


def read_cifar_python(path: Path, key: str, classes: int) -> tuple[Array, Array]:
    """Images and labels of a batch for Python; `key` is labels or fine_labels."""
    held = read_pickle(path)
    if "data" not in held or key not in held:
        raise DataError(f"{path} is not a data batch with data and {key}: it has {', '.join(sorted(held))}")
    try:
        x, y = numbers(held["data"], "data"), numbers(held[key], key)
    except pickle.UnpicklingError as e:
        raise DataError(f"{path} is corrupted: {e}") from None
    if x.ndim != 2 or x.shape[1] != 3072 or x.dtype != np.uint8 or y.shape != (len(x),) or y.dtype.kind not in "iu":
        raise DataError(f"{path} is corrupted: data {x.dtype} {x.shape}, {key} {y.dtype} {y.shape}")
    if len(y) and (y.min() < 0 or y.max() >= classes):
        raise DataError(f"{path} is corrupted: labels {y.min()}..{y.max()} are not in 0..{classes - 1}")
    return x.reshape(-1, 3, 32, 32), y.astype(np.uint8)


def read_pictures(paths: list[Path], size: int) -> Array:
    """Picture files as bytes `[N, 3, size, size]`; those of another size are resized."""
    from PIL import Image

    out = np.empty((len(paths), 3, size, size), np.uint8)
    for i, path in enumerate(paths):
        try:
            with Image.open(io.BytesIO(path.read_bytes())) as picture:  # lengths within a file may say anything
                check_pixels(picture.size)
                rgb = picture.convert("RGB")
        except Exception as e:  # a damaged file may raise anything
            raise DataError(f"{path} is truncated or corrupted: {npz.told(e)}; get it again") from None
        if rgb.size != (size, size):
            rgb = rgb.resize((size, size), Image.Resampling.BILINEAR)
        out[i] = np.asarray(rgb).transpose(2, 0, 1)
    return out


def read_leaf(found: DatasetFiles, row: Callable[[Any, Any], tuple[Array, Array]]) -> dict[str, Array]:
    """All users of LEAF's train/*.json and test/*.json; `row` turns one user's x and y into arrays."""
    names: dict[str, int] = {}
    xs, ys, who, test = [], [], [], []
    for split in ("train", "test"):
        files = sorted((found.folder / split).glob("*.json"))
        if not files:
            raise DataError(f"{found.folder / split} holds no .json file; run LEAF's preprocess.sh again")
        for path in files:
            held = read_json(path)
            if not isinstance(held, dict) or "user_data" not in held:
                raise DataError(f"{path} is not a LEAF file: it has no user_data")
            for user, data in held["user_data"].items():
                try:
                    x, y = row(data["x"], data["y"])
                except (KeyError, TypeError, ValueError) as e:
                    raise DataError(f"{path} is corrupted at user {user}: {e}") from None
                if len(x) != len(y):
                    raise DataError(f"{path} is corrupted: user {user} has {len(x)} examples but {len(y)} labels")
                xs.append(x)
                ys.append(y)
                who += [names.setdefault(user, len(names))] * len(y)
                test += [split == "test"] * len(y)
    if not who:
        raise DataError(f"{found.folder} holds no examples; run LEAF's preprocess.sh again")
    x, y = np.concatenate([x for x in xs if len(x)]), np.concatenate(ys)
    return {"x": x, "y": y, "clients": np.array(who), "test": np.array(test)}


def leaf_inputs(found: DatasetFiles) -> list[Path]:
    return [p for s in ("train", "test") for p in sorted((found.folder / s).glob("*.json"))]


def read_npz(path: Path) -> dict[str, Array]:
    """All arrays of an npz file, without pickles."""
    try:
        return npz.read_npz(path)
    except UserError as e:
        why = str(e).removeprefix(f"{path}: ")
        raise DataError(f"{path} is truncated or corrupted: {why}; delete it and get it again") from None


def read_json(path: Path) -> Any:
    """What a JSON file holds."""
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError) as e:
        raise DataError(f"{path} is truncated or corrupted: {e}; get it again") from None
