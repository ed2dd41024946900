"""`personafl reproduce`."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from personafl.cli.terminal import console, errors, print_table, seed_list, unique_folder
from personafl.core.errors import UserError
from personafl.core.table import Table

if TYPE_CHECKING:
    from personafl.experiment.shared_runs import SharedRun


def reproduce(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[TARGET]...", help="Published tables and figures; --list names them, dmpfl is all."),
    ] = None,
    listed: Annotated[bool, typer.Option("--list", help="What can be reproduced.")] = False,
    only: Annotated[str, typer.Option(metavar="METHODS", help="Run these alone, such as fedavg,dm-pfl.")] = "",
    seeds: Annotated[str, typer.Option(help="Seeds, such as 0,1,2; default the target's.")] = "",
    smoke: Annotated[bool, typer.Option("--smoke", help="A rehearsal of seconds on the digits; no numbers.")] = False,
    jobs: Annotated[int, typer.Option(metavar="N", help="Runs side by side, each in a process.")] = 1,
    out: Annotated[Path | None, typer.Option(help="Folder; default runs/<target>-<time>-<xxxx>.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    memory: Annotated[float | None, typer.Option(metavar="GIB", help="Most memory of a run, in GiB.")] = None,
    threads: Annotated[int | None, typer.Option(help="Threads of each run; default as PyTorch has it.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No line for every run.")] = False,
) -> None:
    """Run published tables and figures again: their numbers beside ours, and whether their claims hold."""
    from personafl.experiment import reproduction

    if listed or not names:
        if names:
            raise UserError("--list: names all targets; leave the target out")
        rows = [(name, title, str(runs)) for name, title, runs in reproduction.described()]
        print_table(Table(("target", "what", "runs"), rows, "llr"))
        console.print("dmpfl and frontier are all whose names begin so")
        return
    folder = out or unique_folder(f"{'-'.join(names)}{'-smoke' if smoke else ''}")

    def told(run: SharedRun, place: int, of: int) -> None:
        console.print(f"{place}/{of}  {run.setting}  {run.label}  seed {run.seed}")

    try:
        found = reproduction.reproduce_all(
            names,
            only=[m.strip() for m in only.split(",") if m.strip()],
            seeds=seed_list(seeds),
            smoke=smoke,
            jobs=jobs,
            out=folder,
            device=device,
            told=None if quiet else told,
            memory=memory,
            threads=threads,
        )
    except KeyboardInterrupt as e:
        errors.print(f"stopped; the same command with --out {shlex.quote(str(folder))} goes on", soft_wrap=True)
        sys.exit(getattr(e, "code", 130))
    for one in found:
        print(one.markdown().partition("\n## How it was run")[0].rstrip() + "\n")
    where = "" if len(found) == 1 else " in a folder for each"
    console.print(f"{folder}: page.md, page.html, comparison.csv{where}, and every run")
