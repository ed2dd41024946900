"""Where the files of real data sets lie.

They are looked for in `$PERSONAFL_DATA`, then in the user's cache. What is not found is downloaded where it can
be, unless `$PERSONAFL_OFFLINE` is set.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from personafl.core.errors import UserError
from personafl.data.catalogue import CATALOGUE, Entry, Layout
from personafl.data.checksums import verify
from personafl.data.download import UnreachableError, bar, download, unpack


class MissingDataError(UserError):
    """A data set is not there and could not be had."""


def user_cache() -> Path:
    """`$XDG_CACHE_HOME/personafl`, or ~/.cache/personafl."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "personafl"


def data_folders() -> list[Path]:
    """The folders data are looked for in, the first of them being the one downloads go to."""
    own = os.environ.get("PERSONAFL_DATA")
    return [*([Path(own).expanduser()] if own else []), user_cache()]


@dataclass(frozen=True)
class DatasetFiles:
    """A data set on disk."""

    name: str
    kind: str  # of layout
    root: Path  # one of `data_folders()`
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


def find(name: str) -> DatasetFiles | None:
    """The first whole copy of a data set, in the order of the places and of its layouts."""
    for root in data_folders():
        for kind, layout in CATALOGUE[name].layouts.items():
            if not _absent(root, layout):
                return DatasetFiles(name, kind, root, layout)
    return None


def obtain(name: str) -> DatasetFiles:
    """A data set on disk, downloaded if need be; where that fails, one message says what to put where."""
    found, why = find(name), ""
    if found is None:
        why = _fetch(name)
        found = find(name)
    if found is None:
        raise MissingDataError(missing_message(name, why))
    return found


def _fetch(name: str) -> str:
    """Download and unpack a data set; why not, where that did not work."""
    remotes = CATALOGUE[name].remotes
    if not remotes:
        return "there is no file to download"
    if os.environ.get("PERSONAFL_OFFLINE"):
        return "downloads are turned off by PERSONAFL_OFFLINE"
    root = data_folders()[0]
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


def missing_message(name: str, why: str) -> str:
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
    for root in data_folders():
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
