"""What is told of every key of a recipe, held to what the code does."""

from __future__ import annotations

import dataclasses
import tomllib
import warnings
from typing import Any

import pytest
import torch

import personafl
from personafl import ALGORITHMS, Evaluation, Simulation, StackedModel, Training, UserError, config
from personafl.config import components, reference
from personafl.config.recipe import SECTIONS
from personafl.core.types import ModelInfo
from tests.references import golden
from tests.test_references import ENGINE


def test_all_keys_of_all_sections_are_there_with_words() -> None:
    for section, kind in SECTIONS.items():
        found = reference.keys(section)
        assert sorted(k.name for k in found) == sorted(kind.names())
        assert all(k.type and k.default and k.help and k.looked_at_by for k in found)


def test_a_key_has_its_type_default_and_bounds() -> None:
    key = reference.key("training.momentum")
    assert (key.type, key.default, key.help, key.possible) == ("number", "0.0", "momentum of sgd", "in [0, 1)")
    assert reference.key("data.alpha").looked_at_by == "partition dirichlet, dirichlet-client, grouped, quantity"
    assert reference.key("data.classes_per_client").default == "2 (pathological, classes, shards), 3 (dominant)"
    degrees = reference.key("evaluation.degrees")
    assert degrees.type == "list of number" and degrees.default == "[0.0, 0.2, 0.4, 0.6, 0.8, 1.0]"
    assert degrees.possible.startswith("shares in [0, 1]")
    assert reference.key("evaluation.matrix").default == "false"
    assert reference.key("training.precision").possible == "auto, float64, float32, tf32, bf16"
    assert reference.key("training.loss").possible.startswith("auto, cross_entropy")
    assert reference.key("data.num_clients").type == "integer"


def test_a_setting_of_a_method_is_a_key_too() -> None:
    assert reference.key("dm-pfl.sparsity").default == "0.5"
    assert reference.key("dm-pfl.lr").default == "recipe"
    assert reference.key("dm-pfl.votes").possible == "counted, weighted"
    base = reference.key("fedpews.base")
    assert (base.type, base.default) == ("method", '{ name = "fedavg", weights = "uniform" }')
    assert reference.key("fedphp.inherit").default.startswith('{ transfer = "mmd", weight = 0.01')


def written(default: str) -> Any:
    """A default as it is shown, as a value of a recipe: TOML, or a name without quotes."""
    try:
        return tomllib.loads(f"value = {default}")["value"]
    except tomllib.TOMLDecodeError:
        return default


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_default_that_is_written_down_changes_nothing(name: str) -> None:
    """In a recipe's table and as an override; and so does the name alone of a method that is a default."""
    usual = config.load({"algorithms": [{"name": name}]}).algorithms[0].algorithm
    for key in reference.keys(name):
        values = [written(key.default)]
        values += [v["name"] for v in values if isinstance(v, dict) and "name" in v]
        for value in values:
            entry = {"name": name, key.name: value}
            assert config.load({"algorithms": [entry]}).algorithms[0].algorithm == usual, key.dotted
        asked = config.load({"algorithms": [{"name": name}]}, [f"{key.dotted}={key.default}"])
        assert asked.algorithms[0].algorithm == usual, key.dotted


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_method_written_down_with_all_its_settings_is_the_same(name: str) -> None:
    recipe = config.load({"algorithms": [{"name": name}]})
    again = config.load(tomllib.loads(config.dump(recipe)))
    assert again.algorithms == recipe.algorithms
    assert dataclasses.replace(again, name=recipe.name) == recipe


@pytest.mark.parametrize(
    ("dotted", "message"),
    [
        ("training.momentun", "training.momentun: no such setting of [training]; did you mean momentum?"),
        ("training.rounds", "did you mean num_rounds?"),
        ("trainig.lr", "no such section or method; did you mean training?"),
        ("dm-pfl.sparse", "no such setting of dm-pfl; did you mean sparsity?"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest(dotted: str, message: str) -> None:
    with pytest.raises(UserError) as e:
        reference.key(dotted)
    assert message in str(e.value)


def test_bounds_that_are_told_are_bounds_that_hold() -> None:
    """The words of a refusal are the words of the reference."""
    for dotted, value in (("training.momentum", 1.0), ("data.test_share", 1.0), ("evaluation.draws", 0)):
        section, name = dotted.split(".")
        with pytest.raises(UserError) as e:
            SECTIONS[section](**{name: value})
        assert str(e.value).endswith(f"must be {reference.key(dotted).possible}")


READ: set[str] = set()
TRAINING = {f.name for f in dataclasses.fields(Training)}


@dataclasses.dataclass(frozen=True)
class WatchedTraining(Training):
    def __getattribute__(self, name: str) -> Any:
        if name in TRAINING:
            READ.add(f"training.{name}")
        return super().__getattribute__(name)


@dataclasses.dataclass(frozen=True)
class WatchedInfo(ModelInfo):
    def __getattribute__(self, name: str) -> Any:
        if name in ("head", "features"):
            READ.add("model.head")
        return super().__getattribute__(name)


def copied(kind: type[Any], of: Any) -> Any:
    return kind(**{f.name: getattr(of, f.name) for f in dataclasses.fields(kind)})


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_methods_look_at_the_keys_they_are_said_to_look_at(name: str) -> None:
    """All that is read in a short run at the method's defaults, once by epochs and once by steps."""
    module, federation = golden.world()
    model = StackedModel(module, federation.source.x[:2])
    model.info = copied(WatchedInfo, model.info)
    given = ENGINE.get(name, dict)(golden.SETTINGS.get(name, {}))
    algorithm = ALGORITHMS[name](**{k: v for k, v in given.items() if k == "base"})
    seen: set[str] = set()
    for steps in (0, 2):
        training = copied(WatchedTraining, dataclasses.replace(golden.TRAINING, local_steps=steps))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of rounds being few
            sim = Simulation(federation, model, algorithm, training, Evaluation(shift="none", eval_every=1000))
        seen |= READ & {"model.head"}
        READ.clear()  # whoever copies settings reads all of them
        sim.run()
        seen |= READ
        READ.clear()
    for key in (
        *reference.ALL_BUT,
        *reference.ONLY,
        *(f"training.{n}" for n in TRAINING - {"loss", "num_rounds", "task"}),
    ):
        told = name in reference.ONLY[key] if key in reference.ONLY else name not in reference.ALL_BUT.get(key, ())
        assert (key in seen) == told, key  # of the others the run itself reads the loss and the rounds


def test_the_network_of_the_page_is_called_as_it_says() -> None:
    """With shape and classes, or with nothing if that will do."""
    asked: list[tuple[Any, ...]] = []

    def small(shape: tuple[int, ...], classes: int) -> torch.nn.Module:
        asked.append((shape, classes))
        return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, classes))

    def plain(*given: Any) -> torch.nn.Module:
        asked.append(given)
        return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))

    for network in (small, plain):
        config = personafl.ModelChoice(name=network)
        recipe = dataclasses.replace(personafl.config.load("demo"), model=config)
        components.model(recipe, components.source(recipe))
    assert asked == [((1, 8, 8), 10), ()]
