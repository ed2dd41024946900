"""What commands share: how they read a recipe with its overrides, and how they print."""

from __future__ import annotations

import os
import secrets
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table as RichTable

from personafl.core.errors import UserError
from personafl.core.table import Table
from personafl.core.types import Summary
from personafl.experiment.console import Console

console = Console(width=None if sys.stdout.isatty() else 120)
errors = Console(stderr=True)


def split(recipe: str | None, overrides: list[str] | None) -> tuple[str | None, list[str]]:
    """A first positional that contains `=` is an override of the demo."""
    rest = list(overrides or [])
    return (None, [recipe, *rest]) if recipe and "=" in recipe else (recipe, rest)


def find_own_code() -> None:
    """Let imports find files of the working directory, behind all that is installed."""
    if (here := os.getcwd()) not in sys.path:
        sys.path.append(here)


def first() -> bool:
    """Whether this is the process that speaks, of those torchrun may have started."""
    return os.environ.get("RANK", "0") == "0"


def fail(message: str, code: int = 2) -> None:
    """Say in one line what is wrong, and end."""
    if not first():
        time.sleep(2)  # if the first process failed as well, torchrun ends this one before it says so again
    errors.print(f"personafl: {' '.join(message.split())}", soft_wrap=True)
    sys.exit(code)


def warn(message: Warning | str, *_: Any, **__: Any) -> None:
    """A warning in one line."""
    if first():
        errors.print(f"note: {message}", soft_wrap=True)


def print_table(table: Table) -> None:
    """A table on the console, folded where it is wider, and its notes."""
    printed = RichTable(box=None, pad_edge=False, header_style="bold", show_header=bool(table.columns))
    for i, column in enumerate(table.columns or table.rows[0]):
        printed.add_column(column, justify="right" if table.alignment(i) == "r" else "left", overflow="fold")
    for row in table.rows:
        printed.add_row(*row)
    console.print(printed)
    for note in table.notes:
        console.print(note)


def print_comparison(
    summaries: Sequence[Summary], missing: Sequence[tuple[str, int]] = (), spread: str | None = None
) -> None:
    """The comparison, what to think of it, and what was evaluated."""
    from personafl.evaluation import comparison_notes, comparison_table

    print_table(comparison_table.table(summaries, spread, evaluated_model=False))
    for alert in comparison_notes.alerts(summaries, missing):
        console.print(alert, style="bold red")
    for line in (comparison_notes.note(summaries, spread), *comparison_notes.remarks(summaries, spread)):
        console.print(line)
    console.print("Evaluated model:")
    for row in comparison_table.rows(summaries, spread):
        console.print(f"  {row[0]}: {row[-1]}")


def unique_folder(name: str) -> Path:
    """A run folder no other run has, also one that begins in the same second."""
    return Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def seed_list(text: str) -> list[int]:
    """Seeds as a command line has them."""
    try:
        seeds = [int(s) for s in text.split(",") if s.strip()]
    except ValueError:
        raise UserError(f"--seeds {text}: expected whole numbers, such as 0,1,2") from None
    if len(set(seeds)) < len(seeds) or any(s < 0 for s in seeds):
        raise UserError(f"--seeds {text}: must differ and not be negative")
    return seeds
