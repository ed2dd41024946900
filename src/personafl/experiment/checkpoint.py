"""Checkpoints of a method and seed: a run goes on from one as if nothing had happened.

    checkpoint/           what the run began with (weights that no client trains in frozen.safetensors); once it is
                          finished, all it ended with, and manifest.json
    progress/<number>/    while it is under way, the last two states it was in, the first from before round one
    store/                what clients keep, where that is on disk; it can go back to either

A checkpoint is the state of a run (`simulation/state.py`), the rows of its stores and how many rows of metrics.jsonl
belong to it. Its files are written and put on the disk before its manifest, which has their stamps, and all of them
before the folder gets its name. One that is damaged is passed over for the one before it.

With several ranks each writes and reads what is its own; the first writes the manifest once all are done. They must
see the same folder.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from personafl.core import tree
from personafl.core.errors import Note, UserError
from personafl.experiment.checkpoint_files import (
    FINAL,
    PROGRESS,
    STORES,
    Saved,
    rank_file,
    read,
    save_tensors,
    store_folder,
    write_manifest,
)
from personafl.experiment.checkpoint_interval import Every
from personafl.experiment.environment import environment
from personafl.experiment.model_files import OUTPUTS, save_frozen
from personafl.experiment.row_log import RowLog
from personafl.simulation.ranks import SingleProcess
from personafl.simulation.simulator import Simulation
from personafl.simulation.state import RunState
from personafl.storage import files
from personafl.storage.files import Stamp
from personafl.storage.store import Store

KEPT = 2
NORMALIZATIONS = ("normalization.json", "target_normalization.json")  # of inputs, of targets
BEGINNING = ("initial.safetensors", "frozen.safetensors", OUTPUTS, *NORMALIZATIONS)  # of a run, in its final folder


class Checkpoints:
    """The checkpoints of a method and seed that is under way, as a rank writes them."""

    def __init__(
        self, home: Path, sim: Simulation, often: Every, log: RowLog | None, behind: Sequence[int], seconds: float
    ) -> None:
        """`log` is the first rank's, `behind` the numbers of those still there, `seconds` what the run took so far."""
        self.home, self.sim, self.often, self.log = home, sim, often, log
        self.behind = list(behind)
        self._hashes = sim.identity()
        self._at, self._when, self._cost = sim.played, time.perf_counter(), 0.0
        self._begun = self._when - seconds

    @property
    def seconds(self) -> float:
        """What the run took so far, over all the processes it was played by."""
        return time.perf_counter() - self._begun

    @property
    def due(self) -> bool:
        done = self.sim.played - self._at
        return done > 0 and self.often.due(done, time.perf_counter() - self._when, self._cost)

    def write(self) -> None:
        """Save the present state."""
        begun = time.perf_counter()
        sim, world = self.sim, self.sim.ranks
        number = self.next
        folder = self.home / PROGRESS / f"{number:08d}"
        part = folder.with_name(folder.name + files.PART)
        if not world.rank:
            files.remove(part)
            part.mkdir(parents=True)
        world.gather(None)
        numbers, tensors = sim.state.packed()
        mine: dict[str, Stamp | None] = {"state": save_tensors(part / rank_file("state", world.rank), tensors)}
        mine |= {name: _save_store(store, part / rank_file(name, world.rank), number) for name, store in _stores(sim)}
        found = world.first(
            {f"{PROGRESS}/{folder.name}/{rank_file(n, world.rank)}": stamp for n, stamp in mine.items() if stamp}
        )
        if not world.rank:
            rows = self.log.saved() if self.log else Stamp(0, "")
            stamps = {n: s for of in found for n, s in of.items()}
            write_manifest(part, sim, number, numbers, stamps, rows, self.seconds, self._hashes)
            files.sync_folder(part)
            files.publish(part, folder)
        world.gather(None)
        self._forget(number)
        self._at, self._when = sim.played, time.perf_counter()
        self._cost = self._when - begun

    @property
    def next(self) -> int:
        """The number of the next checkpoint."""
        return max(self.behind, default=-1) + 1

    def _forget(self, number: int) -> None:
        """Let go of all checkpoints but the last two."""
        self.behind = [*self.behind, number]
        old, self.behind = self.behind[:-KEPT], self.behind[-KEPT:]
        if not self.sim.ranks.rank:
            for n in old:
                files.remove(self.home / PROGRESS / f"{n:08d}")
        for _, store in _stores(self.sim):
            store.forget(self.behind[0])


def begin(home: Path, sim: Simulation) -> None:
    """Write what a run begins with: weights, plan, and what inputs and targets are normalised by."""
    folder = home / FINAL
    folder.mkdir(parents=True, exist_ok=True)
    save_tensors(folder / "initial.safetensors", sim.model.initial)
    files.write(folder / OUTPUTS, json.dumps(sim.model.sample_outputs) + "\n")
    if sim.model.frozen:
        save_frozen(folder / "frozen.safetensors", sim.model)
    files.write(folder / "engine.json", json.dumps(dataclasses.asdict(sim.plan)) + "\n")
    source = sim.federation.source
    for name, of in zip(NORMALIZATIONS, (source.normalization, source.target_normalization), strict=True):
        if of is not None:  # for those who use the weights elsewhere
            files.write(folder / name, json.dumps({"mean": of.mean, "std": of.std}) + "\n")


def finish(home: Path, sim: Simulation, number: int, others: Mapping[str, bytes], rows: Stamp, seconds: float) -> None:
    """Write all a finished run ends with; `others` are its further files, of which the last is published last."""
    folder = home / FINAL
    parts: list[tuple[Path, Path]] = []
    stamps = {f"{FINAL}/{name}": files.stamp(folder / name) for name in BEGINNING if (folder / name).exists()}

    def place(name: str) -> Path:
        parts.append((home / f"{name}{files.PART}", home / name))
        return parts[-1][0]

    numbers, tensors = sim.state.packed()
    for name, held in (("server", tree.under(tensors, "server")), ("state", tree.without(tensors, "server"))):
        stamps[f"{FINAL}/{name}.safetensors"] = save_tensors(place(f"{FINAL}/{name}.safetensors"), held)
    for name, store in _stores(sim):
        if store.home == home / "store" / name:
            store.commit(number)
        else:
            stamps[f"{FINAL}/{name}.safetensors"] = store.save(place(f"{FINAL}/{name}.safetensors"))
    for name, data in others.items():
        with files.Writer(place(name)) as file:
            file.write(data)
        stamps[name] = file.stamp
    *first, last = parts
    for part, path in first:
        os.replace(part, path)
    write_manifest(folder, sim, number, numbers, stamps, rows, seconds, sim.identity(), finished=home)
    files.publish(*last)


def clear(home: Path, sim: Simulation, number: int) -> None:
    """Remove what only a run under way needs."""
    for _, store in _stores(sim):
        store.forget(number)
    tidy(home)


def _stores(sim: Simulation) -> list[tuple[str, Store]]:
    """What clients keep; what the server knows of them."""
    return list(zip(STORES, (sim.store, sim.known), strict=True))


def _save_store(store: Store, path: Path, number: int) -> Stamp | None:
    """Rows in memory as a file; those on disk are there already, but for a commit."""
    if isinstance(store.home, Path):
        store.commit(number)
        return None
    return store.save(path) if len(store) else None


def usable(home: Path, world: SingleProcess) -> list[Saved]:
    """The checkpoints a run can go on from, the newest first; those that are damaged are told of."""
    found: dict[int, Saved] = {}
    wrong: dict[str, str] = {}
    places = [p for p in sorted((home / PROGRESS).glob("*")) if p.name.isdecimal()]
    for folder in [home / FINAL, *places]:
        if folder.name == FINAL and not (home / "summary.json").exists():
            continue  # not finished
        try:
            saved = read(folder, home, world.rank)
        except UserError as e:
            wrong[folder.name] = str(e)
        else:
            found[saved.number] = saved
    everywhere = set.intersection(*(set(n) for n in world.gather(list(found))))
    for told in wrong.values():
        warnings.warn(f"a checkpoint cannot be used: {told}", Note, stacklevel=2)
    return [found[n] for n in sorted(everywhere, reverse=True)]


def restore(sim: Simulation, choices: Sequence[Saved]) -> Saved | None:
    """Bring a simulation to the newest of these checkpoints its stores can go back to; None where there is none."""
    world = sim.ranks
    for saved in choices:
        state = saved.state(world.rank, sim.device)
        fits(saved, state, sim)
        told = ""
        try:
            stores = [_restored(store, saved, name, world.rank, sim.device) for name, store in _stores(sim)]
        except UserError as e:
            told = str(e)
        if any(world.gather(told)):
            warnings.warn(f"a checkpoint cannot be used: {told or 'another rank cannot'}", Note, stacklevel=2)
            continue
        sim.store, sim.known = stores
        _note_environment(saved, sim)
        if state.rounds == saved.manifest["asked"]:  # it was not stopped, and may be asked for more by now
            state.rounds = sim.training.num_rounds
        sim.resume(state)
        return saved
    return None


def fits(saved: Saved, state: RunState, sim: Simulation) -> None:
    """Refuse the state of another model, method or schedule."""
    mine, there = ({n: (t.shape, t.dtype) for n, t in of.items()} for of in (sim.server, state.server))
    for n in mine:  # a method may have names of its own for a while
        if mine[n] != there.get(n, mine[n] if n not in sim.model.info.shapes else None):
            raise UserError(f"{saved.folder}: not the state of this model and method: {n} differs")
    if not len(state.rows) == state.played <= len(sim.schedule):
        raise UserError(f"{saved.folder}: {state.played} stages with {len(state.rows)} rows are not of this run")


def _note_environment(saved: Saved, sim: Simulation) -> None:
    """Say where going on elsewhere may change the last bits."""
    now = environment(sim)
    then = saved.manifest["environment"]
    other = [n for n in ("hardware", "torch", "version") if then[n] != now[n]]
    if other and not sim.ranks.rank:
        told = ", ".join(f"{n} {then[n]} then, {now[n]} now" for n in other)
        warnings.warn(f"the run goes on elsewhere than it began, its last bits may differ: {told}", Note, stacklevel=2)


def _restored(store: Store, saved: Saved, name: str, rank: int, device: torch.device) -> Store:
    if saved.store == "disk":
        folder = store_folder(saved.home, rank) / name
        return Store.reopened(store.fresh, folder, saved.number, device=device)
    file = saved.folder / rank_file(name, rank)
    if str(file.relative_to(saved.home)) in saved.manifest["files"]:
        store.load(file)
    return store


def prune(home: Path, saved: Saved, world: SingleProcess) -> list[int]:
    """Remove what came behind a checkpoint that is gone on from; the numbers of those that are left."""
    kept = [saved.number]
    for path in sorted((home / PROGRESS).glob("*")):
        if path.name.isdecimal() and int(path.name) < saved.number:
            kept.append(int(path.name))
        elif path != saved.folder and not world.rank:
            files.remove(path)
    return sorted(kept)


def begun(home: Path) -> bool:
    """Whether a run got as far as its first checkpoint."""
    return (home / "summary.json").exists() or any(p.name.isdecimal() for p in (home / PROGRESS).glob("*"))


def tidy(home: Path) -> None:
    """Remove what a finished run that was ended while it cleared up has left."""
    parts = (path for place in ("", "*/", "store/*/") for path in home.glob(f"{place}*{files.PART}"))
    for path in (*home.glob("store-*"), *parts, home / PROGRESS):
        files.remove(path)
