"""Speed of the stacked engine against a plain per-client PyTorch loop, on a CPU, in one run.

    python benchmarks/cpu.py [--repeats 5]

Both train the same clients on the same minibatches from the same global model and average the result.
The loop keeps everything in memory: tensors, index batches, one module and one `torch.optim.SGD` per
client, all of PyTorch's threads. The two take turns; the ratio of their medians is printed, with the fraction of
the machine's matrix-product rate the engine reaches. Absolute times depend on what else the machine does.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from personafl import Evaluation, FedAvg, Federation, Simulation, StackedModel, Training, arrays
from personafl.core import batches
from personafl.core import rng as streams
from personafl.models import MODELS

WORKLOADS = {
    # name: model, input shape, classes, clients, examples per client, batch size, epochs
    "small MLP, 20 clients x batch 10": ("mlp", (64,), 10, 20, 100, 10, 1),
    "logistic-sized MLP, 50 clients x batch 10": ("pews-mlp", (5,), 4, 50, 100, 10, 1),
    "CIFAR CNN, 10 clients x batch 64": ("cifar-cnn", (3, 32, 32), 10, 10, 128, 64, 1),
}


def plain(module: nn.Module, fed: Federation, plans: list[list[Tensor]], sizes: Tensor, lr: float) -> dict[str, Tensor]:
    """One round of FedAvg, a client after the other."""
    x, y = fed.source.x, fed.source.y
    start = copy.deepcopy(module.state_dict())
    total = {n: torch.zeros_like(t, dtype=torch.float64) for n, t in start.items()}
    for plan, size in zip(plans, sizes.tolist(), strict=True):
        module.load_state_dict(start)
        optimizer = torch.optim.SGD(module.parameters(), lr=lr)
        for rows in plan:
            optimizer.zero_grad()
            functional.cross_entropy(module(x[rows]), y[rows]).backward()
            optimizer.step()
        for n, t in module.state_dict().items():
            total[n] += t.double() * size
    module.load_state_dict(start)
    return {n: t / float(sizes.sum()) for n, t in total.items()}


def matmul_rate() -> float:
    """FLOP per second of a large float32 matrix product."""
    a = torch.randn(2048, 2048)
    best = min(_timed(lambda: a @ a) for _ in range(5))
    return 2 * 2048**3 / best


def _timed(work: object) -> float:
    begun = time.perf_counter()
    work()  # type: ignore[operator]
    return time.perf_counter() - begun


def measure(name: str, repeats: int) -> tuple[float, float, float]:
    """Median seconds of the loop and of the engine, and the engine's FLOP per second."""
    kind, shape, classes, clients, each, size, epochs = WORKLOADS[name]
    draw = torch.Generator().manual_seed(0)
    rows = clients * each * 2
    source = arrays(
        torch.randn(rows, *shape, generator=draw), torch.randint(classes, (rows,), generator=draw), classes=classes
    )
    fed = Federation.build(source, np.split(np.arange(rows), clients), seed=0, test_share=0.5)
    torch.manual_seed(0)
    module = MODELS[kind].build(shape, classes)
    training = Training(num_rounds=10_000, join_ratio=1.0, local_epochs=epochs, batch_size=size, lr=0.01)
    sim = Simulation(
        fed, StackedModel(module, source.x[:2]), FedAvg(), training, Evaluation(shift="none", eval_every=10_000)
    )
    slow, fast = [], []
    for t in range(repeats + 1):
        ids = sim.cohort(sim.schedule[t])
        data = fed.examples("train", ids)
        plan = batches.plan(data, size, streams.key(0, "batches", t, ids), epochs=epochs)
        lists = [[plan.rows[c, s] for s in range(plan.rows.shape[1])] for c in range(len(ids))]
        module.load_state_dict(sim.server)
        begun = time.perf_counter()
        expected = plain(module, fed, lists, data.count, 0.01)
        slow.append(time.perf_counter() - begun)
        fast.append(_timed(sim.step))
        for n, t in expected.items():
            torch.testing.assert_close(sim.server[n].double(), t, rtol=1e-3, atol=1e-5)
    flops = sim.totals.flops / (repeats + 1)
    engine = statistics.median(fast[1:])
    return statistics.median(slow[1:]), engine, flops / engine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    peak = matmul_rate()
    print(f"{torch.get_num_threads()} threads, {peak / 1e9:.0f} GFLOP/s in a large matrix product")
    for name in WORKLOADS:
        loop, engine, rate = measure(name, repeats)
        times = f"loop {1e3 * loop:8.1f} ms  engine {1e3 * engine:8.1f} ms"
        print(f"{name:45} {times}  {loop / engine:5.2f}x  {rate / peak:6.1%} of peak")


if __name__ == "__main__":
    main()
