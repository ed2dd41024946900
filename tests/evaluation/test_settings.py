"""Judged by validation data: what a choice between settings may look at."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import personafl
from personafl import DMPFLPlus, Evaluation, Federation, Simulation, Source
from personafl.data import federated
from tests import kills, worlds

SIZES = (37, 12, 21, 14, 9, 30)
ASKED = Evaluation(split="validation", eval_every=4, draws=2, degrees=(0.0, 0.5, 1.0), matrix=True)


def divided(spoilt: str = "") -> Federation:
    """Clients with validation data; the inputs and labels of a split may be spoilt."""
    draw = torch.Generator().manual_seed(0)
    rows = sum(SIZES)
    y = torch.randint(3, (rows,), generator=draw)
    x = torch.randn(rows, 6, generator=draw) + y[:, None]
    parts = np.split(np.arange(rows), np.cumsum(SIZES)[:-1])
    fed = Federation.build(Source("blobs", x, y, 3), parts, seed=0, validation_share=0.2)
    if not spoilt:
        return fed
    x, y = x.clone(), y.clone()
    for c in range(len(SIZES)):
        mine = fed.rows(spoilt, c)  # type: ignore[arg-type]
        x[mine], y[mine] = 100.0, (y[mine] + 1) % 3
    return dataclasses.replace(fed, source=dataclasses.replace(fed.source, x=x, y=y))


def played(fed: Federation, asked: Evaluation = ASKED) -> Simulation:
    torch.manual_seed(0)
    sim = Simulation(fed, torch.nn.Linear(6, 3), DMPFLPlus(iterations=1), worlds.training(num_rounds=4), asked)
    sim.run()
    return sim


def test_all_numbers_are_of_validation_data_and_none_of_test_data() -> None:
    sim, test_spoilt, validation_spoilt = (played(divided(which)) for which in ("", "test", "validation"))
    fed, found, other = divided(), sim.evaluations(), test_spoilt.evaluations()
    assert found["rows"].tolist() == [r for c in found["ids"] for r in fed.rows("validation", c).tolist()]
    for n, a in found.items():
        np.testing.assert_array_equal(a, other[n])
    assert [r["personal"] for r in sim.rows if "personal" in r] == [
        r["personal"] for r in test_spoilt.rows if "personal" in r
    ]
    assert (found["shift_accuracy"] != validation_spoilt.evaluations()["shift_accuracy"]).any()
    for c in range(len(SIZES)):
        answers = sim.deployed_models(sim.model, torch.tensor([c]))
        rows = fed.rows("validation", c)
        logits = sim.model(answers, fed.source.x[rows].double()[None])[0]
        assert found["client_accuracy"][c, c] == pytest.approx(
            float((logits.argmax(1) == fed.source.y[rows]).double().mean())
        )


def test_training_is_that_of_a_run_judged_by_test_data() -> None:
    one, other = played(divided()), played(divided(), dataclasses.replace(ASKED, split="test"))
    assert all(torch.equal(one.server[n], other.server[n]) for n in one.server)
    assert one.hashes()["split"] == other.hashes()["split"] == divided().digest()
    assert one.hashes()["shift"] != other.hashes()["shift"]


def test_splits_that_are_drawn_later_are_those_drawn_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = divided().judged_by("validation")
    monkeypatch.setattr(federated, "LAZY_FROM", 1)
    later = divided().judged_by("validation")
    assert isinstance(later.splits["test"], federated.LazySplit)
    for fed in (later, later.materialize()):
        assert all(torch.equal(fed.rows("test", c), now.rows("test", c)) for c in range(len(SIZES)))
    torch.testing.assert_close(played(divided()).evaluations()["shift_accuracy"], _found_at_once(monkeypatch))


def _found_at_once(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(federated, "LAZY_FROM", 10**9)
    return played(divided()).evaluations()["shift_accuracy"]


def test_the_global_model_is_not_judged_by_a_test_part_of_nobody() -> None:
    fed = dataclasses.replace(divided(), official=torch.arange(5))
    assert fed.judged_by("validation").official is None
    assert fed.judged_by("test") is fed


def test_without_validation_data_it_is_refused() -> None:
    with pytest.raises(personafl.UserError, match=r"evaluation.split='validation': .*set data.validation_share"):
        personafl.run(None, "evaluation.split=validation", "algorithms=fedavg", quiet=True)


def test_a_run_that_is_interrupted_or_loaded_is_judged_by_them_too(tmp_path: Path) -> None:
    recipe = {
        "data": {"dataset": "digits", "num_clients": 4, "validation_share": 0.2},
        "algorithms": ["ditto"],
        "training": {"num_rounds": 2, "local_epochs": 1},
        "evaluation": {"split": "validation", "draws": 1, "degrees": [0.0, 1.0], "eval_every": 1},
    }

    def cut(*_: object) -> None:
        raise KeyboardInterrupt

    whole = personafl.run(recipe, out=tmp_path / "whole", quiet=True)
    with pytest.raises(KeyboardInterrupt):
        personafl.run(recipe, out=tmp_path / "cut", watch=cut, checkpoint_every=1)
    personafl.resume(tmp_path / "cut", quiet=True)
    assert kills.differences(tmp_path / "cut", tmp_path / "whole") == []
    loaded = personafl.Result.load(tmp_path / "whole")["ditto"]
    assert loaded.simulation.evaluations()["rows"].tolist() == whole["ditto"].simulation.evaluations()["rows"].tolist()
