"""Whether a file is what it should be, by its size and checksum."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from personafl.core.errors import UserError
from personafl.data.catalogue import FileSpec


class DataError(UserError):
    """A file is there and is not what it should be."""


def file_digest(path: Path, kind: str) -> str:
    """The md5 or sha256 of a file, in hexadecimal."""
    with path.open("rb") as f:
        return hashlib.file_digest(f, lambda: hashlib.new(kind, usedforsecurity=False)).hexdigest()


def verify(path: Path, spec: FileSpec, others: Mapping[str, FileSpec] | None = None) -> None:
    """Hold a file against its size and checksum; it may also be one of the `others` under a wrong name."""
    size = path.stat().st_size
    sums: dict[int, str] = {}

    def fits(what: FileSpec) -> bool:
        if what.size not in (None, size):
            return False
        for d in what.digests:
            sums.setdefault(len(d), file_digest(path, "md5" if len(d) == 32 else "sha256"))
        return not what.digests or any(sums[len(d)] == d for d in what.digests)

    if fits(spec):
        return
    for name, other in (others or {}).items():
        if (other.size is not None or other.digests) and fits(other):
            raise DataError(f"{path} is swapped: it holds what belongs into {name}; give the files their own names")
    if spec.size is not None and size < spec.size:
        raise DataError(f"{path} is truncated: {size:,} of {spec.size:,} bytes; delete it and get it again")
    if spec.size is not None and size > spec.size:
        raise DataError(f"{path} is not the official file: {size:,} bytes in place of {spec.size:,}; get it again")
    raise DataError(
        f"{path} is corrupted: its checksum is {sums[len(spec.digests[0])]}, the official one is "
        f"{spec.digests[0]}; delete it and get it again"
    )
