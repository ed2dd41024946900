"""Cost of a round by the number of clients, from a thousand to a million, at a fixed cohort.

    python benchmarks/scale.py [--clients 1000 1000000] [--store disk|host] [--out benchmarks/results/scale.json]
    python benchmarks/scale.py --all --clients 100000 [--memory 1]

DM-PFL with persistent masks and weights, its personal phase played by the clients sampled; 50 clients a round of ten
points each, two of them for testing, five epochs in batches of two; 100 clients scored at the end. Four rounds to
warm up, twenty that are timed, each number of clients in processes of its own that take turns. Columns: the median
round by the clock and by the processor's time, which what else the machine does changes less; resident memory after
the last round without the data set itself (examples, labels, who holds which); that with it; and what the store takes
up on disk for a client that has a row.

With `--all`, DM-PFL's personal phase is played by all clients at once, in stacks, under a limit of memory: time per
client and the peak.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from personafl import DMPFL, Evaluation, Federation, Machine, Simulation, StackedModel, Training
from personafl.core import rng
from personafl.data import DATASETS
from personafl.data.ragged import Ragged
from personafl.experiment.environment import environment
from personafl.models import MLP

COHORT, POINTS, WARM, TIMED = 50, 10, 4, 20


def federation(clients: int) -> Federation:
    """Ten points for each, of a data set that is the same for every number of clients."""
    source = DATASETS["synthetic-10m"]()
    if clients * POINTS > len(source.y):
        raise SystemExit(f"--clients {clients}: at most {len(source.y) // POINTS}")
    mixed = rng.generator(0, "partition").permutation(len(source.y))[: clients * POINTS].copy()
    return Federation.build(source, Ragged.cut(mixed, np.full(clients, POINTS)), 0, test_share=0.2)


def resident(peak: bool = False) -> int:
    """Bytes of main memory this process holds, or held at most."""
    name = "VmHWM:" if peak else "VmRSS:"
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def held(fed: Federation) -> int:
    """Bytes of the data set and of who holds which of it."""
    tensors = {t.data_ptr(): t.nbytes for t in (fed.source.x, fed.source.y, *(s.offsets for s in fed.splits.values()))}
    rows = {r.values.data_ptr(): r.values.nbytes + r.offsets.nbytes for r in fed._held()}
    return sum(tensors.values()) + sum(rows.values())


def simulation(clients: int, args: argparse.Namespace, folder: Path) -> Simulation:
    torch.set_num_threads(1)
    fed = federation(clients)
    torch.manual_seed(0)
    model = StackedModel(MLP(5, 200, 100, 4), fed.source.x[:2])
    training = Training(
        num_rounds=WARM + TIMED, join_ratio=COHORT / clients, local_epochs=5, batch_size=2, lr=0.05, seed=0
    )
    algorithm = DMPFL(iterations=1, personal_share="once" if args.all else "sampled")
    evaluation = Evaluation(shift="none", eval_every=10_000, clients=min(100, clients))
    place: Any = folder if args.store == "disk" else args.store
    return Simulation(fed, model, algorithm, training, evaluation, machine=Machine(store=place, memory=args.memory))


def rounds(clients: int, args: argparse.Namespace) -> dict[str, Any]:
    """One number of clients, in this process."""
    with tempfile.TemporaryDirectory() as folder:
        sim = simulation(clients, args, Path(folder) / "store")
        data = held(sim.federation)
        if args.all:
            return everybody(sim, args)
        busy = []
        while sim.played < len(sim.schedule):
            begun = time.process_time()
            sim.step()
            busy.append(time.process_time() - begun)
        now = resident()
        timed = slice(WARM, -1)  # the last one is followed by the evaluation
        return {
            "clients": clients,
            "cohort": COHORT,
            "store": args.store,
            "seconds_per_round": statistics.median(r["seconds"] for r in sim.rows[timed]),
            "cpu_seconds_per_round": statistics.median(busy[timed]),
            "mib_beside_data": (now - data) / 2**20,
            "mib": now / 2**20,
            "touched": len(sim.store),
            "bytes_per_row": sim.store.row_bytes,
            "disk_bytes_per_touched_client": sim.store.disk_bytes() / len(sim.store),
            "accuracy": sim.rows[-1]["personal"]["mean"],
            **where(sim),
        }


def everybody(sim: Simulation, args: argparse.Namespace) -> dict[str, Any]:
    """The stage that all clients play."""
    stage = next(i for i, s in enumerate(sim.schedule) if s.who == "all")
    while sim.played < stage:
        sim.step()
    before = resident()
    row = sim.step()
    return {
        "clients": sim.federation.num_clients,
        "stage": "all clients",
        "store": args.store,
        "chunk": sim.plan.chunk,
        "seconds": row["seconds"],
        "microseconds_per_client": 1e6 * row["seconds"] / sim.federation.num_clients,
        "limit_gib": args.memory,
        "mib_before": before / 2**20,
        "peak_mib": resident(peak=True) / 2**20,
        "disk_bytes_per_touched_client": sim.store.disk_bytes() / len(sim.store),
        **where(sim),
    }


def where(sim: Simulation) -> dict[str, Any]:
    found = environment(sim)
    return {n: found[n] for n in ("hardware", "torch", "version", "commit")} | {"date": time.strftime("%Y-%m-%d")}


def alone(clients: int, args: argparse.Namespace) -> dict[str, Any]:
    """The same in a process of its own."""
    words = [sys.executable, __file__, "--here", "--clients", str(clients), "--store", args.store]
    words += ["--memory", str(args.memory)] if args.memory else []
    words += ["--all"] if args.all else []
    done = subprocess.run(words, check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", nargs="*", type=int, default=[10**3, 10**4, 10**5, 10**6])
    parser.add_argument("--store", default="disk", choices=["disk", "host"])
    parser.add_argument("--memory", type=float, default=None, help="limit in GiB")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--all", action="store_true", help="time the stage that all clients play")
    parser.add_argument("--here", action="store_true", help="one number of clients in this process")
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    if args.here:
        print(json.dumps(rounds(args.clients[0], args)))
        return
    runs = [[alone(c, args) for c in args.clients] for _ in range(1 if args.all else args.repeats)]
    found = [
        sorted(column, key=lambda r: r.get("cpu_seconds_per_round", 0.0))[len(runs) // 2]
        for column in zip(*runs, strict=True)
    ]
    if args.all:
        print("clients    stack  us/client   limit MiB  peak MiB  disk B/client")
        for r in found:
            limit = "-" if r["limit_gib"] is None else f"{1024 * r['limit_gib']:.0f}"
            print(
                f"{r['clients']:<9} {r['chunk']:>6} {r['microseconds_per_client']:>10.0f} {limit:>11} "
                f"{r['peak_mib']:>9.0f} {r['disk_bytes_per_touched_client']:>14.0f}"
            )
    else:
        print("clients    ms/round   CPU ms  MiB beside data     MiB  touched  row bytes  disk B/touched client")
        for r in found:
            print(
                f"{r['clients']:<9} {1e3 * r['seconds_per_round']:>9.1f} {1e3 * r['cpu_seconds_per_round']:>8.1f} "
                f"{r['mib_beside_data']:>16.0f} {r['mib']:>7.0f} {r['touched']:>8} {r['bytes_per_row']:>10} "
                f"{r['disk_bytes_per_touched_client']:>22.0f}"
            )
    if args.out is not None:
        before = json.loads(args.out.read_text()) if args.out.exists() else []
        args.out.write_text(json.dumps(before + found, indent=1) + "\n")


if __name__ == "__main__":
    main()
