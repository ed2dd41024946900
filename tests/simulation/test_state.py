"""A state packed is the state unpacked."""

from __future__ import annotations

import json

import torch

from personafl.core.types import Masked
from personafl.engine.accounting import Totals
from personafl.engine.late_results import LateResults
from personafl.simulation.state import RunState


def test_a_state_comes_back_from_json_and_tensors_as_it_was() -> None:
    rows = [{"round": 0, "loss": 0.1 + 0.2}]
    state = RunState(
        server={"fc/w": torch.tensor([[1.5, -0.0], [2.0, 1e-40]]), "aux/on": torch.tensor([True, False])},
        rounds=7,
        played=1,
        totals=Totals(1 << 62, 5, 0.1, 1e300, 2.0),
        rows=rows,
        left={9: 0.1 + 0.2, 3: 1 / 3},
        diverged={4, 2},
        trained_cohort=(torch.tensor([3, 1]), {"fc/w": torch.rand(2, 2, 2)}),
        late=LateResults(
            4,
            "masks",
            torch.tensor([5, 2]),
            {
                "fc/w": Masked(torch.rand(2, 3), torch.tensor([[True, False, True], [True, True, False]]), known=True),
                "mask/fc": torch.tensor([[True], [False]]),
            },
            {"own/w": torch.rand(2, 2, dtype=torch.float64)},
        ),
    )
    numbers, tensors = state.packed()
    again = RunState.unpacked(json.loads(json.dumps(numbers)), tensors, rows, torch.device("cpu"))
    for name in ("rounds", "played", "totals", "rows", "left", "diverged"):
        assert getattr(again, name) == getattr(state, name)
    assert list(again.left) == [9, 3]  # in the order they had
    assert again.server.keys() == state.server.keys()
    assert all(torch.equal(again.server[n], t) for n, t in state.server.items())
    assert again.trained_cohort is not None and state.trained_cohort is not None
    assert again.trained_cohort[0].tolist() == [3, 1]
    assert torch.equal(again.trained_cohort[1]["fc/w"], state.trained_cohort[1]["fc/w"])
    assert again.late is not None and state.late is not None
    assert (again.late.stage, again.late.phase, again.late.ids.tolist()) == (4, "masks", [5, 2])
    was, now = state.late.upload["fc/w"], again.late.upload["fc/w"]
    assert isinstance(was, Masked) and isinstance(now, Masked) and now.known
    assert torch.equal(was.values, now.values) and torch.equal(was.mask, now.mask)
    assert again.late.upload["mask/fc"].tolist() == [[True], [False]]  # type: ignore[union-attr]
    assert torch.equal(again.late.kept["own/w"], state.late.kept["own/w"])


def test_a_state_without_a_cohort_has_none() -> None:
    numbers, tensors = RunState({"w": torch.ones(2)}, 3).packed()
    again = RunState.unpacked(numbers, tensors, [], torch.device("cpu"))
    assert (again.trained_cohort, again.late) == (None, None)
