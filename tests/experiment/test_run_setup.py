"""From a recipe to a federation: clients held out, inputs normalised."""

from __future__ import annotations

import dataclasses
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

import personafl
from personafl.config import components
from personafl.core.errors import Note, UserError
from personafl.core.normalization import Normalization
from personafl.experiment import run_setup

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


def test_models_drawn_on_several_threads_at_once_are_those_of_their_seeds() -> None:
    """Weights come from PyTorch's one generator: without turns, two threads share its stream."""
    recipe = personafl.config.load(HELD_OUT)
    data, seeds = components.source(recipe), [0, 1, 2, 3] * 4

    def drawn(seed: int) -> list[torch.Tensor]:
        return list(components.model(recipe.with_seed(seed), data).initial.values())

    alone = [drawn(seed) for seed in range(4)]
    with ThreadPoolExecutor(4) as threads:
        for seed, found in zip(seeds, threads.map(drawn, seeds), strict=True):
            for a, b in zip(found, alone[seed], strict=True):
                torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize(("labels", "outputs"), [(np.arange(12) % 3 + 1, 3), (np.arange(12) % 3, 2)])
def test_too_few_outputs_for_the_labels_are_refused_before_the_run(labels: np.ndarray[Any, Any], outputs: int) -> None:
    """Also where the first examples have small ones."""
    data = np.ones((12, 4), np.float32), np.sort(labels), np.arange(12) % 2
    told = rf"training.loss='cross_entropy': .*up to {labels.max()}, counted from 0"
    with pytest.raises(personafl.UserError, match=told):
        personafl.run(data=data, model=torch.nn.Linear(4, outputs), algorithms=["fedavg"], quiet=True)


def table(rows: int = 80) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Two classes a unit apart in units of columns that are hundreds and hundredths."""
    draw = np.random.default_rng(0)
    y = draw.integers(2, size=rows)
    return (draw.normal(size=(rows, 2)) + y[:, None]) * [300, 0.03] + [5000, 1], y


def own(**data: Any) -> dict[str, Any]:
    return {
        "data": {"dataset": table(), "partition": "iid", "num_clients": 4, **data},
        "training": {"num_rounds": 2, "join_ratio": 1.0, "local_epochs": 1, "batch_size": 10, "precision": "float64"},
        "evaluation": {"shift": "none"},
        "algorithms": [{"name": "fedavg"}],
    }


def test_auto_is_settled_in_the_recipe_that_is_kept() -> None:
    for asked, kept in (("auto", "standardize"), ("half", "half"), ([5000, 300], ((5000.0,), (300.0,)))):
        recipe, feds = run_setup.resolved(personafl.config.load(own(normalize=asked)), (0, 1))
        assert recipe.data.normalize == kept
        assert recipe.data == dataclasses.replace(recipe.data)
        for seed, fed in feds.items():
            again = components.federation(recipe.with_seed(seed), recipe.data.dataset)
            assert again.source.normalization == fed.source.normalization
            assert again.source.digest == fed.source.digest
    recipe, feds = run_setup.resolved(personafl.config.load(HELD_OUT), (0,))
    assert (recipe.data.normalize, feds[0].source.normalization) == ("none", None)


def test_statistics_are_those_of_a_seeds_own_training_data() -> None:
    _, feds = run_setup.resolved(personafl.config.load(own()), (0, 1))
    for fed in feds.values():
        train = fed.source.x[torch.cat([fed.rows("train", c) for c in range(4)])].double()
        found = fed.source.normalization
        assert found is not None
        assert found.mean == pytest.approx(train.mean(0).tolist(), rel=1e-12)
        assert found.std == pytest.approx(train.std(0, correction=0).tolist(), rel=1e-12)
    assert len({fed.source.normalization for fed in feds.values()}) == 2


def test_a_run_on_normalised_inputs_is_the_run_on_data_normalised_before() -> None:
    """To float32, which the data are given in: weights of order one, moved eight times."""
    mine = personafl.run(own())["fedavg"]
    norm = mine.simulation.federation.source.normalization
    assert norm is not None
    x, y = table()
    x = (x.astype(np.float32) - np.array(norm.mean)) / np.array(norm.std)
    other = personafl.run(own(dataset=(x, y), normalize="none"))["fedavg"]
    for n, t in mine.simulation.server.items():
        torch.testing.assert_close(t, other.simulation.server[n], rtol=0, atol=1e-6)
    assert mine.summary["accuracy"] == other.summary["accuracy"]


def test_runs_with_other_inputs_have_other_hashes() -> None:
    hashes = [
        personafl.run(own(normalize=n))["fedavg"].summary["hashes"] for n in ("auto", "standardize", "half", "none")
    ]
    assert hashes[0] == hashes[1]
    assert len({h["data"] for h in hashes}) == 3
    assert len({h["split"] for h in hashes}) == 1


def test_what_data_come_with_is_what_auto_means() -> None:
    source = personafl.arrays(*table())
    source = dataclasses.replace(source, normalization=Normalization((5000.0, 1.0), (300.0, 0.03)))
    recipe, feds = run_setup.resolved(personafl.config.load(own(dataset=source)), (0,))
    assert recipe.data.normalize == ((5000.0, 1.0), (300.0, 0.03))
    assert feds[0].source.normalization == source.normalization
    _, feds = run_setup.resolved(personafl.config.load(own(dataset=source, normalize="none")), (0,))
    assert feds[0].source.normalization is None


def test_statistics_are_of_images_as_clients_have_them() -> None:
    """Corrupted: every pixel of a client's is moved towards its mean by `contrast`."""
    images = torch.randint(256, (40, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    given = own(dataset=(images, torch.arange(40) % 2))
    found = []
    for kind in ("none", "contrast"):
        recipe = personafl.config.load(given, [f"data.corruption={kind}"])
        norm = components.federation(recipe).source.normalization
        assert norm is not None and norm.size == 3
        found.append(norm.std[0])
    assert found[1] < found[0] / 5


def test_classes_that_look_like_numbers_or_never_occur_are_told() -> None:
    x = torch.zeros(60, 3)

    def told(y: torch.Tensor) -> None:
        run_setup.resolved(personafl.config.load(None, given={"data": (x, y, torch.arange(60) // 20)}), (0,))

    with pytest.warns(Note, match=r"own has 701 classes and 60 examples; training.task=regression takes its labels"):
        told(torch.arange(60) * 10 + 110)
    prices = torch.arange(60) * 100 + 1100
    with pytest.raises(UserError, match=r"own has 60 examples and whole numbers up to 7000 as targets"):
        told(prices)
    data = (torch.zeros(60, 3), prices, torch.arange(60) // 20)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        asked = personafl.config.load(None, ["training.task=classification"], given={"data": data})
        assert run_setup.resolved(asked, (0,))[1][0].source.classes == 7001
    with pytest.warns(Note, match=r"1 of the 4 classes of own have no example, such as 0"):
        told(torch.arange(60) % 3 + 1)
