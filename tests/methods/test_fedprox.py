"""FedProx: the pull, by its limit and by a step worked out by hand."""

from __future__ import annotations

from personafl import FedAvg, FedProx
from tests import checks, worlds


def test_without_pull_fedprox_is_fedavg() -> None:
    checks.assert_close(checks.played(FedProx(proximal_weight=0.0)).server, checks.played(FedAvg()).server)


def test_the_pull_of_fedprox_keeps_clients_near() -> None:
    def strayed(weight: float) -> float:
        sim = checks.played(FedProx(proximal_weight=weight), num_rounds=1, local_epochs=6)
        return float(sum((sim.server[n] - sim.model.initial[n]).square().sum() for n in sim.server))

    assert strayed(5.0) < 0.5 * strayed(0.0)


def test_the_second_step_of_fedprox_is_the_papers() -> None:
    """w_2 = w_1 - eta (grad F(w_1) + mu (w_1 - w_0)) on one full batch seen twice."""
    sim = worlds.simulation(FedProx(proximal_weight=0.7), batch_size=64, local_epochs=2, num_rounds=1, join_ratio=0.01)
    client = sim.cohort(sim.schedule[0])
    rows = sim.federation.examples("train", client).rows[0]
    x, y = sim.federation.source.x[rows], sim.federation.source.y[rows]
    w0 = dict(sim.model.initial)
    g0 = checks.gradient(w0, x, y)
    w1 = {n: w0[n] - 0.1 * g0[n] for n in w0}
    g1 = checks.gradient(w1, x, y)
    sim.run()
    checks.assert_close(sim.server, {n: w1[n] - 0.1 * (g1[n] + 0.7 * (w1[n] - w0[n])) for n in w0})
