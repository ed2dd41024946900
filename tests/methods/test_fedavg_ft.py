"""FedAvg+FT: where fine-tuning begins, what it costs, and how long it is."""

from __future__ import annotations

import pytest
import torch

from personafl import FedAvg, FedAvgFT
from tests import worlds


def test_fine_tuning_starts_from_the_final_global_model_and_costs_one_session_more() -> None:
    plain, tuned = worlds.simulation(FedAvg(), join_ratio=1.0), worlds.simulation(FedAvgFT(), join_ratio=1.0)
    plain.run()
    for _ in range(8):
        tuned.step()
    before = tuned.deployed_models(tuned.model, tuned.everybody)  # until then the global model answers
    for n, t in plain.server.items():
        assert torch.equal(before[n], t.expand(6, *t.shape))
    flops = tuned.totals.flops
    tuned.run()
    after = tuned.deployed_models(tuned.model, tuned.everybody)
    assert torch.equal(tuned.server["head.weight"], plain.server["head.weight"])
    assert not torch.equal(after["head.weight"], before["head.weight"])
    assert tuned.totals.flops / flops == pytest.approx(9 / 8)  # all clients took part in all 8 rounds
    assert tuned.totals.up_bytes == plain.totals.up_bytes
    assert tuned.totals.paper_bytes == plain.totals.paper_bytes
    assert tuned.totals.down_bytes == plain.totals.down_bytes * 9 / 8


def test_fine_tuning_epochs_can_be_set() -> None:
    costs = []
    for epochs in (1.0, 3.0):
        sim = worlds.simulation(FedAvgFT(finetune_epochs=epochs))
        for _ in range(8):
            sim.step()
        before = sim.totals.flops
        sim.run()
        costs.append(sim.totals.flops - before)
    assert costs[1] == pytest.approx(3 * costs[0])


def test_negative_fine_tuning_is_refused() -> None:
    with pytest.raises(ValueError, match=r"finetune_epochs=-1.0: must not be negative"):
        FedAvgFT(finetune_epochs=-1.0)
