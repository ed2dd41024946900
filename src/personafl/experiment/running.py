"""Playing a recipe: every seed and method, told to whoever watches and written as it goes on."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from personafl import config
from personafl.config import Method, Recipe, components
from personafl.config.components import SPLIT, source
from personafl.core import torch_state
from personafl.core.errors import UserError
from personafl.core.faults import Faults
from personafl.core.settings import shortened, typed
from personafl.core.types import Metric, Row, Summary, Training
from personafl.data import Federation
from personafl.data.shift import Shift, draw
from personafl.engine.checks import check_calibration
from personafl.evaluation import final, rounds
from personafl.evaluation.settings import Evaluation
from personafl.experiment import checkpoint, checkpoint_files, checkpoint_interval, model_files, more_rounds, run_folder
from personafl.experiment.checkpoint import Checkpoints
from personafl.experiment.checkpoint_files import Saved
from personafl.experiment.environment import environment
from personafl.experiment.progress import ProgressDisplay, Watch
from personafl.experiment.results import MethodResult, Result, began, check_same, divisions, loaded, write_reports
from personafl.experiment.row_log import RowLog
from personafl.experiment.run_folder import Conditions, begin, checked, claimed
from personafl.experiment.run_setup import resolved, simulation
from personafl.experiment.stopping import Stopped, StopRequest
from personafl.models import StackedModel
from personafl.simulation import profile, ranks
from personafl.simulation.execution_plan import temporary
from personafl.simulation.machine import Machine, chosen_device
from personafl.simulation.simulator import Simulation
from personafl.storage.files import full_disk_told, remove
from personafl.storage.lock import locked


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
    threads_per_client: int = 1,
    chunk: int = 0,
    spread: str | None = None,
    checkpoint_every: str | int | None = None,
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

    Methods have the settings that the recipe has for them, in every form: names are labels of the recipe or methods,
    a dict's settings stand above the recipe's, and a class is its name. An Algorithm object has its own settings; where
    its optimizer, lr, momentum, weight_decay or grad_clip is None, which means the recipe's, it takes what the recipe
    has for that method, else what [training] has.

    Without a recipe and on other data than the demo's, settings that are not given go by the data.

    Progress is shown in a notebook and on a terminal, not with `quiet=True` or where `watch` is told of every stage;
    `quiet=False` shows it anywhere.

    With `out`, a run folder is written as the run goes on, with checkpoints that `resume` goes on from: every
    `checkpoint_every` rounds (10) or so often ("90s", "5m"), by default about once a minute. `timed` keeps account of
    where the time goes. Processes that `torchrun` started share the work; the first of them watches and ends up with
    every client's model. `store` (auto, device, host, disk) and `memory` (GiB) are `Machine`'s; on disk, rows are in
    the run folder. `threads` are those of each process, by default as many as PyTorch has; the results do not depend
    on them. `threads_per_client` is for rounds of few clients on a CPU of many cores: results go by it in their last
    bits. `chunk` is the most clients in one stack, by default as many as fit; sums of float32 depend on it.
    `spread` (std, ci) is what ± is over seeds in the tables of the run folder; `Result.table` has it too.
    """
    conditions = Conditions(
        device=chosen_device(device),
        store=store,
        memory=memory,
        chunk=chunk,
        threads=torch.get_num_threads() if threads is None else threads,
        threads_per_client=threads_per_client,
        ranks=ranks.launched(),
        timed=timed,
        spread=spread,
        checkpoint_every=checkpoint_every,
    )
    numbers = checked_seeds(seeds)
    recipe = _recipe(recipe, overrides, config.parts(data, model, algorithms, training, evaluation, faults))
    place = ranks.device_of(conditions.device)
    with torch_state.threads(conditions.threads), ranks.process_group(place) as world:
        folder = None if out is None else Path(world.gather(str(out))[0])
        if folder is not None:
            folder = (folder if world.rank else checked(folder)).absolute()  # the working directory may change
        asked = recipe
        found = world.in_turn(lambda: source(asked))
        recipe, feds = resolved(recipe, numbers or (recipe.training.seed,), place, found)
        for method in recipe.algorithms:  # before the first of them is trained
            held = next(iter(feds.values())).splits["validation"].offsets[-1]
            check_calibration(int(held), method.algorithm, recipe.evaluation)
        told = nullcontext() if folder is None else full_disk_told(run_folder.command(folder, world.size))
        with told, claimed(folder) if folder is not None and not world.rank else nullcontext():
            if folder is not None and not world.rank:
                begin(folder, recipe, next(iter(feds.values())), list(feds), conditions)
            return _Comparison(recipe, feds, conditions, place, world, folder).run(watch, quiet)


def resume(
    folder: str | Path,
    *overrides: str,
    data: Any = None,
    model: Any = None,
    algorithms: Any = None,
    training: Training | Mapping[str, Any] | None = None,
    evaluation: Evaluation | Mapping[str, Any] | None = None,
    faults: Faults | Mapping[str, Any] | None = None,
    watch: Watch | None = None,
    quiet: bool | None = None,
) -> Result:
    """Go on with a run that was interrupted, from its last checkpoints, and return its results.

    What is finished is not run again. What the run was given as an object without a dotted path is given again, as to
    `Result.load`. The one override there is, `"training.num_rounds=500"`, goes on beyond the end, for methods whose
    stages so far are those of the longer run.
    """
    out = run_folder.root(Path(folder).absolute())  # the working directory may change
    told = run_folder.read(out)
    run_folder.check_recipe(out, told)
    given = config.parts(data, model, algorithms, training, evaluation, faults)
    recipe = more_rounds.recipe(config.load(out / "recipe.toml", given=given), overrides)
    conditions = told.conditions
    place = ranks.device_of(chosen_device(conditions.device))
    with torch_state.threads(conditions.threads), ranks.process_group(place) as world:
        if world.size != conditions.ranks:
            raise UserError(
                f"{out}: the run is one of {conditions.ranks} processes, here are {world.size}; use "
                f"{run_folder.command(out, conditions.ranks)}"
            )
        with full_disk_told(run_folder.command(out, world.size)), nullcontext() if world.rank else locked(out):
            divided = world.in_turn(lambda: divisions(recipe, out / SPLIT))
            feds = {seed: divided(seed) for seed in told.seeds}
            if recipe.training.num_rounds != told.rounds:
                more_rounds.check(recipe, out, told, feds)
                if not world.rank:
                    run_folder.write_rounds(out, told, recipe.training.num_rounds)
            world.gather(None)
            return _Comparison(recipe, feds, conditions, place, world, out, again=True).run(watch, quiet)


def checked_seeds(seeds: Any) -> tuple[int, ...]:
    """The seeds of a run, as whole numbers that differ."""
    if not isinstance(seeds, (int, float, str, Iterable)):
        raise UserError(f"seeds={shortened(seeds)}: must be a list, as range(3)")
    if isinstance(seeds, (int, float, str)):
        raise UserError(f"seeds={seeds!r}: must be a list; one seed is [{seeds}], the first three are range(3)")
    found = tuple(typed("seeds", s, int) for s in seeds)
    if len(set(found)) < len(found) or any(s < 0 for s in found):
        raise UserError(f"seeds={list(found)}: must differ and not be negative")
    return found


def _recipe(recipe: Any, overrides: Sequence[str], given: Mapping[str, Any]) -> Recipe:
    if isinstance(recipe, Recipe):
        if overrides or given:
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


@dataclass(frozen=True)
class _Comparison:
    """All methods and seeds of a recipe on the way to results."""

    recipe: Recipe
    feds: Mapping[int, Federation]
    conditions: Conditions
    place: str  # the device of this process
    world: ranks.SingleProcess
    folder: Path | None = None
    again: bool = False  # whether some of it may be there already

    def run(self, watch: Watch | None, quiet: bool | None) -> Result:
        recipe, world = self.recipe, self.world
        done: dict[tuple[str, int], MethodResult] = {}
        runs = len(self.feds) * len(recipe.algorithms)
        hidden = True if world.rank or watch is not None else quiet
        with (
            ProgressDisplay(runs, len(self.feds), recipe.training.num_rounds, quiet=hidden) as progress,
            StopRequest(told=not world.rank) if self.folder is not None else nullcontext() as stop,
        ):
            told = None if world.rank else watch or progress
            for seed, fed in self.feds.items():
                part = _Seed(self, seed, fed, told, stop)
                for method in recipe.algorithms:
                    done[method.label, seed] = part.result(method)
                    if self.folder is not None and not world.rank:
                        write_reports(
                            self.folder,
                            list(done.values()),
                            run_folder.missing(self.folder),
                            self.conditions.spread,
                        )
                    if stop is not None and len(done) < runs and (number := max(world.gather(stop.signal))):
                        raise Stopped(number, self.folder)
        return Result(recipe, done)


class _Seed:
    """The methods of one seed, on the same data and first weights."""

    def __init__(
        self, whole: _Comparison, seed: int, fed: Federation, watch: Watch | None, stop: StopRequest | None
    ) -> None:
        self.whole, self.seed, self.fed, self.watch, self.stop = whole, seed, fed, watch, stop
        self.recipe = whole.recipe.with_seed(seed)

    @functools.cached_property
    def shift(self) -> Shift | None:
        asked = self.recipe.evaluation
        if asked.shift == "none":
            return None
        return draw(self.fed.judged_by(asked.split), asked.shift, self.seed, asked.draws)

    @functools.cached_property
    def network(self) -> StackedModel:
        """The model all methods of the seed begin with; in a run that is resumed, that of the methods begun before."""
        network, whole = components.model(self.recipe, self.fed.source), self.whole
        if whole.folder is None:
            return network
        if not whole.world.rank and self.seed == next(iter(whole.feds)):
            model_files.note_unsaved_weights(network)
        same = whole.feds if isinstance(self.recipe.model.name, nn.Module | StackedModel) else (self.seed,)
        homes = [run_folder.home(whole.folder, m.label, seed) for seed in same for m in self.recipe.algorithms]
        home = next((h for h in homes if whole.again and checkpoint.begun(h)), None)
        return network if home is None else began(network, home)

    def result(self, method: Method) -> MethodResult:
        """What a method comes to: played from the first round, gone on with, or read where it is finished."""
        whole = self.whole
        if whole.folder is None:
            return self._played(method, None, [])
        home = run_folder.home(whole.folder, method.label, self.seed)
        rounds = self.recipe.training.num_rounds
        if not whole.again:
            return self._played(method, home, [])
        if whole.world.gather(run_folder.finished(home, rounds))[0]:
            found = loaded(whole.recipe, method, home, whole.place, lambda _: self.fed)
            if not whole.world.rank:
                checkpoint.tidy(home)
            return found
        saved = checkpoint.usable(home, whole.world)
        if not saved:
            if whole.world.gather(checkpoint.begun(home))[0]:
                raise UserError(f"{home}: none of its checkpoints can be used; remove this folder to run it anew")
            if not whole.world.rank:
                remove(home)
        return self._played(method, home, saved)

    def _played(self, method: Method, home: Path | None, saved: Sequence[Saved]) -> MethodResult:
        whole, world = self.whole, self.whole.world
        clock = profile.Clock(whole.place) if whole.conditions.timed else profile.NoClock()
        begun = time.perf_counter()
        with clock("setup"):
            sim = self._simulation(method, home, saved, clock)
            at = checkpoint.restore(sim, saved) if saved else None
            if saved and at is None:
                raise UserError(f"{home}: none of its checkpoints can be used; remove this folder to run it anew")
        run = None if home is None else _Written(home, sim, whole.conditions, at, begun)
        while sim.played < len(sim.schedule):
            row = sim.step()
            if run is not None:
                self._saved(run, row)
            if self.watch is not None:
                told = row | ({"metric": _about(sim.task.metric)} if "personal" in row else {})
                self.watch(method.label, self.seed, len(sim.schedule), told)
        seconds = time.perf_counter() - begun if run is None else run.checkpoints.seconds
        scored = sim.evaluations()
        clients, shift = sim.clients_table(scored)
        summary = _summary(self.recipe, method, sim, scored, shift, seconds)
        if more := final.robustness(scored, self.recipe.evaluation, sim.task.metric):
            summary["robustness"] = more
        if alike := sim.masks():
            summary["masks"] = alike
        with clock("waiting"):
            sim.collect()
        if sim.graph_cache is not None:
            sim.graph_cache.forget()  # results are kept, and the next method needs the room
        found = MethodResult(method.label, self.seed, summary, sim.rows, clients, sim, scored)
        if run is not None:
            with clock("files"):
                run.finish(found)
        if spent := clock.report():
            found = replace(found, profile=profile.merged(world.gather(spent)))
            if home is not None and not world.rank:
                found.save_profile(home)
        return found

    def _simulation(
        self, method: Method, home: Path | None, saved: Sequence[Saved], clock: profile.NoClock
    ) -> Simulation:
        whole, told = self.whole, self.whole.conditions
        spill = None if home is None else checkpoint_files.store_folder(home, whole.world.rank)
        machine = Machine(
            device=whole.place,
            store=spill or temporary() if told.store == "disk" else told.store,
            spill=spill,
            memory=told.memory,
            threads_per_client=told.threads_per_client,
            chunk=told.chunk,
            ranks=whole.world,
            clock=clock,
        )
        network = self.network
        if saved and home is not None:
            for one in saved:
                check_same(home, one, self.recipe, self.fed)
            network = began(network, home)
            kept = "host" if saved[0].store == "disk" else saved[0].store  # those on disk are opened again
            machine = replace(machine, store=kept, plan=saved[0].plan)
        return simulation(self.recipe, method, fed=self.fed, network=network, machine=machine, shift=self.shift)

    def _saved(self, run: _Written, row: Row) -> None:
        """Write a row; save the run where it is time to, or where it was asked to stop, and then stop."""
        run.add(row)
        asked = 0 if self.stop is None else self.stop.signal
        world, sim = self.whole.world, run.checkpoints.sim
        told = world.gather((asked, run.checkpoints.due))
        number = max(n for n, _ in told)
        if told[0][1] or number:
            with sim.clock("files"):
                run.checkpoints.write()
        if number:
            raise Stopped(number, self.whole.folder)


class _Written:
    """What is written of a method and seed as it goes on."""

    def __init__(self, home: Path, sim: Simulation, told: Conditions, at: Saved | None, begun: float) -> None:
        """`at` is the checkpoint it goes on from, `begun` when this process began with it."""
        self.home, world = home, sim.ranks
        with sim.clock("files"):
            if at is None and not world.rank:
                checkpoint.begin(home, sim)
            behind = [] if at is None else checkpoint.prune(home, at, world)
            world.gather(None)
            if not (home / checkpoint_files.FINAL).is_dir():
                raise UserError(
                    f"{home}: rank {world.rank} does not see this folder; processes on several machines need one they "
                    "share for a run folder"
                )
            log = None if world.rank else RowLog(home / checkpoint_files.ROWS, None if at is None else at.rows)
            spent = time.perf_counter() - begun + (0.0 if at is None else at.manifest["seconds"])
            often = checkpoint_interval.every(told.checkpoint_every)
            self.log, self.checkpoints = log, Checkpoints(home, sim, often, log, behind, spent)
            if (
                at is None or at.folder.name == checkpoint_files.FINAL
            ):  # before round one, or before more rounds than asked
                self.checkpoints.write()

    def add(self, row: Row) -> None:
        if self.log is not None:
            self.log.add(row)

    def finish(self, found: MethodResult) -> None:
        """Write what the method came to, and remove what only a run under way needs."""
        sim = self.checkpoints.sim
        if self.log is not None:
            rows = self.log.saved()
            self.log.close()
            number = self.checkpoints.next
            found.save(self.home, number, rows, self.checkpoints.seconds)
            checkpoint.clear(self.home, sim, number)
        sim.ranks.gather(None)


def _about(metric: Metric) -> dict[str, str]:
    return {"name": metric.name, "better": metric.better}


def _summary(
    recipe: Recipe, method: Method, sim: Simulation, scored: final.Arrays, shift: Row | None, seconds: float
) -> Summary:
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


def _of_rounds(sim: Simulation) -> Row:
    """What the rows of a run come to, as far as there is anything to say."""
    stopped = next((r["stopped"] for r in sim.rows if "stopped" in r), None)
    which = sim.task.metric.better
    found = {
        "faults": rounds.faults(sim.rows, sim.faulty.nonzero().flatten().tolist()),
        "diverged": rounds.divergence(sim.rows, len(sim.state.diverged), sim.federation.num_clients),
        "validation": rounds.by_validation(sim.rows, which),
        "stopped": stopped and {"by": stopped, "on": rounds.stopped_on(sim.rows), "rounds": sim.rounds},
        "rounds_to_target": rounds.to_target(sim.rows, sim.evaluation.targets, which),
    }
    return {k: v for k, v in found.items() if v}
