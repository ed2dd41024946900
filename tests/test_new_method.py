"""The methods of docs/new-method.md, run as they stand there, against plain loops and in every place a method runs."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

import personafl
from personafl import Algorithm, Federation, Simulation, Source, StackedModel, UserError
from personafl.core import rng
from personafl.core.types import Params
from personafl.engine.dry_run import estimate_cost
from tests import checks, documented, reference, worlds
from tests.deployment import worlds as deployments
from tests.simulation.test_ranks import assert_same_run, together

SIZES = (9, 4, 14, 6)  # rows of the clients, a quarter of them for tests
FedBN, RandomPart, PerFedAvg = (getattr(documented, n) for n in ("FedBN", "RandomPart", "PerFedAvg"))
METHODS = [FedBN(), RandomPart(), PerFedAvg(step_size=0.3)]
TRAINING: dict[str, Any] = {"num_rounds": 3, "join_ratio": 1.0, "local_epochs": 2, "batch_size": 4}


def federation() -> Federation:
    draw = torch.Generator().manual_seed(0)
    y = torch.randint(3, (sum(SIZES),), generator=draw)
    x = torch.randn(len(y), 6, generator=draw) + y.view(-1, 1)
    return Federation.build(Source("toy", x, y, 3), np.split(np.arange(len(y)), np.cumsum(SIZES)[:-1]), 0)


FED = federation()


class Block(nn.Module):
    """A layer norm deep inside, and a norm as a user writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear, self.scaled = nn.LayerNorm(5), nn.Linear(5, 5), ScaleNorm()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.scaled(x + self.linear(self.norm(x)).relu())
        return out


class ScaleNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((5,), 1.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * x / (1 + x.square().mean(-1, keepdim=True)).sqrt()


def plain() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))


def normed() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), Block(), nn.Linear(5, 3))


@functools.cache
def model_for(kind: type[Algorithm]) -> StackedModel:
    return StackedModel(normed() if kind is FedBN else plain(), FED.source.x[:2])


def simulation(method: Algorithm, chunk: int = 0, **options: Any) -> Simulation:
    """A quiet simulation in float64, with all clients in one stack, or so many in each."""
    chosen = {"fed": FED, "model": model_for(type(method))} | TRAINING | options
    return worlds.simulation(method, chunk=chunk, **chosen)


def close(mine: Params, theirs: Params) -> None:
    for n, t in theirs.items():
        torch.testing.assert_close(mine[n], t, rtol=1e-9, atol=1e-9, msg=lambda m, n=n: f"{n}: {m}")


# Against plain loops


def session(
    network: nn.Module, own: Params, client: int, number: int, training: personafl.Training, part: Params | None = None
) -> Params:
    """A client's usual training, of one model and one minibatch at a time; only a part of the positions may move."""
    names = [n for n, _ in network.named_parameters()]
    rows = reference.rows_of(FED, "train", client)
    for epoch in range(training.local_epochs):
        order = reference.shuffled(rows, training, "batches", number, client, epoch)
        for some in reference.minibatches(order, training.batch_size):
            leaves = {n: own[n].detach().requires_grad_() for n in names}
            statistics = {n: t.clone() for n, t in own.items() if n not in names}
            out = functional_call(network.train(), statistics | leaves, (FED.source.x[some].double(),))
            grads = torch.autograd.grad(F.cross_entropy(out, FED.source.y[some]), list(leaves.values()))
            moved = {n: w.detach() - training.lr * g for (n, w), g in zip(leaves.items(), grads, strict=True)}
            if part is not None:
                moved = {n: torch.where(part[n], w, own[n]) for n, w in moved.items()}
            own = statistics | moved
    return own


def state_of(network: nn.Module) -> Params:
    return {n: t.detach().clone() for n, t in network.state_dict().items() if not n.endswith("num_batches_tracked")}


def averaged(uploads: list[Params], names: list[str]) -> Params:
    sizes = [len(reference.rows_of(FED, "train", c)) for c in range(FED.num_clients)]
    return {n: sum(s * u[n] for s, u in zip(sizes, uploads, strict=True)) / sum(sizes) for n in names}  # type: ignore[misc]


NORMS = ("1.weight", "1.bias", "2.norm.weight", "2.norm.bias", "2.scaled.scale", "1.running_mean", "1.running_var")


@pytest.mark.parametrize("chunk", [0, 1])
def test_fedbn_is_a_loop_over_clients_with_norms_of_their_own(chunk: int) -> None:
    sim = simulation(FedBN(), chunk)
    sim.run()
    network = normed().double()
    server = {n: t for n, t in state_of(network).items() if n not in NORMS}
    norms = [{n: t for n, t in state_of(network).items() if n in NORMS} for _ in range(FED.num_clients)]
    for number in range(3):
        trained = [session(network, server | norms[c], c, number, sim.training) for c in range(FED.num_clients)]
        norms = [{n: own[n] for n in NORMS} for own in trained]
        server = averaged(trained, list(server))
    assert sim.server.keys() == server.keys()
    close(sim.server, server)
    kept = sim.store.gather(torch.arange(FED.num_clients))
    assert kept.keys() == set(NORMS)
    close(kept, {n: torch.stack([own[n] for own in norms]) for n in NORMS})
    ready = sim.deployed_models(sim.model, torch.tensor([2]))
    close(ready, {n: t[None] for n, t in (server | norms[2]).items()})


def test_fedbn_refuses_a_model_without_norms() -> None:
    with pytest.raises(UserError, match="needs a model with normalisation layers"):
        worlds.simulation(FedBN(), fed=FED, model=StackedModel(plain(), FED.source.x[:2]))


def drawn_part(number: int, share: float = 0.5) -> Params:
    """The positions of a round, from the keys alone: seed, purpose of the server, round, phase, purpose, tensor."""
    key = rng.key(0, "server")
    for part in (number + 1, "train", "part"):
        key = rng.extend(key, part)
    shapes = {n: p.shape for n, p in plain().named_parameters()}
    return {n: (rng.uniform(rng.extend(key, n), s.numel()) < share).view(s) for n, s in shapes.items()}


@pytest.mark.parametrize("chunk", [0, 1])
def test_a_server_that_draws_is_a_loop_in_which_only_what_it_drew_moves(chunk: int) -> None:
    sim = simulation(RandomPart(), chunk)
    sim.run()
    network = plain().double()
    server = state_of(network)
    for number in range(3):
        part = drawn_part(number)
        assert 0 < sum(int(m.sum()) for m in part.values()) < sum(m.numel() for m in part.values())
        trained = [session(network, server, c, number, sim.training, part) for c in range(FED.num_clients)]
        server = averaged(trained, list(server))
    close(sim.server, server)
    assert any(not torch.equal(a, b) for a, b in zip(drawn_part(0).values(), drawn_part(1).values(), strict=True))
    # an upload has half of the values and a mask, the download all values and that mask
    values = sum(int(m.sum()) for number in range(3) for m in drawn_part(number).values())
    whole = sum(p.numel() for p in network.parameters())
    assert sim.totals.paper_bytes == FED.num_clients * (4 * values + 3 * 4 * whole + 2 * 3 * whole / 8) / 2


def plain_maml(step_size: float, *, second_order: bool, training: personafl.Training) -> Params:
    """Per-FedAvg by its definition: sums over examples, gradients by autograd of the composed function."""
    network = plain().double()
    server = state_of(network)
    for number in range(training.num_rounds):
        trained = []
        for client in range(FED.num_clients):
            own, streams = dict(server), []
            rows = reference.rows_of(FED, "train", client)
            for purpose in ("batches", "batches 2"):
                stream = reference.Stream(rows, training, number, client, purpose)
                streams.append(stream.turn())
            for first, second in zip(*streams, strict=True):
                leaves = {n: w.detach().requires_grad_() for n, w in own.items()}

                def loss(weights: Params, some: Tensor) -> Tensor:
                    out = functional_call(network, weights, (FED.source.x[some].double(),))
                    return F.cross_entropy(out, FED.source.y[some])

                before = loss(leaves, first)
                grads = torch.autograd.grad(before, list(leaves.values()), create_graph=second_order)
                after = {n: w - step_size * g for (n, w), g in zip(leaves.items(), grads, strict=True)}
                slopes = torch.autograd.grad(loss(after, second), list(leaves.values()))
                own = {n: w.detach() - training.lr * g for (n, w), g in zip(leaves.items(), slopes, strict=True)}
            trained.append(own)
        server = averaged(trained, list(server))
    return server


@pytest.mark.parametrize("length", [{}, {"local_steps": 5}])
@pytest.mark.parametrize("second_order", [True, False])
@pytest.mark.parametrize("chunk", [0, 1])
def test_per_fedavg_is_a_loop_over_pairs_of_minibatches(length: dict[str, int], second_order: bool, chunk: int) -> None:
    sim = simulation(PerFedAvg(step_size=0.3, second_order=second_order), chunk, **length)
    sim.run()
    close(sim.server, plain_maml(0.3, second_order=second_order, training=sim.training))
    other = plain_maml(0.3, second_order=not second_order, training=sim.training)
    assert any(not torch.allclose(t, sim.server[n], rtol=1e-3, atol=1e-4) for n, t in other.items())


@pytest.mark.parametrize("chunk", [0, 1])
@pytest.mark.parametrize("prior_free", [False, True])
def test_a_client_of_per_fedavg_predicts_after_a_step_on_all_its_examples(
    chunk: int, prior_free: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("personafl.data.batches.SWEEP", 4)  # some clients have several minibatches, some one
    sim = simulation(PerFedAvg(step_size=0.3, prior_free=prior_free), chunk)
    sim.run()
    ready = sim.deployed_models(sim.model, torch.arange(FED.num_clients))
    network = plain().double()
    for client in range(FED.num_clients):
        rows = reference.rows_of(FED, "train", client)
        leaves = {n: t.detach().requires_grad_() for n, t in sim.server.items()}
        out = functional_call(network, leaves, (FED.source.x[rows].double(),))
        grads = torch.autograd.grad(F.cross_entropy(out, FED.source.y[rows]), list(leaves.values()))
        stepped = {n: w.detach() - 0.3 * g for (n, w), g in zip(leaves.items(), grads, strict=True)}
        close({n: t[client] for n, t in ready.items()}, stepped)


def test_the_page_compares_per_fedavg_with_a_plain_loop_that_would_find_a_mistake(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The page's own comparison passes; with a step that is not differentiated it fails, in every stack alike."""
    documented.compare(plain(), FED)
    monkeypatch.setattr(documented, "PerFedAvg", lambda step_size: PerFedAvg(step_size=step_size, second_order=False))
    with pytest.raises(AssertionError):
        documented.compare(plain(), FED)
    wrong = [simulation(PerFedAvg(step_size=0.3, second_order=False), chunk) for chunk in (0, 1)]
    for sim in wrong:
        sim.run()
    close(wrong[0].server, wrong[1].server)  # what the comparison of stacks alone cannot see


# Wherever a method runs


@pytest.mark.parametrize("method", METHODS, ids=lambda m: type(m).__name__)
def test_ranks_give_the_numbers_of_one_process(method: Algorithm) -> None:
    def run(world: Any = None) -> Simulation:
        machine = {} if world is None else {"ranks": world}
        sim = simulation(method, **machine)
        sim.run()
        if world is not None:
            sim.collect()
        return sim

    alone = run()
    for sim in together(2, run):
        assert_same_run(sim, alone)


@pytest.mark.parametrize("method", METHODS, ids=lambda m: type(m).__name__)
def test_a_run_that_goes_on_is_the_run_that_was_not_interrupted(method: Algorithm) -> None:
    whole, first, second = (simulation(method) for _ in range(3))
    whole.run()
    first.step()
    everybody = torch.arange(FED.num_clients)
    second.store.scatter(everybody, first.store.gather(everybody))
    second.resume(copy.deepcopy(first.state))
    second.run()
    checks.assert_agree(second.server, whole.server, 0)
    assert second.totals == whole.totals


RECIPE_OF: dict[str, dict[str, dict[str, Any]]] = {
    "FedBN": {"model": {"name": "tests.test_new_method:Digits"}, "training": {"num_rounds": 2}},
    "RandomPart": {"training": {"num_rounds": 3}},
    "PerFedAvg": {"training": {"num_rounds": 2}},
}


class Digits(nn.Module):
    """A network with a layer norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(64, 8), nn.LayerNorm(8), nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.norm(self.first(x.flatten(1))).relu())
        return out


@pytest.mark.parametrize("name", ["RandomPart", "PerFedAvg", pytest.param("FedBN", marks=pytest.mark.slow)])
def test_deployed_clients_give_the_numbers_of_a_simulation(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deployments.quicken(monkeypatch)
    text = deployments.recipe({"name": f"tests.documented:{name}", "label": "mine"}, **RECIPE_OF[name])
    server, _ = deployments.deployed(text, tmp_path)
    server.run()
    deployments.same_run(server, tmp_path, deployments.simulated(text))


def test_the_cost_of_per_fedavg_is_that_of_two_steps_and_of_a_gradient_of_a_gradient() -> None:
    """F = 2 (6 * 5 + 5 * 4 + 4 * 3) + 5 + 4 + 3 = 136: 3 F and 3 F in first order, 9 F and 3 F in second."""
    forward = 2 * (6 * 5 + 5 * 4 + 4 * 3) + 5 + 4 + 3
    examples = sum(len(reference.rows_of(FED, "train", client)) for client in range(FED.num_clients))
    for second_order, passes in ((False, 6), (True, 12)):
        method = PerFedAvg(step_size=0.3, second_order=second_order)
        sim = simulation(method)
        sim.run()
        assert sim.totals.flops == 3 * 2 * examples * passes * forward
        expected = estimate_cost(method, sim.model, sim.training, num_clients=4, examples=7)
        assert expected.flops == 3 * 2 * 7 * passes * forward


# The first method of the page


def test_the_first_method_of_the_page_runs() -> None:
    recipe = {
        "data": {"dataset": "digits", "num_clients": 4, "alpha": 0.3},
        "training": {"num_rounds": 2, "local_epochs": 1},
        "algorithms": [{"name": "tests.documented:HeadFirst", "label": "mine", "head_epochs": 2.0}],
    }
    result = personafl.run(recipe)
    assert result["mine"].summary["evaluated_model"] == documented.HeadFirst.evaluates
