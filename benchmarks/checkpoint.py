"""What keeping a run safe costs: the share of its time that goes into checkpoints.

    python benchmarks/checkpoint.py [--rounds 2200] [--out benchmarks/results/checkpoint.json]

Counted is all that a run without a folder would not do: what is written before round one, checkpoints, notes of what
rows on disk were before they are written over, sums of rows, and, apart from it, what a finished run leaves. The
share is taken within one run, so a busy machine changes both sides of it.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import personafl
from personafl.experiment import checkpoint
from personafl.experiment.environment import environment
from personafl.storage.store import Store
from personafl.storage.store_files import StoreFiles

MOST = 0.03
CLIENTS = 200
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


def case(name: str, recipe: dict[str, Any] | str, **settings: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """A run, its seconds and those of checkpoints and of results; and where it was played."""
    SPENT.update(checkpoints=0.0, results=0.0)
    with tempfile.TemporaryDirectory() as box:
        begun = time.perf_counter()
        result = personafl.run(recipe, out=Path(box) / "run", quiet=True, **settings)
        seconds = time.perf_counter() - begun
        place = environment(next(iter(result)).simulation)
    found = {"run": name, "seconds": seconds, **SPENT, "share": SPENT["checkpoints"] / seconds}
    return found, {n: place[n] for n in ("hardware", "torch", "version", "commit")}


def clients(rounds: int) -> dict[str, Any]:
    """Clients that keep a model each, 68 kB of them, a tenth in every round."""
    return {
        "data": {"dataset": "digits", "num_clients": CLIENTS, "partition": "iid"},
        "training": {"num_rounds": rounds, "join_ratio": 0.1, "local_epochs": 5, "lr": 0.05},
        "evaluation": {"shift": "none", "clients": 20, "eval_every": 200},
        "algorithms": ["ditto"],
    }


def main() -> None:
    """Run the cases and print them as a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--rounds", type=int, default=2200, help="of the longer cases, so many that they take over a minute"
    )
    parser.add_argument("--out", type=Path, help="JSON file to add the figures to")
    told = parser.parse_args()
    for part in PARTS:
        timed(*part)
    runs = [case("the demo, six methods", "demo")]
    for store in ("host", "disk"):
        runs.append(case(f"{CLIENTS} clients, Ditto, {told.rounds} rounds, {store}", clients(told.rounds), store=store))
    found = [one for one, _ in runs]
    print("| run | seconds | checkpoints | share | results |")
    print("|---|---|---|---|---|")
    for r in found:
        cells = f"{r['seconds']:.1f} | {r['checkpoints']:.2f} | {r['share']:.2%} | {r['results']:.2f}"
        print(f"| {r['run']} | {cells} |")
    worst = max(r["share"] for r in found)
    print(f"\nat most {worst:.2%} of a run, {'under' if worst < MOST else 'NOT under'} {MOST:.0%}")
    if told.out is not None:
        record = runs[0][1] | {"date": time.strftime("%Y-%m-%d"), "runs": found}
        before = json.loads(told.out.read_text()) if told.out.exists() else []
        told.out.write_text(json.dumps([*before, record], indent=1) + "\n")
    sys.exit(worst >= MOST)


if __name__ == "__main__":
    main()
