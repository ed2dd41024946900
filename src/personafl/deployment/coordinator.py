"""The server of a real federation: its rounds, over whatever carries messages.

Everything it decides by is in its checkpoint, written behind every stage, so that a new process goes on where the last
one stopped. What a client keeps is the client's; the server knows behind which stage it has it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import math
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from personafl.core import tree
from personafl.core.errors import UserError
from personafl.core.hook_checks import check_initial_server
from personafl.core.plain_text import count, list_names
from personafl.core.torch_state import products
from personafl.core.types import Download, Payload, Round, Row, Stage
from personafl.deployment.client_records import ClientRecords
from personafl.deployment.client_reports import (
    MOST_SCORE,
)
from personafl.deployment.conversation import Talk
from personafl.deployment.federation_spec import (
    VERSION,
    Parts,
    World,
    build_parts,
    check_format,
    read_recipe,
)
from personafl.deployment.membership import NAMED, Membership
from personafl.deployment.messages import Transport
from personafl.deployment.remote_pool import DIVERGED, QuorumError, RemotePool, RemoteRound
from personafl.deployment.results import Results, write_roster
from personafl.deployment.roster import Member, Roster
from personafl.deployment.run_state import State
from personafl.deployment.server_files import ServerFiles
from personafl.deployment.settings import Deployment
from personafl.deployment.stage_progress import BUSY, RETRY, StageProgress, updates_needed
from personafl.engine import sampling
from personafl.engine.accounting import Totals
from personafl.engine.checks import check_augmentation, check_calibration, check_stopping
from personafl.engine.schedule import cohort_is_evaluated, ended_after, is_evaluated, last_evaluated_cohort, missed
from personafl.engine.server_round import Method
from personafl.evaluation import metrics, rounds
from personafl.models.sample_outputs import outputs_difference
from personafl.storage.lock import locked

log = logging.getLogger("personafl")
ADVICE = (
    "personafl deploy start resumes the run at this stage. To continue with fewer clients, lower deployment.start and "
    'deployment.quorum first. deployment.without_quorum = "skip" leaves out stages that too few clients play.'
)


class Coordinator:
    """Rounds of one method over real clients."""

    def __init__(
        self,
        folder: Path,
        settings: Deployment,
        recipe: str,
        transport: Transport,
        *,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.folder, self.settings, self.recipe = folder, settings, recipe
        self.sleep, self.clock = sleep, clock
        read_recipe(recipe, hint=f"At the server its module has to be in {folder / 'modules'}.")
        self.files = ServerFiles(folder / "server")
        self.results = Results(folder / "results")
        self.members = Membership(settings, recipe, transport, clock, lambda member: self.lost(member))
        self.schedule: list[Stage] = []
        self.waits = ""  # what the server waits for, as `deploy status` shows it
        self._waited = 0.0  # seconds of the present stage in which clients were waited for

    @property
    def experiment(self) -> str:
        """The name of the experiment; empty before the first run begins."""
        return self.members.experiment

    @property
    def world(self) -> World | None:
        """What all clients agreed on; None before the first round."""
        return self.members.world

    @property
    def roster(self) -> Roster:
        return self.members.roster

    # A run

    def run(self) -> None:
        """Play what is left of the schedule, then give every client its model; refused where another process does."""
        with locked(self.folder / "server"):
            self._run()

    def _run(self) -> None:
        resumed = self._restored()
        if not resumed:
            self.members.experiment = f"{self.settings.name}-{secrets.token_hex(4)}"
            self._gather()
        with products(self.parts.training.arithmetic, self.parts.device), torch.no_grad():
            if resumed and self.state.played < len(self.schedule):
                self._await_start()
            while self.state.played < len(self.schedule):
                begun, self._waited = time.perf_counter(), 0.0
                self._stage()
                self.state.seconds += time.perf_counter() - begun - self._waited
                self._save()
            too_few = self._close()
        self._save()
        why = self._failure() or too_few
        self._finish(why)
        if why:
            raise UserError(why)

    def _failure(self) -> str:
        """Why a run that has come to its end cannot be called completed; nothing where it can."""
        if any(r.get("stopped") == "diverged" for r in self.results.rows()):
            return f"Training stopped after round {self.state.rounds}, since every client diverged: {DIVERGED}."
        without = self.state.last_without_update
        if not without:
            return ""
        rounds = "The last round" if without == 1 else f"The last {without} rounds"
        return f"{rounds} had no update and left the model as it was. The reason: {self.state.reason.rstrip('.')}."

    def _restored(self) -> bool:
        found = self.files.load()
        if found is None:
            return False
        numbers, server, known = found
        self.members.experiment = numbers["experiment"]
        check_format(f"experiment {self.experiment}", numbers["world"])  # before what is written in it is read
        world = self.members.world = World.read(numbers["world"])
        if world.recipe != self.recipe or world.clients != self.settings.clients:
            what = "recipe.toml" if world.recipe != self.recipe else "deployment.clients"
            raise UserError(f"{what} is not what experiment {self.experiment} began with; use a new folder for another")
        self.members.roster = Roster.read(self.settings.clients, numbers["members"])
        self._build()
        if difference := outputs_difference(self.parts.model.sample_outputs, world.outputs):
            raise UserError(
                f"The model code at the server has changed since experiment {self.experiment} began: it gives other "
                f"outputs for the same weights ({difference}). The module of the model must stay the same."
            )
        held = numbers["state"]
        self.state = State(**(held | {"totals": Totals(**held["totals"])}))
        self.server = {n: t.to(self.parts.device) for n, t in server.items()}
        self.records = ClientRecords(self.parts.algorithm, self.parts.initial, known)
        self.schedule = ended_after(self.schedule, self.parts.training.num_rounds, self.state.rounds)
        self.results.cut(self.state.metrics)
        log.info("experiment %s goes on with stage %d", self.experiment, self.state.played)
        if world.version != VERSION:
            log.info("it began with personafl %s and goes on with %s", world.version, VERSION)
        self._write_status()  # what the last process left there is no longer so
        return True

    def _build(self) -> None:
        assert self.world is not None
        self.parts: Parts = build_parts(self.world)
        self.schedule = self.parts.schedule()
        self.state = State(self.parts.training.num_rounds)
        algorithm = self.parts.algorithm
        self.server = check_initial_server(algorithm, algorithm.init_server(self.parts.initial))
        self.records = ClientRecords(algorithm, self.parts.initial, {})

    def _save(self) -> None:
        assert self.world is not None
        numbers = {
            "experiment": self.experiment,
            "world": self.world.told(),
            "members": self.roster.told(),
            "state": dataclasses.asdict(self.state),
        }
        self.files.save(numbers, self.server, self.records.rows, self.records.changed)
        self.records.changed = set()
        self._write_status()

    def _write_status(self) -> None:
        """Leave who takes part, who does not and how far it is where `deploy status` looks."""
        there, unused = len(set(self.members.met.values())), self.members.unused
        waits = f"The first round waits for {count(self.settings.at_start, 'client')}; {there} can be used so far."
        if not there and len(unused) > 1 and len(set(unused.values())) == 1:
            waits += f" All {len(unused)} that came cannot be used: {next(iter(unused.values()))}."
        told = {
            "unused": self.members.unused,
            "waits": self.waits if self.world else waits,
            "stage": self.state.played if self.world else 0,
            "stages": len(self.schedule),
            "rounds_without_update": self.state.without_update if self.world else 0,
        }
        write_roster(self.folder / "server", self.experiment, self.roster, told)

    # Who is there

    def _gather(self) -> None:
        """Wait until enough clients are there, and agree with them on what there is to learn."""
        until = self.clock() + self.settings.start_timeout
        wanted = self.settings.at_start
        log.info("experiment %s waits for %d clients", self.experiment, wanted)
        self._write_status()
        while True:
            self.members.hello()
            if len(set(self.members.met.values())) >= wanted and self._agreed(wanted):
                return
            self._write_status()
            if self.clock() > until:
                raise UserError(self._about_start(len(set(self.members.met.values()))))
            self.sleep(1.0)

    def _await_start(self) -> None:
        """Wait until as many clients are there as a first round needs, in a run that is resumed."""
        until, wanted = self.clock() + self.settings.start_timeout, self.settings.at_start
        while True:
            self.members.meet()
            here = self.members.present(range(self.settings.clients))
            if len(here) >= wanted:
                self.resume_after_wait()
                return
            away = [n for n in range(self.settings.clients) if n not in here]
            why = (
                f"The run goes on once {count(wanted, 'client')} can be used; {len(here)} can now. "
                f"{self.members.about_missing(away)}"
            )
            if self.clock() > until:
                raise UserError(f"{self._about_start(len(here))} {self.members.about_missing(away)}")
            self.say_waiting(why)
            self.sleep(1.0)

    def _about_start(self, here: int) -> str:
        """Why a run does not begin, or go on, after the clients were waited for."""
        reasons = "".join(
            f" Node {node} is not used: {why}." for node, why in list(self.members.unused.items())[:NAMED]
        )
        return (
            f"{here} of {count(self.settings.at_start, 'client')} came within {self.settings.start_timeout:g} seconds "
            f"(deployment.start and deployment.start_timeout).{reasons}"
        )

    def lost(self, member: Member) -> None:
        """A client that lost what it kept begins anew, and nothing of it stays at the server."""
        log.warning("client %s lost what it kept: it begins anew, as a newcomer", member.name)
        member.anew, member.lost, member.acknowledged = True, member.lost + 1, -1
        if lasting := self.records.remove(member.number):
            self.server = self.parts.algorithm.withdraw(self.server, lasting)

    # A stage

    def _agreed(self, wanted: int) -> bool:
        """Whether the clients that are there have agreed on what there is to learn; then the run can begin."""
        world = self.members.agree(wanted)
        if world is None:
            return False
        members, form = self.roster.members, world.form
        first = members[: self.settings.clients]
        parts = build_parts(world)
        validation = sum(m.sizes["validation"] for m in first)
        check_stopping(validation, form.task, parts.training, parts.recipe.evaluation)
        check_calibration(validation, parts.algorithm, parts.recipe.evaluation)
        check_augmentation("what the clients hold", form.shape, parts.training)
        self.members.world = dataclasses.replace(
            world, init=parts.model.initial_hash(), outputs=parts.model.sample_outputs
        )
        if not parts.model.sample_outputs:
            log.warning(
                "The model has no finite outputs for drawn inputs, so it is not compared whether clients run the same "
                "code: only the hash of the first weights is."
            )
        self._build()
        self._save()
        log.info("%d clients are there: %s", len(members), list_names([m.name for m in members], NAMED))
        return True

    def _stage(self) -> None:
        """Play the next stage: ask its clients until enough have played it, then aggregate and write its row."""
        self.members.meet()
        position = self.state.played
        stage = self.begin(position)
        rnd = stage.rnd
        ids = sampling.cohort(self.roster, self.parts.training, rnd.stage)
        pool = RemotePool(self, self._to_score(), updates_needed(rnd.stage, len(ids), self.settings.quorum))
        before = dataclasses.replace(self.state, totals=dataclasses.replace(self.state.totals))
        try:
            stage.play(pool, ids)
        except QuorumError as e:
            raise self._end_resumably(before, str(e)) from None
        if self.state.pending is not None:
            self._complete(self.state.pending, pool.scores)
        self.server, kept_model = stage.aggregate()
        if not kept_model and stage.reduced is not None:
            taken, upload, examples = stage.reduced
            self.records.add_lasting(taken, self.parts.algorithm.lasting(upload, examples, rnd))
        progress, report = pool.progress, pool.report()
        if rnd.stage.who == "sampled" or stage.takes_updates:
            kept_model = (
                progress.skipped or kept_model or ("" if progress.cohort_updates() else "no client could train")
            )
            self._count_without_update(progress, kept_model, wants_uploads=rnd.stage.up)
        for n in progress.cohort_updates():
            self._acknowledge(n, position)
        self.state.played += 1
        row = stage.row(report, self.state.totals, self.server, kept_model=kept_model)
        self._then_score(row, position, pool.scores_after_training())
        played, of = len(progress.cohort_updates()), len(ids)
        number, phase = rnd.stage.number, rnd.stage.phase
        log.info("stage %d (round %d, %s): %d of %d clients", position, number, phase, played, of)

    def begin(self, position: int) -> RemoteRound:
        """Return the server's side of the stage at this place of the schedule."""
        parts = self.parts
        method = Method(parts.algorithm, parts.task, parts.initial)
        return RemoteRound(method, self._round(position), position, self.server, self.records, self._examples)

    def _examples(self, ids: Tensor) -> Tensor:
        """How many examples each of these clients trains on."""
        return self.roster.train_sizes(ids).double()

    def _end_resumably(self, before: State, why: str) -> UserError:
        """The error that ends the run before the present stage; nothing of the stage counts, the next run plays it."""
        self.state.totals, self.state.evaluation_bytes = before.totals, before.evaluation_bytes
        self.waits = ""
        self._save()
        return UserError(f"{why} {ADVICE}")

    def _count_without_update(self, progress: StageProgress, kept_model: str, *, wants_uploads: bool) -> None:
        """Count a round after which the model is what it had been, or in which no client could train.

        Training that stays at the clients does not make up for rounds in which the server had no update.
        """
        if not kept_model:
            if wants_uploads or not self.state.last_wanted_uploads:
                self.state.last_without_update, self.state.reason = 0, ""
            return
        self.state.without_update += 1
        self.state.last_without_update += 1
        self.state.last_wanted_uploads = wants_uploads
        everybody = progress.diverged >= set(progress.ids)
        self.state.reason = f"the training of all its clients diverged; {DIVERGED}" if everybody else kept_model

    # Waiting

    def wait(self, why: str, until: float) -> None:
        """Say what is waited for, sleep and look who has come.

        Raises:
            QuorumError: It has taken too long.
        """
        if self.clock() >= until:
            raise QuorumError(
                f"{why} The server has waited for {self.settings.quorum_timeout:g} seconds (deployment.quorum_timeout)."
            )
        self.say_waiting(why)
        self.pause()

    def say_waiting(self, why: str) -> None:
        """Say in the log and to `deploy status` what is waited for."""
        if why != self.waits:
            log.warning("%s The server waits.", why)
            self.waits = why
        self._write_status()

    def pause(self) -> None:
        begun = time.perf_counter()
        self.sleep(1.0)
        self.members.meet()
        self._waited += time.perf_counter() - begun

    def resume_after_wait(self) -> None:
        if self.waits:
            log.info("enough clients are there: the run goes on")
            self.clear_waiting()

    def clear_waiting(self) -> None:
        if self.waits:
            self.waits = ""
            self._write_status()

    def stage_name(self) -> str:
        stage = self.schedule[self.state.played]
        return f"Stage {self.state.played} (round {stage.number}, {stage.phase})"

    def about_failures(self, progress: StageProgress) -> str:
        """A sentence on the clients that have no update, and why."""
        left = [n for n in progress.ids if n not in progress.updates]
        reasons = {n: progress.failures.get(n) or self.members.refusal(n) or "is not there" for n in left}
        return self.members.reasons(reasons, alike=not progress.updates)

    def download(self, number: int, rnd: Round) -> Payload:
        """What the server sends a client, without a client axis."""
        down = self.parts.algorithm.download(self.server, self.records.gather(torch.tensor([number])), rnd)
        return down.shared | tree.row_of(down.own, 0)

    @property
    def now(self) -> Round:
        """The round as clients last saw it, for them to predict after."""
        stage = self.schedule[max(self.state.played - 1, 0)]
        return Round(stage, self.parts.algorithm.rate(stage), predicting=True)

    def talk(self, member: Member, position: int | None, *, score: bool = False, close: bool = False) -> Talk:
        """What a client is asked: to play what it owes and a stage, to be scored before, or to end."""
        assert self.world is not None
        talk, algorithm = Talk(member), self.parts.algorithm
        new = member.anew or member.number >= self.settings.clients
        told: Row = {
            "experiment": self.experiment,
            "world": self.world.told(),
            "number": member.number,
            "acknowledged": member.acknowledged,
            "begin": "newcomer" if new and member.acknowledged < 0 else "fresh" if member.acknowledged < 0 else "kept",
        }
        plays: list[Row] = []

        def ask(at: int, rnd: Round, payload: Payload, *, counted: bool = True) -> None:
            stage = rnd.stage
            down = talk.blob(payload, at, counted=counted) if stage.down else 0
            ours = at == position and stage == self.schedule[at]
            judged = {"train_loss": self._asked_loss} if ours and self._judged_now() else None
            asked = {"position": at, "stage": dataclasses.asdict(stage), "lr": rnd.lr}
            plays.append(asked | {"down": down, "judged": judged})
            talk.sent = payload if stage.down else {}

        last = self.state.played if position is None else position
        if told["begin"] == "newcomer":
            given = self.download(member.number, self.now)
            told["given"] = talk.blob(given, last, counted=position is not None)
            talk.apart = position is None
            if phase := algorithm.welcome():
                number = self.schedule[-1].number + 1
                welcome = Stage(number=number, phase=phase, who="all", up=False)
                ask(last, Round(welcome, self.now.lr), given, counted=position is not None)
        elif position is not None or close:
            for at in missed(self.schedule, member.acknowledged, last):
                ask(at, self._round(at), self.download(member.number, self._round(at)))
        if position is not None:
            ask(position, self._round(position), self.download(member.number, self._round(position)))
        if score and told["begin"] != "newcomer":
            down = talk.blob(self.download(member.number, self.now), last, counted=False)
            told["evaluate"] = {"down": down, "train_loss": self._asked_loss}
        if close:
            down = talk.blob(self.download(member.number, self.now), last, counted=False)
            told["close"] = {"down": down, "train_loss": self._asked_loss}
        told["plays"] = plays
        talk.told = told
        return talk

    @property
    def _asked_loss(self) -> bool:
        return self.parts.recipe.evaluation.train_loss

    def _round(self, position: int) -> Round:
        stage = self.schedule[position]
        return Round(stage, self.parts.algorithm.rate(stage))

    def hold(self, talks: Mapping[int, Talk]) -> None:
        """Exchange, and count what it took."""
        replies = self.members.exchange({t.member.node: t.request() for t in talks.values()})
        for talk in talks.values():
            talk.hear(replies[talk.member.node], self._bounds(talk.member))
            totals = self.state.totals
            totals.down_bytes += talk.down_bytes
            self.state.evaluation_bytes += talk.evaluation_bytes
            totals.up_bytes += len(talk.reply_blob)
            totals.flops += 0.0 if talk.apart else talk.work.get("flops", 0.0)
            totals.dense_flops += 0.0 if talk.apart else talk.work.get("dense_flops", 0.0)

    def _bounds(self, member: Member) -> dict[str, float]:
        """What scores of a client can be at most, in size; none of what it has no data for."""
        metric = self.parts.task.metric
        assert self.world is not None
        shipped = metric.name in metrics.METRICS[self.world.form.task]
        most = 1.0 if shipped and metric.better == "higher" else MOST_SCORE
        bounds = {"own": most, "common": most, "before": most, "train_loss": MOST_SCORE}
        return bounds | ({"validation": most} if member.sizes.get("validation") else {})

    def _acknowledge(self, number: int, position: int) -> None:
        member = self.roster.members[number]
        member.acknowledged, member.anew = position, False

    # Scores

    def _due(self, position: int) -> bool:
        return is_evaluated(self.schedule, position, self.parts.recipe.evaluation.eval_every)

    def _judged_now(self) -> bool:
        """Whether the present cohort is the one of the next evaluation after local training."""
        asked = self.parts.recipe.evaluation
        return asked.when == "after_local" and cohort_is_evaluated(self.schedule, self.state.played, asked.eval_every)

    def _evaluated(self) -> list[int]:
        """The clients that are scored after a stage."""
        if self.state.judged:
            return [int(n) for n in self.state.judged]
        which = self.parts.recipe.evaluation.clients
        if which == "selected":
            stage = last_evaluated_cohort(self.schedule, self.state.played)
            return sampling.cohort(self.roster, self.parts.training, stage).tolist()
        most = self.settings.clients if which == "all" else int(which)
        return sampling.evaluated(self.roster, self.parts.training, most).tolist()

    def _to_score(self) -> set[int]:
        """Clients whose scores belong to the row that waits for them, but for those that have no model any more."""
        if self.state.pending is None:
            return set()
        members = [self.roster.numbered(n) for n in self._evaluated()]
        return {m.number for m in members if m is not None and not m.anew}

    def _then_score(self, row: Row, position: int, judged: dict[str, Row]) -> None:
        """Complete a row, now or with the next exchange."""
        if judged:
            self.state.judged = judged
        else:  # what a cohort before this one came with is no news
            self.state.judged = {n: {k: v for k, v in s.items() if k != "before"} for n, s in self.state.judged.items()}
        hopeless = position + 1 < len(self.schedule) and self._everybody_diverged(row)
        if not self._due(position) and not hopeless:
            self._complete(row, {}, due=False)
        elif self.state.judged and not self._has_common():
            self._complete(row, {})
        elif hopeless or (self.parts.training.stops_early and position + 1 < len(self.schedule)):
            asked = {
                m.number: self.talk(m, None, score=True) for m in self.members.online(self._evaluated()) if not m.anew
            }
            self.hold(asked)
            self._complete(row, {n: t.scores for n, t in asked.items() if t.scores is not None})
        else:
            self.state.pending = row

    def _everybody_diverged(self, row: Row) -> bool:
        """Whether training ends after this row, since nobody's is finite any more."""
        if not row["clients"] or row.get("diverged", 0) < row["clients"]:
            return False
        return rounds.everybody_diverged([*self.results.rows(), row], self.settings.clients)

    def _has_common(self) -> bool:
        """Whether the method has a complete model at the server, which clients score after a stage."""
        down = tree.received(Download(self.download(0, self.now)), 1)
        return self.parts.algorithm.common(down) is not None

    def _complete(self, row: Row, found: Mapping[int, Row], *, due: bool = True) -> None:
        """Write a row with the scores that came: where clients are judged after training those, and of the model of all
        the ones that came since."""
        self.state.pending = None
        judged = {int(n): s for n, s in self.state.judged.items()} if due else {}
        if judged:
            found = {n: s | {k: v for k, v in found.get(n, {}).items() if k == "common"} for n, s in judged.items()}
        if found:
            row |= self._stats(found)
        if judged and all("before" in s for s in judged.values()):
            gained = [s["before"] - self.state.left[str(n)] for n, s in judged.items() if str(n) in self.state.left]
            sign = 1 if self.parts.task.metric.better == "higher" else -1
            row["before"] = self._over({n: s["before"] for n, s in judged.items()})
            row["delta"] = sign * sum(gained) / len(gained) if gained else None
            self.state.left |= {str(n): s["after" if "after" in s else "own"] for n, s in judged.items()}
        asked, here = self.parts.training, row["round"] + 1
        if found and here < self.state.rounds:
            rows = [*self.results.rows(), row]
            if why := rounds.stop(
                rows, asked.patience, asked.target, self.settings.clients, self.parts.task.metric.better
            ):
                row["stopped"] = why
                if why == "diverged":
                    log.warning("training stops after round %d, since every client diverged: %s", here, DIVERGED)
                self.schedule = ended_after(self.schedule, self.state.rounds, here)
                self.state.rounds = here
        self.state.metrics = self.results.add(row)
        self.state.rows += 1

    def _stats(self, found: Mapping[int, Row]) -> Row:
        row: Row = {"personal": self._over({n: s["own"] for n, s in found.items()})}
        if any("validation" in s for s in found.values()):
            held = {n: s["validation"] for n, s in found.items() if "validation" in s}
            row["validation"] = self._over(held, "validation")
        if losses := [
            (s["train_loss"], self.roster.members[n].sizes["train"]) for n, s in found.items() if "train_loss" in s
        ]:
            row["train_loss"] = sum(v * size for v, size in losses) / sum(size for _, size in losses)
        common = {n: s["common"] for n, s in found.items() if "common" in s}
        row["global"] = self._over(common) if common else None
        if broken := sum(not s["finite"] for s in found.values()):
            row["nonfinite_models"] = broken
        return row

    def _over(self, each: Mapping[int, float], split: str = "test") -> dict[str, float]:
        ids = sampling.largest_first(self.roster, torch.tensor(list(each), dtype=torch.int64)).tolist()
        sizes = torch.tensor([self.roster.members[n].sizes[split] for n in ids])
        values = torch.tensor([each[n] for n in ids], dtype=torch.float64)
        return metrics.over_clients(values, sizes, self.parts.task.metric.better)

    # The end

    def _close(self) -> str:
        """Give every client that is there its final model, and score it; why too few have it, or nothing.

        Clients that are still at earlier work are waited for; so are others until as many have their model as a stage
        of all clients needs.
        """
        busy_until = self.clock() + 2 * self.settings.round_timeout
        until = self.clock() + self.settings.quorum_timeout
        everybody = range(self.settings.clients)
        needed = self.settings.quorum or math.ceil(self.settings.clients / 2)
        failures: dict[int, str] = {}  # why clients that were asked have no model
        retry_at: dict[int, float] = {}
        busy: set[int] = set()
        why = ""
        self.members.meet()
        while True:
            open_members = [m for m in self.members.online(m.number for m in self.roster.members) if not m.closed]
            asked = [m for m in open_members if retry_at.get(m.number, self.clock()) <= self.clock()]
            busy = (busy - {m.number for m in asked} | self._closed(asked, failures)) & {m.number for m in open_members}
            for m in asked:
                retry_at[m.number] = self.clock() + (BUSY if m.number in busy else RETRY)
            without = [n for n in everybody if not self._has_final_model(n)]
            have = self.settings.clients - len(without)
            if have >= needed and not (busy and self.clock() < busy_until):
                break
            if have >= needed:
                self.pause()
                continue
            missing = [n for n in without if n not in self.members.present(without)]
            reasons = {n: why for n, why in failures.items() if n in without and n not in missing}
            explained = " ".join(filter(None, (self.members.about_missing(missing), self.members.reasons(reasons))))
            try:
                self.wait(
                    f"All rounds are played. The run ends once {count(needed, 'client')} have the final model; "
                    f"{have} so far. {explained}",
                    until,
                )
            except QuorumError as e:
                why = f"{e} personafl deploy start gives the others their models."
                break
        self.clear_waiting()
        if self.state.pending is not None:
            scored = set(self._evaluated())
            self._complete(
                self.state.pending, {m.number: m.scores for m in self.roster.members if m.closed and m.number in scored}
            )
        return why

    def _has_final_model(self, number: int) -> bool:
        member = self.roster.numbered(number)
        return member is not None and member.closed

    def _closed(self, members: Sequence[Member], failures: dict[int, str]) -> set[int]:
        """Ask these clients to end: the numbers of those that are still at an earlier request."""
        talks = {m.number: self.talk(m, None, close=True) for m in members}
        self.hold(talks)
        again: dict[int, Talk] = {}
        for talk in talks.values():
            if talk.lost:
                self.lost(talk.member)
                again[talk.member.number] = self.talk(talk.member, None, close=True)
        self.hold(again)
        for n, talk in (talks | again).items():
            if talk.scores is None:
                why = talk.why or "it gave no scores"
                if not talk.busy and why != failures.get(n):
                    log.warning("client %s has no final model: %s", talk.member.name, why)
                failures[n] = why
                continue
            talk.member.closed, talk.member.scores = True, talk.scores
            if talk.told["plays"]:
                self._acknowledge(n, talk.told["plays"][-1]["position"])
        return {n for n, t in (talks | again).items() if t.busy}

    def _finish(self, why: str) -> None:
        """Write the results, and why the run is not completed where it is not."""
        missing = [m.name for m in self.roster.members if not m.closed]
        if missing:
            log.warning("without a final model: %s; start again once they are there", ", ".join(missing))
        self.state.finished = not missing
        self.results.finish(self._summary() | ({"not_completed": why} if why else {}), self.roster)
        self._save()

    def _summary(self) -> Row:
        recipe, totals, algorithm = self.parts.recipe, self.state.totals, self.parts.algorithm
        n = self.settings.clients
        rows = self.results.rows()
        accuracy, final = self._final_scores(rows)
        new = {m.number: m.scores["own"] for m in self.roster.members[n:] if m.closed}
        cohorts = hashlib.sha256()
        for t in range(self.parts.training.num_rounds):
            cohorts.update(sampling.cohort(self.roster, self.parts.training, Stage(number=t)).numpy().tobytes())
        assert self.world is not None
        metric = self.parts.task.metric
        stopped = next((r["stopped"] for r in rows if "stopped" in r), None)
        return {
            "algorithm": recipe.algorithms[0].name,
            "label": recipe.algorithms[0].label,
            "seed": recipe.training.seed,
            "rounds": self.state.rounds,
            "evaluated_model": algorithm.evaluated(recipe.evaluation.when),
            "lr": self.parts.training.lr,
            "metric": {"name": metric.name, "better": metric.better},
            "accuracy": accuracy | ({"unseen": self._over(new)} if new else {}),
            "final": final,
            "rounds_without_update": {"count": self.state.without_update, "last": self.state.last_without_update},
            "communication": {
                "up_bytes": totals.up_bytes,
                "down_bytes": totals.down_bytes,
                "evaluation_bytes": self.state.evaluation_bytes,
                "mib_per_client": (totals.up_bytes + totals.down_bytes) / n / 2**20,
                "paper_mib_per_client": totals.paper_bytes / n / 2**20,
            },
            "compute": {"flops_per_client": totals.flops / n, "dense_flops_per_client": totals.dense_flops / n},
            "time": {"seconds": self.state.seconds, "seconds_per_round": self.state.seconds / self.state.rounds},
            "hashes": {"cohorts": cohorts.hexdigest()[:16], "init": self.world.init},
            "experiment": self.experiment,
            "clients": len(self.roster.members),
            "without_model": [m.name for m in self.roster.members if not m.closed],
        } | (
            {"stopped": {"by": stopped, "on": rounds.stopped_on(rows), "rounds": self.state.rounds}} if stopped else {}
        )

    def _final_scores(self, rows: Sequence[Row]) -> tuple[Row, Row]:
        """The accuracy of the summary, by the protocol of the recipe, and that of the models clients ended up with.

        Both are the same with `evaluation.when = "after_aggregation"`, except that the first is of the clients that
        `evaluation.clients` chooses. After local training it is that of the last row with scores.
        """
        last = next((r for r in reversed(rows) if "personal" in r), {})
        closed = [m for m in self.roster.members[: self.settings.clients] if m.closed]
        final = self._stats({m.number: m.scores for m in closed}) if closed else {}
        final = {n: final.get(n) for n in ("personal", "global")} | {"clients": len(closed)}
        after_local = self.parts.recipe.evaluation.when == "after_local"
        scored = set() if after_local or not self.schedule else set(self._evaluated())
        chosen = {m.number: m.scores for m in closed if m.number in scored}
        source = self._stats(chosen) if chosen else last
        return {n: source.get(n) for n in ("personal", "global")}, final
