"""Published tables and figures run again: `personafl reproduce`.

Every method in a setting is a run folder of its own for each seed, `runs/<setting>/<label>-<seed>`, so that runs may go
side by side, be interrupted and gone on with, and be done for some methods first; what several targets have in common
is run once (`shared_runs`). What they come to is written beside them, of several targets in a folder for each:
`page.md` and `page.html` with the published and the measured numbers and the claims, `comparison.csv`, `figure.png`.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from personafl import config
from personafl.core.display import Displayed
from personafl.core.errors import UserError
from personafl.core.plain_text import spreadsheet_row
from personafl.core.settings import unknown
from personafl.core.types import Row, Summary
from personafl.evaluation import run_records
from personafl.experiment import jobs as processes
from personafl.experiment import pages, run_folder, shared_runs, targets
from personafl.experiment.comparison import Cell, Comparison, Summaries
from personafl.experiment.jobs import side_by_side
from personafl.experiment.run_folder import claimed
from personafl.experiment.running import checked_seeds, resume, run
from personafl.experiment.shared_runs import SharedRun
from personafl.experiment.targets import Target
from personafl.simulation import ranks
from personafl.simulation.execution_plan import temporary
from personafl.simulation.machine import chosen_device
from personafl.storage import files
from personafl.storage.lock import locked

REQUEST = "reproduction.json"
CONDITIONS = ("memory", "threads", "threads_per_client", "chunk", "store", "checkpoint_every")
"""Arguments of `personafl.run` that are passed on to every run."""
Told = Callable[[SharedRun, int, int], None]
"""Hears of a run that is finished, its place among them and how many there are."""


def reproduce(target: str, **asked: Any) -> Reproduction:
    """Run a published table or figure with its paper's settings, and compare; arguments are `reproduce_all`'s."""
    if len(several := targets.expanded(_texts("target", target))) > 1:
        raise UserError(f"{target}: are {len(several)} targets; reproduce_all takes several")
    return reproduce_all(several, **asked)[0]


def reproduce_all(
    names: Sequence[str],
    *,
    only: Sequence[str] = (),
    seeds: Sequence[int] = (),
    smoke: bool = False,
    jobs: int = 1,
    out: str | Path | None = None,
    device: str = "auto",
    told: Told | None = None,
    **conditions: Any,
) -> list[Reproduction]:
    """Run published tables and figures with their papers' settings, what they have in common once, and compare.

    `names` are those of `personafl reproduce --list`, or what they begin with, such as dmpfl for all of that paper;
    `only` these methods are run, by label, though all that are in the folder are compared. `smoke` is a rehearsal: few
    rounds on the digits, which says nothing of the numbers. `jobs` runs go side by side, each in a process. `out` is
    the folder; the same one is gone on with. `told` hears of every run that is there (with `setting`, `label` and
    `seed`), its place and how many there are. `memory`, `threads`, `threads_per_client`, `chunk`, `store` and
    `checkpoint_every` are those of `personafl.run`.
    """
    asked = [targets.load(n) for n in targets.expanded(_texts("names", names))]
    if not asked:
        raise UserError("reproduce: needs a target; personafl reproduce --list names them")
    if strange := conditions.keys() - CONDITIONS:
        raise UserError(f"{min(strange)}: reproduce takes no such argument; possible are {', '.join(CONDITIONS)}")
    labels = _labels(asked, _texts("only", only))
    given = checked_seeds(seeds)
    numbers = {t.name: given or t.seeds[: 1 if smoke else None] for t in asked}
    processes.share_threads(conditions, processes.checked(jobs))
    if ranks.launched() > 1:
        raise UserError("reproduce: takes jobs; torchrun shares the clients of single runs")
    place, folder = chosen_device(device), temporary() if out is None else Path(out).absolute()
    runs = shared_runs.plan([(t, numbers[t.name]) for t in asked], smoke=smoke)
    request = json.dumps(_request(runs, smoke=smoke), indent=1) + "\n"
    again = (folder / REQUEST).is_file()
    with locked(folder) if again else claimed(folder):
        if not again:
            files.write(folder / REQUEST, request)
        elif run_folder.text_of(folder / REQUEST) != request:
            raise UserError(
                f"{folder}: is of other targets, of other seeds or of another version, or one is a rehearsal and the "
                "other is not; a folder takes one request, so choose another"
            )
        finish([r for r in runs if r.labels & labels], folder, jobs, place, conditions, told)
        ended = []
        for t in asked:
            home = folder if len(asked) == 1 else folder / t.name
            ended.append(Reproduction(t, numbers[t.name], _read(t, runs, folder, numbers[t.name]), home, smoke))
            ended[-1].write()
    return ended


@dataclass(frozen=True)
class _Unit:
    """A run with its folder and conditions, as another process can be given it."""

    run: SharedRun
    home: Path
    device: str
    conditions: Mapping[str, Any]

    def finish(self) -> None:
        """Run it, go on with it, or leave it as it is where it is finished."""
        if not (self.home / run_folder.RUN).is_file():
            files.remove(self.home)  # begun, and killed before it said what it is
            recipe, seeds = self.run.recipe, [self.run.seed]
            run(recipe, seeds=seeds, out=self.home, device=self.device, quiet=True, **self.conditions)
        elif run_folder.missing(self.home):
            resume(self.home, quiet=True)


def finish(
    runs: Sequence[SharedRun],
    folder: Path,
    jobs: int,
    device: str,
    conditions: Mapping[str, Any],
    told: Told | None = None,
) -> None:
    """Run these, or go on with them, so many at a time."""
    units = [_Unit(r, folder / r.home, device, conditions) for r in runs]
    for place, (i, _) in enumerate(side_by_side([unit.finish for unit in units], jobs), 1):
        if told is not None:
            told(runs[i], place, len(runs))


def _texts(name: str, given: Any) -> list[str]:
    """A text, or several, as a list."""
    found = [given] if isinstance(given, str) else list(given) if isinstance(given, Iterable) else [given]
    for value in found:
        if not isinstance(value, str):
            raise UserError(f"{name}: {value!r:.60} is no name; give a list of texts")
    return found


def _labels(asked: Sequence[Target], only: Sequence[str]) -> set[str]:
    every = list(dict.fromkeys(label for t in asked for label in t.methods))
    for label in only:
        if label not in every:
            raise UserError(f"only {label}: {unknown('method of what is reproduced', label, every)}")
    return set(only or every)


def _request(runs: Sequence[SharedRun], *, smoke: bool) -> dict[str, Any]:
    """What another reproduction must have in common to be the same, and which run is whose."""
    found = [
        {"home": r.home.as_posix(), "for": [list(p) for p in r.places], "seed": r.seed, "recipe": _lines(r)}
        for r in runs
    ]
    return {"smoke": smoke, "runs": found}


def _lines(run: SharedRun) -> list[str]:
    return config.dump(run.recipe).splitlines()


def _read(
    target: Target, runs: Sequence[SharedRun], folder: Path, seeds: Sequence[int]
) -> dict[tuple[str, str], list[Summary]]:
    """The summaries of a target by setting and label, where all seeds are finished."""
    found: dict[tuple[str, str], list[Summary]] = {}
    whose = {(*place, r.seed): r for r in runs for place in r.places}
    for s in target.settings:
        for label in target.methods:
            of = [whose[target.name, s.name, label, seed] for seed in seeds]
            if all(_finished(folder / r.home) for r in of):
                found[s.name, label] = [_summary(r, folder / r.home) for r in of]
    return found


def _finished(home: Path) -> bool:
    return (home / run_folder.RUN).is_file() and not run_folder.missing(home)


def _summary(run: SharedRun, home: Path) -> Summary:
    path = run_folder.home(home, run.label, run.seed) / "summary.json"
    try:
        found = run_records.read_summary(path)
        for name in ("settings", "environment"):
            found[name].items()
    except (UserError, OSError, KeyError, AttributeError):
        raise UserError(f"{path}: cannot be read; remove {home} to run it anew") from None
    planned = run.seed, run.recipe.training.num_rounds
    if (found["seed"], found["rounds"]) != planned:
        raise UserError(f"{path}: is not of seed {planned[0]} and {planned[1]} rounds; remove {home} to run it anew")
    return found


@dataclass(frozen=True, repr=False)
class Reproduction(Displayed):
    """What became of a target's runs."""

    target: Target
    seeds: tuple[int, ...]
    summaries: Summaries = field(repr=False)
    folder: Path
    smoke: bool = False

    def _facts(self) -> dict[str, object]:
        claims: dict[str, object] = {v.claim.says: v.status for v in self.comparison.verdicts()}
        return {"target": self.target.name} | claims

    @cached_property
    def comparison(self) -> Comparison:
        return Comparison(self.target, self.summaries, self.smoke)

    @cached_property
    def page(self) -> pages.Page:
        """All of it as headings, words, tables and a picture."""
        return pages.reproduced(self.comparison, self.seeds)

    def markdown(self) -> str:
        return self.page.markdown()

    def rows(self) -> list[Row]:
        """A row for every number."""
        return [_row(*of) for of in self.comparison.cells()]

    def write(self) -> None:
        """The page, the numbers and the picture as files."""
        rows = self.rows()
        if not rows:
            return
        table = io.StringIO()
        writer = csv.DictWriter(table, spreadsheet_row(rows[0]).keys(), lineterminator="\n")
        writer.writeheader()
        writer.writerows(map(spreadsheet_row, rows))
        self.folder.mkdir(exist_ok=True)
        files.write(self.folder / "comparison.csv", table.getvalue())
        page = self.page
        files.write(self.folder / "page.md", page.markdown())
        files.write(self.folder / "page.html", page.html())
        if page.picture is not None:
            out = io.BytesIO()
            page.picture.savefig(out, format="png", dpi=120, metadata={"Software": None})
            files.write(self.folder / pages.PICTURE, out.getvalue())


def _row(setting: str, row: str, column: str, cell: Cell) -> Row:
    printed = cell.printed
    return {
        "setting": setting,
        "method": row,
        "column": column,
        "published": "" if printed is None else printed.value,
        "published_std": "" if printed is None or printed.std is None else printed.std,
        "measured": "" if cell.mean is None else cell.mean,
        "clients_std": "" if cell.clients is None else cell.clients,
        "seeds": " ".join(map(repr, cell.values)),
    }


def described() -> list[tuple[str, str, float]]:
    """Every target with its title and how many runs it has."""
    found = [targets.load(n) for n in targets.names()]
    return [(t.name, t.title, len(t.settings) * len(t.methods) * len(t.seeds)) for t in found]
