"""The same numbers wherever they lie in memory, and however many threads compute them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import personafl
from personafl import ALGORITHMS, Algorithm, Ditto, Evaluation, FedAvg, Simulation, StackedModel
from personafl.core import torch_state, tree, wire
from personafl.core.types import Params
from personafl.models import MODELS
from personafl.simulation import execution_plan
from tests import checks, worlds
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


# Threads


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, 20, num_layers=2, batch_first=True), nn.Linear(20, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.lstm(x.squeeze(1))[0][:, -1])
        return out


def normed() -> nn.Module:
    """Batch norm behind a convolution, and one behind a linear layer."""
    conv = (nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten())
    return nn.Sequential(*conv, nn.Linear(8 * 36, 50), nn.BatchNorm1d(50), nn.ReLU(), nn.Linear(50, 3))


def stacking() -> nn.Module:
    """All that runs as one stack: linear layers, norms, dropout."""
    first = (nn.Flatten(), nn.Linear(64, 210), nn.LayerNorm(210), nn.Sigmoid(), nn.Dropout(0.2))
    return nn.Sequential(*first, nn.Linear(210, 70), nn.BatchNorm1d(70), nn.Tanh(), nn.Linear(70, 3))


BUILDS: dict[str, Callable[[], nn.Module]] = {
    "cnn": lambda: MODELS["small-cnn"].build((1, 8, 8), 3),
    "lstm": Recurrent,
    "batch norm": normed,
    "stack": stacking,
}


def everything(sim: Simulation) -> dict[str, np.ndarray[Any, Any]]:
    """All numbers of a simulation."""
    parts = {"server": sim.server, "kept": checks.everyone(sim), "known": sim.known.gather(sim.everybody)}
    held = {f"{where} {n}": t.numpy() for where, part in parts.items() for n, t in part.items()}
    return held | sim.evaluations()


def assert_the_same(one: Simulation, other: Simulation, about: object) -> None:
    """To the last bit, but for times."""
    rows = [[tree.exclude(row, ("seconds",)) for row in sim.rows] for sim in (one, other)]
    assert rows[0] == rows[1], about
    a, b = everything(one), everything(other)
    assert a.keys() == b.keys()
    assert not [n for n in a if a[n].tobytes() != b[n].tobytes()], about


@pytest.mark.parametrize("threads", [2, 5])
def test_a_run_is_the_same_with_one_thread_and_with_several(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five are more than the clients of a cohort, who are four."""
    monkeypatch.setattr(execution_plan, "SMALL", 0.0)  # else products this small stay on one thread
    methods = ("fedavg", "ditto", "dm-pfl-plus", "fedpews", "fedpac", "fml", "co-pfl")
    one, several = (personafl.run(recipe(*methods), threads=n) for n in (1, threads))
    for label in methods:
        sims = one[label].simulation, several[label].simulation
        assert (sims[0].plan.threads, sims[1].plan.threads) == (1, threads)
        assert_the_same(*sims, label)
        x = sims[0].federation.source.x[:300]
        for c in (0, 5):
            assert torch.equal(one[label].client(c).predict(x), several[label].client(c).predict(x)), label
    assert torch.get_num_threads() == 1  # as before


@pytest.mark.parametrize("kind", BUILDS)
@pytest.mark.parametrize("algorithm", [FedAvg(), Ditto()], ids=lambda a: a.called)
def test_every_kind_of_layer_is_the_same_with_one_thread_and_with_several(
    kind: str, algorithm: Algorithm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(execution_plan, "SMALL", 0.0)
    fed = worlds.federation("cnn", sizes=(400, 30, 90, 8))
    torch.manual_seed(0)
    model = StackedModel(BUILDS[kind](), fed.source.x[:2])
    training = worlds.training(num_rounds=2, join_ratio=0.75, batch_size=40, precision="float32")
    done = []
    for n in (1, 2, 5):
        with torch_state.threads(n):
            sim = Simulation(fed, model, algorithm, training, Evaluation(eval_every=1, draws=1, degrees=(1.0,)))
            sim.run()
        assert max(sim.plan.threads, sim.plan.workers) == n
        done.append(sim)
    for other in done[1:]:
        assert_the_same(done[0], other, other.threads)


def test_a_summary_tells_the_number_of_threads() -> None:
    found = personafl.run(recipe("fedavg"), threads=3)["fedavg"].summary["environment"]
    assert found["threads"] == 3
    assert found["hardware"].endswith(", 3 threads")
    assert personafl.run(recipe("fedavg"))["fedavg"].summary["environment"]["threads"] == 1  # as PyTorch has it


def test_less_than_one_thread_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^threads 0: must be at least 1"):
        personafl.run(recipe("fedavg"), threads=0)


class Drawing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(x.flatten(1) + (torch.randn_like(x.flatten(1)) if self.training else 0))
        return out


def test_modules_that_draw_for_themselves_run_on_all_threads() -> None:
    """One client at a time: PyTorch has one generator. Their results may depend on the number of threads."""
    model = StackedModel(Drawing(), worlds.federation("cnn").source.x[:2])
    assert model.random
    with torch_state.threads(2):
        sim = worlds.simulation(FedAvg(), "cnn", model=model)
    assert (sim.plan.workers, sim.plan.operations) == (1, 2)
    sim.run()


@contextmanager
def coarse_products() -> Iterator[None]:
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize(
    "around",
    [
        torch.no_grad,
        lambda: torch.autocast("cpu", dtype=torch.bfloat16),
        coarse_products,
    ],
    ids=["no_grad", "autocast", "medium"],
)
def test_what_a_caller_has_set_changes_no_number(around: Callable[[], AbstractContextManager[None]]) -> None:
    def played() -> personafl.Simulation:
        sim = worlds.simulation(personafl.DMPFL(iterations=1), precision="float32", num_rounds=4, batch_size=33)
        sim.run()
        return sim

    plain = played()
    with around():
        other = played()
    assert all(torch.equal(t, other.server[n]) for n, t in plain.server.items())
    assert plain.rows[-1]["personal"] == other.rows[-1]["personal"]
