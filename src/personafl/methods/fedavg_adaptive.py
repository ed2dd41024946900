"""FedAvg with adaptive inference.

It combines two plug-ins, `plugins/prior_free.py` and `plugins/label_prior.py`; no paper has it under this name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from personafl.core.algorithm import Algorithm
from personafl.core.plugin_points import Inference


@dataclass(frozen=True, kw_only=True)
class FedAvgAdaptive(Algorithm):
    """FedAvg trained without clients' label frequencies, which are estimated from the inputs that are predicted.

    The local losses leave out how often each class occurs at a client. A client predicts with the global model, for
    the mix of classes that it estimates from a batch of unlabelled inputs.
    """

    evaluates: ClassVar[str] = "the global model"
    class_labels_for: ClassVar[str] = "class frequencies"

    inference: str | Inference = "batch"
    prior_free: bool = True
