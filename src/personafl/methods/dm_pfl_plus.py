"""DM-PFL+: DM-PFL whose clients choose between their own and the global model for each sample.

Zhang, Zhou, Tong, et al., "Hitchhiking Generic Federated Learning for Efficient Shift-Robust Personalization",
KDD 2023, Algorithm 4. The rule of inference is `plugins/per_sample.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from personafl.core.plugin_points import Inference
from personafl.methods.dm_pfl import DMPFL


@dataclass(frozen=True, kw_only=True)
class DMPFLPlus(DMPFL):
    """DM-PFL with adaptive inference: per sample, theta_c or theta_g (Algorithm 4)."""

    inference: str | Inference = "per-sample"
