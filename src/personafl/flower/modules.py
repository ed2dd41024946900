"""Modules of one's own that a recipe names: found and copied by `init`, handed to clients, looked at by the server.

They lie in the folder `modules` of a deployment and in `modules` beside each `client.toml`, where the apps of both find
them. A client imports its own copy, never code that the server sends.
"""

from __future__ import annotations

import ast
import importlib.metadata
import shutil
import sys
import sysconfig
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from personafl import config
from personafl.core.errors import UserError
from personafl.deployment.own_code import named_code

MOST_BYTES = 10 * 2**20  # of all that is copied
_SKIP = shutil.ignore_patterns("__pycache__", ".*", "*.pyc")


@dataclass
class OwnModules:
    """Where the modules are that a recipe names, with those beside them that they import."""

    sources: dict[str, Path] = field(default_factory=dict)  # files and folders of packages, by their names
    installed: list[str] = field(default_factory=list)  # packages that have to be installed on every machine

    def copy(self, folder: Path) -> None:
        """Copy them into a folder, which is made where there is something to copy."""
        for name, source in self.sources.items():
            folder.mkdir(parents=True, exist_ok=True)
            if source.is_dir():
                shutil.copytree(source, folder / name, ignore=_SKIP)
            else:
                shutil.copyfile(source, folder / name)


@contextmanager
def importable(folder: Path | None) -> Iterator[None]:
    """Let imports find files of a folder, behind all others."""
    before = list(sys.path)
    if folder is not None:
        sys.path.append(str(folder))
    try:
        yield
    finally:
        sys.path[:] = before


def find_modules(recipe: str) -> OwnModules:
    """Find the modules that a recipe, as TOML, names.

    Raises:
        UserError: One cannot be imported, or they are too large to be copied.
    """
    found = OwnModules()
    for key, path in named_code(tomllib.loads(recipe)):
        if key == "data.dataset":  # clients have data of their own; trials on one machine may need it
            with suppress(Exception):
                config.imported(path, key)
        else:
            config.imported(path, key)
        name = path.partition(":")[0].partition(".")[0]
        module = sys.modules.get(name)
        places = list(getattr(module, "__path__", [])) or [getattr(module, "__file__", None)]
        if name == "personafl" or places[0] is None:  # ours, or a part of Python itself
            continue
        source = Path(places[0]).resolve()
        if source.is_relative_to(sysconfig.get_path("stdlib")) and "site-packages" not in source.parts:
            continue
        if _is_installed(name, source):
            found.installed += [name] if name not in found.installed else []
        else:
            _add(source, found.sources)
    size = sum(f.stat().st_size for source in found.sources.values() for f in _files(source))
    if size > MOST_BYTES:
        names = ", ".join(found.sources)
        raise UserError(
            f"the recipe's own modules ({names}) have {size / 2**20:.0f} MiB, and at most {MOST_BYTES // 2**20} are "
            "copied to clients; install them as a package on every machine"
        )
    return found


def _is_installed(name: str, source: Path) -> bool:
    places = [Path(sysconfig.get_path(kind)).resolve() for kind in ("purelib", "platlib")]
    return any(map(source.is_relative_to, places)) or name in importlib.metadata.packages_distributions()


def _add(source: Path, found: dict[str, Path]) -> None:
    """Add a module, and the modules beside it that it imports."""
    if source.name in found:
        return
    found[source.name] = source
    for file in _files(source):
        for name in _imported_names(file) if file.suffix == ".py" else ():
            for other in (source.parent / f"{name}.py", source.parent / name):
                if name not in sys.stdlib_module_names and (other.is_file() or (other / "__init__.py").is_file()):
                    _add(other, found)


def _files(source: Path) -> list[Path]:
    if source.is_file():
        return [source]
    inside = (p for p in sorted(source.rglob("*")) if p.is_file())
    return [p for p in inside if not any(_is_skipped(part) for part in p.relative_to(source).parts)]


def _is_skipped(part: str) -> bool:
    return part == "__pycache__" or part.startswith(".") or part.endswith(".pyc")


def _imported_names(file: Path) -> set[str]:
    """The first parts of the names of modules that a file imports; none of one that is no Python, such as a template."""
    names: set[str] = set()
    try:
        parsed = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):
        return names
    for node in ast.walk(parsed):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
    return names
