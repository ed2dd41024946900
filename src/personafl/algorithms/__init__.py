"""The methods by name. The module of each is imported when it is first asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import personafl.slots  # noqa: F401  # what may fill the slots of any method is registered there
from personafl.core.lazy import Registry, attributes

if TYPE_CHECKING:
    from personafl.algorithms.apfl import APFL
    from personafl.algorithms.balanced import FedLC, FedRoD
    from personafl.algorithms.co_pfl import COPFL
    from personafl.algorithms.ditto import Ditto
    from personafl.algorithms.dm_pfl import DMPFL, DMPFLPlus
    from personafl.algorithms.fedavg import FedAvg, FedAvgAdaptive, FedAvgFT
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
    "LGFedAvg",
    "LocalOnly",
    "Scaffold",
]

ALGORITHMS: Registry[type[Algorithm]] = Registry(
    {
        "local": "personafl.algorithms.local_only:LocalOnly",
        "fedavg": "personafl.algorithms.fedavg:FedAvg",
        "fedavg-ft": "personafl.algorithms.fedavg:FedAvgFT",
        "fedavg-adaptive": "personafl.algorithms.fedavg:FedAvgAdaptive",
        "fedprox": "personafl.algorithms.fedprox:FedProx",
        "feddst": "personafl.algorithms.feddst:FedDST",
        "lg-fedavg": "personafl.algorithms.fedper:LGFedAvg",
        "fedper": "personafl.algorithms.fedper:FedPer",
        "fedrep": "personafl.algorithms.fedrep:FedRep",
        "ditto": "personafl.algorithms.ditto:Ditto",
        "apfl": "personafl.algorithms.apfl:APFL",
        "fedpac": "personafl.algorithms.fedpac:FedPAC",
        "fedselect": "personafl.algorithms.fedselect:FedSelect",
        "scaffold": "personafl.algorithms.scaffold:Scaffold",
        "fednova": "personafl.algorithms.fednova:FedNova",
        "moon": "personafl.algorithms.moon:MOON",
        "fedmmd": "personafl.algorithms.moon:FedMMD",
        "fedfu": "personafl.algorithms.fusing:FedFu",
        "flda": "personafl.algorithms.fusing:FLDA",
        "fml": "personafl.algorithms.fml:FML",
        "fedlc": "personafl.algorithms.balanced:FedLC",
        "fed-rod": "personafl.algorithms.balanced:FedRoD",
        "fedphp": "personafl.algorithms.fedphp:FedPHP",
        "co-pfl": "personafl.algorithms.co_pfl:COPFL",
        "fedpews": "personafl.algorithms.fedpews:FedPeWS",
        "fedpews-fixed": "personafl.algorithms.fedpews:FedPeWSFixed",
        "dm-pfl": "personafl.algorithms.dm_pfl:DMPFL",
        "dm-pfl-plus": "personafl.algorithms.dm_pfl:DMPFLPlus",
    }
)

_WHERE = ALGORITHMS.modules


def __getattr__(name: str) -> Any:
    return attributes(__name__, _WHERE, name)


def __dir__() -> list[str]:
    return __all__
