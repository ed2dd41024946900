"""Show that a refactoring changed no number: run the same work with two source trees and compare all that it saves.

    python tools/compare_commits.py BASE                              a commit and the files as they are now
    python tools/compare_commits.py BASE OTHER --jobs 2               two commits, which run side by side
    python tools/compare_commits.py BASE --only deployments --deployment 'method fed*'
    python tools/compare_commits.py BASE --only all-methods --set training.num_rounds=10 --set algorithms=fedavg,ditto
    python tools/compare_commits.py BASE --only reproduce --targets dmpfl-table1,frontier-har
    python tools/compare_commits.py BASE --map personafl.sim=personafl.simulation --map kept=client_state
    python tools/compare_commits.py BASE --exempt 'state.json:/numbers/state/pending'

BASE and OTHER are commits, or folders that hold a source tree, with paths that begin with / or a dot. Each is put into
a temporary folder, which is removed at the end, and OTHER is by default the files of this repository as they are when
the comparison begins. Both run in processes of this interpreter, on the CPU with one thread, with the same environment
variables and in an empty folder. Nothing is downloaded, and data are prepared anew by each, so that neither reads what
the other has cached.

    all-methods    `personafl run all-methods`, with the overrides of --set
    reproduce      `personafl reproduce TARGET --smoke` for every target
    deployments    a server and its nodes in one process, for every method and for many settings; see
                   tools/play_deployments.py

Of every file that is saved, tensors are compared by name, type, shape and bytes, and everything else key by key.
EXEMPTIONS and RANDOM_TEXTS, below, list what may differ. `--map OLD=NEW` replaces a text in the names of files, tensors
and keys and in the texts of BASE before they are compared; several are applied in their order. `--exempt FILE:KEY`
adds something that may differ, such as an entry that only one of the trees writes.

The exit status is 0 if everything compared is equal, 1 if anything differs, and 2 if a workload compared no number.
What only one of the trees has, and what fails in both, is listed as not compared.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import deserialize, safe_open

ROOT = Path(__file__).resolve().parent.parent
WORKLOADS = ("all-methods", "reproduce", "deployments")
COPIED = ("src", "tests", "tools", "examples")
"""The folders of a source tree that the workloads import."""
OUT = "OUT"
"""Stands for the folder of the results in the arguments of a command."""
RECORDED = 1000
"""How many differences of a comparison are recorded one by one; all are counted."""

Rename = Callable[[str], str]


# What may differ


@dataclass(frozen=True)
class Exemption:
    """Something that is not compared: the keys that match a pattern, in the files that match a pattern.

    The key of a value is all names that lead to it with a / before each, such as /accuracy/personal/mean; the number
    of a row is no part of it. A file of which no key is given is not compared at all.
    """

    file: str
    key: str
    reason: str


EXEMPTIONS = (
    Exemption("*", "*/seconds", "how long a run took"),
    Exemption("*", "*/seconds_per_round", "how long a run took"),
    Exemption("*", "*/commit", "the commit that made a result"),
    Exemption("*", "*/version", "the version of the package that made a result"),
    Exemption("manifest.json", "/files/*", "sizes and checksums of files that are compared themselves and name times"),
    Exemption("manifest.json", "/rows/*", "size and checksum of metrics.jsonl, which is compared itself"),
    Exemption("manifest.json", "/sha256", "a checksum of the manifest, which has times"),
    Exemption("run.json", "/recipe", "a checksum of recipe.toml, which is compared itself, with --map"),
    Exemption("*.md", "", "drawn from files that are compared, with times"),
    Exemption("*.html", "", "drawn from files that are compared, with times"),
    Exemption("*.png", "", "drawn from files that are compared"),
)
RANDOM_TEXTS = (
    (re.compile(r"\bfederation-[0-9a-f]{8}\b"), "federation-<random>", "the id of a deployment, which is drawn anew"),
)
"""Parts of texts and of names that differ between any two runs, what takes their place, and why they differ."""


def is_exempt(exemptions: Sequence[Exemption], file: str, key: str = "") -> bool:
    """Return whether a value of a file may differ, or the whole file where no key is given."""
    plain = without_row(key)
    return any(fnmatchcase(file, e.file) and fnmatchcase(plain, e.key) for e in exemptions if bool(e.key) == bool(key))


def without_row(key: str) -> str:
    """Return a key without the number of its row."""
    return re.sub(r"^/row \d+", "", key)


def make_rename(replacements: Sequence[tuple[str, str]], folder: Path) -> Rename:
    """Return a function that replaces texts, random parts and the temporary folder of a tree."""

    def rename(text: str) -> str:
        text = text.replace(str(folder), "<folder>")
        for pattern, replacement, _ in RANDOM_TEXTS:
            text = pattern.sub(replacement, text)
        for old, new in replacements:
            text = text.replace(old, new)
        return text

    return rename


# What a file holds


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as its bytes; the type is called as the format of the file calls it."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    @property
    def size(self) -> int:
        """The number of elements."""
        return int(np.prod(self.shape, dtype=np.int64))

    def array(self) -> np.ndarray[Any, Any] | None:
        """The elements in one row, or None where NumPy has no such type."""
        names = {"BOOL": "bool", "F16": "<f2", "F32": "<f4", "F64": "<f8"}
        names |= {f"{kind}{bits}": f"<{kind.lower()}{bits // 8}" for kind in "IU" for bits in (8, 16, 32, 64)}
        try:
            return np.frombuffer(self.data, names.get(self.dtype, self.dtype))
        except TypeError:
            return None


@dataclass
class Content:
    """All that is compared of a file: tensors by name, and single values by key."""

    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    values: dict[str, str | int | float | bool | None] = field(default_factory=dict)
    rows: int = 0
    exempt: int = 0


def read_content(path: Path, rename: Rename, exemptions: Sequence[Exemption] = EXEMPTIONS) -> Content:
    """Read a file by the ending of its name; one that has another is taken as text, or as bytes.

    Raises:
        SystemExit: Two names or keys of the file are the same after renaming.
    """
    content = Content()

    def add_tensor(name: str, tensor: StoredTensor) -> None:
        _insert(content.tensors, rename(name), tensor, path)

    def add(key: str, value: Any) -> None:
        if is_exempt(exemptions, path.name, key):
            content.exempt += 1
        elif isinstance(value, Mapping) and value:
            for name, part in value.items():
                add(f"{key}/{rename(str(name))}", part)
        elif isinstance(value, list | tuple) and value:
            for i, part in enumerate(value):
                add(f"{key}/{i}", part)
        elif value is None or isinstance(value, bool | int | float):
            _insert(content.values, key, value, path)
        else:  # a text, a date, or an empty table or list
            _insert(content.values, key, rename(str(value)), path)

    def add_rows(rows: Sequence[Any]) -> None:
        content.rows = len(rows)
        for i, row in enumerate(rows):
            add(f"/row {i}", row)

    if path.suffix == ".json":
        add("", json.loads(path.read_text(encoding="utf-8")))
    elif path.suffix == ".jsonl":
        add_rows([json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()])
    elif path.suffix == ".csv":
        with path.open(newline="", encoding="utf-8") as file:
            add_rows([dict(row) for row in csv.DictReader(file)])
    elif path.suffix == ".toml":
        add("", tomllib.loads(path.read_text(encoding="utf-8")))
    elif path.suffix == ".npz":
        with np.load(path, allow_pickle=False) as arrays:
            for name, array in arrays.items():
                add_tensor(name, StoredTensor(array.dtype.str, array.shape, array.tobytes()))
    elif path.suffix == ".safetensors":
        for name, stored in deserialize(path.read_bytes()):  # type: ignore[no-untyped-call]
            add_tensor(name, StoredTensor(stored["dtype"], tuple(stored["shape"]), bytes(stored["data"])))
        with safe_open(path, framework="numpy") as opened:
            add("/metadata", opened.metadata() or {})
    else:
        data = path.read_bytes()
        try:
            add("/text", data.decode())
        except UnicodeDecodeError:
            add_tensor("bytes", StoredTensor("U8", (len(data),), data))
    return content


def _insert(values: dict[str, Any], key: str, value: Any, path: Path | str) -> None:
    if key in values:
        raise SystemExit(f"{path}: two entries are called {key}; choose a --map that keeps names apart")
    values[key] = value


def is_number(value: object) -> bool:
    """Return whether a value is a number or a text that is one, as in a CSV file."""
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            float(value)
            return True
    return isinstance(value, int | float)


# Comparing


@dataclass(frozen=True)
class Difference:
    """Something that differs, with both values as texts."""

    file: str
    key: str
    base: str
    other: str

    @property
    def group(self) -> tuple[str, str]:
        """The same for the same key in other rows and in other files of that name."""
        return Path(self.file).name, without_row(self.key)


@dataclass
class Findings:
    """How much was compared, and what differs."""

    counts: Counter[str] = field(default_factory=Counter)  # files, tensors, rows, numbers, texts, exempt
    kinds: Counter[str] = field(default_factory=Counter)  # how many differences there are of each kind
    differences: list[Difference] = field(default_factory=list)  # the first of them
    groups: dict[tuple[str, str], tuple[Difference, int]] = field(default_factory=dict)  # the first, and how many

    @property
    def differing(self) -> int:
        """The number of differences."""
        return self.kinds.total()

    def differ(self, kind: str, file: str, key: str, base: object, other: object) -> None:
        """Record a difference."""
        difference = Difference(file, key, f"{base!s:.200}", f"{other!s:.200}")
        self.kinds[kind] += 1
        if len(self.differences) < RECORDED:
            self.differences.append(difference)
        self._count(difference, 1)

    def add(self, more: Findings, name: str) -> None:
        """Add the findings of another comparison, whose files go by its name."""
        self.counts.update(more.counts)
        self.kinds.update(more.kinds)
        for first, number in more.groups.values():
            self._count(replace(first, file=f"{name}/{first.file}"), number)

    def _count(self, difference: Difference, number: int) -> None:
        first, before = self.groups.get(difference.group, (difference, 0))
        self.groups[difference.group] = first, before + number

    def describe(self) -> str:
        """Return all counts in words."""
        c = self.counts
        compared = ", ".join(f"{c[kind]:,} {kind}" for kind in ("files", "tensors", "rows", "numbers", "texts"))
        return f"{compared}; {c['exempt']:,} values and {c['exempt files']:,} files may differ and were not compared"


def compare_folders(
    base: Path,
    other: Path,
    rename_base: Rename,
    rename_other: Rename,
    exemptions: Sequence[Exemption] = EXEMPTIONS,
) -> Findings:
    """Compare all files of two folders."""
    findings = Findings()
    files = [_list_files(base, rename_base), _list_files(other, rename_other)]
    for name in sorted(files[0].keys() | files[1].keys()):
        if is_exempt(exemptions, Path(name).name):
            findings.counts["exempt files"] += 1
        elif name not in files[1]:
            findings.differ("on one side", name, "", "is there", "no such file")
        elif name not in files[0]:
            findings.differ("on one side", name, "", "no such file", "is there")
        else:
            mine = read_content(files[0][name], rename_base, exemptions)
            theirs = read_content(files[1][name], rename_other, exemptions)
            findings.counts["files"] += 1
            compare_contents(name, mine, theirs, findings)
    return findings


def _list_files(folder: Path, rename: Rename) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            _insert(found, rename(path.relative_to(folder).as_posix()), path, folder)
    return found


def compare_contents(name: str, base: Content, other: Content, findings: Findings) -> None:
    """Compare two files; counts are of what both have."""
    findings.counts["exempt"] += other.exempt
    findings.counts["rows"] += min(base.rows, other.rows)
    for key in [*base.tensors, *(k for k in other.tensors if k not in base.tensors)]:
        a, b = base.tensors.get(key), other.tensors.get(key)
        if a is None or b is None:
            sides = ("no such tensor" if t is None else _describe(t) for t in (a, b))
            findings.differ("on one side", name, key, *sides)
            continue
        findings.counts["tensors"] += 1
        findings.counts["numbers"] += min(a.size, b.size)
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            findings.differ("tensors", name, key, _describe(a), _describe(b))
        elif a.data != b.data:
            findings.differ("tensors", name, key, *_first_element(a, b))
    for key in [*base.values, *(k for k in other.values if k not in base.values)]:
        if key not in base.values or key not in other.values:
            sides = (repr(c.values[key]) if key in c.values else "no such key" for c in (base, other))
            findings.differ("on one side", name, key, *sides)
            continue
        mine, theirs = base.values[key], other.values[key]
        kind = "numbers" if is_number(mine) and is_number(theirs) else "texts"
        findings.counts[kind] += 1
        if type(mine) is not type(theirs) or repr(mine) != repr(theirs):  # repr keeps every bit, and NaN is itself
            findings.differ(kind, name, key, repr(mine), repr(theirs))


def _describe(tensor: StoredTensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"


def _first_element(base: StoredTensor, other: StoredTensor) -> tuple[str, str]:
    """Return the first element that differs on both sides, with its place and how many there are."""
    a, b = base.array(), other.array()
    if a is None or b is None:
        return f"{_describe(base)} of some bytes", f"{_describe(other)} of other bytes"
    width = a.dtype.itemsize
    bytes_of = [np.frombuffer(t.data, np.uint8).reshape(-1, width) for t in (base, other)]
    at = np.flatnonzero((bytes_of[0] != bytes_of[1]).any(1))
    index = [int(i) for i in np.unravel_index(at[0], base.shape)] if base.shape else []
    many = f"the first of {len(at):,} that differ of {base.size:,}"
    return f"{a[at[0]]!r} at {index}, {many}", f"{b[at[0]]!r} at {index}"


# Source trees


@dataclass(frozen=True)
class Tree:
    """A source tree in a temporary folder, and where its runs go."""

    name: str
    home: Path

    @property
    def source(self) -> Path:
        return self.home / "source"

    def environment(self) -> dict[str, str]:
        """The environment variables of its processes."""
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
        one_thread = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        data = {"PERSONAFL_DATA": str(self.home / "data")} if "PERSONAFL_DATA" in os.environ else {}
        return {
            **inherited,
            **one_thread,
            **data,
            "XDG_CACHE_HOME": str(self.home / "cache"),
            "PERSONAFL_OFFLINE": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "COLUMNS": "200",
            "PYTHONHASHSEED": "0",
            "PYTHONSAFEPATH": "1",  # the working directory is not imported from
            "PYTHONPATH": os.pathsep.join(map(str, (self.source / "src", self.source))),
            "PYTHONPYCACHEPREFIX": str(self.home / "bytecode"),
        }

    def prepare(self) -> None:
        """Make the folders that its processes need."""
        for name in ("results", "empty", "data", "cache/personafl"):
            (self.home / name).mkdir(parents=True)
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute()
        link_entries(cache, self.home / "cache", left_out="personafl")
        link_entries(cache / "personafl", self.home / "cache" / "personafl", left_out="prepared")
        if own := os.environ.get("PERSONAFL_DATA"):
            link_entries(Path(own).expanduser().absolute(), self.home / "data", left_out=".prepared")

    def check(self) -> None:
        """Stop if its processes would import another package, such as an installed one."""
        command = [sys.executable, "-c", "import personafl; print(personafl.__file__)"]
        done = subprocess.run(
            command, env=self.environment(), cwd=self.home / "empty", capture_output=True, text=True, check=False
        )
        if done.returncode or not Path(done.stdout.strip()).is_relative_to(self.source):
            raise SystemExit(f"{self.name}: personafl is not imported from {self.source}: {done.stdout}{done.stderr}")


def link_entries(folder: Path, target: Path, left_out: str) -> None:
    """Link all entries of a folder, where it exists, into another one, but for one of them."""
    if folder.is_dir():
        for entry in folder.iterdir():
            if entry.name != left_out:
                (target / entry.name).symlink_to(entry)


@contextlib.contextmanager
def source_trees(base: str, other: str) -> Iterator[tuple[Tree, Tree]]:
    """Put two source trees into a temporary folder, which is removed at the end."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="compare-commits-"))).resolve()
        trees = []
        for name, given in (("BASE", base), ("OTHER", other)):
            tree = Tree(name, folder / name.lower())
            tree.prepare()
            if given.startswith(("/", ".")):
                copy_tree(Path(given), tree.source)
            else:
                stack.enter_context(worktree(given, tree.source))
            tree.check()
            trees.append(tree)
        yield trees[0], trees[1]


def copy_tree(folder: Path, target: Path) -> None:
    """Copy the folders of a source tree that are imported.

    Raises:
        SystemExit: The folder holds no source tree.
    """
    if not (folder / "src" / "personafl").is_dir():
        raise SystemExit(f"{folder}: is not a source tree, since it has no src/personafl")
    for name in COPIED:
        if (folder / name).is_dir():
            shutil.copytree(folder / name, target / name, ignore=shutil.ignore_patterns("__pycache__"))


@contextlib.contextmanager
def worktree(commit: str, folder: Path, repository: Path = ROOT) -> Iterator[None]:
    """Check a commit out into a folder, and remove it from Git's worktrees at the end.

    Raises:
        SystemExit: Git cannot check it out; the message says why.
    """
    git = ["git", "-C", str(repository), "worktree"]
    try:
        done = subprocess.run(
            [*git, "add", "--detach", str(folder), commit], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise SystemExit(f"{commit}: cannot be checked out: {done.stderr.strip()}")
        yield
    finally:
        subprocess.run([*git, "remove", "--force", str(folder)], capture_output=True, check=False)


# Running


@dataclass(frozen=True)
class Task:
    """Something that both trees run; OUT stands for the folder of the results in the arguments of the interpreter."""

    workload: str
    name: str
    arguments: tuple[str, ...]


@dataclass(frozen=True)
class Run:
    """What became of a task with one tree."""

    folder: Path
    status: int
    output: str
    error: str
    seconds: float

    @property
    def last_line(self) -> str:
        """What it said last, where it failed."""
        lines = [line for line in self.error.splitlines() if line.strip()]
        return lines[-1].strip() if lines else f"exit status {self.status}"


class Runner:
    """Runs tasks with both trees, some at a time."""

    def __init__(self, trees: tuple[Tree, Tree], jobs: int) -> None:
        self.trees = trees
        self.processes: set[subprocess.Popen[str]] = set()
        self.pool = ThreadPoolExecutor(jobs)
        self.is_stopped = False

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *error: object) -> None:
        self.is_stopped = True
        self.pool.shutdown(wait=False, cancel_futures=True)
        for process in tuple(self.processes):
            process.terminate()
        self.pool.shutdown()

    def run(self, task: Task, *, quiet: bool = False) -> tuple[Run, Run]:
        """Run a task with both trees, and print how long each took."""
        both = [self.pool.submit(self._run, tree, task) for tree in self.trees]
        runs = both[0].result(), both[1].result()
        if not quiet:
            times = " and ".join(f"{r.seconds:.1f} s" for r in runs)
            print(f"{task.workload}, {task.name}: took {times}", flush=True)
        return runs

    def _run(self, tree: Tree, task: Task) -> Run:
        folder = tree.home / "results" / re.sub(r"[^\w.-]+", "-", f"{task.workload}-{task.name}")
        command = [sys.executable, *(str(folder) if a == OUT else a for a in task.arguments)]
        begun = time.perf_counter()
        with subprocess.Popen(
            command,
            cwd=tree.home / "empty",
            env=tree.environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            self.processes.add(process)
            if self.is_stopped:  # while the process was started
                process.terminate()
            output, error = process.communicate()
        self.processes.discard(process)
        return Run(folder, process.returncode, output, error, time.perf_counter() - begun)


# Workloads


@dataclass(frozen=True)
class Outcome:
    """What a comparison came to: findings, or why there are none."""

    workload: str
    name: str
    findings: Findings | None
    reason: str = ""


@dataclass(frozen=True)
class Comparer:
    """Runs workloads and compares what they leave."""

    runner: Runner
    replacements: Sequence[tuple[str, str]] = ()
    exemptions: Sequence[Exemption] = EXEMPTIONS

    @property
    def renames(self) -> tuple[Rename, Rename]:
        base, other = self.runner.trees
        return make_rename(self.replacements, base.home), make_rename((), other.home)

    def compare_runs(self, task: Task, runs: tuple[Run, Run]) -> Outcome:
        """Compare all that a task left in both trees; what failed in both is not compared."""
        base, other = runs
        if base.status and other.status:
            return Outcome(task.workload, task.name, None, f"fails in both trees: {other.last_line}")
        if base.status or other.status:
            findings = Findings()
            sides = (r.last_line if r.status else "succeeds" for r in runs)
            findings.differ("on one side", "exit status", "", *sides)
            return Outcome(task.workload, task.name, findings)
        findings = compare_folders(base.folder, other.folder, *self.renames, self.exemptions)
        return Outcome(task.workload, task.name, findings)

    def compare_all_methods(self, overrides: Sequence[str]) -> list[Outcome]:
        """Run the recipe of all methods."""
        options = ("--out", OUT, "--threads", "1", "--device", "cpu", "--quiet")
        task = Task("all-methods", "recipe", ("-m", "personafl", "run", "all-methods", *overrides, *options))
        return [self.compare_runs(task, self.runner.run(task))]

    def compare_reproductions(self, targets: Sequence[str]) -> list[Outcome]:
        """Rehearse targets with one command, or with one for each where that one fails."""
        lists = self.runner.run(Task("reproduce", "list", ("-m", "personafl", "reproduce", "--list")), quiet=True)
        names = [parse_targets(run.output) for run in lists]
        wanted = list(targets) or list(dict.fromkeys([*names[0], *names[1]]))
        common = [name for name in wanted if all(name in known for known in names)]
        missing = "not a target of both trees"
        outcomes = [Outcome("reproduce", name, None, missing) for name in wanted if name not in common]
        if not common:
            return outcomes
        together = self._reproduction(common)
        runs = self.runner.run(together)
        if len(common) > 1 and any(run.status for run in runs):
            tasks = [self._reproduction([name]) for name in common]
            return outcomes + [self.compare_runs(task, self.runner.run(task)) for task in tasks]
        return [*outcomes, self.compare_runs(together, runs)]

    def _reproduction(self, names: Sequence[str]) -> Task:
        options = ("--smoke", "--out", OUT, "--threads", "1", "--device", "cpu", "--quiet")
        name = names[0] if len(names) == 1 else f"{len(names)} targets"
        return Task("reproduce", name, ("-m", "personafl", "reproduce", *names, *options))

    def compare_deployments(self, patterns: Sequence[str]) -> list[Outcome]:
        """Play deployments; each is compared on its own."""
        only = [part for pattern in patterns for part in ("--only", pattern)]
        script = str(Path(__file__).with_name("play_deployments.py"))
        task = Task("deployments", "all" if not patterns else ", ".join(patterns), (script, OUT, *only))
        runs = self.runner.run(task)
        if any(run.status for run in runs):
            return [self.compare_runs(task, runs)]
        base, other = (json.loads((run.folder / "deployments.json").read_text()) for run in runs)
        outcomes = []
        for name in [*base, *(n for n in other if n not in base)]:
            if name not in base or name not in other:
                outcomes.append(Outcome(task.workload, name, None, "only one of the trees has it"))
                continue
            parts = [
                Run(run.folder / name, int(bool(error)), "", error, 0.0)
                for run, error in zip(runs, (base[name], other[name]), strict=True)
            ]
            one = Task(task.workload, name, ())
            outcomes.append(self.compare_runs(one, (parts[0], parts[1])))
        return outcomes


def parse_targets(output: str) -> list[str]:
    """Return the targets in the table of `personafl reproduce --list`: rows that end with a number of runs."""
    return re.findall(r"^([\w-]+) {2,}\S.* \d+\s*$", output, re.M)


def parse_replacements(texts: Sequence[str]) -> list[tuple[str, str]]:
    """Return the pairs of --map.

    Raises:
        SystemExit: A text is not OLD=NEW.
    """
    pairs = [text.partition("=") for text in texts]
    for (old, equals, _), text in zip(pairs, texts, strict=True):
        if not old or not equals:
            raise SystemExit(f"--map {text}: must be OLD=NEW")
    return [(old, new) for old, _, new in pairs]


def parse_exemptions(texts: Sequence[str]) -> list[Exemption]:
    """Return the exemptions of --exempt.

    Raises:
        SystemExit: A text is not FILE:KEY.
    """
    found = []
    for text in texts:
        file, colon, key = text.partition(":")
        if not file or not colon or not key.startswith(("/", "*")):
            raise SystemExit(f"--exempt {text}: must be FILE:KEY, such as summary.json:/time/seconds")
        found.append(Exemption(file, key, "given by --exempt"))
    return found


def report(outcomes: Sequence[Outcome], workloads: Sequence[str], show: int) -> int:
    """Print what was compared and the first differences; return the exit status."""
    status = 0
    for workload in workloads:
        total, compared = Findings(), 0
        for outcome in outcomes:
            if outcome.workload == workload and outcome.findings is not None:
                total.add(outcome.findings, outcome.name)
                compared += 1
        print(f"\n{workload}: compared {compared}: {total.describe()}")
        for outcome in outcomes:
            if outcome.workload == workload and outcome.findings is None:
                print(f"  not compared: {outcome.name}: {outcome.reason}")
        if total.differing:
            status = 1
            _print_differences(total, show)
        elif not total.counts["numbers"]:
            status = status or 2
            print(f"  error: {workload} compared no number")
    conclusions = {0: "Everything compared is equal.", 1: "There are differences.", 2: "A workload compared no number."}
    print(f"\n{conclusions[status]}")
    return status


def _print_differences(findings: Findings, show: int) -> None:
    kinds = ", ".join(f"{number:,} {kind}" for kind, number in findings.kinds.items())
    print(f"  {findings.differing:,} differences ({kinds})")
    groups = list(findings.groups.values())
    for first, number in groups[:show]:
        more = f" ({number - 1:,} more with this key)" if number > 1 else ""
        print(f"  {first.file}: {first.key}{more}\n    BASE   {first.base}\n    OTHER  {first.other}")
    if groups[show:]:
        print(f"  and {len(groups) - show:,} other keys (--show {len(groups)} shows all)")


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", metavar="BASE", help="a commit, or a folder with a source tree")
    parser.add_argument("other", metavar="OTHER", nargs="?", default=str(ROOT), help="the same; default this folder")
    parser.add_argument("--only", action="append", choices=WORKLOADS, help="a workload; default all; repeatable")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="an override of all-methods; repeatable"
    )
    parser.add_argument("--targets", default="", help="targets of reproduce, separated by commas; default all")
    parser.add_argument(
        "--deployment", action="append", default=[], metavar="PATTERN", help="deployments, such as 'method fed*'"
    )
    parser.add_argument(
        "--map", action="append", default=[], metavar="OLD=NEW", help="a text of BASE that is NEW in OTHER; repeatable"
    )
    parser.add_argument(
        "--exempt", action="append", default=[], metavar="FILE:KEY", help="a key that may differ; repeatable"
    )
    parser.add_argument("--jobs", type=int, default=1, help="how many processes run at a time; 2 are useful")
    parser.add_argument("--show", type=int, default=10, help="how many keys that differ are shown for each workload")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    workloads = [w for w in WORKLOADS if w in (options.only or WORKLOADS)]
    replacements, exemptions = parse_replacements(options.map), parse_exemptions(options.exempt)
    targets = [name.strip() for name in options.targets.split(",") if name.strip()]
    with source_trees(options.base, options.other) as trees, Runner(trees, options.jobs) as runner:
        comparer = Comparer(runner, replacements, (*EXEMPTIONS, *exemptions))
        outcomes: list[Outcome] = []
        if "all-methods" in workloads:
            outcomes += comparer.compare_all_methods(options.set)
        if "reproduce" in workloads:
            outcomes += comparer.compare_reproductions(targets)
        if "deployments" in workloads:
            outcomes += comparer.compare_deployments(options.deployment)
        return report(outcomes, workloads, options.show)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # so that nothing is left running or lying about
    sys.exit(main())
