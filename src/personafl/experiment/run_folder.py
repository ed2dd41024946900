"""The run folder: whether it may be written to, by whom, and what it begins with."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from personafl import config
from personafl.config import Recipe
from personafl.config.components import SPLIT
from personafl.core.errors import UserError
from personafl.core.plain_text import is_text
from personafl.data import Federation, partition_file
from personafl.evaluation import comparison_table
from personafl.experiment import checkpoint_files, checkpoint_interval
from personafl.storage import files
from personafl.storage.lock import LOCK, locked

MOST_THREADS = 1024
STORES = ("auto", "device", "host", "disk")
RECIPE = "recipe.toml"
RUN = "run.json"
"""Which methods and seeds a run folder is to have, and how they are run: what is interrupted goes on the same way."""


@dataclass(frozen=True)
class Conditions:
    """What a run is carried out with, checked. None of it is part of a method."""

    device: str = "cpu"
    store: str = "auto"
    memory: float | None = None
    chunk: int = 0
    threads: int = 1
    threads_per_client: int = 1
    ranks: int = 1
    timed: bool = False
    spread: str | None = None
    checkpoint_every: str | int | None = None

    def __post_init__(self) -> None:
        whole = (("threads", 1, MOST_THREADS), ("threads_per_client", 1, MOST_THREADS))
        for name, low, high in (*whole, ("chunk", 0, 2**31), ("ranks", 1, 2**16)):
            value = getattr(self, name)
            if type(value) is not int or not low <= value <= high:
                raise UserError(f"{name} {value}: must be at least {low} and at most {high}")
        if self.store not in STORES:
            raise UserError(f"store {self.store}: possible are {', '.join(STORES)}")
        if self.memory is not None and not (isinstance(self.memory, (int, float)) and self.memory > 0):
            raise UserError(f"memory {self.memory!s:.20}: must be greater than 0")
        comparison_table.spread_of((), self.spread)
        checkpoint_interval.every(self.checkpoint_every)


@dataclass(frozen=True)
class Asked:
    """What a run folder is to have."""

    methods: list[str]
    seeds: list[int]
    rounds: int
    conditions: Conditions = field(default_factory=Conditions)
    recipe: str = ""  # the SHA-256 of recipe.toml

    @property
    def runs(self) -> list[tuple[str, int]]:
        return [(label, seed) for label in self.methods for seed in self.seeds]


def checked(folder: str | Path) -> Path:
    """A folder a run may be written to: absent or empty, in a place that can be written; nothing is created."""
    out = Path(folder)
    if not is_text(str(out)):
        raise UserError(f"run folder {str(out)!r}: must be UTF-8 without a zero byte")
    if out.exists() and not out.is_dir():
        raise UserError(f"run folder {out}: that is a file")
    if out.is_dir() and any(p.name != LOCK for p in out.iterdir()):
        more = f", or go on with what is there: {command(out, 1)}" if (out / RUN).is_file() else ""
        raise UserError(f"run folder {out}: the folder is not empty; choose another, or empty this one{more}")
    home = next(p for p in (out, *out.absolute().parents) if p.exists())
    if not home.is_dir() or not os.access(home, os.W_OK | os.X_OK):
        raise UserError(f"run folder {out}: {home} cannot be written to")
    return out


@contextmanager
def claimed(folder: str | Path) -> Iterator[Path]:
    """The same folder, created, and this process's alone while this lasts."""
    out = checked(folder)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise UserError(f"run folder {out}: cannot be created: {e.strerror}") from None
    with locked(out):
        checked(out)  # somebody may have been faster
        yield out


def begin(folder: Path, recipe: Recipe, fed: Federation | None, seeds: Sequence[int], with_: Conditions) -> None:
    """Write what a run folder begins with: the recipe, its seeds, and the partition where that came from a file."""
    if recipe.data.from_file and fed is not None:
        partition_file.save(fed, folder / SPLIT, {"partition": recipe.data.partition})
    methods = [m.label for m in recipe.algorithms]
    asked = Asked(methods, list(seeds), recipe.training.num_rounds, with_)
    _write(folder, config.dump(config.anchored(recipe)), asked)


def write_rounds(folder: Path, told: Asked, rounds: int) -> None:
    """Ask for more rounds of a run; all else of its recipe stays as it is spelt."""
    text = (folder / RECIPE).read_text(encoding="utf-8")
    head, section, rest = text.partition("[training]\n")
    longer = re.sub(r"(?m)^num_rounds = \d+$", f"num_rounds = {rounds}", rest, count=1)
    _write(folder, head + section + longer, dataclasses.replace(told, rounds=rounds))


def _write(folder: Path, recipe: str, asked: Asked) -> None:
    stamp = files.write(folder / RECIPE, recipe)
    asked = dataclasses.replace(asked, recipe=stamp.sha256)
    files.write(folder / RUN, json.dumps(dataclasses.asdict(asked), indent=1) + "\n")


def check_recipe(folder: Path, told: Asked) -> None:
    """Refuse to go on under another recipe than the run began with."""
    try:
        there = files.stamp(folder / RECIPE).sha256
    except OSError as e:
        raise UserError(f"{folder / RECIPE}: cannot be read: {e.strerror}") from None
    if there != told.recipe:
        raise UserError(f"{folder / RECIPE}: was changed since the run began; a run goes on as it began")


def read(folder: Path) -> Asked:
    """What a run folder is to have."""
    try:
        told: dict[str, Any] = json.loads(files.read_text(folder / RUN))
        conditions = Conditions(**told["conditions"])
        if type(told["rounds"]) is not int:
            raise ValueError("rounds")
        methods, seeds = [str(m) for m in told["methods"]], [int(s) for s in told["seeds"]]
        return Asked(methods, seeds, told["rounds"], conditions, str(told.get("recipe", "")))
    except FileNotFoundError:
        raise UserError(f"{folder}: not a run folder, it has no {RUN}") from None
    except (OSError, KeyError, TypeError, ValueError, RecursionError):
        raise UserError(f"{folder / RUN}: not written by personafl run") from None


def root(folder: Path) -> Path:
    """The run folder a path is, or is a method and seed of."""
    above = folder.parent.parent
    return above if not (folder / RUN).is_file() and (above / RUN).is_file() else folder


def command(folder: Path, ranks: int) -> str:
    """The command line that goes on with a run of so many processes."""
    start = "personafl" if ranks == 1 else f"torchrun --nproc-per-node {ranks} -m personafl"
    return f"{start} resume {shlex.quote(str(folder))}"


def asked(folder: Path) -> list[tuple[str, int]]:
    """The methods and seeds a run folder is to have, in their order; none where it does not say."""
    return read(folder).runs if (folder / RUN).is_file() else []


def home(folder: Path, label: str, seed: int) -> Path:
    """Where the results of a method and seed are."""
    return folder / label / f"seed-{seed}"


def finished(path: Path, rounds: int) -> bool:
    """Whether a method and seed has run to the end of so many rounds."""
    if not (path / "summary.json").is_file():
        return False
    try:
        told = json.loads(files.read_text(path / checkpoint_files.FINAL / checkpoint_files.MANIFEST))
        there = path / checkpoint_files.PROGRESS  # a longer run may have ended between its manifest and its summary
        whole = not there.exists() or list(files.stamp(path / "summary.json")) == told["files"]["summary.json"]
        return bool(told["asked"] == rounds) and whole
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return True  # damaged: who loads it will say so


def missing(folder: Path) -> list[tuple[str, int]]:
    """The methods and seeds a run folder is to have and that are not finished."""
    if not (folder / RUN).is_file():
        return []
    told = read(folder)
    return [(label, seed) for label, seed in told.runs if not finished(home(folder, label, seed), told.rounds)]


def text_of(path: Path) -> str:
    """What a file says, nothing where it is no text."""
    try:
        return files.read_text(path)
    except ValueError:
        return ""
