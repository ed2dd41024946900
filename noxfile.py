"""The project's checks by name: `nox -l` lists them, `nox -s lint types` runs some.

`.ci/run` and the workflow run these sessions too, so a command stands here or in the README and nowhere else. With
`--no-venv` a session runs in the environment nox is in and installs nothing.
"""

from __future__ import annotations

from pathlib import Path

import nox

nox.needs_version = ">=2024.10"
nox.options.sessions = ["lint", "types", "tests"]
nox.options.reuse_venv = "yes"
nox.options.error_on_missing_interpreters = True

PYTHONS = ["3.11", "3.12", "3.13"]
TORCHES = ["2.11", "2.13", "2.15"]  # the oldest the package allows, the one of constraints.txt, and the newest
SUITE = ("python", "-m", "pytest", "-n", "2")
TESTERS = ("pytest", "pytest-xdist", "hypothesis")
CORE = ("core/test_rng.py", "core/test_wire.py", "storage")
FLOWER = "deployment/flower"
OTHERS = ("test_cli.py", "test_config.py", "config", *CORE, "data", "evaluation", "experiment", FLOWER, "cli")
"""Tests of what is made with other packages than PyTorch."""


def install(session: nox.Session, *what: str, pinned: bool = True) -> None:
    """Install the package with its developer tools, or what is named, in the versions of constraints.txt.

    A session that runs in the environment nox is in installs nothing. Without `pinned` pip chooses the versions.
    """
    if not isinstance(session.virtualenv, nox.virtualenv.PassthroughEnv):
        constraints = ("-c", "constraints.txt") if pinned else ()
        session.install(*constraints, *(what or ("-e", ".[dev]")))


def developer_tools() -> list[str]:
    """Return the requirements of the extra `dev`."""
    tools: list[str] = nox.project.load_toml("pyproject.toml")["project"]["optional-dependencies"]["dev"]
    return tools


@nox.session
def tests(session: nox.Session) -> None:
    """The README's test command."""
    install(session)
    session.run(*SUITE, *session.posargs)


@nox.session(python=PYTHONS)
@nox.parametrize("torch", TORCHES)
def versions(session: nox.Session, torch: str) -> None:
    """The tests with a version of Python and of PyTorch, such as `nox -s "versions-3.12(torch='2.11')"`."""
    install(session, "-e", ".[dev]", f"torch=={torch}.*", pinned=False)
    session.run("python", "-c", "import sys, torch; print(sys.version, torch.__version__)")
    session.run(*SUITE, *session.posargs)


@nox.session(python=PYTHONS[0])
def oldest(session: nox.Session) -> None:
    """Tests of what is made with other packages, each in the oldest version allowed; PyTorch as tested."""
    pins = Path(session.create_tmp()) / "oldest.txt"
    pins.write_text(str(session.run("python", "tools/oldest.py", silent=True)))
    install(session, "-e", ".[pandas,parquet,flower]", *TESTERS, "-c", str(pins), pinned=False)
    # Old packages call what newer ones have deprecated.
    parts = session.posargs or [f"tests/{name}" for name in OTHERS]
    session.run(*SUITE, "-W", "ignore::DeprecationWarning", *parts)


@nox.session
@nox.parametrize("flower", [nox.param(True, id="flower"), nox.param(False, id="plain")])
def newest(session: nox.Session, flower: bool) -> None:
    """The tests with the newest versions allowed, with the extra `flower`, which holds some back, and without."""
    tools = [tool for tool in developer_tools() if flower or not tool.startswith(("flwr", "cryptography"))]
    install(session, "--upgrade", "--upgrade-strategy", "eager", "-e", ".", *tools, pinned=False)
    session.run("python", "-m", "pip", "list")
    session.run(*SUITE, *session.posargs)


@nox.session
def coverage(session: nox.Session) -> None:
    """The tests, and which lines they reached; fails below the floor in pyproject.toml."""
    install(session)
    # From 3.12 on the interpreter can report lines itself, which costs 1 % of the time; tracing costs a half.
    recent = session.run("python", "-c", "import sys; print(sys.version_info >= (3, 12))", silent=True)
    core = "sysmon" if str(recent).strip() == "True" else "ctrace"
    session.run(*SUITE, "--cov", *session.posargs, env={"COVERAGE_CORE": core})


@nox.session
def machines(session: nox.Session) -> None:
    """The tests as other machines would run them: older processors, misaligned memory, one thread, busy cores."""
    install(session)
    session.run("python", "-m", "tests.machines", *session.posargs)


@nox.session
def mutants(session: nox.Session) -> None:
    """Small changes to the modules that pyproject.toml names, in a copy, and which of them no test notices."""
    install(session)
    install(session, "mutmut>=3.8,<4")
    session.run("mutmut", "run", *session.posargs)
    session.run("mutmut", "results")


@nox.session
def fuzz(session: nox.Session) -> None:
    """Wrong bytes for every reader; the tests have a shorter run of it."""
    install(session)
    session.run("python", "tools/fuzz.py", *(session.posargs or ["--count", "1000"]))


@nox.session
def gpu(session: nox.Session) -> None:
    """The tests that need a CUDA device."""
    install(session)
    session.run("python", "-m", "pytest", "-m", "gpu", *session.posargs)


@nox.session
def docs(session: nox.Session) -> None:
    """The pages against the code, and the examples."""
    install(session)
    session.run("python", "-m", "pytest", "tests/test_docs.py", "tests/test_examples.py", *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """Style and format."""
    install(session, *(t for t in developer_tools() if t.startswith("ruff")))
    session.run("ruff", "check", *(session.posargs or ["."]))
    session.run("ruff", "format", "--check", *(session.posargs or ["."]))


@nox.session
def types(session: nox.Session) -> None:
    """mypy over everything."""
    install(session)
    session.run("mypy", *session.posargs)


@nox.session
def wheel(session: nox.Session) -> None:
    """Build the distributions into dist/."""
    install(session)
    session.run("python", "-m", "build", "--outdir", str(Path("dist").absolute()), *session.posargs)
