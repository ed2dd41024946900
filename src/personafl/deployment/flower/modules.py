"""Modules of one's own that a recipe names: found and copied by `init`, handed to clients, looked at by the server.

They lie in the folder `modules` of a deployment and in `modules` beside each `client.toml`, where the apps of both find
them. A client imports its own copy, never code that the server sends.
"""

from __future__ import annotations

import ast
import importlib.metadata
import re
import shutil
import sys
import sysconfig
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from personafl import config
from personafl.core.errors import UserError
from personafl.deployment.own_code import named_code

MOST_BYTES = 10 * 2**20  # of all that is copied


@dataclass
class OwnModules:
    """Where the modules are that a recipe names, with those beside them that they import."""

    sources: dict[str, Path] = field(default_factory=dict)  # files and folders of packages, by their names
    installed: list[str] = field(default_factory=list)  # packages that have to be installed on every machine
    distributions: Mapping[str, list[str]] = field(
        default_factory=importlib.metadata.packages_distributions, repr=False
    )

    def add_installed(self, name: str) -> None:
        """Add an installed package, unless personafl brings it."""
        packages = map(_normalized, self.distributions.get(name, [name]))
        if name not in self.installed and not _own_requirements().issuperset(packages):
            self.installed.append(name)

    def is_installed(self, name: str, source: Path) -> bool:
        """Whether a module is that of an installed package, which is not copied."""
        places = [Path(sysconfig.get_path(kind)).resolve() for kind in ("purelib", "platlib")]
        return any(map(source.is_relative_to, places)) or name in self.distributions

    def copy(self, folder: Path) -> None:
        """Copy them into a folder, which is made where there is something to copy."""
        for name, source in self.sources.items():
            folder.mkdir(parents=True, exist_ok=True)
            if source.is_dir():
                shutil.copytree(source, folder / name, ignore=lambda _, names: {n for n in names if _is_skipped(n)})
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
        if found.is_installed(name, source):
            found.add_installed(name)
        else:
            _add(source, found)
    size = sum(f.stat().st_size for source in found.sources.values() for f in _files(source))
    if size > MOST_BYTES:
        names = ", ".join(found.sources)
        raise UserError(
            f"the recipe's own modules ({names}) have {size / 2**20:.0f} MiB, and at most {MOST_BYTES // 2**20} are "
            "copied to clients; install them as a package on every machine"
        )
    return found


def _own_requirements() -> set[str]:
    """The packages that are installed together with personafl, without its extras."""
    try:
        required = importlib.metadata.requires("personafl") or []
    except importlib.metadata.PackageNotFoundError:  # it is run from its sources
        required = []
    names = {_normalized(re.split(r"[^\w.-]", r)[0]) for r in required if "extra ==" not in r}
    return names | {"personafl"}


def _normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _add(source: Path, found: OwnModules) -> None:
    """Add a module, the modules beside it that it imports, and the names of the installed packages that it imports."""
    if source.name in found.sources:
        return
    found.sources[source.name] = source
    for file in _files(source):
        for name in sorted(_imported_names(file) - sys.stdlib_module_names) if file.suffix == ".py" else ():
            beside = (source.parent / f"{name}.py", source.parent / name)
            if others := [other for other in beside if other.is_file() or any(other.glob("*.py"))]:
                for other in others:
                    _add(other, found)
            elif name in found.distributions:
                found.add_installed(name)


def _files(source: Path) -> list[Path]:
    if source.is_file():
        return [source]
    inside = (p for p in sorted(source.rglob("*")) if p.is_file())
    return [p for p in inside if not any(_is_skipped(part) for part in p.relative_to(source).parts)]


def _is_skipped(part: str) -> bool:
    return part == "__pycache__" or part.startswith(".") or part.endswith(".pyc")


def _imported_names(file: Path) -> set[str]:
    """The top-level names that a file imports; none where it is not Python, such as a template."""
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
