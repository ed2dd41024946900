"""Settings that go by the data, where neither a recipe nor the user has them."""

from __future__ import annotations

from dataclasses import replace

from personafl.config.recipe import Recipe
from personafl.data import Federation

BY_DATA = (
    "training.num_rounds",
    "training.join_ratio",
    "training.local_epochs",
    "training.batch_size",
    "training.lr",
    "algorithms",
)
"""What a run on data of one's own leaves to the data, unless it is set."""


def settled(recipe: Recipe, federation: Federation) -> tuple[Recipe, str]:
    """The recipe with what it leaves open decided, and a line that says so."""
    if not recipe.open:
        return recipe, ""
    size = int(federation.sizes("train")[: federation.num_clients].double().median())
    clients, plain = federation.num_clients, recipe.training.optimizer == "sgd"
    careful = recipe.training.momentum >= 0.5 or federation.source.task == "regression"
    found = {
        "num_rounds": 50,
        "join_ratio": min(1.0, max(0.1, 10 / clients)),
        "local_epochs": 2 if size < 2000 else 1,
        "batch_size": 10 if size < 200 else 32 if size < 2000 else 64,
        "lr": 0.001 if not plain else 0.01 if careful else 0.1,
    }
    if "algorithms" in recipe.open and federation.source.task != "classification":
        able = (m for m in recipe.algorithms if m.algorithm.inference == "own" and not m.algorithm.class_labels_for)
        recipe = replace(recipe, algorithms=tuple(able))
    mine = {k: v for k, v in found.items() if f"training.{k}" in recipe.open}
    if not mine:
        return replace(recipe, open=frozenset()), ""
    told = ", ".join(f"{k}={v:g}" for k, v in mine.items())
    why = f"{clients} clients with {size} training samples in the middle"
    made = replace(recipe, training=replace(recipe.training, **mine), open=frozenset())  # type: ignore[arg-type]
    return made, f"chosen for {why}: {told}"
