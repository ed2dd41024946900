"""From a recipe to results: the parts put together, and the run folder. Each is imported when it is first asked for."""

from typing import TYPE_CHECKING, Any

from personafl.core.lazy import attributes

if TYPE_CHECKING:
    from personafl.config.components import federation, note_clients
    from personafl.experiment.environment import cpu
    from personafl.experiment.results import Client, MethodResult, Result
    from personafl.experiment.run_folder import checked
    from personafl.experiment.run_setup import resolved, simulation
    from personafl.experiment.running import resume, run
    from personafl.experiment.trials import Sweep
    from personafl.experiment.tuning import sweep
    from personafl.simulation.machine import chosen_device

_WHERE = {
    "personafl.experiment.run_setup": ("resolved", "simulation"),
    "personafl.experiment.environment": ("cpu",),
    "personafl.config.components": ("federation", "note_clients"),
    "personafl.experiment.results": ("Client", "MethodResult", "Result"),
    "personafl.experiment.run_folder": ("checked",),
    "personafl.experiment.running": ("resume", "run"),
    "personafl.experiment.trials": ("Sweep",),
    "personafl.experiment.tuning": ("sweep",),
    "personafl.simulation.machine": ("chosen_device",),
}


def __getattr__(name: str) -> Any:
    return attributes(__name__, _WHERE, name)


def __dir__() -> list[str]:
    return __all__


__all__ = [
    "Client",
    "MethodResult",
    "Result",
    "Sweep",
    "checked",
    "chosen_device",
    "cpu",
    "federation",
    "note_clients",
    "resolved",
    "resume",
    "run",
    "simulation",
    "sweep",
]
