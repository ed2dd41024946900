"""`personafl doctor`."""

from __future__ import annotations

import dataclasses
import os
import sys

from personafl import config
from personafl.cli.terminal import console
from personafl.core.errors import UserError
from personafl.version import __version__


def doctor() -> None:
    """Say what this machine offers, and check that the engine works on it."""
    import numpy
    import torch

    from personafl import experiment
    from personafl.evaluation.settings import Evaluation
    from personafl.sim.machine import Machine

    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none"
    data = os.environ.get("PERSONAFL_DATA", "not set")
    for name, value in (
        ("personafl", __version__),
        ("python", sys.version.split()[0]),
        ("torch", torch.__version__),
        ("numpy", numpy.__version__),
        ("cpu", f"{experiment.cpu()}, {torch.get_num_threads()} threads"),
        ("gpu", gpu),
        ("$PERSONAFL_DATA", data),
    ):
        console.print(f"{name:16} {value}")
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
