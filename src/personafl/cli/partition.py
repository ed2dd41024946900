"""`personafl partition`: who would hold what."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated

import typer

from personafl import config
from personafl.cli.terminal import console, find_own_code, print_table, split
from personafl.core.errors import UserError
from personafl.core.table import Table


def partition(
    recipe: Annotated[str | None, typer.Argument(help="A path or a shipped recipe; none is the demo.")] = None,
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Overrides, section.key=value.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw classes and sizes per client.")] = None,
    save: Annotated[
        Path | None, typer.Option(help="Write who holds which rows: a .json file data.partition can name.")
    ] = None,
    pfllib: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write the clients' data as PFLlib has them.")
    ] = None,
    trust: Annotated[bool, typer.Option("--trust", help="Import the code of its own that a recipe names.")] = False,
) -> None:
    """Show who holds what, without training."""
    from personafl import experiment
    from personafl.data import custom, partition_file
    from personafl.data.partition_plot import plot_partition

    name, changes = split(recipe, overrides)
    if trust or any(":" in change for change in changes):
        find_own_code()
    chosen = config.load(name, changes, trust=trust)
    if save and save.suffix != ".json":
        raise UserError(f"--save {save}: must end in .json, so that data.partition can name it")
    fed = experiment.federation(chosen)
    counts = fed.class_counts()
    names = fed.names
    classes = fed.source.class_names or [f"c{k}" for k in range(counts.shape[1])]
    columns = ["client", *(["name"] if names else []), "train", "test", *classes]
    rows = []
    for c in range(min(fed.everybody, 40)):
        sizes = [str(int(fed.sizes(s)[c])) for s in ("train", "test")]
        rows.append([str(c), *names[c : c + 1], *sizes, *(str(n) if n else "·" for n in counts[c, :12])])
    print_table(Table(columns[: 12 + 3 + bool(names)], rows))
    if fed.everybody > 40:
        console.print(f"... and {fed.everybody - 40} more clients")
    notes = "".join(f", {k.replace('_', ' ')}: {v}" for k, v in fed.notes.items())
    console.print(f"{fed.everybody} clients, {int(counts.sum())} samples, hash {fed.digest()}{notes}")
    experiment.note_clients(chosen, fed.source)
    if save:
        found = partition_file.save(fed, save, tomllib.loads(config.dump(chosen))["data"])
        console.print(f"written to {save}, hash {found}; a recipe uses it by data.partition={save}")
    if plot:
        title = f"{chosen.data.dataset}, {chosen.data.partition}: {fed.everybody} clients"
        plot_partition(counts, plot, title, fed.source.class_names)
    if pfllib:
        alpha = chosen.data.partition_settings.get("alpha", 0.1)  # PFLlib writes one for every partition
        custom.to_pfllib(fed, pfllib, partition=chosen.data.partition, alpha=alpha)
        console.print(f"written to {pfllib}: train/, test/ and config.json, as PFLlib has them")
