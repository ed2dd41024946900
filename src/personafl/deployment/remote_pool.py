"""The clients of a deployment as a pool: nodes that are asked over a network until enough of them have played."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from personafl.core import tree, wire
from personafl.core.plain_text import count, list_names
from personafl.core.types import Download, Params, Payload, Row, Stage
from personafl.deployment.conversation import Talk
from personafl.deployment.membership import NAMED, Membership
from personafl.deployment.roster import Member
from personafl.deployment.run_state import State
from personafl.deployment.settings import Deployment
from personafl.deployment.stage_progress import StageProgress
from personafl.engine import admission, cost
from personafl.engine.accounting import Totals
from personafl.engine.admission import Update
from personafl.engine.server_round import ServerRound
from personafl.engine.stage_results import StackResult, StageReport
from personafl.evaluation.rounds import DIVERGED_ROUNDS

log = logging.getLogger("personafl")
DIVERGED = (
    "lower training.lr, set training.grad_clip, or normalise inputs and targets (data.normalize, "
    "data.normalize_targets)"
)


class Nodes(Protocol):
    """What a pool needs of the server: who is there, messages to them, and a word on what it waits for."""

    settings: Deployment
    server: Params
    state: State
    members: Membership
    clock: Callable[[], float]

    def lost(self, member: Member) -> None: ...
    def talk(self, member: Member, position: int | None, *, score: bool = False, close: bool = False) -> Talk: ...
    def hold(self, talks: Mapping[int, Talk]) -> None: ...
    def wait(self, why: str, until: float) -> None: ...
    def say_waiting(self, why: str) -> None: ...
    def pause(self) -> None: ...
    def resume_after_wait(self) -> None: ...
    def clear_waiting(self) -> None: ...
    def stage_name(self) -> str: ...
    def about_failures(self, progress: StageProgress) -> str: ...


class QuorumError(RuntimeError):
    """Too few clients have played a stage, or have their final model, for too long."""


class RemoteRound(ServerRound):
    """A stage whose updates are remembered until the server knows what of them lasts."""

    reduced: tuple[Tensor, Payload, Tensor] | None = None
    """The clients whose updates were summed, these updates, and how many examples each trained on."""

    def sum_updates(self, ids: Tensor, upload: Payload) -> Params:
        self.reduced = ids, upload, self.examples(ids)
        return super().sum_updates(ids, upload)


class RemotePool:
    """Plays a stage with the nodes of a deployment.

    Args:
        nodes: Knows the nodes and carries messages to them.
        scored: Clients whose scores belong to the row of the stage before; they are asked for these as well.
        needed: How many clients must have played the stage before the next one begins.
    """

    def __init__(self, nodes: Nodes, scored: set[int], needed: int) -> None:
        self.nodes, self.scored, self.needed = nodes, scored, needed
        self.place = nodes.state.played
        self.progress = StageProgress([], needed)
        self.scores: dict[int, Row] = {}  # that came for the row of the stage before

    def play(self, stage: ServerRound, ids: Tensor) -> Iterator[StackResult]:
        """Have these clients play a stage; see `ClientPool`.

        Raises:
            QuorumError: Too few clients could play it, and the settings do not have it left out.
        """
        self.progress = StageProgress(ids.tolist(), self.needed)
        try:
            self._play(stage)
        except QuorumError as e:
            if self.nodes.settings.without_quorum == "stop":
                raise
            log.warning("%s The stage is left out.", e)
            self.progress.skipped = "it was left out, since too few clients played it within deployment.quorum_timeout"
            self.nodes.clear_waiting()
        if 0 < len(self.progress.updates) < self.needed and not self.progress.skipped:
            self._leave_out_diverged()
        for n in self.progress.ids:
            if n not in self.progress.updates and n not in self.progress.failures:
                log.warning("stage %d: client %s is not there", self.place, self.nodes.members.name(n))
        stage.server = self.nodes.server  # from which clients that lost their state may have been withdrawn meanwhile
        yield from self.results(stage)

    def results(self, stage: ServerRound) -> Iterator[StackResult]:
        """The updates that came, as one stack in the order of the cohort."""
        updates = self.progress.cohort_updates()
        if updates and stage.takes_updates:
            yield StackResult(torch.tensor(list(updates)), tree.gathered(_row(p) for p in updates.values()))

    def _leave_out_diverged(self) -> None:
        """Leave a stage out in which so many clients diverged that too few are left; they would diverge again."""
        progress, earlier = self.progress, self.nodes.state.last_without_update
        progress.skipped = (
            f"the training of {count(len(progress.diverged), 'client')} diverged, and "
            f"{count(self.needed, 'update')} were needed"
        )
        if self.nodes.settings.without_quorum == "stop" and earlier >= DIVERGED_ROUNDS - 1:
            names = list_names([self.nodes.members.name(n) for n in progress.ids if n in progress.diverged], NAMED)
            raise QuorumError(
                f"{self.nodes.stage_name()} would be round {earlier + 1} in a row without an update: "
                f"{progress.skipped}. The training of {names} diverged; {DIVERGED}."
            )

    def scores_after_training(self) -> dict[str, Row]:
        """The scores of the clients from right after their training, by number."""
        talks = {n: self.progress.talks[n] for n in self.progress.cohort_updates()}
        return {str(n): t.judged for n, t in talks.items() if t.judged is not None}

    def report(self) -> StageReport:
        """Return what the stage came to; what it cost is in the server's totals already."""
        progress = self.progress
        clients = len(progress.updates.keys() | progress.failures.keys())
        return StageReport(clients, Totals(), progress.losses(), progress.failure_columns(), progress.diverged)

    def _play(self, stage: ServerRound) -> None:
        """Ask the clients of a stage until enough of them have played it."""
        progress, asked = self.progress, self._await_cohort()
        self.nodes.resume_after_wait()
        until = self.nodes.clock() + self.nodes.settings.quorum_timeout
        while True:
            before = len(progress.updates)
            self._ask(stage, asked)
            if progress.is_complete:
                self.nodes.resume_after_wait()
                return
            if len(progress.updates) > before:
                until = self.nodes.clock() + self.nodes.settings.quorum_timeout
            asked = self._await_retry(stage.rnd.stage, until)

    def _ask(self, stage: ServerRound, cohort: Sequence[int]) -> None:
        """Exchange with these clients of a stage, and with those that are only scored; note what came of it."""
        position, scored = self.place, self.scored - self.scores.keys()
        talks = {
            m.number: self.nodes.talk(m, position if m.number in cohort else None, score=m.number in scored)
            for m in self.nodes.members.online({*cohort, *scored})
        }
        self.nodes.hold(talks)
        again = {}
        for n, talk in talks.items():
            if talk.lost:  # who has lost what it kept is asked anew, and that talk takes the place of the first
                self.nodes.lost(talk.member)
                if n in cohort:
                    again[n] = self.nodes.talk(talk.member, position)
        self.nodes.hold(again)
        talks |= again
        self.scores |= {n: t.scores for n, t in talks.items() if t.scores is not None and n in scored}
        changed = self._record_replies(stage, cohort, talks)
        if changed:  # who fits still, with the data it has now, is asked once more
            self.nodes.members.meet()
            talks = {m.number: self.nodes.talk(m, position) for m in self.nodes.members.online(changed)}
            self.nodes.hold(talks)
            self._record_replies(stage, changed, talks)

    def _record_replies(self, stage: ServerRound, cohort: Sequence[int], talks: Mapping[int, Talk]) -> list[int]:
        """Record what came of these exchanges; return the clients whose data or model have changed."""
        progress, changed = self.progress, []
        for n in cohort:
            if n not in talks:  # it has left since
                continue
            talk = talks[n]
            update, why = self._update(stage, talk)
            if update is not None:
                progress.record_update(n, update, talk)
                continue
            if talk.has_changed:  # it is asked about them again, and not used until they fit
                self.nodes.members.met.pop(talk.member.node, None)
                changed.append(n)
            if why != progress.failures.get(n) and not (talk.busy and n in progress.failures):
                log.warning("stage %d: client %s: %s", self.place, talk.member.name, why)
            progress.record_failure(n, why, talk, self.nodes.clock())
        return changed

    def _await_cohort(self) -> list[int]:
        """The clients of a stage that are there, once they are as many as it needs.

        With `offline = "wait"` the others are then waited for, for up to `wait` seconds.
        """
        progress, ids = self.progress, self.progress.ids
        until = self.nodes.clock() + self.nodes.settings.quorum_timeout
        while len(here := self.nodes.members.present(progress.ids)) < progress.needed:
            away = [n for n in progress.ids if n not in here]
            self.nodes.wait(
                f"{self.nodes.stage_name()} needs {count(progress.needed, 'client')} and {len(here)} of its "
                f"{len(progress.ids)} can be used now. {self.nodes.members.about_missing(away)}",
                until,
            )
        until = self.nodes.clock() + (self.nodes.settings.wait if self.nodes.settings.offline == "wait" else 0.0)
        while len(here) < len(ids) and self.nodes.clock() < until:
            away = [n for n in ids if n not in here]
            self.nodes.say_waiting(
                f"{self.nodes.stage_name()} waits for all of its clients. {self.nodes.members.about_missing(away)}"
            )
            self.nodes.pause()
            here = self.nodes.members.present(ids)
        return here

    def _await_retry(self, stage: Stage, until: float) -> list[int]:
        """The clients to ask next, in a stage that has too few updates, as soon as there are some."""
        progress = self.progress
        needs = "the updates of " if stage.up else ""
        while True:
            here = self.nodes.members.present(progress.ids)
            for n in progress.retry_at.keys() - here:  # it is asked as soon as it is back
                progress.retry_at[n] = 0.0
            asked = progress.to_ask(here, self.nodes.clock())
            if asked and self.nodes.clock() < until:
                return asked
            self.nodes.wait(
                f"{self.nodes.stage_name()} needs {needs}{count(progress.needed, 'client')} and has "
                f"{len(progress.updates)}. {self.nodes.about_failures(progress)}",
                until,
            )

    def _update(self, stage: ServerRound, talk: Talk) -> tuple[Payload | None, str]:
        """What a client sent in a stage, or why it is not taken."""
        if talk.why:
            return None, talk.why
        now, totals = stage.rnd.stage, self.nodes.state.totals
        if not now.up:
            totals.paper_bytes += _paper(now, talk.sent, {})
            return {}, ""
        limit = sum(math.prod(e.shape) for e in stage.schema.values())
        try:
            found = wire.read(talk.reply_blob, tree.masks(talk.sent), limit=limit)
        except wire.WireError as e:
            return None, str(e)
        update = Update(talk.member.number, found.stage, found.payload, found.examples)
        talk.has_changed = update.examples != talk.member.sizes["train"]
        why = admission.refusal(update, stage.schema, self.place, talk.member.sizes["train"])
        totals.paper_bytes += _paper(now, talk.sent, found.payload)
        return (None, why) if why else (found.payload, "")


def _row(payload: Payload) -> Payload:
    """A client's payload as a stack of one."""
    return {
        n: tree.view(t.values[None], t.mask[None], t.known) if not isinstance(t, Tensor) else t[None]
        for n, t in payload.items()
    }


def _paper(stage: Stage, sent: Payload, upload: Payload) -> float:
    """Bytes as the papers count them."""
    return cost.traffic(stage, Download(sent), _row(upload), 1).paper
