"""The methods by name. The module of each is imported when it is first asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import personafl.plugins  # noqa: F401  # what may fill the slots of any method is registered there
from personafl.core.lazy import Registry, attributes

if TYPE_CHECKING:
    from personafl.core.algorithm import Algorithm
    from personafl.methods.apfl import APFL
    from personafl.methods.co_pfl import COPFL
    from personafl.methods.ditto import Ditto
    from personafl.methods.dm_pfl import DMPFL
    from personafl.methods.dm_pfl_plus import DMPFLPlus
    from personafl.methods.fed_rod import FedRoD
    from personafl.methods.fedavg import FedAvg
    from personafl.methods.fedavg_adaptive import FedAvgAdaptive
    from personafl.methods.fedavg_ft import FedAvgFT
    from personafl.methods.feddst import FedDST
    from personafl.methods.fedfu import FedFu
    from personafl.methods.fedlc import FedLC
    from personafl.methods.fedmmd import FedMMD
    from personafl.methods.fednova import FedNova
    from personafl.methods.fedpac import FedPAC
    from personafl.methods.fedper import FedPer
    from personafl.methods.fedpews import FedPeWS
    from personafl.methods.fedpews_fixed import FedPeWSFixed
    from personafl.methods.fedphp import FedPHP
    from personafl.methods.fedprox import FedProx
    from personafl.methods.fedrep import FedRep
    from personafl.methods.fedselect import FedSelect
    from personafl.methods.flda import FLDA
    from personafl.methods.fml import FML
    from personafl.methods.lg_fedavg import LGFedAvg
    from personafl.methods.local import LocalOnly
    from personafl.methods.moon import MOON
    from personafl.methods.scaffold import Scaffold

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
        "local": "personafl.methods.local:LocalOnly",
        "fedavg": "personafl.methods.fedavg:FedAvg",
        "fedavg-ft": "personafl.methods.fedavg_ft:FedAvgFT",
        "fedavg-adaptive": "personafl.methods.fedavg_adaptive:FedAvgAdaptive",
        "fedprox": "personafl.methods.fedprox:FedProx",
        "feddst": "personafl.methods.feddst:FedDST",
        "lg-fedavg": "personafl.methods.lg_fedavg:LGFedAvg",
        "fedper": "personafl.methods.fedper:FedPer",
        "fedrep": "personafl.methods.fedrep:FedRep",
        "ditto": "personafl.methods.ditto:Ditto",
        "apfl": "personafl.methods.apfl:APFL",
        "fedpac": "personafl.methods.fedpac:FedPAC",
        "fedselect": "personafl.methods.fedselect:FedSelect",
        "scaffold": "personafl.methods.scaffold:Scaffold",
        "fednova": "personafl.methods.fednova:FedNova",
        "moon": "personafl.methods.moon:MOON",
        "fedmmd": "personafl.methods.fedmmd:FedMMD",
        "fedfu": "personafl.methods.fedfu:FedFu",
        "flda": "personafl.methods.flda:FLDA",
        "fml": "personafl.methods.fml:FML",
        "fedlc": "personafl.methods.fedlc:FedLC",
        "fed-rod": "personafl.methods.fed_rod:FedRoD",
        "fedphp": "personafl.methods.fedphp:FedPHP",
        "co-pfl": "personafl.methods.co_pfl:COPFL",
        "fedpews": "personafl.methods.fedpews:FedPeWS",
        "fedpews-fixed": "personafl.methods.fedpews_fixed:FedPeWSFixed",
        "dm-pfl": "personafl.methods.dm_pfl:DMPFL",
        "dm-pfl-plus": "personafl.methods.dm_pfl_plus:DMPFLPlus",
    }
)

_WHERE = ALGORITHMS.modules


def __getattr__(name: str) -> Any:
    return attributes(__name__, _WHERE, name)


def __dir__() -> list[str]:
    return __all__
