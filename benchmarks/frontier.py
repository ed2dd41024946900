"""Rules of inference tried on trainings that were played once.

    python benchmarks/frontier.py train RECIPE ... [--set KEY=VALUE ...] --seeds 1000 --out FOLDER [--jobs 12]
    python benchmarks/frontier.py rules FOLDER/*.npz [--kind batch stream] [--batch 0 1 8 32] [--before 32]
                                                     [--temperature 1 2] [--share 0 0.5 1] [--pull 1 2 4]
                                                     [--doubt 0 2] [--wary 0 2]

`train` plays every method of these recipes with every seed, each in a process, and keeps in `RECIPE-LABEL-SEED.npz`,
for every client, the outputs of its own model and of the global one on its own test examples, on those of every draw of
donor shift, on as many of all clients together (`uniform`) and on its own corrupted (`--corruptions`, or `all` fifteen,
`--severities`), with its label frequencies. `rules` then judges every rule on them, on a CPU: accuracy in the mean over
six degrees and at each, on uniform classes, and in the mean over corruptions at each severity, over clients and draws;
files that differ in the seed alone are one row. What `wary` needs of validation data it takes from the examples that
are judged.
Choose on validation data (`evaluation.split=validation data.validation_share=0.2`), with other seeds than those
reported. Methods must have `inference = "batch"`, so that label frequencies are taken, without what is fitted to
validation data (`wary`, `calibrate`): outputs alone are kept.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import personafl
from personafl import config
from personafl.core.types import Examples, Metric, Params
from personafl.data.corruptions import STANDARD
from personafl.data.shift import draw, mix_scores
from personafl.evaluation import batch_inference, evaluate, image_transforms
from personafl.evaluation.metrics import METRICS
from personafl.experiment.jobs import side_by_side
from personafl.models import StackedModel
from personafl.plugins import EstimatedPrior, RunningPrior
from personafl.plugins.label_prior import squared_lead
from personafl.simulation.simulator import Simulation

DEGREES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
Kept = dict[str, Any]


def outputs_on(sim: Simulation, examples: Callable[[Tensor], Examples]) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Of each client the outputs of both models `[n, 2, K]` on examples, their labels, and its label frequencies."""

    def work(model: StackedModel, part: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
        data, ready = examples(part), sim.deployed_models(model, part)
        both = functools.partial(evaluate.both_outputs, sim.algorithm)
        out = evaluate.outputs(both, replace(sim.task, model=model), ready, data, 2**27)
        return [
            (out[i, :n].half().cpu(), data.y[data.rows[i, :n]].cpu(), ready["labels/own"][i].cpu())
            for i, n in enumerate(data.count.tolist())
        ]

    parts = torch.split(torch.arange(sim.federation.num_clients), 25)
    return [found for part in parts for each in sim.each(part, work) for found in each]


def _corrupted(sim: Simulation, kind: str, severity: int, ids: Tensor) -> Examples:
    """Clients' own test examples, corrupted."""
    return image_transforms.corrupted(sim.federation.examples("test", ids), kind, severity, sim.training.seed)


def kept(sim: Simulation, kinds: Sequence[str] = (), severities: Sequence[int] = ()) -> Kept:
    """Outputs `[C, n (1 + draws), 2, K]`, labels, sizes, where foreign examples go, and label frequencies."""
    assert sim.shift is not None
    fed, shift = sim.federation, sim.shift
    pool = draw(fed, "pool", sim.training.seed, 1)
    drawn = outputs_on(sim, lambda ids: evaluate.with_shift(fed, shift, ids))
    uniform = outputs_on(sim, lambda ids: evaluate.at_degree(fed, pool, ids, 0, 1.0))
    corrupted = {
        f"{kind} {severity}": outputs_on(sim, functools.partial(_corrupted, sim, kind, severity))
        for kind, severity in itertools.product(kinds, severities)
    }
    places = [[shift.of(d, c)[1].numpy() for c in range(fed.num_clients)] for d in range(shift.draws)]
    return {
        "outputs": torch.cat([out for out, _, _ in drawn]).numpy(),
        "labels": torch.cat([y for _, y, _ in drawn]).numpy().astype(np.int16),
        "sizes": np.array([len(y) // (1 + shift.draws) for _, y, _ in drawn]),
        "places": np.concatenate([np.concatenate(of) for of in places]).astype(np.int32),
        "own": torch.stack([own for _, _, own in drawn]).numpy(),
        "draws": np.array(shift.draws),
        "uniform": torch.cat([out for out, _, _ in uniform]).numpy(),
        "uniform_labels": torch.cat([y for _, y, _ in uniform]).numpy().astype(np.int16),
        **{f"corrupted {n}": torch.cat([out for out, _, _ in of]).numpy() for n, of in corrupted.items()},
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
    corruptions: tuple[str, ...]
    severities: tuple[int, ...]

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
            found_of = kept(one.simulation, self.corruptions, self.severities)
            np.savez_compressed(file, **found_of, summary=np.array(json.dumps(one.summary)))
        part.rename(path)


def train(args: argparse.Namespace) -> None:
    args.out.mkdir(parents=True, exist_ok=True)
    jobs = [
        Training(
            recipe,
            tuple(args.set),
            m.label,
            seed,
            args.device,
            args.out,
            STANDARD if args.corruptions == ["all"] else tuple(args.corruptions),
            tuple(args.severities),
        )
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
        self.others = {n: self._whole(held, n, sizes) for n in held if n == "uniform" or n.startswith("corrupted ")}
        self.shifted: dict[tuple[int, float], tuple[Tensor, Examples]] = {}

    def at(self, draw: int, degree: float) -> tuple[Tensor, Examples]:
        """Outputs and examples of the clients' shifted test sets."""
        if (draw, degree) not in self.shifted:
            self.shifted[draw, degree] = self._at(draw, degree)
        return self.shifted[draw, degree]

    def _whole(self, held: Kept, name: str, sizes: Any) -> tuple[Tensor, Examples]:
        """Outputs and examples of a set of every client's."""
        each = torch.split(torch.from_numpy(held[name]).float(), sizes.tolist())
        labels = [y[0] for y in self.labels]
        if name == "uniform":
            labels = list(torch.split(torch.from_numpy(held["uniform_labels"]).long(), sizes.tolist()))
        return _padded(list(zip(each, labels, strict=True)))

    def _at(self, draw: int, degree: float) -> tuple[Tensor, Examples]:
        mixed = [
            tuple(mix_scores(t[0], t[1 + draw], self.places[draw][c], degree) for t in both)
            for c, both in enumerate(zip(self.outputs, self.labels, strict=True))
        ]
        return _padded(mixed)


def _padded(clients: Sequence[tuple[Tensor, ...]]) -> tuple[Tensor, Examples]:
    """Outputs and labels of every client as a stack."""
    out = torch.nn.utils.rnn.pad_sequence([m[0] for m in clients], batch_first=True)
    y = torch.nn.utils.rnn.pad_sequence([m[1] for m in clients], batch_first=True)
    count = torch.tensor([len(m[1]) for m in clients])
    rows = torch.arange(y.numel()).view_as(y)
    return out, Examples(ids=torch.arange(len(y)), x=y.flatten(), y=y.flatten(), rows=rows, count=count)


def judged(rule: Any, of: Outputs, metric: Metric, batch: int, before: int) -> dict[str, float]:
    """Mean accuracy over clients and draws at each degree, and on each other set."""
    given: Params = {"labels/own": of.own, "labels/lead": _leads(rule, *of.at(0, 0.0))}
    if rule.in_turn:
        given = dataclasses.replace(rule, wary=0.0).measure(None, {}, lambda _: {"examples": of.own.exp()}) | given
        given["labels/now"] = of.own.clone()

    def accuracy(out: Tensor, data: Examples) -> float:
        order = batch_inference.shuffled(data, 0)
        scores = batch_inference.scores(rule, metric, given, out, data, order, batch, before)
        return float(torch.stack([s.mean() for s in scores]).mean())

    found = {}
    for degree in DEGREES:
        draws = range(of.draws if degree else 1)
        found[f"{degree:g}"] = statistics.fmean(accuracy(*of.at(d, degree)) for d in draws)
    by_severity: dict[str, list[float]] = {}
    for name, (out, data) in of.others.items():
        kind = f"corrupted {name.split()[-1]}" if name.startswith("corrupted") else name
        by_severity.setdefault(kind, []).append(accuracy(out, data))
    return found | {n: statistics.fmean(v) for n, v in by_severity.items()}


def _leads(rule: Any, out: Tensor, data: Examples) -> Tensor:
    """The usual lead, as `wary` measures it on validation data."""
    each = squared_lead(rule.mixed({}, out[:, :, 0], out[:, :, 1]))
    real = torch.arange(each.shape[1]) < data.count.unsqueeze(1)
    usual: Tensor = (each * real).sum(1) / data.count.clamp(min=1)
    return usual


def rules(args: argparse.Namespace) -> None:
    metric = METRICS["classification"]["accuracy"]
    by_name: dict[str, list[Outputs]] = {}
    for path in args.outputs:
        by_name.setdefault(path.stem.rpartition("-")[0], []).append(Outputs(dict(np.load(path))))
    for label, seeds in by_name.items():
        found = []
        grid = itertools.product(args.share, args.temperature, args.pull, args.doubt, args.wary)
        for share, warm, pull, doubt, wary in grid:
            if wary and not doubt:
                continue
            usual = {"share": share, "temperature": warm, "pull": pull, "doubt": doubt, "wary": wary}
            for kind in args.kind:
                stream = kind == "stream"
                tried = RunningPrior(**usual, forgetting=args.forgetting) if stream else EstimatedPrior(**usual)
                for batch in [0] if stream else args.batch:
                    curves = [judged(tried, of, metric, batch, args.before if stream else 0) for of in seeds]
                    curve = {n: statistics.fmean(c[n] for c in curves) for n in curves[0]}
                    mean = statistics.fmean(curve[f"{d:g}"] for d in DEGREES)
                    found.append((mean, curve, f"{kind} {batch or 'all'} {usual}"))
        heads = (n.replace("corrupted ", "c")[:5] for n in found[0][1])
        print(f"{label:32}  mean  {' '.join(f'{h:>5}' for h in heads)}")
        for mean, curve, words in sorted(found, key=lambda f: -f[0])[: args.best]:
            told = " ".join(f"{100 * c:5.2f}" for c in curve.values())
            print(f"{label:32} {100 * mean:5.2f}  {told}  {words}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(required=True)
    one = parts.add_parser("train")
    one.add_argument("recipe", nargs="+")
    one.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE")
    one.add_argument("--seeds", type=int, nargs="*", default=[1000])
    one.add_argument(
        "--corruptions", nargs="*", default=["gaussian_noise", "defocus_blur", "fog", "contrast", "pixelate"]
    )
    one.add_argument("--severities", type=int, nargs="*", default=[1, 3, 5])
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
    two.add_argument("--doubt", nargs="*", type=float, default=[1.0])
    two.add_argument("--wary", nargs="*", type=float, default=[0.0])
    two.add_argument("--forgetting", type=float, default=0.02)
    two.add_argument("--best", type=int, default=5)
    two.set_defaults(work=rules)
    args = parser.parse_args()
    args.work(args)


if __name__ == "__main__":
    main()
