"""Where real data lie, whether they are what they should be, and their fast form.

Data are looked for in `$PERSONAFL_DATA`, then in the user's cache. What is not found is downloaded where it can
be, unless `$PERSONAFL_OFFLINE` is set.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from personafl.core.errors import UserError
from personafl.data.catalogue import CATALOGUE, Entry, Known, Layout

Array = NDArray[Any]
_FORM = 1  # of the prepared files; another number makes all of them anew


class DataError(UserError):
    """A file is there and is not what it should be."""


class MissingDataError(UserError):
    """A data set is not there and could not be had."""


@dataclass(frozen=True)
class Loaded:
    """A real data set, with what a partition or split may need to know of each example."""

    name: str
    x: Tensor  # [N, ...]: images and characters as bytes, signals as float32
    y: Tensor  # [N] int64
    classes: int
    clients: NDArray[np.int64] | None = None  # [N] natural client: writer, subject, user, role
    test: NDArray[np.bool_] | None = None  # [N] in the official test set
    groups: NDArray[np.int64] | None = None  # [N] examples of one group share raw data: never split them
    sources: NDArray[np.int64] | None = None  # [N] which of several data sets it came from

    def __post_init__(self) -> None:
        for what in ("y", "clients", "test", "groups", "sources"):
            value = getattr(self, what)
            if value is not None and len(value) != len(self.x):
                raise DataError(f"{self.name}: {len(self.x)} examples but {len(value)} entries in {what}")


def loaded(name: str, arrays: dict[str, Array], classes: int) -> Loaded:
    """A data set of the arrays x and y, and of clients, test, groups and sources those there are."""
    ids = {n: arrays[n].astype(np.int64) for n in ("clients", "groups", "sources") if n in arrays}
    test = arrays["test"].astype(np.bool_) if "test" in arrays else None
    x, y = torch.from_numpy(arrays["x"]), torch.from_numpy(arrays["y"].astype(np.int64))
    return Loaded(name, x, y, classes, test=test, **ids)


def split_of(train: int, test: int) -> NDArray[np.bool_]:
    """The mask of an official test set that lies behind the training set."""
    return np.repeat([False, True], [train, test])


def user_cache() -> Path:
    """`$XDG_CACHE_HOME/personafl`, or ~/.cache/personafl."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "personafl"


def places() -> list[Path]:
    """The folders data are looked for in, the first of them being the one downloads go to."""
    own = os.environ.get("PERSONAFL_DATA")
    return [*([Path(own).expanduser()] if own else []), user_cache()]


@dataclass(frozen=True)
class Found:
    """A data set on disk."""

    name: str
    kind: str  # of layout
    root: Path  # one of `places()`
    layout: Layout

    @property
    def folder(self) -> Path:
        return self.root / self.layout.folder

    def path(self, name: str) -> Path:
        """The file of that name, or the same with .gz."""
        return _either(self.folder, name) or self.folder / name

    def check(self) -> None:
        """Compare every file with what is known of it."""
        for name, known in self.layout.files.items():
            path = self.folder / name
            if path.is_file():
                verify(path, known, {n: k for n, k in self.layout.files.items() if n != name})


def _either(folder: Path, name: str) -> Path | None:
    return next((p for p in (folder / name, folder / f"{name}.gz") if p.exists()), None)


def _absent(root: Path, layout: Layout) -> list[str]:
    needed = [n for n in layout.files if not n.endswith(".gz")]
    return [n for n in needed if _either(root / layout.folder, n) is None]


def look(name: str) -> Found | None:
    """The first whole copy of a data set, in the order of the places and of its layouts."""
    for root in places():
        for kind, layout in CATALOGUE[name].layouts.items():
            if not _absent(root, layout):
                return Found(name, kind, root, layout)
    return None


def obtain(name: str) -> Found:
    """A data set on disk, downloaded if need be; where that fails, one message says what to put where."""
    found, why = look(name), ""
    if found is None:
        why = _fetch(name)
        found = look(name)
    if found is None:
        raise MissingDataError(missing(name, why))
    return found


def _fetch(name: str) -> str:
    """Download and unpack a data set; why not, where that did not work."""
    from personafl.data.download import UnreachableError, bar, download, unpack  # they check with this module

    remotes = CATALOGUE[name].remotes
    if not remotes:
        return "there is no file to download"
    if os.environ.get("PERSONAFL_OFFLINE"):
        return "downloads are turned off by PERSONAFL_OFFLINE"
    root = places()[0]
    try:
        with bar() as progress:
            for remote in remotes:
                folder = root / remote.folder
                got = download(remote, folder, progress)
                if got.name.endswith((".tar.gz", ".zip")):
                    unpack(got, folder)
                    got.unlink()
    except UnreachableError as e:
        return f"the download failed: {e}"
    except OSError as e:
        return f"nothing could be written to {root}: {e}"
    return "the download did not contain it"


def missing(name: str, why: str) -> str:
    """What to put where for a data set that is not there."""
    entry = CATALOGUE[name]
    lines = [f"{name}: {entry.title} is not there, and {why}." if why else f"{name}: {entry.title} is not there."]
    lines += _halves(entry)
    lines.append("Put one of these into a folder and name that folder in PERSONAFL_DATA, or put it into the cache:")
    for kind, layout in entry.layouts.items():
        names = [n for n in layout.files if not n.endswith(".gz")]
        gz = " (plain or .gz)" if any(n.endswith(".gz") for n in layout.files) else ""
        where = f"{layout.folder}/ with " if layout.folder else ""
        lines.append(f"  {kind}: {where}{', '.join(names)}{gz}")
    for remote in entry.remotes:
        lines.append(f"  get {remote.url}" + (f" -> {remote.folder}/" if remote.folder else ""))
    if entry.by_hand:
        lines.append(f"  {entry.by_hand}")
    own = os.environ.get("PERSONAFL_DATA")
    lines.append(f"Looked in: PERSONAFL_DATA = {own or 'not set'}; cache = {user_cache()}")
    return "\n".join(lines)


def _halves(entry: Entry) -> list[str]:
    """What there is of a data set that is not whole."""
    out = []
    for root in places():
        for layout in entry.layouts.values():
            absent = _absent(root, layout)
            needed = [n for n in layout.files if not n.endswith(".gz")]
            if len(absent) < len(needed):
                out.append(f"{root / layout.folder} lacks {', '.join(absent)}.")
        for remote in entry.remotes:
            part = root / remote.folder / f"{remote.name}.part"
            if part.exists():
                out.append(f"{part} is half-downloaded ({part.stat().st_size:,} bytes).")
    return out


def digest(path: Path, kind: str) -> str:
    """The md5 or sha256 of a file, in hexadecimal."""
    with path.open("rb") as f:
        return hashlib.file_digest(f, lambda: hashlib.new(kind, usedforsecurity=False)).hexdigest()


def verify(path: Path, known: Known, others: Mapping[str, Known] | None = None) -> None:
    """Hold a file against its size and checksum; it may also be one of the `others` under a wrong name."""
    size = path.stat().st_size
    sums: dict[int, str] = {}

    def fits(what: Known) -> bool:
        if what.size not in (None, size):
            return False
        for d in what.digests:
            sums.setdefault(len(d), digest(path, "md5" if len(d) == 32 else "sha256"))
        return not what.digests or any(sums[len(d)] == d for d in what.digests)

    if fits(known):
        return
    for name, other in (others or {}).items():
        if (other.size is not None or other.digests) and fits(other):
            raise DataError(f"{path} is swapped: it holds what belongs into {name}; give the files their own names")
    if known.size is not None and size < known.size:
        raise DataError(f"{path} is truncated: {size:,} of {known.size:,} bytes; delete it and get it again")
    if known.size is not None and size > known.size:
        raise DataError(f"{path} is not the official file: {size:,} bytes in place of {known.size:,}; get it again")
    raise DataError(
        f"{path} is corrupted: its checksum is {sums[len(known.digests[0])]}, the official one is "
        f"{known.digests[0]}; delete it and get it again"
    )


def prepared(
    name: str, root: Path, inputs: Sequence[Path], build: Callable[[], dict[str, Array]], **settings: object
) -> dict[str, Array]:
    """The arrays `build` makes, kept as plain bytes beside the data (or in the cache) until an input changes.

    A folder among the inputs changes when something is added to it or taken away. The kept file is checked by
    the checksums inside it, and made anew if it is damaged.
    """
    marks = [(p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in inputs]
    stamp = hashlib.sha256(json.dumps([_FORM, marks, settings], sort_keys=True).encode()).hexdigest()
    homes = [root / ".prepared", user_cache() / "prepared"]
    for home in homes:
        kept = _kept(home / f"{name}.npz", stamp)
        if kept is not None:
            return kept
    made = build()
    for home in homes:
        try:
            _keep(home / f"{name}.npz", stamp, made)
            break
        except OSError:
            continue  # not writable, or full: the next place, or none
    return made


def _kept(path: Path, stamp: str) -> dict[str, Array] | None:
    if not path.exists():
        return None
    try:
        with path.open("rb") as f, np.load(f, allow_pickle=False) as held:
            if str(held["stamp"]) == stamp:
                return {n: held[n] for n in held.files if n != "stamp"}
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None
    return None


def _keep(path: Path, stamp: str, arrays: dict[str, Array]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        with draft.open("wb") as f:
            np.savez(f, stamp=np.array(stamp), **arrays)  # type: ignore[arg-type]
        draft.replace(path)
    finally:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
