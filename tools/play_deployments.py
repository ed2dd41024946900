"""Play deployments whose server and nodes run in this process, and keep all files that they leave.

    PYTHONPATH=TREE/src:TREE python -P tools/play_deployments.py OUT [--only PATTERN ...]

TREE is the source tree that plays; `tools/compare_commits.py` runs this file with two of them. So it uses only what
both have: the public names of `personafl` and `tests.deployment.worlds`, and the settings that
`tests.deployment.test_coordinator` tests, where that module has them. Each deployment has a folder in OUT with the
folders of its server and its clients. OUT/deployments.json names them all, with the error of each that failed.
"""

from __future__ import annotations

import argparse
import importlib
import json
import traceback
import warnings
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
from tests.deployment import worlds

import personafl

Deployment = tuple[str | dict[str, Any], Mapping[str, Mapping[str, Any]]]
"""A method, by name or with its settings, and what is changed in the sections of the recipe of the tests."""

PLUG_INS: dict[str, dict[str, Any]] = {
    "a robust mean": {"name": "fedavg", "robust": "median"},
    "weights by contribution": {"name": "fedrep", "weights": "cowa"},
    "an inherited model": {"name": "fedavg", "inherit": {"transfer": "mmd"}},
    "a rule of inference": {"name": "ditto", "prior_free": True, "inference": "batch"},
}


def list_deployments() -> dict[str, Deployment]:
    """Return every method with the settings of the tests, methods with plug-ins, and the settings that are tested.

    Names are lower-case and serve as folders.
    """
    deployments: dict[str, Deployment] = {f"method {name}": (name, {}) for name in personafl.ALGORITHMS}
    deployments |= {f"plug-in {name}": (method, {}) for name, method in PLUG_INS.items()}
    try:
        tested = importlib.import_module("tests.deployment.test_coordinator").WORLDS
    except (ImportError, AttributeError):
        return deployments  # the comparison then says that this tree does not have them
    return deployments | {f"setting {name}": world for name, world in tested.items()}


def play(out: Path, patterns: Sequence[str]) -> dict[str, str]:
    """Play the deployments whose names match a pattern; return the error of each, or an empty text."""
    errors: dict[str, str] = {}
    for name, (method, changes) in list_deployments().items():
        if patterns and not any(fnmatch(name, pattern) for pattern in patterns):
            continue
        try:
            server, _ = worlds.deployed(worlds.recipe(method, **changes), out / name)
            server.run()
            errors[name] = ""
        except Exception as error:  # the other deployments can be played all the same
            traceback.print_exc()
            errors[name] = f"{type(error).__name__}: {error}"
    return errors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", action="append", default=[], help="a pattern of names, such as 'method fed*'")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    options.out.mkdir(parents=True, exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        worlds.quicken(patch)
        errors = play(options.out, options.only)
    (options.out / "deployments.json").write_text(json.dumps(errors, indent=1) + "\n")


if __name__ == "__main__":
    main()
