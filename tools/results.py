"""The pages of docs/results, from the summaries of the runs made for them.

    python tools/results.py run --out FOLDER [--jobs N] [--seeds 0,1] TARGET ...   run what is missing of these targets,
                                                 in this order
    python tools/results.py collect FOLDER ...   keep the finished runs of such folders or of `personafl reproduce`
    python tools/results.py                      write all pages anew

`docs/results/summaries/<setting>/<label>-<seed>.json` is a run's `summary.json`, as `personafl reproduce` names them
when it is given all targets of a paper. A page reports the seeds of which it has numbers, and settings and methods that
have all of these seeds. `run` keeps no clients' models, which take gigabytes.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from personafl import config
from personafl.core.table import Table
from personafl.experiment import shared_runs, targets
from personafl.experiment.comparison import Comparison
from personafl.experiment.measures import RELATIVE
from personafl.experiment.reproduction import Reproduction, finish
from personafl.experiment.shared_runs import SharedRun
from personafl.experiment.targets import Target
from personafl.simulation.machine import chosen_device

PAGES = Path(__file__).parents[1] / "docs" / "results"
RUNS = PAGES / "summaries"
MARKS = "<!-- claims -->", "<!-- end of claims -->"
Found = dict[tuple[str, str, int], dict[str, Any]]
"""Summaries by setting, label and seed."""


def planned() -> list[SharedRun]:
    """All runs of all targets."""
    return shared_runs.plan([(t, t.seeds) for t in map(targets.load, targets.names())])


def kept_at(home: Path, runs: Path | None = None) -> Path:
    """Where the summary of a run is kept."""
    return (runs or RUNS) / home.parent.name / f"{home.name}.json"


def summaries(target: Target, runs: Path = RUNS, plan: Sequence[SharedRun] | None = None) -> Found:
    """All that are there of a target."""
    found: Found = {}
    for run in planned() if plan is None else plan:
        for name, setting, label in run.places:
            if name == target.name and (path := kept_at(run.home, runs)).is_file():
                found[setting, label, run.seed] = json.loads(path.read_text())
    return found


def missing(names: Sequence[str], runs: Path | None = None) -> list[SharedRun]:
    """Runs that these targets need and that are not there, or were judged by less; those of the first target first.

    A run is judged by all that any target asks of it, as it is called when all targets are run.
    """
    place = {name: i for i, name in enumerate(names)}
    needed = [r for r in planned() if any(of[0] in place for of in r.places)]
    needed.sort(key=lambda r: min(place[of[0]] for of in r.places if of[0] in place))
    return [r for r in needed if not _whole(r, kept_at(r.home, runs), names)]


def is_of(run: SharedRun, told: dict[str, Any]) -> bool:
    """Whether a summary is of this run's method with these settings, seed and rounds."""
    method = run.recipe.algorithms[0]
    asked = json.loads(json.dumps(config.settings(method.algorithm)))
    same = told["seed"], told["rounds"], told["algorithm"], told["label"], told["settings"]
    return same == (run.seed, run.recipe.training.num_rounds, method.name, method.label, asked)


def _whole(run: SharedRun, path: Path, names: Sequence[str]) -> bool:
    """Whether a summary has all that these targets ask of its run."""
    if not path.is_file():
        return False
    told = json.loads(path.read_text())
    if not is_of(run, told):
        return False
    for name, setting, label in run.places:
        if name in names:
            target = targets.load(name)
            alone = Comparison(target, {(setting, label): [told]})
            columns = [c for c in target.columns if not c.endswith(RELATIVE)]
            if not all(alone.cell(setting, label, c).values for c in columns):
                return False
    return True


def reported(target: Target, found: Found) -> tuple[int, ...]:
    """The seeds of which nine tenths as many numbers are there as of the seed that has the most."""

    def measured(seed: int) -> int:
        alone = Comparison(target, {(s, label): [told] for (s, label, of), told in found.items() if of == seed})
        return sum(bool(cell.values) for *_, cell in alone.cells())

    cells = {seed: measured(seed) for seed in target.seeds}
    return tuple(seed for seed, many in cells.items() if many and 10 * many >= 9 * max(cells.values()))


def reproduction(
    name: str, folder: Path, runs: Path = RUNS, plan: Sequence[SharedRun] | None = None
) -> Reproduction | None:
    """A target as far as there are runs of it."""
    target = targets.load(name)
    found = summaries(target, runs, plan)
    seeds = reported(target, found)
    if not seeds:
        return None
    whole = {
        (s.name, label): [found[s.name, label, seed] for seed in seeds]
        for s in target.settings
        for label in target.methods
        if all((s.name, label, seed) in found for seed in seeds)
    }
    return Reproduction(target, seeds, whole, folder)


def overview(made: list[Reproduction]) -> str:
    """Every claim, and what became of it."""
    rows = []
    for one in made:
        for verdict in one.comparison.verdicts():
            link = f"[{one.target.name}]({one.target.name}/page.md)"
            rows.append([link, verdict.claim.says, verdict.status, str(len(one.seeds))])
    return Table(["", "claim", "in our hands", "seeds"], rows, marked=True).markdown()


def _said(one: Reproduction) -> bool:
    """Whether anything is known of a target's claims; runs it shares with others may be all that is there."""
    return any(v.status != "not run" for v in one.comparison.verdicts())


def written(folder: Path = PAGES, runs: Path = RUNS) -> list[Reproduction]:
    """All pages, written to a folder."""
    plan = planned()
    found = [reproduction(n, folder / n, runs, plan) for n in targets.names()]
    made = [one for one in found if one is not None and _said(one)]
    if not made:
        raise SystemExit(f"{runs}: there are no summaries; the pages are left as they are")
    for one in made:
        one.folder.mkdir(parents=True, exist_ok=True)
        one.write()
    index = folder / "index.md"
    head, begin, rest = index.read_text().partition(MARKS[0])
    _, end, tail = rest.partition(MARKS[1])
    index.write_text(f"{head}{begin}\n\n{overview(made)}\n\n{end}{tail}")
    return made


def collect(folder: Path, runs: Path = RUNS) -> int:
    """Keep the summaries of a reproduction's finished runs; how many."""
    plan = {r.home: r for r in planned()}
    found = {}
    for path in sorted((folder / "runs").glob("*/*/*/seed-*/summary.json")):
        told, home = json.loads(path.read_text()), path.parents[2].relative_to(folder)
        run = plan.get(home)
        if run is None:
            raise SystemExit(f"{path}: no target has such a run when all of a paper are run; use `run`")
        if not is_of(run, told):
            raise SystemExit(f"{path}: is of other seeds, rounds or settings than {home}, or a rehearsal")
        there = kept_at(home, runs)
        before = json.loads(there.read_text()).get("robustness", {}) if there.is_file() else {}
        if gone := before.keys() - told.get("robustness", {}).keys():
            raise SystemExit(f"{path}: has no {', '.join(sorted(gone))}, and {there} has")
        found[there] = told
    for there, told in found.items():
        there.parent.mkdir(parents=True, exist_ok=True)
        there.write_text(json.dumps(told, separators=(",", ":"), ensure_ascii=False) + "\n")
    return len(found)


def played(names: Sequence[str], folder: Path, jobs: int, device: str, seeds: Sequence[int] | None = None) -> None:
    """Run what is missing of these targets, of some seeds or of all."""

    def told(run: SharedRun, place: int, of: int) -> None:
        print(f"{time.perf_counter() - begun:6.0f} s  {place}/{of}  {run.home}", flush=True)
        for path in (folder / run.home).glob("*/seed-*/checkpoint/*.safetensors"):
            path.unlink()

    begun = time.perf_counter()
    runs = []
    for run in missing(names):
        if seeds is not None and run.seed not in seeds:
            continue
        there = folder / run.home / run.label / f"seed-{run.seed}" / "summary.json"
        if not there.is_file():
            runs.append(run)
        elif not _whole(run, there, names):
            raise SystemExit(f"{there}: was judged by less than is needed; choose another folder")
    if not runs:
        print("nothing is missing")
    finish(runs, folder, jobs, chosen_device(device), {"threads": 1}, told)


def _text(page: Path) -> str:
    """What a page says; pictures are drawn differently by every version of Matplotlib."""
    return re.sub(r"data:image/[^\"']+", "", page.read_text())


def differences() -> list[str]:
    """Pages that are not what the summaries give."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copy(PAGES / "index.md", folder)
        made = written(folder)
        of_each = ("page.md", "page.html", "comparison.csv")
        files = ["index.md", *(f"{one.target.name}/{f}" for one in made for f in of_each)]
        wrong = [f for f in files if not (PAGES / f).is_file() or _text(folder / f) != _text(PAGES / f)]
        there = {p.parent.name for p in PAGES.glob("*/page.*")}
        return wrong + sorted(there ^ {one.target.name for one in made})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("do", nargs="?", choices=["run", "collect"])
    parser.add_argument("what", nargs="*")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seeds", help="some of them, separated by commas")
    args = parser.parse_intermixed_args()
    if args.do == "run":
        if args.out is None:
            parser.error("run: needs --out")
        seeds = None if args.seeds is None else [int(s) for s in args.seeds.split(",")]
        played(targets.expanded(args.what), args.out.absolute(), args.jobs, args.device, seeds)
        return
    for folder in args.what:
        print(folder, collect(Path(folder)))
    for one in written():
        print(one.target.name, one.seeds, len(one.summaries))


if __name__ == "__main__":
    main()
