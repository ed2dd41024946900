from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

import personafl
from personafl import FedAvg, Training, config
from personafl.core.types import Arithmetic
from personafl.experiment import run_folder
from personafl.experiment.run_setup import resolved, simulation
from personafl.simulation.machine import Machine, with_precision
from tests import worlds

RECIPE = {
    "data": {"dataset": "digits", "num_clients": 3},
    "algorithms": [{"name": "fedavg"}, {"name": "ditto"}],
    "training": {"num_rounds": 1, "local_epochs": 1},
}


def test_auto_is_tf32_on_a_gpu_and_float32_on_a_cpu() -> None:
    assert (Training().precision, Training().arithmetic) == ("auto", "float32")  # no device: nothing is rounded
    for device, precision in (("cpu", "float32"), ("cuda", "tf32"), ("cuda:3", "tf32")):
        for where in (device, torch.device(device)):
            assert with_precision(Training(seed=5), where) == Training(seed=5, precision=precision)


@pytest.mark.parametrize("precision", get_args(Arithmetic))
def test_a_precision_that_is_asked_for_is_the_same_everywhere(precision: Arithmetic) -> None:
    asked = Training(precision=precision)
    assert with_precision(asked, "cuda") == with_precision(asked, "cpu") == asked
    assert asked.arithmetic == precision


def test_a_simulation_says_what_auto_was() -> None:
    sim = worlds.simulation(FedAvg(), precision="auto")
    assert sim.training.precision == sim.algorithm.setup.training.precision == "float32"
    assert {t.dtype for t in sim.server.values()} == {torch.float32}


def test_a_recipe_is_resolved_for_its_device_and_keeps_that_on_another() -> None:
    recipe = config.load(RECIPE)
    assert resolved(recipe, (0,), "cpu")[0].training.precision == "float32"
    there, feds = resolved(recipe, (0,), "cuda:0")
    assert there.training.precision == "tf32"
    here = simulation(there, there.algorithms[0], fed=feds[0], machine=Machine(device="cpu"))
    assert here.training.precision == "tf32"


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ({"threads_per_client": 0}, "at least 1"),
        ({"threads_per_client": 1.5}, "whole number"),
        ({"chunk": -1}, "least 0"),
    ],
)
def test_counts_that_are_none_are_refused(setting: dict[str, Any], told: str) -> None:
    with pytest.raises(personafl.UserError, match=f"{next(iter(setting))} .*{told}"):
        Machine(**setting)


def test_a_run_records_the_threads_of_a_client_and_goes_on_with_them(tmp_path: Path) -> None:
    found = personafl.run(RECIPE, out=tmp_path / "run", quiet=True, threads=2, threads_per_client=2)
    assert found["ditto"].simulation.plan.operations == 2
    assert run_folder.read(tmp_path / "run").conditions.threads_per_client == 2


def test_a_run_folder_records_what_auto_was(tmp_path: Path) -> None:
    found = personafl.run(RECIPE, out=tmp_path / "run", device="cpu", quiet=True)
    assert [found[n].summary["environment"]["precision"] for n in ("fedavg", "ditto")] == ["float32"] * 2
    told = tomllib.loads((tmp_path / "run" / "recipe.toml").read_text())
    assert told["training"]["precision"] == "float32"
