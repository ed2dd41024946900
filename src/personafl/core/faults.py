"""What goes wrong with clients in a simulation, and with which of them: a function of seed, round and client."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from personafl.core import rng
from personafl.core.settings import Section, setting

Fault = Literal["nan", "inf", "shape", "names", "stale", "duplicate", "empty", "sign-flip", "noise"]


@dataclass(frozen=True)
class Faults(Section):
    """What goes wrong with clients; the `[faults]` section of a recipe."""

    section: ClassVar[str] = "faults"

    drop_rate: float = setting(0.0, "probability that a sampled client vanishes before it sends anything")
    straggler_ratio: float = setting(0.0, "probability that a client's result comes after the end of its round")
    late: Literal["drop", "stale"] = setting("drop", "what becomes of late results: left out, or used a round later")
    faulty_ratio: float = setting(0.0, "share of all clients that are faulty, in every round they take part in")
    fault: Fault = setting("nan", "what faulty clients send")
    strength: float = setting(1.0, "size of a sign-flip's or noise's update, as a multiple of the client's own")

    @classmethod
    def arranged(cls, given: dict[str, Any]) -> dict[str, Any]:
        """Settings as they were meant: a bare `nan` or `inf` of the command line is read as a number."""
        return {k: str(v) if k == "fault" and isinstance(v, float) else v for k, v in given.items()}

    def check(self) -> None:
        self.hold(
            [
                ("drop_rate", 0 <= self.drop_rate <= 1, "in [0, 1]"),
                ("straggler_ratio", 0 <= self.straggler_ratio <= 1, "in [0, 1]"),
                ("faulty_ratio", 0 <= self.faulty_ratio <= 1, "in [0, 1]"),
                ("strength", self.strength > 0, "greater than 0"),
            ]
        )

    @property
    def active(self) -> bool:
        """Whether any client fails."""
        return bool(self.drop_rate or self.straggler_ratio or self.faulty_ratio)

    @property
    def damage(self) -> bool:
        """Whether there are faulty clients that send what a server can see to be no upload of this round."""
        return self.faulty_ratio > 0 and not self.attack

    @property
    def attack(self) -> bool:
        """Whether faulty clients send what a server cannot tell from an honest upload by itself."""
        return self.fault in ("sign-flip", "noise")

    def dropped(self, seed: int, rnd: int, ids: Tensor) -> Tensor:
        """Which of these clients vanish in a round: `[C]` bool."""
        return _drawn(self.drop_rate, seed, "dropped", rnd, ids)

    def straggling(self, seed: int, rnd: int, ids: Tensor) -> Tensor:
        """Whose results come late: `[C]` bool."""
        return _drawn(self.straggler_ratio, seed, "straggling", rnd, ids)

    def faulty(self, seed: int, clients: int) -> Tensor:
        """Which of so many clients are faulty, `[clients]` bool; with a larger ratio the same ones and more."""
        out = torch.zeros(clients, dtype=torch.bool)
        count = round(self.faulty_ratio * clients)
        if count:
            words = rng.bits(rng.key(seed, "faulty", torch.arange(clients)), 1).squeeze(1)
            out[words.argsort(stable=True)[:count]] = True
        return out


def _drawn(probability: float, seed: int, purpose: str, rnd: int, ids: Tensor) -> Tensor:
    if not probability:
        return torch.zeros(len(ids), dtype=torch.bool)
    return rng.uniform(rng.key(seed, purpose, rnd, ids), 1).squeeze(1) < probability
