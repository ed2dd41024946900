"""Code of one's own that the recipe of a deployment names: imported early, so that a missing module is named early."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping
from typing import Any

from personafl import config
from personafl.config.trust import own_code
from personafl.core.errors import UserError

log = logging.getLogger("personafl")


def named_code(tables: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return what the tables of a recipe name by `package.module:thing`, each behind its setting."""
    found = []
    for key, path in own_code(tables):
        module, _, name = path.partition(":")
        if all(part.isidentifier() for part in (*module.split("."), name)):
            found.append((key, path))
    return found


def import_own_code(tables: Mapping[str, Any], hint: str) -> None:
    """Import what a recipe names, except data sets: in a deployment every client has its own.

    Args:
        tables: The tables of a recipe.
        hint: A sentence for the error: what to do about a module that is missing.

    Raises:
        UserError: Something cannot be imported.
    """
    importlib.invalidate_caches()
    for key, path in named_code(tables):
        if key == "data.dataset":
            continue
        try:
            config.imported(path, key)
        except UserError as e:
            raise UserError(f"{e}. {hint}".rstrip()) from None
        except (Exception, SystemExit) as e:  # of a module of one's own, anything; its text stays in the log
            log.exception("%s %r cannot be imported", key, path)
            raise UserError(f"{key} {path!r}: cannot be imported: {type(e).__name__}. {hint}".rstrip()) from None
