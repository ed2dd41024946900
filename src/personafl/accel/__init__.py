"""What exists only for speed: CUDA graphs, streams and Triton kernels, and the switch that turns all of it off.

With `PERSONAFL_ACCEL=0` in the environment nothing of this is used, nor the fused patterns and the gradients in closed
form that `models` has for speed. Results are the same up to rounding, and runs take longer.
"""

from __future__ import annotations

import importlib
import os
from types import ModuleType

ENABLED = os.environ.get("PERSONAFL_ACCEL", "1") != "0"


def load_kernels(name: str) -> ModuleType | None:
    """Return one of this package's modules of Triton kernels; None without Triton, or where they are switched off."""
    if not ENABLED:
        return None
    try:
        return importlib.import_module(f"personafl.accel.{name}")
    except ImportError:  # no Triton, so no GPU it would run on
        return None
