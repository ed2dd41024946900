"""The model a client ends up with: what the simulator's client predicts, without any server."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from personafl.core.errors import UserError
from personafl.deployment import load_model, local_model
from personafl.deployment.federation_spec import build_parts
from personafl.deployment.local_model import MODEL
from personafl.models import frozen_weights
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
        local_model.write_model(left, "c0", model.world, {}, {}, build_parts(model.world).model)
    with pytest.raises(UserError, match="no model is in it"):
        load_model(left)


PROCESS = [0]


class RandomFeatures(nn.Module):
    """A head on features that every process draws anew: frozen weights, a rotation, and a table that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(PROCESS[0])
        self.features, self.head = nn.Linear(64, 16).requires_grad_(False), nn.Linear(16, 10)
        self.features.weight.copy_(torch.randn(16, 64, generator=draw))
        self.register_buffer("rotation", torch.randn(8, generator=draw, dtype=torch.complex64))
        self.register_buffer("table", torch.rand(16, generator=draw), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.features(x.flatten(1)) * self.table
        return self.head(torch.view_as_real(torch.view_as_complex(h.reshape(-1, 8, 2)) * self.rotation).flatten(1))


class Scaled(nn.Module):
    """A linear model of features times a number that no file has."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.head = 1.0 + PROCESS[0], nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(x.flatten(1) * self.scale)
        return out


def test_a_model_of_other_outputs_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = worlds.recipe("ditto", training={"num_rounds": 1}, model={"name": f"{__name__}:Scaled"})
    server, _ = worlds.deployed(text, tmp_path / "scaled")
    server.run()
    folder = tmp_path / "scaled" / "c0" / server.experiment / "c0" / MODEL
    load_model(folder, trust=True)
    monkeypatch.setattr(f"{__name__}.PROCESS", [1])
    with pytest.raises(UserError, match="gives other outputs than that of the deployment for the same weights"):
        load_model(folder, trust=True)


@pytest.fixture
def of_features(tmp_path: Path) -> tuple[Path, Tensor]:
    """The folder of a client's model on frozen features, and what the simulator's client answers to 50 digits."""
    text = worlds.recipe("ditto", training={"num_rounds": 1}, model={"name": f"{__name__}:RandomFeatures"})
    server, _ = worlds.deployed(text, tmp_path / "features")
    server.run()
    sim = worlds.simulated(text)
    ready = sim.deployed_models(sim.model, torch.tensor([0]))
    wanted = sim.algorithm.predict(sim.model, ready, worlds._digits().x[None, :50].double())[0]
    return tmp_path / "features" / "c0" / server.experiment / "c0" / MODEL, wanted


def test_a_model_has_the_frozen_weights_it_was_trained_with(
    of_features: tuple[Path, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, wanted = of_features
    monkeypatch.setattr(f"{__name__}.PROCESS", [1])
    model = load_model(folder, trust=True)
    torch.testing.assert_close(model.predict(worlds._digits().x[:50].double()), wanted, rtol=1e-9, atol=1e-9)


@pytest.fixture
def nothing_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frozen_weights, "SAVED_FROZEN", 0)


def test_other_frozen_weights_than_those_hashed_are_refused(
    nothing_saved: None, of_features: tuple[Path, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, wanted = of_features
    model = load_model(folder, trust=True)
    torch.testing.assert_close(model.predict(worlds._digits().x[:50].double()), wanted, rtol=1e-9, atol=1e-9)
    monkeypatch.setattr(f"{__name__}.PROCESS", [1])
    with pytest.raises(UserError, match=r"other frozen weights than the deployment: .*features\.weight.* differ"):
        load_model(folder, trust=True)


def test_a_folder_of_an_earlier_version_is_refused_where_the_first_weights_differ(
    of_features: tuple[Path, Tensor], left: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds no frozen weights, only the hash of all first weights; without frozen weights that does not matter."""
    for folder in (of_features[0], left):
        told = json.loads((folder / "model.json").read_text())
        del told["frozen"]
        (folder / "model.json").write_text(json.dumps(told))
    model = load_model(of_features[0], trust=True)
    torch.testing.assert_close(model.predict(worlds._digits().x[:50].double()), of_features[1], rtol=1e-9, atol=1e-9)
    monkeypatch.setattr(f"{__name__}.PROCESS", [1])
    with pytest.raises(
        UserError, match=r"weights that no client trains \(features\.bias, features\.weight, rotation\)"
    ):
        load_model(of_features[0], trust=True)
    load_model(left)


@pytest.mark.parametrize("frozen", [None, 5, {}, {"hashes": 5}, {"hashes": {}, "tensors": {}}])
def test_damaged_records_of_frozen_weights_are_refused(left: Path, frozen: object) -> None:
    told = json.loads((left / "model.json").read_text())
    (left / "model.json").write_text(json.dumps(told | {"frozen": frozen}))
    with pytest.raises(UserError):
        load_model(left)
