"""Runs that are killed, gone on with, and compared with one that was not: `python -m tests.kills --help`.

At points: a process that has computed nothing yet forks for every run. The child counts what it does to files and to
mapped rows (writes, flushes, renames, removals, room taken, rows copied), and is killed at the n-th: a write gets half
of its bytes there. Every second time the process that goes on is killed too, at a later point.

At random: real commands, killed from outside with SIGKILL after a random time.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

RECIPE: dict[str, Any] = {
    "data": {"dataset": "digits", "num_clients": 8},
    "model": {"name": "mlp"},
    "training": {"num_rounds": 3, "local_epochs": 1, "join_ratio": 0.5, "lr": 0.1},
    "evaluation": {"degrees": [0.0, 1.0], "draws": 1},
}
CALLS = ("write", "fsync", "fdatasync", "replace", "ftruncate", "posix_fallocate", "mkdir", "unlink", "rmdir")
METHODS = ("fedavg", "ditto", "dm-pfl", "fedavg-ft", "co-pfl", "fedphp", "scaffold")


# Whether two run folders are the same


def differences(a: Path, b: Path) -> list[str]:
    """What two run folders differ in, but for time and place."""
    from personafl.experiment import run_folder

    found = [] if run_folder.missing(a) == [] else [f"{a} misses {run_folder.missing(a)}"]
    for label, seed in run_folder.asked(b):
        one, two = (run_folder.home(p, label, seed) for p in (a, b))
        for what, read in (("summary", _summary), ("rows", _rows), ("files", _files), ("stores", _stores)):
            x, y = read(one), read(two)
            if x != y:
                found.append(f"{label}, seed {seed}: {what}: {x!r:.200} against {y!r:.200}")
        left = [p.name for p in one.iterdir() if p.name == "progress" or p.name.endswith(".part")]
        found += [f"{one}: {name} was left" for name in left]
    return found


def _summary(home: Path) -> object:
    told = json.loads((home / "summary.json").read_text())
    return {k: v for k, v in told.items() if k not in ("time", "environment")}


def _rows(home: Path) -> object:
    lines = (home / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != "seconds"} for line in lines]


def _files(home: Path) -> object:
    names = ["clients.csv", "evaluations.npz", *(f"checkpoint/{n}.safetensors" for n in ("server", "initial", "state"))]
    return {n: (home / n).read_bytes() for n in names}


def _stores(home: Path) -> object:
    import torch
    from safetensors.torch import load_file

    from personafl.storage.store import Store

    found = {}
    for name in ("clients", "known"):
        if (home / "store" / name).is_dir():
            store = Store.opened(lambda ids: {}, home / "store" / name)
            rows = {"ids": torch.tensor(sorted(store.ids))}
            parts = [part for _, part in store.parts()]
            rows |= {n: torch.cat([p[n] for p in parts]) for n in (parts[0] if parts else {})}
        else:
            rows = load_file(home / "checkpoint" / f"{name}.safetensors")
        found[name] = {
            n: (t.dtype, t.shape, t.contiguous().view(torch.uint8).numpy().tobytes()) for n, t in rows.items()
        }
    return found


# At points


def forked(work: Callable[[], None]) -> int:
    """Do something in a child; its exit code, or the signal it ended by as a negative number."""
    sys.stdout.flush()
    number = os.fork()
    if number:
        _, status = os.waitpid(number, 0)
        return os.waitstatus_to_exitcode(status)
    try:
        work()
        os._exit(0)
    except BaseException:
        import traceback

        traceback.print_exc()
        os._exit(1)


def deadly(after: int) -> Callable[[], int]:
    """From now on end this process behind so many calls; how many there were."""
    import torch

    count = 0

    def wrapped(place: Any, name: str) -> None:
        real = getattr(place, name)

        def call(*given: Any, **named: Any) -> Any:
            nonlocal count
            count += 1
            if count == after + 1:
                if name == "write":
                    real(given[0], bytes(given[1])[: len(bytes(given[1])) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*given, **named)

        setattr(place, name, call)

    for name in CALLS:
        wrapped(os, name)
    wrapped(torch.Tensor, "index_copy_")
    return lambda: count


def at_points(methods: Sequence[str], store: str, points: Callable[[int], Sequence[int]], *, told: bool) -> list[str]:
    """Kill a run at points of it, go on, and compare; what went wrong. `points` chooses, given how many there are."""
    import torch

    import personafl
    from personafl.evaluation import report

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    report.html = lambda *given, **named: "a page"  # figures take most of the time of such a run
    recipe = RECIPE | {"algorithms": list(methods)}
    wrong: list[str] = []
    with tempfile.TemporaryDirectory(prefix="kills-") as box:
        out = Path(box)

        def run(folder: Path) -> None:
            personafl.run(recipe, out=folder, store=store, quiet=True, threads=1, checkpoint_every=1)

        def whole() -> None:
            count = deadly(sys.maxsize)
            run(out / "whole")
            (out / "count").write_text(str(count()))

        def again() -> None:
            personafl.resume(out / "cut", quiet=True)

        def compared() -> None:
            found = differences(out / "cut", out / "whole")
            (out / "found").write_text("\n".join(found))

        assert forked(whole) == 0
        total = int((out / "count").read_text())
        chosen = points(total)
        for n in chosen:
            shutil.rmtree(out / "cut", ignore_errors=True)

            def cut(after: int = n) -> None:
                deadly(after)
                run(out / "cut")

            code = forked(cut)
            if code != -signal.SIGKILL:
                wrong.append(f"point {n}: the run ended with {code}")
                continue
            if not (out / "cut" / "run.json").exists():
                continue  # nothing had begun: there is nothing to go on with
            if n % 2:

                def cut_again(after: int = n * 7 % 60) -> None:
                    deadly(after)
                    again()

                forked(cut_again)
            if (code := forked(again)) != 0 or forked(compared) != 0:
                wrong.append(f"point {n}: going on ended with {code}")
            elif found := (out / "found").read_text():
                wrong.append(f"point {n}: {found}")
        if told:
            print(
                f"{'+'.join(methods)}, store {store}: {len(chosen)} of {total} points, {len(wrong)} wrong", flush=True
            )
    return wrong


# At random moments


def command(recipe: Path, folder: Path, store: str, ranks: int) -> list[str]:
    """The command of a run, in one process or in several."""
    return [*launcher(ranks), "run", str(recipe), "--out", str(folder), "--store", store, *QUIET]


QUIET = ["--quiet", "--device", "cpu", "--threads", "1", "--checkpoint-every", "1"]


def launcher(ranks: int) -> list[str]:
    if ranks == 1:
        return [sys.executable, "-m", "personafl"]
    many = ["--nproc-per-node", str(ranks), "--master-port", str(random.randint(20000, 60000))]
    return [sys.executable, "-m", "torch.distributed.run", *many, "-m", "personafl"]


def ended(words: list[str], after: float | None, since: Path | None = None) -> int:
    """Run a command, and kill all its processes some time after it began, or after a file was there."""
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(words, stdout=said, stderr=said, start_new_session=True)
        try:
            while since is not None and not since.exists() and process.poll() is None:
                time.sleep(0.005)
            return process.wait(after)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return -signal.SIGKILL
        finally:
            if process.returncode not in (0, -signal.SIGKILL):
                said.seek(0)
                print(said.read().decode(), flush=True)


def at_random(cases: Sequence[tuple[str, str, int]], times: int, seed: int, *, rounds: int = 40) -> list[str]:
    """Kill commands at random moments, so many times over all cases (method, store, processes)."""
    from personafl import config

    draw = random.Random(seed)
    wrong: list[str] = []
    took: dict[tuple[str, str, int], float] = {}
    with tempfile.TemporaryDirectory(prefix="kills-") as box:
        out = Path(box)
        for i in range(times):
            case = cases[i % len(cases)]
            method, store, ranks = case
            many = RECIPE | {"algorithms": [method], "training": RECIPE["training"] | {"num_rounds": rounds}}
            (out / "recipe.toml").write_text(config.dump(config.load(many)))
            whole = out / "-".join(map(str, case))
            cut = out / "cut"
            shutil.rmtree(cut, ignore_errors=True)
            if case not in took:
                assert ended(command(out / "recipe.toml", whole, store, ranks), None) == 0
                took[case] = json.loads((whole / method / "seed-0" / "summary.json").read_text())["time"]["seconds"]
            moment = draw.uniform(0.0, took[case])
            code = ended(command(out / "recipe.toml", cut, store, ranks), moment, cut / "run.json")
            tries = 0
            while (cut / "run.json").exists() and code != 0 and tries < 3:
                words = [*launcher(ranks), "resume", str(cut), "--quiet"]
                code = ended(words, draw.uniform(1.0, 3.0) if tries == 0 and i % 2 else None)
                tries += 1
            found = differences(cut, whole) if (cut / "run.json").exists() else []
            wrong += [f"{case}: {text}" for text in found]
            print(f"{case}: killed after {moment:.2f} s, gone on {tries} times, {len(found)} differences", flush=True)
    return wrong


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Kill runs, go on with them, compare them with one that was not.")
    parser.add_argument("--methods", default="ditto,dm-pfl", help="of one comparison, killed at points")
    parser.add_argument("--stores", default="host,disk")
    parser.add_argument("--step", type=int, default=1, help="of the points, every how many")
    parser.add_argument("--random", type=int, default=0, metavar="N", help="kill N commands at random moments instead")
    parser.add_argument("--ranks", default="1", help="processes of these commands, such as 1,2")
    parser.add_argument("--seed", type=int, default=0)
    told = parser.parse_args()
    wrong: list[str] = []
    if told.random:
        cases = [
            (m, s, int(r))
            for m in told.methods.split(",")
            for s in told.stores.split(",")
            for r in told.ranks.split(",")
        ]
        wrong = at_random(cases, told.random, told.seed)
    else:
        for store in told.stores.split(","):
            wrong += at_points(told.methods.split(","), store, lambda n: range(told.seed, n, told.step), told=True)
    print("\n".join(wrong) or "no run differs")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
