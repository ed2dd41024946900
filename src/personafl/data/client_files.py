"""Which files of a folder are which client's."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from personafl.core.errors import UserError


@dataclass(frozen=True)
class ClientFiles:
    """What a client holds."""

    name: str
    path: Path
    files: tuple[Path, ...]


def find_clients(home: Path, suffixes: Collection[str]) -> list[ClientFiles]:
    """A client for each file with such a suffix and for each folder, in natural order.

    Hidden files and those of other kinds are left alone; what looks like data but cannot be read is named.
    """
    found = []
    for path in listed(home, suffixes):
        if path.is_dir():
            found.append(_client_folder(path, suffixes))
        elif path.suffix.lower() in suffixes:
            found.append(ClientFiles(path.stem, path, (path,)))
    if not found:
        raise UserError(
            f"{home}: no client's file in it; possible are {', '.join(suffixes)}, a folder of such files for each "
            "client, or train/ and test/"
        )
    for client in found:
        same = [c.path.name for c in found if c.name == client.name]
        if len(same) > 1:
            raise UserError(f"{home}: {' and '.join(same)} name the same client")
    return found


def listed(home: Path, suffixes: Collection[str] = ()) -> list[Path]:
    """What lies in a folder in natural order, hidden things aside; what cannot be read is named."""
    try:
        found = sorted((p for p in home.iterdir() if not p.name.startswith(".")), key=lambda p: natural_order(p.name))
    except OSError as e:
        raise UserError(f"{home}: cannot be read: {e.strerror}") from None
    for path in found:
        try:
            path.stat()
        except OSError as e:  # a link to nothing, or to itself
            raise UserError(f"{path}: cannot be read: {e.strerror}") from None
        if path.is_dir() and path.resolve() in (home.resolve(), *home.resolve().parents):
            raise UserError(f"{path}: a link to a folder that it lies in")
        if path.suffix.lower() in suffixes and not path.is_file():
            raise UserError(f"{path}: named like a {path.suffix} file, but it is {_kind(path)}")
    return found


def _kind(path: Path) -> str:
    return "a folder" if path.is_dir() else "neither a file nor a folder"


def natural_order(name: str) -> list[tuple[bool, int, str]]:
    """A key by which client-2 comes before client-10."""
    return [(not w.isdecimal(), int(w) if w.isdecimal() else 0, w) for w in re.split(r"(\d+)", name) if w]


def _client_folder(home: Path, suffixes: Collection[str]) -> ClientFiles:
    """A client's folder and its files."""
    there = listed(home, suffixes)
    files = tuple(p for p in there if not p.is_dir() and p.suffix.lower() in suffixes)
    folder = next((p for p in there if p.is_dir()), None)
    if folder:
        raise UserError(f"{folder}: a folder beside the files of client {home.name}; put its files beside them")
    if not files:
        raise UserError(f"{home}: nothing that can be read in it; possible are {', '.join(suffixes)}")
    return ClientFiles(home.name, home, files)
