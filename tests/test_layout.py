"""Where things stand: tests mirror the package, and what is said in several files is the same in all."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

import personafl
from personafl.methods import ALGORITHMS

ROOT = Path(__file__).parent.parent
TESTS = ROOT / "tests"
PACKAGE = ROOT / "src" / "personafl"

# Tests that belong to no one source file, and why.
ACROSS = {
    "methods/test_contract.py": "what every registered method owes the engine",
    "methods/test_newcomers.py": "how clients join every method after training",
    "methods/test_optimizer_settings.py": "settings every method takes from the recipe or has of its own",
    "methods/test_refusals.py": "what the settings of all methods refuse",
    "data/test_papers.py": "the papers' splits: loaders, partitions and federation together",
    "deployment/flower/test_loopback.py": "deployments of real processes; deployment/flower/loopback.py",
    "deployment/flower/test_network.py": "deployments on hosts of a network; deployment/flower/network.py",
    "deployment/flower/test_walkthrough.py": "the commands of docs/deployment.md, played",
    "deployment/flower/test_strangers.py": "what strangers can do to a deployment; deployment/flower/strangers.py",
    "models/test_networks.py": "all networks of the registry",
    "models/test_zoo.py": "modules of users, trained to the end; models/zoo.py",
    "plugins/test_registry.py": "fillings of one's own, in every registry",
    "test_constraints.py": "constraints.txt against pyproject.toml",
    "test_docs.py": "docs/ against the code",
    "test_examples.py": "examples/",
    "test_gpu.py": "the same numbers on another device, whatever computes them",
    "test_imports.py": "imports of all files",
    "test_kills.py": "commands that are killed and go on; tests/kills.py",
    "test_layout.py": "this one",
    "test_names.py": "names over the whole package",
    "test_new_method.py": "the methods of docs/new-method.md; documented.py",
    "test_mistakes.py": "what users do wrong, in Python and on the command line",
    "test_machine.py": "the same numbers whatever the machine, its threads and its memory",
    "test_reference_states.py": "FedAvg and DM-PFL, all weights and masks, against tests/reference.py",
    "test_same_numbers.py": "what may change around a run without changing its numbers",
    "test_soak.py": "benchmarks/soak.py",
    "test_tasks.py": "every method on every task, from targets to tables",
    "test_references.py": "every method against tests/references/",
}


def files() -> list[Path]:
    return sorted(path.relative_to(TESTS) for path in TESTS.rglob("test_*.py"))


def sources(test: Path) -> list[Path]:
    """The files a test may be for: `engine/test_cost.py` for `engine/cost.py` or the package `engine/cost`.

    A package's own file has its test beside it or within, as `data/partition/test_partition.py`; tools have no package.
    """
    name = test.stem.removeprefix("test_")
    home = PACKAGE / test.parent
    found = [home / f"{name}.py", home / name / "__init__.py"]
    if test.parent.name == name:
        found.append(home / "__init__.py")
    if len(test.parts) == 1:
        found.append(ROOT / "tools" / f"{name}.py")
    return found


def mirrored(test: Path) -> bool:
    return any(path.is_file() for path in sources(test))


@pytest.mark.parametrize("test", files(), ids=str)
def test_a_test_file_is_named_for_a_source_file(test: Path) -> None:
    assert mirrored(test) or test.as_posix() in ACROSS, (
        f"tests/{test}: there is none of {', '.join(str(p.relative_to(ROOT)) for p in sources(test))}"
    )


def test_exceptions_are_exceptions() -> None:
    here = {t.as_posix(): t for t in files()}
    assert ACROSS.keys() <= here.keys()
    assert not [name for name in ACROSS if mirrored(here[name])]


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_a_method_has_a_file_a_test_and_a_page_of_its_name(name: str) -> None:
    """`lg-fedavg` is in methods/lg_fedavg.py, alone, and its page says so."""
    stem = name.replace("-", "_")
    assert ALGORITHMS[name].__module__ == f"personafl.methods.{stem}"
    assert [n for n, cls in ALGORITHMS.items() if cls.__module__ == ALGORITHMS[name].__module__] == [name]
    assert (TESTS / "methods" / f"test_{stem}.py").is_file()
    page = (ROOT / "docs" / "algorithms" / f"{name}.md").read_text()
    assert f"`src/personafl/methods/{stem}.py`" in page.split("\n## ")[0]


def project() -> dict[str, object]:
    loaded: dict[str, object] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return loaded


def constant(name: str) -> object:
    """A constant of noxfile.py, read without nox."""
    tree = ast.parse((ROOT / "noxfile.py").read_text())
    (value,) = (n.value for n in tree.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == name)
    return ast.literal_eval(value)


def test_the_citation_has_the_version_of_the_package() -> None:
    cited = re.search(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.M)
    assert cited is not None and cited[1] == personafl.__version__


def test_the_session_tests_is_the_readme_s_test_command() -> None:
    blocks = re.findall(r"^```bash\n(.*?)^```", (ROOT / "README.md").read_text(), re.S | re.M)
    suite = constant("SUITE")
    assert isinstance(suite, tuple)
    assert blocks[1].strip().endswith(f".venv/bin/{' '.join(suite)}")


def test_the_versions_that_are_tested_are_those_that_are_promised() -> None:
    """pyproject.toml promises, noxfile.py and the workflow test: every Python, the oldest and the newest PyTorch."""
    pythons, torches = constant("PYTHONS"), constant("TORCHES")
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    matrix = {k: ast.literal_eval(v) for k, v in re.findall(r"^ +(python|torch): (\[.*\])$", workflow, re.M)}
    assert matrix == {"python": pythons, "torch": torches}
    promised = project()
    classified = [re.fullmatch(r"Programming Language :: Python :: (3\.\d+)", str(c)) for c in promised["classifiers"]]  # type: ignore[attr-defined]
    assert [c[1] for c in classified if c] == pythons
    assert promised["requires-python"] == f">={pythons[0]}"
    first, last = torches[0], torches[-1]
    major, minor = last.split(".")
    assert f"torch>={first},<{major}.{int(minor) + 1}" in promised["dependencies"]
