"""Downloads that are verified before they have their name, and that go on where they were interrupted."""

from __future__ import annotations

import contextlib
import http.client
import sys
import tarfile
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from personafl.data.catalogue import Remote
from personafl.data.checksums import DataError, verify

Progress = Callable[[str, int, int | None], None]
"""Called with the file's name, the bytes there are, and the bytes there will be where the server says so."""

_BLOCK = 1 << 18


class UnreachableError(OSError):
    """The place a file is to be had from did not answer or did not have it."""


@contextlib.contextmanager
def bar() -> Iterator[Progress]:
    """A progress bar on a terminal's standard error; nothing where there is no terminal."""
    if not sys.stderr.isatty():
        yield lambda name, have, total: None
        return
    from rich.console import Console
    from rich.progress import DownloadColumn, TaskID
    from rich.progress import Progress as Bars

    with Bars(*Bars.get_default_columns(), DownloadColumn(), console=Console(stderr=True)) as bars:
        tasks: dict[str, TaskID] = {}

        def show(name: str, have: int, total: int | None) -> None:
            if name not in tasks:
                tasks[name] = bars.add_task(name, total=total)
            bars.update(tasks[name], completed=have, total=total)

        yield show


def download(
    remote: Remote, to: Path, progress: Progress | None = None, *, tries: int = 3, timeout: float = 30
) -> Path:
    """Fetch a file into a folder by way of NAME.part; what is there and right is kept.

    An interrupted download is resumed only if a checksum can tell that the halves belong together.
    """
    goal = to / remote.name
    if goal.exists():
        verify(goal, remote.spec)
        return goal
    to.mkdir(parents=True, exist_ok=True)
    part = goal.with_name(goal.name + ".part")
    if not remote.spec.digests:
        part.unlink(missing_ok=True)
    trouble = ""
    for _ in range(tries):
        resumed = part.exists()
        try:
            complete = _more(remote, part, progress or (lambda name, have, total: None), timeout)
        except urllib.error.HTTPError as e:
            e.close()
            raise UnreachableError(f"{remote.url}: the server says {e.code} {e.reason}") from None
        except (OSError, http.client.HTTPException) as e:
            trouble = str(getattr(e, "reason", e) or type(e).__name__)
            continue
        if not complete:
            trouble = "the connection ended early"
            continue
        try:
            verify(part, remote.spec)
        except DataError as e:
            part.unlink()
            if not resumed:
                raise DataError(f"{remote.url}: what came is not the file: {e}") from None
            trouble = "the half that was there did not fit the rest"
            continue
        part.replace(goal)
        return goal
    have = part.stat().st_size if part.exists() else 0
    half = f"; {have:,} bytes are kept in {part} and will be continued" if have and remote.spec.digests else ""
    raise UnreachableError(f"{remote.url}: {trouble}{half}")


def _more(remote: Remote, part: Path, progress: Progress, timeout: float) -> bool:
    """Add what is missing to the part; whether all of it is there now."""
    have = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(remote.url, headers={"User-Agent": "personafl"})
    if have:
        request.add_header("Range", f"bytes={have}-")
    try:
        answer = urllib.request.urlopen(request, timeout=timeout)
    except urllib.error.HTTPError as e:
        if e.code != 416:
            raise
        e.close()
        if remote.spec.size == have or e.headers.get("Content-Range", "").endswith(f"/{have}"):
            return True  # there is nothing more to get
        part.unlink()  # longer than the file, so not a part of it
        return False
    with answer:
        if answer.status != 206 or not answer.headers.get("Content-Range", "").startswith(f"bytes {have}-"):
            have = 0  # all of it comes again
        length = answer.headers.get("Content-Length")
        total = have + int(length) if length else remote.spec.size
        with part.open("ab" if have else "wb") as out:
            have = _copy(answer, out, have, lambda n: progress(remote.name, n, total))
    return total is None or have >= total


def _copy(answer: BinaryIO, out: BinaryIO, have: int, tell: Callable[[int], None]) -> int:
    tell(have)
    while block := answer.read(_BLOCK):
        out.write(block)
        have += len(block)
        tell(have)
    return have


def unpack(archive: Path, to: Path) -> None:
    """Unpack a .tar.gz or .zip, and the .zip files inside a .zip; nothing may leave the folder."""
    try:
        if archive.name.endswith((".tar.gz", ".tgz")):
            with tarfile.open(archive) as tar:
                tar.extractall(to, filter="data")
        elif archive.suffix == ".zip":
            with zipfile.ZipFile(archive) as z:
                z.extractall(to)  # drops leading slashes and `..`
                inner = [n for n in z.namelist() if n.endswith(".zip")]
            for name in inner:
                unpack(to / name, to)
                (to / name).unlink()
    except (tarfile.TarError, zipfile.BadZipFile, EOFError, OSError) as e:
        raise DataError(f"{archive}: cannot be unpacked ({e}); delete it, it is downloaded again") from None
