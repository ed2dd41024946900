"""`personafl compare`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from personafl.cli.terminal import console, print_comparison
from personafl.core.errors import UserError
from personafl.core.plain_text import harmless
from personafl.core.types import Summary


def compare(
    folders: Annotated[
        list[Path], typer.Argument(metavar="DIR...", help="Run folders, or <label>/seed-<n> inside one.")
    ],
    html: Annotated[Path | None, typer.Option(help="Write a page with the table and the curves.")] = None,
    md: Annotated[Path | None, typer.Option(help="Write the table as Markdown.")] = None,
    latex: Annotated[Path | None, typer.Option(help="Write the table as LaTeX.")] = None,
    spread: Annotated[
        str | None, typer.Option(help="What ± is over seeds: std or ci; default ci from three seeds on.")
    ] = None,
) -> None:
    """Put finished runs side by side."""
    from personafl.evaluation import comparison_notes, comparison_table, final, report
    from personafl.evaluation.run_records import read_rounds

    comparison_table.spread_of((), spread)
    roots = [f.parent.parent if (f / "summary.json").is_file() else f for f in folders]  # the run folders
    names = [r.name for r in dict.fromkeys(roots)]
    found: list[tuple[Path, Summary]] = []
    missing: list[tuple[str, int]] = []
    for folder, root in zip(folders, roots, strict=True):
        prefix = "" if len(names) == 1 else root.name if names.count(root.name) == 1 else root.as_posix()
        done, gone = _finished(folder, prefix)
        found, missing = found + done, missing + gone
    summaries = [s for _, s in found]
    keys = [(s["label"], s["seed"]) for s in summaries]
    for key in keys:
        if keys.count(key) > 1:
            raise UserError(f"compare: {key[0]}, seed {key[1]} is given twice")
    if html:
        curves = {
            (s["label"], s["seed"]): read_rounds(path)
            for home, s in found
            if (path := home / "metrics.jsonl").is_file()
        }
        evaluations = {
            (s["label"], s["seed"]): final.load(path, ("ids", "client_accuracy", "scores", "edges"))
            for home, s in found
            if (path := home / "evaluations.npz").is_file()
        }
        page = report.html(summaries, curves, "Comparison", evaluations, missing, spread)
        html.write_text(page, encoding="utf-8")
    if md:
        md.write_text(report.markdown(summaries, missing, spread) + "\n", encoding="utf-8")
    if latex:
        latex.write_text(report.latex(summaries, missing, spread) + "\n", encoding="utf-8")
    print_comparison(summaries, missing, spread)
    for concern in comparison_notes.concerns(summaries):
        console.print(f"note: {concern}")


def _finished(folder: Path, prefix: str) -> tuple[list[tuple[Path, Summary]], list[tuple[str, int]]]:
    """The summaries under a run folder, and the methods and seeds it is to have besides.

    Where several folders are compared, labels begin with what tells one from the others.
    """
    from personafl.evaluation.run_records import read_summary
    from personafl.experiment import run_folder

    homes = (
        [folder]
        if (folder / "summary.json").is_file()
        else sorted(p.parent for p in folder.glob("*/seed-*/summary.json"))
    )
    if not homes and run_folder.asked(folder):
        raise UserError(f"{folder}: nothing in this run folder is finished; personafl resume goes on with it")
    if not homes:
        raise UserError(f"{folder}: no finished run here (no summary.json); expected a run folder or <label>/seed-<n>")
    order = list(dict.fromkeys(label for label, _ in run_folder.asked(folder)))

    def named(label: str) -> str:
        return harmless(f"{prefix}/{label}" if prefix else label)

    out = []
    for home in homes:
        summary = read_summary(home / "summary.json")
        label = summary["label"]
        out.append((home, summary | {"label": named(label)}, label))
    out.sort(key=lambda o: (order.index(o[2]) if o[2] in order else len(order), o[2], o[1]["seed"]))
    missing = [(named(label), seed) for label, seed in run_folder.missing(folder)]
    return [(home, summary) for home, summary, _ in out], missing
