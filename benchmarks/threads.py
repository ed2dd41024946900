"""Whole run folders made with different numbers of threads: are they the same to the last bit, how long did they take?

    python benchmarks/threads.py [all-methods] [key=value ...] [--threads 1 2] [--repeats 3]
    python benchmarks/threads.py --folders runs/one runs/two

Every run is a process of its own; the numbers of threads take turns. Printed are wall-clock and processor seconds of
each, then, for each number against the first, the methods whose folders differ: tensors of checkpoints, scores of all
samples, clients' accuracies, rows of metrics and summaries, times and the machine aside. Exits with 1 where some do.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file


def contents(folder: Path) -> dict[str, Any]:
    """All that a method's folder says, but for times and places."""
    found: dict[str, Any] = {"clients.csv": (folder / "clients.csv").read_bytes()}
    for path in sorted((folder / "checkpoint").glob("*.safetensors")):
        found |= {f"{path.name} {n}": a for n, a in load_file(path).items()}
    with np.load(folder / "evaluations.npz") as held:
        found |= {f"evaluations.npz {n}": held[n] for n in held.files}
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        found |= {f"metrics.jsonl round {row['round']} {k}": v for k, v in row.items() if k != "seconds"}
    summary = json.loads((folder / "summary.json").read_text())
    return found | {f"summary.json {k}": v for k, v in summary.items() if k not in ("time", "environment")}


def differences(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """The names of what is not the same, to the last bit."""

    def bits(value: Any) -> Any:
        return (value.dtype, value.shape, value.tobytes()) if isinstance(value, np.ndarray) else value

    return sorted(a.keys() ^ b.keys()) + [n for n in a if n in b and bits(a[n]) != bits(b[n])]


def compared(one: Path, other: Path) -> Iterator[tuple[str, list[str]]]:
    """Every method and seed of a run folder, and what differs from the other folder."""
    for path in sorted(one.glob("*/seed-*/summary.json")):
        name = path.parent.relative_to(one)
        yield str(name), differences(contents(path.parent), contents(other / name))


def told(one: Path, other: Path) -> bool:
    """Say what differs; whether nothing does."""
    found = list(compared(one, other))
    bad = [(name, names) for name, names in found if names]
    for name, names in bad:
        print(f"  {name}: {len(names)} differ, first {names[0]}")
    print(f"  {len(found) - len(bad)} of {len(found)} methods are the same")
    return not bad


def played(command: list[str], out: Path, threads: int) -> tuple[float, float]:
    """Wall-clock and processor seconds of one run."""
    begun = time.perf_counter()
    line = [sys.executable, "-m", "personafl", "run", *command, "--quiet", "--threads", str(threads), "--out", str(out)]
    process = subprocess.Popen(line, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{' '.join(line)}: exit status {os.waitstatus_to_exitcode(status)}")
    return time.perf_counter() - begun, used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="*", default=["all-methods"], help="A recipe and overrides.")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--folders", type=Path, nargs=2, help="Compare two run folders and play nothing.")
    args = parser.parse_args()
    if args.folders:
        sys.exit(not told(*args.folders))
    with tempfile.TemporaryDirectory() as box:
        spent: dict[int, list[tuple[float, float]]] = {n: [] for n in args.threads}
        for turn in range(args.repeats):
            for n in args.threads:
                spent[n].append(played(args.recipe, Path(box, f"{n}-{turn}"), n))
                print(f"{n} threads: {spent[n][-1][0]:.1f} s, processor {spent[n][-1][1]:.1f} s", flush=True)
        for n, times in spent.items():
            wall, used = (statistics.median(column) for column in zip(*times, strict=True))
            print(f"median of {len(times)}, {n} threads: {wall:.1f} s, processor {used:.1f} s")
        first, *others = args.threads
        same = True
        for n in others:
            print(f"{first} against {n} threads")
            same &= told(Path(box, f"{first}-0"), Path(box, f"{n}-0"))
    sys.exit(not same)


if __name__ == "__main__":
    main()
