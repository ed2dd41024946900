"""Simulate a federation: sample, download, train, upload, aggregate, evaluate, record."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from personafl.core import cost, rng, tree
from personafl.core.algorithm import Algorithm
from personafl.core.batches import steps_per_epoch
from personafl.core.compose import assembled
from personafl.core.local import Work, session
from personafl.core.replay import Recorder
from personafl.core.store import Store, row_bytes
from personafl.core.types import (
    Criterion,
    Download,
    Evaluation,
    Examples,
    Params,
    Payload,
    Round,
    Setup,
    Stage,
    Task,
    Training,
)
from personafl.data.federated import Federation, Place
from personafl.data.shift import Shift, draw
from personafl.evaluation import final, metrics, shifts
from personafl.evaluation.evaluate import deployed, scores
from personafl.models.stacked import StackedModel
from personafl.sim import layout, network, scoring
from personafl.sim.placement import Placement
from personafl.sim.profile import NoClock
from personafl.sim.ranks import Alone

T = TypeVar("T")
Row = dict[str, Any]


@dataclass
class Totals:
    """What a run has cost so far, over all clients."""

    up_bytes: int = 0
    down_bytes: int = 0
    paper_bytes: float = 0.0
    flops: float = 0.0
    dense_flops: float = 0.0


@dataclass(frozen=True)
class _Part:
    """What one chunk of a cohort contributes to a round."""

    ids: Tensor
    sums: Params
    traffic: cost.Traffic
    work: Work
    upload: Payload  # where the server must see all of them together
    before: list[Tensor]  # scores of what the clients came with, where they are judged right after training
    trained: Params  # and what they then predict with


@dataclass
class _Spent:
    """What the stacks of a round cost so far."""

    totals: Totals
    losses: Tensor  # [clients of the round], summed over steps, on the device
    steps: Tensor  # [clients of the round]
    clients: int = 0

    def add(self, part: _Part) -> None:
        self.totals.up_bytes += part.traffic.up
        self.totals.down_bytes += part.traffic.down
        self.totals.paper_bytes += part.traffic.paper
        self.totals.flops += float(part.work.flops.sum())
        self.totals.dense_flops += float(part.work.dense_flops.sum())
        here = slice(self.clients, self.clients + len(part.ids))
        self.losses[here], self.steps[here] = part.work.loss, part.work.steps
        self.clients = here.stop

    def means(self) -> Tensor:
        """The mean loss of each client that trained."""
        return (self.losses.cpu() / self.steps)[self.steps > 0]


class Simulation:
    """One algorithm over one federation: explicit state, advanced stage by stage."""

    def __init__(
        self,
        federation: Federation,
        model: StackedModel,
        algorithm: Algorithm,
        training: Training,
        evaluation: Evaluation | None = None,
        *,
        criterion: Criterion = metrics.cross_entropy,
        metric: Criterion = metrics.accuracy,
        device: str | torch.device = "cpu",
        chunk: int = 0,
        through_wire: bool = False,
        record: bool = True,
        data_on: Place = "auto",
        ranks: Alone | None = None,
        clock: NoClock | None = None,
        store: str | Path = "auto",
        spill: Path | None = None,
        memory: float | None = None,
        shift: Shift | None = None,
    ) -> None:
        """`chunk` bounds how many clients train as one stack (0: as fits); `through_wire` packs every payload.

        `record` replays training steps on a GPU. `data_on` says where examples are: on the device, on the host, or
        there only if they are too large (`auto`). `ranks` are the processes that share the work, `clock` is told
        what it consists of. `store` is the home of what clients keep: `device`, `host`, a folder, or the first of them
        with room for all (`auto`; the folder is then `spill` or a temporary one). `memory` limits, in GiB, what the
        process holds on the device, or in main memory where it trains there. `shift` is what was drawn for another
        method of the same federation, evaluation and seed.
        """
        self.ranks, self.clock = ranks or Alone(), clock or NoClock()
        self.evaluation = evaluation or Evaluation()
        shifts.check(self.evaluation, federation.source)
        self.device = torch.device(device)
        dtype = torch.float64 if training.precision == "float64" else torch.float32
        if training.augment != "none" and federation.source.x.dim() != 4:
            raise ValueError(
                f"training.augment={training.augment!r}: {federation.source.name} is no set of images, its examples "
                f"are of shape {tuple(federation.source.x.shape[1:])}; use none"
            )
        self.data_hash = federation.source.digest
        self.federation = federation.to(self.device, dtype, data_on)
        self.model = model.copy().to(self.device, dtype, training.precision)
        self.task = Task(self.model, criterion, metric)
        self.algorithm = assembled(algorithm, Setup(model.info, training, federation.num_clients))
        self.training = self.algorithm.setup.training
        self.through_wire = through_wire
        self.recorder = Recorder() if record and self.device.type == "cuda" and self.model.recordable else None

        self.server = self.algorithm.init_server(self.model.initial)
        self.schedule = self.algorithm.schedule()
        self._house(store, spill, memory, chunk)
        one = torch.zeros(1, dtype=torch.int64)
        owned = bool(self.store.gather(one) or self.known.gather(one))
        self.placement = Placement(self.ranks, self.clock, self._steps, self.federation.everybody, owned=owned)
        self.played = 0  # stages behind us
        self.totals = Totals()
        self.rows: list[Row] = []
        self.trained: tuple[Tensor, Params] | None = None  # the last cohort before aggregation, where that is scored
        self.left: dict[int, float] = {}  # the accuracy each client ended its last scored session with
        self.shift = shift or self._shift()

    def _house(self, store: str | Path, spill: Path | None, memory: float | None, chunk: int) -> None:
        """Find a home for what clients keep and for what the server knows of them, and lay stacks over what is left."""

        def fresh(ids: Tensor) -> Params:
            return self.algorithm.init_clients(self.model.initial, ids)

        def unknown(ids: Tensor) -> Params:
            return self.algorithm.init_known(self.model.initial, ids)

        one = torch.zeros(1, dtype=torch.int64)
        kept, known = fresh(one), unknown(one)
        rows = self.touched()
        home, room = layout.housed(store, rows, row_bytes(kept) + row_bytes(known), self.device, memory, spill)
        homes = (home / "clients", home / "known") if isinstance(home, Path) else (home, home)
        self.store = Store(fresh, homes[0], device=self.device, expected=rows)
        self.known = Store(unknown, homes[1], device=self.device, expected=rows)
        held = sum(t.numel() * t.element_size() for t in (*kept.values(), *known.values()))
        sizes = self.federation.sizes("train")
        self.layout = layout.choose(self.model, self.training, self.device, sizes, chunk, kept=held, room=room)

    # Who

    def touched(self) -> int:
        """How many clients a run comes across, at most."""
        clients = self.federation.num_clients
        if any(s.who == "all" for s in self.schedule):
            return clients
        return min(clients, self.training.cohort(clients) * sum(s.who == "sampled" for s in self.schedule))

    @property
    def everybody(self) -> Tensor:
        return torch.arange(self.federation.num_clients)

    def cohort(self, stage: Stage) -> Tensor:
        """The clients of a stage, largest first: a function of seed and round, the same for every method."""
        if stage.who == "nobody":
            return torch.zeros(0, dtype=torch.int64)
        if stage.who == "all":
            return self.sorted(self.everybody)
        clients = self.federation.num_clients
        size = self.training.cohort(clients)
        chosen = rng.generator(self.training.seed, "cohort", stage.number).choice(clients, size, replace=False)
        return self.sorted(torch.from_numpy(chosen))

    def sorted(self, ids: Tensor) -> Tensor:
        ids = ids.sort().values
        sizes = self.federation.splits["train"].lengths(ids)
        return ids[sizes.argsort(descending=True, stable=True)]

    def scored(self, stage: Stage) -> Tensor:
        """The clients that are evaluated after a stage."""
        if self.trained is not None:
            return self.trained[0]
        which = self.evaluation.clients
        if which == "selected":
            behind = self.schedule[: self.played] or [stage]
            return self.cohort(next(s for s in reversed(behind) if s.who != "nobody" and s.judged))
        if which == "all" or which >= self.federation.num_clients:
            return self.sorted(self.everybody)
        pick = rng.generator(self.training.seed, "scored").choice(self.federation.num_clients, which, replace=False)
        return self.sorted(torch.from_numpy(pick))

    def each(self, ids: Tensor, work: Callable[[StackedModel, Tensor], T], *, train: bool = False) -> Iterator[T]:
        threads = self.layout.threads if train else self.layout.sweep_threads
        with layout.products(self.training.precision):
            yield from layout.each(dataclasses.replace(self.layout, threads=threads), self.model, ids, work)

    def _steps(self, ids: Tensor) -> Tensor:
        """Minibatches of an epoch of these clients."""
        if self.training.local_steps:
            return torch.ones_like(ids)
        return steps_per_epoch(self.federation.splits["train"].lengths(ids), self.training.batch_size)

    def collect(self) -> None:
        """Bring all that is kept of clients to the first rank."""
        everywhere = self.algorithm.needs_uploads()  # then every rank remembered what the server knows
        self.placement.collect(self.store, *(() if everywhere else (self.known,)))

    # A round

    def step(self) -> Row:
        """Play the next stage."""
        self.clock.lap()
        begun = time.perf_counter()
        stage = self.schedule[self.played]
        rnd = Round(stage, self.algorithm.rate(stage))
        ids = self.cohort(stage)
        parts: list[_Part] = []
        sums: Params = {}
        self.placement.weigh(ids)
        mine = self.placement.mine(ids)
        none = torch.zeros(len(mine), dtype=torch.float64)
        spent = _Spent(Totals(), torch.zeros_like(none, device=self.device), none)
        for part in self.each(mine, lambda model, chunk: self._client_side(model, chunk, rnd), train=True):
            spent.add(part)
            if part.upload or part.before or part.trained:  # nothing else outlives its stack
                parts.append(dataclasses.replace(part, sums={}))
            with self.clock("aggregation"):
                _add(sums, part.sums)
        if stage.up and len(ids):
            self._aggregate(ids, parts, sums, rnd)
        judged = len(ids) > 0 and self._judged_next()
        if judged:
            self.trained = ids, tree.join(p.trained for p in parts) if parts else {}
        self.played += 1
        found: Row = {}
        if self._due(self.played - 1):
            with self.clock("evaluation"):
                before = [s for p in parts for s in p.before]
                found = scoring.after_round(self, self.placement.together(ids, before) if judged else [])
        losses = self._count(spent)  # waits for the device, so it comes last
        diverged = int((~losses.isfinite()).sum())
        row: Row = {
            "round": stage.number,
            "phase": stage.phase,
            "clients": len(ids),
            "lr": rnd.lr,
            "loss": _finite(losses),
            **({"diverged": diverged} if diverged else {}),
            "up_bytes": self.totals.up_bytes,
            "down_bytes": self.totals.down_bytes,
            "gflop": self.totals.flops / 1e9,
            **self.algorithm.notes(self.server),
            **found,
        }
        row["seconds"] = time.perf_counter() - begun
        self.rows.append(row)
        self.clock.lap(row)
        return row

    def _aggregate(self, ids: Tensor, parts: list[_Part], sums: Params, rnd: Round) -> None:
        """The server's new state, from what came from each chunk."""
        with self.clock("aggregation"):
            if self.algorithm.needs_uploads():
                mine = tree.gathered(p.upload for p in parts) if parts else {}
                _add(sums, self._server_side(ids, self.placement.stacked(ids, mine, self.device), rnd))
            else:
                with self.clock("waiting"):
                    sums = self.ranks.sum(sums)
            self.server = self.algorithm.aggregate(self.server, sums, rnd)

    def _count(self, spent: _Spent) -> Tensor:
        """Add up what a round cost; the losses of the clients that trained."""
        with self.clock("waiting"):
            found = self.ranks.gather((spent.totals, spent.means()))
        for totals, _ in found:
            for f in dataclasses.fields(Totals):
                setattr(self.totals, f.name, getattr(self.totals, f.name) + getattr(totals, f.name))
        return torch.cat([part for _, part in found])

    def _due(self, place: int) -> bool:
        """Whether the stage at this place of the schedule is followed by an evaluation."""
        stage = self.schedule[place]
        often = stage.judged and (stage.number + 1) % self.evaluation.eval_every == 0
        return often or place + 1 == len(self.schedule)

    def _judged_next(self) -> bool:
        """Whether the cohort of the present stage is the one of the next evaluation after local training."""
        if self.evaluation.when != "after_local":
            return False
        place = self.played
        while not self._due(place) and self.schedule[place + 1].who == "nobody":
            place += 1
        return self._due(place)

    def _client_side(self, model: StackedModel, ids: Tensor, rnd: Round) -> _Part:
        """What a stack of clients does in a round, and the server with their uploads as far as it can."""
        task, clock = dataclasses.replace(self.task, model=model), self.clock
        with clock("data"):
            data = self._training_data(ids)
        with clock("wire"):
            down = self.download(ids, rnd) if rnd.stage.down else Download()
            received = network.delivered(down, len(ids), self.device) if self.through_wire else down
        with clock("store"):
            kept = self.store.gather(ids)
        with clock("training"):
            done = session(self.algorithm, task, data, kept, received, rnd, recorder=self.recorder, clock=clock)
        with clock("wire"):
            upload = done.upload
            if self.through_wire and rnd.stage.up:
                upload = network.returned(upload, received, len(ids), self.device)
            traffic = cost.traffic(rnd.stage, down, upload, len(ids))
        with clock("store"):
            self.store.scatter(ids, done.kept)
        together = self.algorithm.needs_uploads()
        with clock("aggregation"):
            sums = self._server_side(ids, upload, rnd) if rnd.stage.up and not together else {}
        before: list[Tensor] = []
        trained: Params = {}
        if self._judged_next():
            with clock("evaluation"):
                payload = tree.received(received, len(ids))
                came = deployed(self.algorithm, task, self.algorithm.personal(kept, payload), payload, lambda: data)
                test = self.federation.examples("test", ids)
                before = scoring.portable(
                    self, scores(self.algorithm.predict, task, came, test, self.layout.activations)
                )
                own = self.algorithm.trained(done.kept, done.local, payload, rnd)
                trained = deployed(self.algorithm, task, own, payload, lambda: data)
        return _Part(ids, sums, traffic, done.work, upload if together else {}, before, trained)

    def _training_data(self, ids: Tensor) -> Examples:
        return dataclasses.replace(self.federation.examples("train", ids), augment=self.training.augment != "none")

    def _server_side(self, ids: Tensor, upload: Payload, rnd: Round) -> Params:
        """The sums over these clients that the server works with; what it will know of them."""
        examples = tree.sent(self.federation.splits["train"].lengths(ids).double(), self.device)
        known = self.known.gather(ids)
        weights = self.algorithm.weigh(self.server, known, upload, examples, rnd)
        self.known.scatter(ids, self.algorithm.remember(known, upload, weights, rnd))
        terms = self.algorithm.summands(upload, weights, rnd)
        return {n: _total(t) for n, t in terms.items()}

    def download(self, ids: Tensor, rnd: Round) -> Download:
        """What the server sends these clients."""
        return self.algorithm.download(self.server, self.known.gather(ids), rnd)

    # What clients predict with
    #
    # `scored` says who is evaluated, `judged` with what: with what they predict with (`ready`), or, where
    # `evaluation.when` is "after_local", with what the last cohort came to by its training (`trained`), before the
    # server's next model. `_judged_next` tells a cohort at work that it is this one.

    @property
    def now(self) -> Round:
        """The round as the clients last saw it, for them to predict after."""
        stage = self.schedule[max(self.played - 1, 0)]
        return Round(stage, self.algorithm.rate(stage), predicting=True)

    def ready(self, model: StackedModel, ids: Tensor) -> Params:
        """What these clients predict with now."""
        task = dataclasses.replace(self.task, model=model)
        down = tree.received(self.download(ids, self.now), len(ids))
        own = self.algorithm.personal(self.store.gather(ids), down)
        return deployed(self.algorithm, task, own, down, lambda: self.federation.examples("train", ids))

    def joined(self, model: StackedModel, ids: Tensor) -> Params:
        """What newcomers predict with: what they are given, after the session their method has for them."""
        task = dataclasses.replace(self.task, model=model)
        data = self._training_data(ids)
        known = self.algorithm.init_known(self.model.initial, ids)
        down = self.algorithm.download(self.server, known, self.now)
        kept = self.algorithm.newcomer(self.model.initial, down, ids)
        if phase := self.algorithm.welcome():
            stage = Stage(number=self.schedule[-1].number + 1, phase=phase, who="all", up=False)
            rnd = Round(stage, self.algorithm.rate(self.schedule[-1]))
            kept = session(self.algorithm, task, data, kept, down, rnd).kept
        received = tree.received(down, len(ids))
        return deployed(self.algorithm, task, self.algorithm.personal(kept, received), received, lambda: data)

    def judged(self, model: StackedModel, ids: Tensor) -> Params:
        """What these clients are scored with: what they predict with, or what their last training gave."""
        if self.trained is None:
            return self.ready(model, ids)
        have, rows = self.trained
        place = {c: i for i, c in enumerate(self.placement.mine(have).tolist())}
        return tree.take(rows, torch.tensor([place[c] for c in ids.tolist()], device=self.device))

    def common(self) -> Params | None:
        """The server's model, as a stack of one; None where the method has no complete one."""
        known = self.algorithm.init_known(self.model.initial, torch.zeros(1, dtype=torch.int64))
        return self.algorithm.common(tree.received(self.algorithm.download(self.server, known, self.now), 1))

    def _shift(self) -> Shift | None:
        if self.evaluation.shift == "none":
            return None
        return draw(self.federation, self.evaluation.shift, self.training.seed, self.evaluation.draws)

    def evaluate(self) -> Row:
        """Accuracy of the personal models and of the global one, over clients."""
        return scoring.after_round(self, [])

    def evaluations(self) -> final.Arrays:
        """The scores of all scored clients under all that was asked for; `evaluation/final.py` has the names."""
        return scoring.of_run(self)

    def masks(self) -> Row | None:
        """How alike the masks of the evaluated clients are; None where they have none."""
        return scoring.masks(self)

    def newcomers(self, found: final.Arrays | None = None) -> Row | None:
        """Accuracy of the clients held out, as newcomers; None where there are none."""
        return scoring.newcomers(self, found)

    def clients_table(self, found: final.Arrays | None = None) -> tuple[list[Row], Row | None]:
        """The final accuracy of every scored client, and the accuracy at each degree of shift."""
        found = self.evaluations() if found is None else found
        train = self.federation.sizes("train")[torch.from_numpy(found["ids"])]
        return final.table(found, train.numpy()), final.shift_summary(found, self.evaluation)

    # A run

    def run(self, on_round: Callable[[Row], None] | None = None) -> None:
        """Play what is left of the schedule."""
        while self.played < len(self.schedule):
            row = self.step()
            if on_round is not None:
                on_round(row)

    def hashes(self) -> dict[str, str | None]:
        """What all methods of a comparison must have in common."""
        cohorts, init = hashlib.sha256(), hashlib.sha256()
        for t in range(self.training.num_rounds):
            cohorts.update(self.cohort(Stage(number=t)).numpy().tobytes())
        for n in sorted(self.model.initial):
            init.update(n.encode() + self.model.initial[n].cpu().numpy().tobytes())
        return {
            "split": self.federation.digest(),
            "cohorts": cohorts.hexdigest()[:16],
            "init": init.hexdigest()[:16],
            "shift": None if self.shift is None else self.shift.digest(),
            "data": self.data_hash,
        }


def _total(t: Tensor) -> Tensor:
    """The sum over a stack of clients for `_add`: in float64, but for a lone client's term, which stays as it is."""
    if len(t) == 1:
        return t.squeeze(0)
    if t.is_cuda or t[0].numel() < 2**15:
        return t.sum(0, dtype=torch.float64)
    out = t[0].to(torch.float64, copy=True)
    for row in t[1:]:  # less than half the time, beyond the cache
        out.add_(row)
    return out


def _add(sums: Params, more: Params) -> None:
    """Add those of one more stack, in float64."""
    for n, t in more.items():
        sums[n] = sums[n].add_(t) if n in sums else t.to(torch.float64, copy=True)


def _finite(losses: Tensor) -> float | None:
    """The mean over clients that trained and whose loss is still finite; None where there are none."""
    mean = float(losses[losses.isfinite()].mean()) if len(losses) else math.nan
    return mean if math.isfinite(mean) else None
