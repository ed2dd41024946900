"""What a run gives: numbers, and a model for every client; written to a run folder and read back."""

from __future__ import annotations

import csv
import dataclasses
import functools
import io
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from personafl import config
from personafl.config import Method, Recipe
from personafl.config.components import SPLIT, federation, model, source
from personafl.core import tree
from personafl.core.display import Displayed
from personafl.core.errors import UserError
from personafl.core.html_elements import element
from personafl.core.normalization import as_inputs
from personafl.core.plain_text import spreadsheet_row
from personafl.core.settings import shortened, typed
from personafl.core.table import Table
from personafl.core.types import Params, Row, Summary
from personafl.data import Federation, Source, batches
from personafl.data.client_corruption import corrupt_source
from personafl.evaluation import comparison_figures, comparison_notes, final, report
from personafl.evaluation.metric_format import Shown
from personafl.evaluation.run_records import read_clients, read_summary
from personafl.experiment import checkpoint, checkpoint_files, model_files, run_folder
from personafl.experiment.checkpoint_files import Saved
from personafl.experiment.run_folder import Conditions, begin, claimed
from personafl.experiment.run_setup import simulation
from personafl.models import StackedModel
from personafl.models.client_module import ClientModule
from personafl.simulation import profile
from personafl.simulation.machine import Machine, chosen_device
from personafl.simulation.simulator import Simulation
from personafl.storage import files
from personafl.storage.files import Stamp
from personafl.storage.store import HOST, Store

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure


@dataclass(frozen=True, repr=False)
class Client(Displayed):
    """One client with the model it ended up with."""

    id: int
    simulation: Simulation
    deployed: Params  # a stack of one

    def _facts(self) -> dict[str, object]:
        fed = self.simulation.federation
        named = {"name": fed.names[self.id]} if fed.names else {}
        sizes = {split: int(fed.sizes(split)[self.id]) for split in ("train", "test")}
        return {"id": self.id, **named, "method": self.simulation.algorithm.called, **sizes}

    def predict(self, x: Tensor | np.ndarray[Any, Any]) -> Tensor:
        """Outputs `[B, K]` for inputs `[B, ...]` as the data have them, by the rule of the client's method.

        Those of regression are in the units of the data's targets.
        """
        sim = self.simulation
        # A copy: the answer depends on the numbers, not on how they lie in memory.
        batch = _as_batch(x, sim.federation.source.x)
        batch = batch.to(sim.device).clone(memory_format=torch.contiguous_format)
        dtype, normalization = next(iter(sim.model.initial.values())).dtype, sim.federation.source.normalization
        batch = as_inputs(batch, dtype, normalization)
        rule = sim.algorithm.rule
        whole = sim.model.looks_at_batches or sim.device.type == "cuda" or (rule is not None and rule.together)
        blocks = torch.split(batch, max(len(batch), 1) if whole else batches.SWEEP)

        @torch.no_grad()
        def work(model: StackedModel, part: Tensor) -> list[Tensor]:
            found = []
            for i in part.tolist():
                out, changed = sim.algorithm.respond(model, self.deployed, blocks[i][None])
                self.deployed.update(changed)  # what a rule learns from the inputs it answers
                found.append(out[0])
            return found

        outputs = torch.cat([out for part in sim.each(torch.arange(len(blocks)), work) for out in part])
        units = sim.federation.source.target_normalization
        return (outputs if units is None else units.restore(outputs, 1)).cpu()

    @property
    def module(self) -> ClientModule:
        """The same as an ordinary module that holds all it needs; `models/client_module.py` says what that is."""
        sim, source = self.simulation, self.simulation.federation.source
        normalizations = source.normalization, source.target_normalization
        return ClientModule(sim.model, sim.algorithm, self.deployed, *normalizations)


@dataclass(frozen=True, repr=False)
class MethodResult(Displayed):
    """One method and seed: the numbers, and a model for every client."""

    label: str
    seed: int
    summary: Summary
    rows: list[Row]
    clients: list[Row]
    simulation: Simulation
    evaluations: final.Arrays  # `evaluation/final.py` has the names
    profile: Row | None = None  # where the time went, if that was asked; `simulation/profile.py` has the parts

    def _facts(self) -> dict[str, object]:
        own, shown = self.summary["accuracy"]["personal"]["mean"], Shown.of([self.summary])
        score = {shown.words: f"{shown.number(own)}{' %' if shown.percent else ''}"}
        return {"label": self.label, "seed": self.seed, **score, "clients": len(self.clients)}

    def _repr_html_(self) -> str:
        return report.html_table([self.summary])

    def client(self, id: int | str) -> Client:
        """A client by its number, or by its name where the data have names."""
        sim = self.simulation
        if isinstance(id, str):
            return self.client(_numbered(id, sim.federation.names))
        number: int = typed("client", id, int)
        if not 0 <= number < sim.federation.everybody:
            raise UserError(f"client {number}: this federation has clients 0..{sim.federation.everybody - 1}")
        if sim.placement.owners is not None and sim.ranks.rank not in (0, int(sim.placement.owners[number])):
            raise UserError(f"client {number}: rank {sim.ranks.rank} does not hold its state; rank 0 does")
        ready = sim.deployed_models if number < sim.federation.num_clients else sim.newcomer_models
        (deployed,) = sim.each(torch.tensor([number]), ready)
        return Client(number, sim, deployed)

    def save(self, folder: Path, number: int = 0, rows: Stamp | None = None, seconds: float = 0.0) -> None:
        """Write what `Result.load` needs and people read, as checkpoint `number`.

        `rows` is the stamp of metrics.jsonl where a run has written it; `seconds` what the run took.
        """
        sim = self.simulation
        if rows is None:
            checkpoint.begin(folder, sim)
            rows = files.write(folder / checkpoint_files.ROWS, "".join(json.dumps(r) + "\n" for r in self.rows))
        table = io.StringIO(newline="")
        rows_of_clients = [spreadsheet_row(row) for row in self.clients]
        clients = csv.DictWriter(table, list(rows_of_clients[0]))
        clients.writeheader()
        clients.writerows(rows_of_clients)
        engine = dataclasses.asdict(sim.plan) | {"module_per_client": sim.model.whole, "store": _store_summary(sim)}
        others = {
            "clients.csv": table.getvalue().encode(),
            "evaluations.npz": final.packed(self.evaluations),
            f"{checkpoint_files.FINAL}/engine.json": (json.dumps(engine) + "\n").encode(),
            "summary.json": (json.dumps(self.summary, indent=1) + "\n").encode(),
        }
        checkpoint.finish(folder, sim, number, others, rows, seconds)
        self.save_profile(folder)

    def save_profile(self, folder: Path) -> None:
        """Write where the time went, if that was asked."""
        if self.profile is not None:
            files.write(folder / "profile.json", json.dumps(self.profile, indent=1) + "\n")


def _as_batch(x: Any, data: Tensor) -> Tensor:
    """Inputs as a tensor, in the shape of the data's examples; tokens may be more or fewer."""
    batch = x if isinstance(x, Tensor) else None
    if batch is None:
        found = np.asarray(x)
        if found.dtype.kind not in "fiub":
            raise UserError(f"predict({shortened(x)}): must be a tensor or an array of numbers")
        batch = torch.from_numpy(np.ascontiguousarray(found, found.dtype.newbyteorder("=")))
    wanted, tokens = tuple(data.shape[1:]), not data.is_floating_point() and data.dtype != torch.uint8
    fits = batch.dim() == data.dim() and (tokens or tuple(batch.shape[1:]) == wanted)
    if not fits or batch.is_complex() or batch.layout != torch.strided:
        kind = str(batch.dtype).removeprefix("torch.") + ("" if batch.layout == torch.strided else ", sparse")
        raise UserError(f"inputs of shape {tuple(batch.shape)} ({kind}): must be (B, {', '.join(map(str, wanted))})")
    return batch


def _numbered(name: str, names: tuple[str, ...]) -> int:
    """The client of this name."""
    if name in names:
        return names.index(name)
    known = f"possible are {', '.join(names[:20])}" if names else "the clients of these data have no names"
    raise UserError(f"client {name!r}: no such client; {known}{', ...' if len(names) > 20 else ''}")


def _store_summary(sim: Simulation) -> Row:
    """Where rows of clients are kept, of how many, and how much that is."""
    homes = {s.home for s in (sim.store, sim.known)}
    disk = any(isinstance(h, Path) for h in homes)
    count = max(len(sim.store), len(sim.known))
    return {
        "home": "disk" if disk else "host" if HOST in homes else "device",
        "clients": count,
        "bytes_per_client": sim.store.row_bytes + sim.known.row_bytes,
        **(
            {"disk_bytes_per_client": (sim.store.disk_bytes() + sim.known.disk_bytes()) / max(count, 1)} if disk else {}
        ),
    }


@dataclass(frozen=True, repr=False)
class Result(Displayed):
    """All methods and seeds of a run; in a loop, one by one."""

    recipe: Recipe
    methods: dict[tuple[str, int], MethodResult]
    missing: list[tuple[str, int]] = field(default_factory=list)  # methods and seeds that were not finished

    def _facts(self) -> dict[str, object]:
        return {"recipe": self.recipe.name, "labels": list(self.labels), "seeds": list(self.seeds)}

    def _repr_html_(self) -> str:
        told = (
            *comparison_notes.alerts(self.summaries, self.missing),
            comparison_notes.note(self.summaries),
            *comparison_notes.remarks(self.summaries),
        )
        return report.html_table(self.summaries) + element("p", " ".join(told))

    def __iter__(self) -> Iterator[MethodResult]:
        return iter(self.methods.values())

    def __len__(self) -> int:
        return len(self.methods)

    def __contains__(self, label: object) -> bool:
        """Whether a method of this label is there."""
        return label in self.labels

    @property
    def labels(self) -> tuple[str, ...]:
        """Of the methods, in their order."""
        return tuple(dict.fromkeys(label for label, _ in self.methods))

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(seed for _, seed in self.methods))

    @property
    def summaries(self) -> list[Summary]:
        """Of each method and seed, as summary.json has them."""
        return [m.summary for m in self]

    def __getitem__(self, label: str | tuple[str, int]) -> MethodResult:
        """A method by label, of the first seed; or by label and seed."""
        return self.of(*label) if isinstance(label, tuple) else self.of(label)

    def of(self, label: str, seed: int | None = None) -> MethodResult:
        """A method by label, of this seed or the first."""
        for (name, s), found in self.methods.items():
            if name == label and seed in (None, s):
                return found
        raise KeyError(f"{label!r}: this run has {', '.join(f'{n} (seed {s})' for n, s in self.methods)}")

    def client(self, id: int | str) -> Client:
        """A client of a run with a single method; with several, `result[label].client(id)`."""
        if len(self.labels) > 1:
            raise UserError(f"the run has several methods; choose one: result[label].client({id!r})")
        return next(iter(self.methods.values())).client(id)

    def times(self) -> Table:
        """Where the time went: a row for each method and seed that was timed."""
        several = len(self.seeds) > 1
        names = {f"{m.label}, seed {m.seed}" if several else m.label: m for m in self}
        return profile.table({name: m.profile for name, m in names.items() if m.profile})

    def table(self, spread: str | None = None) -> str:
        """The comparison as Markdown; `spread` (std, ci) is what ± is over seeds, by default ci from three on."""
        return report.markdown(self.summaries, self.missing, spread)

    def to_pandas(self, what: str = "summary") -> pandas.DataFrame:
        """A data frame that begins with columns method and seed; pandas is the extra `pandas`.

        summary   a row for each: scores (columns begin with the metric's name), traffic, compute, time
        rounds    a row for each stage, as metrics.jsonl has it (rounds from 0)
        clients   a row for each client, as clients.csv has it
        shift     a row for each degree of shift: mean accuracy and its deviation over clients
        inputs    the same for each of `evaluation.input_counts`
        """
        if what not in TABLES:
            raise UserError(f"to_pandas({what!r}): {config.unknown('table', str(what), TABLES)}")
        try:
            import pandas
        except ImportError:
            raise UserError('to_pandas needs pandas: pip install "personafl[pandas]"') from None
        rows = [{"method": m.label, "seed": m.seed, **row} for m in self for row in TABLES[what](m)]
        return pandas.DataFrame(rows, columns=None if rows else ["method", "seed"])

    def plot(self, what: str = "rounds") -> Figure:
        """A figure of the report: rounds, shift, clients, matrix (where `evaluation.matrix` was asked) or rotations."""
        if what not in comparison_figures.FIGURES:
            raise UserError(f"plot({what!r}): {config.unknown('figure', str(what), comparison_figures.FIGURES)}")
        curves = {key: m.rows for key, m in self.methods.items()}
        found = comparison_figures.figure(
            what, self.summaries, curves, {key: m.evaluations for key, m in self.methods.items()}
        )
        if found is None:
            raise UserError(f"plot({what!r}): {NOT_DRAWN[what]}")
        return found

    def save(self, folder: str | Path) -> None:
        """Write a run folder."""
        seeds = sorted({seed for _, seed in (*self.methods, *self.missing)})
        fed = next((m.simulation.federation for m in self.methods.values()), None)
        with claimed(folder) as out:
            begin(out, self.recipe, fed, seeds, Conditions())
            for (label, seed), m in self.methods.items():
                m.save(run_folder.home(out, label, seed))
            write_reports(out, list(self.methods.values()), self.missing)

    @classmethod
    def load(
        cls,
        folder: str | Path,
        device: str = "auto",
        *,
        data: Any = None,
        model: Any = None,
        algorithms: Any = None,
        training: Any = None,
        evaluation: Any = None,
        faults: Any = None,
        trust: bool = False,
    ) -> Self:
        """Read a run folder back, with every client ready to predict.

        What the run was given as an object without a dotted path, such as arrays or a module made in a notebook, is
        given again; the data must be the same, a module must have the same tensors. `missing` has what the run was to
        have and did not finish. A recipe that names code of its own (`package.module:thing`) is refused unless that
        part is given here, or `trust` allows importing it.
        """
        out = Path(folder)
        if not (out / "recipe.toml").is_file():
            raise UserError(f"{out}: not a run folder, it has no recipe.toml")
        device = chosen_device(device)
        given = config.parts(data, model, algorithms, training, evaluation, faults)
        recipe = config.load(out / "recipe.toml", given=given, trust=trust)
        divided = divisions(recipe, out / SPLIT)
        here = [m.label for m in recipe.algorithms]
        if unknown := [label for label, _ in run_folder.asked(out) if label not in here]:
            raise UserError(f"{out}: the run has a method {unknown[0]}, and algorithms has {', '.join(here)} alone")
        methods = {}
        for method in recipe.algorithms:
            homes = [p for p in (out / method.label).glob("seed-*") if p.name.removeprefix("seed-").isdecimal()]
            for path in sorted(homes, key=lambda p: int(p.name.removeprefix("seed-"))):
                if run_folder.finished(path, recipe.training.num_rounds):
                    found = loaded(recipe, method, path, device, divided)
                    methods[found.label, found.seed] = found
        if not methods:
            raise UserError(f"{out}: nothing in this run folder is finished; personafl resume goes on with it")
        return cls(recipe, methods, run_folder.missing(out))


NOT_DRAWN = {
    "rounds": "nothing was evaluated",
    "shift": "this run has no shift; evaluation.shift=donor gives some",
    "change": "this run has no stream that changes; evaluation.change=50 gives one",
    "clients": "no client was evaluated",
    "matrix": "this run has no matrix; evaluation.matrix=true gives one",
    "rotations": "this run has none; evaluation.rotations=-15,0,15 gives some",
}
"""Why there is no such figure."""


def _flat(row: Mapping[str, Any], prefix: str = "") -> Row:
    """Tables inside a table as columns, `personal_mean`; what is not there has none."""
    out: Row = {}
    for name, value in row.items():
        if isinstance(value, Mapping):
            out |= _flat(value, f"{prefix}{name}_")
        elif value is not None:
            out[f"{prefix}{name}"] = value
    return out


def _summary_row(m: MethodResult) -> list[Row]:
    s = m.summary
    shift = {"shift_average": s["shift"]["average"]} if s["shift"] else {}
    parts = {s["metric"]["name"]: s["accuracy"]} | {part: s[part] for part in ("communication", "compute", "time")}
    plain = {name: s[name] for name in ("algorithm", "rounds", "evaluated_model")}
    return [plain | _flat(parts) | shift]


def _shift_rows(m: MethodResult) -> list[Row]:
    shift = m.summary["shift"] or {"degrees": {}}
    return [{"degree": float(degree), **cell} for degree, cell in shift["degrees"].items()]


def _input_rows(m: MethodResult) -> list[Row]:
    found = m.summary.get("robustness", {}).get("inputs", {})
    return [
        {"inputs": int(count), "degree": float(degree), **cell}
        for count, cells in found.items()
        for degree, cell in cells.items()
    ]


TABLES: dict[str, Callable[[MethodResult], list[Row]]] = {
    "summary": _summary_row,
    "rounds": lambda m: [_flat(row) for row in m.rows],
    "clients": lambda m: m.clients,
    "shift": _shift_rows,
    "inputs": _input_rows,
}
"""What `to_pandas` can be asked for: the rows of a method and seed."""


def write_reports(
    folder: Path, done: list[MethodResult], missing: comparison_notes.Missing = (), spread: str | None = None
) -> None:
    """Write the table and the page of what is done of a run."""
    summaries = [m.summary for m in done]
    files.write(folder / "table.md", report.markdown(summaries, missing, spread) + "\n")
    curves = {(m.label, m.seed): m.rows for m in done}
    evaluations = {(m.label, m.seed): m.evaluations for m in done}
    page = report.html(summaries, curves, folder.name, evaluations, missing, spread)
    files.write(folder / "report.html", page)


def loaded(
    recipe: Recipe, method: Method, path: Path, device: str, divided: Callable[[int], Federation]
) -> MethodResult:
    """A method and seed that is finished, from its folder."""
    saved = checkpoint_files.read(path / checkpoint_files.FINAL, path)
    summary = read_summary(path / "summary.json")
    fed = divided(summary["seed"])
    check_same(path, saved, recipe, fed)
    asked = recipe.with_seed(summary["seed"])
    network = began(model(asked, fed.source), path)
    sim = simulation(asked, method, fed=fed, network=network, machine=Machine(device=device))
    for name, store in (("clients", sim.store), ("known", sim.known)):
        if saved.store == "disk":
            store = Store.opened(store.fresh, path / "store" / name, device=sim.device)
        else:
            store.load(path / checkpoint_files.FINAL / f"{name}.safetensors")
        setattr(sim, "store" if name == "clients" else name, store)
    state = saved.state(0, sim.device)
    checkpoint.fits(saved, state, sim)
    sim.resume(state)
    clients = read_clients(path / "clients.csv")
    scored = final.load(path / "evaluations.npz")
    return MethodResult(method.label, summary["seed"], summary, sim.rows, clients, sim, scored)


def check_same(path: Path, saved: Saved, recipe: Recipe, fed: Federation) -> None:
    """Refuse other data than those of the run."""
    for what, now in (("split", fed.digest()), ("data", fed.source.digest)):
        if (then := saved.manifest["hashes"][what]) != now:
            raise UserError(
                f"{path}: the {what} of this run had hash {then}, now it is {now}: what data.dataset="
                f"{recipe.data.named!r} or data.partition={recipe.data.partition!r} names has changed since"
            )


def began(network: StackedModel, home: Path) -> StackedModel:
    """The model with the weights the run in this folder began with, those that nobody trains included."""
    path = home / checkpoint_files.FINAL / "initial.safetensors"
    try:
        files.check_regular(path)
        held = load_file(path)
    except (OSError, SafetensorError) as e:
        raise UserError(f"{path}: cannot be read: {e}") from None
    mine, run = ({n: tuple(t.shape) for n, t in of.items()} for of in (network.initial, held))
    if mine != run:
        at = next(n for n in mine | run if mine.get(n) != run.get(n))
        raise UserError(
            f"{home}: not the model of this run: {at} has shape {mine.get(at, 'none')} here and "
            f"{run.get(at, 'none')} there"
        )
    network = network.copy()
    network.initial = tree.copied({n: held[n] for n in mine})
    model_files.restore_frozen(network, home)
    model_files.check_outputs(network, home)
    return network


def divisions(recipe: Recipe, split: Path) -> Callable[[int], Federation]:
    """The federation of each seed, on one copy of the data, by the run folder's own partition file if it has one."""
    if recipe.data.from_file and split.is_file():
        recipe = replace(recipe, data=replace(recipe.data, partition=str(split)))

    @functools.cache
    def data() -> Source:
        return corrupt_source(source(recipe), recipe.data.corruption, recipe.data.corruption_severity)

    return functools.cache(lambda seed: federation(recipe.with_seed(seed), data()))
