"""Playing a recipe: every seed and method, told to whoever watches and written as it goes on."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from personafl import config
from personafl.config import Method, Recipe
from personafl.core.errors import UserError
from personafl.core.faults import Faults
from personafl.core.settings import shortened, typed
from personafl.core.types import Metric, Training
from personafl.data import Federation
from personafl.data.shift import Shift, draw
from personafl.evaluation import final, report, rounds
from personafl.evaluation.settings import Evaluation
from personafl.experiment import build, run_folder
from personafl.experiment.build import resolved, simulation, source
from personafl.experiment.environment import environment
from personafl.experiment.progress import ProgressDisplay, Watch
from personafl.experiment.results import MethodResult, Result, write_reports
from personafl.experiment.run_folder import begin, checked, claimed
from personafl.models import StackedModel
from personafl.sim import execution_plan, profile, ranks
from personafl.sim.execution_plan import temporary
from personafl.sim.machine import Machine, chosen_device
from personafl.sim.simulator import Simulation
from personafl.sim.state import Row

MOST_THREADS = 1024
STORES = ("auto", "device", "host", "disk")


def run(
    recipe: Recipe | str | Path | Mapping[str, Any] | None = None,
    *overrides: str,
    data: Any = None,
    model: Any = None,
    algorithms: Any = None,
    training: Training | Mapping[str, Any] | None = None,
    evaluation: Evaluation | Mapping[str, Any] | None = None,
    faults: Faults | Mapping[str, Any] | None = None,
    seeds: Sequence[int] = (),
    device: str = "auto",
    out: str | Path | None = None,
    watch: Watch | None = None,
    quiet: bool | None = None,
    timed: bool = False,
    store: str = "auto",
    memory: float | None = None,
    threads: int | None = None,
    spread: str | None = None,
) -> Result:
    """Run a comparison and return its results.

    `recipe` is a path, a shipped name or a dict, and `overrides` are those of the command line, `"data.alpha=0.1"`.
    The other parts may be given in Python, and replace the recipe's:

        data         a name, a dict of settings, arrays (x, y) or (x, y, clients), a list of clients' PyTorch data sets,
                     a Hugging Face or Flower FederatedDataset, a Source or a Federation
        model        a name, a dict of settings, an nn.Module, or a class or function that makes one
        algorithms   names, dicts, Algorithm objects, or a dict of them by label
        training     a dict of settings or Training(...)
        evaluation   a dict of settings or Evaluation(...)
        faults       a dict of settings or Faults(...)

    Without a recipe and on other data than the demo's, settings that are not given go by the data.

    Progress is shown in a notebook and on a terminal, not with `quiet=True` or where `watch` is told of every stage;
    `quiet=False` shows it anywhere.

    With `out`, a run folder is written as the run goes on. `timed` keeps account of where the time goes. Processes
    that `torchrun` started share the work; the first of them writes, watches and ends up with every client's model.
    `store` (auto, device, host, disk) and `memory` (GiB) are `Machine`'s; on disk, rows are in the run folder.
    `threads` are those of each process, by default as many as PyTorch has; the results do not depend on them.
    `spread` (std, ci) is what ± is over seeds in the tables of the run folder; `Result.table` has it too.
    """
    if store not in STORES:
        raise UserError(f"--store {store}: possible are {', '.join(STORES)}")
    if memory is not None and not memory > 0:
        raise UserError(f"--memory {memory:g}: must be greater than 0")
    report.spread_of((), spread)
    if threads is not None and not 1 <= threads <= MOST_THREADS:
        raise UserError(f"--threads {threads}: must be at least 1 and at most {MOST_THREADS}")
    numbers = _seeds(seeds)
    given = {"data": data, "model": model, "algorithms": algorithms, "training": training, "evaluation": evaluation}
    given |= {"faults": faults}
    recipe = _recipe(recipe, overrides, given)
    place = ranks.device_of(chosen_device(device))
    with execution_plan.threads(threads or torch.get_num_threads()), ranks.process_group(place) as world:
        folder = None if out is None or world.rank else checked(out)
        asked = recipe
        found = world.in_turn(lambda: source(asked))
        recipe, feds = resolved(recipe, numbers or (recipe.training.seed,), place, found)
        if folder is not None:
            begin(claimed(folder), recipe, next(iter(feds.values())), list(feds))
        done: dict[tuple[str, int], MethodResult] = {}
        asked_shift = recipe.evaluation.shift
        runs = len(feds) * len(recipe.algorithms)
        hidden = True if world.rank or watch is not None else quiet
        with ProgressDisplay(runs, len(feds), recipe.training.num_rounds, quiet=hidden) as progress:
            told = None if world.rank else watch or progress
            for seed, fed in feds.items():
                shift = None if asked_shift == "none" else draw(fed, asked_shift, seed, recipe.evaluation.draws)
                network = build.model(recipe.with_seed(seed), fed.source)
                for method in recipe.algorithms:
                    home = None if folder is None else run_folder.home(folder, method.label, seed)
                    clock = profile.Clock(place) if timed else profile.NoClock()
                    mine = recipe.with_seed(seed)
                    done[method.label, seed] = _play(
                        mine, method, fed, network, shift, place, home, told, world, clock, store, memory
                    )
                    if folder is not None:
                        write_reports(folder, list(done.values()), run_folder.missing(folder), spread)
    return Result(recipe, done)


def _seeds(seeds: Any) -> tuple[int, ...]:
    """The seeds of a run, as whole numbers that differ."""
    if isinstance(seeds, (int, float, str)):
        raise UserError(f"seeds={seeds!r}: must be a list; one seed is [{seeds}], the first three are range(3)")
    found = tuple(typed("seeds", s, int) for s in seeds)
    if len(set(found)) < len(found) or any(s < 0 for s in found):
        raise UserError(f"seeds={list(found)}: must differ and not be negative")
    return found


def _recipe(recipe: Any, overrides: Sequence[str], given: Mapping[str, Any]) -> Recipe:
    if isinstance(recipe, Recipe):
        if overrides or any(v is not None for v in given.values()):
            raise UserError("a finished Recipe takes no overrides and no parts; give a path, a name or a dict")
        return recipe
    if not (recipe is None or isinstance(recipe, (str, Path, Mapping))):
        raise UserError(
            f"recipe={shortened(recipe)}: must be a path, a shipped name or a dict; data, model and algorithms of "
            "one's own go by name, as in run(data=..., model=...)"
        )
    for override in overrides:
        if not isinstance(override, str):
            raise UserError(f'override {shortened(override)}: must be text, as "data.alpha=0.1"')
    if isinstance(recipe, str) and "=" in recipe:
        recipe, overrides = None, (recipe, *overrides)
    return config.load(recipe, overrides, given)


def _play(
    recipe: Recipe,
    method: Method,
    fed: Federation,
    network: StackedModel,
    drawn: Shift | None,
    place: str,
    home: Path | None,
    watch: Watch | None,
    world: ranks.SingleProcess,
    clock: profile.NoClock,
    store: str,
    memory: float | None,
) -> MethodResult:
    begun = time.perf_counter()
    spill = None if home is None else home / "store"
    machine = Machine(
        device=place,
        store=spill or temporary() if store == "disk" else store,
        spill=spill,
        memory=memory,
        ranks=world,
        clock=clock,
    )
    with clock("setup"):
        sim = simulation(recipe, method, fed=fed, network=network, machine=machine, shift=drawn)
    log = None
    if home is not None:
        home.mkdir(parents=True)
        log = (home / "metrics.jsonl").open("w")

    def on_round(row: Row) -> None:
        if log is not None:
            log.write(json.dumps(row) + "\n")
            log.flush()
        if watch is not None:
            told = row | ({"metric": _about(sim.task.metric)} if "personal" in row else {})
            watch(method.label, recipe.training.seed, len(sim.schedule), told)

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
    if alike := sim.masks():
        summary["masks"] = alike
    with clock("waiting"):
        sim.collect()
    found = MethodResult(method.label, recipe.training.seed, summary, sim.rows, clients, sim, scored)
    if home is not None:
        with clock("files"):
            found.save(home)
    if spent := clock.report():
        found = replace(found, profile=profile.merged(world.gather(spent)))
        if home is not None:
            found.save_profile(home)
    return found


def _about(metric: Metric) -> dict[str, str]:
    return {"name": metric.name, "better": metric.better}


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
        "rounds": sim.rounds,
        "evaluated_model": sim.algorithm.evaluated(recipe.evaluation.when),
        "settings": config.settings(method.algorithm),
        "lr": sim.training.lr,
        "environment": environment(sim),
        "metric": _about(sim.task.metric),
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
        "time": {"seconds": seconds, "seconds_per_round": seconds / sim.rounds}
        | ({} if sim.ranks.size == 1 else {"ranks": sim.ranks.size, "balance": sim.placement.balance}),
        "hashes": sim.hashes(),
    } | _of_rounds(sim)


def _of_rounds(sim: Simulation) -> dict[str, Any]:
    """What the rows of a run come to, as far as there is anything to say."""
    stopped = next((r["stopped"] for r in sim.rows if "stopped" in r), None)
    which = sim.task.metric.better
    found = {
        "faults": rounds.faults(sim.rows, sim.faulty.nonzero().flatten().tolist()),
        "diverged": rounds.divergence(sim.rows, len(sim.state.diverged), sim.federation.num_clients),
        "validation": rounds.by_validation(sim.rows, which),
        "stopped": stopped and {"by": stopped, "on": rounds.judged_by(sim.rows), "rounds": sim.rounds},
        "rounds_to_target": rounds.to_target(sim.rows, sim.evaluation.targets, which),
    }
    return {k: v for k, v in found.items() if v}
