"""FedRep: a shared body and a private head.

Collins, Hassani, Mokhtari, Shakkottai, "Exploiting Shared Representations for Personalized Federated
Learning", ICML 2021, Algorithm 1. Choices: the body is averaged by example count, as the authors' code
does; by default head and body train `local_epochs` each, as DM-PFL compares it (the authors: 10 and 1
on CIFAR-10, and 10 more head epochs for everybody at the end).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from personafl.core.algorithm import Algorithm
from personafl.core.errors import UserError
from personafl.core.local_work import ClientState, LocalWork, whole
from personafl.core.settings import setting
from personafl.core.types import Round, Stage


@dataclass(frozen=True, kw_only=True)
class FedRep(Algorithm):
    """Average the body over clients; each client keeps the head it trained."""

    evaluates: ClassVar[str] = "the global body under the client's own head"
    newcomers: ClassVar[str] = "the global body under the initial head, which it trains for a session"

    head_epochs: float = setting(0.0, "epochs of the head, body frozen; 0 takes the recipe's local epochs or steps")
    body_epochs: float = setting(0.0, "epochs of the body, head frozen; 0 takes the recipe's local epochs or steps")
    final_head_epochs: float = setting(
        0.0, "epochs of the head for every client after the last round; 0: no such stage"
    )

    def check(self) -> None:
        for name in ("head_epochs", "body_epochs", "final_head_epochs"):
            if getattr(self, name) < 0:
                raise UserError(f"{name}={getattr(self, name)}: must not be negative")

    def private(self) -> frozenset[str]:
        return self.own_head()

    def schedule(self) -> list[Stage]:
        rounds = super().schedule()
        last = Stage(number=len(rounds), phase="head", who="all", up=False, in_paper=False)
        return [*rounds, last] if self.final_head_epochs else rounds

    def turns(self, local: ClientState, rnd: Round) -> list[LocalWork]:
        head = [n for n in self.info.parameters if n in self.info.head]
        body = [n for n in self.info.parameters if n not in self.info.head]
        if rnd.phase == "newcomer":
            return [self.usual_turn(whole(head), self.head_epochs or None)]
        if rnd.phase == "head":
            return [self.usual_turn(whole(head), self.final_head_epochs)]
        return [
            self.usual_turn(whole(head), self.head_epochs or None),
            self.usual_turn(whole(body), self.body_epochs or None),
        ]
