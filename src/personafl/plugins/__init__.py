"""What fills the slots of any method. A new filling is a file here, or anywhere, and a line that registers it."""

from __future__ import annotations

from functools import partial

from personafl.core.plugin_points import INFERENCE, INHERIT, ROBUST, WEIGHTS
from personafl.plugins.contribution import Contribution
from personafl.plugins.inherited import Inherit
from personafl.plugins.label_prior import EstimatedPrior, RunningPrior
from personafl.plugins.mixture import Mixture
from personafl.plugins.per_sample import PerSample
from personafl.plugins.robust import Robust

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
WEIGHTS["cowa-all"] = partial(Contribution.around, everywhere=True)
INHERIT["hpm"] = Inherit
ROBUST["rule"] = Robust
INFERENCE["per-sample"] = PerSample
INFERENCE["batch"] = EstimatedPrior
INFERENCE["stream"] = RunningPrior
INFERENCE["mixture"] = Mixture
