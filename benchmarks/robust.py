"""What robust means hold against attackers: methods, rules and shares of attackers on the digits.

    python benchmarks/robust.py [--methods a,b] [--alpha A] [--rounds N] [--seeds 0,1] [--workers N]

The recipe is all-methods, with its rates. All 20 clients take part in every round. Attackers train as the others do and
send the opposite of their update, four times as long (sign-flip), or noise ten times as long (noise). The rules are
told to expect 40 %. A number is the mean accuracy of the honest clients' own models, in %.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from statistics import mean
from typing import NamedTuple

import torch

import personafl

METHODS = ("fedavg", "fedprox", "ditto", "fedrep", "fedphp", "dm-pfl")
RULES = ("none", "clip", "median", "trimmed-mean", "krum")
SHARES = (0.0, 0.1, 0.2, 0.3, 0.4)
STRENGTH = {"sign-flip": 4.0, "noise": 10.0}
EXPECTED = 0.4


class Job(NamedTuple):
    """One run."""

    method: str
    rule: str
    attack: str
    share: float
    alpha: float
    rounds: int
    seed: int


def accuracy(job: Job) -> float:
    """Of the honest clients' own models."""
    torch.set_num_threads(1)
    changes = [
        f"algorithms={job.method}",
        f"data.alpha={job.alpha}",
        f"training.num_rounds={job.rounds}",
        f"training.seed={job.seed}",
        "training.join_ratio=1",
        "evaluation.shift=none",
        "evaluation.eval_every=1000",
        f"faults.faulty_ratio={job.share}",
        *([f"faults.fault={job.attack}", f"faults.strength={STRENGTH[job.attack]}"] if job.share else []),
        *([] if job.rule == "none" else [f"{job.method}.robust.rule={job.rule}"]),
        *([f"{job.method}.robust.share={EXPECTED}"] if job.rule in ("trimmed-mean", "krum") else []),
    ]
    found = personafl.run("all-methods", *changes, quiet=True)[job.method]
    attackers = found.summary.get("faults", {}).get("faulty_clients", ())
    return mean(float(row["accuracy"]) for row in found.clients if row["client"] not in attackers)


def jobs(methods: list[str], alpha: float, rounds: int, seeds: list[int]) -> Iterator[Job]:
    """All runs; without attackers both attacks are the same."""
    for attack in STRENGTH:
        for method in methods:
            for rule in RULES:
                for share in SHARES:
                    if share or attack == next(iter(STRENGTH)):
                        named = attack if share else ""
                        yield from (Job(method, rule, named, share, alpha, rounds, s) for s in seeds)


def table(attack: str, methods: list[str], found: dict[tuple[str, str, str, float], float]) -> str:
    """A row per method and rule, a column per share of attackers."""
    head = ["method", "robust", *(f"{100 * s:g} %" for s in SHARES)]
    rows = [head, ["---"] * len(head)]
    for method in methods:
        for rule in RULES:
            cells = (found[method, rule, attack if s else "", s] for s in SHARES)
            rows.append([method, rule, *(f"{100 * c:.1f}" for c in cells)])
    return "\n".join(f"| {' | '.join(r)} |" for r in rows)


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--methods", default=",".join(METHODS))
    ask.add_argument("--alpha", type=float, default=1.0, help="of the Dirichlet partition")
    ask.add_argument("--rounds", type=int, default=15)
    ask.add_argument("--seeds", default="0")
    ask.add_argument("--workers", type=int, default=2)
    asked = ask.parse_args()
    methods, seeds = asked.methods.split(","), [int(s) for s in asked.seeds.split(",")]
    todo = list(jobs(methods, asked.alpha, asked.rounds, seeds))
    scores: dict[tuple[str, str, str, float], list[float]] = {}
    with ProcessPoolExecutor(asked.workers, mp_context=get_context("spawn")) as pool:
        for job, score in zip(todo, pool.map(accuracy, todo), strict=True):
            scores.setdefault(job[:4], []).append(score)
    found = {key: mean(of_seeds) for key, of_seeds in scores.items()}
    for attack in STRENGTH:
        print(f"{attack}, {STRENGTH[attack]:g} times the client's update\n\n{table(attack, methods, found)}\n")


if __name__ == "__main__":
    main()
