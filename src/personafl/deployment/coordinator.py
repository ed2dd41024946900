"""The server of a real federation: its rounds, over whatever carries messages.

Everything it decides by is in its checkpoint, written behind every stage, so that a new process goes on where the last
one stopped. What a client keeps is the client's; the server knows behind which stage it has it.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import logging
import math
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from personafl.core import tree
from personafl.core.errors import UserError
from personafl.core.hook_checks import check_initial_server
from personafl.core.plain_text import count, list_names
from personafl.core.torch_state import products
from personafl.core.types import Download, Payload, Round, Stage
from personafl.data import normalize
from personafl.data.client_files import natural_order
from personafl.data.columns import unite_columns
from personafl.deployment.client_records import ClientRecords
from personafl.deployment.client_reports import (
    MOST_SCORE,
    Described,
    answer,
    categories_beyond,
    find_excess,
    labels_beyond,
    one_line,
    read_moments,
)
from personafl.deployment.conversation import Talk
from personafl.deployment.federation_spec import (
    FORMAT,
    VERSION,
    Form,
    MeanAndStd,
    Parts,
    World,
    build_parts,
    check_format,
    other_format,
    read_recipe,
)
from personafl.deployment.messages import Failure, Reply, Request, Transport
from personafl.deployment.remote_pool import DIVERGED, NAMED, QuorumError, RemotePool, RemoteRound
from personafl.deployment.results import Results, write_roster
from personafl.deployment.roster import Member, Roster
from personafl.deployment.run_state import State
from personafl.deployment.server_files import ServerFiles
from personafl.deployment.settings import NAME, Deployment
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
Row = dict[str, Any]
HELLO = 120.0  # seconds a node has to say who it is; a round waits for that
HELLO_AGAIN = 1.0  # seconds a node has that did not say it the last time; its answer is looked for every half minute
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
        self.folder, self.settings, self.recipe, self.transport = folder, settings, recipe, transport
        self.sleep, self.clock = sleep, clock
        read_recipe(recipe, hint=f"At the server its module has to be in {folder / 'modules'}.")
        self.files = ServerFiles(folder / "server")
        self.results = Results(folder / "results")
        self.roster = Roster(settings.clients)
        self.experiment = ""
        self.world: World | None = None
        self.aside: dict[int, float] = {}  # nodes that cannot be used, and until when
        self.silent: set[int] = set()  # nodes that did not say in time who they are
        self.met: dict[int, str] = {}  # nodes by name, in this process
        self.unused: dict[str, str] = {}  # nodes that cannot be used, and why
        self.schedule: list[Stage] = []
        self.waits = ""  # what the server waits for, as `deploy status` shows it
        self._waited = 0.0  # seconds of the present stage in which clients were waited for

    # A run

    def run(self) -> None:
        """Play what is left of the schedule, then give every client its model; refused where another process does."""
        with locked(self.folder / "server"):
            self._run()

    def _run(self) -> None:
        resumed = self._restored()
        if not resumed:
            self.experiment = f"{self.settings.name}-{secrets.token_hex(4)}"
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
        self.experiment = numbers["experiment"]
        check_format(f"experiment {self.experiment}", numbers["world"])  # before what is written in it is read
        self.world = World.read(numbers["world"])
        if self.world.recipe != self.recipe or self.world.clients != self.settings.clients:
            what = "recipe.toml" if self.world.recipe != self.recipe else "deployment.clients"
            raise UserError(f"{what} is not what experiment {self.experiment} began with; use a new folder for another")
        self.roster = Roster.read(self.settings.clients, numbers["members"])
        self._build()
        if difference := outputs_difference(self.parts.model.sample_outputs, self.world.outputs):
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
        if self.world.version != VERSION:
            log.info("it began with personafl %s and goes on with %s", self.world.version, VERSION)
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
        there = len(set(self.met.values()))
        waits = f"The first round waits for {count(self.settings.at_start, 'client')}; {there} can be used so far."
        if not there and len(self.unused) > 1 and len(set(self.unused.values())) == 1:
            waits += f" All {len(self.unused)} that came cannot be used: {next(iter(self.unused.values()))}."
        told = {
            "unused": self.unused,
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
            self._hello()
            if len(set(self.met.values())) >= wanted and self._agreed(wanted):
                return
            self._write_status()
            if self.clock() > until:
                raise UserError(self._about_start(len(set(self.met.values()))))
            self.sleep(1.0)

    def _await_start(self) -> None:
        """Wait until as many clients are there as a first round needs, in a run that is resumed."""
        until, wanted = self.clock() + self.settings.start_timeout, self.settings.at_start
        while True:
            self.meet()
            here = self.present(range(self.settings.clients))
            if len(here) >= wanted:
                self.resume_after_wait()
                return
            away = [n for n in range(self.settings.clients) if n not in here]
            why = (
                f"The run goes on once {count(wanted, 'client')} can be used; {len(here)} can now. "
                f"{self.about_missing(away)}"
            )
            if self.clock() > until:
                raise UserError(f"{self._about_start(len(here))} {self.about_missing(away)}")
            self.say_waiting(why)
            self.sleep(1.0)

    def _about_start(self, here: int) -> str:
        """Why a run does not begin, or go on, after the clients were waited for."""
        reasons = "".join(f" Node {node} is not used: {why}." for node, why in list(self.unused.items())[:NAMED])
        return (
            f"{here} of {count(self.settings.at_start, 'client')} came within {self.settings.start_timeout:g} seconds "
            f"(deployment.start and deployment.start_timeout).{reasons}"
        )

    def _hello(self) -> dict[int, Row]:
        """Ask nodes that are new who they are: their replies, by node."""
        now = self.clock()
        self.aside = {n: t for n, t in self.aside.items() if t > now}
        online = self.transport.nodes()
        self.met = {n: name for n, name in self.met.items() if n in online}
        self.unused = {n: why for n, why in self.unused.items() if int(n) in online}
        new = [n for n in online if n not in self.met and n not in self.aside]
        if not new:
            return {}
        keys = {n: self.transport.key(n) for n in new}
        bound = {n: {"key": keys[n]} if self.settings.bind and keys[n] != str(n) else {} for n in new}
        asked = {n: Request("hello", {"experiment": self.experiment, **bound[n]}) for n in new}
        found = {}
        replies = self._exchange({n: r for n, r in asked.items() if n not in self.silent}, HELLO)
        replies |= self._exchange({n: r for n, r in asked.items() if n in self.silent}, HELLO_AGAIN)
        self.silent = (self.silent - replies.keys()) & set(online)
        self.silent |= {n for n, reply in replies.items() if isinstance(reply, Failure) and reply.busy}
        for node, reply in replies.items():
            why, told = answer(reply)
            name = str(told.get("client", ""))
            if not why and not NAME.fullmatch(name):
                why = f"its name is {name!r:.80}"
            if not why and (difference := other_format(told)):
                why = f"it has {difference}"
            member = self.roster.named(name)
            other = next((n for n, m in self.met.items() if m == name), None)
            if not why and self.settings.bind:
                why = _about_key(node, keys[node], name, member)
            if not why and other is not None and self.settings.bind:
                why = f"client {name} is here already, as another node"
            if why:
                log.warning("node %d is not used: %s", node, why)
                self.unused[str(node)] = why
                self.aside[node] = self.clock() + RETRY
                continue
            if (version := told.get("version")) != VERSION:
                log.info("client %s runs personafl %s, this is %s", name, one_line(version)[:40], VERSION)
            self.unused.pop(str(node), None)
            self.met = {n: m for n, m in self.met.items() if m != name} | {node: name}
            if member is not None:
                member.node, member.key = node, keys[node]
            found[node] = told
        return found

    def _agreed(self, wanted: int) -> bool:
        """Make a world of what the clients that are there tell of their data; False where they are too few for it."""
        node_of = {name: node for node, name in self.met.items()}
        roster = Roster(self.settings.clients)
        members = roster.add(node_of)
        told = self._described({m.number: (node_of[m.name], m) for m in members})
        if not told:
            return False
        usual = Counter(d.kind for d in told.values()).most_common(1)[0][0]  # what one says does not shut out the rest
        like = next(d for d in told.values() if d.kind == usual)
        held = {n: d for n, d in told.items() if d.kind == usual}
        form = self._common_form([d.form for d in held.values()])
        if (excess := find_excess(held, form)) is not None:
            most, why = excess
            self._set_aside(node_of[members[most].name], members[most], why)
            return False
        for m in members:
            if m.number in told and (why := told[m.number].unlike(like) or labels_beyond(told[m.number].form, form)):
                self._set_aside(node_of[m.name], m, why)
                held.pop(m.number, None)
        normalization = targets = None
        first = members[: self.settings.clients]
        if len(held) == len(members):
            training = {m.number: held[m.number] for m in first}
            normalization = self._normalization(form, training, members, node_of)
            targets = self._target_normalization(form, training, members, node_of)
        if len(held) < len(members) or any(m.name not in self.met.values() for m in members):
            return False  # numbers follow from who is there, so all are told anew
        if len(members) < wanted:
            return False
        self.roster = roster
        for m in members:
            m.node, m.sizes = node_of[m.name], held[m.number].sizes
            m.key = self.transport.key(m.node)
        everybody = len(members) >= self.settings.clients
        examples = sum(m.sizes["train"] for m in first) if everybody else 0
        clients = self.settings.clients
        world = World(self.experiment, VERSION, self.recipe, clients, examples, form, normalization, targets)
        parts = build_parts(world)
        validation = sum(m.sizes["validation"] for m in first)
        check_stopping(validation, form.task, parts.training, parts.recipe.evaluation)
        check_calibration(validation, parts.algorithm, parts.recipe.evaluation)
        check_augmentation("what the clients hold", form.shape, parts.training)
        self.world = dataclasses.replace(world, init=parts.model.initial_hash(), outputs=parts.model.sample_outputs)
        if not parts.model.sample_outputs:
            log.warning(
                "The model has no finite outputs for drawn inputs, so it is not compared whether clients run the same "
                "code: only the hash of the first weights is."
            )
        self._build()
        self._save()
        log.info("%d clients are there: %s", len(members), list_names([m.name for m in members], NAMED))
        return True

    def _described(self, clients: Mapping[int, tuple[int, Member]]) -> dict[int, Described]:
        """What these clients tell of their data, by number; those that cannot are set aside."""
        told: Row = {"experiment": self.experiment, "recipe": self.recipe, "version": VERSION, "format": FORMAT}
        told |= {} if self.world is None else {"form": dataclasses.asdict(self.world.form), "world": self.world.told()}
        asked = {node: Request("describe", told | {"number": number}) for number, (node, _) in clients.items()}
        replies, found = self._exchange(asked), {}
        for number, (node, member) in clients.items():
            why, told = answer(replies[node])
            try:
                if not why:
                    found[number] = Described.read(told)
            except (UserError, KeyError, TypeError, ValueError):
                why = "what it tells of its data cannot be understood"
            if why:
                self._set_aside(node, member, why)
        return found

    def _set_aside(self, node: int, member: Member, why: str) -> None:
        log.warning("client %s is not used: %s", member.name, why)
        self.unused[str(node)] = why
        self.aside[node] = self.clock() + RETRY
        self.met.pop(node, None)

    def _common_form(self, forms: Sequence[Form]) -> Form:
        """The form of all, with the classes and the categories of all."""
        first, given = forms[0], self.settings.labels
        if tables := [f.columns for f in forms if f.columns is not None]:
            first = first.with_columns(unite_columns(tables))
        if first.class_names is None:
            return dataclasses.replace(first, classes=len(given) or max(f.classes for f in forms))
        names = given or tuple(sorted({n for f in forms for n in f.class_names or ()}))
        return dataclasses.replace(first, classes=len(names), class_names=names)

    def _normalization(
        self, form: Form, told: Mapping[int, Described], members: Sequence[Member], node_of: Mapping[str, int]
    ) -> MeanAndStd | None:
        """What inputs are normalised by; clients whose sums cannot be used are set aside."""
        setting = next(iter(told.values())).setting
        if setting == "none":
            return None
        if setting == "half":
            return normalize.HALF
        if not isinstance(setting, str):
            return setting
        two = form.stand_in(None).x
        sums = {n: functools.partial(d.input_moments, form, two) for n, d in told.items()}
        return self._standardization(sums, two, members, node_of)

    def _target_normalization(
        self, form: Form, told: Mapping[int, Described], members: Sequence[Member], node_of: Mapping[str, int]
    ) -> MeanAndStd | None:
        """What targets are normalised by; clients whose sums cannot be used are set aside."""
        if not normalize.normalizes_targets(read_recipe(self.recipe).data.normalize_targets, form.task):
            return None
        two = form.stand_in(None).y
        sums = {n: functools.partial(read_moments, d.target_moments, two, d.sizes["train"]) for n, d in told.items()}
        return self._standardization(sums, two, members, node_of)

    def _standardization(
        self,
        sums: Mapping[int, Callable[[], normalize.Moments]],
        two: Tensor,
        members: Sequence[Member],
        node_of: Mapping[str, int],
    ) -> MeanAndStd | None:
        """Mean and deviation of all, from readers of each client's sums; `two` are made-up examples or targets."""
        each = []
        for n, read in sums.items():
            try:
                each.append(read())
            except (KeyError, TypeError, ValueError, OverflowError):
                self._set_aside(node_of[members[n].name], members[n], "sums of its data that cannot be")
        if len(each) < len(sums):
            return None
        made = normalize.standardization(each, two)
        return made.mean, made.std

    def meet(self) -> None:
        """Take note of clients that came, or came back, since the last stage."""
        assert self.world is not None
        new = self._hello()
        strangers = sorted((self.met[n] for n in new if self.roster.named(self.met[n]) is None), key=natural_order)
        back: dict[int, tuple[int, Member]] = {}
        for node, told in new.items():
            if member := self.roster.named(self.met[node]):
                there = told.get("stages")
                if member.acknowledged >= 0 and not (isinstance(there, list) and member.acknowledged in there):
                    self.lost(member)
                back[member.number] = node, member
        if names := [m.name for m in self._admitted(back)]:
            log.info("back: %s", list_names(names, NAMED))
        while strangers:  # a number is given for good, so to none that cannot be used
            node_of = {name: node for node, name in self.met.items()}
            begin = len(self.roster.members)
            trial = [
                Member(name, begin + i, node_of[name], self.transport.key(node_of[name]))
                for i, name in enumerate(strangers)
            ]
            if len(self._admitted({m.number: (m.node, m) for m in trial})) == len(trial):
                self.roster.members += trial
                for m in trial:
                    log.info("client %s is there, number %d", m.name, m.number)
                break
            strangers = [name for name in strangers if name in self.met.values()]

    def _admitted(self, clients: Mapping[int, tuple[int, Member]]) -> list[Member]:
        """Those of these clients whose data are what was agreed on; the others are set aside."""
        assert self.world is not None
        found = []
        for number, told in self._described(clients).items():
            node, member = clients[number]
            agreed = self.world.form
            why = told.form.unlike(agreed) or labels_beyond(told.form, agreed) or categories_beyond(told.form, agreed)
            if why:
                self._set_aside(node, member, why)
                continue
            member.sizes = told.sizes
            found.append(member)
        return found

    def lost(self, member: Member) -> None:
        """A client that lost what it kept begins anew, and nothing of it stays at the server."""
        log.warning("client %s lost what it kept: it begins anew, as a newcomer", member.name)
        member.anew, member.lost, member.acknowledged = True, member.lost + 1, -1
        if lasting := self.records.remove(member.number):
            self.server = self.parts.algorithm.withdraw(self.server, lasting)

    # A stage

    def _stage(self) -> None:
        """Play the next stage: ask its clients until enough have played it, then aggregate and write its row."""
        self.meet()
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
        stage.server = self.server  # from which clients that lost their state may have been withdrawn meanwhile
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
        self._then_score(row, position, pool.judged())
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

    def present(self, ids: Iterable[int]) -> list[int]:
        """Those of these clients that are there and can be used, in their order."""
        return [m.number for m in self.online(ids)]

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
        self.meet()
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

    def name(self, number: int) -> str:
        member = self.roster.numbered(number)
        return str(number) if member is None else member.name

    def about_missing(self, ids: Sequence[int]) -> str:
        """A sentence on clients that cannot be asked."""
        known = sorted(n for n in ids if self.roster.numbered(n) is not None)
        names = [self.name(n) for n in known]
        refused = {self._refusal(n) for n in known}
        strangers = len(ids) - len(known)
        never = f"{count(strangers, 'client')} {'has' if strangers == 1 else 'have'} never come" if strangers else ""
        if known and not never and len(refused) == 1 and (why := refused.pop()):
            who = f"Client {names[0]}" if len(known) == 1 else f"Each of {list_names(names, NAMED)}"
            return f"{who} is refused: {why}."
        missing = list_names([self._with_reason(n, self._refusal(n)) for n in known], NAMED)
        return " ".join(f"{part}." for part in (missing and f"Missing: {missing}", never) if part)

    def about_failures(self, progress: StageProgress) -> str:
        """A sentence on the clients that have no update, and why."""
        left = [n for n in progress.ids if n not in progress.updates]
        reasons = {n: progress.failures.get(n) or self._refusal(n) or "is not there" for n in left}
        return self._reasons(reasons, alike=not progress.updates)

    def _reasons(self, reasons: Mapping[int, str], *, alike: bool = True) -> str:
        """A sentence on clients and the reason of each; of one for all where that may be said and is so."""
        if not reasons:
            return ""
        if alike and len(reasons) > 1 and len(set(reasons.values())) == 1:
            return f"All {len(reasons)} clients fail alike: {next(iter(reasons.values()))}."
        return f"Without one: {list_names([self._with_reason(n, why) for n, why in reasons.items()], NAMED)}."

    def _refusal(self, number: int) -> str:
        """Why a client is not used, where that is known."""
        member = self.roster.numbered(number)
        return "" if member is None else self.unused.get(str(member.node), "")

    def _with_reason(self, number: int, why: str) -> str:
        return f"{self.name(number)} ({why})" if why else self.name(number)

    def online(self, ids: Iterable[int]) -> list[Member]:
        """The members of these numbers whose nodes are there, in their order."""
        nodes = set(self.transport.nodes())
        members = [self.roster.numbered(n) for n in ids]
        return [m for m in members if m is not None and m.node in nodes and self.met.get(m.node) == m.name]

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
        replies = self._exchange({t.member.node: t.request() for t in talks.values()})
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
            asked = {m.number: self.talk(m, None, score=True) for m in self.online(self._evaluated()) if not m.anew}
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
        self.meet()
        while True:
            open_members = [m for m in self.online(m.number for m in self.roster.members) if not m.closed]
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
            missing = [n for n in without if n not in self.present(without)]
            reasons = {n: why for n, why in failures.items() if n in without and n not in missing}
            try:
                self.wait(
                    f"All rounds are played. The run ends once {count(needed, 'client')} have the final model; "
                    f"{have} so far. {' '.join(filter(None, (self.about_missing(missing), self._reasons(reasons))))}",
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

    def _exchange(self, requests: Mapping[int, Request], most: float = math.inf) -> dict[int, Reply | Failure]:
        timeout = min(self.settings.round_timeout, most)
        return self.transport.exchange(requests, timeout) if requests else {}


def _about_key(node: int, key: str, name: str, member: Member | None) -> str:
    """Why a node may not be the client it says it is; nothing where it may."""
    if key == str(node):  # without keys, a name belongs to the node that first had it
        taken = member is not None and member.key not in ("", key)
        return f"client {name} is bound to another key than that of this node" if taken else ""
    if key == name:
        return ""
    if not key:
        return f"it calls itself {name}, and its key is not in the server's keys/; keys/{name}.pub has to be"
    return (
        f"its key is keys/{key}.pub, so it can only be client {key}, and it calls itself {name}; set "
        f'id = "{key}" in its client.toml, or deployment.bind = false'
    )
