"""The pages of docs/results, from the summaries of the runs made for them.

    python tools/results.py collect FOLDER ...   keep the finished runs of these folders of `personafl reproduce`
    python tools/results.py                      write all pages anew

`docs/results/runs/<setting>/<label>-<seed>.json` is a run's `summary.json`, as `personafl reproduce` names them when it
is given all targets of a paper. A page reports the seeds of which it has numbers, and settings and methods that have
all of these seeds.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from personafl.core.plain_text import markdown_table
from personafl.experiment import shared_runs, targets
from personafl.experiment.comparison import Comparison
from personafl.experiment.reproduction import REQUEST, Reproduction
from personafl.experiment.targets import Target

PAGES = Path(__file__).parents[1] / "docs" / "results"
RUNS = PAGES / "runs"
MARKS = "<!-- claims -->", "<!-- end of claims -->"
Found = dict[tuple[str, str, int], dict[str, Any]]
"""Summaries by setting, label and seed."""


def summaries(target: Target, runs: Path = RUNS) -> Found:
    """All that are there of a target."""
    every = [targets.load(n) for n in targets.names()]
    plan = shared_runs.plan([(t, t.seeds) for t in every])
    whose = {(*place, r.seed): r.home for r in plan for place in r.places}
    found: Found = {}
    for s in target.settings:
        for label in target.methods:
            for seed in target.seeds:
                path = runs / whose[target.name, s.name, label, seed].relative_to("runs").with_name(
                    f"{whose[target.name, s.name, label, seed].name}.json"
                )
                if path.is_file():
                    found[s.name, label, seed] = json.loads(path.read_text())
    return found


def reported(target: Target, found: Found) -> tuple[int, ...]:
    """The seeds of which the target's columns are measured."""

    def measured(seed: int) -> bool:
        alone = Comparison(target, {(s, label): [told] for (s, label, of), told in found.items() if of == seed})
        return any(cell.values for *_, cell in alone.cells())

    return tuple(seed for seed in target.seeds if measured(seed))


def reproduction(name: str, folder: Path, runs: Path = RUNS) -> Reproduction | None:
    """A target as far as there are runs of it."""
    target = targets.load(name)
    found = summaries(target, runs)
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
    return markdown_table(["", "claim", "in our hands", "seeds"], rows)


def written(folder: Path = PAGES, runs: Path = RUNS) -> list[Reproduction]:
    """All pages, written to a folder."""
    made = [one for n in targets.names() if (one := reproduction(n, folder / n, runs)) is not None]
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
    kept = 0
    for run in json.loads((folder / REQUEST).read_text())["runs"]:
        for path in (folder / run["home"]).glob("*/seed-*/summary.json"):
            to = runs / Path(run["home"]).relative_to("runs").with_name(f"{Path(run['home']).name}.json")
            to.parent.mkdir(parents=True, exist_ok=True)
            to.write_text(json.dumps(json.loads(path.read_text()), separators=(",", ":"), ensure_ascii=False) + "\n")
            kept += 1
    return kept


def differences() -> list[str]:
    """Pages that are not what the summaries give."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copy(PAGES / "index.md", folder)
        made = written(folder)
        files = ["index.md", *(f"{one.target.name}/{f}" for one in made for f in ("page.md", "comparison.csv"))]
        return [f for f in files if not (PAGES / f).is_file() or (folder / f).read_text() != (PAGES / f).read_text()]


def main() -> None:
    if sys.argv[1:2] == ["collect"]:
        for folder in sys.argv[2:]:
            print(folder, collect(Path(folder)))
    for one in written():
        print(one.target.name, one.seeds, len(one.summaries))


if __name__ == "__main__":
    main()
