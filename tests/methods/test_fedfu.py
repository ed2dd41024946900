"""FedFu: the local features fused with those of the received body."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from personafl import Evaluation, FedAvg, FedFu, Simulation
from personafl.core import tree
from tests import checks, worlds

ONE = {"local_steps": 1, "batch_size": 64, "num_rounds": 4}


def answers(sim: Simulation, x: Tensor) -> Tensor:
    ready = sim.deployed_models(sim.model, sim.everybody)
    return sim.algorithm.predict(sim.model, ready, x.expand(6, *x.shape)).detach()


@pytest.mark.parametrize("fusion", ["single", "multi"])
def test_one_step_a_round_leaves_gamma_at_zero_and_is_uniform_fedavg(fusion: str) -> None:
    """While both bodies are alike, z_g - z and with it the gradient of gamma is zero."""
    a, b = checks.played(FedFu(fusion=fusion), **ONE), checks.played(FedAvg(weights="uniform"), **ONE)
    assert not a.server["fusion/gamma"].any()
    assert a.server["fusion/gamma"].shape == ((8,) if fusion == "multi" else (1,))
    checks.assert_close(b.server, a.server)


@pytest.mark.parametrize("fusion", ["single", "multi"])
def test_with_gamma_at_zero_the_answer_is_the_local_models(fusion: str) -> None:
    sim = worlds.simulation(FedFu(fusion=fusion))
    x = sim.federation.source.x[:4]
    torch.testing.assert_close(answers(sim, x)[0], checks.outputs(dict(sim.model.initial), x).detach())


def test_the_linear_map_begins_as_the_mean_of_both() -> None:
    """Both bodies are the received one at first, so the mean of their features is FedAvg's, and so is the answer."""
    sim = worlds.simulation(FedFu(fusion="conv"))
    x = sim.federation.source.x[:4]
    torch.testing.assert_close(answers(sim, x)[0], checks.outputs(dict(sim.model.initial), x).detach())
    z, z_g = torch.randn(1, 2, 8, dtype=torch.float64), torch.randn(1, 2, 8, dtype=torch.float64)
    fusion = {n: t[None] for n, t in sim.server.items() if n.startswith("fusion/")}
    torch.testing.assert_close(sim.algorithm._fused(fusion, z_g, z), (z + z_g) / 2)  # type: ignore[attr-defined]


def test_gamma_is_the_share_of_the_received_features() -> None:
    algorithm = worlds.simulation(FedFu(fusion="multi")).algorithm
    gamma = {"fusion/gamma": torch.tensor([[0.0, 1.0, 0.25]])}
    z_g, z = torch.full((1, 1, 3), 4.0), torch.full((1, 1, 3), 8.0)
    assert algorithm._fused(gamma, z_g, z).tolist() == [[[8.0, 4.0, 7.0]]]  # type: ignore[attr-defined]


def test_the_server_smooths_gamma_and_nothing_else() -> None:
    """0.1 of the mean and 0.9 of what it was."""
    sim = worlds.simulation(FedFu(fusion="single"), join_ratio=1.0)
    for t in range(2):
        _, _, done = checks.rehearsed(sim)
        sent, old = tree.values(done.upload), sim.server["fusion/gamma"].clone()
        sim.step()
        torch.testing.assert_close(sim.server["fusion/gamma"], 0.1 * sent["fusion/gamma"].mean(0) + 0.9 * old)
        torch.testing.assert_close(sim.server["head.weight"], sent["head.weight"].mean(0))
        assert float(old) == 0 if t == 0 else float(old) != 0
    linear = worlds.simulation(FedFu(), join_ratio=1.0)
    _, _, done = checks.rehearsed(linear)
    linear.step()
    torch.testing.assert_close(linear.server["fusion/weight"], tree.values(done.upload)["fusion/weight"].mean(0))


@pytest.mark.parametrize("fusion", ["conv", "multi", "single"])
def test_a_step_goes_down_the_fused_loss_with_the_received_body_fixed(fusion: str) -> None:
    """The second of two steps on the full batch, by autograd on a plain forward pass."""
    sim = worlds.simulation(FedFu(fusion=fusion), batch_size=64, local_epochs=2, join_ratio=1.0)
    _, ids, done = checks.rehearsed(sim)
    c = int(ids[0])
    x, y = checks.rows_of(sim, c)
    received = {n: t.clone() for n, t in sim.server.items()}
    w = dict(received)
    for _ in range(2):
        leaves = {n: t.detach().requires_grad_() for n, t in w.items()}
        z, z_g = checks.hidden(leaves, x), checks.hidden(received, x)
        if fusion == "conv":
            z = torch.cat([z_g, z], 1) @ leaves["fusion/weight"].T + leaves["fusion/bias"]
        else:
            z = leaves["fusion/gamma"] * z_g + (1 - leaves["fusion/gamma"]) * z
        loss = torch.nn.functional.cross_entropy(z @ leaves["head.weight"].T + leaves["head.bias"], y)
        grads = torch.autograd.grad(loss, list(leaves.values()))
        w = {n: (t - 0.1 * g).detach() for (n, t), g in zip(leaves.items(), grads, strict=True)}
    checks.assert_close(w, {n: t[0] for n, t in done.local.params.items()}, tolerance=1e-10)


def test_right_after_training_it_answers_with_the_body_it_received() -> None:
    late = Evaluation(shift="none", eval_every=1, when="after_local", clients="selected")
    sim = worlds.simulation(FedFu(), evaluation=late)
    received = dict(sim.server)
    sim.step()
    _, rows = sim.state.trained_cohort  # type: ignore[misc]
    assert torch.equal(rows["received/layers.0.weight"][0], received["layers.0.weight"])
    assert not torch.equal(rows["layers.0.weight"][0], received["layers.0.weight"])


def test_impossible_smoothing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"smoothing=1.0: must be in \[0, 1\)"):
        FedFu(smoothing=1.0)
