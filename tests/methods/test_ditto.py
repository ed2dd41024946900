"""Ditto: two models side by side."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from personafl import Ditto, FedAvg, LocalOnly
from personafl.core import tree
from tests import worlds


def test_without_pull_the_personal_model_is_local() -> None:
    ditto, local = worlds.simulation(Ditto(proximal_weight=0.0)), worlds.simulation(LocalOnly())
    ditto.run()
    local.run()
    personal = tree.under(ditto.store.gather(ditto.everybody), "personal")
    for n, t in local.store.gather(local.everybody).items():
        torch.testing.assert_close(personal[n], t, rtol=1e-12, atol=1e-12)


def test_the_global_model_is_fedavgs() -> None:
    ditto, fedavg = worlds.simulation(Ditto(proximal_weight=2.0)), worlds.simulation(FedAvg())
    ditto.run()
    fedavg.run()
    assert ditto.server.keys() == fedavg.server.keys()
    for n, t in fedavg.server.items():
        torch.testing.assert_close(ditto.server[n], t, rtol=1e-12, atol=1e-12)


def test_the_personal_step_is_the_papers() -> None:
    """One step: v <- v - eta (grad F(v) + lambda (v - w_t)), w_t the model received this round."""
    sim = worlds.simulation(Ditto(proximal_weight=0.7), local_steps=1, join_ratio=1.0, batch_size=64)
    sim.step()  # now v and w differ
    kept, received = sim.store.gather(sim.everybody), {n: t.clone() for n, t in sim.server.items()}
    sim.step()
    client = 2
    rows = sim.federation.examples("train", torch.tensor([client])).rows[0]
    x, y = sim.federation.source.x[rows], sim.federation.source.y[rows]
    v = {n: t[client].clone().requires_grad_() for n, t in tree.under(kept, "personal").items()}
    loss = functional.cross_entropy(torch.func.functional_call(worlds.module().double(), v, (x,)), y)
    grads = dict(zip(v, torch.autograd.grad(loss, list(v.values())), strict=True))
    after = tree.under(sim.store.gather(sim.everybody), "personal")
    for n in v:
        expected = v[n] - 0.1 * (grads[n] + 0.7 * (v[n] - received[n]))
        torch.testing.assert_close(after[n][client], expected, rtol=1e-10, atol=1e-10)


def test_two_models_cost_twice() -> None:
    ditto, fedavg = worlds.simulation(Ditto()), worlds.simulation(FedAvg())
    ditto.run()
    fedavg.run()
    assert ditto.totals.flops == pytest.approx(2 * fedavg.totals.flops)
    assert ditto.totals.up_bytes == fedavg.totals.up_bytes
