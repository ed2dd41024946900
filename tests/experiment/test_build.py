"""Clients a recipe holds out."""

from __future__ import annotations

import dataclasses

import torch

import personafl

HELD_OUT = {"data": {"dataset": "digits", "num_clients": 6, "unseen_ratio": 0.34}, "algorithms": [{"name": "fedavg"}]}


def test_held_out_clients_differ_by_seed() -> None:
    def held_out(seed: int) -> set[int]:
        recipe = personafl.config.load(HELD_OUT).with_seed(seed)
        fed = personafl.experiment.federation(recipe)
        return {int(r) for c in (4, 5) for r in fed.examples("train", torch.tensor([c])).rows[0]}

    assert held_out(0) == held_out(0)
    assert held_out(0) != held_out(1)


def test_a_share_above_nothing_holds_out_at_least_one() -> None:
    recipe = personafl.config.load(HELD_OUT)
    few = dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, unseen_ratio=0.01))
    assert personafl.experiment.federation(few).unseen == 1


def test_the_default_model_goes_by_the_shape_of_the_examples() -> None:
    def named(shape: tuple[int, ...]) -> str:
        data = (torch.zeros(12, *shape), torch.arange(12) % 2, torch.arange(12) // 6)
        made, _ = personafl.experiment.resolved(personafl.config.load(None, given={"data": data}), [0])
        return str(made.model.name)

    assert named((3, 8, 8)) == "small-cnn"
    assert named((5,)) == named((2, 5)) == "mlp"
