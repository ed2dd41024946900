"""One exchange with one client: what it is sent, and what came back."""

from __future__ import annotations

import math
from collections.abc import Mapping

from personafl.core import wire
from personafl.core.types import Payload, Row
from personafl.deployment.client_reports import answer, one_line, read_scores, read_work, score
from personafl.deployment.messages import Failure, Reply, Request
from personafl.deployment.roster import Member


class Talk:
    """One exchange with one client."""

    def __init__(self, member: Member) -> None:
        self.member = member
        self.told: Row = {}
        self.blobs: list[bytes] = []
        self.counted: set[int] = set()  # blobs that are part of a round
        self.sent: Payload = {}  # of the last stage
        self.apart = False  # whether what is done is part of no round: a newcomer's session at the end
        self.why, self.answered, self.lost, self.diverged, self.busy = "no answer", False, False, 0, False
        self.has_changed = False  # whether its data or its model are not what it has told of them
        self.was_sent = True  # whether the request was sent; it is not to a node that is still at an earlier one
        self.reply_blob = b""
        self.work: dict[str, float] = {}
        self.scores: Row | None = None
        self.judged: Row | None = None  # right after training, and before it

    def blob(self, payload: Payload, stage: int, *, counted: bool) -> int:
        """The place of a payload among what is sent; the same bytes are sent once."""
        packed = wire.pack(payload, stage=stage)
        if packed not in self.blobs:
            self.blobs.append(packed)
        at = self.blobs.index(packed)
        if counted:
            self.counted.add(at)
        return at

    @property
    def down_bytes(self) -> int:
        """What was sent for the round, once there is an answer of some kind."""
        return sum(len(b) for i, b in enumerate(self.blobs) if i in self.counted) if self.was_sent else 0

    @property
    def evaluation_bytes(self) -> int:
        """What was sent for scores alone."""
        return sum(len(b) for i, b in enumerate(self.blobs) if i not in self.counted) if self.was_sent else 0

    @property
    def loss(self) -> float:
        return self.work["loss"] / self.work["steps"] if self.work and self.work["steps"] else math.nan

    def request(self) -> Request:
        return Request("work", self.told, tuple(self.blobs))

    def hear(self, reply: Reply | Failure, bounds: Mapping[str, float]) -> None:
        self.why, told = answer(reply)
        self.answered = isinstance(reply, Reply) and "error" not in told
        self.busy, self.was_sent = isinstance(reply, Failure) and reply.busy, reply.sent
        self.lost = told.get("lost") is True
        self.has_changed = told.get("other_model") is True
        self.reply_blob = reply.blob if isinstance(reply, Reply) else b""
        if told.get("diverged"):
            self.why, self.diverged = one_line(told["diverged"]), 1
        if self.lost:
            self.why = "it lost what it kept"
        try:
            self.work = read_work(told["work"]) if told.get("work") is not None else {}
            self.scores = read_scores(told["scores"], bounds) if told.get("scores") is not None else None
            if (judged := told.get("judged")) is not None and self._asked_to_judge:
                names = ("before", "after") if "after" in judged else ("before",)
                self.judged = read_scores(judged, bounds) | {n: score(judged[n], bounds["before"]) for n in names}
        except (TypeError, ValueError, KeyError, OverflowError):
            self.work, self.scores, self.judged = {}, None, None
            self.why = self.why or "its numbers cannot be understood"

    @property
    def _asked_to_judge(self) -> bool:
        return any(play["judged"] is not None for play in self.told["plays"])
