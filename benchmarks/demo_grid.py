"""Choose a recipe's learning rates on validation data: the same grid for every method.

    python benchmarks/demo_grid.py [RECIPE] [--methods a,b] [--workers N]

Every method of the recipe (default: all-methods) runs with every rate on seeds the recipe does not use, with a fifth of
each client's data set aside for validation. The rate with the best mean validation accuracy is the one in
`src/personafl/recipes/`; the test data play no part.
"""

from __future__ import annotations

import argparse
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from statistics import mean

import torch

import personafl
from personafl import config

RATES = (0.05, 0.1, 0.2, 0.3, 0.5, 0.7)
OF_ADAM = (0.001, 0.003, 0.005, 0.01, 0.03, 0.1)  # CO-PFL's steps are as long as the rate
SEEDS = (11, 12, 13)


def validation(job: tuple[str, str, float, int]) -> float:
    recipe, method, rate, seed = job
    torch.set_num_threads(1)
    changes = ["data.validation_share=0.2", "evaluation.shift=none", "evaluation.eval_every=1000"]
    found = personafl.run(recipe, *changes, f"algorithms={method}", f"{method}.lr={rate}", f"training.seed={seed}")
    return float(found[method].rows[-1]["validation"]["mean"])


def main() -> None:
    ask = argparse.ArgumentParser()
    ask.add_argument("recipe", nargs="?", default="all-methods")
    ask.add_argument("--methods", default="")
    ask.add_argument("--workers", type=int, default=2)
    asked = ask.parse_args()
    methods = asked.methods.split(",") if asked.methods else [m.label for m in config.load(asked.recipe).algorithms]
    jobs = [(asked.recipe, m, r, s) for m in methods for r in (OF_ADAM if m == "co-pfl" else RATES) for s in SEEDS]
    print("validation accuracy, %; mean of seeds", *SEEDS, flush=True)
    with ProcessPoolExecutor(asked.workers, mp_context=get_context("spawn")) as pool:
        found = pool.map(validation, jobs)
        for method in methods:
            rates = OF_ADAM if method == "co-pfl" else RATES
            means = [mean(next(found) for _ in SEEDS) for _ in rates]
            cells = "".join(f"  {r:g}: {100 * m:.1f}" for r, m in zip(rates, means, strict=True))
            print(f"{method:14}{cells}  best: {rates[means.index(max(means))]:g}", flush=True)


if __name__ == "__main__":
    main()
