"""Count the lines of Python code in a folder, without blank lines, comments and docstrings.

    python tools/count_code.py                           src/ as it is now
    python tools/count_code.py tests --json              another folder, for programs
    python tools/count_code.py --commit v0.1.0           src/ at a commit, which is not checked out

It prints the total, a line for each package, the files of more than 500 lines, and the functions of more than 60. A
package is a folder directly below the outermost one that has Python files (`src/personafl` for `src`).

A line of code is a line with at least one token other than a comment, outside of docstrings. A docstring is a string
that is the first statement of a module, class or function, or a statement that follows an assignment. The lengths of
files and functions are counted in lines as an editor shows them, blank lines, comments and docstrings included.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import subprocess
import tarfile
import tokenize
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parent.parent
LONG_FILE = 500
LONG_FUNCTION = 60
TOP_LEVEL = "(top level)"
"""The name under which files that are in no package are counted."""

_NO_CODE = {
    tokenize.COMMENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
    tokenize.INDENT,
    tokenize.NEWLINE,
    tokenize.NL,
}
Position = tuple[int, int]  # a line, counted from 1, and a column


@dataclass(frozen=True)
class FunctionSize:
    """A function or method."""

    path: str
    line: int
    name: str
    lines: int
    code_lines: int


@dataclass(frozen=True)
class FileSize:
    """A source file with its functions."""

    path: str
    lines: int
    code_lines: int
    functions: tuple[FunctionSize, ...]


@dataclass(frozen=True)
class PackageSize:
    """The files of a package, together."""

    name: str
    files: int
    code_lines: int


def docstring_spans(tree: ast.Module) -> list[tuple[Position, Position]]:
    """Return where each docstring begins and ends; columns are in bytes, as `ast` counts them."""
    spans = []
    for node in ast.walk(tree):
        has_docstring = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        for field in ("body", "orelse", "finalbody"):
            statements = getattr(node, field, None)
            if not isinstance(statements, list):
                continue  # the body of a lambda or of a conditional expression
            for i, statement in enumerate(statements):
                if not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)):
                    continue
                follows = i > 0 and isinstance(statements[i - 1], ast.Assign | ast.AnnAssign)
                first = i == 0 and has_docstring and field == "body"
                if isinstance(statement.value.value, str) and (first or follows):
                    end = (statement.end_lineno or statement.lineno, statement.end_col_offset or 0)
                    spans.append(((statement.lineno, statement.col_offset), end))
    return spans


def _lines(source: str) -> list[str]:
    """Split a source at its line ends alone; `str.splitlines` splits at form feeds, too."""
    return list(io.StringIO(source))


def code_lines(source: str) -> set[int]:
    """Return the numbers of the lines that hold code."""
    spans = docstring_spans(ast.parse(source))
    lines = _lines(source)

    def in_docstring(token: tokenize.TokenInfo) -> bool:
        row, column = token.start
        start = row, len(lines[row - 1][:column].encode())
        return token.type == tokenize.STRING and any(begin <= start < end for begin, end in spans)

    numbers: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE and not in_docstring(token):
            numbers.update(range(token.start[0], token.end[0] + 1))
    return {number for number in numbers if lines[number - 1].strip()}


def _functions(node: ast.AST, outer: str = "") -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Yield all functions within a node with their qualified names."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{outer}{child.name}", child
            yield from _functions(child, f"{outer}{child.name}.")
        else:
            yield from _functions(child, f"{outer}{child.name}." if isinstance(child, ast.ClassDef) else outer)


def measure_file(path: str, source: str) -> FileSize:
    """Count the lines of a file and of each of its functions.

    Raises:
        SyntaxError: The source is not valid Python; the error names the file.
    """
    try:
        tree, numbers = ast.parse(source, path), code_lines(source)
    except tokenize.TokenError as error:
        raise SyntaxError(f"{path}: {error}") from None
    functions = []
    for name, node in _functions(tree):
        end = node.end_lineno or node.lineno
        code = sum(node.lineno <= number <= end for number in numbers)
        functions.append(FunctionSize(path, node.lineno, name, end - node.lineno + 1, code))
    return FileSize(path, len(_lines(source)), len(numbers), tuple(functions))


def read_folder(folder: Path) -> dict[str, str]:
    """Return the Python files below a folder by their paths relative to it; hidden folders are left out."""
    relative = sorted(path.relative_to(folder) for path in folder.rglob("*.py"))
    visible = [path for path in relative if not any(part.startswith(".") for part in path.parts)]
    return {path.as_posix(): (folder / path).read_text(encoding="utf-8") for path in visible}


def read_commit(commit: str, folder: str, repository: Path = ROOT) -> dict[str, str]:
    """Return the Python files of a folder of a commit by their paths relative to the folder.

    Raises:
        SystemExit: Git does not know the commit, or the commit has no such folder.
    """
    command = ["git", "-C", str(repository), "archive", "--format=tar", commit, "--", folder]
    archived = subprocess.run(command, capture_output=True, check=False)
    if archived.returncode:
        raise SystemExit(f"{commit}, {folder}: {archived.stderr.decode().strip()}")
    sources = {}
    with tarfile.open(fileobj=io.BytesIO(archived.stdout)) as archive:
        for member in archive.getmembers():
            content = archive.extractfile(member) if member.isfile() else None
            if content is not None and member.name.endswith(".py"):
                path = PurePosixPath(member.name).relative_to(PurePosixPath(folder))
                sources[path.as_posix()] = content.read().decode()
    return dict(sorted(sources.items()))


def measure(sources: Mapping[str, str]) -> list[FileSize]:
    """Count the lines of files, given as their texts by path."""
    return [measure_file(path, source) for path, source in sources.items()]


def outermost_package(paths: list[str]) -> PurePosixPath:
    """Return the outermost folder that has Python files of its own, or several folders with Python files."""
    folders = [PurePosixPath(path).parent.parts for path in paths]
    common: list[str] = []
    for parts in zip(*folders, strict=False):  # ends with the folder of the highest file
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    return PurePosixPath(*common)


def group_by_package(files: list[FileSize]) -> list[PackageSize]:
    """Add up the files of each package; files that are in no package come last."""
    top = outermost_package([file.path for file in files])
    groups: dict[str, list[FileSize]] = {}
    for file in files:
        below = PurePosixPath(file.path).relative_to(top).parts
        groups.setdefault(below[0] if len(below) > 1 else TOP_LEVEL, []).append(file)
    names = sorted(groups, key=lambda name: (name == TOP_LEVEL, name))
    return [PackageSize(name, len(groups[name]), sum(f.code_lines for f in groups[name])) for name in names]


def long_files(files: list[FileSize]) -> list[FileSize]:
    """Return the files of more than LONG_FILE lines, the longest first."""
    return sorted((f for f in files if f.lines > LONG_FILE), key=lambda f: (-f.lines, f.path))


def long_functions(files: list[FileSize]) -> list[FunctionSize]:
    """Return the functions of more than LONG_FUNCTION lines, the longest first."""
    functions = [f for file in files for f in file.functions if f.lines > LONG_FUNCTION]
    return sorted(functions, key=lambda f: (-f.lines, f.path, f.line))


def as_json(files: list[FileSize]) -> str:
    """Return all counts as a JSON object."""
    report = {
        "files": len(files),
        "lines": sum(f.lines for f in files),
        "code_lines": sum(f.code_lines for f in files),
        "packages": [asdict(package) for package in group_by_package(files)],
        "long_files": [{"path": f.path, "lines": f.lines, "code_lines": f.code_lines} for f in long_files(files)],
        "long_functions": [asdict(function) for function in long_functions(files)],
    }
    return json.dumps(report, indent=1)


def as_text(files: list[FileSize]) -> str:
    """Return all counts as lines for people."""
    lines = [f"{sum(f.code_lines for f in files):,} lines of code in {len(files)} files", ""]
    lines += [f"{p.code_lines:8,}  {p.files:4} files  {p.name}" for p in group_by_package(files)]
    if found := long_files(files):
        lines += ["", f"Files of more than {LONG_FILE} lines:"]
        lines += [f"{f.lines:8,}  {f.path}" for f in found]
    if functions := long_functions(files):
        lines += ["", f"Functions of more than {LONG_FUNCTION} lines:"]
        lines += [f"{f.lines:8,}  {f.path}:{f.line} {f.name}" for f in functions]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", default="src", help="a folder of this repository; default src")
    parser.add_argument("--commit", help="count this commit; default the files as they are")
    parser.add_argument("--json", action="store_true", help="print JSON and nothing else")
    options = parser.parse_args(arguments)
    if options.commit is not None:
        sources = read_commit(options.commit, options.folder)
    else:
        sources = read_folder(ROOT / options.folder)
    if not sources:
        raise SystemExit(f"{options.folder}: there is no Python file in it")
    files = measure(sources)
    print(as_json(files) if options.json else as_text(files))


if __name__ == "__main__":
    main()
