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
import hashlib
import json
import os
import time
import warnings
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open

from personafl.core import tree
from personafl.core.errors import Note, UserError
from personafl.core.plain_text import list_names
from personafl.core.types import Params, Row
from personafl.engine.accounting import Totals
from personafl.evaluation.run_records import misfit, read_rounds
from personafl.experiment.environment import environment
from personafl.models import StackedModel
from personafl.models.frozen_weights import SAVED_FROZEN, complex_as_pairs, pairs_as_complex, size_in_bytes
from personafl.models.sample_outputs import outputs_difference
from personafl.simulation.execution_plan import ExecutionPlan
from personafl.simulation.ranks import SingleProcess
from personafl.simulation.simulator import Simulation
from personafl.simulation.state import RunState
from personafl.storage import files
from personafl.storage.files import Stamp
from personafl.storage.store import HOST, Store

FORMAT = 1
KEPT = 2
FINAL, PROGRESS, MANIFEST, ROWS = "checkpoint", "progress", "manifest.json", "metrics.jsonl"
STORES = ("clients", "known")
NORMALIZATIONS = ("normalization.json", "target_normalization.json")  # of inputs, of targets
OUTPUTS = "sample_outputs.json"
BEGINNING = ("initial.safetensors", "frozen.safetensors", OUTPUTS, *NORMALIZATIONS)  # of a run, in its final folder
COST = 1 / 50  # of a run's time that checkpoints may take by default


@dataclass(frozen=True)
class Every:
    """How often a run is saved: after so many stages, or so much time."""

    rounds: int = 0
    seconds: float = 0.0
    spared: bool = False  # less often where saving takes long

    def due(self, rounds: int, seconds: float, cost: float) -> bool:
        """Whether it is time, so many stages and seconds after the last one, which took `cost` seconds."""
        if self.rounds:
            return rounds >= self.rounds
        return seconds >= max(self.seconds, cost / COST if self.spared else 0.0)


DEFAULT = Every(seconds=60.0, spared=True)
UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}


def every(told: str | int | None) -> Every:
    """`10` are rounds, `90s`, `5m` and `2h` are time; None is about a minute of work."""
    if told is None:
        return DEFAULT
    text = str(told).strip()
    number, unit = (text[:-1], text[-1:]) if text[-1:] in UNITS else (text, "")
    try:
        amount = float(number) if unit else int(number)
        if isinstance(told, bool) or not 0 < amount < 2**31:
            raise ValueError
    except ValueError:
        raise UserError(f"checkpoint_every={told!r}: must be rounds, such as 10, or time, such as 90s or 5m") from None
    return Every(seconds=amount * UNITS[unit]) if unit else Every(rounds=int(amount))


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


# Writing


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
        mine: dict[str, Stamp | None] = {"state": _save_tensors(part / _file("state", world.rank), tensors)}
        mine |= {name: _save_store(store, part / _file(name, world.rank), number) for name, store in _stores(sim)}
        found = world.first(
            {f"{PROGRESS}/{folder.name}/{_file(n, world.rank)}": stamp for n, stamp in mine.items() if stamp}
        )
        if not world.rank:
            rows = self.log.saved() if self.log else Stamp(0, "")
            stamps = {n: s for of in found for n, s in of.items()}
            _write_manifest(part, sim, number, numbers, stamps, rows, self.seconds, self._hashes)
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
    _save_tensors(folder / "initial.safetensors", sim.model.initial)
    files.write(folder / OUTPUTS, json.dumps(sim.model.sample_outputs) + "\n")
    if sim.model.frozen:
        _save_frozen(folder / "frozen.safetensors", sim.model)
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
        stamps[f"{FINAL}/{name}.safetensors"] = _save_tensors(place(f"{FINAL}/{name}.safetensors"), held)
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
    _write_manifest(folder, sim, number, numbers, stamps, rows, seconds, sim.identity(), finished=home)
    files.publish(*last)


def clear(home: Path, sim: Simulation, number: int) -> None:
    """Remove what only a run under way needs."""
    for _, store in _stores(sim):
        store.forget(number)
    tidy(home)


def _stores(sim: Simulation) -> list[tuple[str, Store]]:
    """What clients keep; what the server knows of them."""
    return list(zip(STORES, (sim.store, sim.known), strict=True))


def _file(name: str, rank: int) -> str:
    return f"{name}{f'-{rank}' if rank else ''}.safetensors"


def store_folder(home: Path, rank: int) -> Path:
    """Where a rank keeps rows on disk."""
    return home / (f"store-{rank}" if rank else "store")


def _save_tensors(path: Path, tensors: Params, more: Mapping[str, str] | None = None) -> Stamp:
    with files.Writer(path) as file:
        held = tree.copied({n: t.detach().cpu() for n, t in tensors.items()})
        order = {"names": json.dumps(list(held))}  # sums over tensors go by it, and the format sorts them
        file.write(safetensors.torch.save(held, {**order, **(more or {})}))
    return file.stamp


def _save_frozen(path: Path, model: StackedModel) -> None:
    """Write the smaller frozen weights, and a hash of each that a module does not compute anew by itself."""
    saved = complex_as_pairs(model.small_frozen)
    _save_tensors(path, saved, {"hashes": json.dumps(model.frozen_hashes)})


def note_unsaved_weights(model: StackedModel) -> None:
    """Tell that some frozen weights will have to be given again when the run is read."""
    large = [n for n in model.frozen_hashes if n not in model.small_frozen]
    if large:
        size = sum(size_in_bytes(model.frozen[n]) for n in large)
        warnings.warn(
            f"{size >> 20} MiB of weights that no client trains ({list_names(sorted(large), 3)}) are not saved in the "
            "run folder, only their hashes: reading or resuming the run needs a model with the same weights",
            Note,
            stacklevel=2,
        )


def _save_store(store: Store, path: Path, number: int) -> Stamp | None:
    """Rows in memory as a file; those on disk are there already, but for a commit."""
    if isinstance(store.home, Path):
        store.commit(number)
        return None
    return store.save(path) if len(store) else None


def _write_manifest(
    folder: Path,
    sim: Simulation,
    number: int,
    numbers: Row,
    stamps: Mapping[str, Stamp],
    rows: Stamp,
    seconds: float,
    known: Mapping[str, str | None],
    finished: Path | None = None,
) -> None:
    """`finished` is the home of a run that is: then all is with the first rank, and rows on disk are its own."""
    at = sim.store.home
    disk = isinstance(at, Path) and (finished is None or at == finished / "store" / STORES[0])
    told: Row = {
        "format": FORMAT,
        "number": number,
        "ranks": 1 if finished else sim.ranks.size,
        "played_by": sim.ranks.size,
        "state": numbers,
        "asked": sim.training.num_rounds,
        "seconds": seconds,
        "rows": rows,
        "files": dict(stamps),
        "store": "disk" if disk else "host" if isinstance(at, Path) or at == HOST else "device",
        "plan": dataclasses.asdict(sim.plan),
        "environment": environment(sim),
        "hashes": dict(known),
    }
    files.write(folder / MANIFEST, json.dumps(told | {"sha256": _digest(told)}, indent=1) + "\n")


def _digest(told: Row) -> str:
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()


# Reading


@dataclass(frozen=True)
class Saved:
    """A checkpoint that is there and whole, but for rows on disk."""

    home: Path
    number: int
    folder: Path
    manifest: Row

    @property
    def played(self) -> int:
        return int(self.manifest["state"]["played"])

    @property
    def rows(self) -> Stamp:
        return Stamp.read(self.manifest["rows"])

    @property
    def plan(self) -> ExecutionPlan:
        return ExecutionPlan(**self.manifest["plan"])

    @property
    def store(self) -> str:
        """device, host or disk."""
        return str(self.manifest["store"])

    def table(self) -> list[Row]:
        """The rows of the stages behind it."""
        return read_rounds(self.home / ROWS, self.rows.bytes)

    def state(self, rank: int, device: torch.device) -> RunState:
        tensors = _load_tensors(self.folder / _file("state", rank))
        if self.folder.name == FINAL:
            tensors |= tree.prefixed(_load_tensors(self.folder / "server.safetensors"), "server")
        try:
            return RunState.unpacked(self.manifest["state"], tensors, self.table(), device)
        except (KeyError, ValueError, TypeError, RuntimeError) as e:
            raise UserError(f"{self.folder}: not the state of a run: {e}") from None


_WHOLE, _NUMBER, _TEXT = int, (int, float), (str, type(None))
_MANIFEST: Row = {
    "number": _WHOLE,
    "ranks": _WHOLE,
    "played_by": _WHOLE,
    "state": {
        "rounds": _WHOLE,
        "played": _WHOLE,
        "totals": {f.name: _NUMBER for f in dataclasses.fields(Totals)},
        "diverged": list,
    },
    "asked": _WHOLE,
    "seconds": _NUMBER,
    "rows": list,
    "files": {"*": list},
    "store": str,
    "plan": {f.name: _NUMBER for f in dataclasses.fields(ExecutionPlan)},
    "environment": {"hardware": str, "torch": str, "version": str},
    "hashes": {"data": _TEXT, "split": _TEXT, "init": _TEXT},
}


def _checked_manifest(path: Path, told: Row) -> Row:
    """Refuse what no run has written, also under a checksum of its own."""
    wrong = misfit(told, _MANIFEST)
    try:
        stamps = {n: Stamp.read(s) for n, s in told["files"].items()} if not wrong else {}
        far = [n for n in stamps if Path(n).is_absolute() or ".." in Path(n).parts]
        plan = told["plan"] if not wrong else {}
        state, most = told["state"], {"chunk": 2**31, "activations": 2**62}
        least = {
            "chunk": 1,
            "workers": 1,
            "threads": 1,
            "sweep_threads": 1,
            "operations": 1,
            "activations": 0,
            "lanes": 0,
        }
        fine = not far and all(len(n) < 1000 for n in stamps) and 0 <= told["seconds"] < 1e12
        fine = fine and all(0 <= n < 2**62 or 0 <= float(n) < 1e300 for n in state["totals"].values())
        fine = fine and all(n in least and least[n] <= plan[n] <= most.get(n, 1024) for n in plan)
        fine = fine and all(type(plan[n]) is int for n in plan if n != "activations")
        fine = fine and state["played"] >= 0 and 1 <= state["rounds"] <= told["asked"] and 1 <= told["ranks"] < 2**16
        fine = fine and all(type(c) is int and c >= 0 for c in state["diverged"])
        fine = fine and told["store"] in ("device", "host", "disk") and Stamp.read(told["rows"]).bytes >= 0
    except (TypeError, ValueError, KeyError, AttributeError, OverflowError):
        fine = False
    if wrong or not fine:
        raise UserError(f"{path}: not the manifest of a checkpoint{f': {wrong}' if wrong else ''}")
    return told


def read(folder: Path, home: Path, rank: int = 0) -> Saved:
    """A checkpoint, if all of a rank's files are what was written; a `UserError` says what is wrong otherwise."""
    path = folder / MANIFEST
    try:
        told = json.loads(files.read_text(path))
        known = told.pop("sha256")
    except FileNotFoundError:
        raise UserError(f"{path}: is missing") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UserError(f"{path}: is damaged") from None
    if told.get("format") != FORMAT:
        raise UserError(f"{path}: format {told.get('format')}, this version reads format {FORMAT}")
    if known != _digest(told):
        raise UserError(f"{path}: is damaged, its SHA-256 differs")
    _checked_manifest(path, told)
    saved = Saved(home, told["number"], folder, told)
    stamps = {n: Stamp.read(s) for n, s in told["files"].items()}
    mine = {_file(n, rank) for n in ("state", *STORES)}  # those of other ranks are theirs to check
    files.check(home, {n: s for n, s in stamps.items() if told["ranks"] == 1 or Path(n).name in mine})
    if not rank and saved.rows.bytes:
        rows = home / ROWS
        if not rows.is_file():
            raise UserError(f"{rows}: is missing")
        if files.stamp(rows, saved.rows.bytes) != saved.rows:
            raise UserError(f"{rows}: is damaged or cut short, its first {saved.played} rows are not what was written")
    return saved


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
    file = saved.folder / _file(name, rank)
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


def restore_frozen(model: StackedModel, home: Path) -> None:
    """Give a model the frozen weights of a run; refuse one whose weights differ where the run has only their hash."""
    path = home / FINAL / "frozen.safetensors"
    values, hashes = _load_frozen(path) if path.exists() else ({}, {})
    here = model.frozen
    values = pairs_as_complex(values, here)
    model.restore_frozen({n: t for n, t in values.items() if n in here and t.shape == here[n].shape})
    now = model.frozen_hashes
    if differ := [n for n in hashes | now if hashes.get(n) != now.get(n)]:
        raise UserError(
            f"{home}: the model has other frozen weights than that of this run: {list_names(differ)} differ. Weights "
            f"that no client trains are saved up to {SAVED_FROZEN >> 20} MiB, beyond that only hashed; build the model "
            "with the weights the run had"
        )


def check_outputs(model: StackedModel, home: Path) -> None:
    """Refuse a model that gives other outputs for the same weights than that of a run."""
    path = home / FINAL / OUTPUTS
    try:
        expected = json.loads(files.read_text(path))
        if not isinstance(expected, list) or not all(isinstance(value, float) for value in expected):
            raise ValueError("not a list of numbers")
    except FileNotFoundError:  # a run of an earlier version, or one that has only been copied in part
        return
    except (OSError, ValueError, RecursionError) as e:
        raise UserError(f"{path}: cannot be read: {e}") from None
    if difference := outputs_difference(model.sample_outputs, expected):
        raise UserError(
            f"{home}: the model gives other outputs than that of this run for the same weights ({difference}). Its "
            "code, or a tensor in it that is neither a parameter nor a buffer, has changed; build the model as the run "
            "did"
        )


def _load_frozen(path: Path) -> tuple[Params, dict[str, str]]:
    try:
        files.check_regular(path)
        with safe_open(path, "pt") as file:
            hashes = json.loads(file.metadata()["hashes"])
            if not isinstance(hashes, dict) or not all(isinstance(h, str) for h in hashes.values()):
                raise ValueError("its hashes are damaged")
            return {n: file.get_tensor(n) for n in file.keys()}, hashes  # noqa: SIM118
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, RecursionError) as e:
        raise UserError(f"{path}: cannot be read: {e}") from None


def _load_tensors(path: Path) -> Params:
    try:
        files.check_regular(path)
        with safe_open(path, "pt") as file:
            names = json.loads(file.metadata()["names"])
            return {n: file.get_tensor(n) for n in names}
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, RecursionError) as e:
        raise UserError(f"{path}: cannot be read: {e}") from None
