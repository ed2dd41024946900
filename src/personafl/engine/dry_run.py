"""What a run will cost, before it is run: every hook, payload and mask is real, only training is left out."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from personafl.core import tree
from personafl.core.algorithm import Algorithm
from personafl.core.hook_checks import check_client_model, check_initial_server
from personafl.core.normalization import as_inputs
from personafl.core.tasks import as_targets
from personafl.core.types import (
    Criterion,
    Download,
    Examples,
    Params,
    Round,
    Setup,
    Stage,
    TaskName,
    TrainedTask,
    Training,
)
from personafl.engine import cost
from personafl.engine.aggregation import aggregated
from personafl.engine.local import Work, client_round
from personafl.evaluation import metrics
from personafl.models.stacked import StackedModel
from personafl.plugins.assemble import assembled


@dataclass(frozen=True)
class Cost:
    """The expected cost of a run to one client."""

    up_bytes: float
    down_bytes: float
    paper_mib: float
    flops: float
    dense_flops: float


class _Client:
    """One client, the server, and every hook of a method between them; only training is left out."""

    def __init__(
        self,
        algorithm: Algorithm,
        model: StackedModel,
        training: Training,
        num_clients: int,
        examples: int,
        run_losses: bool = True,
    ) -> None:
        """Losses are run once each, on copies of the model's example, to count what they call; else never."""
        self.algorithm = algorithm = assembled(
            algorithm, Setup(model.info, training, num_clients, num_clients * examples)
        )
        self.examples = examples
        dtype = torch.float64 if training.precision == "float64" else torch.float32
        model = model.copy().to(torch.device("cpu"), dtype)
        nothing = torch.zeros(0)
        x, y, loss = _example(model, training) if run_losses else (nothing, nothing, metrics.cross_entropy)
        self.task = TrainedTask(model, loss, metrics.METRICS["classification"]["accuracy"])  # the metric is not asked
        ids, rows = torch.zeros(1, dtype=torch.int64), torch.zeros(1, examples, dtype=torch.int64)
        self.data = Examples(x, y, rows, torch.tensor([examples]), ids)
        self.server = check_initial_server(algorithm, algorithm.init_server(model.initial))
        self.kept, self.known = algorithm.init_clients(model.initial, ids), algorithm.init_known(model.initial, ids)

    def run_stage(self, stage: Stage) -> tuple[cost.Traffic, Work]:
        """The hooks of a stage; what it costs the client."""
        algorithm, rnd = self.algorithm, Round(stage, self.algorithm.rate(stage))
        sent = algorithm.download(self.server, self.known, rnd) if stage.down else Download()
        done = client_round(algorithm, self.task, self.data, self.kept, sent, rnd, train=False)
        self.kept = done.kept
        if stage.up:
            examples = torch.tensor([float(self.examples)], dtype=torch.float64)
            weights = algorithm.weigh(self.server, self.known, done.upload, examples, rnd)
            self.known = algorithm.remember(self.known, done.upload, weights, rnd)
            terms = algorithm.summands(done.upload, weights, rnd)
            sums = {n: t.sum(0, dtype=torch.float64) for n, t in terms.items()}
            self.server = aggregated(algorithm, self.server, sums, rnd)
        return cost.traffic(stage, sent, done.upload, 1), done.work

    def deploy(self, stage: Stage) -> Params:
        """What the client would predict with after a stage, but for what is measured on data."""
        rnd = Round(stage, self.algorithm.rate(stage))
        down = tree.received(self.algorithm.download(self.server, self.known, rnd), 1)
        own = self.algorithm.personal(self.kept, down)
        check_client_model(self.algorithm, "personal", own)
        ready = self.algorithm.deploy(own, down)
        check_client_model(self.algorithm, "deploy", ready)
        return ready


@torch.no_grad()
def _example(model: StackedModel, training: Training) -> tuple[Tensor, Tensor, Criterion]:
    """The model's example, a target for it, and the loss of the task."""
    x = as_inputs(model.example, next(iter(model.initial.values())).dtype)
    out = model({n: t[None] for n, t in model.initial.items()}, x[None])[0]
    task: TaskName = ("sequence" if out.dim() > 2 else "classification") if training.task == "auto" else training.task
    shapes = {
        "regression": out.shape[1:] if out[0].numel() > 1 else (),
        "classification": (),
        "sequence": out.shape[1:2],
    }
    y = as_targets(torch.zeros(1, *shapes.get(task, out.shape[1:])), task)
    return x, y, metrics.chosen(training.loss, metrics.LOSSES[task], "training.loss")


def check(algorithm: Algorithm, model: StackedModel, training: Training, num_clients: int) -> None:
    """Go through the hooks of a method's first stage and of its prediction, so that what cannot work is said early."""
    client = _Client(algorithm, model, training, num_clients, examples=2, run_losses=False)
    first = next(s for s in client.algorithm.schedule() if s.who != "nobody")
    client.run_stage(first)
    client.deploy(first)


def stages(
    algorithm: Algorithm, model: StackedModel, training: Training, *, num_clients: int, examples: int
) -> tuple[list[Stage], bool, dict[str, torch.Size]]:
    """Return the schedule of a method, whether it depends on the number of rounds, and the shapes of its state."""
    bound = assembled(algorithm, Setup(model.info, training, num_clients, examples))
    first, one = model.initial, torch.zeros(1, dtype=torch.int64)
    held = bound.init_server(first), bound.init_clients(first, one), bound.init_known(first, one)
    shapes = {f"{i}/{n}": t.shape for i, part in enumerate(held) for n, t in part.items()}
    return bound.schedule(), bound.needs_all_rounds(), shapes


def estimate_cost(
    algorithm: Algorithm, model: StackedModel, training: Training, *, num_clients: int, examples: int
) -> Cost:
    """The expected cost to a client with this many training examples, drawn as often as the join ratio says.

    Masks that training would move stay as they begin. That changes no cost where their size is fixed; the units of
    FedPeWS are on as often as before its scores were trained.
    """
    client = _Client(algorithm, model, training, num_clients, examples)
    up = down = paper = flops = dense = 0.0
    often = client.algorithm.setup.training.cohort(num_clients) / num_clients
    for stage in client.algorithm.schedule():
        if stage.who == "nobody":
            continue
        bytes_, work = client.run_stage(stage)
        share = often if stage.who == "sampled" else 1.0
        up, down, paper = up + share * bytes_.up, down + share * bytes_.down, paper + share * bytes_.paper
        flops += share * float(work.flops)
        dense += share * float(work.dense_flops)
    return Cost(up, down, paper / 2**20, flops, dense)
