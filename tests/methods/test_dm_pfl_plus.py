"""DM-PFL+: the choice between the two models, by numbers derived in sight."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from personafl import DMPFL, DMPFLPlus, FedAvg
from personafl.core import tree
from personafl.core.criteria import entropy
from tests import checks, worlds


def test_base_entropies_are_means_over_samples_not_over_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five at a time: the clients' 28, 6, 16, 10, 3 and 22 rows end with batches of 3, 1, 1, 5, 3 and 2."""
    monkeypatch.setattr("personafl.data.batches.SWEEP", 5)
    sim = checks.played(DMPFLPlus(readjust_share=0.3, readjust_interval=1, iterations=1), num_rounds=4, lr=0.5)
    ready = sim.deployed_models(sim.model, sim.everybody)
    by_batch = 0.0
    for c in range(6):
        x, _ = checks.rows_of(sim, c)
        for name, model in (("own", ready), ("global", tree.under(ready, "global"))):
            params = {n: model[n][c] for n in sim.model.info.shapes}
            found = torch.stack([entropy(checks.outputs(params, row[None].double())[0]) for row in x])
            assert float(ready[f"base_entropy/{name}"][c]) == pytest.approx(float(found.mean()), rel=1e-9)
            batched = torch.stack([part.mean() for part in found.split(5)]).mean()
            by_batch = max(by_batch, abs(float(batched / found.mean()) - 1))
    assert by_batch > 1e-5  # the two means can be told apart, far beyond rounding


class _Fixed:
    """A model whose outputs are its parameters."""

    info = worlds.model().info

    def __call__(self, params: dict[str, Tensor], x: Tensor, valid: object = None, keys: object = None) -> Tensor:
        return params["z"].unsqueeze(1)


def answer(z_c: list[float], z_g: list[float], be_c: float = 0.0, be_g: float = 0.0) -> Tensor:
    deployed = {
        "z": torch.tensor([z_c]),
        "global/z": torch.tensor([z_g]),
        "base_entropy/own": torch.tensor([be_c]),
        "base_entropy/global": torch.tensor([be_g]),
    }
    return FedAvg(inference="per-sample").predict(_Fixed(), deployed, torch.zeros(1, 1, 1))[0, 0]


def test_equal_models_answer_as_both() -> None:
    assert answer([1.0, 2.0, 0.5], [1.0, 2.0, 0.5]).tolist() == [1.0, 2.0, 0.5]


def test_parallel_logits_leave_the_choice_to_entropy() -> None:
    """Sim = 1 removes the base entropies, however different: the surer model answers."""
    flat, sharp = [1.0, 2.0, 0.0], [2.0, 4.0, 0.0]
    assert entropy(torch.tensor(sharp)) < entropy(torch.tensor(flat))
    assert answer(flat, sharp, be_c=5.0, be_g=0.0).tolist() == sharp
    assert answer(sharp, flat, be_c=0.0, be_g=5.0).tolist() == sharp


def test_an_overconfident_personal_model_yields_where_the_two_disagree() -> None:
    """E_c - (1 - Sim) BE_c < E_g - (1 - Sim) BE_g, with orthogonal logits so that Sim = 0."""
    own, common = [3.0, 0.0, 0.0], [0.0, 2.0, 0.0]
    e_c, e_g = entropy(torch.tensor(own)), entropy(torch.tensor(common))
    assert e_c < e_g
    assert answer(own, common).tolist() == own  # equal base levels: the surer one
    gap = float(e_g - e_c)
    assert answer(own, common, be_c=0.1, be_g=0.1 + 0.9 * gap).tolist() == own
    assert answer(own, common, be_c=0.1, be_g=0.1 + 1.1 * gap).tolist() == common


def test_plus_trains_like_dm_pfl_and_differs_in_inference_only() -> None:
    plain, plus = (
        worlds.simulation(DMPFL(readjust_share=0.3, readjust_interval=1)),
        worlds.simulation(DMPFLPlus(readjust_share=0.3, readjust_interval=1)),
    )
    plain.run()
    plus.run()
    assert all(torch.equal(plain.server[n], plus.server[n]) for n in plain.server)
    assert plain.totals == plus.totals
    ready = plus.deployed_models(plus.model, plus.everybody)
    assert {"base_entropy/own", "base_entropy/global"} <= ready.keys()
