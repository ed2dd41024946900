"""Who holds which rows, as a file that can be used again: `data.partition = "F.json"`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from personafl.core.errors import UserError
from personafl.data.dataset import Source
from personafl.data.federated import Federation, LazySplit, Split
from personafl.data.ragged import Indices, Ragged, SharedRows

FORMAT = 1
SPLITS: tuple[Split, ...] = ("train", "validation", "test")


def labels_digest(source: Source) -> str:
    """What a data set is known by: the sha256 of its labels as 64-bit integers, or of other targets as they are."""
    y = source.y.cpu().numpy()
    return hashlib.sha256((y if source.task in ("regression", "multilabel") else y.astype("<i8")).tobytes()).hexdigest()


def save(federation: Federation, path: str | Path, data: Mapping[str, Any] | None = None) -> str:
    """Write who holds which rows, and return the hash that has; `data` are the settings it was made by, to be read.

    The hash is the federation's own, but for those so large that their splits were not drawn before.
    """
    source, official = federation.source, federation.official
    whole = federation.materialize()
    digest = whole.digest()
    held = {
        "format": FORMAT,
        "dataset": source.name,
        "examples": len(source.y),
        "labels": labels_digest(source),
        "data": dict(data or {}),
        "hash": digest,
        "notes": federation.notes,
        "unseen": federation.unseen,
        "official": None if official is None else official.tolist(),
        "clients": {s: [rows.tolist() for rows in whole.drawn(s)] for s in SPLITS},
    }
    Path(path).write_text(json.dumps(held))
    return digest


def load(path: str | Path, source: Source) -> Federation:
    """The federation a file describes, of this data set; everything the file says is checked first."""
    file = Path(path)
    held = _read(file)
    if held["labels"] != labels_digest(source) or held["examples"] != len(source.y):
        raise UserError(
            f"{file}: divides {str(held['dataset'])[:60]} ({held['examples']} examples), not {source.name} "
            f"({len(source.y)} examples): its labels are others"
        )
    parts = {s: _parts(file, s, held["clients"][s], len(source.y)) for s in SPLITS}
    official = _parts(file, "official", [held["official"]], len(source.y))[0] if held["official"] else None
    count = len(parts["train"])
    if not all(len(p) == count for p in parts.values()):
        raise UserError(f"{file}: {', '.join(f'{len(p)} clients in {s}' for s, p in parts.items())}: must be as many")
    if not 0 <= held["unseen"] < count:
        raise UserError(f"{file}: {held['unseen']} of {count} clients held out: at least one must take part")
    _once(file, parts, official, len(source.y))
    for needed in ("train", "test"):
        bare = [c for c, r in enumerate(parts[needed]) if not len(r)]
        if bare and (needed == "train" or len(bare) < count):
            raise UserError(f"{file}: client {bare[0]} has no {needed} samples")
    splits: dict[Split, Ragged | LazySplit | SharedRows] = {s: Ragged.of(p) for s, p in parts.items()}
    rest = None if official is None else torch.from_numpy(official)
    if rest is not None and not any(map(len, parts["test"])):  # no client has test rows, so all are tested on these
        splits["test"] = SharedRows(rest, count)
    made = Federation(source, splits, count - held["unseen"], held["notes"], held["unseen"], rest)
    if made.digest() != held["hash"]:
        raise UserError(f"{file}: its hash is {str(held['hash'])[:60]} but its rows give {made.digest()}: damaged")
    return made


_KEYS: dict[str, tuple[type, ...]] = {
    "format": (int,),
    "dataset": (str,),
    "examples": (int,),
    "labels": (str,),
    "hash": (str,),
    "notes": (dict,),
    "unseen": (int,),
    "official": (list, type(None)),
    "clients": (dict,),
}


def _read(file: Path) -> dict[str, Any]:
    """The file with every entry of its kind."""
    try:
        held = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{file}: no such file; personafl partition RECIPE --save {file} makes one") from None
    except OSError as e:
        raise UserError(f"{file}: cannot be read: {e.strerror}") from None
    except (ValueError, RecursionError) as e:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        raise UserError(f"{file}: not a partition file: {e}") from None
    if not isinstance(held, dict) or held.get("format") != FORMAT:
        found = held.get("format") if isinstance(held, dict) else None
        raise UserError(f"{file}: not a partition file of format {FORMAT} (format: {str(found)[:20]})")
    for key, kinds in _KEYS.items():
        if key not in held or type(held[key]) not in kinds:
            raise UserError(f"{file}: not a partition file: {key!r} is missing or of the wrong kind")
    for split in SPLITS:
        if not isinstance(held["clients"].get(split), list):
            raise UserError(f"{file}: not a partition file: it has no list of clients for {split}")
    if not all(type(n) is int for n in held["notes"].values()):
        raise UserError(f"{file}: not a partition file: notes must be whole numbers")
    return held


def _parts(file: Path, split: str, lists: list[Any], count: int) -> list[Indices]:
    """Rows per client, each of them a row there is."""
    out = []
    for client, given in enumerate(lists):
        if not isinstance(given, list) or not all(type(r) is int for r in given):
            raise UserError(f"{file}: {split} rows of client {client} must be a list of whole numbers")
        bad = next((r for r in given if not 0 <= r < count), None)
        if bad is not None:
            raise UserError(f"{file}: client {client} holds row {str(bad)[:20]} in {split}; rows are 0..{count - 1}")
        out.append(np.array(given, np.int64))
    return out


def _once(file: Path, parts: Mapping[Split, list[Indices]], official: Indices | None, count: int) -> None:
    """Refuse a row that two clients or two splits hold, and name both."""
    places = [(f"{split} of client {c}", r) for split, p in parts.items() for c, r in enumerate(p)]
    places += [] if official is None else [("the official test rows", official)]
    seen = np.zeros(count, np.int64)
    for _, held in places:
        np.add.at(seen, held, 1)
    if (seen > 1).any():
        row = int((seen > 1).argmax())
        twice = [where for where, held in places for _ in range(int((held == row).sum()))]
        raise UserError(f"{file}: row {row} is held twice: in {twice[0]} and in {twice[1]}")
