"""All that the author of a method needs, in one place: `docs/new-method.md` explains it.

from personafl.authoring import Algorithm, ClientState, Turn, setting, whole
"""

from __future__ import annotations

from personafl.core import rng, tree
from personafl.core.algorithm import Algorithm
from personafl.core.criteria import cross_entropy, divergence, entropy
from personafl.core.errors import UserError
from personafl.core.local_work import (
    ClientState,
    DataPass,
    GradientPass,
    LocalWork,
    Loss,
    Pull,
    StateUpdate,
    Turn,
    own_loss,
    whole,
)
from personafl.core.optim import SGD, Adam, Optimizer
from personafl.core.settings import setting
from personafl.core.tree import choose
from personafl.core.types import (
    Batch,
    Criterion,
    Download,
    Masked,
    Model,
    ModelInfo,
    Moves,
    Params,
    Payload,
    Round,
    Setup,
    Stage,
    Sweep,
    Task,
    per_example,
)
from personafl.plugins.wrapper import MethodWrapper, TrainingWrapper
from personafl.sparse.masks import top_k

__all__ = [
    "SGD",
    "Adam",
    "Algorithm",
    "Batch",
    "ClientState",
    "Criterion",
    "DataPass",
    "Download",
    "GradientPass",
    "LocalWork",
    "Loss",
    "Masked",
    "MethodWrapper",
    "Model",
    "ModelInfo",
    "Moves",
    "Optimizer",
    "Params",
    "Payload",
    "Pull",
    "Round",
    "Setup",
    "Stage",
    "StateUpdate",
    "Sweep",
    "Task",
    "TrainingWrapper",
    "Turn",
    "UserError",
    "choose",
    "cross_entropy",
    "divergence",
    "entropy",
    "own_loss",
    "per_example",
    "rng",
    "setting",
    "top_k",
    "tree",
    "whole",
]
