"""The same numbers on a GPU: run with `-m gpu` where there is one."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import personafl
from personafl import (
    ALGORITHMS,
    Ditto,
    Evaluation,
    FedAvg,
    Federation,
    Machine,
    Simulation,
    StackedModel,
    Training,
    arrays,
)
from personafl.core import rng
from personafl.core.algorithm import Algorithm
from personafl.core.local_work import ClientState, LocalWork, Turn
from personafl.core.normalization import Normalization
from personafl.core.types import Batch, Examples, Round, Row, Task
from personafl.data import batches
from personafl.engine.server_round import ServerRound
from personafl.evaluation import report
from personafl.models import MODELS, ResNet18, recurrent
from tests import kills, worlds
from tests.engine.test_admission import assert_the_largest_is_found
from tests.evaluation.common import ASKED, Flat, federation
from tests.experiment.test_checkpoint import CutError, cut_at
from tests.methods.test_contract import BUSY
from tests.simulation.test_faulty_clients import DAMPED, one, poisoned, simulated, without

PARTS = np.split(np.arange(sum(worlds.SIZES)), np.cumsum(worlds.SIZES)[:-1])
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:.*units for")]


SLOTTED: dict[str, tuple[str, dict[str, Any]]] = {
    "ditto, prior-free, stream": ("ditto", {"prior_free": True, "inference": "stream"}),
    "dm-pfl, prior-free, batch": ("dm-pfl", {"prior_free": True, "inference": "batch"}),
    "fedavg-ft, mixture": ("fedavg-ft", {"inference": "mixture"}),
}


def method(name: str) -> Algorithm:
    of, more = SLOTTED.get(name, (name, {}))
    return ALGORITHMS[of](**BUSY.get(of, {}), **more)


@pytest.mark.parametrize("kind", ["mlp", "cnn"])
@pytest.mark.parametrize("name", [*sorted(ALGORITHMS), *SLOTTED])
def test_a_gpu_agrees_with_a_cpu_in_float64(name: str, kind: str) -> None:
    sims = []
    for device in ("cpu", "cuda"):
        algorithm = method(name)
        fed, training = worlds.federation(kind), worlds.training()
        sims.append(
            Simulation(fed, worlds.model(kind), algorithm, training, worlds.QUIET, machine=Machine(device=device))
        )
        sims[-1].run()
    cpu, gpu = sims
    assert cpu.totals == gpu.totals
    for n, t in cpu.server.items():
        torch.testing.assert_close(gpu.server[n].cpu(), t, rtol=1e-9, atol=1e-9)
    a, b = (s.deployed_models(s.model, s.everybody) for s in sims)
    for n in a:
        torch.testing.assert_close(b[n].cpu(), a[n], rtol=1e-9, atol=1e-9)
    scores = [torch.cat(s.evaluator.on_test(s.model, d, s.everybody)).cpu() for s, d in zip(sims, (a, b), strict=True)]
    assert torch.equal(*scores)


@pytest.mark.parametrize("when", ["after_aggregation", "after_local"])
def test_what_is_read_late_is_what_was_computed(when: str) -> None:
    """Losses and scores of every round, which stay on the device until all of it has been sent off."""
    shown = Evaluation(eval_every=1, shift="none", train_loss=True, when=when, clients="selected")  # type: ignore[arg-type]
    rows = []
    for device in ("cpu", "cuda"):
        fed = Federation.build(worlds.federation().source, PARTS, 0, validation_share=0.2)
        sim = Simulation(
            fed, worlds.model(), ALGORITHMS["ditto"](), worlds.training(), shown, machine=Machine(device=device)
        )
        sim.run()
        rows.append([{n: v for n, v in row.items() if n != "seconds"} for row in sim.rows])
    for cpu, gpu in zip(*rows, strict=True):
        assert cpu.keys() == gpu.keys() >= {"loss", "personal", "validation", "train_loss", "global"}
        for n, v in cpu.items():
            assert gpu[n] == (v if v is None or isinstance(v, str) else pytest.approx(v, rel=1e-9)), n


def test_a_convolution_without_a_kernel_is_each_clients_own() -> None:
    model = StackedModel(MODELS["cifar-cnn"].build((3, 32, 32), 10), torch.randn(2, 3, 32, 32))
    model = model.to(torch.device("cuda"), torch.float64)
    params = {n: torch.stack([t + 0.01 * i for i in range(3)]) for n, t in model.initial.items()}
    x = torch.randn(3, 4, 3, 32, 32, dtype=torch.float64, device="cuda")
    together = model(params, x)
    for c in range(3):
        alone = model({n: t[c : c + 1] for n, t in params.items()}, x[c : c + 1])
        torch.testing.assert_close(together[c : c + 1], alone, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", ["mlp", "cnn"])
@pytest.mark.parametrize("name", ["fedavg", "dm-pfl", "fedpac"])
def test_examples_on_the_host_give_the_same_numbers(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)  # two runs alike differ without it
    shown = dataclasses.replace(worlds.QUIET, shift="donor")
    runs = []
    for where in ("device", "host"):
        algorithm = ALGORITHMS[name](**BUSY.get(name, {}))
        fed, train = worlds.federation(kind), worlds.training()
        sim = Simulation(
            fed, worlds.model(kind), algorithm, train, shown, machine=Machine(device="cuda", data_on=where)
        )  # type: ignore[arg-type]
        assert sim.federation.source.x.is_cuda == (where == "device")
        vars(sim)["graph_cache"] = None  # replayed steps round differently in their last bits
        sim.run()
        runs.append((sim, sim.clients_table()))
    (device, table), (host, same) = runs
    assert table == same
    assert all(torch.equal(device.server[n], t) for n, t in host.server.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 28, 28), (2, 7, 5)])
@pytest.mark.parametrize("by_channel", [True, False])
def test_minibatches_of_bytes_are_fetched_and_augmented_in_one_launch(
    shape: tuple[int, ...], dtype: torch.dtype, by_channel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit by bit what the slow way gives on the same GPU; on a CPU, which rounds twice, the same but for that."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randint(256, (50, *shape), dtype=torch.uint8, generator=draw)
    rows, real = torch.randint(50, (3, 9), generator=draw), torch.tensor([9, 9, 4])
    mean = tuple(0.1 * (c + 1) for c in range(shape[0]))
    normalization = Normalization(mean, mean, 3) if by_channel else None
    host = Examples(x, torch.arange(50), rows, real, torch.arange(3), True, normalization)
    there = dataclasses.replace(host, x=x.cuda(), y=host.y.cuda(), rows=rows.cuda())
    keys = rng.key(7, "noise", 3, torch.tensor([5, 6, 2**40]))
    asked = there, there.rows, real, False, keys.cuda(), dtype
    fast = batches.gather(*asked)
    monkeypatch.setattr(batches, "image_kernels", None)
    slow, on_host = batches.gather(*asked), batches.gather(host, rows, real, False, keys, dtype)
    for a, b in ((fast.x, slow.x), (fast.y, slow.y), (fast.valid, slow.valid), (fast.count, slow.count)):
        assert torch.equal(a, b) and a.dtype == b.dtype
    torch.testing.assert_close(fast.x.cpu(), on_host.x, rtol=1e-6, atol=1e-6)


def test_augmented_images_are_the_same_on_a_gpu() -> None:
    keys = rng.key(0, "noise", torch.arange(3))
    batch = Batch(torch.rand(3, 5, 3, 32, 32), torch.zeros(3, 5), None, torch.full((3,), 5), keys)
    moved = dataclasses.replace(batch, x=batch.x.cuda(), keys=keys.cuda())
    assert torch.equal(batches.augmented(moved).x.cpu(), batches.augmented(batch).x)


@pytest.mark.parametrize("name", [*sorted(ALGORITHMS), *SLOTTED])
def test_replayed_steps_are_the_steps(name: str) -> None:
    """Rates differ from round to round, so a rate that was recorded would be seen."""
    runs = []
    for record in (True, False):
        algorithm = method(name)
        train = worlds.training(lr_decay=0.9)
        sim = Simulation(
            worlds.federation(),
            worlds.model(),
            algorithm,
            train,
            worlds.QUIET,
            machine=Machine(device="cuda", capture=record),
        )
        sim.run()
        runs.append(sim)
    replayed, played = runs
    assert replayed.graph_cache is not None and replayed.graph_cache.graphs() > 0
    assert played.graph_cache is None
    a, b = (s.deployed_models(s.model, s.everybody) for s in runs)
    for n, t in (replayed.server | a).items():
        torch.testing.assert_close(t, (played.server | b)[n], rtol=1e-12, atol=1e-12)


class Sequences(nn.Module):
    """Images as sequences of their rows."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.head = layer, nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        found = self.layer(x.squeeze(1))
        states = found[0] if isinstance(found, tuple) else found
        out: Tensor = self.head(states.mean(1))
        return out


class Strided(nn.Module):
    """Norms and strides, as a residual network has them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(1, 6, 3, 2, 1, bias=False), nn.BatchNorm2d(6)
        self.second, self.again = nn.Conv2d(6, 6, 3, 1, 1, bias=False), nn.BatchNorm2d(6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x)).relu()
        out: Tensor = self.head((x + self.again(self.second(x))).relu().mean((2, 3)))
        return out


class Scanned(nn.Module):
    """A convolution that has no form for stacks, and its rows as a sequence."""

    def __init__(self, units: int) -> None:
        super().__init__()
        self.look, self.lstm = nn.Conv2d(1, 6, 3, 2, 1), nn.LSTM(24, units, batch_first=True)
        self.head = nn.Linear(units, 3)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.look(x).relu().permute(0, 2, 1, 3).flatten(2)
        out: Tensor = self.head(self.lstm(rows)[0][:, -1])
        return out


class Placed(nn.Module):
    """Rows of images as a sequence whose places are learnt, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.places, self.drop = nn.Parameter(torch.randn(8, 8) / 3), nn.Dropout(0.3)
        self.inside, self.head = nn.TransformerEncoderLayer(8, 2, 16, 0.3, batch_first=True), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.inside(self.drop(x.squeeze(1) + self.places)).mean(1))
        return out


MODULES: dict[str, Callable[[], nn.Module]] = {
    "strided": Strided,
    "resnet": lambda: ResNet18(1, 3, "cifar", width=4),
    "lstm": lambda: Sequences(nn.LSTM(8, 8, num_layers=2, batch_first=True)),
    "lstm with dropout": lambda: Sequences(nn.LSTM(8, 8, num_layers=2, dropout=0.5, batch_first=True)),
    "lstm in lanes": lambda: Scanned(recurrent.SMALL + 8),
    "gru": lambda: Sequences(nn.GRU(8, 8, batch_first=True)),
    "transformer": lambda: Sequences(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)),
    "learnt places": Placed,
    "batch norm": lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)),
}
# Three quarters are for training, in minibatches of 10: three whole ones, in a ragged world also some of 4, 5, 7, 8.
EVEN, RAGGED = (40, 40, 40, 40, 40, 40), (40, 20, 32, 36, 38, 40)


@pytest.mark.parametrize("name", ["fedavg", "ditto", "dm-pfl", "scaffold", "fedrep"])
@pytest.mark.parametrize("sizes", [RAGGED, EVEN], ids=["ragged", "even"])
@pytest.mark.parametrize("made", list(MODULES))
@pytest.mark.filterwarnings("ignore:.*leave room", "ignore:.*leaves only")
def test_any_module_gives_the_numbers_of_a_cpu(made: str, sizes: tuple[int, ...], name: str) -> None:
    """Stacked, one client at a time in lanes, or unrecorded: in float64 what a CPU finds client by client."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = MODULES[made]()
    fed = worlds.federation("cnn", sizes)
    model = StackedModel(module, fed.source.x[:2])
    options = {"model": model, "fed": fed, "num_rounds": 3, "join_ratio": 1.0, "batch_size": 10, "momentum": 0.5}
    options["lr"] = 0.002 if made == "resnet" else 0.1  # its norms over few examples magnify rounding
    method = ALGORITHMS[name](**BUSY.get(name, {}))
    cpu, recorded, played = (
        worlds.simulation(method, "cnn", device=device, capture=capture, **options)
        for device, capture in (("cpu", True), ("cuda", True), ("cuda", False))
    )
    for sim in (cpu, recorded, played):
        sim.run()
    assert recorded.graph_cache is not None and recorded.graph_cache.graphs() > 0
    assert recorded.model.one_by_one == (recorded.plan.lanes > 0)
    for gpu in (recorded, played):
        a, b = (s.server | s.deployed_models(s.model, s.everybody) for s in (cpu, gpu))
        for n, t in a.items():
            torch.testing.assert_close(b[n].cpu(), t, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("precision", "share"), [("float32", 1e-3), ("tf32", 2e-2), ("bf16", 0.1)])
def test_norms_and_relus_in_lanes_are_those_of_a_cpu(
    precision: str, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Together with what is added between them, where nothing is padded."""
    kinds: set[tuple[bool, bool]] = set()

    def seen(*given: Any, added: Tensor | None = None, relu: bool = False) -> Tensor:
        kinds.add((added is not None, relu))
        out: Tensor = alone(*given, added=added, relu=relu)
        return out

    norms = pytest.importorskip("personafl.accel.norm_kernels", exc_type=ImportError)
    alone = norms.batch_norm
    monkeypatch.setattr(norms, "batch_norm", seen)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = Strided()
    moved = []
    for device in ("cpu", "cuda"):
        train = worlds.training(num_rounds=3, lr=0.1, precision=precision if device == "cuda" else "float32")
        sim = Simulation(
            worlds.federation("cnn", EVEN), module, FedAvg(), train, worlds.QUIET, machine=Machine(device=device)
        )
        sim.run()
        moved.append({n: (sim.server[n] - t).cpu() for n, t in sim.model.initial.items()})
    assert sim.plan.lanes > 0 and kinds == {(False, True), (True, True)}
    for n, wanted in moved[0].items():
        assert (moved[1][n] - wanted).abs().max() < share * wanted.abs().max(), n


@pytest.mark.parametrize("units", [8, recurrent.SMALL + 8])
def test_an_lstm_of_one_client_trains_in_bf16(units: int) -> None:
    """Behind a convolution whose outputs are coarse, as PyTorch's own layer and as ours."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = Scanned(units)
    fed, servers = worlds.federation("cnn", EVEN), []
    for precision in ("float32", "bf16"):
        train = worlds.training(num_rounds=3, lr=0.1, precision=precision)
        sim = Simulation(fed, module, FedAvg(), train, worlds.QUIET, machine=Machine(device="cuda"))
        sim.run()
        assert sim.plan.lanes > 0
        servers.append({n: sim.server[n] - t for n, t in sim.model.initial.items()})
    for n, moved in servers[0].items():
        assert (servers[1][n] - moved).abs().max() < 0.1 * moved.abs().max(), n


@pytest.mark.parametrize("augment", ["none", "crop-flip"])
@pytest.mark.parametrize("where", ["device", "host"])
def test_normalised_images_give_the_numbers_of_a_cpu(where: str, augment: str) -> None:
    """Also from steps that were recorded, for which scale and shift must be there beforehand."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randint(256, (sum(worlds.SIZES), 1, 8, 8), dtype=torch.uint8, generator=draw)
    source = arrays(x, torch.randint(3, (len(x),), generator=draw), classes=3)
    fed = Federation.build(source, PARTS, 0).with_normalization(Normalization((0.4,), (0.3,), axes=3))
    sims = []
    for device in ("cpu", "cuda"):
        machine = Machine(device=device, data_on=where)  # type: ignore[arg-type]
        train = worlds.training(augment=augment)
        sims.append(Simulation(fed, worlds.model("cnn"), Ditto(), train, worlds.QUIET, machine=machine))
        sims[-1].run()
    cpu, gpu = sims
    assert where == "host" or (gpu.graph_cache is not None and gpu.graph_cache.graphs() > 0)
    for n, t in cpu.server.items():
        torch.testing.assert_close(gpu.server[n].cpu(), t, rtol=1e-9, atol=1e-9)


def test_a_step_that_cannot_be_recorded_is_played() -> None:
    class Asking(FedAvg):
        def turns(self, local: ClientState, rnd: Round) -> list[LocalWork]:
            return [dataclasses.replace(t, loss=self.asked) for t in super().turns(local, rnd) if isinstance(t, Turn)]

        def asked(self, task: Task, local: ClientState, batch: Batch) -> Tensor:
            loss = task.loss(local.params, batch)
            return loss * (1 if float(loss.detach().sum()) > 0 else 2)  # the host must wait: no graph has that

    train = worlds.training(num_rounds=4)
    asked = Simulation(
        worlds.federation(), worlds.model(), Asking(), train, worlds.QUIET, machine=Machine(device="cuda")
    )
    with pytest.warns(UserWarning, match="cannot be recorded"):
        asked.run()
    plain = Simulation(
        worlds.federation(),
        worlds.model(),
        FedAvg(),
        train,
        worlds.QUIET,
        machine=Machine(device="cuda", capture=False),
    )
    plain.run()
    for n, t in plain.server.items():
        torch.testing.assert_close(asked.server[n], t, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["fedavg", "ditto", "dm-pfl"])
def test_a_run_stays_under_its_memory_limit(name: str) -> None:
    """400 test images each: activations of one pass over a stack would alone be more than the limit."""
    gc.collect()
    held = torch.cuda.memory_allocated() / 2**30  # workspaces of libraries, by earlier tests of this process
    clients, limit = 40, held + 0.5
    x = torch.randint(256, (clients * 500, 1, 28, 28), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    source = arrays(x, torch.arange(len(x)) % 10)
    fed = Federation.build(source, np.split(np.arange(len(x)), clients), 0, test_share=0.8)
    model = StackedModel(MODELS["pfllib-cnn"].build((1, 28, 28), 10), torch.rand(2, 1, 28, 28))
    assert 4 * model.info.activations * clients * 400 > 0.5 * 2**30
    train = Training(num_rounds=12, join_ratio=0.5, local_epochs=1, batch_size=50)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    sim = Simulation(fed, model, ALGORITHMS[name](), train, worlds.QUIET, machine=Machine(device="cuda", memory=limit))
    sim.run()
    assert torch.cuda.max_memory_allocated() < limit * 2**30


@pytest.mark.filterwarnings("ignore:.*leave room")
def test_results_that_are_kept_hold_no_recordings() -> None:
    fed, model = worlds.federation(), worlds.model()
    sim = Simulation(fed, model, Ditto(), worlds.training(), worlds.QUIET, machine=Machine(device="cuda"))
    sim.run()
    cache, full = sim.graph_cache, torch.cuda.memory_allocated()
    assert cache is not None and (recorded := cache.graphs()) > 0
    cache.forget()
    assert torch.cuda.memory_allocated() < full and cache.graphs() == recorded
    recipe = {"data": {"dataset": "digits"}, "training": {"num_rounds": 6}, "algorithms": ["ditto"]}
    result = personafl.run(recipe, device="cuda", quiet=True)
    cache, full = result["ditto"].simulation.graph_cache, torch.cuda.memory_allocated()
    assert cache is not None and cache.graphs() > 0
    cache.forget()
    assert torch.cuda.memory_allocated() == full  # there was nothing to forget


def test_masks_are_compared_on_a_gpu_as_on_a_cpu() -> None:
    found = []
    for device in ("cpu", "cuda"):
        sim = Simulation(
            worlds.federation(), worlds.model(), method("dm-pfl"), worlds.training(), worlds.QUIET,
            machine=Machine(device=device),
        )  # fmt: skip
        sim.run()
        found.append(sim.masks())
    cpu, gpu = found
    assert cpu is not None and gpu is not None and cpu.keys() == gpu.keys() >= {"pairs", "by_client"}
    for name, value in cpu.items():
        assert gpu[name] == (pytest.approx(value, rel=1e-12) if name not in ("pairs", "by_client") else value), name


@pytest.mark.parametrize("corrupted", ["own", "both"])
def test_a_gpu_finds_the_same(corrupted: Any) -> None:
    """Of these two corruptions no bit depends on the device."""
    asked = dataclasses.replace(
        ASKED, corruptions=("contrast", "pixelate"), corrupted=corrupted, corrupt_shifted=True, change=5
    )
    training, model = worlds.training(num_rounds=4), StackedModel(Flat(), torch.rand(2, 1, 8, 8))
    cpu, gpu = (
        Simulation(federation(), model, Ditto(), training, asked, machine=Machine(device=d)) for d in ("cpu", "cuda")
    )
    for sim in (cpu, gpu):
        sim.run()
    a, b = cpu.evaluations(), gpu.evaluations()
    assert a.keys() == b.keys()
    assert all(np.array_equal(a[n], b[n]) for n in a)


# What is not finite, and what is interrupted


# With and without a client in the stack, and recorded or not, a sum has another order. In float64 that is far below
# 1e-9, the bound between devices above; in float32, 2^-24 of a sum in each of about 50 steps, and what follows from it.
NEAR = {"float64": 1e-9, "float32": 1e-4}


def test_the_largest_number_is_finite_only_if_all_are() -> None:
    assert_the_largest_is_found("cuda")


@pytest.mark.parametrize(
    ("name", "precision", "factor"),
    [
        *((n, "float64", 1e200) for n in ("fedavg", "ditto", "dm-pfl", "fedpac", "co-pfl", "scaffold")),
        *((n, "float32", 1e30) for n in ("fedavg", "ditto")),
    ],
)
@pytest.mark.filterwarnings("ignore:.*leave room")
def test_a_client_whose_training_is_not_finite_is_left_out(
    name: str, precision: str, factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stages are played in the hope that all numbers are finite; the ones it was wrong about again, with a look."""
    method = ALGORITHMS[name](**DAMPED.get(name, {}))
    rounds = 8 if name == "dm-pfl" else 4
    options = {"fed": poisoned(0, factor), "precision": precision, "device": "cuda", "num_rounds": rounds}
    hopeful, careful = (simulated(method, **options) for _ in range(2))
    monkeypatch.setattr(careful, "_plays_optimistically", lambda: False)
    alone = without(simulated(method, **options), one(0), monkeypatch)
    played: list[int] = []
    real = hopeful._stage

    def stage(now: ServerRound) -> Row:
        played.append(hopeful.played)
        return real(now)

    monkeypatch.setattr(hopeful, "_stage", stage)
    for sim in (hopeful, careful, alone):
        sim.run()
    wrong = [t for t, row in enumerate(hopeful.rows) if "quarantined" in row]
    assert wrong
    assert played == sorted([*range(len(hopeful.schedule)), *wrong])
    assert all(hopeful.rows[t]["quarantined"] == careful.rows[t]["quarantined"] for t in wrong)
    assert [q["client"] for t in wrong for q in hopeful.rows[t]["quarantined"]] == [0] * len(wrong)
    assert hopeful.state.diverged == careful.state.diverged == {0}
    others = hopeful.everybody[1:]
    for get in (lambda s: s.server, lambda s: s.store.gather(others), lambda s: s.known.gather(others)):
        mine = get(hopeful)
        assert all(t.isfinite().all() for t in mine.values() if t.is_floating_point())
        for other in (careful, alone):
            for n, t in get(other).items():
                torch.testing.assert_close(mine[n], t, rtol=NEAR[precision], atol=NEAR[precision])


@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize(
    ("method", "network"), [("ditto", "mlp"), ("dm-pfl", "mlp"), ("scaffold", "mlp"), ("ditto", "small-cnn")]
)
@pytest.mark.filterwarnings("ignore:.*leave room", "ignore:allocation=")
def test_a_run_that_is_interrupted_goes_on_to_the_bit(
    method: str, network: str, precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps are recorded anew, so others than in the run that was not are played as they are."""
    monkeypatch.setattr(report, "html", lambda *_, **__: "a page")
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)  # two runs alike may differ without it
    recipe: dict[str, Any] = {
        "data": {"dataset": "digits", "num_clients": 8},
        "model": {"name": network},
        "training": {"num_rounds": 6, "local_epochs": 3, "join_ratio": 0.5, "lr": 0.3, "precision": precision},
        "evaluation": {"degrees": [0.0, 1.0], "draws": 1},
        "algorithms": [method],
    }
    words: dict[str, Any] = {"device": "cuda", "quiet": True, "checkpoint_every": 1}
    whole = personafl.run(recipe, out=tmp_path / "whole", **words)
    cache = whole[method].simulation.graph_cache
    assert cache is not None and cache.graphs() > 0
    with pytest.raises(CutError):
        personafl.run(recipe, out=tmp_path / "cut", watch=cut_at(4), **words)
    personafl.resume(tmp_path / "cut", quiet=True)
    assert kills.differences(tmp_path / "cut", tmp_path / "whole") == []
