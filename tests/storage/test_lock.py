"""One process at a time in a folder."""

from __future__ import annotations

import fcntl
from pathlib import Path

import pytest

from personafl.core.errors import UserError
from personafl.storage.lock import LOCK, locked


def test_a_lock_that_was_removed_while_it_was_waited_for_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who had it removes it at the end: between opening and locking it, the file may have lost its name."""
    real = fcntl.flock
    removed: list[int] = []

    def flock(number: int, how: int) -> None:
        if not removed:
            removed.append(number)
            (tmp_path / LOCK).unlink()
        real(number, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    with locked(tmp_path):
        assert removed
        with pytest.raises(UserError, match="is writing to this folder"), locked(tmp_path):
            pass
