"""What fills the slots every method has, as settings: how clients are weighed, and a model inherited over sessions.

The parts behind them stand around a method (`core/compose.py` puts them there), so that any method can have them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

WEIGHTS = ("examples", "uniform", "cowa", "cowa-gradient", "cowa-prediction", "cowa-server")
"""What a client counts: its examples, one, or its contribution as CO-PFL measures it (`core/contribution.py`)."""

TRANSFERS = ("mmd", "kd", "l2", "prox")
MOMENTA = ("mu-a", "mu-b", "mu-c")
ANSWERS = ("inherited", "personalised", "both")


@dataclass(frozen=True)
class Inherit:
    """A private model inherited from session to session, which teaches the one just downloaded (FedPHP)."""

    transfer: str = field(
        default="mmd", metadata={"help": "how it teaches: features (mmd, l2), outputs (kd) or weights (prox)"}
    )
    weight: float = field(default=0.01, metadata={"help": "share of the teaching in the loss (lambda)"})
    temperature: float = field(default=4.0, metadata={"help": "of the softened outputs (tau), for kd"})
    momentum: str = field(
        default="mu-a", metadata={"help": "how much is kept: grows with selections, constant, or with rounds to 1"}
    )
    rate: float = field(default=0.9, metadata={"help": "the momentum's final (mu-a) or constant (mu-b) value (mu)"})
    answers: str = field(default="inherited", metadata={"help": "which model predicts"})

    def __post_init__(self) -> None:
        for name, possible in (("transfer", TRANSFERS), ("momentum", MOMENTA), ("answers", ANSWERS)):
            if getattr(self, name) not in possible:
                raise ValueError(f"{name}={getattr(self, name)!r}: possible are {', '.join(possible)}")
        for name in ("weight", "rate"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be in [0, 1]")
        if self.temperature <= 0:
            raise ValueError(f"temperature={self.temperature}: must be greater than 0")
