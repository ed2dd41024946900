"""What a run is judged by in the end, against one client and one image at a time."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import personafl
from personafl import (
    Algorithm,
    Ditto,
    DMPFLPlus,
    Evaluation,
    FedAvg,
    Federation,
    LocalOnly,
    Machine,
    Simulation,
    Source,
    StackedModel,
)
from personafl.core import rng
from personafl.data.corruptions import STANDARD, corrupt, rotate
from personafl.evaluation import final, matrix
from personafl.experiment import Client
from tests import worlds

SIZES = (37, 8, 21, 14, 4, 30)  # a quarter of each is for testing: 9, 2, 5, 4, 1, 8
ASKED = Evaluation(
    eval_every=100,
    draws=2,
    degrees=(0.5, 1.0),
    corruptions=("all",),
    severities=(1, 5),
    rotations=(-20.0, 0.0, 90.0),
    matrix=True,
)


def federation(channels: int = 1, as_bytes: bool = False) -> Federation:
    """Images of three classes, each a bright band somewhere in noise."""
    draw = torch.Generator().manual_seed(0)
    rows = sum(SIZES)
    y = torch.randint(3, (rows,), generator=draw)
    x = torch.rand(rows, channels, 8, 8, generator=draw) * 0.7
    for i, k in enumerate(y.tolist()):
        x[i, :, 2 * k : 2 * k + 3] += 0.25
    source = Source("bands", (x * 255).to(torch.uint8) if as_bytes else x, y, 3)
    return Federation.build(source, np.split(np.arange(rows), np.cumsum(SIZES)[:-1]), seed=0)


class Flat(nn.Module):
    """One hidden layer over all pixels; with `norm`, statistics of the batch."""

    def __init__(self, channels: int = 1, norm: bool = False) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(channels * 64, 10), nn.Linear(10, 3)
        self.norm = nn.BatchNorm1d(10) if norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.first(x.flatten(1))).relu())  # type: ignore[no-any-return]


def played(
    algorithm: Algorithm,
    fed: Federation | None = None,
    *,
    evaluation: Evaluation = ASKED,
    norm: bool = False,
    chunk: int = 0,
) -> Simulation:
    fed = fed or federation()
    channels = fed.source.x.shape[1]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = Flat(channels, norm)
    model = StackedModel(module, torch.rand(2, channels, 8, 8), policy="drop" if norm else "average")
    training = worlds.training(num_rounds=4, lr=0.3)
    sim = Simulation(fed, model, algorithm, training, evaluation, machine=Machine(chunk=chunk))
    sim.run()
    return sim


def own_rows(sim: Simulation, client: int) -> Tensor:
    return sim.federation.examples("test", torch.tensor([client])).rows[0]


def accuracy(sim: Simulation, client: int, images: Tensor, labels: Tensor) -> float:
    """Of a client's model on images shown one by one."""
    mine = Client(client, sim, sim.deployed_models(sim.model, torch.tensor([client])))
    right = [int(mine.predict(x[None]).argmax()) == int(y) for x, y in zip(images, labels, strict=True)]
    return sum(right) / len(right)


METHODS = [LocalOnly(), Ditto(), DMPFLPlus(iterations=1, allocation="erk")]


@pytest.mark.parametrize(("channels", "as_bytes"), [(1, False), (3, True)])
@pytest.mark.parametrize("algorithm", METHODS, ids=lambda a: type(a).__name__)
def test_corruptions_are_those_of_each_image_alone(algorithm: Algorithm, channels: int, as_bytes: bool) -> None:
    sim = played(algorithm, federation(channels, as_bytes))
    found = sim.evaluations()
    assert found["kinds"].tolist() == list(STANDARD)
    assert found["corruption_accuracy"].shape == (6, 15, 2)
    source = sim.federation.source
    for k, kind in enumerate(STANDARD):
        for j, severity in enumerate((1, 5)):
            for client in range(6):
                rows = own_rows(sim, client)
                images = torch.cat(
                    [
                        corrupt(source.x[[r]], kind, severity, rng.key(0, "corruption", torch.tensor([r])))
                        for r in rows.tolist()
                    ]
                )
                expected = accuracy(sim, client, images, source.y[rows])
                assert found["corruption_accuracy"][client, k, j] == expected, (kind, severity, client)
    assert found["corruption_scores"].shape == (29, 15, 2)
    means = [part.mean(0) for part in np.split(found["corruption_scores"], found["edges"][1:-1])]
    np.testing.assert_allclose(found["corruption_accuracy"], means, atol=1e-15)


def test_rotations_are_those_of_each_image_alone() -> None:
    sim = played(Ditto())
    found = sim.evaluations()
    source = sim.federation.source
    for client in range(6):
        rows = own_rows(sim, client)
        for j, angle in enumerate((-20.0, 0.0, 90.0)):
            images = torch.cat([rotate(source.x[[r]], angle) for r in rows.tolist()])
            assert found["rotation_accuracy"][client, j] == accuracy(sim, client, images, source.y[rows])
    assert np.array_equal(found["rotation_accuracy"][:, 1], final.own_accuracy(found, sim.task.metric))
    assert found["rotation_scores"].dtype == np.uint8  # each is right or wrong
    assert np.array_equal(found["rotation_scores"][:, 1], found["scores"])  # not turned at all, sample by sample


def test_scores_that_are_more_than_right_or_wrong_stay_numbers() -> None:
    scores = torch.tensor([[0.0, 1.0], [0.5, 1.0]])
    assert final._small(scores) is scores
    assert final._small(scores[:1]).tolist() == [[0, 1]] and final._small(scores[:1]).dtype == torch.uint8


def test_newcomers_have_arrays_of_their_own() -> None:
    whole = federation()
    fed = dataclasses.replace(whole, num_clients=4, unseen=2)
    sim = played(LocalOnly(), fed)
    found = sim.evaluations()
    held = final.newcomers(found)
    assert found["ids"].tolist() == [0, 1, 2, 3] and held["ids"].tolist() == [4, 5]
    assert np.diff(held["edges"]).tolist() == [1, 8]
    assert held["scores"].shape == (9,) and held["corruption_scores"].shape == (9, 15, 2)
    assert held.keys().isdisjoint({"shift_scores", "donors", "client_accuracy"})
    row = sim.newcomers(found)
    assert row == sim.newcomers()
    assert row is not None and row["mean"] == pytest.approx(final.own_accuracy(held, sim.task.metric).mean())
    for client, place in ((4, slice(0, 1)), (5, slice(1, 9))):
        rows = own_rows(sim, client)
        assert held["rows"][place].tolist() == rows.tolist()
        model = Client(client, sim, sim.newcomer_models(sim.model, torch.tensor([client])))
        right = model.predict(whole.source.x[rows]).argmax(1) == whole.source.y[rows]
        assert held["scores"][place].tolist() == right.float().tolist()


@pytest.mark.parametrize("algorithm", METHODS, ids=lambda a: type(a).__name__)
def test_the_matrix_is_every_model_on_every_test_set(algorithm: Algorithm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix, "ROWS", 12)  # several blocks: 9 + 2, 5 + 4 + 1, 8 test rows
    sim = played(algorithm)
    found = sim.evaluations()["client_accuracy"]
    for host in range(6):
        rows = own_rows(sim, host)
        x, y = sim.federation.source.x[rows], sim.federation.source.y[rows]
        assert found[:, host].tolist() == [accuracy(sim, client, x, y) for client in range(6)]
    assert np.array_equal(found.diagonal(), final.own_accuracy(sim.evaluations(), sim.task.metric))


def test_blocks_are_runs_of_clients_that_fit() -> None:
    blocks = [b.tolist() for b in matrix._blocks([9, 2, 5, 4, 1, 30, 8], 12)]
    assert blocks == [[0, 1], [2, 3, 4], [5], [6]]
    assert [b.tolist() for b in matrix._blocks([3, 1], 0)] == [[0], [1]]


def test_what_the_matrix_expects_by_hand() -> None:
    # Client 1 of three: 0.5 on its own set, 0.2 and 0.6 on the others'. Of 5 places, 0.5 * 5 = 2.5 rounds to 2.
    row = np.array([[0.2, 0.5, 0.6]])
    out = matrix.expected(row, np.array([1]), np.array([5]), (0.0, 0.5, 1.0))
    assert out[0].tolist() == pytest.approx([0.5, 0.5 * 3 / 5 + 0.4 * 2 / 5, 0.4])


def test_the_mean_over_many_donors_is_what_the_matrix_expects() -> None:
    draws = 800
    asked = Evaluation(eval_every=100, draws=draws, degrees=(0.0, 0.4, 1.0), matrix=True)
    found = played(Ditto(), evaluation=asked).evaluations()
    square = found["client_accuracy"]
    off = (square.sum(1) - square.diagonal()) / 5  # uniformly over the others
    np.testing.assert_allclose(found["expected_accuracy"][:, 2], off, atol=1e-12)
    by_draw = found["shift_accuracy"]  # [C, draws, D]
    error = by_draw.std(1) / np.sqrt(draws)
    assert (np.abs(by_draw.mean(1) - found["expected_accuracy"]) <= 5 * error + 1e-12).all()
    assert error[:, 2].min() > 0


@pytest.mark.parametrize("norm", [False, True])
def test_neither_chunks_nor_a_second_run_change_anything(norm: bool) -> None:
    one, again, alone, pairs = (played(Ditto(), norm=norm, chunk=c).evaluations() for c in (100, 100, 1, 2))
    assert one.keys() == again.keys() == alone.keys() == pairs.keys()
    for name in one:
        assert np.array_equal(one[name], again[name]), name
        assert np.array_equal(one[name], alone[name]), name
        assert np.array_equal(one[name], pairs[name]), name


def test_a_model_that_looks_at_batches_is_shown_whole_test_sets() -> None:
    sim = played(FedAvg(), norm=True)
    assert sim.model.looks_at_batches
    found = sim.evaluations()
    assert "expected_accuracy" not in found  # a mixed batch is not the sum of its parts
    source = sim.federation.source
    params = {n: t[None] for n, t in sim.server.items()}

    def right(x: Tensor, rows: Tensor) -> float:
        with torch.no_grad():
            return float((sim.model(params, x[None])[0].argmax(1) == source.y[rows]).double().mean())

    for client in range(6):
        rows = own_rows(sim, client)
        whole = right(source.x[rows], rows)
        assert (found["client_accuracy"][:, client] == whole).all()
        fog = corrupt(source.x[rows], "fog", 5, rng.key(0, "corruption", rows))
        assert found["corruption_accuracy"][client, STANDARD.index("fog"), 1] == right(fog, rows)
        for d in range(2):
            new, places = sim.shift.of(d, client)  # type: ignore[union-attr]
            mixed = rows.clone()
            mixed[places[: round(0.5 * len(rows))]] = new[: round(0.5 * len(rows))]
            assert found["shift_accuracy"][client, d, 1] == right(source.x[mixed], mixed)


def test_scores_lie_where_edges_say() -> None:
    sim = played(Ditto())
    found = sim.evaluations()
    assert found["ids"].tolist() == list(range(6))
    assert np.diff(found["edges"]).tolist() == [9, 2, 5, 4, 1, 8]
    assert found["degrees"].tolist() == [0.0, 0.5, 1.0]
    assert found["shift_scores"].shape == (29, 2, 3)
    assert np.array_equal(found["shift_scores"][:, 0, 0], found["scores"])
    for client in range(6):
        mine = slice(found["edges"][client], found["edges"][client + 1])
        rows = own_rows(sim, client)
        assert found["rows"][mine].tolist() == rows.tolist()
        model = Client(client, sim, sim.deployed_models(sim.model, torch.tensor([client])))
        right = model.predict(sim.federation.source.x[rows]).argmax(1) == sim.federation.source.y[rows]
        assert found["scores"][mine].tolist() == right.float().tolist()
        for d in range(2):
            new, places = sim.shift.of(d, client)  # type: ignore[union-attr]
            there = model.predict(sim.federation.source.x[new]).argmax(1) == sim.federation.source.y[new]
            full = torch.zeros(len(rows)).index_put((places,), there.float())
            assert found["shift_scores"][mine, d, 2].tolist() == full.tolist()
            assert found["shift_accuracy"][client, d, 2] == pytest.approx(float(full.double().mean()))
            assert found["donors"][client, d] == int(sim.shift.donors_of(torch.tensor([client]))[d, 0])  # type: ignore[union-attr]


def test_a_sample_of_clients_has_rows_of_the_matrix() -> None:
    whole = played(Ditto()).evaluations()
    few = played(Ditto(), evaluation=dataclasses.replace(ASKED, clients=2)).evaluations()
    assert len(few["ids"]) == 2
    for name in ("client_accuracy", "corruption_accuracy", "shift_accuracy", "expected_accuracy"):
        assert np.array_equal(few[name], whole[name][few["ids"]]), name


RECIPE = {
    "data": {"dataset": "digits", "num_clients": 5},
    "training": {"num_rounds": 2, "join_ratio": 0.6, "local_epochs": 1, "batch_size": 64},
    "evaluation": {
        "eval_every": 2,
        "draws": 2,
        "shift": "label",
        "degrees": [0.0, 1.0],
        "corruptions": ["fog", "gaussian_noise"],
        "severities": [2, 4],
        "rotations": [30],
        "matrix": True,
    },
    "algorithms": [{"name": "fedavg"}, {"name": "local"}],
}


def test_results_are_kept_and_read_back(tmp_path: Path) -> None:
    made = personafl.run(RECIPE, out=tmp_path / "run")
    again = personafl.Result.load(tmp_path / "run")
    for label in ("fedavg", "local"):
        first, second = made[label], again[label]
        assert first.summary == second.summary
        assert first.evaluations.keys() == second.evaluations.keys()
        for name, held in first.evaluations.items():
            assert held.dtype == second.evaluations[name].dtype
            assert np.array_equal(held, second.evaluations[name]), name
    found, summary = made["local"].evaluations, made["local"].summary
    assert summary["shift"]["protocol"] == "label"
    assert summary["shift"]["degrees"].keys() == {"0.0", "1.0"}
    robust = summary["robustness"]
    assert list(robust["corruptions"]) == ["fog", "gaussian_noise"]
    cell = robust["corruptions"]["gaussian_noise"]["4"]
    assert cell["mean"] == pytest.approx(found["corruption_accuracy"][:, 1, 1].mean())
    assert cell["std"] == pytest.approx(found["corruption_accuracy"][:, 1, 1].std())
    assert robust["corruption_average"]["mean"] == pytest.approx(found["corruption_accuracy"].mean())
    assert robust["rotations"]["30.0"]["mean"] == pytest.approx(found["rotation_accuracy"].mean())
    assert robust["expected"]["1.0"]["mean"] == pytest.approx(found["expected_accuracy"][:, -1].mean())
    assert set(made["local"].clients[0]) == {"client", "train", "test", "accuracy", "shift_0", "shift_1"}
    assert made["fedavg"].summary["hashes"] == summary["hashes"]


def test_what_was_not_asked_for_is_not_there() -> None:
    sim = played(Ditto(), evaluation=Evaluation(shift="none", eval_every=100))
    found = sim.evaluations()
    assert found.keys() == {"ids", "edges", "rows", "scores"}
    assert final.robustness(found, sim.evaluation) == {}
    assert sim.clients_table(found)[1] is None


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("evaluation.corruptions=fog", r"evaluation.corruptions=\['fog'\] on synthetic-3.2k: images must be"),
        ("evaluation.rotations=10", r"evaluation.rotations=\[10.0\] on synthetic-3.2k: images must be"),
        ("data.corruption=fog", "data.corruption='fog' on synthetic-3.2k: images must be"),
    ],
)
def test_images_are_asked_of_images_alone(override: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        personafl.run("demo", "data.dataset=synthetic-3.2k", override, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_too_large_a_matrix_is_refused_with_a_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(matrix.LIMIT, "cpu", 399)
    with pytest.raises(ValueError, match=r"evaluation.matrix=true: 20 models on 20 .* 400 evaluations, at most 399"):
        personafl.run("demo", "evaluation.matrix=true", out=tmp_path / "run", device="cpu")
    assert not (tmp_path / "run").exists()
    fed = federation()
    matrix.check(Evaluation(matrix=True), fed, "cuda:1")
    matrix.check(Evaluation(matrix=True, clients=10), fed, "cpu")  # 6 x 6


@pytest.mark.gpu
def test_a_gpu_finds_the_same() -> None:
    asked = dataclasses.replace(ASKED, corruptions=("contrast", "pixelate"))  # of these no bit depends on the device
    training, model = worlds.training(num_rounds=4), StackedModel(Flat(), torch.rand(2, 1, 8, 8))
    cpu, gpu = (
        Simulation(federation(), model, Ditto(), training, asked, machine=Machine(device=d)) for d in ("cpu", "cuda")
    )
    for sim in (cpu, gpu):
        sim.run()
    a, b = cpu.evaluations(), gpu.evaluations()
    assert a.keys() == b.keys()
    assert all(np.array_equal(a[n], b[n]) for n in a)
