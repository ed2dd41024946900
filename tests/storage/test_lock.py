"""One process at a time in a folder."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
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


def test_who_holds_the_lock_is_named_and_a_dead_process_holds_none(tmp_path: Path) -> None:
    hold = "with locked(Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"
    code = f"import sys; from pathlib import Path; from personafl.storage.lock import locked\n{hold}"
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"held\n"
        for _ in range(2):  # being refused does not change what the next one reads
            refused = f"process {process.pid} on .* is writing to this folder"
            with pytest.raises(UserError, match=refused), locked(tmp_path):
                pass
        process.kill()
    with locked(tmp_path):
        assert (tmp_path / LOCK).read_text().startswith(f"process {os.getpid()} on ")
    assert not (tmp_path / LOCK).exists()


def test_a_lock_file_that_is_a_link_is_refused_and_not_followed(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("of somebody else")
    (tmp_path / LOCK).symlink_to(other)
    with pytest.raises(UserError, match=r"\.lock: Too many levels of symbolic links"), locked(tmp_path):
        pass
    assert other.read_text() == "of somebody else"
