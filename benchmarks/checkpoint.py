"""What keeping a run safe costs: the share of its time that goes into checkpoints.

    python benchmarks/checkpoint.py            three cases, about five minutes
    python benchmarks/checkpoint.py --minutes 0.2

Counted is all that a run without a folder would not do: what is written before round one, checkpoints, notes of what
rows on disk were before they are written over, sums of rows, and, apart from it, what a finished run leaves. The
share is taken within one run, so a busy machine changes both sides of it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import personafl
from personafl.core.store import Store
from personafl.core.store_files import StoreFiles
from personafl.experiment import checkpoint

MOST = 0.03
SPENT = {"checkpoints": 0.0, "results": 0.0}
PARTS: list[tuple[Any, str, str]] = [
    (checkpoint, "begin", "checkpoints"),
    (checkpoint.Checkpoints, "write", "checkpoints"),
    (StoreFiles, "note", "checkpoints"),
    (Store, "_summed", "checkpoints"),
    (checkpoint, "finish", "results"),
]


def timed(place: Any, name: str, part: str) -> None:
    """Add up the time of a function."""
    real: Callable[..., Any] = getattr(place, name)
    inside = False

    def call(*given: Any, **named: Any) -> Any:
        nonlocal inside
        begun, outer = time.perf_counter(), not inside
        inside = True
        try:
            return real(*given, **named)
        finally:
            inside = not outer
            if outer:
                SPENT[part] += time.perf_counter() - begun

    setattr(place, name, call)


def case(name: str, recipe: dict[str, Any] | str, **settings: Any) -> tuple[str, float, float, float, int]:
    """A run: its seconds, and those of checkpoints and of results."""
    SPENT.update(checkpoints=0.0, results=0.0)
    with tempfile.TemporaryDirectory() as box:
        begun = time.perf_counter()
        result = personafl.run(recipe, out=Path(box) / "run", quiet=True, **settings)
        seconds = time.perf_counter() - begun
    return name, seconds, SPENT["checkpoints"], SPENT["results"], len(result)


def clients(minutes: float, method: str) -> dict[str, Any]:
    """Many clients that keep a model each, for about so long."""
    return {
        "data": {"dataset": "synthetic-1m", "num_clients": 2000},
        "training": {"num_rounds": max(3, int(60 * minutes)), "join_ratio": 0.1, "local_epochs": 5, "lr": 0.05},
        "evaluation": {"shift": "none", "clients": 200, "eval_every": 50},
        "algorithms": [method],
    }


def main() -> None:
    """Run the cases and print them as a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=2.0, help="of the longer cases, about")
    told = parser.parse_args()
    for part in PARTS:
        timed(*part)
    found = [
        case("the demo, six methods", "demo"),
        case("2,000 clients, Ditto, main memory", clients(told.minutes, "ditto"), store="host"),
        case("2,000 clients, Ditto, disk", clients(told.minutes, "ditto"), store="disk"),
    ]
    print("| run | seconds | checkpoints | share | results |")
    print("|---|---|---|---|---|")
    for name, seconds, saved, results, _ in found:
        print(f"| {name} | {seconds:.1f} | {saved:.2f} | {saved / seconds:.2%} | {results:.2f} |")
    worst = max(saved / seconds for _, seconds, saved, _, _ in found)
    print(f"\nat most {worst:.2%} of a run, {'under' if worst < MOST else 'NOT under'} {MOST:.0%}")
    sys.exit(worst >= MOST)


if __name__ == "__main__":
    main()
