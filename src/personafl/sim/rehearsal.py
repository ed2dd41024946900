"""What a run will cost, before it is run: every hook, payload and mask is real, only training is left out."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from personafl.core import cost
from personafl.core.algorithm import Algorithm
from personafl.core.compose import assembled
from personafl.core.local import session
from personafl.core.types import Download, Examples, Round, Setup, Task, Training
from personafl.evaluation import metrics
from personafl.models.stacked import StackedModel


@dataclass(frozen=True)
class Cost:
    """The expected cost of a run to one client."""

    up_bytes: float
    down_bytes: float
    paper_mib: float
    flops: float
    dense_flops: float


def rehearse(algorithm: Algorithm, model: StackedModel, training: Training, *, num_clients: int, examples: int) -> Cost:
    """The expected cost to a client with this many training examples, drawn as often as the join ratio says.

    Masks that training would move stay as they begin. That changes no cost where their size is fixed; the units of
    FedPeWS are on as often as before its scores were trained.
    """
    algorithm = assembled(algorithm, Setup(model.info, training, num_clients))
    training = algorithm.setup.training
    dtype = torch.float64 if training.precision == "float64" else torch.float32
    model = model.copy().to(torch.device("cpu"), dtype)
    task = Task(model, metrics.cross_entropy, metrics.accuracy)
    ids = torch.zeros(1, dtype=torch.int64)
    nothing = torch.zeros(0)
    data = Examples(nothing, nothing, torch.zeros(1, examples, dtype=torch.int64), torch.tensor([examples]), ids)
    server = algorithm.init_server(model.initial)
    kept, known = algorithm.init_clients(model.initial, ids), algorithm.init_known(model.initial, ids)
    up = down = paper = flops = dense = 0.0
    often = training.cohort(num_clients) / num_clients
    for stage in algorithm.schedule():
        if stage.who == "nobody":
            continue
        rnd = Round(stage, algorithm.rate(stage))
        sent = algorithm.download(server, known, rnd) if stage.down else Download()
        done = session(algorithm, task, data, kept, sent, rnd, train=False)
        kept = done.kept
        if stage.up:
            weights = algorithm.weigh(
                server, known, done.upload, torch.tensor([float(examples)], dtype=torch.float64), rnd
            )
            known = algorithm.remember(known, done.upload, weights, rnd)
            terms = algorithm.summands(done.upload, weights, rnd)
            server = algorithm.aggregate(server, {n: t.sum(0, dtype=torch.float64) for n, t in terms.items()}, rnd)
        share = often if stage.who == "sampled" else 1.0
        bytes_ = cost.traffic(stage, sent, done.upload, 1)
        up, down, paper = up + share * bytes_.up, down + share * bytes_.down, paper + share * bytes_.paper
        flops += share * float(done.work.flops)
        dense += share * float(done.work.dense_flops)
    return Cost(up, down, paper / 2**20, flops, dense)
