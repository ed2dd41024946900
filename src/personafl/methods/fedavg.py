"""FedAvg: one model for all, the weighted mean of the clients' models.

McMahan, Moore, Ramage, Hampson, Aguera y Arcas, "Communication-Efficient Learning of Deep Networks from Decentralized
Data", AISTATS 2017.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from personafl.core.algorithm import Algorithm


@dataclass(frozen=True, kw_only=True)
class FedAvg(Algorithm):
    """One model for all: the mean of the clients' models, weighted by their number of examples."""

    evaluates: ClassVar[str] = "the global model"
