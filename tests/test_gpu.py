"""The same numbers on a GPU: run with `-m gpu` where there is one."""

from __future__ import annotations

import pytest
import torch

from personafl import ALGORITHMS, Simulation
from personafl.models import MODELS, StackedModel
from tests import worlds
from tests.algorithms.test_contract import BUSY

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:.*units for")]


@pytest.mark.parametrize("kind", ["mlp", "cnn"])
@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_a_gpu_agrees_with_a_cpu_in_float64(name: str, kind: str) -> None:
    sims = []
    for device in ("cpu", "cuda"):
        algorithm = ALGORITHMS[name](**BUSY.get(name, {}))
        fed, training = worlds.federation(kind), worlds.training()
        sims.append(Simulation(fed, worlds.model(kind), algorithm, training, worlds.QUIET, device=device))
        sims[-1].run()
    cpu, gpu = sims
    assert cpu.totals == gpu.totals
    for n, t in cpu.server.items():
        torch.testing.assert_close(gpu.server[n].cpu(), t, rtol=1e-9, atol=1e-9)
    a, b = (s.ready(s.model, s.everybody) for s in sims)
    for n in a:
        torch.testing.assert_close(b[n].cpu(), a[n], rtol=1e-9, atol=1e-9)


def test_grouped_convolution_is_each_clients_own() -> None:
    model = StackedModel(MODELS["cifar-cnn"].build((3, 32, 32), 10), torch.randn(2, 3, 32, 32))
    model = model.to(torch.device("cuda"), torch.float64)
    params = {n: torch.stack([t + 0.01 * i for i in range(3)]) for n, t in model.initial.items()}
    x = torch.randn(3, 4, 3, 32, 32, dtype=torch.float64, device="cuda")
    together = model(params, x)
    for c in range(3):
        alone = model({n: t[c : c + 1] for n, t in params.items()}, x[c : c + 1])
        torch.testing.assert_close(together[c : c + 1], alone, rtol=1e-10, atol=1e-10)
