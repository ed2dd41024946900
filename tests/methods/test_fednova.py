"""FedNova: lengths of local work, and rounds worked out by hand."""

from __future__ import annotations

import pytest
import torch

from personafl import FedAvg, FedNova, FedProx
from personafl.core.optim import SGD
from personafl.core.types import Round
from personafl.engine.local import client_round
from tests import checks, worlds

EQUAL = worlds.federation(sizes=(16, 16, 16, 16))  # clients that all take the same number of steps


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_with_equal_steps_fednova_is_fedavg(momentum: float) -> None:
    checks.assert_close(
        checks.played(FedNova(), fed=EQUAL, momentum=momentum).server,
        checks.played(FedAvg(), fed=EQUAL, momentum=momentum).server,
    )


def test_fednova_weighs_directions_not_distances() -> None:
    """One round by hand: w - (sum p_i tau_i) sum p_i (w - w_i) / tau_i."""
    nova = worlds.simulation(FedNova(), num_rounds=1, join_ratio=1.0)
    stage, ids = nova.schedule[0], nova.cohort(nova.schedule[0])
    rnd, data = Round(stage, 0.1), nova.federation.examples("train", ids)
    plain = FedAvg().bind(nova.algorithm.setup)
    down = nova.download(ids, rnd)
    done = client_round(plain, nova.task, data, {}, down, rnd).local
    p = data.count.double() / data.count.sum()
    tau = done.steps.double()  # type: ignore[union-attr]
    assert len(set(tau.tolist())) > 1
    w = nova.server["head.weight"].clone()
    d = torch.stack([(w - done.params["head.weight"][i]) / tau[i] for i in range(len(ids))])
    nova.step()
    expected = w - (p * tau).sum() * (p.view(-1, 1, 1) * d).sum(0)
    torch.testing.assert_close(nova.server["head.weight"], expected, rtol=1e-10, atol=1e-10)


NOVA_LENGTHS = [
    # rho and eta mu; ||a||_1 after 1, 2, 3 and 4 steps: sums of where one gradient has brought the model, step by step
    (0.0, 0.0, [1, 2, 3, 4]),
    (0.5, 0.0, [1, 1 + 1.5, 1 + 1.5 + 1.75, 1 + 1.5 + 1.75 + 1.875]),  # 1 + rho + ... + rho^k
    (0.0, 0.2, [1, 1 + 0.8, 1 + 0.8 + 0.64, 1 + 0.8 + 0.64 + 0.512]),  # (1 - eta mu)^k
    (0.5, 0.2, [1, 1 + 1.3, 1 + 1.3 + 1.19, 1 + 1.3 + 1.19 + 0.897]),  # velocities .5-.2, .15-.26, -.055-.238
    (0.0, 1.5, [1, 1 + 0.5, 1 + 0.5 + 0.25, 1 + 0.5 + 0.25 + 0.125]),  # (-.5)^k: a norm, not a sum
]


@pytest.mark.parametrize(("rho", "pull", "lengths"), NOVA_LENGTHS)
def test_the_length_of_local_work_by_hand(rho: float, pull: float, lengths: list[float]) -> None:
    sim = worlds.simulation(FedNova(), momentum=rho)
    found = sim.algorithm._length(torch.tensor([4, 1, 3, 2]), pull)  # type: ignore[attr-defined]
    torch.testing.assert_close(found, torch.tensor([lengths[k - 1] for k in (4, 1, 3, 2)], dtype=torch.float64))
    tau = torch.arange(1, 5, dtype=torch.float64)  # the paper's closed forms
    if pull == 0:
        paper = (tau - rho * (1 - rho**tau) / (1 - rho)) / (1 - rho)
        torch.testing.assert_close(paper, torch.tensor(lengths, dtype=torch.float64))
    elif rho == 0 and pull < 1:
        torch.testing.assert_close((1 - (1 - pull) ** tau) / pull, torch.tensor(lengths, dtype=torch.float64))


def test_on_a_constant_gradient_the_length_is_the_distance() -> None:
    """w - w_i = eta a_i g where every step has the same g, by the engine's own optimiser; here all a_k are positive."""
    rho, eta, mu = 0.5, 0.1, 2.0
    rule, w = SGD(rho), {"w": torch.zeros(1, 1, dtype=torch.float64)}
    memory, found = rule.init(w), []
    for _ in range(6):
        rule.step(w, {"w": 1 + mu * w["w"]}, memory, {"w": None}, eta)
        found.append(-w["w"].item() / eta)
    sim = worlds.simulation(FedNova(), momentum=rho)
    lengths = sim.algorithm._length(torch.arange(1, 7), eta * mu)  # type: ignore[attr-defined]
    torch.testing.assert_close(lengths, torch.tensor(found, dtype=torch.float64))


@pytest.mark.parametrize(("rho", "mu", "of_two", "of_four"), [(0.5, 0.0, 2.5, 6.125), (0.0, 2.0, 1.8, 2.952)])
def test_a_round_of_fednova_with_momentum_and_with_a_pull(rho: float, mu: float, of_two: float, of_four: float) -> None:
    """w - tau_eff sum p_i (w - w_i) / a_i; tau_eff sum p_i a_i, with a pull sum p_i tau_i. Eta mu is 0.2."""
    nova = worlds.simulation(FedNova(proximal_weight=mu), num_rounds=1, join_ratio=1.0, momentum=rho)
    ids, rnd = nova.cohort(nova.schedule[0]), Round(nova.schedule[0], 0.1)
    data, down = nova.federation.examples("train", ids), nova.download(ids, rnd)
    done = client_round(FedProx(proximal_weight=mu).bind(nova.algorithm.setup), nova.task, data, {}, down, rnd).local
    tau = [12, 10, 8, 4, 4, 2]  # two epochs of minibatches of five over 28, 22, 16, 10, 6 and 3 rows
    assert done.steps is not None and done.steps.tolist() == tau
    if rho:
        a = [sum(sum(rho**j for j in range(k + 1)) for k in range(t)) for t in tau]
    else:
        a = [sum((1 - 0.1 * mu) ** k for k in range(t)) for t in tau]
    assert (a[5], a[4], a[3]) == pytest.approx((of_two, of_four, of_four))
    sent = client_round(nova.algorithm, nova.task, data, {}, down, rnd).upload
    torch.testing.assert_close(sent["aux/a"], torch.tensor(a, dtype=torch.float64))
    p = [n / int(data.count.sum()) for n in data.count.tolist()]
    tau_eff = sum(q * t for q, t in zip(p, tau if mu else a, strict=True))
    w = nova.server["head.weight"].clone()
    d = [(w - done.params["head.weight"][i]) / a[i] for i in range(6)]
    nova.step()
    expected = w - tau_eff * sum(q * t for q, t in zip(p, d, strict=True))
    torch.testing.assert_close(nova.server["head.weight"], expected, rtol=1e-10, atol=1e-10)


def test_the_server_momentum_of_fednova_by_hand() -> None:
    """u_1 = D_1 / eta_1; w_2 = w_1 - eta_2 (beta u_1 + D_2 / eta_2) = w_1 - D_2 - beta (eta_2 / eta_1) D_1."""
    plain, slow = (worlds.simulation(FedNova(server_momentum=b), num_rounds=2, lr_decay=0.5) for b in (0.0, 0.6))
    w0 = dict(plain.server)
    plain.step()
    slow.step()
    w1 = dict(plain.server)
    checks.assert_close(slow.server, w1, w1)
    down = slow.download(slow.everybody, Round(slow.schedule[1], 0.05))
    assert down.shared.keys() == w0.keys()
    plain.step()
    slow.step()
    checks.assert_close(slow.server, {n: plain.server[n] - 0.6 * 0.5 * (w0[n] - w1[n]) for n in w0}, w0)
    assert slow.totals.down_bytes == plain.totals.down_bytes


def test_fednova_with_a_pull_and_equal_steps_goes_further_than_fedprox() -> None:
    """All a_i equal: w - (tau / a) (w - mean), where FedProx goes to the mean. 12 rows: 2 epochs of 3 minibatches."""
    nova, prox = (checks.played(m(proximal_weight=2.0), fed=EQUAL, num_rounds=1) for m in (FedNova, FedProx))
    a = (1 - 0.8**6) / 0.2
    w = nova.model.initial
    checks.assert_close(nova.server, {n: w[n] - 6 / a * (w[n] - prox.server[n]) for n in w})
