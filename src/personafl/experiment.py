"""From a recipe to results: the parts put together, and the run folder."""

from __future__ import annotations

import csv
import dataclasses
import functools
import inspect
import json
import os
import platform
import re
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import personafl
from personafl import config
from personafl.config import ConfigError, Method, Recipe
from personafl.core import batches, rng
from personafl.core.store import HOST, Store
from personafl.core.types import Params
from personafl.data import DATASETS, Federation, Source, arrays, artefact, own
from personafl.data.corrupted import corrupted, whole
from personafl.data.partition import Ask, Indices, Parts, Rows, dealt, partition, trained_on
from personafl.data.shift import Shift, draw
from personafl.evaluation import final, matrix, report
from personafl.evaluation.metrics import LOSSES, METRICS
from personafl.models import MODELS, StackedModel
from personafl.sim import profile, ranks
from personafl.sim.layout import temporary
from personafl.sim.simulator import Row, Simulation

Watch = Callable[[str, int, int, Row], None]
"""Told after every stage: label, seed, number of stages, and the row of metrics.jsonl."""

STORES = ("auto", "device", "host", "disk")


def source(recipe: Recipe) -> Source:
    """The data set of a recipe."""
    name = recipe.data.dataset
    if name in DATASETS:
        return DATASETS[name]()
    if name.endswith(".npz"):
        return _npz(Path(name))
    if ":" not in name or Path(name).is_dir():
        return _named(name, lambda: own.opened(name))
    made = config.imported(name, "data set")()
    return _named(name, lambda: own.anything(made, name.rpartition(":")[2]))


def _named(name: str, read: Callable[[], Source]) -> Source:
    """One's own data; what is wrong with them begins with the setting that names them."""
    try:
        return read()
    except ValueError as e:
        raise ConfigError(f"data.dataset={name!r}: {e}") from None


def _npz(path: Path) -> Source:
    if not path.is_file():
        raise ConfigError(f"data.dataset={str(path)!r}: no such file")
    try:
        with np.load(path, allow_pickle=False) as file:
            held = {n: file[n] for n in file.files}
    except Exception as e:  # a damaged file may raise anything
        raise ConfigError(f"data.dataset={str(path)!r}: not a readable .npz file: {e}") from None
    if not {"x", "y"} <= held.keys():
        raise ConfigError(f"data.dataset={str(path)!r}: must hold arrays x and y; it has {', '.join(held)}")
    return arrays(held["x"], held["y"], held.get("clients"), name=path.stem)


def federation(recipe: Recipe, data: Source | None = None) -> Federation:
    """The data set of a recipe, divided over clients by its seed."""
    data = data or source(recipe)
    d, seed = recipe.data, recipe.training.seed
    if d.from_file:
        return corrupted(artefact.load(d.partition, data), d.corruption, d.corruption_severity)
    draw = rng.generator(seed, "partition")
    ask = Ask(
        labels=data.y.numpy(),
        classes=data.classes,
        num_clients=d.num_clients,
        alpha=d.alpha,
        classes_per_client=d.classes_per_client,
        clients=data.clients,
        rng=draw,
        sources=data.sources,
        samples_per_class=d.samples_per_class,
        samples_per_client=d.samples_per_client,
        uniform_share=d.uniform_share,
        test_samples_per_class=d.test_samples_per_class,
        test_samples_per_client=d.test_samples_per_client,
    )
    try:
        parts, tests, official = _divided(recipe, ask, data)
    except ValueError as e:
        if data.clients is None or d.partition == "natural":
            raise
        raise ConfigError(f"{e}; {data.name} knows its clients, data.partition=natural takes them") from None
    rows, unseen = parts.rows, 0
    if d.unseen_ratio:
        unseen = max(1, round(d.unseen_ratio * len(rows)))
        order = rng.generator(seed, "unseen").permutation(len(rows))  # the last ones are held out
        rows, tests = Rows.of(rows).taken(order), None if tests is None else Rows.of(tests).taken(order)
    built = Federation.build(
        data,
        rows,
        seed,
        test_share=d.test_share,
        validation_share=d.validation_share,
        notes=parts.notes,
        unseen=unseen,
        tests=tests,
        official=official,
    )
    return corrupted(built, d.corruption, d.corruption_severity)


def note_clients(recipe: Recipe, data: Source) -> None:
    """Warn where data of one's own know their clients and a run divides them otherwise."""
    d = recipe.data
    if data.clients is not None and d.dataset not in DATASETS and not d.from_file and d.partition != "natural":
        count = len(np.unique(data.clients))
        warnings.warn(f"{data.name} knows its {count} clients; data.partition=natural keeps them", stacklevel=2)


def _divided(recipe: Recipe, ask: Ask, data: Source) -> tuple[Parts, Sequence[Indices] | None, Indices | None]:
    """Clients' rows, their test rows where those are dealt, and the test rows of no client."""
    d = recipe.data
    if d.official_test == "pooled":
        return partition(d.partition, ask), None, None
    where = f"data.official_test={d.official_test!r}"
    if data.test is None or data.test.all() or not data.test.any():
        raise ConfigError(f"{where}: {data.name} does not come with a training and a test part; use pooled")
    if data.groups is not None and len(both := np.intersect1d(data.groups[data.test], data.groups[~data.test])):
        raise ConfigError(f"{where}: group {both[0]} of {data.name} has samples in both parts; use pooled")
    if d.official_test == "dealt":
        return *dealt(d.partition, ask, data.test), None
    return trained_on(d.partition, ask, data.test), None, np.flatnonzero(data.test)


def model(recipe: Recipe, data: Source) -> StackedModel:
    """The network of a recipe, initialised by its seed."""
    choice = recipe.model
    name = data.model if choice.name == "auto" else choice.name
    build = MODELS[name].build if name in MODELS else config.imported(name, "model")
    example = batches.inputs(data.x[:2], torch.float32)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(rng.key(recipe.training.seed, "init")) % 2**63)
        module = build(tuple(data.x.shape[1:]), data.classes) if name in MODELS else _users(build, data)
    if not isinstance(module, nn.Module):
        raise ConfigError(f"model.name={name!r}: gave {type(module).__name__}, not a torch.nn.Module")
    try:
        return StackedModel(module, example, choice.head or None, choice.buffers)
    except (RuntimeError, TypeError) as e:
        what = f"{example.dtype} of shape {tuple(example.shape)}".removeprefix("torch.")
        hint = "" if example.is_floating_point() else "; examples are whole numbers: give floats, or bytes for images"
        raise ConfigError(f"model.name={name!r}: fails on a batch of {what}: {e}{hint}") from None


def _users(build: Callable[..., Any], data: Source) -> Any:
    """A model of one's own: called with the shape of an example and the number of classes unless it takes nothing."""
    wanted: tuple[Any, ...] = (tuple(data.x.shape[1:]), data.classes)
    try:
        inspect.signature(build).bind()
        wanted = ()
    except TypeError:
        pass
    try:
        return build(*wanted)
    except TypeError as e:
        raise ConfigError(
            f"model {getattr(build, '__name__', build)}: called with {wanted or 'nothing'}: {e}"
        ) from None


def simulation(
    recipe: Recipe, method: Method, *, device: str = "cpu", fed: Federation | None = None, **options: Any
) -> Simulation:
    """One method of a recipe, ready to run."""
    fed = fed or federation(recipe)
    return Simulation(
        fed,
        model(recipe, fed.source),
        method.algorithm,
        recipe.training,
        recipe.evaluation,
        criterion=config.criterion(recipe.training.loss, LOSSES, "loss"),
        metric=config.criterion(recipe.evaluation.metric, METRICS, "metric"),
        device=device,
        **options,
    )


def resolved(
    recipe: Recipe, seeds: Sequence[int], device: str = "cpu", data: Source | None = None
) -> tuple[Recipe, dict[int, Federation]]:
    """The recipe with `auto` replaced by what it means, and its data divided for every seed.

    All of it is built once before anything is written, so that what cannot be built is said first.
    """
    data = whole(data or source(recipe), recipe.data.corruption, recipe.data.corruption_severity)
    name = data.model if recipe.model.name == "auto" else recipe.model.name
    recipe = replace(recipe, model=replace(recipe.model, name=name)).with_seed(seeds[0])
    feds = {seed: federation(recipe.with_seed(seed), data) for seed in seeds}
    note_clients(recipe, data)
    matrix.check(recipe.evaluation, feds[seeds[0]], device)
    for method in recipe.algorithms:
        sim = simulation(recipe, method, fed=feds[seeds[0]])
        sim.ready(sim.model, torch.zeros(1, dtype=torch.int64))
    _check_scoring(recipe, sim)
    return recipe, feds


def _check_scoring(recipe: Recipe, sim: Simulation) -> None:
    """Loss and metric must give one number per example."""
    rows = slice(0, 2)
    x = batches.inputs(sim.federation.source.x[rows], next(iter(sim.model.initial.values())).dtype)
    with torch.no_grad():
        out = sim.model({n: t[None] for n, t in sim.model.initial.items()}, x[None])[0]
    for what, name, rule in (
        ("training.loss", recipe.training.loss, sim.task.criterion),
        ("evaluation.metric", recipe.evaluation.metric, sim.task.metric),
    ):
        try:
            found = rule(out, sim.federation.source.y[rows])
        except (RuntimeError, TypeError, ValueError, IndexError) as e:
            raise ConfigError(f"{what}={name!r}: fails on outputs of shape {tuple(out.shape)}: {e}") from None
        if not isinstance(found, Tensor) or found.shape != (2,):
            shape = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise ConfigError(f"{what}={name!r}: must give one number per example, gave {shape} for two examples")


def chosen_device(name: str) -> str:
    """`auto` is a GPU where there is one."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise ConfigError(f"--device {name}: possible are auto, cpu, cuda, cuda:N")
    number = int(name.partition(":")[2] or 0)
    if name != "cpu" and number >= torch.cuda.device_count():
        raise ConfigError(f"--device {name}: this machine has {torch.cuda.device_count()} CUDA devices")
    return name


@dataclass(frozen=True)
class Client:
    """One client with the model it ended up with."""

    id: int
    simulation: Simulation
    deployed: Params  # a stack of one

    def predict(self, x: Tensor | np.ndarray[Any, Any]) -> Tensor:
        """Outputs `[B, K]` for inputs `[B, ...]`, by the rule of the client's method."""
        sim = self.simulation
        batch = torch.as_tensor(x).to(sim.device)
        batch = batches.inputs(batch, next(iter(sim.model.initial.values())).dtype)
        with torch.no_grad():
            return sim.algorithm.predict(sim.model, self.deployed, batch[None])[0].cpu()

    @property
    def module(self) -> nn.Module:
        """The client's own model as an ordinary module; adaptive inference is `predict`'s alone."""
        shapes = self.simulation.model.info.shapes
        more = [n for n in self.deployed if n not in shapes and not n.startswith(("global/", "base_entropy/"))]
        if more:
            raise ValueError(f"client {self.id} answers with more than one module ({more[0]}, ...); use predict")
        own = {n: t[0] for n, t in self.deployed.items() if n in self.simulation.model.info.shapes}
        return self.simulation.model.client(own)


def _numbered(name: str, names: tuple[str, ...]) -> int:
    """The client of this name."""
    if name in names:
        return names.index(name)
    known = f"possible are {', '.join(names[:20])}" if names else "the clients of these data have no names"
    raise ValueError(f"client {name!r}: no such client; {known}{', ...' if len(names) > 20 else ''}")


@dataclass(frozen=True)
class MethodResult:
    """One method and seed: the numbers, and a model for every client."""

    label: str
    seed: int
    summary: dict[str, Any]
    rows: list[Row]
    clients: list[Row]
    simulation: Simulation
    evaluations: final.Arrays  # `evaluation/final.py` has the names
    profile: Row | None = None  # where the time went, if that was asked; `sim/profile.py` has the parts

    def client(self, id: int | str) -> Client:
        """A client by its number, or by its name where the data have names."""
        sim = self.simulation
        if isinstance(id, str):
            return self.client(_numbered(id, sim.federation.names))
        if not 0 <= id < sim.federation.everybody:
            raise ValueError(f"client {id}: this federation has clients 0..{sim.federation.everybody - 1}")
        if sim.owners is not None and sim.ranks.rank not in (0, int(sim.owners[id])):
            raise ValueError(f"client {id}: rank {sim.ranks.rank} does not hold its state; rank 0 does")
        ready = sim.ready if id < sim.federation.num_clients else sim.joined
        return Client(id, sim, ready(sim.model, torch.tensor([id])))

    def save(self, folder: Path) -> None:
        """Write what `Result.load` needs and people read."""
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "metrics.jsonl").exists():  # a run writes it row by row
            (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in self.rows))
        with (folder / "clients.csv").open("w", newline="") as f:
            table = csv.DictWriter(f, list(self.clients[0]))
            table.writeheader()
            table.writerows(self.clients)
        final.save(self.evaluations, folder / "evaluations.npz")
        state = folder / "checkpoint"
        state.mkdir(exist_ok=True)
        sim = self.simulation
        save_file({n: t.cpu().contiguous() for n, t in sim.server.items()}, state / "server.safetensors")
        for name, store in (("clients", sim.store), ("known", sim.known)):  # what they keep; what the server knows
            if store.home != folder / "store" / name:
                store.save(state / f"{name}.safetensors")
        path = dataclasses.asdict(sim.layout) | {"module_per_client": sim.model.whole, "store": _housed(sim)}
        (state / "engine.json").write_text(json.dumps(path) + "\n")
        (folder / "summary.json").write_text(json.dumps(self.summary, indent=1) + "\n")
        self.save_profile(folder)

    def save_profile(self, folder: Path) -> None:
        """Write where the time went, if that was asked."""
        if self.profile is not None:
            (folder / "profile.json").write_text(json.dumps(self.profile, indent=1) + "\n")


def _housed(sim: Simulation) -> Row:
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


@dataclass(frozen=True)
class Result:
    """All methods and seeds of a run."""

    recipe: Recipe
    methods: dict[tuple[str, int], MethodResult]

    def __getitem__(self, label: str) -> MethodResult:
        """A method by label, of the first seed."""
        return self.of(label)

    def of(self, label: str, seed: int | None = None) -> MethodResult:
        """A method by label, of this seed or the first."""
        for (name, s), found in self.methods.items():
            if name == label and seed in (None, s):
                return found
        raise KeyError(f"{label!r}: this run has {', '.join(f'{n} (seed {s})' for n, s in self.methods)}")

    def client(self, id: int | str) -> Client:
        """A client of a run with a single method; with several, `result[label].client(id)`."""
        if len({label for label, _ in self.methods}) > 1:
            raise ValueError(f"the run has several methods; choose one: result[label].client({id!r})")
        return next(iter(self.methods.values())).client(id)

    def times(self) -> tuple[list[str], list[list[str]], str]:
        """Where the time went: columns, a row for each method and seed that was timed, and a note."""
        several = len({seed for _, seed in self.methods}) > 1
        names = {f"{m.label}, seed {m.seed}" if several else m.label: m for m in self.methods.values()}
        return *profile.table({name: m.profile for name, m in names.items() if m.profile}), profile.NOTE

    def table(self) -> str:
        """The comparison as Markdown."""
        return report.markdown([m.summary for m in self.methods.values()])

    def save(self, folder: str | Path) -> None:
        """Write a run folder."""
        out = claimed(folder)
        _begin(out, self.recipe, next((m.simulation.federation for m in self.methods.values()), None))
        for (label, seed), m in self.methods.items():
            m.save(out / label / f"seed-{seed}")
        _write_reports(out, list(self.methods.values()))

    @classmethod
    def load(cls, folder: str | Path, device: str = "cpu") -> Self:
        """Read a run folder back, with every client ready to predict."""
        out = Path(folder)
        if not (out / "recipe.toml").is_file():
            raise ConfigError(f"{out}: not a run folder, it has no recipe.toml")
        recipe = config.load(out / "recipe.toml")
        divided = _divisions(recipe, out / SPLIT)
        methods = {}
        for method in recipe.algorithms:
            for path in sorted((out / method.label).glob("seed-*"), key=lambda p: int(p.name.removeprefix("seed-"))):
                if (path / "summary.json").is_file():
                    found = _loaded(recipe, method, path, device, divided)
                    methods[found.label, found.seed] = found
        return cls(recipe, methods)


SPLIT = "split.json"  # a partition that came from a file, in the run folder


def _begin(folder: Path, recipe: Recipe, fed: Federation | None) -> None:
    """Write what a run folder begins with: the recipe, and the partition where that came from a file."""
    (folder / "recipe.toml").write_text(config.dump(config.anchored(recipe)))
    if recipe.data.from_file and fed is not None:
        artefact.save(fed, folder / SPLIT, {"partition": recipe.data.partition})


def _divisions(recipe: Recipe, split: Path) -> Callable[[int], Federation]:
    """The federation of each seed, on one copy of the data, by the run folder's own partition file if it has one."""
    if recipe.data.from_file and split.is_file():
        recipe = replace(recipe, data=replace(recipe.data, partition=str(split)))

    @functools.cache
    def data() -> Source:
        return whole(source(recipe), recipe.data.corruption, recipe.data.corruption_severity)

    return functools.cache(lambda seed: federation(recipe.with_seed(seed), data()))


def _loaded(
    recipe: Recipe, method: Method, path: Path, device: str, divided: Callable[[int], Federation]
) -> MethodResult:
    summary = json.loads((path / "summary.json").read_text())
    fed = divided(summary["seed"])
    for what, now in (("split", fed.digest()), ("data", fed.source.digest)):
        if (then := summary["hashes"].get(what, now)) != now:
            raise ConfigError(
                f"{path}: the {what} of this run had hash {then}, now it is {now}: what data.dataset="
                f"{recipe.data.dataset!r} or data.partition={recipe.data.partition!r} names has changed since"
            )
    sim = simulation(recipe.with_seed(summary["seed"]), method, device=device, fed=fed)
    sim.server = load_file(path / "checkpoint" / "server.safetensors", device=device)
    sim.store, sim.known = (
        _reopened(store, path, name, sim.device) for name, store in (("clients", sim.store), ("known", sim.known))
    )
    sim.played = len(sim.schedule)
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    sim.rows = rows
    with (path / "clients.csv").open(newline="") as f:
        clients = [{k: v if k in final.TOLD else _number(v) for k, v in r.items()} for r in csv.DictReader(f)]
    scored = final.load(path / "evaluations.npz")
    return MethodResult(method.label, summary["seed"], summary, rows, clients, sim, scored)


def _number(text: str) -> float | int:
    return int(text) if text.isdecimal() else float(text)


def _reopened(store: Store, path: Path, name: str, device: torch.device) -> Store:
    """The rows of a finished run: its own files, or what was written of them."""
    if (path / "store" / name / "store.json").is_file():
        return Store.opened(store.fresh, path / "store" / name, device=device)
    if (file := path / "checkpoint" / f"{name}.safetensors").is_file():
        store.load(file)
    return store


def run(
    recipe: Recipe | str | Path | Mapping[str, Any] | None = None,
    *overrides: str,
    out: str | Path | None = None,
    seeds: Sequence[int] = (),
    device: str = "auto",
    watch: Watch | None = None,
    timed: bool = False,
    store: str = "auto",
    memory: float | None = None,
) -> Result:
    """Run a recipe (a path, a shipped name, a dict; None: the demo) and return its results.

    With `out`, a run folder is written as the run goes on. `timed` keeps account of where the time goes. Processes
    that `torchrun` started share the work; the first of them writes, watches and ends up with every client's model.
    `store` (auto, device, host, disk) and `memory` (GiB) are `Simulation`'s; on disk, rows are in the run folder.
    """
    if store not in STORES:
        raise ConfigError(f"--store {store}: possible are {', '.join(STORES)}")
    if memory is not None and not memory > 0:
        raise ConfigError(f"--memory {memory:g}: must be greater than 0")
    if not isinstance(recipe, Recipe):
        recipe = config.load(recipe, overrides)
    elif overrides:
        raise ValueError("overrides go with a path, a name or a dict, not with a finished Recipe")
    place = ranks.device_of(chosen_device(device))
    with ranks.joined(place) as world:
        folder = None if out is None or world.rank else checked(out)
        asked = recipe
        data = world.in_turn(lambda: source(asked))
        recipe, feds = resolved(recipe, seeds or (recipe.training.seed,), place, data)
        if folder is not None:
            _begin(claimed(folder), recipe, next(iter(feds.values())))
        done: dict[tuple[str, int], MethodResult] = {}
        asked_shift = recipe.evaluation.shift
        for seed, fed in feds.items():
            shift = None if asked_shift == "none" else draw(fed, asked_shift, seed, recipe.evaluation.draws)
            for method in recipe.algorithms:
                home = None if folder is None else folder / method.label / f"seed-{seed}"
                clock = profile.Clock(place) if timed else profile.NoClock()
                told = None if world.rank else watch
                done[method.label, seed] = _play(
                    recipe.with_seed(seed), method, fed, shift, place, home, told, world, clock, store, memory
                )
                if folder is not None:
                    _write_reports(folder, list(done.values()))
    return Result(recipe, done)


def _play(
    recipe: Recipe,
    method: Method,
    fed: Federation,
    drawn: Shift | None,
    place: str,
    home: Path | None,
    watch: Watch | None,
    world: ranks.Alone,
    clock: profile.NoClock,
    store: str,
    memory: float | None,
) -> MethodResult:
    begun = time.perf_counter()
    spill = None if home is None else home / "store"
    where: dict[str, Any] = {"store": spill or temporary() if store == "disk" else store, "spill": spill}
    where |= {"device": place, "ranks": world, "clock": clock, "memory": memory}
    with clock("setup"):
        sim = simulation(recipe, method, fed=fed, shift=drawn, **where)
    log = None
    if home is not None:
        home.mkdir(parents=True)
        log = (home / "metrics.jsonl").open("w")

    def on_round(row: Row) -> None:
        if log is not None:
            log.write(json.dumps(row) + "\n")
            log.flush()
        if watch is not None:
            watch(method.label, recipe.training.seed, len(sim.schedule), row)

    try:
        sim.run(on_round)
    finally:
        if log is not None:
            log.close()
    scored = sim.evaluations()
    clients, shift = sim.clients_table(scored)
    summary = _summary(recipe, method, sim, scored, shift, time.perf_counter() - begun)
    if more := final.robustness(scored, recipe.evaluation):
        summary["robustness"] = more
    with clock("waiting"):
        sim.collect()
    found = MethodResult(method.label, recipe.training.seed, summary, sim.rows, clients, sim, scored)
    if home is not None:
        with clock("files"):
            found.save(home)
    if spent := clock.report():
        found = replace(found, profile=profile.joined(world.gather(spent)))
        if home is not None:
            found.save_profile(home)
    return found


def _summary(
    recipe: Recipe, method: Method, sim: Simulation, scored: final.Arrays, shift: Row | None, seconds: float
) -> dict[str, Any]:
    clients, totals = sim.federation.num_clients, sim.totals
    last = next(r for r in reversed(sim.rows) if "personal" in r)
    newcomers = sim.newcomers(scored)
    return {
        "algorithm": method.name,
        "label": method.label,
        "seed": recipe.training.seed,
        "rounds": recipe.training.num_rounds,
        "evaluated_model": sim.algorithm.evaluated(recipe.evaluation.when),
        "settings": config.settings(method.algorithm),
        "environment": environment(sim),
        "accuracy": {"personal": last["personal"], "global": last.get("global")}
        | ({} if newcomers is None else {"unseen": newcomers}),
        "shift": shift,
        "communication": {
            "up_bytes": totals.up_bytes,
            "down_bytes": totals.down_bytes,
            "mib_per_client": (totals.up_bytes + totals.down_bytes) / clients / 2**20,
            "paper_mib_per_client": totals.paper_bytes / clients / 2**20,
        },
        "compute": {"flops_per_client": totals.flops / clients, "dense_flops_per_client": totals.dense_flops / clients},
        "time": {"seconds": seconds, "seconds_per_round": seconds / recipe.training.num_rounds}
        | ({} if sim.ranks.size == 1 else {"ranks": sim.ranks.size, "balance": sim.balance}),
        "hashes": sim.hashes(),
    }


def environment(sim: Simulation) -> dict[str, Any]:
    """Where a result was made."""
    gpu = sim.device.type == "cuda"
    return {
        "device": str(sim.device),
        "hardware": torch.cuda.get_device_name(sim.device) if gpu else f"{cpu()}, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "version": personafl.__version__,
        "commit": _commit(),
    }


def cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _commit() -> str | None:
    """The commit this code stands at, if it runs from a checkout."""
    git = Path(__file__).parents[2] / ".git"
    try:
        head = (git / "HEAD").read_text().strip()
        return (git / head[5:]).read_text().strip() if head.startswith("ref: ") else head
    except OSError:
        return None


def checked(folder: str | Path) -> Path:
    """A folder a run may be written to: absent or empty, in a place that can be written; nothing is created."""
    out = Path(folder)
    if out.exists() and not out.is_dir():
        raise ConfigError(f"--out {out}: that is a file")
    if out.is_dir() and any(out.iterdir()):
        raise ConfigError(
            f"--out {out}: the folder is not empty; choose another, or continue with: personafl resume {out}"
        )
    home = next(p for p in (out, *out.absolute().parents) if p.exists())
    if not home.is_dir() or not os.access(home, os.W_OK | os.X_OK):
        raise ConfigError(f"--out {out}: {home} cannot be written to")
    return out


def claimed(folder: str | Path) -> Path:
    """The same folder, created."""
    out = checked(folder)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise ConfigError(f"--out {out}: cannot be created: {e.strerror}") from None
    return out


def _write_reports(folder: Path, done: list[MethodResult]) -> None:
    summaries = [m.summary for m in done]
    (folder / "table.md").write_text(report.markdown(summaries) + "\n")
    several = len({m.seed for m in done}) > 1
    named = {f"{m.label}, seed {m.seed}" if several else m.label: m for m in done}
    curves = {name: m.rows for name, m in named.items()}
    evaluations = {name: m.evaluations for name, m in named.items()}
    (folder / "report.html").write_text(report.html(summaries, curves, title=folder.name, evaluations=evaluations))
