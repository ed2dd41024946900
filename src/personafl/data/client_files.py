"""Which files of a folder are which client's."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from personafl.core.errors import UserError

PICTURES = (".png", ".jpg", ".jpeg", ".bmp", ".webp")


@dataclass(frozen=True)
class ClientFiles:
    """What a client holds: files of examples, or a folder of pictures for each class."""

    name: str
    path: Path
    files: tuple[Path, ...] = ()
    classes: tuple[Path, ...] = ()


def find_clients(home: Path, suffixes: Collection[str]) -> list[ClientFiles]:
    """A client for each file with such a suffix and for each folder, in natural order.

    Hidden files and those of other kinds are left alone; what looks like data but cannot be read is named.
    """
    found = []
    for path in listed(home, suffixes):
        if path.is_dir():
            found.append(client_folder(path, suffixes))
        elif path.suffix.lower() in suffixes:
            found.append(ClientFiles(path.stem, path, (path,)))
        elif path.suffix.lower() in PICTURES:
            raise UserError(_misplaced(path))
    if not found:
        raise UserError(
            f"{home}: no client's file in it; possible are {', '.join(suffixes)}, a folder of such files for each "
            "client, pictures as CLIENT/CLASS/PICTURE, or train/ and test/"
        )
    seen: dict[str, ClientFiles] = {}
    for client in found:
        if (other := seen.setdefault(client.name, client)) is not client:
            raise UserError(f"{home}: {other.path.name} and {client.path.name} name the same client")
        if bool(client.classes) != bool(found[0].classes):
            pictures, files = (client, found[0]) if client.classes else (found[0], client)
            raise UserError(f"{home}: {pictures.path.name} holds pictures, {files.path.name} does not")
    return found


def listed(home: Path, suffixes: Collection[str] = ()) -> list[Path]:
    """What lies in a folder in natural order, hidden things aside; what cannot be read is named."""
    try:
        found = sorted((p for p in home.iterdir() if not p.name.startswith(".")), key=lambda p: natural_order(p.name))
    except OSError as e:
        raise UserError(f"{home}: cannot be read: {e.strerror}") from None
    around = {home.resolve(), *home.resolve().parents}
    for path in found:
        try:
            path.stat()
        except OSError as e:  # a link to nothing, or to itself
            raise UserError(f"{path}: cannot be read: {e.strerror}") from None
        if path.is_dir() and path.resolve() in around:
            raise UserError(f"{path}: a link to a folder that it lies in")
        if path.suffix.lower() in suffixes and not path.is_file():
            raise UserError(f"{path}: named like a {path.suffix} file, but it is {_kind(path)}")
    return found


def _kind(path: Path) -> str:
    return "a folder" if path.is_dir() else "neither a file nor a folder"


def natural_order(name: str) -> list[tuple[bool, int, str]]:
    """A key by which client-2 comes before client-10."""
    return [(not w.isdecimal(), int(w) if w.isdecimal() else 0, w) for w in re.split(r"(\d+)", name) if w]


def client_folder(home: Path, suffixes: Collection[str]) -> ClientFiles:
    """A client's folder: its files, or its folders of pictures."""
    there = listed(home, suffixes)
    files = tuple(p for p in there if not p.is_dir() and p.suffix.lower() in suffixes)
    folders = tuple(p for p in there if p.is_dir())
    if picture := next((p for p in there if p.suffix.lower() in PICTURES and not p.is_dir()), None):
        raise UserError(_misplaced(picture))
    if files and folders:
        raise UserError(f"{folders[0]}: a folder beside the files of client {home.name}; put its files beside them")
    if not files and not folders:
        raise UserError(f"{home}: nothing that can be read in it; possible are {', '.join(suffixes)}")
    return ClientFiles(home.name, home, files, folders)


def _misplaced(picture: Path) -> str:
    return f"{picture}: a picture must lie in a folder named for its class, in one of its client: CLIENT/CLASS/PICTURE"
