"""Speed of the stacked engine against a plain per-client PyTorch loop, on a CPU, in one run.

    python benchmarks/cpu.py [--only mlp resnet18] [--repeats 5] [--threads 2] [--out benchmarks/results/cpu.json]

Training: both take the same clients through the same minibatches from the same global model and average the result.
The loop keeps everything in memory: tensors, index batches, one module and one `torch.optim.SGD` per client, all of
PyTorch's threads. Evaluation: both score every client's own model on its own test data, the loop in batches of 256.
The two take turns. Printed are the ratio of their medians, that of their best times, the range of the ratios of
single turns, and the fraction of the machine's matrix-product rate that the engine reaches in training. Where others
use the cores, a loop on several threads waits for them at every operation: `--threads 1` is the comparison to trust
then. With `--out` a record per workload is appended to a JSON list.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from personafl import ALGORITHMS, Evaluation, Federation, Simulation, StackedModel, Training, arrays
from personafl.core import rng as streams
from personafl.data import batches
from personafl.experiment.environment import environment
from personafl.models import MODELS


@dataclass(frozen=True)
class Workload:
    """Clients that all have `each` training and `each` test examples, for one epoch a round."""

    shape: tuple[int, ...]
    classes: int
    clients: int
    each: int
    batch: int


IMAGE, DIGIT = (3, 32, 32), (1, 28, 28)
WORKLOADS = {
    "logistic": Workload((60,), 10, 50, 100, 10),
    "mlp": Workload((64,), 10, 20, 100, 10),
    "pews-mlp": Workload((5,), 4, 50, 100, 10),
    "har-dnn": Workload((561,), 6, 20, 100, 10),
    "char-lstm": Workload((80,), 80, 10, 40, 10),
    "small-cnn": Workload(DIGIT, 10, 10, 60, 20),
    "cifar-cnn": Workload(IMAGE, 10, 10, 128, 64),
    "mcmahan-cnn": Workload(DIGIT, 10, 10, 60, 20),
    "mnist-cnn": Workload(DIGIT, 10, 10, 60, 20),
    "leaf-cnn": Workload(DIGIT, 62, 10, 60, 20),
    "fedpac-cnn": Workload(IMAGE, 10, 10, 60, 20),
    "fedrep-cnn": Workload(IMAGE, 10, 10, 60, 20),
    "pfllib-cnn": Workload(DIGIT, 10, 10, 60, 10),
    "dropout-cnn": Workload(DIGIT, 62, 10, 60, 20),
    "tfcnn": Workload(IMAGE, 10, 10, 60, 20),
    "tfcnn-fc": Workload(IMAGE, 10, 10, 60, 20),
    "vgg11": Workload(IMAGE, 10, 4, 40, 20),
    "vgg11-fc": Workload(IMAGE, 10, 4, 40, 20),
    "vgg8-fc": Workload(IMAGE, 10, 4, 40, 20),
    "pews-cnn": Workload(DIGIT, 10, 10, 60, 20),
    "resnet18": Workload(IMAGE, 10, 4, 40, 20),
    "resnet18-cifar": Workload(IMAGE, 10, 2, 20, 20),
}
LR = 0.01
NEVER = 10**6


def network(name: str, work: Workload) -> nn.Module:
    torch.manual_seed(0)
    if name == "logistic":
        return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(work.shape), work.classes))
    return MODELS[name].build(work.shape, work.classes)


def federation(name: str, work: Workload) -> Federation:
    draw = torch.Generator().manual_seed(0)
    rows = work.clients * work.each * 2
    x = (
        torch.randint(work.classes, (rows, *work.shape), generator=draw)
        if name == "char-lstm"
        else torch.randn(rows, *work.shape, generator=draw)
    )
    source = arrays(x, torch.randint(work.classes, (rows,), generator=draw), classes=work.classes)
    return Federation.build(source, np.split(np.arange(rows), work.clients), seed=0, test_share=0.5)


def plain_round(module: nn.Module, fed: Federation, plans: list[list[Tensor]], sizes: Tensor) -> dict[str, Tensor]:
    """One round of FedAvg, a client after the other."""
    x, y = fed.source.x, fed.source.y
    start = copy.deepcopy(module.state_dict())
    total = {n: torch.zeros_like(t, dtype=torch.float64) for n, t in start.items()}
    module.train()
    for plan, size in zip(plans, sizes.tolist(), strict=True):
        module.load_state_dict(start)
        optimizer = torch.optim.SGD(module.parameters(), lr=LR)
        for rows in plan:
            optimizer.zero_grad()
            functional.cross_entropy(module(x[rows]), y[rows]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        for n, t in module.state_dict().items():
            total[n] += t.double() * size
    module.load_state_dict(start)
    return {n: t / float(sizes.sum()) for n, t in total.items()}


@torch.inference_mode()
def plain_scores(module: nn.Module, fed: Federation, states: list[dict[str, Tensor]], rows: list[Tensor]) -> float:
    """The mean over clients of the accuracy of their own models."""
    module.eval()
    found = []
    for state, own in zip(states, rows, strict=True):
        module.load_state_dict(state, strict=False)
        parts = torch.split(own, batches.SWEEP)
        hits = [(module(fed.source.x[part]).argmax(-1) == fed.source.y[part]).float() for part in parts]
        found.append(float(torch.cat(hits).mean()))
    return statistics.mean(found)


def matmul_rate() -> float:
    """FLOP per second of a large float32 matrix product."""
    a = torch.randn(2048, 2048)
    return 2 * 2048**3 / min(_timed(lambda: a @ a)[0] for _ in range(5))


def _timed(work: Callable[[], Any]) -> tuple[float, Any]:
    begun = time.perf_counter()
    out = work()
    return time.perf_counter() - begun, out


def _simulation(name: str, work: Workload, fed: Federation, method: str) -> Simulation:
    training = Training(num_rounds=NEVER, join_ratio=1.0, local_epochs=1, batch_size=work.batch, lr=LR)
    model = StackedModel(network(name, work), fed.source.x[:2])
    return Simulation(fed, model, ALGORITHMS[method](), training, Evaluation(shift="none", eval_every=NEVER))


def training(name: str, work: Workload, fed: Federation, repeats: int) -> tuple[list[float], list[float], Simulation]:
    """Seconds of the loop and of the engine for a round, turn by turn."""
    module, sim = network(name, work), _simulation(name, work, fed, "fedavg")
    # Dropout draws differ; a ResNet-18's update moves by up to a tenth when weights move by a rounding of float32.
    loose = any(isinstance(m, nn.Dropout | nn.Dropout2d | nn.BatchNorm2d) for m in module.modules())
    slow, fast = [], []
    for t in range(repeats + 1):
        ids = sim.cohort(sim.schedule[t])
        data = fed.examples("train", ids)
        plan = batches.plan(data, work.batch, streams.key(0, "batches", t, ids), epochs=1)
        lists = [[plan.rows[c, s] for s in range(plan.rows.shape[1])] for c in range(len(ids))]
        module.load_state_dict(sim.server, strict=False)
        seconds, expected = _timed(partial(plain_round, module, fed, lists, data.count))
        slow.append(seconds)
        fast.append(_timed(sim.step)[0])
        if not loose:
            for n, found in sim.server.items():
                assert (found - expected[n]).norm() <= 1e-2 * expected[n].norm() + 1e-4, n
    return slow[1:], fast[1:], sim


def evaluation(name: str, work: Workload, fed: Federation, repeats: int) -> tuple[list[float], list[float]]:
    """The same for an evaluation of models that differ."""
    module, sim = network(name, work), _simulation(name, work, fed, "local")
    sim.step()
    ids = sim.everybody
    ready = sim.deployed_models(sim.model, ids)
    states = [{n: t[c].clone() for n, t in ready.items()} for c in range(len(ids))]
    data = fed.examples("test", ids)
    rows = [r[: int(n)] for r, n in zip(data.rows, data.count, strict=True)]
    slow, fast = [], []
    for _ in range(repeats + 1):
        seconds, expected = _timed(lambda: plain_scores(module, fed, states, rows))
        slow.append(seconds)
        seconds, found = _timed(sim.evaluate)
        fast.append(seconds)
        assert abs(found["personal"]["mean"] - expected) < 2 / sum(map(len, rows))
    return slow[1:], fast[1:]


def measure(name: str, repeats: int) -> dict[str, Any]:
    work = WORKLOADS[name]
    fed = federation(name, work)
    slow, fast, sim = training(name, work, fed, repeats)
    slow_score, fast_score = evaluation(name, work, fed, repeats)
    engine, peak = statistics.median(fast), matmul_rate()
    where = environment(sim)
    return {
        "workload": name,
        "shape": list(work.shape),
        "clients": work.clients,
        "examples": work.each,
        "batch_size": work.batch,
        "train_ratio": statistics.median(slow) / engine,
        "train_ratio_of_best": min(slow) / min(fast),
        "train_ratio_range": _range(slow, fast),
        "train_seconds": {"loop": statistics.median(slow), "engine": engine},
        "eval_ratio": statistics.median(slow_score) / statistics.median(fast_score),
        "eval_ratio_of_best": min(slow_score) / min(fast_score),
        "eval_ratio_range": _range(slow_score, fast_score),
        "eval_seconds": {"loop": statistics.median(slow_score), "engine": statistics.median(fast_score)},
        "of_matmul_rate": sim.totals.flops / sim.played / engine / peak,
        "matmul_gflops": peak / 1e9,
        "repeats": repeats,
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "threads": torch.get_num_threads(),
        "hardware": where["hardware"],
        "torch": where["torch"],
        "version": where["version"],
        "commit": where["commit"],
        "date": time.strftime("%Y-%m-%d"),
    }


def _range(slow: list[float], fast: list[float]) -> tuple[float, float]:
    ratios = sorted(s / f for s, f in zip(slow, fast, strict=True))
    return ratios[0], ratios[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(f"{'':16}{'training: loop, engine, ratio, of best (range)':52}{'evaluation':52}of peak")
    for name in args.only:
        found = measure(name, args.repeats)
        parts = []
        for kind in ("train", "eval"):
            seconds, (low, high) = found[f"{kind}_seconds"], found[f"{kind}_ratio_range"]
            times = f"{1e3 * seconds['loop']:8.1f} ms {1e3 * seconds['engine']:8.1f} ms"
            ratios = f"{found[f'{kind}_ratio']:6.2f} {found[f'{kind}_ratio_of_best']:6.2f} ({low:.2f}-{high:.2f})"
            parts.append(f"{times} {ratios}")
        print(f"{name:16}{parts[0]:52}{parts[1]:52}{found['of_matmul_rate']:6.1%}", flush=True)
        if args.out is not None:
            records = json.loads(args.out.read_text()) if args.out.exists() else []
            args.out.write_text(json.dumps([*records, found], indent=1) + "\n")


if __name__ == "__main__":
    main()
