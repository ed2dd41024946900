"""What a pool of clients gives back of a stage."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from personafl.core.types import Params, Payload, Row
from personafl.engine.accounting import Totals


@dataclass
class StackResult:
    """What a stack of clients sent in a stage.

    Args:
        senders: The clients whose updates the server takes.
        upload: Their updates, `[C, ...]` in the same order.
        sums: The sums over the updates, in their place.
        before: Scores of the models that clients downloaded, where clients are scored right after training.
        after: Scores of the models they trained; None for a client that is scored with `trained`.
        trained: The models they predict with after training, `[C, ...]`.
        is_reduced: Whether the pool called `ServerRound.reduce` itself, so that there are sums instead of updates.
        is_late: Whether these are updates of the stage before, which came after its end.
    """

    senders: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    upload: Payload = field(default_factory=dict)
    sums: Params = field(default_factory=dict)
    before: list[Tensor] = field(default_factory=list)
    after: list[Tensor | None] = field(default_factory=list)
    trained: Params = field(default_factory=dict)
    is_reduced: bool = False
    is_late: bool = False


@dataclass
class StageReport:
    """What a stage came to over all clients of a pool, wherever they are.

    Args:
        clients: How many clients were at work.
        totals: What the stage cost, but for what the pool has added to the run's totals itself.
        losses: The mean training loss of each client that trained.
        columns: Further columns of the stage's row that say what went wrong; those without a value are left out.
        diverged: Clients whose training diverged.
    """

    clients: int
    totals: Totals
    losses: list[float]
    columns: Row
    diverged: set[int]
