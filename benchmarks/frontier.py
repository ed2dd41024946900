"""Rules of inference tried on trainings that were played once.

    python benchmarks/frontier.py train RECIPE ... [--set KEY=VALUE ...] --seeds 1000 --out FOLDER [--jobs 12]
    python benchmarks/frontier.py rules FOLDER/*.npz [--kind batch stream] [--batch 0 1 8 32] [--before 32]
                                                     [--temperature 1 2] [--share 0 0.5 1] [--pull 1 2 4]

`train` plays every method of these recipes with every seed, each in a process, and keeps in `RECIPE-LABEL-SEED.npz`,
for every client, the outputs of its own model and of the global one on its own test examples and on those of every draw
of donor shift, with its label frequencies. `rules` then judges every rule on them, on a CPU: accuracy without shift, at
full shift and in the mean over six degrees, over clients and draws; files that differ in the seed alone are one row.
Choose on validation data (`evaluation.split=validation data.validation_share=0.2`), with other seeds than those
reported. Methods must have `inference = "batch"`, so that label frequencies are taken.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import personafl
from personafl import config
from personafl.core.types import Examples, Metric, Params
from personafl.data.shift import mix_scores
from personafl.evaluation import evaluate, together
from personafl.evaluation.metrics import METRICS
from personafl.experiment.jobs import side_by_side
from personafl.sim.simulator import Simulation
from personafl.slots import EstimatedPrior, RunningPrior

DEGREES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
Kept = dict[str, Any]


def kept(sim: Simulation) -> Kept:
    """Outputs `[C, n (1 + draws), 2, K]`, labels, sizes, where foreign examples go, and label frequencies."""
    assert sim.shift is not None
    ids, parts = torch.arange(sim.federation.num_clients), []
    for part in torch.split(ids, 25):
        data = evaluate.with_shift(sim.federation, sim.shift, part)
        both = functools.partial(evaluate.both_outputs, sim.algorithm)
        (ready,) = sim.each(part, lambda model, ids: [sim.deployed_models(model, ids)])
        out = evaluate.outputs(both, sim.task, ready[0], data, 2**27)
        parts += [
            (out[i, :n].half().cpu().numpy(), data.y[data.rows[i, :n]].cpu().numpy(), ready[0]["labels/own"][i].cpu())
            for i, n in enumerate(data.count.tolist())
        ]
    places = [[sim.shift.of(d, c)[1].numpy() for c in ids.tolist()] for d in range(sim.shift.draws)]
    return {
        "outputs": np.concatenate([p[0] for p in parts]),
        "labels": np.concatenate([p[1] for p in parts]).astype(np.int16),
        "sizes": np.array([len(p[1]) // (1 + sim.shift.draws) for p in parts]),
        "places": np.concatenate([np.concatenate(of) for of in places]).astype(np.int32),
        "own": np.stack([p[2].numpy() for p in parts]),
        "draws": np.array(sim.shift.draws),
    }


@dataclass(frozen=True)
class Training:
    """One method of a recipe with one seed, as another process can be given it."""

    recipe: str
    overrides: tuple[str, ...]
    label: str
    seed: int
    device: str
    out: Path

    def play(self) -> None:
        path = self.out / f"{Path(self.recipe).stem}-{self.label}-{self.seed}.npz"
        if path.is_file():
            return
        found = personafl.run(
            self.recipe,
            *self.overrides,
            f"algorithms={self.label}",
            seeds=[self.seed],
            device=self.device,
            threads=1,
            quiet=True,
        )
        (one,) = found
        part = path.with_suffix(".part")
        with part.open("wb") as file:
            np.savez_compressed(file, **kept(one.simulation), summary=np.array(json.dumps(one.summary)))
        part.rename(path)


def train(args: argparse.Namespace) -> None:
    args.out.mkdir(parents=True, exist_ok=True)
    jobs = [
        Training(recipe, tuple(args.set), m.label, seed, args.device, args.out)
        for recipe in args.recipe
        for m in config.load(recipe).algorithms
        for seed in args.seeds
    ]
    begun = time.perf_counter()
    for place, (i, _) in enumerate(side_by_side([job.play for job in jobs], args.jobs), 1):
        told = f"{Path(jobs[i].recipe).stem} {jobs[i].label} {jobs[i].seed}"
        print(f"{time.perf_counter() - begun:6.0f} s  {place}/{len(jobs)}  {told}", flush=True)


class Outputs:
    """What `train` kept of a method."""

    def __init__(self, held: Kept) -> None:
        sizes, self.draws = held["sizes"], int(held["draws"])
        edges = np.concatenate([[0], (sizes * (1 + self.draws)).cumsum()])
        each = [slice(a, b) for a, b in itertools.pairwise(edges)]
        outputs, labels, sets = (
            torch.from_numpy(held["outputs"]).float(),
            torch.from_numpy(held["labels"]).long(),
            1 + self.draws,
        )
        self.outputs = [outputs[s].view(sets, -1, *outputs.shape[1:]) for s in each]
        self.labels = [labels[s].view(sets, -1) for s in each]
        flat = iter(np.split(held["places"], np.cumsum(np.tile(sizes, self.draws))[:-1]))
        self.places = [[torch.from_numpy(next(flat)).long() for _ in sizes] for _ in range(self.draws)]
        self.own = torch.from_numpy(held["own"])
        self.shifted: dict[tuple[int, float], tuple[Tensor, Examples]] = {}

    def at(self, draw: int, degree: float) -> tuple[Tensor, Examples]:
        """Outputs and examples of the clients' shifted test sets."""
        if (draw, degree) not in self.shifted:
            self.shifted[draw, degree] = self._at(draw, degree)
        return self.shifted[draw, degree]

    def _at(self, draw: int, degree: float) -> tuple[Tensor, Examples]:
        mixed = [
            tuple(mix_scores(t[0], t[1 + draw], self.places[draw][c], degree) for t in both)
            for c, both in enumerate(zip(self.outputs, self.labels, strict=True))
        ]
        out = torch.nn.utils.rnn.pad_sequence([m[0] for m in mixed], batch_first=True)
        y = torch.nn.utils.rnn.pad_sequence([m[1] for m in mixed], batch_first=True)
        count = torch.tensor([len(m[1]) for m in mixed])
        rows = torch.arange(y.numel()).view_as(y)
        return out, Examples(ids=torch.arange(len(y)), x=y.flatten(), y=y.flatten(), rows=rows, count=count)


def judged(rule: Any, of: Outputs, metric: Metric, batch: int, before: int) -> list[float]:
    """Mean accuracy over clients and draws at each degree."""
    given: Params = {"labels/own": of.own}
    if rule.in_turn:
        given = rule.measure(None, {}, lambda _: {"examples": of.own.exp()}) | given
        given["labels/now"] = of.own.clone()
    means = []
    for degree in DEGREES:
        found = []
        for draw in range(of.draws if degree else 1):
            out, data = of.at(draw, degree)
            scores = together.scores(rule, metric, given, out, data, together.shuffled(data, 0), batch, before)
            found.append(torch.stack([s.mean() for s in scores]).mean())
        means.append(float(torch.stack(found).mean()))
    return means


def rules(args: argparse.Namespace) -> None:
    metric = METRICS["classification"]["accuracy"]
    by_name: dict[str, list[Outputs]] = {}
    for path in args.outputs:
        by_name.setdefault(path.stem.rpartition("-")[0], []).append(Outputs(dict(np.load(path))))
    for label, seeds in by_name.items():
        found = []
        for share, warm, pull in itertools.product(args.share, args.temperature, args.pull):
            base = EstimatedPrior(share=share, temperature=warm, pull=pull)
            usual = {"share": share, "temperature": warm, "pull": pull}
            for kind in args.kind:
                stream = kind == "stream"
                tried = RunningPrior(**usual, forgetting=args.forgetting) if stream else replace(base)
                for batch in [0] if stream else args.batch:
                    curves = [judged(tried, of, metric, batch, args.before if stream else 0) for of in seeds]
                    curve = [sum(at) / len(at) for at in zip(*curves, strict=True)]
                    found.append((sum(curve) / len(curve), curve, f"{kind} {batch or 'all'} {usual}"))
        for mean, curve, words in sorted(found, key=lambda f: -f[0])[: args.best]:
            print(f"{label:32} {100 * mean:5.2f}  {' '.join(f'{100 * c:5.2f}' for c in curve)}  {words}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(required=True)
    one = parts.add_parser("train")
    one.add_argument("recipe", nargs="+")
    one.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE")
    one.add_argument("--seeds", type=int, nargs="*", default=[1000])
    one.add_argument("--jobs", type=int, default=1)
    one.add_argument("--device", default="auto")
    one.add_argument("--out", type=Path, required=True)
    one.set_defaults(work=train)
    two = parts.add_parser("rules")
    two.add_argument("outputs", type=Path, nargs="+")
    two.add_argument("--kind", nargs="*", default=["batch"], choices=["batch", "stream"])
    two.add_argument("--batch", nargs="*", type=int, default=[0])
    two.add_argument("--before", type=int, default=32)
    two.add_argument("--share", nargs="*", type=float, default=[0.0, 0.5, 1.0])
    two.add_argument("--temperature", nargs="*", type=float, default=[1.0, 2.0, 3.0])
    two.add_argument("--pull", nargs="*", type=float, default=[1.0, 4.0])
    two.add_argument("--forgetting", type=float, default=0.02)
    two.add_argument("--best", type=int, default=5)
    two.set_defaults(work=rules)
    args = parser.parse_args()
    args.work(args)


if __name__ == "__main__":
    main()
