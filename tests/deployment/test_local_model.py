"""The model a client ends up with: what the simulator's client predicts, without any server."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from personafl.core.errors import UserError
from personafl.deployment import load_model, local_model
from personafl.deployment.local_model import MODEL
from tests.deployment import worlds


@pytest.mark.parametrize("method", ["dm-pfl-plus", "ditto", "flda", "fedphp"])
def test_a_model_predicts_what_the_simulator_s_client_predicts(method: str, tmp_path: Path) -> None:
    text = worlds.recipe(method, training={"num_rounds": 2}, data={"normalize": "standardize"})
    server, _ = worlds.deployed(text, tmp_path)
    server.run()
    sim = worlds.simulated(text)
    norm = sim.federation.source.normalization
    assert norm is not None
    x = worlds._digits().x[:50].double()
    for n in (0, 3):
        model = load_model(tmp_path / f"c{n}" / server.experiment / f"c{n}" / MODEL)
        ready = sim.deployed_models(sim.model, torch.tensor([n]))
        wanted = sim.algorithm.predict(sim.model, ready, norm(x, torch.float64)[None])[0]
        torch.testing.assert_close(model.predict(x.numpy()), wanted, rtol=1e-9, atol=1e-9)
        assert model.client == f"c{n}" and model.scores == server.roster.members[n].scores
        assert model.class_names is None


def test_a_model_predicts_in_the_units_of_its_targets(tmp_path: Path) -> None:
    """Training saw normalised prices of 200,000 + 10,000 y dollars, where y is about 3 (0 + 1 + 2 + 3 + 4) = 30."""
    from tests.deployment.test_coordinator import HERE, PRICES, in_dollars

    text = worlds.recipe("ditto", training={"num_rounds": 2}, data={**PRICES, "dataset": f"{HERE}:in_dollars"})
    server, _ = worlds.deployed(text, tmp_path)
    server.run()
    sim = worlds.simulated(text)
    source, (x, y, _) = sim.federation.source, in_dollars()
    norm, units = source.normalization, source.target_normalization
    assert norm is not None and units is not None and units.mean == pytest.approx([y.mean()], rel=0.2)
    assert server.world is not None and server.world.target_normalization is not None
    assert server.world.target_normalization[0] == pytest.approx(units.mean, rel=1e-12)
    assert server.world.target_normalization[1] == pytest.approx(units.std, rel=1e-12)
    for n in (0, 3):
        model = load_model(tmp_path / f"c{n}" / server.experiment / f"c{n}" / MODEL, trust=True)
        ready = sim.deployed_models(sim.model, torch.tensor([n]))
        normalized = sim.algorithm.predict(sim.model, ready, norm(torch.from_numpy(x).double(), torch.float64)[None])[0]
        wanted = normalized * units.std[0] + units.mean[0]
        torch.testing.assert_close(model.predict(x), wanted, rtol=1e-9, atol=1e-3)
        assert 350_000 < model.predict(x).mean() < 650_000


@pytest.fixture
def left(tmp_path: Path) -> Path:
    text = worlds.recipe("fedavg", training={"num_rounds": 1})
    server, _ = worlds.deployed(text, tmp_path)
    server.run()
    return tmp_path / "c0" / server.experiment / "c0" / MODEL


def test_a_damaged_model_is_refused_in_one_line(left: Path) -> None:
    with pytest.raises(UserError, match=r"examples of shape \(3, 5\): must be \(examples, 1, 8, 8\)"):
        load_model(left).predict(np.zeros((3, 5)))
    about, tensors = left / "model.json", left / "deployed.safetensors"
    whole, raw = about.read_text(), tensors.read_bytes()
    told = json.loads(whole)
    halves = [whole[: len(whole) * part // 5] for part in range(5)]
    for text in (
        *halves,
        whole[:-1],
        "{",
        "[]",
        "5",
        "{}",
        json.dumps(told | {"world": 5}),
        json.dumps(told | {"tensors": []}),
    ):
        about.write_text(text)
        with pytest.raises(UserError) as e:
            load_model(left)
        assert "\n" not in str(e.value)
    about.write_text(whole)
    tensors.write_bytes(raw[:-1])
    with pytest.raises(UserError, match="is cut short"):
        load_model(left)
    about.unlink()
    with pytest.raises(UserError, match="no model is in it"):
        load_model(left)


def test_half_a_model_is_none(left: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that ends while a model is written over another leaves neither."""
    model = load_model(left)

    def ended(path: Path, tensors: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(local_model, "write_tensors", ended)
    with pytest.raises(KeyboardInterrupt):
        local_model.write_model(left, "c0", model.world, {}, {})
    with pytest.raises(UserError, match="no model is in it"):
        load_model(left)
