"""A run as frozen dataclasses: TOML in, objects out; what is unknown or impossible is refused by name."""

from personafl.config.building import method
from personafl.config.names import ConfigError, criterion, imported, name_of, unknown
from personafl.config.reading import load, recipes
from personafl.config.recipe import Data, Method, ModelChoice, Recipe
from personafl.config.writing import anchored, dump, settings

__all__ = [
    "ConfigError",
    "Data",
    "Method",
    "ModelChoice",
    "Recipe",
    "anchored",
    "criterion",
    "dump",
    "imported",
    "load",
    "method",
    "name_of",
    "recipes",
    "settings",
    "unknown",
]
