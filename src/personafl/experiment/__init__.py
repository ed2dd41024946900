"""From a recipe to results: the parts put together, and the run folder."""

from personafl.experiment.build import federation, model, note_clients, resolved, simulation, source
from personafl.experiment.environment import cpu, environment
from personafl.experiment.results import Client, MethodResult, Result
from personafl.experiment.run_folder import checked
from personafl.experiment.running import resume, run
from personafl.sim.machine import chosen_device

__all__ = [
    "Client",
    "MethodResult",
    "Result",
    "checked",
    "chosen_device",
    "cpu",
    "environment",
    "federation",
    "model",
    "note_clients",
    "resolved",
    "resume",
    "run",
    "simulation",
    "source",
]
