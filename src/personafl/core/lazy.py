"""What is imported when it is first asked for: attributes of a package (PEP 562), and entries of a registry.

A deployed client is a new process for every message and runs one method on one kind of data; what it does not use it
must not wait for.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Collection, Iterator, Mapping, MutableMapping
from typing import Any, TypeVar

T = TypeVar("T")


def attributes(package: str, where: Mapping[str, Collection[str]], name: str) -> Any:
    """An attribute of a package, from the module that has it; `where` is which module has which, and may be had too."""
    if (inner := f"{package}.{name}") in where:
        return importlib.import_module(inner)
    for module, names in where.items():
        if name in names:
            return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module {package!r} has no attribute {name!r}")


class Registry(MutableMapping[str, T]):
    """Entries by name, each given as `package.module:attribute` and imported when it is asked for.

    Names, their number and `in` import nothing.
    """

    def __init__(self, paths: Mapping[str, str]) -> None:
        self._paths = dict(paths)
        self._entries: dict[str, T] = {}  # that are imported, or were set

    def __getitem__(self, name: str) -> T:
        if name not in self._entries:
            module, _, attribute = self._paths[name].partition(":")
            self._entries[name] = getattr(importlib.import_module(module), attribute)
        return self._entries[name]

    def __setitem__(self, name: str, entry: T) -> None:
        self._paths.setdefault(name, "")
        self._entries[name] = entry

    def __delitem__(self, name: str) -> None:
        del self._paths[name]
        self._entries.pop(name, None)

    def __iter__(self) -> Iterator[str]:
        return iter(self._paths)

    def __len__(self) -> int:
        return len(self._paths)

    def __contains__(self, name: object) -> bool:
        return name in self._paths

    def name_of(self, entry: object) -> str | None:
        """What an entry is called, None where it is none; what is not imported yet cannot be it."""
        return next((n for n in self if self._is(n, entry)), None)

    def _is(self, name: str, entry: object) -> bool:
        module = self._paths[name].partition(":")[0]
        return (name in self._entries or module in sys.modules) and self[name] is entry

    @property
    def modules(self) -> dict[str, set[str]]:
        """The modules entries come from, and what each of them has."""
        found: dict[str, set[str]] = {}
        for module, _, attribute in (path.partition(":") for path in self._paths.values() if path):
            found.setdefault(module, set()).add(attribute)
        return found
