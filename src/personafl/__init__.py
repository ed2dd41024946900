"""Personalised federated learning: simulate, compare, deploy. Each name is imported when it is first asked for."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from personafl.core.lazy import attributes
from personafl.version import __version__

if "TORCHELASTIC_RUN_ID" in os.environ:
    # It notes which process started this one, before the import of PyTorch takes seconds.
    from personafl.simulation import heartbeat as _heartbeat  # noqa: F401

if TYPE_CHECKING:
    from personafl.authoring import Algorithm
    from personafl.config import Data, ModelChoice
    from personafl.core.errors import UserError
    from personafl.core.faults import Faults
    from personafl.core.types import Metric, Training
    from personafl.data import Federation, Source, arrays
    from personafl.evaluation.settings import Evaluation
    from personafl.experiment.reproduction import Reproduction, reproduce, reproduce_all
    from personafl.experiment.results import Result
    from personafl.experiment.running import resume, run
    from personafl.experiment.trials import Sweep
    from personafl.experiment.tuning import sweep
    from personafl.methods import (
        ALGORITHMS,
        APFL,
        COPFL,
        DMPFL,
        FLDA,
        FML,
        MOON,
        Ditto,
        DMPFLPlus,
        FedAvg,
        FedAvgAdaptive,
        FedAvgFT,
        FedDST,
        FedFu,
        FedLC,
        FedMMD,
        FedNova,
        FedPAC,
        FedPer,
        FedPeWS,
        FedPeWSFixed,
        FedPHP,
        FedProx,
        FedRep,
        FedRoD,
        FedSelect,
        LGFedAvg,
        LocalOnly,
        Scaffold,
    )
    from personafl.models import StackedModel
    from personafl.plugins import Inherit, Robust
    from personafl.simulation.machine import Machine
    from personafl.simulation.simulator import Simulation

_WHERE: dict[str, tuple[str, ...]] = {
    "personafl.config": ("Data", "ModelChoice"),
    "personafl.authoring": ("Algorithm",),  # with the slots, which any method may have filled
    "personafl.core.errors": ("UserError",),
    "personafl.core.faults": ("Faults",),
    "personafl.core.types": ("Metric", "Training"),
    "personafl.data": ("Federation", "Source", "arrays"),
    "personafl.evaluation.settings": ("Evaluation",),
    "personafl.models": ("StackedModel",),
    "personafl.plugins": ("Inherit", "Robust"),
    "personafl.experiment.results": ("Result",),
    "personafl.experiment.running": ("resume", "run"),
    "personafl.experiment.trials": ("Sweep",),
    "personafl.experiment.reproduction": ("Reproduction", "reproduce", "reproduce_all"),
    "personafl.experiment.tuning": ("sweep",),
    "personafl.simulation.machine": ("Machine",),
    "personafl.simulation.simulator": ("Simulation",),
}


__all__ = [
    "ALGORITHMS",
    "APFL",
    "COPFL",
    "DMPFL",
    "FLDA",
    "FML",
    "MOON",
    "Algorithm",
    "DMPFLPlus",
    "Data",
    "Ditto",
    "Evaluation",
    "Faults",
    "FedAvg",
    "FedAvgAdaptive",
    "FedAvgFT",
    "FedDST",
    "FedFu",
    "FedLC",
    "FedMMD",
    "FedNova",
    "FedPAC",
    "FedPHP",
    "FedPeWS",
    "FedPeWSFixed",
    "FedPer",
    "FedProx",
    "FedRep",
    "FedRoD",
    "FedSelect",
    "Federation",
    "Inherit",
    "LGFedAvg",
    "LocalOnly",
    "Machine",
    "Metric",
    "ModelChoice",
    "Reproduction",
    "Result",
    "Robust",
    "Scaffold",
    "Simulation",
    "Source",
    "StackedModel",
    "Sweep",
    "Training",
    "UserError",
    "__version__",
    "arrays",
    "reproduce",
    "reproduce_all",
    "resume",
    "run",
    "sweep",
]

# All that is nowhere else is a method, or their names.
_ELSEWHERE = {"__version__", *(n for names in _WHERE.values() for n in names)}
_WHERE["personafl.methods"] = tuple(n for n in __all__ if n not in _ELSEWHERE)


def __getattr__(name: str) -> Any:
    return attributes(__name__, _WHERE, name)


def __dir__() -> list[str]:
    return __all__
