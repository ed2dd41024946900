"""Imports flow one way, and heavy or optional packages are imported where they are used."""

from __future__ import annotations

import ast
import graphlib
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import personafl

ROOT = Path(personafl.__file__).parent

# The rooms from top to bottom: each imports itself and what lies in the rows below it.
ROOMS: tuple[tuple[str, ...], ...] = (
    ("cli",),
    ("experiment",),
    ("simulation", "deployment"),
    ("engine", "config"),
    ("authoring",),
    ("methods", "plugins"),
    ("evaluation", "data", "models", "sparse"),
    ("storage",),
    ("accel",),
    ("core",),
    ("version",),
)
BESIDE = {("methods", "plugins"), ("evaluation", "data")}
"""What a room imports of one in the same row."""


def may_import(room: str, other: str) -> bool:
    row, below = (next(i for i, rooms in enumerate(ROOMS) if name in rooms) for name in (room, other))
    return room == other or row < below or (room, other) in BESIDE


def imports(path: Path) -> set[str]:
    """Dotted names a file imports, wherever in the file."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{a.name}" for a in node.names}
    return found


@pytest.mark.parametrize("room", [name for row in ROOMS for name in row])
def test_a_room_imports_only_what_lies_below_it(room: str) -> None:
    files = sorted((ROOT / room).rglob("*.py")) if (ROOT / room).is_dir() else [ROOT / f"{room}.py"]
    assert files
    for file in files:
        ours = {n.split(".")[1] for n in imports(file) if n.startswith("personafl.")}
        assert not (wrong := {other for other in ours if not may_import(room, other)}), f"{file} imports {wrong}"


def test_every_file_is_in_a_room() -> None:
    named = {name for row in ROOMS for name in row} | {"__init__", "__main__"}
    assert {file.relative_to(ROOT).parts[0].removesuffix(".py") for file in ROOT.rglob("*.py")} == named


def test_simulation_and_deployment_do_not_know_each_other() -> None:
    """They are in one row of the table above, and no way leads from one to the other."""
    assert not may_import("simulation", "deployment") and not may_import("deployment", "simulation")


def test_triton_and_cuda_graphs_are_used_behind_one_door() -> None:
    for file in sorted(ROOT.rglob("*.py")):
        if ROOT / "accel" not in file.parents:
            assert not [n for n in imports(file) if n.split(".")[0] == "triton"], file
            assert "torch.cuda.graph(" not in file.read_text() and "CUDAGraph(" not in file.read_text(), file


def test_every_package_that_is_imported_is_a_declared_dependency() -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    declared = [*project["dependencies"], *(d for extra in project["optional-dependencies"].values() for d in extra)]
    named = {re.split(r"[<>=\[]", d)[0] for d in declared}
    called = {"pillow": "PIL", "scikit-learn": "sklearn", "tomli-w": "tomli_w"}
    there = {"personafl", "triton", "IPython"}  # torch has triton, a notebook has IPython
    known = {called.get(d, d) for d in named} | there | sys.stdlib_module_names
    for file in sorted(ROOT.rglob("*.py")):
        found = {n.split(".")[0] for n in imports(file)}
        assert found <= known, f"{file.name} imports {found - known}"


def test_no_module_imports_itself_by_way_of_others() -> None:
    """Imports inside functions and those for type checkers count, too: they only hide a cycle."""
    files = {".".join(f.relative_to(ROOT.parent).with_suffix("").parts): f for f in ROOT.rglob("*.py")}
    files = {name.removesuffix(".__init__"): f for name, f in files.items()}
    graph = {
        name: {n if n in files else n.rpartition(".")[0] for n in imports(f)} & files.keys() - {name}
        for name, f in files.items()
    }
    assert graph["personafl.simulation.simulator"] >= {"personafl.simulation.evaluator", "personafl.core.tree"}
    graphlib.TopologicalSorter(graph).prepare()  # raises where there is a cycle, and names it


def test_an_algorithm_file_holds_no_loop_over_batches_no_optimiser_and_no_files() -> None:
    banned = (
        "torch.optim",
        "torch.utils.data",
        "pathlib",
        "personafl.engine.local",
        "personafl.data.batches",
        "os",
        "io",
    )
    for file in sorted((ROOT / "methods").glob("*.py")):
        assert not [n for n in imports(file) if n.startswith(tuple(f"{b}." for b in banned)) or n in banned], file.name
        assert ".backward(" not in file.read_text()
        assert ".item()" not in file.read_text()


def test_flower_and_what_comes_with_it_are_imported_in_one_place() -> None:
    for file in sorted(ROOT.rglob("*.py")):
        if ROOT / "deployment" / "flower" not in file.parents:
            assert not [n for n in imports(file) if n.split(".")[0] in ("flwr", "cryptography")], file.name


def test_importing_the_package_leaves_slow_and_optional_packages_alone() -> None:
    slow = [
        "matplotlib",
        "scipy",
        "sklearn",
        "flwr",
        "cryptography",
        "onnx",
        "tensorboard",
        "opacus",
        "pyarrow",
        "pandas",
        "IPython",
        "torch._dynamo",
        "sympy",
    ]
    model = "personafl.StackedModel(torch.nn.Linear(3, 2), torch.rand(2, 3))"  # making one imports no more
    code = f"import sys, torch, personafl, personafl.cli; {model}; print([m for m in {slow} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


WAITING = """
import os, sys, personafl
assert "torch" not in sys.modules
import personafl.cli
print(os.environ["GOMP_SPINCOUNT"])
"""


@pytest.mark.parametrize(("given", "kept"), [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7")])
def test_waiting_threads_are_told_to_sleep_before_pytorch_is_imported(given: dict[str, str], kept: str) -> None:
    usual = {n: v for n, v in os.environ.items() if n != "GOMP_SPINCOUNT"}
    found = subprocess.run(
        [sys.executable, "-c", WAITING], env=usual | given, capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == kept
