"""`personafl sweep`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from personafl.cli.terminal import console, errors, seed_list, split, unique_folder

if TYPE_CHECKING:
    from personafl.experiment.trials import Trial


def sweep(
    recipe: Annotated[str | None, typer.Argument(help="A path or a shipped recipe; none takes the demo.")] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE[,VALUE]...]...", help="Settings; of those with several values one is chosen."
        ),
    ] = None,
    trials: Annotated[int, typer.Option(metavar="N", help="Draw N points for a method; default all.")] = 0,
    seeds: Annotated[str, typer.Option(help="Seeds of every trial; not the recipe's own.")] = "1000",
    validation_share: Annotated[
        float, typer.Option(metavar="SHARE", help="Of clients' samples, where the recipe sets none aside.")
    ] = 0.2,
    jobs: Annotated[int, typer.Option(metavar="N", help="Trials side by side, each in a process.")] = 1,
    out: Annotated[Path | None, typer.Option(help="Folder; default runs/sweep-<recipe>-<time>-<xxxx>.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    memory: Annotated[float | None, typer.Option(metavar="GIB", help="Most memory to use, in GiB.")] = None,
    threads: Annotated[int | None, typer.Option(help="Threads; default as PyTorch has it.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No line for every trial.")] = False,
) -> None:
    """Choose settings by validation data: every method gets the same grid. The same command goes on with its folder."""
    from personafl import experiment
    from personafl.evaluation.metric_format import Shown

    name, changes = split(recipe, overrides)
    folder = out or unique_folder(f"sweep-{Path(name or 'demo').stem}")

    def told(trial: Trial, place: int, of: int) -> None:
        score = Shown.of(trial.summaries).text(trial.score)
        console.print(f"{place}/{of}  {trial.label}  {trial.words}: {score}{', diverged' if trial.diverged else ''}")

    try:
        found = experiment.sweep(
            name,
            *changes,
            trials=trials,
            seeds=seed_list(seeds),
            validation_share=validation_share,
            jobs=jobs,
            out=folder,
            device=device,
            memory=memory,
            threads=threads,
            told=None if quiet else told,
        )
    except KeyboardInterrupt as e:
        errors.print(f"stopped; the same command with --out {folder} goes on", soft_wrap=True)
        sys.exit(getattr(e, "code", 130))
    print(found.markdown().partition("\n## ")[0].rstrip())
    console.print(f"\n{folder}: all trials, their plot, and what was chosen: {', '.join(found.recipes)}")
