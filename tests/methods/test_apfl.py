"""APFL: its limits, and the first step of alpha."""

from __future__ import annotations

import pytest
import torch

from personafl import APFL, FedAvg, LocalOnly
from personafl.core import tree
from tests import checks, worlds


def test_apfl_with_nothing_private_answers_as_fedavg() -> None:
    apfl, fedavg = checks.played(APFL(alpha=0.0, learn_alpha=False)), checks.played(FedAvg())
    checks.assert_close(apfl.server, fedavg.server)
    ready = apfl.deployed_models(apfl.model, apfl.everybody)
    checks.assert_close(ready, {n: t.expand(6, *t.shape) for n, t in fedavg.server.items()})


def test_apfl_with_all_private_is_local() -> None:
    apfl, local = checks.played(APFL(alpha=1.0, learn_alpha=False)), checks.played(LocalOnly())
    checks.assert_close(
        apfl.deployed_models(apfl.model, apfl.everybody), local.deployed_models(local.model, local.everybody)
    )


def test_apfl_learns_its_share_from_the_first_minibatch() -> None:
    """alpha - eta <v - w, grad F(vbar)>, v and w as the round begins."""
    sim = worlds.simulation(APFL(alpha=0.4), batch_size=64, join_ratio=1.0, num_rounds=3, local_epochs=1)
    sim.step()
    kept, received = sim.store.gather(sim.everybody), dict(sim.server)
    sim.step()
    after = sim.store.gather(sim.everybody)["aux/alpha"]
    for c in range(6):
        rows = sim.federation.examples("train", torch.tensor([c])).rows[0]
        alpha = float(kept["aux/alpha"][c])
        v = {n: t[c] for n, t in tree.under(kept, "personal").items()}
        mix = {n: alpha * v[n] + (1 - alpha) * received[n] for n in v}
        g = checks.gradient(mix, sim.federation.source.x[rows], sim.federation.source.y[rows])
        slope = sum(float(((v[n] - received[n]) * g[n]).sum()) for n in v)
        assert float(after[c]) == pytest.approx(min(max(alpha - 0.1 * slope, 0.0), 1.0), abs=1e-9)
    assert len(set(after.tolist())) > 1


def test_learning_the_share_costs_a_step_on_one_minibatch() -> None:
    """Three forward passes, 2 (6 * 12 + 12 * 8 + 8 * 3) + 12 + 8 + 3 = 407 each, of 5 rows; one client has 3."""
    learnt, fixed = (checks.played(APFL(learn_alpha=w), num_rounds=1, join_ratio=1.0) for w in (True, False))
    assert learnt.totals.flops - fixed.totals.flops == (5 * 5 + 3) * 3 * 407
    assert learnt.totals.dense_flops - fixed.totals.dense_flops == (5 * 5 + 3) * 3 * 407
