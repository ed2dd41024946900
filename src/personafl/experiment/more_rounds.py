"""Going on beyond the end of a run: which methods can, and why others cannot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from personafl.config import Method, Recipe, components
from personafl.core.errors import UserError
from personafl.core.settings import typed
from personafl.data import Federation
from personafl.engine import dry_run
from personafl.experiment import checkpoint, checkpoint_files, run_folder
from personafl.experiment.run_folder import Asked
from personafl.simulation.ranks import SingleProcess

KEY = "training.num_rounds"


def recipe(old: Recipe, overrides: Sequence[str]) -> Recipe:
    """The recipe of a run, with the one override it can go on under."""
    rounds = old.training.num_rounds
    for override in overrides:
        key, is_, value = override.partition("=") if isinstance(override, str) else (override, "", "")
        if key != KEY or not is_:
            raise UserError(f"resume {override}: a run goes on as it began; {KEY}=N may be given, for more rounds")
        rounds = typed(KEY, int(value) if value.strip().isdecimal() else value, int)
    if rounds < old.training.num_rounds:
        raise UserError(f"{KEY}={rounds}: the run is one of {old.training.num_rounds} rounds; give as many or more")
    return replace(old, training=replace(old.training, num_rounds=rounds))


def check(longer: Recipe, folder: Path, told: Asked, feds: Mapping[int, Federation]) -> None:
    """Refuse more rounds where the stages that were played are not those the longer run begins with."""
    for seed, fed in feds.items():
        mine = longer.with_seed(seed)
        for method in longer.algorithms:
            home = run_folder.home(folder, method.label, seed)
            saved = checkpoint.usable(home, SingleProcess())
            if saved and (why := _refused(mine, told.rounds, method, fed, saved[0])):
                raise UserError(
                    f"{method.label} with seed {seed} cannot be continued to {KEY}={longer.training.num_rounds}. {why}"
                )


def _refused(longer: Recipe, rounds: int, method: Method, fed: Federation, saved: checkpoint_files.Saved) -> str:
    """Return why a run cannot be continued, as a sentence; empty if it can."""
    if saved.folder.name == checkpoint_files.FINAL and saved.manifest["played_by"] > 1:
        return "The run was computed by several processes and has finished; such a run cannot be made longer."
    state = saved.manifest["state"]
    if state["rounds"] < saved.manifest["asked"]:
        return f"Its training was stopped after {state['rounds']} rounds."
    network, examples = components.model(longer, fed.source), int(fed.sizes("train")[: fed.num_clients].sum())
    (before, _, small), (after, needs_all_rounds, large) = (
        dry_run.stages(
            method.algorithm,
            network,
            replace(longer.training, num_rounds=n),
            num_clients=fed.num_clients,
            examples=examples,
        )
        for n in (rounds, longer.training.num_rounds)
    )
    if needs_all_rounds:
        return "Its training depends on the number of rounds."
    if small != large:
        return "The shape of its state depends on the number of rounds."
    played = before[: saved.played]
    if played != after[: saved.played]:
        here, there = next((s, a) for a, s in zip(after, played, strict=False) if a != s)
        if here.phase == there.phase:
            return "Its schedule depends on the number of rounds."
        return f"It has already completed the stage {here.phase!r}, which follows the last round."
    return ""
