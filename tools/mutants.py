"""Mutation testing: small changes to the sources that some test should notice, and a list of those that none did.

    python tools/mutants.py --seed 0 --count 200 --jobs 14 --out mutants
    python tools/mutants.py --only 'core/*' --count 20 --list

Mutants are drawn by the seed from all possible ones in the files of TARGETS. Each is applied in a copy of the tree,
never in the tree itself, and tried against the tests named beside its file, then against the slow references, then
against BROAD. The first failing test kills it, and so does a run of several times the usual length. Before that all
these tests must pass without any change.

A result is appended to OUT/results.jsonl as soon as it is known, and the same command goes on where it was stopped.
OUT/survivors.md has the survivors with their diffs; not each is a fault of the tests, since a change can leave the
behaviour as it was. Docstrings, annotations, strings, and what errors and warnings say are left alone, as are the
arguments in SILENT. It needs what the tests need and nothing else.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import difflib
import hashlib
import json
import os
import queue
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from functools import cache, partial
from pathlib import Path
from typing import TypeVar

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "src/personafl"

REFERENCES = ("tests/test_references.py", "tests/test_reference_states.py")
CONTRACT = "tests/methods/test_contract.py"
BROAD = (
    *REFERENCES,
    "tests/core",
    "tests/plugins",
    "tests/methods",
    "tests/sparse",
    "tests/evaluation",
    "tests/simulation/test_simulator.py",
    "tests/experiment",
    "tests/test_docs.py",
    "tests/test_experiment.py",
)
"""What is tried where the tests beside a file have let a mutant live."""

SPARSE = ("tests/methods/test_dm_pfl.py", "tests/methods/test_feddst.py")
TARGETS: dict[str, tuple[str, ...]] = {
    "methods/__init__.py": (),
    "methods/two_models.py": (
        "tests/methods/test_ditto.py",
        "tests/methods/test_apfl.py",
        "tests/methods/test_fml.py",
        "-k ditto or apfl or fml",
    ),
    "methods/masked_training.py": (*SPARSE, "-k dm-pfl or feddst"),
    "methods/warmup.py": ("tests/methods/test_fedpews.py", "tests/methods/test_fedpews_fixed.py", "-k fedpews"),
    "methods/simplex.py": ("tests/methods/test_simplex.py", "-k fedpac"),
    "methods/*.py": ("tests/methods/test_{stem}.py", "-k {stem}"),
    "sparse/*.py": ("tests/sparse", *SPARSE),
    "plugins/{wrapper,assemble}.py": ("tests/plugins/test_{stem}.py", "tests/plugins/test_inherited.py"),
    "plugins/per_sample.py": ("tests/methods/test_dm_pfl_plus.py", "tests/plugins/test_assemble.py"),
    "plugins/prior_free.py": ("tests/plugins/test_prior_free.py",),
    "plugins/label_prior.py": ("tests/plugins/test_label_prior.py",),
    "plugins/mixture.py": ("tests/plugins/test_label_prior.py",),
    "evaluation/batch_inference.py": ("tests/plugins/test_label_prior.py",),
    "plugins/{contribution,inherited,mmd}.py": ("tests/plugins/test_{stem}.py",),
    "core/{algorithm,local_work,method_settings}.py": (
        "tests/core/test_algorithm.py",
        "tests/methods/test_refusals.py",
    ),
    "core/{optim,tree,criteria,wire}.py": ("tests/core/test_{stem}.py",),
    "engine/{cost,local}.py": ("tests/engine/test_{stem}.py",),
    "data/batches.py": ("tests/data/test_batches.py",),
    "data/shift.py": ("tests/data/test_shift.py",),
    "evaluation/report.py": ("tests/evaluation/test_report.py", "tests/test_cli.py"),
    "evaluation/*.py": ("tests/evaluation", "tests/data/test_shift.py"),
}
"""Files under PACKAGE, the first pattern that fits, and their nearest tests. `-k` says which of the slow references and
of the contract's tests are a file's. A file without tests is left out."""

SILENT = {
    "stacklevel",
    "device",
    "dtype",
    "memory_format",
    "non_blocking",
    "help",
    "linewidth",
    "linestyle",
    "figsize",
    "dpi",
}
"""Keyword arguments that are left alone."""

PLAIN = {"isinstance", "getattr", "hasattr", "setting", "field", "zip", "range"}
"""Functions whose arguments are not swapped."""

TWINS = {
    **{
        a: b
        for pair in ("min max", "any all", "floor ceil", "zeros_like ones_like", "sum mean")
        for a, b in [pair.split()]
    },
    **{b: a for pair in ("min max", "any all", "floor ceil", "zeros_like ones_like") for a, b in [pair.split()]},
}
"""Functions and methods that are called in place of each other."""

OPERATORS: dict[type[ast.AST], tuple[str, ...]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "/"),
    ast.Mod: ("%", "//"),
    ast.Pow: ("**", "*"),
    ast.BitAnd: ("&", "|"),
    ast.Lt: ("<", "<=", ">="),
    ast.LtE: ("<=", "<", ">"),
    ast.Gt: (">", ">=", "<="),
    ast.GtE: (">=", ">", "<"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.And: ("and", "or"),
    ast.Or: ("or", "and"),
}
"""An operator as it is written, and what it is replaced with."""


Result = dict[str, object]
"""A mutant and what became of it, as it is written to the results."""


@dataclass(frozen=True)
class Mutant:
    """A span of a file, in bytes, and what stands there instead."""

    path: str  # from the root
    start: int
    end: int
    text: str
    kind: str
    line: int

    @property
    def id(self) -> str:
        told = f"{self.path} {self.start} {self.end} {self.text} {hashlib.sha1(original(self.path)).hexdigest()}"
        return hashlib.sha1(told.encode()).hexdigest()[:10]

    def source(self) -> bytes:
        before = original(self.path)
        return before[: self.start] + self.text.encode() + before[self.end :]

    def diff(self) -> str:
        old, new = (s.decode().splitlines(keepends=True) for s in (original(self.path), self.source()))
        return "".join(difflib.unified_diff(old, new, f"a/{self.path}", f"b/{self.path}", n=2))


@cache
def original(path: str) -> bytes:
    return (ROOT / path).read_bytes()


# Mutants of a file


class Finder(ast.NodeVisitor):
    """Every place of a file that can be changed, and to what."""

    def __init__(self, path: str, source: bytes) -> None:
        self.path, self.source, self.found = path, source, list[Mutant]()
        self.begins = [0]
        for line in source.splitlines(keepends=True):
            self.begins.append(self.begins[-1] + len(line))
        self.function: ast.FunctionDef | None = None
        self.bound: set[str] = set()  # names that have a value when a statement of the function is reached

    def span(self, node: ast.AST) -> tuple[int, int]:
        first, last = self.begins[node.lineno - 1], self.begins[node.end_lineno - 1]  # type: ignore[attr-defined]
        return first + node.col_offset, last + node.end_col_offset  # type: ignore[attr-defined]

    def text(self, node: ast.AST) -> str:
        start, end = self.span(node)
        return self.source[start:end].decode()

    def put(self, start: int, end: int, text: str, kind: str) -> None:
        line = self.source.count(b"\n", 0, start) + 1
        if self.source[start:end].decode() != text:
            self.found.append(Mutant(self.path, start, end, text, kind, line))

    def replace(self, node: ast.AST, text: str, kind: str) -> None:
        self.put(*self.span(node), text, kind)

    def operator(self, op: ast.AST, left: ast.AST, right: ast.AST, kind: str) -> None:
        """Replace what is written between two operands."""
        written, *others = OPERATORS.get(type(op), ("",))
        start, end = self.span(left)[1], self.span(right)[0]
        at = self.source[start:end].decode().find(written)
        if others and at >= 0 and b"#" not in self.source[start:end]:
            for other in others:
                self.put(start + at, start + at + len(written), other, kind)

    # What is left alone

    def visit_Raise(self, node: ast.Raise) -> None:
        """What an error says."""

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Names and messages."""

    def visit_arguments(self, node: ast.arguments) -> None:
        for default in (*node.defaults, *node.kw_defaults):
            if default is not None:
                self.visit(default)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for statement in node.body:
            self.visit(statement)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if isinstance(node.target, ast.Name):
            self.bound.add(node.target.id)
        if node.value is not None:
            self.visit(node.value)

    # Statements

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        outer = self.function, self.bound
        arguments = node.args
        named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        self.function, self.bound = node, {a.arg for a in named}
        self.visit(arguments)
        for statement in node.body:
            self.visit(statement)
        self.function, self.bound = outer

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call) and not self.warns(node.value):
            self.replace(node, "pass", "statement")
            self.visit(node.value)
        elif isinstance(node.value, ast.Yield | ast.YieldFrom):
            self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        names = {n.id for target in node.targets for n in ast.walk(target) if isinstance(n, ast.Name)}
        stored = all(isinstance(t, ast.Attribute | ast.Subscript) for t in node.targets)
        if self.function is not None and (stored or names <= self.bound):  # else the name would be missing
            self.replace(node, "pass", "statement")
        self.visit(node.value)
        self.bound |= names

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.replace(node, "pass", "statement")
        self.visit(node.value)

    def visit_Return(self, node: ast.Return) -> None:
        function = self.function
        if node.value is not None and function is not None and function.returns is not None:
            wanted = ast.unparse(function.returns)
            for a in function.args.args:
                if a.annotation is not None and ast.unparse(a.annotation) == wanted:
                    self.replace(node.value, a.arg, "return")
        self.generic_visit(node)

    def visit_If(self, node: ast.If) -> None:
        self.replace(node.test, f"not ({self.text(node.test)})", "condition")
        if all(isinstance(s, ast.Raise) for s in node.body) and not node.orelse:
            self.replace(node.test, "False", "refusal")
        self.generic_visit(node)

    def visit_Assert(self, node: ast.Assert) -> None:
        """What must hold anyway."""

    # Expressions

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self.replace(node, f"({self.text(node.body)})", "branch")
        self.replace(node, f"({self.text(node.orelse)})", "branch")
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        self.operator(node.op, node.left, node.right, "operator")
        if not isinstance(node.op, ast.Mod):
            self.replace(node, f"({self.text(node.left)})", "operand")
        if isinstance(node.op, ast.BitOr | ast.BitAnd | ast.Add | ast.Mult):
            self.replace(node, f"({self.text(node.right)})", "operand")
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        self.operator(node.op, node.values[0], node.values[1], "operator")
        if len(node.values) == 2:
            for value in node.values:
                self.replace(node, f"({self.text(value)})", "operand")
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        for op, left, right in zip(node.ops, [node.left, *node.comparators], node.comparators, strict=False):
            self.operator(op, left, right, "comparison")
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not | ast.USub | ast.Invert):
            self.replace(node, f"({self.text(node.operand)})", "sign")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        value = node.value
        if isinstance(value, bool):
            self.replace(node, str(not value), "constant")
        elif isinstance(value, int):
            self.replace(node, str(value + 1), "constant")
            if value == 1:
                self.replace(node, "0", "constant")
        elif isinstance(value, float):
            self.replace(node, repr(value * 2 if value else 1.0), "constant")

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for condition in node.ifs:
            self.replace(condition, "True", "condition")
        self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        if not (isinstance(node.value, ast.Name) and node.value.id[:1].isupper()):  # else an annotation or an alias
            self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if self.warns(node):
            return
        called = node.func
        name = called.attr if isinstance(called, ast.Attribute) else called.id if isinstance(called, ast.Name) else ""
        if name in TWINS:
            end = self.span(called)[1]
            self.put(end - len(name), end, TWINS[name], "twin")
        if len(node.args) >= 2 and name not in PLAIN and not any(isinstance(a, ast.Starred) for a in node.args):
            (start, _), (_, end) = self.span(node.args[0]), self.span(node.args[1])
            self.put(start, end, f"{self.text(node.args[1])}, {self.text(node.args[0])}", "arguments")
        for i, keyword in enumerate(node.keywords):
            if keyword.arg is not None and keyword.arg not in SILENT:
                self.drop(node, i)
        self.visit(called)
        for argument in node.args:
            self.visit(argument)
        for keyword in node.keywords:
            if keyword.arg not in SILENT:
                self.visit(keyword.value)

    def drop(self, node: ast.Call, i: int) -> None:
        """Leave out a keyword argument and the comma before or behind it."""
        start, end = self.span(node.keywords[i])
        before = [self.span(a)[1] for a in (*node.args, *node.keywords) if self.span(a)[1] <= start]
        behind = [self.span(a)[0] for a in (*node.args, *node.keywords) if self.span(a)[0] >= end]
        first, last = (max(before), end) if before else (start, min(behind) if behind else end)
        if b"#" not in self.source[first:last]:
            self.put(first, last, "", "keyword")

    @staticmethod
    def warns(node: ast.Call) -> bool:
        return ast.unparse(node.func) in ("warnings.warn", "super().__init__", "print")


def mutants_of(path: str, source: bytes) -> list[Mutant]:
    """All mutants of a file, in its order; none that does not parse or says the same."""
    tree = ast.parse(source)
    finder = Finder(path, source)
    for statement in tree.body:
        finder.visit(statement)
    same, out = ast.dump(tree), {}
    for m in finder.found:
        changed = source[: m.start] + m.text.encode() + source[m.end :]
        with contextlib.suppress(SyntaxError):
            if ast.dump(ast.parse(changed)) != same:
                out[m.start, m.end, m.text] = m
    return sorted(out.values(), key=lambda m: (m.start, m.end, m.text))


# Targets


def spread(pattern: str) -> list[str]:
    """A pattern with alternatives, `core/{tree,wire}.py`, as patterns without."""
    before, brace, rest = pattern.partition("{")
    inside, _, behind = rest.partition("}")
    return [before + one + behind for one in inside.split(",")] if brace else [pattern]


def stages_of(path: str) -> list[list[str]]:
    """The nearest tests of a file and its references, as arguments of pytest; nothing for a file that is no target."""
    inner = Path(path).relative_to(PACKAGE)
    fitting = (tests for pattern, tests in TARGETS.items() if any(fnmatch(str(inner), one) for one in spread(pattern)))
    named = [t.replace("{stem}", inner.stem) for t in next(fitting, ())]
    nearest = [t for t in named if not t.startswith("-k") and (ROOT / t).exists()]
    if not named:
        return []
    mine = [t.removeprefix("-k ").replace("_", "-") for t in named if t.startswith("-k")]
    references = [*REFERENCES, CONTRACT, "-k", mine[0]] if mine else list(REFERENCES)
    return [nearest, references] if nearest else [references]


def targets(only: list[str]) -> list[str]:
    """The files to be changed."""
    files = sorted(str(p.relative_to(ROOT)) for p in (ROOT / PACKAGE).rglob("*.py"))
    chosen = [f for f in files if stages_of(f)]
    inner = {f: f.removeprefix(PACKAGE + "/") for f in chosen}
    return [f for f in chosen if not only or any(fnmatch(inner[f], one) for o in only for one in spread(o))]


# Runs


@dataclass(frozen=True)
class Run:
    """How a run of some tests ended."""

    code: int  # of pytest: 0 passed, 1 failed, 2 could not be imported, 5 nothing was run
    seconds: float
    said: str


class Tree:
    """A copy of the tree in which tests are run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.process: subprocess.Popen[bytes] | None = None
        leave = shutil.ignore_patterns(".git", ".*cache", ".venv", ".hypothesis", "__pycache__", "runs", "*.egg-info")
        for name in ("src", "tests", "docs", "examples", "benchmarks", "tools"):
            if (ROOT / name).exists():
                shutil.copytree(ROOT / name, folder / name, ignore=leave)
        for file in (*ROOT.glob("*.md"), *ROOT.glob("*.toml"), *ROOT.glob("LICENSE*")):
            shutil.copy(file, folder / file.name)
        old = os.environ.get("PYTHONPATH")
        self.environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(folder / "src"), *([old] if old else [])]),
            "PYTHONDONTWRITEBYTECODE": "1",  # a stale one would hide the next mutant
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }

    def run(self, command: list[str], limit: float) -> Run:
        """Run it in a process group of its own, all of which ends with it."""
        began = time.monotonic()
        self.process = process = subprocess.Popen(
            command,
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            out, _ = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            return Run(1, time.monotonic() - began, "timeout")
        finally:
            self.stop()
            process.wait()
        lines = out.decode(errors="replace").strip().splitlines() or [""]
        failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
        return Run(process.returncode, time.monotonic() - began, failed[0] if failed else lines[-1])

    def stop(self) -> None:
        """End what is running, and all that it started."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def test(self, tests: list[str], ignored: list[str], limit: float) -> Run:
        options = ["-x", "-q", "--no-header", "--tb=no", "-rfE", "-p", "no:cacheprovider"]
        return self.run([sys.executable, "-m", "pytest", *options, *(f"--ignore={i}" for i in ignored), *tests], limit)


def checked(tree: Tree, test: str, limit: float) -> float:
    """How long a test file takes without any change; it must pass."""
    run = tree.test([test], [], limit)
    print(f"unchanged: {test} {'passed' if run.code == 0 else run.said} ({run.seconds:.0f} s)", flush=True)
    if run.code != 0:
        raise SystemExit(f"{test} does not pass without any change: {run.said}; --ignore {test} leaves it out")
    return run.seconds


Stage = tuple[list[str], float]
"""Tests, as arguments of pytest, and the seconds they may take."""


def tried(tree: Tree, mutant: Mutant, stages: list[Stage], ignored: list[str]) -> Result:
    """What became of a mutant."""
    file, seconds, by, status = tree.folder / mutant.path, 0.0, "", "survived"
    before = file.read_bytes()
    try:
        file.write_bytes(mutant.source())
        for tests, limit in stages:
            run = tree.test(tests, ignored, limit)
            seconds += run.seconds
            if run.code != 0:
                by, status = run.said, "killed" if run.said != "timeout" else "timeout"
                if run.said != "timeout" and run.code in (3, 4, 5, -9):  # pytest's own, no test, or out of memory
                    status = "error"
                break
    finally:
        file.write_bytes(before)
    told = {"id": mutant.id, "status": status, "by": by, "seconds": round(seconds, 1)}
    return told | asdict(mutant) | {"diff": mutant.diff()}


def report(results: list[Result]) -> str:
    """The survivors with their diffs."""
    lived = [r for r in results if r["status"] == "survived"]
    lines = [f"# {len(lived)} of {len(results)} mutants survived", ""]
    for r in sorted(lived, key=lambda r: (str(r["path"]), int(str(r["start"])))):
        lines += [
            f"## {r['id']}: {r['kind']}, {r['path']}:{r['line']}",
            "",
            "```diff",
            str(r["diff"]).rstrip(),
            "```",
            "",
        ]
    return "\n".join(lines)


def drawn(only: list[str], seed: int, count: int) -> list[Mutant]:
    """The mutants of a run: the first so many of a shuffle, so that a larger count adds to a smaller one."""
    everything = [m for path in targets(only) for m in mutants_of(path, original(path))]
    random.Random(seed).shuffle(everything)
    return everything[:count]


T = TypeVar("T")


class Trees:
    """Copies of the tree, each at work on one thing at a time."""

    def __init__(self, scratch: Path, jobs: int) -> None:
        self.idle: queue.Queue[Tree] = queue.Queue()
        self.all = [Tree(scratch / str(i)) for i in range(jobs)]
        for tree in self.all:
            self.idle.put(tree)
        self.pool = ThreadPoolExecutor(jobs)

    def each(self, work: Iterable[Callable[[Tree], T]]) -> Iterator[T]:
        """What these return, as they end."""

        def one(what: Callable[[Tree], T]) -> T:
            tree = self.idle.get()
            try:
                return what(tree)
            finally:
                self.idle.put(tree)

        futures = [self.pool.submit(one, what) for what in work]
        try:
            for future in as_completed(futures):
                yield future.result()
        except BaseException:
            self.pool.shutdown(wait=False, cancel_futures=True)
            for tree in self.all:
                tree.stop()
            self.pool.shutdown()
            raise


def files_of(tests: Iterable[str], ignored: list[str]) -> list[str]:
    """The test files among these paths and in these folders."""
    paths = [t for t in tests if t.startswith("tests")]
    found = [p for t in paths for p in (sorted((ROOT / t).rglob("test_*.py")) if (ROOT / t).is_dir() else [ROOT / t])]
    names = dict.fromkeys(str(p.relative_to(ROOT)) for p in found)
    return [n for n in names if n not in ignored]


def play(options: argparse.Namespace, mutants: list[Mutant]) -> Iterator[Result]:
    """Results as they come."""
    stages = {m.path: stages_of(m.path) + ([] if options.nearest_only else [list(BROAD)]) for m in mutants}
    paths = [t for each in stages.values() for stage in each for t in stage]
    with tempfile.TemporaryDirectory(prefix="mutants-", dir=options.scratch) as scratch:
        trees = Trees(Path(scratch), min(options.jobs, len(mutants)))
        tree = trees.all[0]
        where = tree.run([sys.executable, "-c", "import personafl; print(personafl.__file__)"], 600)
        if str(tree.folder) not in where.said:
            raise SystemExit(f"python does not take personafl from PYTHONPATH: {where.said}")
        known = options.out / "unchanged.json"  # the time of all tests, by what they were
        key = digest()
        times = json.loads(known.read_text()) if known.exists() else {}
        times = times.get(key, {})
        missing = [t for t in files_of(paths, options.ignore) if t not in times]
        for test, seconds in trees.each([partial(timed, test, options.limit) for test in missing]):
            times[test] = seconds
            known.write_text(json.dumps({key: times}))

        def limited(stage: list[str]) -> Stage:
            return stage, 60 + 3 * sum(times[t] for t in files_of(stage, options.ignore))

        yield from trees.each([partial(on, m, [*map(limited, stages[m.path])], options.ignore) for m in mutants])


def timed(test: str, limit: float, tree: Tree) -> tuple[str, float]:
    return test, checked(tree, test, limit)


def on(mutant: Mutant, stages: list[Stage], ignored: list[str], tree: Tree) -> Result:
    return tried(tree, mutant, stages, ignored)


def digest() -> str:
    """Of all sources and tests."""
    told = hashlib.sha1()
    for p in sorted((*(ROOT / "src").rglob("*.py"), *(ROOT / "tests").rglob("*.py"))):
        told.update(str(p).encode() + p.read_bytes())
    return told.hexdigest()[:10]


def main() -> None:
    parser = argparse.ArgumentParser(description="Mutation testing; the head of this file says more.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=200, help="how many mutants are drawn")
    parser.add_argument("--jobs", type=int, default=1, help="how many are tried at a time")
    parser.add_argument("--out", type=Path, default=Path("mutants"), help="folder of the results")
    parser.add_argument("--only", action="append", default=[], help="files, as 'core/*' or 'methods/{ditto,apfl}.py'")
    parser.add_argument("--ignore", action="append", default=[], help="a test file that is left out")
    parser.add_argument("--nearest-only", action="store_true", help="leave BROAD out")
    parser.add_argument("--limit", type=float, default=1800, help="seconds for the tests without any change")
    parser.add_argument("--scratch", type=Path, default=None, help="where the copies of the tree are made")
    parser.add_argument("--list", action="store_true", help="show the mutants and stop")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # so that nothing is left running or lying about

    mutants = drawn(options.only, options.seed, options.count)
    if options.list:
        for m in mutants:
            print(m.id, m.kind, m.diff(), sep="\n")
        return
    options.out.mkdir(parents=True, exist_ok=True)
    log = options.out / "results.jsonl"
    done = {r["id"]: r for r in map(json.loads, log.read_text().splitlines())} if log.exists() else {}
    left = [m for m in mutants if m.id not in done]
    print(f"{len(mutants)} mutants, {len(mutants) - len(left)} of them known", flush=True)
    results = [done[m.id] for m in mutants if m.id in done]
    for result in play(options, left) if left else ():
        results.append(result)
        with log.open("a") as file:
            file.write(json.dumps(result) + "\n")
        (options.out / "survivors.md").write_text(report(results))
        told = f"{result['path']}:{result['line']} {result['kind']} {result['by']}"
        print(f"{len(results)}/{len(mutants)} {result['status']} {told} ({result['seconds']} s)", flush=True)
    (options.out / "survivors.md").write_text(report(results))
    if any(r["status"] == "error" for r in results):
        raise SystemExit("some mutants could not be tried: see the status `error` in the results")
    print(f"{sum(r['status'] == 'survived' for r in results)} of {len(results)} survived: {options.out}/survivors.md")


if __name__ == "__main__":
    main()
