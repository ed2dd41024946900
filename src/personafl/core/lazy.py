"""Attributes of a package that are imported when they are first asked for (PEP 562).

A deployed client is a new process for every message and runs no simulation; what it does not use it must not wait for.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection, Mapping
from typing import Any


def attributes(package: str, where: Mapping[str, Collection[str]], name: str) -> Any:
    """An attribute of a package, from the module that has it; `where` is which module has which."""
    for module, names in where.items():
        if name in names:
            return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module {package!r} has no attribute {name!r}")
