"""The mutation tool: what it changes, what it leaves alone, and that it finds a survivor."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tools import mutants

SOURCE = '''"""A docstring of 1 line."""

LIMIT: dict[str, int] = {"a": 3}


class Thing:
    """Another, with 2 < 3."""

    share: float = 0.5

    def both(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        """The last, x + y."""
        if y is None:
            raise ValueError(f"y={1 + 1}: must be given, at least {2}")
        warnings.warn("less than 7", stacklevel=4)
        total = x + y
        total = torch.clamp(total, min=0, max=self.share)  # naïve: 5 > 4
        return [t for t in total if t > 1]
'''


def changed(source: str, m: mutants.Mutant) -> str:
    before = source.encode()
    return (before[: m.start] + m.text.encode() + before[m.end :]).decode()


def lines(kind: str) -> set[str]:
    """The lines that mutants of a kind put in place of others."""
    before, out = SOURCE.splitlines(), set()
    for m in mutants.mutants_of("x.py", SOURCE.encode()):
        if m.kind == kind:
            after = changed(SOURCE, m).splitlines()
            out |= {new.split("  #")[0].strip() for old, new in zip(before, after, strict=True) if old != new}
    return out


def test_every_mutant_parses_and_differs() -> None:
    found = mutants.mutants_of("x.py", SOURCE.encode())
    trees = {ast.dump(ast.parse(changed(SOURCE, m))) for m in found}
    assert ast.dump(ast.parse(SOURCE)) not in trees
    assert len({(m.start, m.end, m.text) for m in found}) == len(found)


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        ("operator", {"total = x - y"}),
        ("operand", {"total = (x)", "total = (y)"}),
        ("comparison", {"if y is not None:", *(f"return [t for t in total if t {op} 1]" for op in (">=", "<="))}),
        (
            "constant",
            {
                'LIMIT: dict[str, int] = {"a": 4}',
                "share: float = 1.0",
                "total = torch.clamp(total, min=1, max=self.share)",
                "return [t for t in total if t > 2]",
                "return [t for t in total if t > 0]",
            },
        ),
        ("condition", {"if not (y is None):", "return [t for t in total if True]"}),
        ("refusal", {"if False:"}),
        ("keyword", {"total = torch.clamp(total, max=self.share)", "total = torch.clamp(total, min=0)"}),
        ("statement", {"pass"}),  # the second assignment: without the first there would be no total
        ("return", {"return x"}),
    ],
)
def test_places_that_are_changed(kind: str, wanted: set[str]) -> None:
    """No docstring, annotation, message or `stacklevel` is among them."""
    assert lines(kind) == wanted


def test_arguments_are_swapped_and_twins_called() -> None:
    source = b"def f(a, b):\n    return torch.where(a, max(b, 2), b.any())\n"
    found = {changed(source.decode(), m).splitlines()[1].strip() for m in mutants.mutants_of("x.py", source)}
    for wanted in ("where(max(b, 2), a, b.any())", "where(a, min(b, 2), b.any())", "where(a, max(b, 2), b.all())"):
        assert f"return torch.{wanted}" in found


def test_a_seed_draws_the_same_mutants_and_a_larger_count_more_of_them() -> None:
    few, many = (mutants.drawn(["sparse/*"], 3, count) for count in (5, 9))
    assert many[:5] == few
    assert mutants.drawn(["sparse/*"], 4, 5) != few


def test_every_target_has_tests_that_exist() -> None:
    files = mutants.targets([])
    for folder in ("methods", "sparse", "core", "evaluation", "data"):
        assert any(f.startswith(f"{mutants.PACKAGE}/{folder}/") for f in files)
    named = {t for f in files for stage in mutants.stages_of(f) for t in stage if t.startswith("tests")}
    assert all((mutants.ROOT / t).exists() for t in (*named, *mutants.BROAD))
    for pattern in mutants.TARGETS:  # none that has lost its file
        for one in mutants.spread(pattern):
            assert list((mutants.ROOT / mutants.PACKAGE).glob(one)), one


def small(root: Path) -> None:
    """A package with one function and one test that looks at half of it."""
    package = root / "src/personafl/sparse"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").write_text("")
    (package / "__init__.py").write_text("")
    (package / "halves.py").write_text("def sign(x: int) -> bool:\n    return x > 0\n")
    (root / "tests/sparse").mkdir(parents=True)
    test = "from personafl.sparse.halves import sign\n\n\ndef test_sign():\n    assert sign(5) and not sign(-5)\n"
    (root / "tests/sparse/test_halves.py").write_text(test)
    for name in mutants.REFERENCES:
        (root / name).write_text("def test_nothing():\n    pass\n")
    (root / "tools").mkdir()
    (root / "tools/mutants.py").write_bytes(Path(mutants.__file__).read_bytes())


@pytest.mark.slow
def test_a_run_kills_what_is_tested_keeps_the_rest_and_goes_on_where_it_stopped(tmp_path: Path) -> None:
    """x > 0 to <= and to 'x > 1' are told from it by 5 and -5: the first alone; >= and 1 survive."""
    small(tmp_path)
    command = [sys.executable, "tools/mutants.py", "--nearest-only", "--jobs", "2", "--out", "out"]

    def run(count: int) -> list[dict[str, str]]:
        subprocess.run([*command, "--count", str(count)], cwd=tmp_path, check=True, capture_output=True)
        return [json.loads(line) for line in (tmp_path / "out/results.jsonl").read_text().splitlines()]

    first = run(1)
    assert len(first) == 1
    found = run(10)
    assert found[:1] == first
    assert {(r["text"], r["status"]) for r in found} == {("<=", "killed"), (">=", "survived"), ("1", "survived")}
    assert all("test_sign" in r["by"] for r in found if r["status"] == "killed")
    report = (tmp_path / "out/survivors.md").read_text()
    assert report.startswith("# 2 of 3 mutants survived") and "+    return x >= 0" in report
    assert "x > 0" in (tmp_path / "src/personafl/sparse/halves.py").read_text()  # the tree is as it was


def test_a_run_that_is_stopped_leaves_nothing_behind(tmp_path: Path) -> None:
    small(tmp_path)
    endless = (
        "import os, time\n\n\ndef test_nothing():\n    open(os.environ['BEGUN'], 'w').close()\n    time.sleep(600)\n"
    )
    (tmp_path / "tests/sparse/test_halves.py").write_text(endless)
    scratch, begun = tmp_path / "scratch", tmp_path / "begun"
    scratch.mkdir()
    command = [sys.executable, "tools/mutants.py", "--nearest-only", "--out", "out", "--scratch", str(scratch)]
    environment = {**os.environ, "BEGUN": str(begun)}
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as run:
        while not begun.exists() and run.poll() is None:
            time.sleep(0.05)
        run.terminate()
        assert run.wait() != 0
    assert begun.exists() and not list(scratch.iterdir())
