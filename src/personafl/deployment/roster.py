"""Who takes part: names that clients gave themselves, and the numbers the server gave them for good."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor

from personafl.data.client_files import natural_order


@dataclass
class Member:
    """One client, as the server knows it."""

    name: str
    number: int
    node: int = 0  # of the transport
    key: str = ""  # what the transport knows it by for good
    sizes: dict[str, int] = field(default_factory=dict)  # examples by split
    acknowledged: int = -1  # the last stage of it that counts
    lost: int = 0  # how often what it kept was gone
    anew: bool = False  # whether it begins as a newcomer the next time
    closed: bool = False  # whether it has its final model
    scores: dict[str, Any] = field(default_factory=dict)  # of that


class Roster:
    """All clients so far; the first `num_clients` take part in rounds, the others are newcomers."""

    def __init__(self, num_clients: int, members: Iterable[Member] = ()) -> None:
        self._count, self.members = num_clients, list(members)

    @property
    def num_clients(self) -> int:
        return self._count

    def train_sizes(self, ids: Tensor) -> Tensor:
        """Examples these clients train on; none of those that have not come yet."""
        known = {m.number: m.sizes.get("train", 0) for m in self.members}
        return torch.tensor([known.get(int(i), 0) for i in ids], dtype=torch.int64)

    def named(self, name: str) -> Member | None:
        return next((m for m in self.members if m.name == name), None)

    def numbered(self, number: int) -> Member | None:
        return self.members[number] if 0 <= number < len(self.members) else None

    def add(self, names: Iterable[str]) -> list[Member]:
        """New clients, in natural order of their names."""
        new = [Member(name, 0) for name in sorted(set(names), key=natural_order)]
        for member in new:
            member.number = len(self.members)
            self.members.append(member)
        return new

    def told(self) -> list[dict[str, Any]]:
        return [dataclasses.asdict(m) for m in self.members]

    @classmethod
    def read(cls, num_clients: int, told: Iterable[dict[str, Any]]) -> Self:
        return cls(num_clients, (Member(**m) for m in told))
