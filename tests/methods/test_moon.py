"""MOON: the contrast, the projection, and what teachers cost."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.nn import functional

from personafl import MOON, FedAvg
from personafl.core import tree
from personafl.core.types import Round
from personafl.data import batches
from tests import checks, worlds


def test_without_its_contrast_moon_is_fedavg() -> None:
    checks.assert_close(checks.played(MOON(contrast_weight=0.0)).server, checks.played(FedAvg()).server)


def test_moon_is_fedavg_until_a_client_comes_back() -> None:
    checks.assert_close(checks.played(MOON(), num_rounds=1).server, checks.played(FedAvg(), num_rounds=1).server)
    again = checks.played(MOON(), num_rounds=2, join_ratio=1.0).server["head.weight"]
    assert not torch.allclose(again, checks.played(FedAvg(), num_rounds=2, join_ratio=1.0).server["head.weight"])


def test_the_contrast_of_moon_by_hand() -> None:
    """-log(e^{s_g / tau} / (e^{s_g / tau} + e^{s_p / tau})), z what enters the last layer."""
    sim = worlds.simulation(MOON(contrast_weight=2.0, temperature=0.5), join_ratio=1.0, num_rounds=3)
    sim.step()
    ids = sim.cohort(sim.schedule[1])
    rnd = Round(sim.schedule[1], 0.1)
    down = tree.received(sim.download(ids, rnd), len(ids))
    local = sim.algorithm.start(sim.store.gather(ids), down, rnd)
    local = dataclasses.replace(local, params={n: t + 0.1 for n, t in local.params.items()})
    data = sim.federation.examples("train", ids)
    (batch, _), *_ = batches.in_order(data, 5, torch.float64)
    loss = sim.algorithm._contrast(sim.task, local, batch)  # type: ignore[attr-defined]
    c, n = 1, int(batch.count[1])
    x, y = batch.x[c, :n], batch.y[c, :n]
    previous = {k: t[c] for k, t in tree.under(local.fixed, "previous").items()}
    z, z_g, z_p = (checks.hidden(p, x) for p in ({k: t[c] for k, t in local.params.items()}, sim.server, previous))
    near, far = (torch.cosine_similarity(z, o, dim=1) / 0.5 for o in (z_g, z_p))
    contrast = -(near.exp() / (near.exp() + far.exp())).log()
    logits = z @ local.params["head.weight"][c].T + local.params["head.bias"][c]
    expected = functional.cross_entropy(logits, y) + 2.0 * contrast.mean()
    torch.testing.assert_close(loss[c], expected, rtol=1e-10, atol=1e-10)


def test_the_projection_of_moon_is_averaged_with_the_model() -> None:
    """The MLP's eight features: two layers of 8 x 8, in the server's state, both payloads and what answers."""
    names = {f"projection/{n}" for n in ("hidden_weight", "hidden_bias", "output_weight", "output_bias")}
    sim = worlds.simulation(MOON(projection=True), join_ratio=1.0)
    first = {n: sim.server[n].clone() for n in names}
    for n, t in first.items():
        assert t.shape == ((8, 8) if n.endswith("weight") else (8,))
        assert 0.1 < t.abs().max() <= 8**-0.5  # as PyTorch's linear layers
    _, ids, done = checks.rehearsed(sim)
    sim.step()
    size = sim.federation.sizes("train")[ids].double()
    sent = tree.values(done.upload)
    for n in names:
        mean = torch.einsum("c,c...->...", size, sent[n]) / size.sum()
        torch.testing.assert_close(sim.server[n], mean, rtol=1e-12, atol=1e-12)
        assert not torch.equal(sim.server[n], first[n])
        torch.testing.assert_close(checks.everyone(sim)[f"previous/{n}"][ids], sent[n])
    x = sim.federation.source.x[:4].double()
    w = sim.server
    h = checks.hidden(w, x)
    z = (h @ w["projection/hidden_weight"].T + w["projection/hidden_bias"]).relu() @ w["projection/output_weight"].T
    expected = (z + w["projection/output_bias"]) @ w["head.weight"].T + w["head.bias"]
    found = sim.algorithm.predict(sim.model, sim.deployed_models(sim.model, sim.everybody), x.expand(6, *x.shape))
    torch.testing.assert_close(found, expected.expand(6, 4, 3))


def test_a_projection_keeps_the_contract() -> None:
    options = {"num_rounds": 3, "local_epochs": 1}
    checks.assert_a_stack_equals_each_client_alone(MOON(projection=True), **options)
    checks.assert_counted_bytes_are_packed_bytes(MOON(projection=True), **options)
    checks.assert_nothing_hidden_travels(MOON(projection=True), **options)


def test_a_projection_costs_five_forward_passes_of_its_two_layers() -> None:
    without, with_it = (
        checks.played(MOON(), num_rounds=1, join_ratio=1.0),
        checks.played(MOON(projection=True), num_rounds=1, join_ratio=1.0),
    )
    seen = 2 * sum((28, 6, 16, 10, 3, 22))  # two epochs of all clients' rows
    assert with_it.totals.flops - without.totals.flops == seen * 5 * 2 * (2 * 64 + 8)


def test_two_teachers_cost_two_forward_passes() -> None:
    base = checks.played(FedAvg()).totals.flops  # three forward passes an example
    assert checks.played(MOON()).totals.flops == pytest.approx(base * 5 / 3)
