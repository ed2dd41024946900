"""Choose the demo's learning rates on validation data: the same grid for every method.

    python benchmarks/demo_grid.py

Every method of the demo runs with every rate on seeds the demo does not use, with a fifth of each client's data
set aside for validation. The rate with the best mean validation accuracy is the one in
`src/personafl/recipes/demo.toml`; the test data play no part.
"""

from __future__ import annotations

import itertools
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from statistics import mean

import torch

import personafl

RATES = (0.05, 0.1, 0.2, 0.3, 0.5, 0.7)
SEEDS = (11, 12, 13)
METHODS = ("local", "fedavg", "fedavg-ft", "ditto", "dm-pfl", "dm-pfl-plus")


def validation(job: tuple[str, float, int]) -> float:
    method, rate, seed = job
    torch.set_num_threads(1)
    changes = ["data.validation_share=0.2", "evaluation.shift=none", "evaluation.eval_every=1000"]
    found = personafl.run(None, *changes, f"algorithms={method}", f"{method}.lr={rate}", f"training.seed={seed}")
    return float(found[method].rows[-1]["validation"]["mean"])


def main() -> None:
    jobs = list(itertools.product(METHODS, RATES, SEEDS))
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        scores = dict(zip(jobs, pool.map(validation, jobs), strict=True))
    print("validation accuracy, %; mean of seeds", *SEEDS)
    print("method       " + "".join(f"{r:>8}" for r in RATES) + "    best")
    for method in METHODS:
        means = [mean(scores[method, r, s] for s in SEEDS) for r in RATES]
        best = RATES[means.index(max(means))]
        print(f"{method:13}" + "".join(f"{100 * m:8.1f}" for m in means) + f"{best:8}")


if __name__ == "__main__":
    main()
