"""The run folder: whether it may be written to, and what it begins with."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from personafl import config
from personafl.config import Recipe
from personafl.core.errors import UserError
from personafl.data import Federation, partition_file
from personafl.experiment.build import SPLIT


def checked(folder: str | Path) -> Path:
    """A folder a run may be written to: absent or empty, in a place that can be written; nothing is created."""
    out = Path(folder)
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {out}: that is a file")
    if out.is_dir() and any(out.iterdir()):
        raise UserError(f"--out {out}: the folder is not empty; choose another, or empty this one")
    home = next(p for p in (out, *out.absolute().parents) if p.exists())
    if not home.is_dir() or not os.access(home, os.W_OK | os.X_OK):
        raise UserError(f"--out {out}: {home} cannot be written to")
    return out


def claimed(folder: str | Path) -> Path:
    """The same folder, created."""
    out = checked(folder)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise UserError(f"--out {out}: cannot be created: {e.strerror}") from None
    return out


RUN = "run.json"
"""Which methods and seeds a run folder is to have, so that one that was interrupted is known as such."""


def begin(folder: Path, recipe: Recipe, fed: Federation | None, seeds: Sequence[int]) -> None:
    """Write what a run folder begins with: the recipe, its seeds, and the partition where that came from a file."""
    asked = {"methods": [m.label for m in recipe.algorithms], "seeds": list(seeds)}
    (folder / RUN).write_text(json.dumps(asked) + "\n", encoding="utf-8")
    (folder / "recipe.toml").write_text(config.dump(config.anchored(recipe)), encoding="utf-8")
    if recipe.data.from_file and fed is not None:
        partition_file.save(fed, folder / SPLIT, {"partition": recipe.data.partition})


def asked(folder: Path) -> list[tuple[str, int]]:
    """The methods and seeds a run folder is to have, in their order; none where it does not say."""
    try:
        told = json.loads((folder / RUN).read_text(encoding="utf-8"))
        return [(str(label), int(seed)) for label in told["methods"] for seed in told["seeds"]]
    except FileNotFoundError:
        return []
    except (KeyError, TypeError, ValueError, RecursionError):
        raise UserError(f"{folder / RUN}: not written by personafl run") from None


def home(folder: Path, label: str, seed: int) -> Path:
    """Where the results of a method and seed are."""
    return folder / label / f"seed-{seed}"


def missing(folder: Path) -> list[tuple[str, int]]:
    """The methods and seeds a run folder is to have and that are not finished."""
    return [
        (label, seed) for label, seed in asked(folder) if not (home(folder, label, seed) / "summary.json").is_file()
    ]
