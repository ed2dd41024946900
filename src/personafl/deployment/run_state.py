"""What a deployed server carries from one stage to the next."""

from __future__ import annotations

from dataclasses import dataclass, field

from personafl.core.types import Row
from personafl.engine.accounting import Totals


@dataclass
class State:
    """What the server carries from one stage to the next, but for its tensors."""

    rounds: int
    played: int = 0
    totals: Totals = field(default_factory=Totals)
    evaluation_bytes: int = 0  # sent outside of rounds: for scores, for final models, to newcomers at the end
    rows: int = 0  # that are complete
    metrics: int = 0  # bytes of metrics.jsonl that are theirs
    without_update: int = 0  # rounds with uploads after which the model was what it had been
    last_without_update: int = 0  # how many of them there are since the last update
    last_wanted_uploads: bool = False  # whether clients were to send updates in the last of them
    reason: str = ""  # why there was none, in the last of them
    pending: Row | None = None  # a row whose scores are to come
    left: dict[str, float] = field(default_factory=dict)
    judged: dict[str, Row] = field(default_factory=dict)  # scores of the last cohort right after training
    seconds: float = 0.0
    finished: bool = False
