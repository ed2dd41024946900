"""Every method's own optimiser settings, which stand in for the recipe's."""

from __future__ import annotations

import dataclasses
import tomllib

import pytest
import torch
from torch import Tensor

from personafl import ALGORITHMS, DMPFL, Algorithm, FedAvg, FedPeWS, FedProx, Inherit, Simulation, config
from personafl.core.errors import UserError
from personafl.core.method_settings import FROM_TRAINING
from personafl.core.types import Stage, Training
from tests import worlds

SHORT = {"num_rounds": 3, "local_epochs": 1, "batch_size": 12}
OTHERS = {"optimizer": "adam", "lr": 0.03, "momentum": 0.5, "weight_decay": 0.1, "grad_clip": 0.2}
DM = DMPFL(readjust_share=0.3, readjust_interval=1, iterations=1)
ALL_ON = {"score_init": 50.0, "score_lr": 0.0}  # sigma(50) is 1 in float64: the warm-up is FedAvg


def played(algorithm: Algorithm, **training: object) -> Simulation:
    sim = worlds.simulation(algorithm, **(SHORT | training))
    sim.run()
    return sim


def state(sim: Simulation) -> dict[str, Tensor]:
    """All that server and clients hold."""
    return sim.server | {f"client {n}": t for n, t in sim.store.gather(sim.everybody).items()}


def same(one: Simulation, other: Simulation) -> bool:
    a, b = state(one), state(other)
    assert a.keys() == b.keys()
    return all(torch.equal(a[n], b[n]) for n in a)


@pytest.mark.parametrize("name", FROM_TRAINING)
@pytest.mark.parametrize(
    "algorithm",
    [FedAvg(), DM, FedAvg(weights="cowa", inherit=Inherit(weight=0.2)), FedPeWS(base=FedProx(), warmup_share=0.4)],
    ids=["fedavg", "dm-pfl", "fedavg within two parts", "fedpews before fedprox"],
)
def test_a_methods_own_setting_is_the_recipes_for_it_alone(algorithm: Algorithm, name: str) -> None:
    own = played(dataclasses.replace(algorithm, **{name: OTHERS[name]}))
    assert same(own, played(algorithm, **{name: OTHERS[name]}))
    assert not same(own, played(algorithm))


@pytest.mark.parametrize("name", ["momentum", "weight_decay", "grad_clip"])
def test_zero_is_none_whatever_the_recipe_has(name: str) -> None:
    assert same(played(FedAvg(**{name: 0.0}), **{name: OTHERS[name]}), played(FedAvg()))


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
@pytest.mark.filterwarnings("ignore:.*units for")
def test_what_a_method_says_reaches_its_training(name: str) -> None:
    taken = {n: v for n, v in OTHERS.items() if n != "momentum" and (name != "co-pfl" or n != "optimizer")}
    sim = worlds.simulation(ALGORITHMS[name](**taken))
    for stage in sim.schedule:
        training = sim.algorithm.training_at(stage)
        assert {n: getattr(training, n) for n in taken if n != "lr"} == {n: v for n, v in taken.items() if n != "lr"}
    assert sim.training.lr == OTHERS["lr"]


def test_a_base_has_its_own_optimiser_once_the_warm_up_is_over() -> None:
    """Two rounds of FedAvg without momentum, then two of FedAvg with it."""
    plain, heavy = (worlds.simulation(FedAvg(momentum=m), **(SHORT | {"num_rounds": 4})) for m in (0.0, 0.5))
    for _ in range(2):
        plain.step()
        heavy.step()
    heavy.state.server = dict(plain.server)
    heavy.step()
    heavy.step()
    for recipe in (0.0, 0.9):
        method = FedPeWS(base=FedAvg(momentum=0.5), momentum=0.0, weights="examples", warmup_share=0.5, **ALL_ON)
        warm = played(method, num_rounds=4, momentum=recipe)
        for n, t in heavy.server.items():
            torch.testing.assert_close(warm.server[n], t, rtol=1e-11, atol=1e-11)  # float64, summed in another order


def test_a_base_without_an_optimiser_of_its_own_goes_on_with_the_warm_ups() -> None:
    sim = worlds.simulation(FedPeWS(momentum=0.5, optimizer="sgd", warmup_share=0.5), momentum=0.9, grad_clip=0.3)
    for stage in sim.schedule:
        training = sim.algorithm.training_at(stage)
        assert (training.momentum, training.grad_clip) == (0.5, 0.3)


def test_a_newcomers_session_has_the_bases_optimiser() -> None:
    sim = worlds.simulation(FedPeWS(base=FedAvg(momentum=0.5), warmup_share=0.5))
    last = sim.schedule[-1].number
    assert sim.algorithm.training_at(Stage(number=last + 1, phase="newcomer")).momentum == 0.5
    assert sim.algorithm.training_at(Stage(number=0)).momentum == 0.0


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("lr", 0.0, "lr=0.0: must be greater than 0"),
        ("lr", -0.1, "lr=-0.1: must be greater than 0"),
        ("momentum", 1.0, r"momentum=1.0: must be in \[0, 1\)"),
        ("momentum", -0.5, r"momentum=-0.5: must be in \[0, 1\)"),
        ("weight_decay", -1.0, "weight_decay=-1.0: must be not negative"),
        ("grad_clip", -1.0, "grad_clip=-1.0: must be not negative"),
        ("optimizer", "rmsprop", "optimizer='rmsprop': possible are sgd, adam, adamw"),
    ],
)
def test_what_training_refuses_a_method_refuses_in_the_same_words(setting: str, value: object, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        FedAvg(**{setting: value})
    with pytest.raises(UserError, match=rf"^training\.{message}$"):
        config.load({"training": {setting: value}, "algorithms": [{"name": "fedavg"}]})
    with pytest.raises(UserError, match=rf"^fedavg(: |\.){message}$"):
        config.load({"algorithms": [{"name": "fedavg", setting: value}]})


def test_overrides_set_them_also_for_a_base() -> None:
    raw = {"training": {"momentum": 0.9}, "algorithms": [{"name": "fedavg"}, {"name": "fedpews", "base": "fedprox"}]}
    asked = ["fedavg.weight_decay=0.5", "fedavg.optimizer=adam", "fedpews.base.momentum=0", "fedavg.lr=recipe"]
    recipe = config.load(raw, asked)
    assert recipe.algorithms[0].algorithm == FedAvg(weight_decay=0.5, optimizer="adam")
    assert recipe.algorithms[1].algorithm == FedPeWS(base=FedProx(momentum=0.0))
    again = config.load(tomllib.loads(config.dump(recipe)))
    assert again == recipe
    assert "lr" not in config.settings(recipe.algorithms[0].algorithm)


def test_the_settings_are_training_s_own() -> None:
    assert set(FROM_TRAINING) <= {f.name for f in dataclasses.fields(Training)}
