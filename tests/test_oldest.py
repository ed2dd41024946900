"""The oldest versions of dependencies, from the bounds in pyproject.toml."""

from __future__ import annotations

import re
import tomllib

import pytest
from tools import oldest

PROJECT = tomllib.loads(oldest.PROJECT.read_text())["project"]
USED = ("pandas", "parquet", "flower")  # extras that the package uses


def test_a_pin_is_the_lower_bound() -> None:
    asked = ["numpy>=1.26,<3", "torch>=2.11,<2.16", "flwr[simulation]>=1.40,<1.43", "tomli-w>=1.0"]
    assert oldest.pins(asked) == {"numpy": "1.26", "torch": "2.11", "flwr": "1.40", "tomli-w": "1.0"}


@pytest.mark.parametrize("wrong", ["numpy", "numpy<3", "numpy==1.26", "numpy>=1.26,!=2.0,<3"])
def test_a_requirement_without_a_plain_lower_bound_is_refused(wrong: str) -> None:
    with pytest.raises(SystemExit, match="must be name>=oldest,<next"):
        oldest.pins([wrong])


def test_all_that_the_package_uses_is_bounded_on_both_sides() -> None:
    extras = PROJECT["optional-dependencies"]
    asked = PROJECT["dependencies"] + [text for name in USED for text in extras[name]]
    assert not [text for text in asked if not re.fullmatch(r"[\w-]+>=[\d.]+,<[\d.]+", text)]
    tested = [re.sub(r"\[.*\]", "", text) for text in extras["dev"]]
    assert all(text in tested for name in USED for text in extras[name])  # the same bounds where tests run


def test_the_tool_prints_a_line_for_each(capsys: pytest.CaptureFixture[str]) -> None:
    oldest.main()
    lines = capsys.readouterr().out.splitlines()
    assert {"numpy==1.26", "pyarrow==17", "pytest==8", "torch==2.13.0"} <= set(lines)
    wanted = {re.split(r"\[|>=", text)[0] for text in PROJECT["dependencies"] + PROJECT["optional-dependencies"]["dev"]}
    assert {line.partition("==")[0] for line in lines} == wanted
