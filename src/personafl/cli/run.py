"""`personafl run` and `personafl resume`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from personafl import config
from personafl.cli.terminal import (
    console,
    errors,
    first,
    print_comparison,
    print_table,
    seed_list,
    split,
    unique_folder,
)
from personafl.simulation.ranks import launched

if TYPE_CHECKING:
    from personafl.experiment import Result


def run(
    recipe: Annotated[str | None, typer.Argument(help="A path or a shipped recipe; none runs the demo.")] = None,
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Overrides, section.key=value.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Run folder; default runs/<recipe>-<time>-<xxxx>.")] = None,
    seeds: Annotated[str, typer.Option(help="Seeds, such as 0,1,2; default the recipe's.")] = "",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    profile: Annotated[bool, typer.Option("--profile", help="Tell where the time went.")] = False,
    store: Annotated[str, typer.Option(help="What clients keep: auto, device, host or disk.")] = "auto",
    memory: Annotated[float | None, typer.Option(metavar="GIB", help="Most memory to use, in GiB.")] = None,
    threads: Annotated[int | None, typer.Option(help="Threads of each process; default as PyTorch has it.")] = None,
    threads_per_client: Annotated[
        int, typer.Option(metavar="N", help="Of them, those of each client: for few clients on many cores.")
    ] = 1,
    chunk: Annotated[int, typer.Option(help="Most clients in one stack; default as many as fit.")] = 0,
    checkpoint_every: Annotated[
        str | None, typer.Option(metavar="N|TIME", help="Save every N rounds, or 90s, 5m; default about a minute.")
    ] = None,
    spread: Annotated[
        str | None, typer.Option(help="What ± is over seeds: std or ci; default ci from three seeds on.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summaries as JSON and nothing else.")] = False,
) -> None:
    """Run a recipe: every method, one table, one run folder."""
    from personafl import experiment

    name, changes = split(recipe, overrides)
    chosen = config.load(name, changes)
    folder = out or unique_folder(chosen.name)
    if first():
        experiment.checked(folder)
    numbers = seed_list(seeds)
    where: dict[str, Any] = {"device": device, "store": store, "memory": memory, "threads": threads, "chunk": chunk}
    where |= {"threads_per_client": threads_per_client, "spread": spread, "checkpoint_every": checkpoint_every}
    try:
        result = experiment.run(chosen, out=folder, seeds=numbers, quiet=quiet or as_json, timed=profile, **where)
    except KeyboardInterrupt as e:
        _stopped(folder, e)
    _told(result, folder, spread, profile=profile, as_json=as_json)
    _check_divergence(result)


def resume(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A run folder.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[training.num_rounds=N]", help="More rounds than the run had.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summaries as JSON and nothing else.")] = False,
) -> None:
    """Go on with a run that was interrupted, from its last checkpoints."""
    from personafl import experiment
    from personafl.experiment import run_folder

    asked = run_folder.read(run_folder.root(folder))
    told, gone = asked.conditions, run_folder.missing(run_folder.root(folder))
    if first() and not (quiet or as_json):
        names = ", ".join(f"{label} (seed {seed})" for label, seed in gone[:5]) + (", ..." if len(gone) > 5 else "")
        done = f"{len(asked.runs) - len(gone)} of {len(asked.runs)} runs are finished"
        console.print(f"{done}; going on with {names}" if gone else f"all {len(asked.runs)} runs are finished")
    try:
        result = experiment.resume(folder, *(overrides or ()), quiet=quiet or as_json)
    except KeyboardInterrupt as e:
        _stopped(folder, e)
    _told(result, run_folder.root(folder), told.spread, profile=told.timed, as_json=as_json)
    _check_divergence(result)


def _told(result: Result, folder: Path, spread: str | None, *, profile: bool, as_json: bool) -> None:
    """Print what a run came to."""
    from personafl.evaluation import comparison_notes

    if not first():
        return
    summaries = [m.summary for m in result.methods.values()]
    if as_json:
        print(json.dumps(summaries))
        return
    print_comparison(summaries, spread=spread)
    for concern in comparison_notes.concerns(summaries):
        console.print(f"note: {concern}")
    if profile:
        print_table(result.times())
    console.print(f"written to {folder} (table.md, report.html, and per method metrics, clients, summary)")


def _check_divergence(result: Result) -> None:
    """End with exit code 1 where training of a method stopped since everybody had diverged."""
    from personafl.evaluation import comparison_notes

    stopped = [m.summary for m in result.methods.values() if comparison_notes.has_stopped_diverged(m.summary)]
    if not stopped:
        return
    if first():
        labels = ", ".join(dict.fromkeys(s["label"] for s in stopped))
        lr, usual = stopped[0]["lr"], result.recipe.training.lr
        key = "training.lr" if lr == usual else f"{stopped[0]['label']}.lr"
        errors.print(
            f"personafl: {labels}: training stopped early, since every client diverged. Lower {key} (it was "
            f"{lr:g}), set training.grad_clip, or see that inputs and targets are normalised "
            "(data.normalize, data.normalize_targets).",
            soft_wrap=True,
        )
    sys.exit(1)


def _stopped(folder: Path, by: KeyboardInterrupt) -> NoReturn:
    """The end of a run by Ctrl-C or SIGTERM."""
    from personafl.experiment import run_folder

    if first():
        begun = (folder / run_folder.RUN).is_file()
        left = f"go on with: {run_folder.command(folder, launched())}" if begun else "nothing was written"
        errors.print(f"stopped; {left}", soft_wrap=True)
    sys.exit(getattr(by, "code", 130))
