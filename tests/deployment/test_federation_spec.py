"""What is agreed on: forms of data, recipes a deployment can play, first weights."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from personafl.core.errors import UserError
from personafl.deployment.federation_spec import FORMAT, Form, World, build_parts, read_recipe
from tests.deployment import worlds

FORM = Form((1, 8, 8), "float32", "classification", (), 10, None, None, "mlp")


def world(text: str, form: Form = FORM) -> World:
    return World("e", "1", text, 4, 100, form, None)


def test_a_world_survives_json() -> None:
    made = dataclasses.replace(
        world("x", dataclasses.replace(FORM, classes=2, class_names=("a", "b"))), normalization=((0.1,), (0.3,))
    )
    assert World.read(json.loads(json.dumps(made.told()))) == made


def test_a_world_without_a_format_is_of_none() -> None:
    told = world("x").told()
    assert World.read(told).format == FORMAT
    assert World.read({k: v for k, v in told.items() if k != "format"}).format == 0


@pytest.mark.parametrize("told", [None, 5, [], {}, "world"])
def test_what_is_no_world_is_refused(told: Any) -> None:
    with pytest.raises(UserError, match="not a description of an experiment"):
        World.read(told)


@pytest.mark.parametrize(
    "change",
    [
        {"shape": [0]},
        {"shape": [2**20, 2**20]},
        {"shape": [1] * 9},
        {"shape": "12"},
        {"shape": 5},
        {"dtype": "complex64"},
        {"dtype": []},
        {"task": "guessing"},
        {"classes": 10**6 + 1},
        {"classes": True},
        {"classes": 2.0},
        {"class_names": ["a", "b"]},
        {"class_names": ["a"] * 10},
        {"class_names": list(range(10))},
        {"feature_names": [1]},
        {"model": None},
        {"model": "os:abort"},
        {"classes": 10_001},
        {"classes": 1, "class_names": ["x" * 257]},
        {"classes": 2000, "class_names": [f"{i:0200d}" for i in range(2000)]},
        {"more": 1},
    ],
)
def test_a_form_that_cannot_be_is_refused(change: dict[str, Any]) -> None:
    told = json.loads(json.dumps(dataclasses.asdict(FORM)))
    assert Form.read(told) == FORM
    with pytest.raises(UserError, match="not a description of examples"):
        Form.read(told | change)


def test_what_differs_is_named_in_few_words() -> None:
    names = tuple(f"column {i}" for i in range(1000))
    why = dataclasses.replace(FORM, feature_names=names).unlike(FORM)
    assert why.startswith("feature_names ('column 0'") and len(why) < 250
    assert FORM.unlike(dataclasses.replace(FORM, classes=3)) == ""


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"evaluation": {"shift": "donor"}}, "evaluation.shift='donor'"),
        ({"evaluation": {"matrix": True}}, "evaluation.matrix=true"),
    ],
)
def test_what_only_a_simulation_has_is_refused(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(UserError, match=why):
        read_recipe(worlds.recipe("fedavg", **changes))


def test_a_recipe_that_is_none_is_refused() -> None:
    for text in ("[", "x = 1", worlds.recipe("fedavg") + '[[algorithms]]\nname = "local"\n'):
        with pytest.raises(UserError):
            read_recipe(text)


def test_both_sides_have_the_simulator_s_first_weights() -> None:
    text = worlds.recipe("fedavg")
    parts = build_parts(world(text))
    sim = worlds.simulation(text)
    assert parts.model.initial_hash() == sim.model.initial_hash() == sim.identity()["init"]
    other = build_parts(world(worlds.recipe("fedavg", training={"seed": 1})))
    assert other.model.initial_hash() != parts.model.initial_hash()
