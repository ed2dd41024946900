"""The rows of a run as they are written."""

from __future__ import annotations

import hashlib
import json
import os
import weakref
from pathlib import Path

from personafl.core.types import Row
from personafl.storage import files
from personafl.storage.files import Stamp


class RowLog:
    """metrics.jsonl as it is written: a line for each stage, and the stamp of those there are."""

    def __init__(self, path: Path, keep: Stamp | None = None) -> None:
        """A new one, or one there is cut behind what is to be kept of it."""
        self._number = files.open_regular(path, os.O_RDWR | os.O_CREAT | (0 if keep else os.O_TRUNC))
        self.close = weakref.finalize(self, os.close, self._number)
        self._hash, self._size = hashlib.sha256(), 0
        if keep:
            os.ftruncate(self._number, keep.bytes)
            while block := os.read(self._number, files.BLOCK):
                self._hash.update(block)
                self._size += len(block)

    def add(self, row: Row) -> None:
        line = (json.dumps(row) + "\n").encode()
        files.write_all(self._number, line)
        self._hash.update(line)
        self._size += len(line)

    def saved(self) -> Stamp:
        """Put all rows on the disk; their stamp."""
        os.fsync(self._number)
        return Stamp(self._size, self._hash.hexdigest())
