"""Slow references of the methods, by their names in the registry."""

from __future__ import annotations

from tests.references.balanced import FedAvgAdaptive, FedLC, FedRoD
from tests.references.base import Reference
from tests.references.baselines import FedAvg, FedAvgFT, FedPer, FedProx, FedRep, LGFedAvg, LocalOnly
from tests.references.contributing import COPFL
from tests.references.correcting import MOON, FedMMD, FedNova, Scaffold
from tests.references.fusing import FLDA, FedFu
from tests.references.inheriting import FedPHP
from tests.references.selecting import FedDST, FedPAC, FedSelect
from tests.references.two_models import APFL, FML, Ditto
from tests.references.warming import FedPeWS, FedPeWSFixed

REFERENCES: dict[str, type[Reference]] = {
    "local": LocalOnly,
    "fedavg": FedAvg,
    "fedavg-ft": FedAvgFT,
    "fedavg-adaptive": FedAvgAdaptive,
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
    "feddst": FedDST,
    "fedselect": FedSelect,
    "fedpac": FedPAC,
    "fedphp": FedPHP,
    "co-pfl": COPFL,
    "fedpews": FedPeWS,
    "fedpews-fixed": FedPeWSFixed,
    "fedlc": FedLC,
    "fed-rod": FedRoD,
    "fedfu": FedFu,
    "flda": FLDA,
}
