"""`personafl doctor`."""

from __future__ import annotations

import dataclasses
import os
import sys
import warnings
from pathlib import Path
from typing import Annotated

import typer

from personafl import config
from personafl.cli.terminal import console, find_own_code, split
from personafl.core.errors import UserError
from personafl.version import __version__


def doctor(
    name: Annotated[
        str | None,
        typer.Argument(
            help="A recipe, by path or name, or a model, by name or as package.module:Class: also say how clients run "
            "through the model, and why. Its code is imported."
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Overrides, section.key=value.")
    ] = None,
) -> None:
    """Say what this machine offers, and check that the engine works on it."""
    import numpy
    import torch

    from personafl import experiment
    from personafl.evaluation.settings import Evaluation
    from personafl.simulation.machine import Machine

    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none"
    data = os.environ.get("PERSONAFL_DATA", "not set")
    for label, value in (
        ("personafl", __version__),
        ("python", sys.version.split()[0]),
        ("torch", torch.__version__),
        ("numpy", numpy.__version__),
        ("cpu", f"{experiment.cpu()}, {torch.get_num_threads()} threads"),
        ("gpu", gpu),
        ("$PERSONAFL_DATA", data),
    ):
        console.print(f"{label:16} {value}")
    recipe = config.load(
        None, ["training.num_rounds=1", "training.local_epochs=1", "training.precision=float64", "algorithms=fedavg"]
    )
    fed = experiment.federation(recipe)
    recipe = dataclasses.replace(recipe, evaluation=Evaluation(shift="none"))
    servers = []
    for chunk in (0, 1):
        machine = Machine(device=experiment.chosen_device("auto"), chunk=chunk)
        sim = experiment.simulation(recipe, recipe.algorithms[0], fed=fed, machine=machine)
        sim.step()
        servers.append(sim.server)
    gap = max(float((servers[0][n] - servers[1][n]).abs().max()) for n in servers[0])
    console.print(f"{'engine':16} one stack against single clients: largest difference {gap:.1e} in float64")
    if gap > 1e-9:
        raise UserError("the stacked engine and single clients disagree on this machine; please report it")
    name, changes = split(name, overrides)
    if name or changes:
        _tell_execution(name, changes)
    else:
        console.print(f"{'model':16} personafl doctor RECIPE or MODEL says how clients run through a model, and why")


MEANING = {
    "stacked": "All clients of a stack go through the model in one call.",
    "layer by layer": "Each client goes through the model by itself, with the layers of the stacked form.",
    "client by client": "Each client goes through the module as it was given, by itself.",
}
"""What the ways of going through a model mean."""


def _tell_execution(name: str | None, changes: list[str]) -> None:
    """How clients would go through a recipe's model on this machine, or through a model on the demo's data."""
    from personafl import experiment
    from personafl.models import MODELS
    from personafl.simulation.machine import Machine

    find_own_code()
    if name is not None and (":" in name or name in MODELS):
        name, changes = None, [f"model.name={name}", *changes]
    elif name is not None and name not in config.recipes() and not Path(name).is_file():
        known = [*config.recipes(), *MODELS]
        raise UserError(f"doctor {name}: {config.unknown('recipe or model', name, known)}, or package.module:Class")
    recipe = config.load(name, changes)
    device = experiment.chosen_device("auto")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*slower than a stack")  # it is said below
        recipe, feds = experiment.resolved(recipe, (recipe.training.seed,), device)
    fed = feds[recipe.training.seed]
    sim = experiment.simulation(recipe, recipe.algorithms[0], fed=fed, machine=Machine(device=device))
    execution = sim.model.execution
    console.print(f"{'model':16} {recipe.model.named} on {fed.source.name}")
    console.print(f"{'execution':16} {execution}")
    console.print(f"{'':16} {MEANING[execution.mode]}")
    if sim.model.slower_than_stack:
        console.print(f"{'':16} This is slower than a stack of all clients; the results are right.")
