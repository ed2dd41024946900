"""How far a stage is: which clients have played it, which have failed, and whether enough of them have."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from personafl.core.types import Payload, Row, Stage
from personafl.deployment.conversation import Talk

RETRY = 30.0  # seconds until a client that could not be used is asked again
BUSY = 5.0  # seconds until a client that is still at an earlier request is looked at again


def updates_needed(stage: Stage, cohort: int, quorum: int) -> int:
    """How many clients of a cohort must have played a stage before the next one begins.

    A stage with uploads needs `quorum` updates, or those of half the cohort where `quorum` is 0. Sampled clients that
    train for themselves lose the session if they are away, so one of them must be there. A stage of all clients, such
    as a hand-over or fine-tuning, needs nobody: a client that is away makes up for it when it is back.
    """
    if stage.who == "nobody" or not cohort:
        return 0
    if stage.up:
        return min(quorum or math.ceil(cohort / 2), cohort)
    return int(stage.who == "sampled")


@dataclass
class StageProgress:
    """The clients of one stage, from the first request until the stage is done."""

    ids: Sequence[int]  # of the sampled clients
    needed: int  # how many of them must have played
    updates: dict[int, Payload] = field(default_factory=dict)  # that the server takes; empty ones without uploads
    talks: dict[int, Talk] = field(default_factory=dict)  # the exchanges those came in
    failures: dict[int, str] = field(default_factory=dict)  # why there is no update of a client that was asked
    answered: set[int] = field(default_factory=set)  # clients whose update came and cannot be used
    diverged: set[int] = field(default_factory=set)  # clients whose training diverged, as it would the next time
    retry_at: dict[int, float] = field(default_factory=dict)  # when a client that failed is asked again
    refusals: Counter[int] = field(default_factory=Counter)  # how many updates of a client were refused
    skipped: str = ""  # why it is left out without enough updates

    @property
    def is_complete(self) -> bool:
        """Whether the stage can end: enough clients have played it, or there is nobody else to ask."""
        return len(self.updates) >= self.needed or self.updates.keys() | self.diverged >= set(self.ids)

    def to_ask(self, present: Iterable[int], now: float) -> list[int]:
        """The clients that may be asked now, of those that are there."""
        done = self.updates.keys() | self.diverged
        return [n for n in present if n not in done and self.retry_at.get(n, now) <= now]

    def record_update(self, number: int, update: Payload, talk: Talk) -> None:
        """Take a client's update."""
        self.updates[number], self.talks[number] = update, talk
        self.failures.pop(number, None)

    def record_failure(self, number: int, why: str, talk: Talk, now: float) -> None:
        """Record why a client has no update, and when it is asked again.

        A client whose update was refused trains again in vain as long as nothing changes there, so the time until it
        is asked again doubles with every refusal.
        """
        if not (talk.busy and number in self.failures):  # still at it, which says less than the reason before
            self.failures[number] = why
        self.retry_at[number] = now + (BUSY if talk.busy else RETRY * 2 ** self.refusals[number])
        if talk.answered:
            self.answered.add(number)
            self.refusals[number] += 1
        else:
            self.answered.discard(number)
        if talk.diverged:
            self.diverged.add(number)

    def cohort_updates(self) -> dict[int, Payload]:
        """The updates in the order of the cohort; none of a stage that is left out."""
        return {} if self.skipped else {n: self.updates[n] for n in self.ids if n in self.updates}

    def losses(self) -> list[float]:
        """The training losses of the clients whose updates are taken."""
        return [self.talks[n].loss for n in self.cohort_updates()]

    def failure_columns(self) -> Row:
        """The columns of the row of this stage that tell what went wrong."""
        away = [n for n in self.ids if n not in self.updates and n not in self.failures]
        reasons = [(n, {"client": n, "why": self.failures[n]}) for n in self.ids if n in self.failures]
        failed = [reason for n, reason in reasons if n not in self.answered]
        quarantined = [reason for n, reason in reasons if n in self.answered]
        columns: Row = {
            "dropped": len(away) + len(failed),
            "failed": failed,
            "quarantined": quarantined,
        }
        return {name: value for name, value in columns.items() if value}
