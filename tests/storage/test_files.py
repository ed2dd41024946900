"""Files that are whole or not there."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from personafl.core.errors import UserError
from personafl.storage import files
from personafl.storage.files import Stamp


def test_a_stamp_is_size_and_sha256(tmp_path: Path) -> None:
    known = Stamp(5, hashlib.sha256(b"hello").hexdigest())
    assert files.write(tmp_path / "a", "hello") == known == files.stamp(tmp_path / "a")
    assert files.stamp(tmp_path / "a", 4) == Stamp(4, hashlib.sha256(b"hell").hexdigest())
    assert Stamp.read(list(known)) == known
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("name", ["write", "fsync", "replace"])
def test_a_file_is_the_old_one_until_it_is_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    files.write(tmp_path / "a", "old")

    def fails(*given: object) -> None:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(os, name, fails)
    with pytest.raises(OSError, match="broken"):
        files.write(tmp_path / "a", "new")
    monkeypatch.undo()
    assert (tmp_path / "a").read_text() == "old"
    files.write(tmp_path / "a", "new")
    assert (tmp_path / "a").read_text() == "new"


def recorded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """From now on, what is done to files by the name they have then: (write, fsync or replace, name)."""
    calls: list[tuple[str, str]] = []
    names: dict[int, str] = {}
    noticed = [name for name in ("write", "fsync", "fdatasync", "replace") if hasattr(os, name)]
    real = {name: getattr(os, name) for name in ("open", *noticed)}

    def opened(path: object, *given: Any, **named: Any) -> int:
        number: int = real["open"](path, *given, **named)
        names[number] = Path(str(path)).name
        return number

    def noted(name: str) -> Callable[..., Any]:
        def call(first: Any, *given: Any) -> Any:
            calls.append((name.replace("fdata", "f"), names[first] if isinstance(first, int) else Path(given[0]).name))
            return real[name](first, *given)

        return call

    monkeypatch.setattr(os, "open", opened)
    for name in noticed:
        monkeypatch.setattr(os, name, noted(name))
    return calls


def test_a_file_is_on_the_disk_before_it_has_its_name_and_its_name_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = recorded(monkeypatch)
    files.write(tmp_path / "a", "new")
    assert calls == [("write", "a.part"), ("fsync", "a.part"), ("replace", "a"), ("fsync", tmp_path.name)]


def test_a_write_goes_on_until_all_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda number, data: real(number, data[:3]))
    files.write(tmp_path / "a", b"0123456789")
    assert (tmp_path / "a").read_bytes() == b"0123456789"


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda p: p.unlink(), "is missing"),
        (lambda p: p.write_text("hel"), "is cut short, 3 of 5 bytes are there"),
        (lambda p: p.write_text("hullo"), "is damaged"),
        (lambda p: p.write_text("hello!"), "is damaged"),
    ],
)
def test_what_is_not_as_it_was_written_is_refused(tmp_path: Path, damage: object, told: str) -> None:
    known = {"a": files.write(tmp_path / "a", "hello")}
    files.check(tmp_path, known)
    damage(tmp_path / "a")  # type: ignore[operator]
    with pytest.raises(UserError, match=f"a: {told}"):
        files.check(tmp_path, known)


def test_a_full_disk_is_told_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No space left on device; make room, then go on: personafl resume runs/a"):  # noqa: SIM117
        with files.full_disk_told("personafl resume runs/a"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with pytest.raises(OSError, match="Input/output"), files.full_disk_told("personafl resume runs/a"):
        raise OSError(errno.EIO, os.strerror(errno.EIO))
