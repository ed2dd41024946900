"""Streams that change abruptly, and corrupted images at full shift, against what a loop by hand gives."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import personafl
from personafl import ALGORITHMS, Evaluation, Simulation
from personafl.core.algorithm import Algorithm
from personafl.core.errors import UserError
from personafl.evaluation import batch_inference, stream_change
from personafl.evaluation.image_transforms import corrupted
from personafl.evaluation.metrics import METRICS
from tests import worlds
from tests.evaluation.common import ASKED, played

CHANGED = replace(worlds.QUIET, shift="donor", draws=2, degrees=(0.0, 1.0), change=7)
METHODS: dict[str, Algorithm] = {
    "own": ALGORITHMS["ditto"](),
    "per-sample": ALGORITHMS["ditto"](inference="per-sample"),
    "stream": ALGORITHMS["ditto"](inference="stream"),
    "batch": ALGORITHMS["ditto"](inference="batch"),
}


def rows_by_hand(sim: Simulation, client: int, draw: int) -> list[int]:
    """Seven of its own in the order drawn for it, seven foreign ones, the next seven of its own."""
    data = sim.federation.examples("test", torch.tensor([client]))
    n = int(data.count[0])
    own = data.rows[0][batch_inference.shuffled(data, sim.training.seed)[0, :n]].tolist()
    assert sim.shift is not None
    foreign = sim.shift.of(draw, client)[0].tolist()
    return [*(own[i % n] for i in range(7)), *(foreign[i % n] for i in range(7)), *(own[i % n] for i in range(7, 14))]


@pytest.mark.parametrize("name", METHODS)
def test_a_stream_is_scored_as_its_inputs_come(name: str) -> None:
    """By the client's own module, which is given them one by one, or all at once where its rule sees a batch."""
    recipe: dict[str, Any] = {
        "data": {"dataset": "digits", "num_clients": 4, "alpha": 0.3},
        "training": {"num_rounds": 3, "local_epochs": 1, "precision": "float64"},
        "evaluation": {"change": 7, "draws": 2, "degrees": [0.0, 1.0], "batch": 5 if name == "batch" else 0},
        "algorithms": {"m": METHODS[name]},
    }
    algorithms = recipe.pop("algorithms")
    result = personafl.run(recipe, algorithms=algorithms, quiet=True)["m"]
    sim = result.simulation
    found = result.evaluations["change_scores"]
    assert found.shape == (4, 2, 21)
    for client in range(4):
        for draw in range(2):
            rows = torch.tensor(rows_by_hand(sim, client, draw))
            x, y = sim.federation.source.x[rows], sim.federation.source.y[rows]
            module = result.client(client).module.double()
            parts = x.split(5 if name == "batch" else 1)
            answers = torch.cat([module(part.double() if part.is_floating_point() else part) for part in parts])
            assert (answers.argmax(1) == y).float().tolist() == found[client, draw].tolist()


def test_stacks_and_streams_do_not_mix() -> None:
    for name in ("own", "stream", "batch"):
        whole, alone = (
            played(METHODS[name], evaluation=CHANGED, chunk=c).evaluations()["change_scores"] for c in (0, 1)
        )
        assert np.array_equal(whole, alone)


def test_what_answers_by_the_input_alone_is_not_moved_by_the_order() -> None:
    """A part of a stream has the accuracy of the examples in it, whatever came before."""
    sim = played(METHODS["own"], evaluation=CHANGED)
    found = sim.evaluations()
    by_row = dict(zip(found["rows"].tolist(), found["scores"].tolist(), strict=True))
    for place, client in enumerate(found["ids"].tolist()):
        rows = rows_by_hand(sim, client, 0)
        own = [by_row[r] for r in (*rows[:7], *rows[14:])]
        assert own == [*found["change_scores"][place, 0, :7], *found["change_scores"][place, 0, 14:]]


def test_what_a_stream_comes_to() -> None:
    """Two clients, one of them without data; a dip of four inputs after the first change, none after the second."""
    own, dip, good = [1.0] * 20, [0.0] * 4, [1.0] * 16
    line = np.array([*own, *dip, *good, *own])
    scores = np.stack([np.stack([line, line]), np.full((2, 60), np.nan)])
    told = stream_change.summary(scores, "higher")
    assert told["inputs"] == 20 and told["levels"] == {"own": 1.0, "shifted": 1.0, "own_again": 1.0}
    assert told["recovery"] == {"shifted": 4, "own_again": 0} and told["curve"] == line.tolist()
    worse = stream_change.summary(1 - scores, "lower")
    assert worse["recovery"] == {"shifted": 4, "own_again": 0}
    drawn = stream_change.smoothed(told)
    assert next(iter(drawn)) == 4.5 and len(drawn) == 60 - 8 + 1  # inputs 1 to 8
    assert drawn[24.5] == pytest.approx(0.5)  # inputs 21 to 28: four wrong, four right


def test_it_never_recovers_from_what_goes_on() -> None:
    falling = np.linspace(1, 0, 20)
    assert stream_change.recovered(falling, 2.0, "higher") == 20


def test_corrupted_images_at_full_shift_are_the_donors() -> None:
    asked = replace(ASKED, corruptions=("contrast", "fog"), corrupt_shifted=True, matrix=False)
    sim = played(ALGORITHMS["ditto"](), evaluation=asked)
    found = sim.evaluations()["shift_corruption_accuracy"]
    assert found.shape == (sim.federation.num_clients, 2, 2)
    assert sim.shift is not None
    ids = torch.arange(sim.federation.num_clients)
    deployed = sim.deployed_models(sim.model, ids)
    for k, kind in enumerate(asked.corruptions):
        for j, severity in enumerate(asked.severities):
            means: list[Tensor] = []
            for d in range(asked.draws):
                data = sim.federation.examples("test", ids)
                foreign = data.rows.clone()
                for i in ids.tolist():
                    n = int(data.count[i])
                    new, places = sim.shift.of(d, i)
                    foreign[i, places] = new
                    assert len(new) == n
                shown = corrupted(replace(data, rows=foreign), kind, severity, sim.training.seed)
                scores = sim.evaluator._scores(sim.task, deployed, shown)
                means.append(torch.stack([s.double().mean() for s in scores]))
            assert found[:, k, j] == pytest.approx(torch.stack(means).mean(0).numpy())


def test_a_run_tells_and_draws_it() -> None:
    recipe = {
        "data": {"dataset": "digits", "num_clients": 4},
        "training": {"num_rounds": 2, "local_epochs": 1},
        "evaluation": {"change": 10, "corruptions": ["fog"], "severities": [3], "corrupt_shifted": True},
        "algorithms": ["fedavg"],
    }
    result = personafl.run(recipe, quiet=True)
    told = result["fedavg"].summary["robustness"]
    assert told["change"].keys() == {"inputs", "levels", "recovery", "curve"} and len(told["change"]["curve"]) == 30
    assert told["shift_corruptions"]["fog"]["3"].keys() == {"mean", "std"}
    assert result.plot("change") is not None
    with pytest.raises(UserError, match=r"evaluation.change=50 gives one"):
        personafl.run(recipe, "evaluation.change=0", quiet=True).plot("change")


def test_what_cannot_be_asked_for_is_said() -> None:
    with pytest.raises(UserError, match=r"evaluation.change=5: must be 0 without shift"):
        Evaluation(change=5, shift="none")
    with pytest.raises(UserError, match=r"evaluation.corrupt_shifted=True: must be false without"):
        Evaluation(corrupt_shifted=True)
    with pytest.raises(UserError, match=r"evaluation.change=-1"):
        Evaluation(change=-1)
    reduced = next(m for of in METRICS.values() for m in of.values() if m.reduce is not None)
    with pytest.raises(UserError, match="is no mean over examples"):
        stream_change.check(Evaluation(change=5), reduced)
