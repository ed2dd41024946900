"""What normalised inputs bring, and what they cost: DM-PFL's Table 1 setting on CIFAR-10.

    python benchmarks/normalize.py [--precision bf16] [--seeds 0 1 2] [--out benchmarks/results/normalize.json]
    python benchmarks/normalize.py --speed [--device cpu] [--out ...]

CIFAR-10 over 100 clients, Dirichlet 0.3, 300 rounds of 10 clients (workload D of `gpu.py`): FedAvg, Ditto and DM-PFL
with `data.normalize` none, half and auto. Accuracy without and with full shift, over all degrees, and of the global
model. With `--speed` seconds of a round with and without normalised inputs instead, which take turns, over 20 clients
of random images, 128 each. `--rounds`, `--clients`, `--epochs` and `--scored` make a rehearsal. Records are appended to
a JSON list.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import personafl
from personafl import Evaluation, FedAvg, Federation, Machine, Simulation, StackedModel, Training, arrays
from personafl.core import rng as streams
from personafl.data import batches
from personafl.data.normalize import SHIPPED, normalized
from personafl.experiment.environment import environment
from personafl.models import MODELS

SETTINGS = ("none", "half", "auto")
METHODS = ("fedavg", "ditto", "dm-pfl")


def accuracy(args: argparse.Namespace, seed: int, setting: str, method: str) -> dict[str, Any]:
    recipe = {
        "data": {
            "dataset": "cifar10",
            "partition": "dirichlet",
            "num_clients": args.clients,
            "alpha": 0.3,
            "normalize": setting,
        },
        "model": {"name": "cifar-cnn"},
        "training": {
            "num_rounds": args.rounds,
            "join_ratio": 0.1,
            "local_epochs": args.epochs,
            "batch_size": 64,
            "lr": 0.1,
            "lr_decay": 0.99,
            "precision": args.precision,
        },
        "evaluation": {"eval_every": args.rounds} | ({"clients": args.scored} if args.scored else {}),
        "algorithms": [{"name": method}],
    }
    found = personafl.run(recipe, device=args.device, seeds=[seed])[method]
    summary, shift = found.summary, found.summary["shift"]
    of_all = summary["accuracy"]["global"]
    return {
        "normalize": setting,
        "method": method,
        "seed": seed,
        "rounds": args.rounds,
        "clients": args.clients,
        "precision": args.precision,
        "no_shift": shift["degrees"]["0.0"]["mean"],
        "full_shift": shift["degrees"]["1.0"]["mean"],
        "average": shift["average"],
        "global": None if of_all is None else of_all["mean"],
        "seconds": summary["time"]["seconds"],
        "hashes": summary["hashes"],
        **_environment(found.simulation),
    }


def speed(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Seconds of a round of FedAvg, and of its minibatches alone."""
    clients, each, repeats = 20, 256, args.repeats
    draw = torch.Generator().manual_seed(0)
    images = torch.randint(256, (clients * each, 3, 32, 32), dtype=torch.uint8, generator=draw)
    labels = torch.randint(10, (clients * each,), generator=draw)
    parts = np.split(np.arange(clients * each), clients)
    plain = Federation.build(arrays(images, labels, classes=10), parts, 0, test_share=0.5)
    feds = {"none": plain, "auto": normalized(plain, SHIPPED["cifar10"])}
    never = Evaluation(shift="none", eval_every=10**6)
    training = Training(num_rounds=10**6, join_ratio=1.0, local_epochs=1, batch_size=64, precision=args.precision)
    torch.manual_seed(0)
    model = StackedModel(MODELS["cifar-cnn"].build((3, 32, 32), 10), torch.rand(2, 3, 32, 32))
    sims = {
        n: Simulation(f, model, FedAvg(), training, never, machine=Machine(device=args.device)) for n, f in feds.items()
    }

    def gathered(sim: Simulation) -> None:
        data = sim.federation.examples("train", torch.arange(clients))
        keys = streams.key(0, "batches", torch.arange(clients))
        plan = batches.plan(data, 64, keys, epochs=1, noise=keys)
        for _ in batches.minibatches(data, plan, torch.float32):
            pass

    out = []
    for what, work in (("round", lambda sim: sim.step()), ("minibatches", gathered)):
        times: dict[str, list[float]] = {n: [] for n in sims}
        for turn in range(repeats + 3):
            for n, sim in sims.items() if turn % 2 else reversed(sims.items()):
                begun = _now(args.device)
                work(sim)
                if turn >= 3:
                    times[n].append(_now(args.device) - begun)
        seconds = {n: statistics.median(t) for n, t in times.items()}
        out.append(
            {
                "what": what,
                "seconds": seconds,
                "best": {n: min(t) for n, t in times.items()},
                "ratio": seconds["auto"] / seconds["none"],
                "ratio_of_best": min(times["auto"]) / min(times["none"]),
                "repeats": repeats,
                "precision": args.precision,
                **_environment(sims["none"]),
            }
        )
    return out


def _now(device: str) -> float:
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return time.perf_counter()


def _environment(sim: Simulation) -> dict[str, Any]:
    where = environment(sim)
    return {n: where[n] for n in ("device", "hardware", "torch", "version", "commit")} | {
        "threads": torch.get_num_threads(),
        "date": time.strftime("%Y-%m-%d"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision", default="float32", choices=["float32", "tf32", "bf16"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--settings", nargs="+", default=SETTINGS)
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--scored", type=int, default=0, help="clients that are evaluated; 0: all")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    jobs = [(seed, setting, method) for seed in args.seeds for setting in args.settings for method in args.methods]
    for found in speed(args) if args.speed else (accuracy(args, *job) for job in jobs):
        print(json.dumps(found), flush=True)
        if args.out is not None:
            before = json.loads(args.out.read_text()) if args.out.exists() else []
            args.out.write_text(json.dumps([*before, found], indent=1) + "\n")


if __name__ == "__main__":
    main()
