"""Every client's model on every client's test set, and what shift that leads to expect."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

import personafl
from personafl import Algorithm, Ditto, Evaluation
from personafl.evaluation import final, matrix
from tests.evaluation.common import ASKED, METHODS, accuracy, federation, own_rows, played


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


def test_a_sample_of_clients_has_rows_of_the_matrix() -> None:
    whole = played(Ditto()).evaluations()
    few = played(Ditto(), evaluation=dataclasses.replace(ASKED, clients=2)).evaluations()
    assert len(few["ids"]) == 2
    for name in ("client_accuracy", "corruption_accuracy", "shift_accuracy", "expected_accuracy"):
        assert np.array_equal(few[name], whole[name][few["ids"]]), name


def test_too_large_a_matrix_is_refused_with_a_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(matrix.LIMIT, "cpu", 399)
    with pytest.raises(ValueError, match=r"evaluation.matrix=true: 20 models on 20 .* 400 evaluations, at most 399"):
        personafl.run("demo", "evaluation.matrix=true", out=tmp_path / "run", device="cpu")
    assert not (tmp_path / "run").exists()
    fed = federation()
    matrix.check(Evaluation(matrix=True), fed, "cuda:1")
    matrix.check(Evaluation(matrix=True, clients=10), fed, "cpu")  # 6 x 6
