"""What fills the slots of any method. A new filling is a file here, or anywhere, and a line that registers it."""

from __future__ import annotations

from functools import partial

from personafl.core.slots import INFERENCE, INHERIT, ROBUST, WEIGHTS
from personafl.slots.contribution import Contribution
from personafl.slots.inherited import Inherit
from personafl.slots.label_prior import EstimatedPrior, RunningPrior
from personafl.slots.mixture import Mixture
from personafl.slots.per_sample import PerSample
from personafl.slots.robust import Robust

__all__ = [
    "INFERENCE",
    "INHERIT",
    "ROBUST",
    "WEIGHTS",
    "Contribution",
    "EstimatedPrior",
    "Inherit",
    "Mixture",
    "PerSample",
    "Robust",
    "RunningPrior",
]

WEIGHTS["cowa"] = Contribution.around
WEIGHTS["cowa-gradient"] = partial(Contribution.around, prediction=False)
WEIGHTS["cowa-prediction"] = partial(Contribution.around, gradient=False)
WEIGHTS["cowa-server"] = partial(Contribution.around, at_server=True)
WEIGHTS["cowa-all"] = partial(Contribution.around, everywhere=True)
WEIGHTS["cowa-literal"] = partial(Contribution.around, literal=True, everywhere=True)
INHERIT["hpm"] = Inherit
ROBUST["rule"] = Robust
INFERENCE["per-sample"] = PerSample
INFERENCE["batch"] = EstimatedPrior
INFERENCE["stream"] = RunningPrior
INFERENCE["mixture"] = Mixture
