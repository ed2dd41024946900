"""A published table or figure run again: `personafl reproduce`.

Every setting and method is a run folder of its own, `<setting>/<label>`, with all seeds, so that runs may go side by
side, be interrupted and gone on with, and be done for some methods first. What they come to is written beside them:
`page.md` and `page.html` with the published and the measured numbers and the claims, `comparison.csv`, `figure.png`.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from personafl import config
from personafl.core import files
from personafl.core.display import Displayed
from personafl.core.errors import UserError
from personafl.core.lock import locked
from personafl.core.settings import unknown
from personafl.experiment import jobs as processes
from personafl.experiment import pages, run_folder, targets
from personafl.experiment.comparison import Comparison, Summaries, Summary
from personafl.experiment.jobs import side_by_side
from personafl.experiment.run_folder import claimed
from personafl.experiment.running import checked_seeds, resume, run
from personafl.experiment.targets import Setting, Target
from personafl.sim import ranks
from personafl.sim.execution_plan import temporary
from personafl.sim.machine import chosen_device

REQUEST = "reproduction.json"


def reproduce(
    target: str,
    *,
    only: Sequence[str] = (),
    seeds: Sequence[int] = (),
    smoke: bool = False,
    jobs: int = 1,
    out: str | Path | None = None,
    device: str = "auto",
    told: Callable[[str, str, int, int], None] | None = None,
    **conditions: Any,
) -> Reproduction:
    """Run a published table or figure with its paper's settings, and compare.

    `target` is a name of `personafl reproduce --list`; `only` these methods are run, by label, though all that are in
    the folder are compared. `smoke` is a rehearsal: few rounds on the digits, which says nothing of the numbers.
    `jobs` runs go side by side, each in a process. `out` is the folder; the same one is gone on with. `told` hears of
    every run that is there: its setting and label, its place and how many there are. The other arguments are those of
    `personafl.run`.
    """
    asked = targets.load(target)
    labels = _labels(asked, [only] if isinstance(only, str) else only)
    numbers = checked_seeds(seeds) or asked.seeds[: 1 if smoke else None]
    processes.share_threads(conditions, processes.checked(jobs))
    if ranks.launched() > 1:
        raise UserError("reproduce: takes jobs; torchrun shares the clients of single runs")
    place, folder = chosen_device(device), temporary() if out is None else Path(out).absolute()
    request = json.dumps(_request(asked, numbers, smoke=smoke), indent=1) + "\n"
    again = (folder / REQUEST).is_file()
    with locked(folder) if again else claimed(folder):
        if not again:
            files.write(folder / REQUEST, request)
        elif run_folder.text_of(folder / REQUEST) != request:
            raise UserError(
                f"{folder}: is of another target, of other seeds or of another version; choose another folder"
            )
        units = [
            _Unit(asked.name, s, label, numbers, _home(folder, s, label), place, smoke, conditions)
            for s in asked.settings
            for label in labels
        ]
        _play(units, jobs, told)
        ended = Reproduction(asked, numbers, _read(asked, folder, numbers), folder, smoke)
        ended.write()
    return ended


@dataclass(frozen=True)
class _Unit:
    """One method in one setting, with all seeds."""

    target: str
    setting: Setting
    label: str
    seeds: tuple[int, ...]
    home: Path
    device: str
    smoke: bool
    conditions: Mapping[str, Any]

    def finish(self) -> None:
        """Run it, go on with it, or leave it as it is where it is finished."""
        if (self.home / run_folder.RUN).is_file():
            if run_folder.missing(self.home):
                resume(self.home, quiet=True)
            return
        asked = targets.load(self.target)
        made = asked.recipe_of(self.setting, self.label, asked.smoke if self.smoke else ())
        run(made, seeds=self.seeds, out=self.home, device=self.device, quiet=True, **self.conditions)


def _play(units: Sequence[_Unit], jobs: int, told: Callable[[str, str, int, int], None] | None) -> None:
    for place, (i, _) in enumerate(side_by_side([unit.finish for unit in units], jobs), 1):
        if told is not None:
            told(units[i].setting.name, units[i].label, place, len(units))


def _labels(asked: Target, only: Sequence[str]) -> list[str]:
    for label in only:
        if label not in asked.methods:
            raise UserError(f"only {label}: {unknown('method of this target', label, asked.methods)}")
    return [label for label in asked.methods if not only or label in only]


def _request(asked: Target, seeds: Sequence[int], *, smoke: bool) -> dict[str, Any]:
    """What another reproduction must have in common to be the same."""
    more = asked.smoke if smoke else ()
    recipes = {
        _slug(s.name): {label: config.dump(asked.recipe_of(s, label, more)) for label in asked.methods}
        for s in asked.settings
    }
    return {"target": asked.name, "seeds": list(seeds), "smoke": smoke, "recipes": recipes}


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-")


def _home(folder: Path, setting: Setting, label: str) -> Path:
    return folder / _slug(setting.name) / label


def _read(asked: Target, folder: Path, seeds: Sequence[int]) -> dict[tuple[str, str], list[Summary]]:
    """The summaries of all runs in a folder that are finished."""
    found: dict[tuple[str, str], list[Summary]] = {}
    for s in asked.settings:
        for label in asked.methods:
            home = _home(folder, s, label)
            if (home / run_folder.RUN).is_file() and not run_folder.missing(home):
                of = [_summary(run_folder.home(home, label, seed) / "summary.json", home) for seed in seeds]
                found[s.name, label] = of
    _check_rounds(found)
    return found


def _summary(path: Path, home: Path) -> Summary:
    try:
        found: Summary = json.loads(files.read_text(path))
        for name in ("label", "seed", "rounds", "settings", "environment", "time", "hashes", "accuracy", "shift"):
            found[name]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        raise UserError(f"{path}: cannot be read; remove {home} to run it anew") from None
    return found


def _check_rounds(found: Summaries) -> None:
    """Refuse runs that somebody went on with beyond their end."""
    rounds = {s["rounds"]: f"{setting}, {label}" for (setting, label), of in found.items() for s in of}
    if len(rounds) > 1:
        told = "; ".join(f"{n} rounds of {who}" for n, who in rounds.items())
        raise UserError(f"these runs are not of one table: {told}")


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
        return Comparison(self.target, self.summaries)

    @cached_property
    def page(self) -> pages.Page:
        """All of it as headings, words, tables and a picture."""
        return pages.reproduced(self.comparison, self.seeds, smoke=self.smoke)

    def markdown(self) -> str:
        return self.page.markdown()

    def rows(self) -> Iterator[dict[str, Any]]:
        """A row for every number."""
        for setting, row, column, cell in self.comparison.cells():
            printed = cell.printed
            yield {
                "setting": setting,
                "method": row,
                "column": column,
                "published": "" if printed is None else printed.value,
                "published_std": "" if printed is None or printed.std is None else printed.std,
                "measured": "" if cell.mean is None else cell.mean,
                "clients_std": "" if cell.clients is None else cell.clients,
                "seeds": " ".join(map(repr, cell.values)),
            }

    def write(self) -> None:
        """The page, the numbers and the picture as files."""
        rows = list(self.rows())
        if not rows:
            return
        table = io.StringIO()
        writer = csv.DictWriter(table, rows[0].keys(), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        files.write(self.folder / "comparison.csv", table.getvalue())
        page = self.page
        files.write(self.folder / "page.md", page.markdown())
        files.write(self.folder / "page.html", page.html())
        if page.picture is not None:
            out = io.BytesIO()
            page.picture.savefig(out, format="png", dpi=120, metadata={"Software": None})
            files.write(self.folder / pages.PICTURE, out.getvalue())


def described() -> list[tuple[str, str, float]]:
    """Every target with its title and how many runs it has."""
    found = [targets.load(n) for n in targets.names()]
    return [(t.name, t.title, len(t.settings) * len(t.methods) * len(t.seeds)) for t in found]
