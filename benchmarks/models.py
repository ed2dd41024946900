"""Every kind of model against a plain loop over clients, in one run.

    python benchmarks/models.py [--models resnet18 lstm] [--precision tf32 bf16] [--batch 64] [--clients 20]
                                [--spread even dirichlet] [--device cuda] [--out benchmarks/results/models.json]

A round of FedAvg with one local epoch over clients of 480 examples, or as many in the mean (`dirichlet`: shares of
Dirichlet(0.3), at least ten). The examples are random: what is measured does not look at them. Four contestants take
turns, and medians are compared:

loop          a client after the other: tensors on the device, `torch.optim.SGD`, PyTorch's own defaults (convolutions
              in TF32, matrix products in float32)
same          the same loop at the run's precision (bf16: autocast)
replayed      the same with every client's step recorded as a CUDA graph once and replayed (GPU, even clients)
personafl     `Simulation.step`: sampling, download, training, admission, aggregation

`first` is the mean of personafl's first ten rounds, the very first included, nothing compiled before but what an
earlier process left in the cache. Records are appended to a JSON list.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from personafl import Evaluation, FedAvg, Federation, Machine, Simulation, Training, arrays
from personafl.core import rng
from personafl.experiment.environment import environment
from personafl.models import MODELS

COMMIT = os.environ.get("PERSONAFL_COMMIT")  # where the checkout's own is not at hand
EACH, LR, NEVER = 480, 0.01, 10**6
IMAGE, STEPS, WORDS, CLASSES = (3, 32, 32), 80, 80, 10


class OwnCNN(nn.Module):
    """The zoo's CIFAR CNN as a user writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 64, 5), nn.Conv2d(64, 64, 5)
        self.pool = nn.MaxPool2d(2, 2)
        self.fc1, self.fc2, self.fc3 = nn.Linear(1600, 384), nn.Linear(384, 192), nn.Linear(192, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(F.relu(self.conv1(x)))
        x = self.pool(F.relu(self.conv2(x)))
        x = F.relu(self.fc2(F.relu(self.fc1(torch.flatten(x, 1)))))
        out: Tensor = self.fc3(x)
        return out


class OwnDropout(nn.Module):
    """One whose forward drops numbers itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(3072, 256), nn.Linear(256, 128), nn.Linear(128, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(F.relu(self.first(x.flatten(1))), 0.2, self.training)
        out: Tensor = self.third(F.dropout(F.relu(self.second(x)), 0.2, self.training))
        return out


class OwnGRU(nn.Module):
    """A recurrent layer without a form for stacks."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 8)
        self.gru = nn.GRU(8, 128, batch_first=True)
        self.out = nn.Linear(128, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.gru(self.words(x))[0][:, -1])
        return out


class OwnLSTM(nn.Module):
    """Two layers over a sequence of words."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 8)
        self.lstm = nn.LSTM(8, 256, num_layers=2, batch_first=True)
        self.out = nn.Linear(256, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.lstm(self.words(x))
        out: Tensor = self.out(states[:, -1])
        return out


class OwnTransformer(nn.Module):
    """Two encoder layers over a sequence of words, and the mean over it."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 128)
        layer = nn.TransformerEncoderLayer(128, 4, 256, dropout=dropout, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(128, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.encoder(self.words(x)).mean(1))
        return out


class OwnPlaced(OwnTransformer):
    """The same with dropout, and places of words that are learnt: numbers of its own, which no stack has a form for."""

    def __init__(self) -> None:
        super().__init__(dropout=0.1)
        self.places = nn.Parameter(torch.randn(STEPS, 128) / 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.encoder(self.words(x) + self.places).mean(1))
        return out


def sequential_cnn() -> nn.Module:
    block = [nn.Conv2d(3, 64, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(64, 64, 5), nn.ReLU(), nn.MaxPool2d(2)]
    head = [nn.Flatten(), nn.Linear(1600, 384), nn.ReLU(), nn.Linear(384, 192), nn.ReLU(), nn.Linear(192, CLASSES)]
    return nn.Sequential(*block, *head)


def sequential_mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(3072, 128), nn.ReLU(), nn.Linear(128, CLASSES))


@dataclass(frozen=True)
class Contest:
    """A model and what it is fed."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    words: bool = False


def zoo(name: str, shape: tuple[int, ...] = IMAGE) -> Contest:
    return Contest(lambda: MODELS[name].build(shape, CLASSES), shape)


TABLE = {
    "cifar-cnn": zoo("cifar-cnn"),
    "sequential-cnn": Contest(sequential_cnn, IMAGE),
    "own-cnn": Contest(OwnCNN, IMAGE),
    "mlp": Contest(sequential_mlp, IMAGE),
    "vgg11": zoo("vgg11"),
    "resnet18-cifar": zoo("resnet18-cifar"),
    "lstm": Contest(OwnLSTM, (STEPS,), words=True),
    "transformer": Contest(OwnTransformer, (STEPS,), words=True),
}
DIGIT = (1, 28, 28)
OTHERS = {
    **{n: zoo(n, (64,)) for n in ("pews-mlp", "har-dnn")},
    **{n: zoo(n, DIGIT) for n in ("small-cnn", "mcmahan-cnn", "mnist-cnn", "leaf-cnn", "dropout-cnn", "pfllib-cnn")},
    **{n: zoo(n) for n in ("fedpac-cnn", "fedrep-cnn", "tfcnn", "tfcnn-fc", "pews-cnn", "vgg11-fc", "vgg8-fc")},
    "resnet18": zoo("resnet18"),
    "own-dropout": Contest(OwnDropout, IMAGE),
    "own-placed": Contest(OwnPlaced, (STEPS,), words=True),
    "gru": Contest(OwnGRU, (STEPS,), words=True),
    "char-lstm": Contest(lambda: MODELS["char-lstm"].build((STEPS,), WORDS), (STEPS,), words=True),
}
MODELS_OF = TABLE | OTHERS


def federation(contest: Contest, clients: int, spread: str, each: int) -> Federation:
    """Clients with random examples; each has eight more for testing."""
    sizes = np.full(clients, each)
    if spread == "dirichlet":
        shares = rng.generator(0, "sizes").dirichlet(np.full(clients, 0.3))
        sizes = np.maximum((shares * each * clients).astype(int), 10)
    draw = torch.Generator().manual_seed(0)
    rows = int(sizes.sum()) + 8 * clients
    x = torch.randint(WORDS, (rows, *contest.shape), generator=draw) if contest.words else None
    x = torch.randn(rows, *contest.shape, generator=draw) if x is None else x
    source = arrays(x, torch.randint(CLASSES, (rows,), generator=draw), classes=CLASSES)
    ends = np.cumsum(sizes)
    trains = np.split(np.arange(ends[-1]), ends[:-1])
    tests = np.split(np.arange(ends[-1], rows), clients)
    return Federation.build(source, trains, seed=0, tests=tests)


@contextmanager
def rounding(precision: str) -> Iterator[None]:
    """PyTorch's own defaults, or the products of a precision; bf16 is autocast."""
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest" if precision in ("default", "float32") else "high")
    torch.backends.cudnn.allow_tf32 = precision != "float32"
    cast: AbstractContextManager[Any] = nullcontext()
    if precision == "bf16":
        cast = torch.autocast("cuda" if torch.cuda.is_available() else "cpu", torch.bfloat16)
    try:
        with cast:
            yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]


class Loop:
    """FedAvg, a client after the other, from tensors on the device."""

    def __init__(self, module: nn.Module, fed: Federation, batch: int, precision: str, device: str) -> None:
        self.module, self.batch, self.precision = copy.deepcopy(module).to(device).train(), batch, precision
        self.x, self.y = fed.source.x.to(device), fed.source.y.to(device)
        self.rows = [r.to(device) for r in clients_rows(fed)]
        self.start = {n: t.clone() for n, t in self.module.state_dict().items()}
        self.total = float(sum(len(r) for r in self.rows))

    def __call__(self) -> None:
        with rounding(self.precision):
            mean = {n: torch.zeros_like(t) for n, t in self.start.items() if t.is_floating_point()}
            for rows in self.rows:
                self.module.load_state_dict(self.start)
                self._train(rows)
                for n, t in self.module.state_dict().items():
                    if n in mean:
                        mean[n].add_(t, alpha=len(rows) / self.total)
            self.start |= mean

    def _train(self, rows: Tensor) -> None:
        optimizer = torch.optim.SGD(self.module.parameters(), lr=LR)
        order = rows[torch.randperm(len(rows), device=rows.device)]
        for part in torch.split(order, self.batch):
            optimizer.zero_grad()
            F.cross_entropy(self.module(self.x[part]), self.y[part]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()


class Replayed(Loop):
    """The same with a graph of every client's step, one for each size of minibatch."""

    def __init__(self, module: nn.Module, fed: Federation, batch: int, precision: str, device: str) -> None:
        super().__init__(module, fed, batch, precision, device)
        self.graphs: list[dict[int, tuple[torch.cuda.CUDAGraph, Tensor]]] = []
        self.modules = [copy.deepcopy(self.module) for _ in self.rows]
        pool = torch.cuda.graph_pool_handle()
        with rounding(precision):
            for own, rows in zip(self.modules, self.rows, strict=True):
                self.graphs.append({})
                for size in {len(p) for p in torch.split(rows, batch)}:
                    held = rows[:size].clone()
                    self._step(own, held)  # cuDNN chooses, and the allocator grows, outside the recording
                    torch.cuda.synchronize()
                    graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(graph, pool=pool):
                        self._step(own, held)
                    self.graphs[-1][size] = graph, held

    def _step(self, module: nn.Module, rows: Tensor) -> None:
        params: list[Tensor] = list(module.parameters())
        grads = torch.autograd.grad(F.cross_entropy(module(self.x[rows]), self.y[rows]), params)
        with torch.no_grad():
            torch._foreach_add_(params, grads, alpha=-LR)

    def __call__(self) -> None:
        mean = {n: torch.zeros_like(t) for n, t in self.start.items() if t.is_floating_point()}
        for module, graphs, rows in zip(self.modules, self.graphs, self.rows, strict=True):
            module.load_state_dict(self.start)
            for part in torch.split(rows[torch.randperm(len(rows), device=rows.device)], self.batch):
                graph, held = graphs[len(part)]
                held.copy_(part)
                graph.replay()
            for n, t in module.state_dict().items():
                if n in mean:
                    mean[n].add_(t, alpha=len(rows) / self.total)
        self.start |= mean


def clients_rows(fed: Federation) -> list[Tensor]:
    data = fed.examples("train", torch.arange(fed.num_clients))
    return [rows[: int(n)] for rows, n in zip(data.rows.cpu(), data.count.tolist(), strict=True)]


def timed(work: Callable[[], Any], device: str) -> float:
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    begun = time.perf_counter()
    work()
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return time.perf_counter() - begun


def contest(
    name: str, precision: Any, batch: int, clients: int, spread: str, args: argparse.Namespace
) -> dict[str, Any]:
    """One line of the table."""
    it = MODELS_OF[name]
    fed = federation(it, clients, spread, args.each)
    torch.manual_seed(0)
    module = it.build()
    training = Training(
        num_rounds=NEVER, join_ratio=1.0, local_epochs=1, batch_size=batch, lr=LR, seed=0, precision=precision
    )
    evaluation, machine = (
        Evaluation(eval_every=NEVER, shift="none"),
        Machine(device=args.device, memory=args.memory, threads_per_client=args.threads_per_client),
    )
    cuda = args.device.startswith("cuda")
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    begun = time.perf_counter()
    sim = Simulation(fed, module, FedAvg(), training, evaluation, machine=machine)
    early = [timed(sim.step, args.device) for _ in range(args.first)]
    to_first = time.perf_counter() - begun - sum(early[1:])
    peak = torch.cuda.max_memory_reserved() / 2**30 if cuda else None  # recordings hold theirs without allocating it
    loops: dict[str, Callable[[], Any]] = {"loop": Loop(module, fed, batch, "default", args.device)}
    if cuda and precision != "default":
        loops["same"] = Loop(module, fed, batch, "tf32" if precision == "auto" else precision, args.device)
    if cuda and spread == "even" and args.replayed:
        loops["replayed"] = Replayed(module, fed, batch, "tf32" if precision == "auto" else precision, args.device)
    times: dict[str, list[float]] = {n: [] for n in (*loops, "personafl")}
    for turn in range(args.repeats + 1):
        for n, work in (*loops.items(), ("personafl", sim.step)):
            seconds = timed(work, args.device)
            if turn:
                times[n].append(seconds)
    median = {n: statistics.median(t) for n, t in times.items()}
    own, where = median["personafl"], environment(sim)
    return {
        "workload": "models",
        "model": name,
        "device": where["device"],
        "hardware": where["hardware"],
        "precision": sim.training.precision,
        "batch": batch,
        "clients": clients,
        "each": args.each,
        "spread": spread,
        "milliseconds": {n: 1e3 * t for n, t in median.items()},
        "ratio": {n: t / own for n, t in median.items() if n != "personafl"},
        "first": {"to_first_round": to_first, "ratio": median["loop"] / statistics.mean(early)},
        "peak_gpu_gib": peak,
        "threads": torch.get_num_threads(),
        "torch": where["torch"],
        "version": where["version"],
        "commit": COMMIT or where["commit"],
        "date": time.strftime("%Y-%m-%d"),
    }


def line(found: dict[str, Any]) -> str:
    ratios = "  ".join(f"{n} {r:6.2f}" for n, r in (found["ratio"] | {"first": found["first"]["ratio"]}).items())
    of = f"{found['model']:15} {found['precision']:8} batch {found['batch']:<4} x{found['clients']:<4}"
    of += f" {found['spread']:9}"
    peak = "" if found["peak_gpu_gib"] is None else f"  {found['peak_gpu_gib']:.1f} GiB"
    ms, first = found["milliseconds"]["personafl"], found["first"]["to_first_round"]
    return f"{of} {ms:9.1f} ms  {ratios}  first round after {first:.1f} s{peak}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=list(TABLE), choices=[*MODELS_OF, "all"])
    parser.add_argument("--precision", nargs="*", default=["auto"])
    parser.add_argument("--batch", nargs="*", type=int, default=[64])
    parser.add_argument("--clients", nargs="*", type=int, default=[20])
    parser.add_argument("--spread", nargs="*", default=["even"], choices=["even", "dirichlet"])
    parser.add_argument("--each", type=int, default=EACH)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--memory", type=float, default=None)
    parser.add_argument("--threads-per-client", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--first", type=int, default=10)
    parser.add_argument("--no-replayed", dest="replayed", action="store_false")
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    names = list(MODELS_OF) if "all" in args.models else args.models
    for one in itertools.product(names, args.precision, args.batch, args.clients, args.spread):
        found = contest(*one, args)
        print(line(found), flush=True)
        if args.out is not None:
            before = json.loads(args.out.read_text()) if args.out.exists() else []
            args.out.write_text(json.dumps([*before, found], indent=1) + "\n")


if __name__ == "__main__":
    main()
