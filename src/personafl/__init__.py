"""Personalised federated learning: simulate, compare, deploy."""

from __future__ import annotations

from personafl.algorithms import (
    ALGORITHMS,
    APFL,
    DMPFL,
    FML,
    MOON,
    Ditto,
    DMPFLPlus,
    FedAvg,
    FedAvgFT,
    FedMMD,
    FedNova,
    FedPer,
    FedProx,
    FedRep,
    LGFedAvg,
    Local,
    Scaffold,
)
from personafl.core.algorithm import Algorithm
from personafl.core.types import Evaluation, Training
from personafl.data import Federation, Source, arrays
from personafl.experiment import Result, run
from personafl.models import StackedModel
from personafl.sim.simulator import Simulation

__version__ = "0.1.0"

__all__ = [
    "ALGORITHMS",
    "APFL",
    "DMPFL",
    "FML",
    "MOON",
    "Algorithm",
    "DMPFLPlus",
    "Ditto",
    "Evaluation",
    "FedAvg",
    "FedAvgFT",
    "FedMMD",
    "FedNova",
    "FedPer",
    "FedProx",
    "FedRep",
    "Federation",
    "LGFedAvg",
    "Local",
    "Result",
    "Scaffold",
    "Simulation",
    "Source",
    "StackedModel",
    "Training",
    "arrays",
    "run",
]
