"""What of recordings can be seen without a GPU; the rest is in tests/test_gpu.py."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from personafl import ALGORITHMS, Algorithm, StackedModel
from personafl.accel import cuda_graphs
from personafl.accel.cuda_graphs import CapturedTurn, Step
from personafl.core.local_work import ClientState, LocalWork, whole
from personafl.core.types import Batch, Round, Task
from personafl.data.batches import Plan
from personafl.engine import local
from personafl.simulation.execution_plan import ExecutionPlan
from tests import worlds
from tests.methods.test_contract import BUSY


def test_convolutions_lie_channels_last_where_they_may() -> None:
    """Of each client, under any prefix; what is named in vain, and all else, lies as usual."""
    stack = {"conv": torch.zeros(2, 4, 3, 5, 5), "personal/conv": torch.zeros(2, 4, 3, 5, 5)}
    others = {"other": torch.zeros(2, 4, 3, 5, 5), "steps/conv": torch.zeros(2), "linear": torch.zeros(2, 4, 3).mT}
    found = cuda_graphs.room_for(stack | others, {"conv"})
    for n, t in stack.items():
        assert found[n].shape == t.shape
        assert all(one.is_contiguous(memory_format=torch.channels_last) for one in found[n])
        assert torch.empty_like(found[n]).stride() == found[n].stride()
        alone = cuda_graphs.room_for({n: t[:1]}, {"conv"})[n]
        assert found[n][1:].stride() == alone.stride()  # a lane takes its client's in one go
    assert all(found[n].is_contiguous() for n in others)


def test_only_weights_of_convolutions_whose_images_may_lie_so_are_named() -> None:
    image = torch.zeros(2, 1, 8, 8)
    assert StackedModel(Normed(), image).channels_last == {"conv.weight", "second.weight"}
    assert StackedModel(Viewing(), image).channels_last == set()
    assert StackedModel(Standardised(), image).channels_last == {"conv.weight"}  # the other is the module's own
    assert StackedModel(nn.Sequential(nn.Flatten(), nn.Linear(64, 3)), image).channels_last == set()


def test_gradients_lie_as_their_weights() -> None:
    weight = cuda_graphs.room_for({"w": torch.zeros(1, 4, 3, 5, 5)}, {"w"})["w"]
    grad = torch.randn(1, 4, 3, 5, 5)
    laid = local._laid_as(grad, weight)
    assert laid.stride() == weight.stride() and torch.equal(laid, grad)
    assert local._laid_as(laid, weight) is laid


def plan(sizes: list[list[int]], width: int) -> Plan:
    real = torch.tensor(sizes)
    rows = torch.zeros(*real.shape, width, dtype=torch.int64)
    active = (real > 0).sum(0).tolist()
    return Plan(rows, rows, real, real, (real > 0).sum(1), active, [False] * len(active), real.sum(1).double(), real)


def test_steps_are_told_apart_by_clients_or_by_sizes() -> None:
    stack = plan([[5, 5, 2], [5, 3, 0]], width=5)
    assert local._of_stack(stack) == [Step(2, 5, False), Step(2, 5, False), Step(1, 5, False)]
    client = stack.client(1)
    assert local._of_client(client, exact=True) == [Step(1, 5, True), Step(1, 3, True)]
    assert local._of_client(client, exact=False) == [Step(1, 5, True), Step(1, 5, False)]


# The loop around recordings, with a stand-in for CUDA that runs a recorded step again instead of replaying it


class Stream:
    def __init__(self, device: torch.device | None = None) -> None:
        self.device = device

    def wait_stream(self, other: Stream) -> None:
        assert isinstance(other, Stream)


class Played:
    """A recording."""

    made = 0

    def __init__(self, turn: CapturedTurn, step: Step) -> None:
        self.turn, self.step = turn, step
        Played.made += 1

    def replay(self) -> None:
        self.turn._advance(self.step)


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> None:
    def record(turn: CapturedTurn, step: Step) -> None:
        turn.graphs[step] = Played(turn, step)  # type: ignore[assignment]

    monkeypatch.setattr(Played, "made", 0)
    monkeypatch.setattr(CapturedTurn, "_record", record)
    monkeypatch.setattr(cuda_graphs, "_made", {})
    for name, stand_in in (
        ("graph_pool_handle", object),
        ("current_stream", Stream),
        ("Stream", Stream),
        ("stream", lambda _: nullcontext()),
    ):
        monkeypatch.setattr(torch.cuda, name, stand_in)


class Normed(nn.Module):
    """What runs one at a time on a GPU: strides, and running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.second, self.norm = nn.Conv2d(1, 3, 3, 2), nn.Conv2d(3, 4, 2), nn.BatchNorm2d(4)
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.norm(self.second(self.conv(x).relu())).relu().flatten(1))
        return out


class Viewing(Normed):
    """One that looks at how its images lie."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.second(self.conv(x).relu())).relu()
        out: Tensor = self.head(h.view(h.shape[0], -1))
        return out


class Standardising(nn.Conv2d):
    """One that looks at how its weights lie."""

    def forward(self, x: Tensor) -> Tensor:
        spread = self.weight.view(self.weight.shape[0], -1).std(1)
        return nn.functional.conv2d(x, self.weight / (1 + spread).view(-1, 1, 1, 1), self.bias)


class Standardised(Normed):
    def __init__(self) -> None:
        super().__init__()
        self.second = Standardising(3, 4, 2)


RAGGED, EVEN = (40, 20, 32, 36, 38, 40), (40, 40, 40, 40, 40, 40)  # three quarters are for training


@pytest.mark.parametrize("name", ["fedavg", "dm-pfl", "fedpac", "apfl"])
@pytest.mark.parametrize(
    ("sizes", "lanes", "kind"),
    [(RAGGED, 3, Normed), (EVEN, 8, Normed), (RAGGED, 0, Normed), (EVEN, 2, Viewing), (EVEN, 2, Standardised)],
)
@pytest.mark.filterwarnings("ignore:.*leave room", "ignore:.*leaves only", "error:a training step cannot be recorded")
@pytest.mark.usefixtures("pretended")
def test_recorded_rounds_are_those_of_every_client_alone(
    name: str, sizes: tuple[int, ...], lanes: int, kind: type[nn.Module]
) -> None:
    """In lanes, or as one stack where there are none: momenta, statistics and moments come back to their clients."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = kind()
    fed = worlds.federation("cnn", sizes)
    model = StackedModel(module, fed.source.x[:2])
    options = {"model": model, "fed": fed, "num_rounds": 4, "join_ratio": 1.0, "batch_size": 10, "momentum": 0.5}
    method = ALGORITHMS[name](**BUSY.get(name, {}))
    alone, recorded = (worlds.simulation(method, "cnn", device="cpu", **options) for _ in range(2))
    recorded.plan = ExecutionPlan(6, 1, 1, lanes=lanes)
    recorded.model._context.one_by_one = lanes > 0
    recorded.graph_cache = cuda_graphs.GraphCache(lanes, torch.device("cpu"))
    for sim in (alone, recorded):
        sim.run()
    assert recorded.graph_cache.graphs() > 0 and Played.made > 0
    assert alone.totals == recorded.totals
    a, b = (s.server | s.deployed_models(s.model, s.everybody) for s in (alone, recorded))
    for n, t in a.items():
        torch.testing.assert_close(b[n], t, rtol=1e-9, atol=1e-9)


@pytest.mark.usefixtures("pretended")
def test_ragged_clients_share_the_recordings_of_a_lane() -> None:
    """Four sizes of short minibatches are padded to one step, whatever number of steps a client has."""
    fed = worlds.federation("cnn", RAGGED)
    model = StackedModel(Normed(), fed.source.x[:2])
    sim = worlds.simulation(
        ALGORITHMS["fedavg"](), "cnn", fed=fed, model=model, join_ratio=1.0, batch_size=10, local_epochs=8, num_rounds=3
    )
    sim.plan, sim.graph_cache = ExecutionPlan(6, 1, 1, lanes=2), cuda_graphs.GraphCache(2, torch.device("cpu"))
    sim.model._context.one_by_one = True
    sim.run()
    assert Played.made == 2 * 2  # of each lane a full step and a padded one


@pytest.mark.usefixtures("pretended")
def test_a_step_that_cannot_be_recorded_is_played_for_its_client_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(turn: CapturedTurn, step: Step) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(CapturedTurn, "_record", refuses)
    fed = worlds.federation("cnn", RAGGED)
    model = StackedModel(Normed(), fed.source.x[:2])
    options = {"fed": fed, "model": model, "join_ratio": 1.0, "batch_size": 10, "num_rounds": 2}
    alone, refused = (worlds.simulation(ALGORITHMS["ditto"](), "cnn", **options) for _ in range(2))
    refused.plan, refused.graph_cache = ExecutionPlan(6, 1, 1, lanes=2), cuda_graphs.GraphCache(2, torch.device("cpu"))
    refused.model._context.one_by_one = True
    alone.run()
    with pytest.warns(UserWarning, match=r"^a training step cannot be recorded as a CUDA graph, it runs slower"):
        refused.run()
    for n, t in alone.server.items():
        torch.testing.assert_close(refused.server[n], t, rtol=1e-9, atol=1e-9)


@dataclass(frozen=True, kw_only=True)
class TwoMinibatches(Algorithm):
    """A method whose loss sees two minibatches in a step."""

    def turns(self, local: ClientState, rnd: Round) -> list[LocalWork]:
        return [self.usual_turn(whole(self.info.parameters), loss=self._both, minibatches=2)]

    def _both(self, task: Task, local: ClientState, batch: Batch) -> Tensor:
        return task.loss(local.params, batch) + 0.5 * task.loss(local.params, batch.others[0])


@pytest.mark.parametrize("lanes", [0, 2])
@pytest.mark.usefixtures("pretended")
def test_recorded_steps_have_their_further_minibatches(lanes: int) -> None:
    fed = worlds.federation("cnn", RAGGED)
    model = StackedModel(Normed(), fed.source.x[:2])
    options = {"fed": fed, "model": model, "join_ratio": 1.0, "batch_size": 10, "num_rounds": 3}
    alone, recorded = (worlds.simulation(TwoMinibatches(), "cnn", **options) for _ in range(2))
    recorded.plan, recorded.model._context.one_by_one = ExecutionPlan(6, 1, 1, lanes=lanes), lanes > 0
    recorded.graph_cache = cuda_graphs.GraphCache(lanes, torch.device("cpu"))
    alone.run()
    recorded.run()
    assert Played.made > 0
    for n, t in alone.server.items():
        torch.testing.assert_close(recorded.server[n], t, rtol=1e-9, atol=1e-9)
