"""The methods by name."""

from __future__ import annotations

from personafl.algorithms.apfl import APFL
from personafl.algorithms.co_pfl import COPFL
from personafl.algorithms.ditto import Ditto
from personafl.algorithms.dm_pfl import DMPFL, DMPFLPlus
from personafl.algorithms.fedavg import FedAvg, FedAvgFT
from personafl.algorithms.feddst import FedDST
from personafl.algorithms.fednova import FedNova
from personafl.algorithms.fedpac import FedPAC
from personafl.algorithms.fedper import FedPer, LGFedAvg
from personafl.algorithms.fedpews import FedPeWS, FedPeWSFixed
from personafl.algorithms.fedphp import FedPHP
from personafl.algorithms.fedprox import FedProx
from personafl.algorithms.fedrep import FedRep
from personafl.algorithms.fedselect import FedSelect
from personafl.algorithms.fml import FML
from personafl.algorithms.fusing import FLDA, FedFu
from personafl.algorithms.local_only import LocalOnly
from personafl.algorithms.moon import MOON, FedMMD
from personafl.algorithms.scaffold import Scaffold
from personafl.core.algorithm import Algorithm

__all__ = [
    "ALGORITHMS",
    "APFL",
    "COPFL",
    "DMPFL",
    "FLDA",
    "FML",
    "MOON",
    "DMPFLPlus",
    "Ditto",
    "FedAvg",
    "FedAvgFT",
    "FedDST",
    "FedFu",
    "FedMMD",
    "FedNova",
    "FedPAC",
    "FedPHP",
    "FedPeWS",
    "FedPeWSFixed",
    "FedPer",
    "FedProx",
    "FedRep",
    "FedSelect",
    "LGFedAvg",
    "LocalOnly",
    "Scaffold",
]

ALGORITHMS: dict[str, type[Algorithm]] = {
    "local": LocalOnly,
    "fedavg": FedAvg,
    "fedavg-ft": FedAvgFT,
    "fedprox": FedProx,
    "feddst": FedDST,
    "lg-fedavg": LGFedAvg,
    "fedper": FedPer,
    "fedrep": FedRep,
    "ditto": Ditto,
    "apfl": APFL,
    "fedpac": FedPAC,
    "fedselect": FedSelect,
    "scaffold": Scaffold,
    "fednova": FedNova,
    "moon": MOON,
    "fedmmd": FedMMD,
    "fedfu": FedFu,
    "flda": FLDA,
    "fml": FML,
    "fedphp": FedPHP,
    "co-pfl": COPFL,
    "fedpews": FedPeWS,
    "fedpews-fixed": FedPeWSFixed,
    "dm-pfl": DMPFL,
    "dm-pfl-plus": DMPFLPlus,
}
