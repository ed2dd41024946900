"""Print the oldest version of every dependency that pyproject.toml allows, as constraints for pip.

    python tools/oldest.py > oldest.txt && pip install -c oldest.txt -e '.[dev]'

PyTorch is left out: its oldest and its newest version are tested with everything else at its newest (`nox -l` has the
sessions), and which build of it there is depends on the machine.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from pathlib import Path

PROJECT = Path(__file__).parents[1] / "pyproject.toml"
LEFT_OUT = ("torch",)


def pins(requirements: Iterable[str]) -> dict[str, str]:
    """The lower bound of each requirement, which has to have one."""
    out = {}
    for text in requirements:
        found = re.fullmatch(r"([\w.-]+)(?:\[[\w,]+\])?>=([\w.]+)(?:,<[\w.]+)?", text)
        if found is None:
            raise SystemExit(f"{text}: must be name>=oldest,<next")
        name, oldest = found.groups()
        if name not in LEFT_OUT:
            out[name] = oldest
    return out


def main() -> None:
    project = tomllib.loads(PROJECT.read_text())["project"]
    found = pins([*project["dependencies"], *project["optional-dependencies"]["dev"]])
    print(*(f"{name}=={oldest}" for name, oldest in found.items()), sep="\n")


if __name__ == "__main__":
    main()
