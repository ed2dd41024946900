"""Movement of people who carry a phone: UCI HAR and WISDM, with people as clients."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from personafl.data.checksums import DataError
from personafl.data.dataset import Array, Source, from_arrays, official_test_mask
from personafl.data.formats import read_npz
from personafl.data.locate import DatasetFiles, obtain
from personafl.data.prepared_cache import prepared_arrays

_CHANNELS = [f"{kind}_{axis}" for kind in ("body_acc", "body_gyro", "total_acc") for axis in "xyz"]
_WISDM = ("Walking", "Jogging", "Upstairs", "Downstairs", "Sitting", "Standing")


def read_table(path: Path, columns: int | None = None) -> Array:
    """Numbers separated by blanks, so many to a line: `[rows, columns]` float64."""
    if not path.exists():
        raise DataError(f"{path} is missing from an otherwise present data set; unpack the archive again")
    if not path.stat().st_size:
        raise DataError(f"{path} is truncated: it is empty; unpack the archive again")
    try:
        table = np.loadtxt(path, ndmin=2)
    except ValueError as e:
        raise DataError(f"{path} is truncated or corrupted: {e}") from None
    if columns is not None and table.shape[1:] != (columns,):
        raise DataError(f"{path} is corrupted or swapped: {table.shape[-1]} numbers to a line in place of {columns}")
    return table


def segments(windows: Array, subject: Array) -> Array:
    """The recording each window is cut from, `[N]`: it goes on while the first half of a window is the second
    half of the one before, on all channels, and the person is the same."""
    half = windows.shape[-1] // 2
    follows = (windows[1:, :, :half] == windows[:-1, :, half:]).all((1, 2)) & (subject[1:] == subject[:-1])
    return np.concatenate([[0], np.cumsum(~follows)])


def _har_part(found: DatasetFiles, split: str, features: bool) -> dict[str, Array]:
    home = found.folder / split
    y = read_table(home / f"y_{split}.txt", 1)[:, 0]
    subject = read_table(home / f"subject_{split}.txt", 1)[:, 0].astype(np.int64)
    if len(y) and not 1 <= y.min() <= y.max() <= 6:
        raise DataError(f"{home / f'y_{split}.txt'} is corrupted: activities {y.min():g}..{y.max():g} are not in 1..6")
    out = {"y": y.astype(np.int64) - 1, "clients": subject}
    if found.kind == "signals":
        raw = [read_table(home / "Inertial Signals" / f"{c}_{split}.txt", 128) for c in _CHANNELS]
        lengths = {c: len(r) for c, r in zip(_CHANNELS, raw, strict=True) if len(r) != len(y)}
        if lengths:
            name, length = next(iter(lengths.items()))
            raise DataError(
                f"{home / 'Inertial Signals' / f'{name}_{split}.txt'} is truncated: {length} of {len(y)} windows"
            )
        out["x"] = np.stack(raw, 1).astype(np.float32)
        out["groups"] = segments(out["x"], subject)
    else:  # without the signals: a run of one person's one activity holds whole recordings
        out["groups"] = np.concatenate([[0], np.cumsum((np.diff(subject) != 0) | (np.diff(y) != 0))])
    if features:
        out["x"] = read_table(home / f"X_{split}.txt", 561).astype(np.float32)
    if not len(out["x"]) == len(y) == len(subject):
        raise DataError(f"{home} is corrupted: {len(out['x'])} windows, {len(y)} labels, {len(subject)} subjects")
    return out


def har(*, features: bool = False) -> Source:
    """UCI HAR: six activities of 30 people, 9 signals of 128 steps, or the 561 features computed from them.

    Neighbouring windows overlap by half; `groups` are the recordings they were cut from. The official test
    set is nine of the people.
    """
    found = obtain("har")
    if found.kind == "features" or (features and not (found.folder / "train" / "X_train.txt").exists()):
        if not features:
            raise DataError(
                f"{found.folder} has the 561 features but no Inertial Signals; use har-features or add them"
            )
        if found.kind == "signals":
            raise DataError(f"{found.folder} has no train/X_train.txt: the 561 features are not in this copy")

    def build() -> dict[str, Array]:
        train, test = (_har_part(found, s, features) for s in ("train", "test"))
        test["groups"] = test["groups"] + train["groups"][-1] + 1
        both = {n: np.concatenate([train[n], test[n]]) for n in train}
        return both | {"test": official_test_mask(len(train["y"]), len(test["y"]))}

    inputs = sorted(p for s in ("train", "test") for p in (found.folder / s).rglob("*.txt"))
    name = "har-features" if features else "har"
    held = prepared_arrays(name, found.root, inputs, build, kind=found.kind)
    return from_arrays(name, held, 6, "har-dnn")


def har_features() -> Source:
    """UCI HAR as its 561 features, which DM-PFL's network for HAR may have been made for."""
    return har(features=True)


def read_arff(path: Path) -> tuple[Array, Array, Array]:
    """Features (NaN for `?`), class numbers and users of WISDM's transformed file: id, user, features, class."""
    width, rows, users, y = 0, [], [], []
    reading = False
    for number, raw in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
        line = raw.strip()
        if not line or line.startswith("%"):
            continue
        if not reading:
            width += line.lower().startswith("@attribute")
            reading = line.lower().startswith("@data")
            continue
        cells = [c.strip().strip("\"'") for c in line.split(",")]
        if len(cells) != width:
            raise DataError(f"{path} is truncated or corrupted: line {number} has {len(cells)} of {width} fields")
        if cells[-1] not in _WISDM:
            raise DataError(f"{path}, line {number}: activity {cells[-1]!r} is not one of {', '.join(_WISDM)}")
        try:
            rows.append([float("nan") if c == "?" else float(c) for c in cells[2:-1]])
            users.append(int(cells[1]))
        except ValueError as e:
            raise DataError(f"{path} is corrupted at line {number}: {e}") from None
        y.append(_WISDM.index(cells[-1]))
    if not rows:
        raise DataError(f"{path} is truncated: there is nothing after its head")
    return np.array(rows, np.float32), np.array(y), np.array(users)


def wisdm() -> Source:
    """WISDM v1.1, transformed: six activities of 36 people, 43 features of ten seconds each.

    The scales of the features differ widely, so each is brought to mean 0 and deviation 1 over the whole set.
    Values the file does not have become the mean of their feature.
    """
    found = obtain("wisdm")
    if found.kind == "arff":
        x, y, users = read_arff(found.path("WISDM_ar_v1.1_transformed.arff"))
    else:
        path = found.path("wisdm.npz")
        held = read_npz(path)
        lacking = [n for n in ("x", "y", "user") if n not in held]
        if lacking:
            raise DataError(f"{path} has no {', '.join(lacking)}: it has {', '.join(sorted(held))}")
        x, y, users = held["x"], held["y"], held["user"]
    wide = x.astype(np.float64)
    mean = np.nanmean(wide, 0)
    wide = np.where(np.isnan(wide), mean, wide)
    spread = wide.std(0)
    wide = (wide - mean) / np.where(spread > 0, spread, 1.0)
    return from_arrays("wisdm", {"x": wide.astype(np.float32), "y": y, "clients": users}, 6, "mlp")
