"""What a run is judged by in the end, where it lies, and what it does not depend on."""

from __future__ import annotations

import dataclasses
import math
import re
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from personafl import Ditto, Evaluation, FedAvg, LocalOnly, UserError
from personafl.core import rng
from personafl.data.corruptions import STANDARD, corrupt
from personafl.evaluation import final
from personafl.experiment import Client
from tests.evaluation.common import federation, own_rows, played


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


def test_what_was_not_asked_for_is_not_there() -> None:
    sim = played(Ditto(), evaluation=Evaluation(shift="none", eval_every=100))
    found = sim.evaluations()
    assert found.keys() == {"ids", "edges", "rows", "scores"}
    assert final.robustness(found, sim.evaluation, sim.task.metric) == {}
    assert sim.clients_table(found)[1] is None


def written(path: Path, **changes: np.ndarray | None) -> Path:
    """A file of two clients with three samples in all, with other arrays."""
    arrays: dict[str, np.ndarray | None] = {
        "ids": np.arange(2),
        "edges": np.array([0, 1, 3]),
        "rows": np.arange(3),
        "scores": np.ones(3),
        "client_accuracy": np.ones((2, 2)),
        "unseen_ids": np.array([2]),
        "unseen_edges": np.array([0, 1]),
        "unseen_rows": np.zeros(1),
        "unseen_scores": np.ones(1),
    }
    np.savez_compressed(path, **{n: a for n, a in (arrays | changes).items() if a is not None})
    return path


def test_arrays_that_no_run_writes_are_not_inflated(tmp_path: Path) -> None:
    """64 MiB of zeros in a file of 64 KiB."""
    path = written(tmp_path / "a.npz", bomb=np.zeros(2**23))
    assert path.stat().st_size < 2**17
    tracemalloc.start()
    try:
        assert "bomb" not in final.load(path)
        assert tracemalloc.get_traced_memory()[1] < 2**22
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "changes",
    [
        {"scores": np.ones(4)},
        {"client_accuracy": np.zeros((1, 2))},
        {"client_accuracy": np.zeros((2, 2**14))},
        {"shift_scores": np.zeros((3, 2**12, 8))},
        {"degrees": np.zeros(2**25)},
        {"unseen_scores": np.ones(3)},
    ],
)
def test_arrays_that_do_not_fit_the_clients_are_refused(tmp_path: Path, changes: dict[str, np.ndarray]) -> None:
    path = written(tmp_path / "a.npz", **changes)
    with pytest.raises(UserError, match=f"not a file of evaluations: {next(iter(changes))} has shape"):
        final.load(path)
    with pytest.raises(UserError, match="it has no scores"):
        final.load(written(path, scores=None))


def test_evaluations_of_many_clients_are_read_however_large(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """2 ** 20 samples, 30 draws and 9 degrees of shift are 270 numbers of 8 bytes for each sample: 2.1 GiB."""
    samples = 2**20
    shapes: dict[str, tuple[int, ...]] = {"ids": (2**10,), "edges": (2**10 + 1,), "rows": (samples,)}
    shapes |= {"scores": (samples,), "shift_scores": (samples, 30, 9)}
    monkeypatch.setattr(final, "npz_shapes", lambda path: {n: (s, 8 * math.prod(s)) for n, s in shapes.items()})
    monkeypatch.setattr(final, "read_npz", lambda path, names: dict.fromkeys(names))
    assert final.load(tmp_path / "a.npz").keys() == shapes.keys()


def test_all_arrays_are_listed_with_their_first_axis() -> None:
    listed = re.findall(r"^\| `(\w+)`(?:, `(\w+)`)? \| `\[(.)", final.__doc__ or "", re.MULTILINE)
    axes = {name: axis if axis in "CN" else "" for *names, axis in listed for name in names if name}
    assert axes | {"edges": ""} == final.AXES
