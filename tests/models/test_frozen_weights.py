"""Weights that no client trains: saved while they are small, compared by hash otherwise, the same everywhere."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from safetensors import safe_open
from torch import Tensor, nn

import personafl
from personafl import UserError
from personafl.core.errors import Note
from personafl.deployment.federation_spec import Form, World, build_parts
from personafl.experiment import model_files
from personafl.models import StackedModel, frozen_weights
from personafl.models.frozen_weights import hash_weights
from personafl.simulation.ranks import SingleProcess, check_same_weights
from tests.deployment import worlds
from tests.simulation.test_ranks import together

SMALL: dict[str, Any] = {
    "data": {"dataset": "digits", "num_clients": 4},
    "training": {"num_rounds": 1, "local_epochs": 1, "batch_size": 64},
    "evaluation": {"shift": "none"},
    "algorithms": [{"name": "fedavg"}, {"name": "local"}],
}
INPUTS = torch.rand(3, 1, 8, 8, generator=torch.Generator().manual_seed(0))


class Backbone(nn.Module):
    """A head on frozen random features; `seed` stands for the process that builds it."""

    def __init__(self, seed: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.frozen = nn.Linear(64, 16, dtype=dtype).requires_grad_(False)
            self.norm = nn.BatchNorm1d(16).requires_grad_(False)
            self.norm.running_mean = torch.randn(16)
            self.register_buffer("scale", torch.rand(16))
            self.register_buffer("table", torch.rand(16), persistent=False)
            self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        z = self.norm(self.frozen(x.flatten(1).to(self.frozen.weight.dtype)).to(x.dtype))
        return self.head(torch.relu(z * self.scale + self.table))


def answers(result: personafl.Result, label: str = "fedavg") -> Tensor:
    return result[label].client(2).predict(INPUTS)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tensor]:
    out = tmp_path_factory.mktemp("frozen") / "run"
    return out, answers(personafl.run(SMALL, model=Backbone(0), out=out))


def test_a_run_is_read_back_with_its_frozen_weights(finished: tuple[Path, Tensor]) -> None:
    out, before = finished
    other = Backbone(1)
    weights = copy.deepcopy(other.state_dict())
    assert torch.equal(answers(personafl.Result.load(out, model=other)), before)
    assert all(torch.equal(t, weights[n]) for n, t in other.state_dict().items())  # the user's module is his own


@pytest.mark.parametrize(("dtype", "precision"), [(torch.float32, "float64"), (torch.bfloat16, "float32")])
def test_frozen_weights_of_any_type_come_back(tmp_path: Path, dtype: torch.dtype, precision: str) -> None:
    made = personafl.run(
        SMALL | {"training": SMALL["training"] | {"precision": precision}},
        "algorithms=fedavg",
        model=Backbone(0, dtype),
    )
    made.save(tmp_path / "run")  # of a simulation, whose weights have the type it computes in
    assert torch.equal(answers(personafl.Result.load(tmp_path / "run", model=Backbone(1, dtype))), answers(made))


def test_large_frozen_weights_are_compared_by_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Buffers of 16 numbers are saved, the weight of 64 * 16 numbers is not.
    monkeypatch.setattr(frozen_weights, "SAVED_FROZEN", 64 * 8)
    with pytest.warns(Note, match=r"weights that no client trains \(frozen.weight\) are not saved"):
        made = personafl.run(SMALL, model=Backbone(0), out=tmp_path / "run")
    with pytest.raises(UserError, match=r"other frozen weights than that of this run: frozen.weight differ"):
        personafl.Result.load(tmp_path / "run", model=Backbone(1))
    same = Backbone(1)
    same.frozen.load_state_dict(Backbone(0).frozen.state_dict())
    assert torch.equal(answers(personafl.Result.load(tmp_path / "run", model=same)), answers(made))


def test_tables_a_module_computes_itself_are_not_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frozen_weights, "SAVED_FROZEN", 0)
    with pytest.warns(Note, match="not saved"):
        personafl.run(SMALL, "algorithms=fedavg", model=Backbone(0), out=tmp_path / "run")
    module = Backbone(0)
    module.table.mul_(1 + 1e-7)  # as another version of PyTorch may compute it
    personafl.Result.load(tmp_path / "run", model=module)
    module.scale.mul_(1 + 1e-6)
    with pytest.raises(UserError, match="scale differ"):
        personafl.Result.load(tmp_path / "run", model=module)


def test_a_run_folder_whose_frozen_weights_are_damaged_is_refused(
    finished: tuple[Path, Tensor], tmp_path: Path
) -> None:
    shutil.copytree(finished[0], tmp_path / "run")
    for damage in (b"", b"\x02\0\0\0\0\0\0\0{}", None):
        path = tmp_path / "run" / "fedavg" / "seed-0" / "checkpoint" / "frozen.safetensors"
        path.unlink() if damage is None else path.write_bytes(damage)
        with pytest.raises(UserError, match=r"frozen.safetensors"):
            personafl.Result.load(tmp_path / "run", model=Backbone(0))


def test_a_resumed_run_goes_on_with_its_frozen_weights(tmp_path: Path, finished: tuple[Path, Tensor]) -> None:
    def stop(label: str, *_: object) -> None:
        if label == "local":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        personafl.run(SMALL, model=Backbone(0), out=tmp_path / "run", watch=stop)
    went_on = personafl.resume(tmp_path / "run", model=Backbone(1))
    whole = personafl.Result.load(finished[0], model=Backbone(2))
    for label in ("fedavg", "local"):
        assert torch.equal(answers(went_on, label), answers(whole, label))
    assert went_on["local"].summary["hashes"] == went_on["fedavg"].summary["hashes"]


def test_methods_not_begun_before_a_run_is_resumed_have_the_weights_of_the_others(tmp_path: Path) -> None:
    def stop(label: str, *_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        personafl.run(SMALL, model=Backbone(0), out=tmp_path / "run", seeds=[0, 1], watch=stop)
    went_on = personafl.resume(tmp_path / "run", model=Backbone(1))
    assert len({m.summary["hashes"]["init"] for m in went_on}) == 1  # a module that was given is the same for all seeds
    assert {m.simulation.model.frozen_hashes["frozen.weight"] for m in went_on} == {
        hash_weights(dict(Backbone(0).named_parameters()))["frozen.weight"]
    }


def test_what_a_comparison_must_share_includes_frozen_weights() -> None:
    first, second = Backbone(0), Backbone(0)
    second.scale.add_(1)
    example = torch.rand(2, 1, 8, 8)
    assert StackedModel(first, example).initial_hash() == StackedModel(Backbone(0), example).initial_hash()
    assert StackedModel(first, example).initial_hash() != StackedModel(second, example).initial_hash()


def test_hashes_tell_types_shapes_and_numbers_apart() -> None:
    tensors = [
        torch.zeros(4),
        torch.zeros(2, 2),
        torch.zeros(4, dtype=torch.float64),
        torch.zeros(4, dtype=torch.bfloat16),
        torch.zeros(4, dtype=torch.bool),
        torch.zeros(4, dtype=torch.complex64),
        torch.tensor(0.0),
        torch.zeros(0),
        torch.tensor([0.0, 0.0, 0.0, 1.0]),
    ]
    assert len({hash_weights({"t": t})["t"] for t in tensors}) == len(tensors)
    rows = torch.arange(6.0).view(2, 3)
    assert hash_weights({"t": rows.t()}) == hash_weights({"t": rows.t().contiguous()})


def test_ranks_with_other_frozen_weights_are_refused() -> None:
    other = Backbone(0)
    other.scale.add_(1)
    models = [StackedModel(m, torch.rand(2, 1, 8, 8)) for m in (Backbone(0), other)]

    def work(world: SingleProcess) -> str:
        try:
            check_same_weights(models[world.rank], world)
        except UserError as e:
            return str(e)
        return ""

    for message in together(2, work):
        assert message.startswith("rank 1 has built the model with other weights than rank 0: scale differ")


class Tables(nn.Module):
    """Constants in types that a run does not compute in, as NumPy and saved files have them."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(seed)
        self.head = nn.Linear(64, 10)
        for kind in (torch.float64, torch.float16, torch.bfloat16):
            table = torch.rand(64, generator=draw, dtype=torch.float64).to(kind)
            self.register_buffer(f"table_{str(kind).removeprefix('torch.')}", table)
        self.register_buffer("offset", torch.rand(9, generator=draw, dtype=torch.float64))
        self.register_buffer("turn", torch.polar(torch.ones(64), torch.rand(64, generator=draw)).to(torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        z = x.flatten(1) * self.table_float64.to(x.dtype) * self.table_float16.to(x.dtype)
        return self.head(z * self.table_bfloat16.to(x.dtype) * self.turn.imag.to(x.dtype) + self.offset.sum().to(x))


@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_constants_are_saved_as_they_were_given(tmp_path: Path, precision: str) -> None:
    recipe = SMALL | {"training": SMALL["training"] | {"precision": precision}}
    out, first = tmp_path / "run", Tables(0)
    made = personafl.run(recipe, "algorithms=fedavg", model=first, out=out)
    with safe_open(out / "fedavg" / "seed-0" / "checkpoint" / "frozen.safetensors", "pt") as file:
        for n, t in first.named_buffers():
            value = torch.view_as_real(t) if t.is_complex() else t
            assert file.get_tensor(n).dtype == value.dtype and torch.equal(file.get_tensor(n), value)
    read = personafl.Result.load(out, model=Tables(1))
    assert torch.equal(answers(read), answers(made))
    read.save(tmp_path / "again")  # what was read is written again, and read again
    assert torch.equal(answers(personafl.Result.load(tmp_path / "again", model=Tables(2))), answers(made))


@pytest.mark.parametrize("length", [2, 3])
def test_complex_constants_are_read_wherever_they_lie_in_memory(tmp_path: Path, length: int) -> None:
    """PyTorch ends the process when it converts complex numbers of 16 bytes at an address that 16 does not divide."""
    model = StackedModel(Rotary(numbers=7), INPUTS[:2])
    rotation = model.frozen["rotation"].clone()
    pairs = {
        "before": torch.rand(length, dtype=torch.float64),  # 16 or 24 bytes, behind a header of one length
        "rotation": torch.view_as_real(rotation.to(torch.complex128)),
    }
    (tmp_path / "checkpoint").mkdir()
    saved = hash_weights({"rotation": rotation.to(torch.complex128)})
    hashes = {"hashes": json.dumps(model.frozen_hashes | saved)}
    (tmp_path / "checkpoint" / "frozen.safetensors").write_bytes(safetensors.torch.save(pairs, hashes))
    model.restore_frozen({"rotation": torch.zeros_like(rotation)})
    model_files.restore_frozen(model, tmp_path)
    assert torch.equal(model.frozen["rotation"], rotation)


def of_this_process() -> nn.Module:
    """A model whose frozen weights are those of the process it is built in."""
    return Backbone(PROCESS[0])


PROCESS = [0]


def test_nodes_of_a_deployment_must_have_the_same_frozen_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    form = Form((1, 8, 8), "float32", "classification", (), 10)
    recipe = worlds.recipe("fedavg", model={"name": f"{__name__}:of_this_process"})
    world = World("e", "1", recipe, 4, 100, form, None)
    server = build_parts(world).model.initial_hash()
    assert build_parts(world).model.initial_hash() == server
    monkeypatch.setattr(f"{__name__}.PROCESS", [1])
    assert build_parts(world).model.initial_hash() != server


class Rotary(nn.Module):
    """Features that are turned by complex numbers, as rotary embeddings are."""

    def __init__(self, numbers: int = 4) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(64, 2 * numbers), nn.Linear(2 * numbers, 10)
        self.register_buffer("rotation", torch.polar(torch.ones(numbers), torch.arange(float(numbers))))

    def forward(self, x: Tensor) -> Tensor:
        z = torch.view_as_complex(self.body(x.flatten(1)).view(len(x), -1, 2))
        return self.head(torch.view_as_real(z * self.rotation.to(z.dtype)).flatten(1))


@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_complex_buffers_keep_their_imaginary_part(tmp_path: Path, precision: str) -> None:
    recipe = SMALL | {"training": SMALL["training"] | {"precision": precision}}
    made = personafl.run(recipe, "algorithms=fedavg", model=Rotary(), out=tmp_path / "run")
    client = made["fedavg"].client(2)
    alone = Rotary()
    alone.body.double()
    alone.head.double()
    weights = client.module.network.state_dict()
    alone.load_state_dict({n: t for n, t in weights.items() if n != "rotation"}, strict=False)
    expected = alone(client.module.prepared(INPUTS).double())
    assert (client.predict(INPUTS) - expected).abs().max() < 1e-5
    assert torch.equal(answers(personafl.Result.load(tmp_path / "run", model=Rotary())), client.predict(INPUTS))


class Adapter(nn.Module):
    """A trained weight beside a frozen layer called `original`, as parts of a stack call the layers they replace."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.original = nn.Linear(64, 10).requires_grad_(False)
            self.rest = nn.Module()
            self.rest.original = nn.Linear(64, 10).requires_grad_(False)
            self.rest.register_buffer("weight", torch.rand(10, 64))
            self.norm = nn.BatchNorm1d(64).requires_grad_(False)
            self.norm.running_mean = torch.randn(64)
            scaled = nn.Linear(64, 10)
            nn.utils.parametrizations.weight_norm(scaled)  # its weight is parametrizations.weight.original1
            self.scaled = scaled.requires_grad_(False)
            self.weight = nn.Parameter(torch.zeros(10, 64))

    def forward(self, x: Tensor) -> Tensor:
        z = self.norm(x.flatten(1))
        fixed = self.original(z) + self.rest.original(z) + self.scaled(z)
        return fixed + nn.functional.linear(z, self.rest.weight + self.weight)


def test_layers_called_original_keep_their_own_weights() -> None:
    x = torch.rand(2, 1, 8, 8)
    first, other = StackedModel(Adapter(0), x), StackedModel(Adapter(1), x)
    other.restore_frozen(first.frozen)
    assert other.frozen_hashes == first.frozen_hashes
    params = {n: t[None] for n, t in first.initial.items()}
    assert params.keys() == {"weight"}
    assert torch.equal(other(params, x[None]), first(params, x[None]))
    assert torch.equal(other.client(first.initial)(x), Adapter(0).eval()(x))


def test_sparse_constants_are_compared_by_hash() -> None:
    sparse = {"graph": torch.eye(4).to_sparse(), "scale": torch.ones(4)}
    assert frozen_weights.small_weights(sparse).keys() == {"scale"}
    assert hash_weights(sparse)["graph"] == hash_weights({"graph": torch.eye(4)})["graph"]
