"""How often a run is saved."""

from __future__ import annotations

from dataclasses import dataclass

from personafl.core.errors import UserError

COST = 1 / 50  # of a run's time that checkpoints may take by default


@dataclass(frozen=True)
class Every:
    """How often a run is saved: after so many stages, or so much time."""

    rounds: int = 0
    seconds: float = 0.0
    spared: bool = False  # less often where saving takes long

    def due(self, rounds: int, seconds: float, cost: float) -> bool:
        """Whether it is time, so many stages and seconds after the last one, which took `cost` seconds."""
        if self.rounds:
            return rounds >= self.rounds
        return seconds >= max(self.seconds, cost / COST if self.spared else 0.0)


DEFAULT = Every(seconds=60.0, spared=True)
UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}


def every(told: str | int | None) -> Every:
    """`10` are rounds, `90s`, `5m` and `2h` are time; None is about a minute of work."""
    if told is None:
        return DEFAULT
    text = str(told).strip()
    number, unit = (text[:-1], text[-1:]) if text[-1:] in UNITS else (text, "")
    try:
        amount = float(number) if unit else int(number)
        if isinstance(told, bool) or not 0 < amount < 2**31:
            raise ValueError
    except ValueError:
        raise UserError(f"checkpoint_every={told!r}: must be rounds, such as 10, or time, such as 90s or 5m") from None
    return Every(seconds=amount * UNITS[unit]) if unit else Every(rounds=int(amount))
