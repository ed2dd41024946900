"""The methods by name."""

from __future__ import annotations

from personafl.algorithms.ditto import Ditto
from personafl.algorithms.dm_pfl import DMPFL, DMPFLPlus
from personafl.algorithms.fedavg import FedAvg, FedAvgFT
from personafl.algorithms.fedrep import FedRep
from personafl.algorithms.local_only import Local
from personafl.core.algorithm import Algorithm

ALGORITHMS: dict[str, type[Algorithm]] = {
    "local": Local,
    "fedavg": FedAvg,
    "fedavg-ft": FedAvgFT,
    "fedrep": FedRep,
    "ditto": Ditto,
    "dm-pfl": DMPFL,
    "dm-pfl-plus": DMPFLPlus,
}
