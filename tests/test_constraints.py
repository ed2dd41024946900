"""The versions that were tested: constraints.txt, within the bounds of pyproject.toml."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from tools import oldest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = ("dev", "pandas", "parquet", "flower")
_extras = PROJECT["optional-dependencies"]
DIRECT = sorted({*PROJECT["dependencies"], *(text for name in EXTRAS for text in _extras[name])})


@pytest.mark.parametrize("text", DIRECT)
def test_the_tested_version_of_a_dependency_is_within_its_bounds(text: str) -> None:
    requirement = Requirement(text)
    version = oldest.constraints()[canonicalize_name(requirement.name)]
    assert version in requirement.specifier


def test_every_line_is_one_version_of_one_package_and_names_no_build() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[a-z0-9.-]+==[a-z0-9.]+", line) for line in lines)
    pinned = oldest.constraints()
    assert len(pinned) == len(lines) > len(DIRECT)
    assert all(name == canonicalize_name(name) and str(Version(v)) for name, v in pinned.items())


def test_packages_that_others_bring_are_pinned_too() -> None:
    """numpy comes with nothing; click with typer, grpcio with flwr, jinja2 with torch, pluggy with pytest."""
    assert {"click", "grpcio", "jinja2", "pluggy"} <= oldest.constraints().keys()


def test_what_is_documented_and_checked_installs_these_versions() -> None:
    readme, contributing, ci = ((ROOT / name).read_text() for name in ("README.md", "CONTRIBUTING.md", ".ci/run"))
    first, second, *_ = re.findall(r"^```bash\n(.*?)^```", readme, re.S | re.M)
    assert "pip install -q -c constraints.txt . " in first
    assert "pip install -q -c constraints.txt -e '.[dev]'" in second
    assert "pip install -c constraints.txt -e '.[dev]'" in contributing
    own = [line for line in ci.splitlines() if re.search(r"pip\"? install", line) and "unpack" not in line]
    assert own and all("constraints.txt" in line for line in own)
