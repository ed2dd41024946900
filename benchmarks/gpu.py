"""The four workloads personafl is measured by, on a GPU.

    python benchmarks/gpu.py A B C D M [--precision bf16] [--out benchmarks/results/gpu.json]

A, B   MNIST over the 20 clients of `mnist-20.json` (Dirichlet 0.1), all of them in every round, a CNN of 582,026
       parameters; accuracy on all test data and loss on all training data after every round.
       A: batch 64, 5 epochs. B: batch 10, 1 epoch. Seconds per round after warm-up.
C      pfl-research's CIFAR-10 benchmark: 1,000 users of 50 images each, cohort 50, 1,500 rounds, batch 10.
       Seconds in all.
D      DM-PFL's Table 1: CIFAR-10, 100 clients, Dirichlet 0.3, 300 rounds, twelve methods with all degrees of shift
       (DM-PFL+ is DM-PFL's training and another inference, so it is not trained a second time). Seconds in all;
       with `--jobs N` methods go side by side in N processes (NVIDIA's MPS lets them share the GPU), the start of
       the processes included.

M      Memory: 500 clients with personal weights and masks of their own (DM-PFL) on images of CIFAR-100's size with
       100 classes (pixels drawn at random: memory does not look at them), two personal rounds of 50 clients. Peak GiB.

Data are looked for as everywhere else, in $PERSONAFL_DATA. Results are appended to a JSON list of records. With
`--rounds` a rehearsal of fewer rounds; `--profile` prints where a round's time went.
"""

from __future__ import annotations

import argparse
import cProfile
import dataclasses
import json
import os
import pstats
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from personafl import (
    ALGORITHMS,
    DMPFL,
    Evaluation,
    FedAvg,
    Federation,
    Machine,
    Simulation,
    StackedModel,
    Training,
    arrays,
)
from personafl.core import rng
from personafl.core.normalization import as_inputs
from personafl.data import DATASETS, batches
from personafl.data.partition import PartitionRequest, partition
from personafl.experiment.environment import environment
from personafl.experiment.jobs import side_by_side
from personafl.models import MODELS

TABLE_1 = (  # the longest first, so that none is left alone at the end
    "apfl",
    "ditto",
    "fedrep",
    "fedprox",
    "local",
    "fedavg",
    "feddst",
    "fedavg-ft",
    "lg-fedavg",
    "fedper",
    "dm-pfl",
)
HERE = Path(__file__).parent
COMMIT = os.environ.get("PERSONAFL_COMMIT")  # where the checkout's own is not at hand


def mnist(seed: int) -> Federation:
    """Each client filled with as many images of each class as the counts say, a quarter of them for testing."""
    data = DATASETS["mnist"]()
    draw = rng.generator(seed, "partition")
    counts = np.array(json.loads((HERE / "mnist-20.json").read_text()))  # [clients, classes]
    pools = [draw.permutation(np.flatnonzero(data.y.numpy() == k)) for k in range(10)]
    ends = counts.cumsum(0)
    parts = [
        np.concatenate([pools[k][ends[c, k] - counts[c, k] : ends[c, k]] for k in range(10)])
        for c in range(len(counts))
    ]
    return Federation.build(data, parts, seed)


def cifar_users(seed: int) -> Federation:
    """1,000 users of 50 training images; the server's model is scored on all 10,000 test images."""
    data = DATASETS["cifar10"]()
    assert data.test is not None
    train, test = np.flatnonzero(~data.test), np.flatnonzero(data.test)
    shuffled = rng.generator(seed, "partition").permutation(train)
    return Federation.build(data, np.split(shuffled, 1000), seed, tests=np.split(test, 1000), official=test)


def cifar_dirichlet(seed: int) -> Federation:
    data = DATASETS["cifar10"]()
    request = PartitionRequest(data.y.numpy(), 10, 100, rng.generator(seed, "partition"))
    return Federation.build(data, partition("dirichlet", request, alpha=0.3).rows, seed)


def network(name: str, fed: Federation) -> StackedModel:
    torch.manual_seed(0)
    module = MODELS[name].build(tuple(fed.source.x.shape[1:]), fed.source.classes)
    return StackedModel(module, as_inputs(fed.source.x[:2], torch.float32))


def clock(device: str) -> float:
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return time.perf_counter()


def steps_of(sim: Simulation, rounds: range) -> int:
    """Minibatches of all clients in these rounds."""
    training, sizes = sim.training, sim.federation.sizes("train")
    total = 0
    for t in rounds:
        count = sizes[sim.cohort(sim.schedule[t])]
        total += int(batches.steps_per_epoch(count, training.batch_size).sum()) * training.local_epochs
    return total


def record(workload: str, sim: Simulation, **found: Any) -> dict[str, Any]:
    where = environment(sim)
    memory = torch.cuda.max_memory_allocated() / 2**30 if sim.device.type == "cuda" else None
    return {
        "workload": workload,
        "device": where["device"],
        "hardware": where["hardware"],
        "precision": sim.training.precision,
        "seed": sim.training.seed,
        **found,
        "peak_gpu_gib": memory,
        "torch": where["torch"],
        "version": where["version"],
        "commit": COMMIT or where["commit"],
        "date": time.strftime("%Y-%m-%d"),
    }


def by_round(workload: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """A and B: a few rounds to warm up, then the mean of the others."""
    size, epochs, lr = (64, 5, 0.05) if workload == "A" else (10, 1, 0.05)
    warm, timed = 3, args.rounds or 20
    fed = mnist(args.seed)
    training = Training(
        num_rounds=warm + timed,
        join_ratio=1.0,
        local_epochs=epochs,
        batch_size=size,
        lr=lr,
        precision=args.precision,
        seed=args.seed,
    )
    evaluation = Evaluation(eval_every=1, shift="none", train_loss=True)
    begun = clock(args.device)
    sim = Simulation(
        fed, network("pfllib-cnn", fed), FedAvg(), training, evaluation, machine=Machine(device=args.device)
    )
    sim.step()
    first = clock(args.device) - begun
    for _ in range(warm - 1):
        sim.step()
    if args.profile:
        _profile(sim)
    times = []
    while sim.played < len(sim.schedule):
        begun = clock(args.device)
        row = sim.step()
        times.append(clock(args.device) - begun)
    return [
        record(
            workload,
            sim,
            seconds_per_round=sum(times) / len(times),
            slowest_round=max(times),
            seconds_to_first_round=first,
            rounds=len(sim.rows),
            client_steps=steps_of(sim, range(1)),
            accuracy=row["personal"]["weighted"],
            train_loss=row["train_loss"],
        )
    ]


def users(args: argparse.Namespace) -> list[dict[str, Any]]:
    fed = cifar_users(args.seed)
    training = Training(
        num_rounds=args.rounds or 1500,
        join_ratio=0.05,
        local_epochs=1,
        batch_size=10,
        lr=0.1,
        precision=args.precision,
        seed=args.seed,
    )
    evaluation = Evaluation(eval_every=10, shift="none", clients=50)
    model = network("dropout-cnn", fed)
    begun = clock(args.device)
    sim = Simulation(fed, model, FedAvg(weights="uniform"), training, evaluation, machine=Machine(device=args.device))
    for _ in range(3):
        sim.step()
    if args.profile:
        _profile(sim)
    sim.run()
    seconds = clock(args.device) - begun
    steps = steps_of(sim, range(len(sim.rows)))
    accuracy = sim.rows[-1]["global"]["mean"]
    return [record("C", sim, seconds=seconds, rounds=len(sim.rows), client_steps=steps, accuracy=accuracy)]


def method_of_table(name: str, args: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """One method of D, and its record by itself."""
    torch.set_num_threads(max(1, torch.get_num_threads() // args.jobs))
    fed = cifar_dirichlet(args.seed)
    model = network("cifar-cnn", fed)
    training = Training(
        num_rounds=args.rounds or 300,
        join_ratio=0.1,
        local_epochs=5,
        batch_size=64,
        lr=0.1,
        lr_decay=0.99,
        precision=args.precision,
        seed=args.seed,
    )
    begun = clock(args.device)
    sim = Simulation(fed, model, ALGORITHMS[name](), training, Evaluation(), machine=Machine(device=args.device))
    if args.profile:
        for _ in range(12):
            sim.step()
        _profile(sim)
    sim.run()
    rows = {name: _shifted(sim)}
    if name == "dm-pfl":
        sim.algorithm = sim.evaluator.algorithm = dataclasses.replace(sim.algorithm, inference="per-sample")
        rows["dm-pfl-plus"] = _shifted(sim)
    rows[name]["seconds"] = clock(args.device) - begun
    print(f"  {name}: {rows[name]['seconds']:.1f} s, {rows[name]}", flush=True)
    steps = steps_of(sim, range(training.num_rounds))
    return rows, record("D", sim, client_steps=steps, accuracy=rows[name]["no_shift"])


def table(args: argparse.Namespace) -> list[dict[str, Any]]:
    """D: in one process the sum of the methods' times, in several from the first start to the last end."""
    names = args.methods or list(TABLE_1)
    begun, rows, records = time.perf_counter(), {}, []
    for _, (row, found) in side_by_side([partial(method_of_table, n, args) for n in names], args.jobs):
        rows.update(row)
        records.append(found)
    wall = time.perf_counter() - begun
    return [
        records[-1]
        | {
            "whole": not (args.methods or args.rounds),
            "seconds": wall if args.jobs > 1 else sum(r["seconds"] for r in rows.values() if "seconds" in r),
            "jobs": args.jobs,
            "methods": rows,
            "client_steps": sum(r["client_steps"] for r in records),
            "peak_gpu_gib": max((r["peak_gpu_gib"] for r in records if r["peak_gpu_gib"]), default=None),
        }
    ]


def memory(args: argparse.Namespace) -> list[dict[str, Any]]:
    draw = torch.Generator().manual_seed(0)
    x = torch.randint(256, (60_000, 3, 32, 32), dtype=torch.uint8, generator=draw)
    source = arrays(x, torch.arange(60_000) % 100, name="cifar100-sized")
    fed = Federation.build(source, np.split(np.arange(60_000), 500), 0)
    training = Training(
        num_rounds=12, join_ratio=0.1, local_epochs=1, batch_size=64, precision=args.precision, seed=args.seed
    )
    evaluation = Evaluation(shift="none", clients=100)
    method = DMPFL()
    begun = clock(args.device)
    sim = Simulation(
        fed, network("cifar-cnn", fed), method, training, evaluation, machine=Machine(device=args.device, memory=3.0)
    )
    sim.run()
    seconds = clock(args.device) - begun
    kept = sum(t.numel() * t.element_size() for t in sim.store.gather(torch.arange(1)).values())
    found = {"clients_with_state": len(sim.store.ids), "bytes_per_client": kept, "seconds": seconds}
    return [record("M", sim, **found, client_steps=steps_of(sim, range(12)), accuracy=sim.rows[-1]["personal"]["mean"])]


def _shifted(sim: Simulation) -> dict[str, Any]:
    found = sim.clients_table()[1]
    assert found is not None
    degrees = found["degrees"]
    return {"no_shift": degrees["0.0"]["mean"], "full_shift": degrees["1.0"]["mean"], "average": found["average"]}


def _profile(sim: Simulation) -> None:
    """Where the time of one round goes, on the GPU and in Python."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        sim.step()
        torch.cuda.synchronize()
    events = seen.key_averages()
    busy = sum(e.device_time_total for e in events) / 1e3
    print(f"GPU busy {busy:.1f} ms in a round of {1e3 * sim.rows[-1]['seconds']:.1f} ms (with the profiler)")
    for e in sorted(events, key=lambda e: -e.device_time_total)[:18]:
        print(f"  {e.device_time_total / 1e3:8.2f} ms  x{e.count:<6} {e.key[:100]}")
    calls = cProfile.Profile()
    calls.enable()
    sim.step()
    torch.cuda.synchronize()
    calls.disable()
    pstats.Stats(calls).sort_stats("tottime").print_stats(22)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="+", choices=["A", "B", "C", "D", "M"])
    parser.add_argument("--precision", default="auto", choices=["auto", "float32", "tf32", "bf16"])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--methods", nargs="*", default=[])
    parser.add_argument("--jobs", type=int, default=1, help="processes for the methods of D")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    for workload in args.workloads:
        if args.device.startswith("cuda"):
            torch.cuda.reset_peak_memory_stats()
        work = {"C": users, "D": table, "M": memory}.get(workload)
        found = work(args) if work else by_round(workload, args)
        print(json.dumps(found, indent=1), flush=True)
        if args.out is not None:
            before = json.loads(args.out.read_text()) if args.out.exists() else []
            args.out.write_text(json.dumps(before + found, indent=1) + "\n")


if __name__ == "__main__":
    main()
