"""FML: its limits."""

from __future__ import annotations

import torch

from personafl import FML, FedAvg, LocalOnly
from personafl.core import tree
from tests import checks


def test_without_teaching_fml_is_local_beside_uniform_fedavg() -> None:
    fml, local, fedavg = (
        checks.played(FML(alpha=1.0, beta=1.0)),
        checks.played(LocalOnly()),
        checks.played(FedAvg(weights="uniform")),
    )
    checks.assert_close(
        fml.deployed_models(fml.model, fml.everybody), local.deployed_models(local.model, local.everybody)
    )
    checks.assert_close(fml.server, fedavg.server)


def test_with_teaching_alone_the_private_model_approaches_the_meme() -> None:
    """alpha = 0: the private model sees no label, only the meme's probabilities."""
    sim = checks.played(FML(alpha=0.0, beta=1.0), num_rounds=30, join_ratio=1.0)
    ready = sim.deployed_models(sim.model, sim.everybody)
    x = sim.federation.source.x[:20].expand(6, 20, -1)
    with torch.no_grad():
        private = sim.model(ready, x).softmax(-1)
        meme = sim.model(tree.stack(sim.server, 6), x).softmax(-1)
        start = sim.model(tree.stack(sim.model.initial, 6), x).softmax(-1)
    assert (private - meme).abs().mean() < 0.7 * (start - meme).abs().mean()
