"""Arrays that were read from the files of a data set, kept on disk in a form that is fast to read."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from personafl.core.errors import UserError
from personafl.data.dataset import Array
from personafl.data.locate import user_cache
from personafl.storage.npz import read_npz

_FORM = 1  # of the prepared files; another number makes all of them anew


def prepared_arrays(
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
        kept = _read(home / f"{name}.npz", stamp)
        if kept is not None:
            return kept
    made = build()
    for home in homes:
        try:
            _write(home / f"{name}.npz", stamp, made)
            break
        except OSError:
            continue  # not writable, or full: the next place, or none
    return made


def _read(path: Path, stamp: str) -> dict[str, Array] | None:
    if not path.exists():
        return None
    try:
        if str(read_npz(path, ("stamp",)).get("stamp")) == stamp:
            return {n: a for n, a in read_npz(path).items() if n != "stamp"}
    except UserError:
        return None
    return None


def _write(path: Path, stamp: str, arrays: dict[str, Array]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        with draft.open("wb") as f:
            np.savez(f, stamp=np.array(stamp), **arrays)  # type: ignore[arg-type]
        draft.replace(path)
    finally:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
