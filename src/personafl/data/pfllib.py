"""PFLlib's folders: `train/<i>.npz`, `test/<i>.npz` and `config.json`, read without trusting them, and written.

Its files hold a pickled dict of arrays, which `unpickle.py` reads without running code.

J. Zhang et al., "PFLlib: A Beginner-Friendly and Comprehensive Personalized Federated Learning Library", JMLR 2025.
"""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from personafl.core.errors import UserError
from personafl.core.normalization import as_inputs
from personafl.core.tasks import MOST_CLASSES
from personafl.core.types import TaskName
from personafl.data.client_data import ClientData, concatenate
from personafl.data.dataset import Array, Source
from personafl.data.federated import Federation, Split
from personafl.data.missing import Missing
from personafl.data.unpickle import numbers, unpickle, unwrap
from personafl.storage.npz import check_member, read_member, told


def is_pfllib(path: str | Path) -> bool:
    """Whether a folder has PFLlib's layout."""
    return all((Path(path) / part).is_dir() for part in ("train", "test"))


def pfllib(path: str | Path, *, missing: Missing = "refuse", task: TaskName | Literal["auto"] = "auto") -> Source:
    """A data set in PFLlib's layout: its clients, and which rows are their test parts."""
    home = Path(path)
    files = {part: {p.stem: p for p in (home / part).glob("*.npz")} for part in ("train", "test")}
    if not files["train"]:
        raise UserError(f"{home}: no train/*.npz in it")
    for part, other in (("train", "test"), ("test", "train")):
        alone = sorted(files[part].keys() - files[other].keys())
        if alone:
            raise UserError(f"{home}: client {alone[0]} has {part}/{alone[0]}.npz but no {other}/{alone[0]}.npz")
    order = sorted(files["train"], key=lambda s: (not s.isdecimal(), int(s) if s.isdecimal() else 0, s))
    parts = (
        ClientData(c, *read_client_npz(files[part][c]), part == "test") for c in order for part in ("train", "test")
    )
    return concatenate(home.resolve().name, parts, classes=_classes(home / "config.json"), missing=missing, task=task)


def _classes(path: Path) -> int:
    """How many classes the configuration says there are; 0: it does not."""
    try:
        found = json.loads(path.read_text()).get("num_classes", 0) if path.is_file() else 0
    except (OSError, ValueError, AttributeError, RecursionError):
        raise UserError(f"{path}: not a readable configuration") from None
    return found if type(found) is int and 0 < found <= MOST_CLASSES else 0


def read_client_npz(path: Path) -> tuple[Array, Array]:
    """x and y of a client's .npz file: two plain arrays, or PFLlib's `data`."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = {n.removesuffix(".npy") for n in archive.namelist()}
            if {"x", "y"} <= names:
                x, y = (read_member(archive, f"{n}.npy") for n in ("x", "y"))
            elif "data" in names:
                x, y = _dict(archive)
            else:
                raise UserError(f"it must hold arrays x and y, or PFLlib's data; it has {', '.join(sorted(names))}")
    except UserError as e:
        raise UserError(f"{path}: {e}") from None
    except Exception as e:  # a damaged file may raise anything
        raise UserError(f"{path}: not a readable .npz file: {told(e)}") from None
    return x, y


def _dict(archive: zipfile.ZipFile) -> tuple[Array, Array]:
    check_member(archive, "data.npy")
    with archive.open("data.npy") as file:
        version = np.lib.format.read_magic(file)
        header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = header(file)
        if shape != () or not dtype.hasobject:
            raise UserError(f"data must be a dict of x and y, it is an array of shape {shape}")
        held = unwrap(unpickle(file))
    inside = held.item() if isinstance(held, np.ndarray) and held.shape == () else None
    if not isinstance(inside, dict) or not {"x", "y"} <= inside.keys():
        raise UserError("data must be a dict of x and y")
    x, y = (numbers(inside[n], n) for n in ("x", "y"))
    return x, y


# Out again


def to_pfllib(
    federation: Federation, path: str | Path, *, partition: str = "", alpha: float = 0.1, batch_size: int = 10
) -> None:
    """Write a federation so that PFLlib can read it: an absent or empty folder gets train/, test/ and config.json.

    Bytes are written as float32 in [0, 1], nothing is normalised. PFLlib has no validation part, so those rows are
    written with the training rows. Clients held out come last, as PFLlib counts its new clients.
    """
    home = Path(path)
    if (task := federation.source.task) != "classification":
        raise UserError(f"{home}: PFLlib's files have a class for each example, which {task} has not")
    if home.exists() and (not home.is_dir() or any(home.iterdir())):
        raise UserError(f"{home}: not an empty folder")
    statistic = []
    for part in ("train", "test"):
        (home / part).mkdir(parents=True)
    for c in range(federation.everybody):
        counts = np.zeros(federation.source.classes, np.int64)
        splits: tuple[tuple[str, tuple[Split, ...]], ...] = (("train", ("train", "validation")), ("test", ("test",)))
        for part, held in splits:
            rows = torch.cat([federation.rows(s, c) for s in held])
            x = as_inputs(federation.source.x[rows], torch.float32).cpu().numpy()
            y = federation.source.y[rows].cpu().numpy()
            counts += np.bincount(y, minlength=len(counts))
            np.savez_compressed(home / part / f"{c}.npz", data={"x": x, "y": y})  # type: ignore[arg-type]
        statistic.append([[int(k), int(counts[k])] for k in np.flatnonzero(counts)])
    config = {
        "num_clients": federation.everybody,
        "num_classes": federation.source.classes,
        "non_iid": partition != "iid",
        "balance": partition == "iid",
        "partition": {"dirichlet": "dir", "pathological": "pat"}.get(partition, partition or None),
        "Size of samples for labels in clients": statistic,
        "alpha": alpha,
        "batch_size": batch_size,
    }
    (home / "config.json").write_text(json.dumps(config))
