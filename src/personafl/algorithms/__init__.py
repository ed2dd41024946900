"""The methods by name."""

from __future__ import annotations

from personafl.algorithms.apfl import APFL
from personafl.algorithms.ditto import Ditto
from personafl.algorithms.dm_pfl import DMPFL, DMPFLPlus
from personafl.algorithms.fedavg import FedAvg, FedAvgFT
from personafl.algorithms.fednova import FedNova
from personafl.algorithms.fedper import FedPer, LGFedAvg
from personafl.algorithms.fedprox import FedProx
from personafl.algorithms.fedrep import FedRep
from personafl.algorithms.fml import FML
from personafl.algorithms.local_only import Local
from personafl.algorithms.moon import MOON, FedMMD
from personafl.algorithms.scaffold import Scaffold
from personafl.core.algorithm import Algorithm

__all__ = [
    "ALGORITHMS",
    "APFL",
    "DMPFL",
    "FML",
    "MOON",
    "DMPFLPlus",
    "Ditto",
    "FedAvg",
    "FedAvgFT",
    "FedMMD",
    "FedNova",
    "FedPer",
    "FedProx",
    "FedRep",
    "LGFedAvg",
    "Local",
    "Scaffold",
]

ALGORITHMS: dict[str, type[Algorithm]] = {
    "local": Local,
    "fedavg": FedAvg,
    "fedavg-ft": FedAvgFT,
    "fedprox": FedProx,
    "lg-fedavg": LGFedAvg,
    "fedper": FedPer,
    "fedrep": FedRep,
    "ditto": Ditto,
    "apfl": APFL,
    "scaffold": Scaffold,
    "fednova": FedNova,
    "moon": MOON,
    "fedmmd": FedMMD,
    "fml": FML,
    "dm-pfl": DMPFL,
    "dm-pfl-plus": DMPFLPlus,
}
