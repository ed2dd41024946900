"""What is imported when it is first asked for: attributes of a package (PEP 562), and entries of a registry.

A deployed client is a new process for every message and runs one method on one kind of data; what it does not use it
must not wait for.
"""

from __future__ import annotations

import importlib
import sys
from collections import UserDict
from collections.abc import Collection, Mapping
from typing import Any, TypeVar, cast

T = TypeVar("T")


def attributes(package: str, where: Mapping[str, Collection[str]], name: str) -> Any:
    """An attribute of a package, from the module that has it; `where` is which module has which, and may be had too."""
    if (inner := f"{package}.{name}") in where:
        return importlib.import_module(inner)
    for module, names in where.items():
        if name in names:
            return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module {package!r} has no attribute {name!r}")


class Registry(UserDict[str, T]):
    """Entries by name, each given as `package.module:attribute` and imported when it is asked for.

    Names, their number and `in` import nothing.
    """

    def __init__(self, paths: Mapping[str, str]) -> None:
        super().__init__()
        self.data: dict[str, Any] = dict(paths)  # an entry, or its path until it is imported
        self.modules: dict[str, set[str]] = {}  # the modules entries come from, and what each of them has
        for module, _, attribute in (path.partition(":") for path in paths.values()):
            self.modules.setdefault(module, set()).add(attribute)

    def __getitem__(self, name: str) -> T:
        entry = self.data[name]
        if isinstance(entry, str):
            module, _, attribute = entry.partition(":")
            entry = self.data[name] = getattr(importlib.import_module(module), attribute)
        return cast("T", entry)

    def name_of(self, entry: object) -> str | None:
        """What an entry is called, None where it is none; what is not imported yet cannot be it."""
        return next((n for n in self if self._is_imported(n) and self[n] is entry), None)

    def _is_imported(self, name: str) -> bool:
        known = self.data[name]
        return not isinstance(known, str) or known.partition(":")[0] in sys.modules
