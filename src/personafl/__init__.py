"""Personalised federated learning: simulate, compare, deploy."""

from __future__ import annotations

from personafl.algorithms import ALGORITHMS
from personafl.algorithms.ditto import Ditto
from personafl.algorithms.dm_pfl import DMPFL, DMPFLPlus
from personafl.algorithms.fedavg import FedAvg, FedAvgFT
from personafl.algorithms.fedrep import FedRep
from personafl.algorithms.local_only import Local
from personafl.core.algorithm import Algorithm
from personafl.core.types import Evaluation, Training
from personafl.data import Federation, Source, arrays
from personafl.experiment import Result, run
from personafl.models import StackedModel
from personafl.sim.simulator import Simulation

__version__ = "0.1.0"

__all__ = [
    "ALGORITHMS",
    "DMPFL",
    "Algorithm",
    "DMPFLPlus",
    "Ditto",
    "Evaluation",
    "FedAvg",
    "FedAvgFT",
    "FedRep",
    "Federation",
    "Local",
    "Result",
    "Simulation",
    "Source",
    "StackedModel",
    "Training",
    "arrays",
    "run",
]
