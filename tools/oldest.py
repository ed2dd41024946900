"""Print the oldest version of every dependency that pyproject.toml allows, as constraints for pip.

    python tools/oldest.py > oldest.txt && pip install -c oldest.txt -e '.[dev]'

PyTorch has the version of constraints.txt: its oldest and its newest are tested with everything else at its newest
(`nox -l` has the sessions).
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from pathlib import Path

PROJECT = Path(__file__).parents[1] / "pyproject.toml"
CONSTRAINTS = PROJECT.with_name("constraints.txt")


def pins(requirements: Iterable[str]) -> dict[str, str]:
    """The lower bound of each requirement, which has to have one."""
    out = {}
    for text in requirements:
        found = re.fullmatch(r"([\w.-]+)(?:\[[\w,]+\])?>=([\w.]+)(?:,<[\w.]+)?", text)
        if found is None:
            raise SystemExit(f"{text}: must be name>=oldest,<next")
        name, oldest = found.groups()
        out[name] = oldest
    return out


def constraints() -> dict[str, str]:
    """The version of every package in constraints.txt."""
    lines = (line.partition("#")[0].strip() for line in CONSTRAINTS.read_text().splitlines())
    return {name: version for name, _, version in (line.partition("==") for line in lines if line)}


def main() -> None:
    project = tomllib.loads(PROJECT.read_text())["project"]
    found = pins([*project["dependencies"], *project["optional-dependencies"]["dev"]])
    found["torch"] = constraints()["torch"]
    print(*(f"{name}=={oldest}" for name, oldest in found.items()), sep="\n")


if __name__ == "__main__":
    main()
