"""What a client predicts with as a module: the same answers, here and where the package is not."""

from __future__ import annotations

import copy
import functools
import json
import logging
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from personafl import (
    ALGORITHMS,
    DMPFL,
    FLDA,
    MOON,
    Algorithm,
    Ditto,
    DMPFLPlus,
    FedAvg,
    FedDST,
    Federation,
    FedFu,
    FedPeWS,
    FedRep,
    Inherit,
    Simulation,
    Source,
    StackedModel,
    UserError,
)
from personafl.core import tree
from personafl.core.normalization import Normalization
from personafl.core.types import Model, Params, Payload
from personafl.experiment import Client
from personafl.models import MLP, CharLSTM
from personafl.models.client_module import ClientModule
from tests import worlds
from tests.methods.test_contract import BUSY

CLIENT, ANOTHER = 3, 0


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.body(x)).relu())


def normed(policy: str) -> StackedModel:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return StackedModel(Normed(), worlds.federation().source.x[:2], policy=policy)


def parts(x: Tensor, y: Tensor, classes: int) -> Federation:
    split = np.split(np.arange(len(x)), np.cumsum(worlds.SIZES)[:-1])
    return Federation.build(Source("toy", x, y, classes), split, seed=0)


def texts() -> Federation:
    draw = torch.Generator().manual_seed(0)
    rows = sum(worlds.SIZES)
    return parts(torch.randint(12, (rows, 5), generator=draw), torch.randint(12, (rows,), generator=draw), 12)


def lstm() -> StackedModel:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return StackedModel(CharLSTM(12, embedding=4, hidden=6), texts().source.x[:2])


def photographs() -> Federation:
    draw = torch.Generator().manual_seed(0)
    rows = sum(worlds.SIZES)
    pixels = torch.randint(256, (rows, 1, 8, 8), generator=draw, dtype=torch.uint8)
    return parts(pixels, torch.randint(3, (rows,), generator=draw), 3)


GREY = Normalization((0.4,), (0.3,), axes=3)


def of_method(name: str) -> Simulation:
    method = ALGORITHMS[name](**BUSY.get(name, {}))
    return worlds.simulation(method, num_rounds=8 if isinstance(method, DMPFL) else 4)


def short(method: Algorithm, **options: object) -> Simulation:
    return worlds.simulation(method, num_rounds=2, **options)


# How methods and slots fill a client, beyond one network.
BASE = ("base_entropy_own", "base_entropy_global")
HOLDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "fedavg-adaptive": (("main", "global_"), ("labels_own",)),
    "dm-pfl-plus": (("main", "global_"), BASE),
    "fedfu": (("main", "received"), ("fusion_weight", "fusion_bias")),
    "flda": (("main", "personal"), ("gate_weight", "gate_bias")),
    "fed-rod": (("main",), ("own_weight", "own_bias")),
    "adaptive inference": (("main", "global_"), BASE),
    "adaptive inference of two networks each": (
        ("main", "received", "global_", "global_received"),
        ("fusion_gamma", "global_fusion_gamma", *BASE),
    ),
    "inherited model": (("main", "last"), ()),
    "contribution weights": (("main", "global_"), BASE),
    "warm-up, unfinished": (("main",), ("warm_on",)),
    "projection": (("main",), tuple(f"projection_{a}_{b}" for a in ("hidden", "output") for b in ("weight", "bias"))),
    "batch norm": (("main", "global_"), BASE),
    "batch norm, local": (("main", "personal"), ("gate_weight", "gate_bias")),
    "batch norm, drop": (("main", "global_"), BASE),
    "lstm": (("main", "personal"), ("gate_weight", "gate_bias")),
    "bytes": (("main", "personal"), ("gate_weight", "gate_bias")),
    "normalised": (("main", "personal"), ("gate_weight", "gate_bias")),
}
CASES: dict[str, Callable[[], Simulation]] = {
    **{name: functools.partial(of_method, name) for name in ALGORITHMS},
    "adaptive inference": lambda: short(Ditto(inference="per-sample")),
    "adaptive inference of two networks each": lambda: short(FedFu(fusion="multi", inference="per-sample")),
    "inherited model": lambda: short(FedRep(inherit=Inherit(answers="both"))),
    "contribution weights": lambda: short(FedAvg(weights="cowa", inference="per-sample")),
    "warm-up": lambda: worlds.simulation(FedPeWS(base=FedDST(), warmup_share=0.5), num_rounds=4),
    "warm-up, unfinished": lambda: worlds.simulation(FedPeWS(warmup_share=0.9)),
    "projection": lambda: short(MOON(projection=True)),
    "batch norm": lambda: short(Ditto(inference="per-sample"), model=normed("average")),
    "batch norm, local": lambda: short(FLDA(), model=normed("local")),
    "batch norm, drop": lambda: short(Ditto(inference="per-sample"), model=normed("drop")),
    "lstm": lambda: short(FLDA(), fed=texts(), model=lstm()),
    "bytes": lambda: short(FLDA(), fed=photographs(), kind="cnn"),
    "normalised": lambda: short(FLDA(), fed=photographs().with_normalization(GREY), kind="cnn"),
}


@functools.cache
def simulated(case: str) -> Simulation:
    sim = CASES[case]()
    while sim.played < (1 if case == "warm-up, unfinished" else len(sim.schedule)):
        sim.step()
    return sim


def client(sim: Simulation, id: int) -> Client:
    (deployed,) = sim.each(torch.tensor([id]), sim.deployed_models)
    return Client(id, sim, deployed)


def inputs(sim: Simulation) -> Tensor:
    return sim.federation.source.x[:40]


@torch.no_grad()
def answers(module: nn.Module, x: Tensor) -> Tensor:
    return module(x)


# One model for all clients, so that another client's gives the same.
GLOBAL = {
    *("fedavg", "fedprox", "scaffold", "fednova", "moon", "fedmmd", "fedfu", "feddst", "fedpews", "fedpews-fixed"),
    *("adaptive inference of two networks each", "contribution weights", "warm-up", "warm-up, unfinished"),
    *("projection", "fedlc"),
}
# The module and the engine take the same products and sum them in another order. A sum of n terms is then off by about
# n * eps of the sum of their sizes, here n < 300 in at most three layers: 1e-12 in float64 leaves a factor of five.
CLOSE = {"rtol": 1e-12, "atol": 1e-12}


@pytest.mark.parametrize("case", CASES)
def test_a_module_gives_what_its_client_predicts(case: str) -> None:
    sim = simulated(case)
    module, x = client(sim, CLIENT).module, inputs(sim)
    assert (tuple(module.networks), tuple(module.others)) == HOLDS.get(case, (("main",), ()))
    assert not module.training
    out = answers(module, x)
    torch.testing.assert_close(out, client(sim, CLIENT).predict(x), **CLOSE)
    other = client(sim, ANOTHER).module
    assert torch.equal(answers(other, x), out) == (case in GLOBAL)
    other.load_state_dict(module.state_dict())
    assert torch.equal(answers(other, x), out)
    if case not in HOLDS:  # one network that answers alone is the user's own
        assert type(module.network) is MLP
        assert torch.equal(answers(module.network, x.double()), out)


def test_a_module_chooses_between_networks_as_its_client_does() -> None:
    """In float32, and by bytes: pixels are scaled inside the module."""
    sim = short(DMPFLPlus(iterations=1), fed=photographs(), kind="cnn", precision="float32", lr=0.5)
    sim.run()
    mine, x = client(sim, CLIENT), sim.federation.source.x
    module = mine.module
    assert x.dtype == torch.uint8
    out = answers(module, x)
    torch.testing.assert_close(out, mine.predict(x), rtol=1e-5, atol=1e-5)  # n * eps, eps being 1.2e-7
    chosen = [torch.equal(row, answers(module.networks["global_"], x[i : i + 1] / 255)[0]) for i, row in enumerate(out)]
    assert 0 < sum(chosen) < len(chosen)
    assert out.dtype == torch.float32 and module.network.head.weight.dtype == torch.float32


def test_a_module_normalises_what_it_is_given() -> None:
    """Bytes and scaled floats alike, also after it was read into another client's module."""
    sim = short(FedAvg(), fed=photographs().with_normalization(GREY), kind="cnn")
    sim.run()
    mine, x = client(sim, CLIENT), inputs(sim)
    module = mine.module
    wanted = answers(module.network, (x.double() / 255 - 0.4) / 0.3)
    for given in (x, x.double() / 255):
        torch.testing.assert_close(answers(module, given), wanted, **CLOSE)
        torch.testing.assert_close(mine.predict(given), wanted, **CLOSE)
    assert {"scaling.scale", "scaling.shift"} < module.state_dict().keys()
    other = ClientModule(sim.model, sim.algorithm, mine.deployed, Normalization((0.0,), (1.0,), axes=3))
    assert not torch.equal(answers(other, x), answers(module, x))
    other.load_state_dict(module.state_dict())
    assert torch.equal(answers(other, x), answers(module, x))
    assert answers(module.float(), x).dtype == torch.float32


def test_weights_outside_a_clients_mask_are_zero() -> None:
    sim = simulated("dm-pfl")
    ids = torch.tensor([CLIENT])
    masks = sim.algorithm.client_masks(sim.store.gather(ids), tree.received(sim.download(ids, sim.now), 1))
    own = dict(client(sim, CLIENT).module.network.named_parameters())
    masks = {n: t[0] for n, t in masks.items() if n in own}
    assert sum(int((~t).sum()) for t in masks.values()) > 50
    assert all(not own[n][~t].any() and own[n][t].any() for n, t in masks.items())


def test_running_statistics_are_the_clients() -> None:
    mine = client(simulated("batch norm, local"), CLIENT)
    norm = mine.module.network.norm
    for n in ("running_mean", "running_var"):
        assert torch.equal(getattr(norm, n), mine.deployed[f"norm.{n}"][0])
        assert not torch.equal(getattr(norm, n), getattr(Normed().norm, n).double())


def exported(module: nn.Module, x: Tensor) -> torch.export.ExportedProgram:
    """For any number of examples. pytest would keep PyTorch's log of it, which takes longer than the export."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logging.getLogger("torch.__trace"), "handlers", [])
        return torch.export.export(module, (x,), dynamic_shapes={"x": {0: torch.export.Dim("batch")}})


WITHOUT_US = """
import sys

class Refused:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("personafl", "tests"):
            raise ImportError(name)

sys.meta_path.insert(0, Refused())
import json, torch
apart = {}
for case, (x, answers) in torch.load(f"{sys.argv[1]}/wanted.pt").items():
    program = torch.export.load(f"{sys.argv[1]}/{case}.pt2").module()
    apart[case] = max((program(x[:len(y)]) - y).abs().max().item() for y in answers)
print(json.dumps(apart))
"""


# One of each kind: what holds one network alone is called in the same way by every method.
KINDS = [
    "dm-pfl",
    "dm-pfl-plus",
    "fedfu",
    "inherited model",
    "warm-up, unfinished",
    "projection",
    "batch norm",
    "bytes",
    "normalised",
]


@pytest.mark.filterwarnings("ignore:.*_flat_weights")  # of any nn.LSTM that is exported
@pytest.mark.slow
@pytest.mark.parametrize("cases", [KINDS, list(CASES)], ids=["kinds", "all"])
def test_exported_modules_run_without_the_package(cases: list[str], tmp_path: Path) -> None:
    """Also with another number of examples than they were exported with."""
    wanted = {}
    for case in cases:
        sim = simulated(case)
        module, x = client(sim, CLIENT).module, inputs(sim)
        torch.export.save(exported(module, x[:9]), tmp_path / f"{case}.pt2")
        wanted[case] = x, [answers(module, x[:n]) for n in (len(x), 7)]  # some answers depend on the batch
    torch.save(wanted, tmp_path / "wanted.pt")
    command = [sys.executable, "-I", "-c", WITHOUT_US, str(tmp_path)]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert found.keys() == wanted.keys()
    assert max(found.values()) < CLOSE["atol"], found


def test_several_threads_may_call_a_module() -> None:
    sim = simulated("flda")
    module = client(sim, CLIENT).module
    sizes = (4, 9)
    wanted = [answers(module, inputs(sim)[:n]) for n in sizes]
    both = threading.Barrier(2)

    def meet(*_: object) -> None:
        both.wait(60)

    module.network.layers[0].register_forward_hook(meet)  # so both are within at a time
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda n: answers(module, inputs(sim)[:n]), sizes))
    assert all(map(torch.equal, found, wanted))


@dataclass(frozen=True, kw_only=True)
class Halves(Algorithm):
    """Clients hold half of every weight, and double them when they predict."""

    def personal(self, kept: Params, down: Payload) -> Params:
        return tree.prefixed({n: t / 2 for n, t in super().personal(kept, down).items()}, "values")

    def answer(self, model: Model, own: Params, x: Tensor, valid: Tensor | None = None) -> Tensor:
        return model({n: 2 * t for n, t in tree.under(own, "values").items()}, x, valid)


@dataclass(frozen=True, kw_only=True)
class Flat(Algorithm):
    """Clients hold all weights in one tensor."""

    def personal(self, kept: Params, down: Payload) -> Params:
        return {"aux/flat": torch.cat([t.flatten(1) for t in super().personal(kept, down).values()], 1)}

    def answer(self, model: Model, own: Params, x: Tensor, valid: Tensor | None = None) -> Tensor:
        shapes = self.info.shapes
        pieces = own["aux/flat"].split([torch.Size(s).numel() for s in shapes.values()], 1)
        return model({n: p.unflatten(1, s) for p, (n, s) in zip(pieces, shapes.items(), strict=True)}, x, valid)


@pytest.mark.parametrize(("method", "holds"), [(Halves(), "values_"), (Flat(), "initial")])
def test_a_method_may_make_its_weights_when_it_predicts(method: Algorithm, holds: str) -> None:
    sim = short(method)
    sim.run()
    mine, x = client(sim, CLIENT), inputs(sim)
    module = mine.module
    assert list(module.networks) == [holds]
    before = copy.deepcopy(module.state_dict())
    torch.testing.assert_close(answers(module, x), mine.predict(x), **CLOSE)
    program = exported(module, x[:9]).module()
    assert torch.equal(answers(program, x), answers(module, x))
    assert all(torch.equal(t, before[n]) for n, t in module.state_dict().items())
    with pytest.raises(UserError, match=f"has no main network, but {holds}"):
        _ = module.network


def test_tensors_whose_names_cannot_be_told_apart_are_refused() -> None:
    mine = client(simulated("fedavg"), CLIENT)
    sim, more = mine.simulation, {"a/b.c": torch.zeros(1), "a/b/c": torch.zeros(1)}
    with pytest.raises(UserError, match=r"'a/b.c' and 'a/b/c' of a client would both be called 'a_b_c'"):
        ClientModule(sim.model, sim.algorithm, mine.deployed | more)
