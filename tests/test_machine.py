"""The same numbers wherever they lie in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import personafl
from personafl import ALGORITHMS, FedAvg, StackedModel
from personafl.core import tree, wire
from personafl.core.types import Params
from tests import checks
from tests.memory import ALIGNED, misalign_files, misaligned

RECIPE: dict[str, Any] = {
    "data": {"dataset": "digits", "num_clients": 6, "alpha": 0.1, "unseen_ratio": 0.34},
    "training": {"num_rounds": 2, "join_ratio": 0.75, "local_epochs": 1, "batch_size": 20},
    "evaluation": {"eval_every": 1, "draws": 1, "degrees": [1.0]},
}
pytestmark = pytest.mark.filterwarnings("ignore:.*leaves only", "ignore:.*leave room", "ignore:.*units for")


def recipe(*methods: str, **more: Any) -> dict[str, Any]:
    return RECIPE | {"algorithms": [{"name": n} for n in methods]} | more


# Memory


@pytest.fixture(scope="module")
def every() -> personafl.Result:
    return personafl.run(recipe(*ALGORITHMS, evaluation={"eval_every": 2, "shift": "none"}))


def test_a_loaded_model_predicts_exactly_what_the_saved_one_did(
    every: personafl.Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever the tensors of a file come to lie."""
    misalign_files(monkeypatch, 56)
    every.save(tmp_path / "run")
    again = personafl.Result.load(tmp_path / "run")
    x = every["fedavg"].simulation.federation.source.x[:5]
    for label in ALGORITHMS:
        checks.assert_agree(again[label].simulation.server, every[label].simulation.server)
        for c in (0, 5):  # one that took part, one that was held out
            assert torch.equal(again[label].client(c).predict(x), every[label].client(c).predict(x)), (label, c)


def test_a_model_whose_rows_are_on_disk_predicts_what_it_did(tmp_path: Path) -> None:
    methods = ("ditto", "dm-pfl", "fedpac")
    first = personafl.run(recipe(*methods), out=tmp_path / "run", store="disk")
    again = personafl.Result.load(tmp_path / "run")
    x = first["ditto"].simulation.federation.source.x[:5]
    for label in methods:
        assert all(torch.equal(*(r[label].client(c).predict(x) for r in (again, first))) for c in range(6)), label


def test_a_prediction_does_not_depend_on_where_the_inputs_lie(
    every: personafl.Result, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, client, seen = torch.rand(5, 1, 8, 8), every["fedavg"].client(0), []

    def predict(self: FedAvg, model: StackedModel, own: Params, x: Tensor) -> Tensor:
        seen.append((x.data_ptr() % ALIGNED, x.is_contiguous()))
        return model(own, x)

    monkeypatch.setattr(FedAvg, "predict", predict)
    lying = x.movedim(0, -1).contiguous().movedim(-1, 0)  # the first numbers of all examples, then the second
    for moved in (misaligned(x, 4), misaligned(x, 56), lying):
        assert torch.equal(client.predict(moved), client.predict(x))
    assert seen == [(0, True)] * 6


def test_a_large_input_is_predicted_in_blocks(every: personafl.Result) -> None:
    x = every["fedavg"].simulation.federation.source.x[:600]
    client = every["fedavg"].client(0)
    blocks = [client.predict(part) for part in torch.split(x, 256)]
    assert torch.equal(client.predict(x), torch.cat(blocks))
    assert client.predict(x[:0]).shape == (0, 10)


def test_what_arrives_lies_where_pytorch_allocates() -> None:
    sent = {"a": torch.rand(3), "b": torch.rand(5, 7, dtype=torch.float64), "c": torch.rand(2, 2)}
    found = tree.values(wire.unpack(wire.pack(sent)))  # type: ignore[arg-type]
    checks.assert_agree(found, sent)
    assert all(t.data_ptr() % ALIGNED == 0 for t in found.values())
