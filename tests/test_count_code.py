"""The counts of lines of code: what is code, what is a docstring, and what is long."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from tools import count_code

SOURCE = '''"""A docstring
of two lines."""

# A comment.
LIMIT = 3  # code with a comment
"""What the limit is for."""

TEXT = """two lines

of code"""


class Thing:
    """A docstring."""

    size: int = 4
    """An attribute's docstring."""

    def area(self) -> int:
        ("A docstring "
         "in parts.")
        é = "a value"; """a docstring beside code"""
        """a string that is code"""
        return (
            self.size
            # a comment between
            * self.size
        )
'''
CODE = {5, 8, 10, 13, 16, 19, 20, 21, 22, 23, 24, 25, 27, 28}
"""Lines 20 and 21 hold the parentheses of a docstring."""


def test_code_is_all_but_blank_lines_comments_and_docstrings() -> None:
    lines = SOURCE.splitlines()
    numbers = count_code.code_lines(SOURCE)
    assert [lines[n - 1] for n in sorted(numbers)] == [lines[n - 1] for n in sorted(CODE)]


def test_a_string_after_an_assignment_in_a_branch_is_a_docstring() -> None:
    source = 'if LARGE:\n    "code"\n    A = 1\n    "a docstring"\nelse:\n    "code"\n    B = 2\n    "a docstring"\n'
    assert count_code.code_lines(source) == {1, 2, 3, 5, 6, 7}


def test_f_strings_of_several_lines_are_code() -> None:
    assert count_code.code_lines('x = f"""{1}\n\n  two\n"""\n') == {1, 3, 4}


def test_functions_have_qualified_names_and_lengths_with_all_lines() -> None:
    source = (
        "class A:\n    def f(self):\n        '''A docstring.'''\n\n        def g():\n            return 1\n\n"
        "        return g\n\n\nasync def h():\n    pass\n"
    )
    functions = count_code.measure_file("a.py", source).functions
    assert [(f.name, f.line, f.lines, f.code_lines) for f in functions] == [
        ("A.f", 2, 7, 4),
        ("A.f.g", 5, 2, 2),
        ("h", 11, 2, 2),
    ]


def test_packages_are_the_folders_below_the_outermost_one_with_files() -> None:
    sources = {
        "pkg/__init__.py": "a = 1\n",
        "pkg/b/c.py": "a = 1\nb = 2\n",
        "pkg/b/d/e.py": "a = 1\n",
        "pkg/f/g.py": "",
    }
    packages = count_code.group_by_package(count_code.measure(sources))
    assert [(p.name, p.files, p.code_lines) for p in packages] == [("b", 2, 3), ("f", 1, 0), ("(top level)", 1, 1)]


def test_long_files_and_functions_are_named() -> None:
    body = "".join(f"    x{i} = {i}\n" for i in range(count_code.LONG_FUNCTION - 1))
    at_limit = f"def f():\n{body}"
    sources = {
        "a/limit.py": at_limit,
        "a/long.py": at_limit + "    y = 1\n",
        "b/file.py": "# a comment\n" * (count_code.LONG_FILE + 1),
        "b/limit.py": "\n" * count_code.LONG_FILE,
    }
    report = json.loads(count_code.as_json(count_code.measure(sources)))
    assert report["long_functions"] == [
        {"path": "a/long.py", "line": 1, "name": "f", "lines": 61, "code_lines": 61},
    ]
    assert report["long_files"] == [{"path": "b/file.py", "lines": 501, "code_lines": 0}]
    assert report["code_lines"] == 60 + 61


def test_a_file_that_is_no_python_is_named() -> None:
    with pytest.raises(SyntaxError, match=r"a\.py"):
        count_code.measure_file("a.py", "def f(:\n")


def test_this_repository_has_code_in_every_package(capsys: pytest.CaptureFixture[str]) -> None:
    count_code.main(["--json"])
    report = json.loads(capsys.readouterr().out)
    assert {p["name"] for p in report["packages"]} >= {"core", "models", count_code.TOP_LEVEL}
    assert report["code_lines"] == sum(p["code_lines"] for p in report["packages"]) > 10_000
    count_code.main([])
    assert capsys.readouterr().out.startswith(f"{report['code_lines']:,} lines of code in {report['files']} files\n")


def git(folder: Path, *arguments: str) -> None:
    command = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
    subprocess.run(command, check=True, capture_output=True)


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_a_commit_is_counted_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "src" / "pkg").mkdir(parents=True)
    path = tmp_path / "src" / "pkg" / "a.py"
    path.write_text("a = 1\nb = 2\n")
    (tmp_path / "other.py").write_text("a = 1\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "first")
    path.write_text("a = 1\n")
    assert count_code.read_commit("HEAD", "src", tmp_path) == {"pkg/a.py": "a = 1\nb = 2\n"}
    assert count_code.read_folder(tmp_path / "src") == {"pkg/a.py": "a = 1\n"}
    with pytest.raises(SystemExit, match="nowhere"):
        count_code.read_commit("HEAD", "nowhere", tmp_path)
