"""A long run: do memory, file handles and threads stay what they were, and rounds as fast?

    python benchmarks/soak.py [--method ditto] [--store host|disk] [--rounds 1000] [--cohort 1000]
                              [--out benchmarks/results/soak.json]

A whole run with a run folder, over a federation of twice as many clients as play in a round; a network of 3,498
parameters, clients of 8 to 32 points, two epochs in batches of 8, one thread; 100 clients scored every 50 rounds. The
method is to be one whose rounds are alike, which DM-PFL's are not.

Between rounds a piece of plain PyTorch of always the same size is timed as well. What else the machine does slows both,
so a round is measured in such pieces: its time over the mean of those before and behind it.

Judged from the fiftieth round on, when every client has its row and caches are full:

    memory      the slope of resident memory over rounds is at most 4 KiB a round and three times its noise, and never
                more than 16. Memory is looked at every tenth round, once the allocator has given back what is free:
                what it keeps in reserve goes up and down by tens of MiB. The slope is Theil and Sen's, the median over
                pairs of rounds; the noise is the deviation of the slopes of the same series in random orders, its trend
                taken out. A run keeps a row of metrics for each round, about 1 KiB; the least that a round could forget
                to free, the last layer's bias of a cohort of 1000, has 39. With rows on disk it is the memory that is
                the process's own: how many pages of mapped files are resident is the system's affair.
    handles     open files, at no round more than at the fiftieth
    threads     the same
    speed       the median round of the last hundred, in pieces of calibration, takes at most 10 % longer than that of
                the hundred rounds behind the fiftieth

Exits with 1 where a bound is broken. Linux with glibc only: the figures are those of /proc, and its
allocator is asked.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

import personafl
from personafl.experiment.environment import environment

WARM = 50  # rounds before anything is judged
STRETCH = 100  # rounds that are compared at both ends
APART = 10  # rounds from one look at the memory to the next
ROWS, LEAK = 4.0, 16.0  # KiB a round: what a run may keep, and what is a leak however noisy the series
SLOWER = 1.10
INPUTS, CLASSES = 16, 10


@dataclass(frozen=True)
class Sample:
    """The process right after a round."""

    round: int
    seconds: float  # of the round
    calibration: float  # of the pieces of work before and behind it, mean
    memory: int  # bytes, resident; with rows on disk without mapped files; trimmed in every tenth round
    handles: int
    threads: int


@dataclass(frozen=True)
class Verdict:
    """One line of the table: what was measured at both ends, and how far it may go."""

    name: str
    first: float
    last: float
    measured: float
    bound: float
    unit: str

    @property
    def broken(self) -> bool:
        return not self.measured <= self.bound


def slope(values: NDArray[np.float64]) -> float:
    """Theil and Sen's: the median of the slopes of pairs, those half of the series apart or more."""
    rises = [(values[gap:] - values[:-gap]) / gap for gap in range(len(values) // 2, len(values))]
    return float(np.median(np.concatenate(rises)))


def noise(values: NDArray[np.float64]) -> float:
    """The deviation of the slope, had the series none."""
    level = values - slope(values) * np.arange(len(values))
    draw = np.random.default_rng(0)
    return float(np.std([slope(draw.permutation(level)) for _ in range(50)]))


def judged(samples: list[Sample]) -> list[Verdict]:
    """What a series of rounds comes to; it has some to warm up and two stretches behind them."""
    behind = samples[WARM:]
    first, last = behind[:STRETCH], behind[-STRETCH:]

    def looked(part: list[Sample]) -> NDArray[np.float64]:
        return np.array([s.memory / 1024 for s in part if s.round % APART == 0])

    def pieces(part: list[Sample]) -> float:
        return statistics.median(s.seconds / s.calibration for s in part)

    grown, deviation = (f(looked(behind)) / APART for f in (slope, noise))
    mebibytes = [float(looked(part).mean()) / 1024 for part in (first, last)]
    most = min(ROWS + 3 * deviation, LEAK)
    out = [Verdict("memory, MiB", mebibytes[0], mebibytes[1], grown, most, "KiB a round")]
    for name in ("handles", "threads"):
        counts = [getattr(s, name) for s in behind]
        out.append(Verdict(name, counts[0], counts[-1], max(counts) - counts[0], 0, "more"))
    before, now = pieces(first), pieces(last)
    return [*out, Verdict("a round, pieces", before, now, now / before, SLOWER, "times the first")]


def told(verdicts: list[Verdict]) -> str:
    lines = ["                   first hundred  last hundred   measured      bound"]
    for v in verdicts:
        mark = "  BROKEN" if v.broken else ""
        lines.append(
            f"{v.name:<18} {v.first:>13.2f} {v.last:>13.2f} {v.measured:>10.3f} {v.bound:>10.2f}  {v.unit}{mark}"
        )
    return "\n".join(lines)


class Watch:
    """Told of every round; notes what the process holds then, and times a piece of work."""

    def __init__(self, disk: bool) -> None:
        self.name = "RssAnon" if disk else "VmRSS"
        self.libc = ctypes.CDLL(None)
        draw = torch.Generator().manual_seed(0)
        shapes = ((1000, 8, INPUTS), (1000, INPUTS, 64), (1000, 64, CLASSES))
        self.x, self.one, self.two = (torch.randn(s, generator=draw) for s in shapes)
        self.before = self.piece()
        self.samples: list[Sample] = []

    def __call__(self, label: str, seed: int, stages: int, row: dict[str, Any]) -> None:
        behind = self.piece()
        if row["round"] % APART == 0:
            self.libc.malloc_trim(0)
        found = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        sample = Sample(
            row["round"],
            row["seconds"],
            (self.before + behind) / 2,
            int(found[self.name].split()[0]) * 1024,
            len(os.listdir("/proc/self/fd")),
            int(found["Threads"]),
        )
        self.before = behind
        self.samples.append(sample)

    def piece(self) -> float:
        """Seconds for passes over a thousand small networks."""
        begun = time.perf_counter()
        for _ in range(10):
            torch.bmm(torch.bmm(self.x, self.one).relu(), self.two).softmax(2).sum()
        return time.perf_counter() - begun


def data(clients: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Clients of 8 to 32 points: classes of normal clouds around a client's own centres."""
    draw = torch.Generator().manual_seed(0)
    owner = torch.arange(clients).repeat_interleave(torch.randint(8, 33, (clients,), generator=draw))
    y = torch.randint(CLASSES, (len(owner),), generator=draw)
    centres = torch.randn(clients, CLASSES, INPUTS, generator=draw) + torch.randn(CLASSES, INPUTS, generator=draw)
    return centres[owner, y] + torch.randn(len(y), INPUTS, generator=draw), y, owner


def network() -> nn.Module:
    layers = nn.Linear(INPUTS, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, CLASSES)
    return nn.Sequential(*layers)


def soaked(method: str, store: str, rounds: int, cohort: int) -> tuple[list[Sample], dict[str, Any]]:
    """Play the run; its samples, and where it was played."""
    watch = Watch(disk=store == "disk")
    with tempfile.TemporaryDirectory() as folder:
        result = personafl.run(
            data=data(2 * cohort),
            model=network,
            algorithms=[method],
            training={"num_rounds": rounds, "join_ratio": 0.5, "local_epochs": 2, "batch_size": 8, "lr": 0.05},
            evaluation={"shift": "none", "eval_every": 50, "clients": min(100, cohort)},
            device="cpu",
            store=store,
            threads=1,
            watch=watch,
            out=Path(folder) / "run",
        )
        where = environment(result[method].simulation)
    return watch.samples, {n: where[n] for n in ("hardware", "torch", "version", "commit")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", default="ditto")
    parser.add_argument("--store", default="host", choices=["host", "disk"])
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--cohort", type=int, default=1000)
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    if args.rounds < WARM + 2 * STRETCH:
        parser.error(f"--rounds {args.rounds}: {WARM} to warm up and twice {STRETCH} to compare are the fewest")
    if sys.platform != "linux":
        parser.error("reads /proc, which Linux alone has")
    begun = time.perf_counter()
    samples, where = soaked(args.method, args.store, args.rounds, args.cohort)
    verdicts = judged(samples)
    print(f"{args.method}, rows on {args.store}: {args.rounds} rounds of {args.cohort} clients,", end=" ")
    print(f"{time.perf_counter() - begun:.0f} s")
    print(told(verdicts))
    if args.out is not None:
        about = {"method": args.method, "store": args.store, "rounds": args.rounds, "cohort": args.cohort}
        record = about | where | {"date": time.strftime("%Y-%m-%d"), "verdicts": [asdict(v) for v in verdicts]}
        before = json.loads(args.out.read_text()) if args.out.exists() else []
        args.out.write_text(json.dumps([*before, record], indent=1) + "\n")
    sys.exit(int(any(v.broken for v in verdicts)))


if __name__ == "__main__":
    main()
