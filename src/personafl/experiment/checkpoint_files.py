"""The files of a checkpoint: tensors, and a manifest of what belongs to it; damaged ones are refused."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open

from personafl.core import tree
from personafl.core.errors import UserError
from personafl.core.types import Params, Row
from personafl.engine.accounting import Totals
from personafl.evaluation.run_records import misfit, read_rounds
from personafl.experiment.environment import environment
from personafl.simulation.execution_plan import ExecutionPlan
from personafl.simulation.simulator import Simulation
from personafl.simulation.state import RunState
from personafl.storage import files
from personafl.storage.files import Stamp
from personafl.storage.store import HOST

FORMAT = 1
FINAL, PROGRESS, MANIFEST, ROWS = "checkpoint", "progress", "manifest.json", "metrics.jsonl"
STORES = ("clients", "known")


def rank_file(name: str, rank: int) -> str:
    return f"{name}{f'-{rank}' if rank else ''}.safetensors"


def store_folder(home: Path, rank: int) -> Path:
    """Where a rank keeps rows on disk."""
    return home / (f"store-{rank}" if rank else "store")


def save_tensors(path: Path, tensors: Params, more: Mapping[str, str] | None = None) -> Stamp:
    with files.Writer(path) as file:
        held = tree.copied({n: t.detach().cpu() for n, t in tensors.items()})
        order = {"names": json.dumps(list(held))}  # sums over tensors go by it, and the format sorts them
        file.write(safetensors.torch.save(held, {**order, **(more or {})}))
    return file.stamp


def load_tensors(path: Path) -> Params:
    try:
        files.check_regular(path)
        with safe_open(path, "pt") as file:
            names = json.loads(file.metadata()["names"])
            return {n: file.get_tensor(n) for n in names}
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, RecursionError) as e:
        raise UserError(f"{path}: cannot be read: {e}") from None


def write_manifest(
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
    files.write(folder / MANIFEST, json.dumps(told | {"sha256": digest(told)}, indent=1) + "\n")


def digest(told: Row) -> str:
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()


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
        tensors = load_tensors(self.folder / rank_file("state", rank))
        if self.folder.name == FINAL:
            tensors |= tree.prefixed(load_tensors(self.folder / "server.safetensors"), "server")
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
    if known != digest(told):
        raise UserError(f"{path}: is damaged, its SHA-256 differs")
    _checked_manifest(path, told)
    saved = Saved(home, told["number"], folder, told)
    stamps = {n: Stamp.read(s) for n, s in told["files"].items()}
    mine = {rank_file(n, rank) for n in ("state", *STORES)}  # those of other ranks are theirs to check
    files.check(home, {n: s for n, s in stamps.items() if told["ranks"] == 1 or Path(n).name in mine})
    if not rank and saved.rows.bytes:
        rows = home / ROWS
        if not rows.is_file():
            raise UserError(f"{rows}: is missing")
        if files.stamp(rows, saved.rows.bytes) != saved.rows:
            raise UserError(f"{rows}: is damaged or cut short, its first {saved.played} rows are not what was written")
    return saved
