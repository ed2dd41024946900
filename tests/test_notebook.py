"""The example notebook runs, and shows what it gives."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if not all(find_spec(needed) for needed in ("nbclient", "ipykernel", "pandas")):
    pytest.skip("the extra dev is not installed", allow_module_level=True)

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "examples" / "notebook.ipynb"

# A sum of floats may depend on the processor, and then an answer. The notebook's clients have 25 test samples: one that
# is answered otherwise is 4 points of its client, the worst perhaps, and less of all means.
POINTS = 4.01


def outputs(path: Path) -> list[list[dict[str, str]]]:
    """The outputs of each cell with code: texts by kind."""
    found = []
    for cell in json.loads(path.read_text())["cells"]:
        if cell["cell_type"] == "code":
            held = [o.get("data", {"stream": o.get("text")}) for o in cell["outputs"]]
            found.append([{kind: "".join(text) for kind, text in o.items()} for o in held])
    return found


def assert_same(now: str, then: str, within: float) -> None:
    """The same words, and numbers that differ by no more."""
    number = r"\d+(?:\.\d+)?"
    assert re.split(number, now) == re.split(number, then)
    for a, b in zip(re.findall(number, now), re.findall(number, then), strict=True):
        assert abs(float(a) - float(b)) <= within, (now, then)


def table(page: str) -> list[dict[str, str]]:
    head = re.findall(r"<th>(.*?)</th>", page)
    rows = re.findall(r"<tr><td>(.*?)</td></tr>", page)
    return [dict(zip(head, row.split("</td><td>"), strict=True)) for row in rows]


@pytest.fixture(scope="module")
def again(tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, str]]]:
    out = tmp_path_factory.mktemp("notebook") / "again.ipynb"
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    words: list[Any] = [sys.executable, ROOT / "tools" / "notebook.py", NOTEBOOK, "--out", out]
    subprocess.run(words, check=True, env=env, capture_output=True)
    return outputs(out)


def test_stored_outputs_are_what_the_notebook_gives(again: list[list[dict[str, str]]]) -> None:
    stored = outputs(NOTEBOOK)
    assert [[o.keys() for o in cell] for cell in again] == [[o.keys() for o in cell] for cell in stored]
    for now, then in zip((o for c in again for o in c), (o for c in stored for o in c), strict=True):
        for kind in now.keys() & {"text/plain", "stream"}:
            assert_same(now[kind], then[kind], POINTS)


def test_the_stored_table_is_the_one_the_notebook_gives(again: list[list[dict[str, str]]]) -> None:
    (now,), (then,) = (
        [table(o["text/html"]) for c in found for o in c if 'class="methods"' in o.get("text/html", "")]
        for found in (again, outputs(NOTEBOOK))
    )
    assert [row["Method"] for row in now] == ["local", "fedavg-ft", "ditto"]
    for new, old in zip(now, then, strict=True):
        assert new.keys() == old.keys()
        for column in new.keys() - {"Seconds"}:
            shared = column in ("No shift", "Full shift", "Average", "Worst")
            assert_same(new[column], old[column], POINTS if shared else 0.0)


def test_progress_ends_as_a_line_and_the_figure_is_a_picture(again: list[list[dict[str, str]]]) -> None:
    shown = [o for cell in again for o in cell]
    (progress,) = (o["text/html"] for o in shown if "rounds in" in o.get("text/html", ""))
    assert re.fullmatch(r"60 of 60 rounds in \d+ s", progress)  # three methods of twenty
    assert len([o for o in shown if "image/png" in o]) == 1


def test_a_stored_notebook_is_small_and_tells_nothing_of_a_machine() -> None:
    assert NOTEBOOK.stat().st_size < 100_000
    texts = [t for c in outputs(NOTEBOOK) for o in c for kind, t in o.items() if kind != "image/png"]
    told = "\n".join([*texts, json.dumps(json.loads(NOTEBOOK.read_text())["metadata"])])
    assert platform.node() not in told
    assert not re.search(r"/(home|root|tmp|usr|work|Users|var)/", told)
