"""DM-PFL's Table 1 for the methods there are: CIFAR-10, 100 clients, Dirichlet 0.3.

    python benchmarks/dm_pfl_cifar10.py cifar10.npz --out benchmarks/results/dm-pfl-cifar10.json [--device cuda]

The file holds all 60,000 images, training and test set together, as `x` uint8 (N, 3, 32, 32), and their labels `y`.
About 70 s per method on an H200 (twice that for Ditto), hours on a CPU. Results are appended as JSON records.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from pathlib import Path

import numpy as np
import torch

import personafl
from personafl import DMPFL, Algorithm, Ditto, FedAvg, FedAvgFT
from personafl.core import rng
from personafl.data.partition import PartitionRequest, partition
from personafl.experiment.environment import environment
from personafl.models import MODELS

METHODS: dict[str, Algorithm] = {
    "fedavg": FedAvg(),
    "fedavg-ft": FedAvgFT(),
    "ditto": Ditto(),
    "dm-pfl": DMPFL(),
    "dm-pfl, interval 3": DMPFL(readjust_interval=3),
}


def federation(path: Path, seed: int) -> personafl.Federation:
    with np.load(path) as file:
        x, y = torch.from_numpy(file["x"]), file["y"].astype(np.int64)
    source = personafl.arrays((x.float() / 255 - 0.5) / 0.5, y, classes=10, name="cifar10")
    parts = partition("dirichlet", PartitionRequest(y, 10, 100, rng.generator(seed, "partition")), alpha=0.3)
    return personafl.Federation.build(source, parts.rows, seed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--methods", nargs="*", default=list(METHODS))
    args = parser.parse_args()
    fed = federation(args.data, seed=0)
    torch.manual_seed(0)
    model = personafl.StackedModel(MODELS["cifar-cnn"].build((3, 32, 32), 10), fed.source.x[:2])
    training = personafl.Training(
        num_rounds=args.rounds, join_ratio=0.1, local_epochs=5, batch_size=64, lr=0.1, lr_decay=0.99
    )
    records = json.loads(args.out.read_text()) if args.out.exists() else []
    for name in args.methods:
        begun = time.perf_counter()
        sim = personafl.Simulation(fed, model, METHODS[name], training, machine=personafl.Machine(device=args.device))
        sim.run()
        seconds = time.perf_counter() - begun
        record = {"method": name, "seconds": seconds, "shift": sim.clients_table()[1]}
        record |= {k: sim.rows[-1][k] for k in ("personal", "global")}
        record |= {"totals": dataclasses.asdict(sim.totals), "environment": environment(sim)}
        if name.startswith("dm-pfl"):  # DM-PFL+ is the same training and another inference
            sim.algorithm = dataclasses.replace(sim.algorithm, inference="per-sample")
            record["plus"] = sim.clients_table()[1]
        records.append(record)
        args.out.write_text(json.dumps(records, indent=1) + "\n")
        print(f"{name}: {seconds:.0f} s, no shift {record['personal']['mean']:.4f}")


if __name__ == "__main__":
    main()
