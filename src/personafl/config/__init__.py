"""A run as frozen dataclasses: TOML in, objects out; what is unknown or impossible is refused by name."""

from personafl.config.conversion import method
from personafl.config.names import criterion, described, imported, name_of
from personafl.config.reading import load, parts, raw, recipes
from personafl.config.recipe import AUTO, Data, Method, ModelChoice, Recipe
from personafl.config.writing import anchored, dump, settings
from personafl.core.settings import unknown

__all__ = [
    "AUTO",
    "Data",
    "Method",
    "ModelChoice",
    "Recipe",
    "anchored",
    "criterion",
    "described",
    "dump",
    "imported",
    "load",
    "method",
    "name_of",
    "parts",
    "raw",
    "recipes",
    "settings",
    "unknown",
]
