"""What of recordings can be seen without a GPU; the rest is in tests/test_gpu.py."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

from personafl import ALGORITHMS, StackedModel
from personafl.core import cuda_graphs, local
from personafl.core.batches import Plan
from personafl.core.cuda_graphs import CapturedTurn, Step
from personafl.sim.execution_plan import ExecutionPlan
from tests import worlds
from tests.algorithms.test_contract import BUSY


def test_one_clients_convolutions_lie_channels_last() -> None:
    """Of a stack they lie as they are, and so does what is no weight of an image's convolution."""
    one, two = torch.zeros(1, 4, 3, 5, 5), torch.zeros(2, 4, 3, 5, 5)
    found = cuda_graphs._blank({"one": one, "two": two, "linear": torch.zeros(1, 4, 3).transpose(1, 2)})
    assert found["one"].shape == one.shape
    assert found["one"].squeeze(0).is_contiguous(memory_format=torch.channels_last)
    assert found["two"].is_contiguous() and found["linear"].is_contiguous()
    assert torch.empty_like(found["one"]).stride() == found["one"].stride()


def test_gradients_lie_as_their_weights() -> None:
    weight = cuda_graphs._blank({"w": torch.zeros(1, 4, 3, 5, 5)})["w"]
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
        self.conv, self.norm, self.head = nn.Conv2d(1, 3, 3, 2), nn.BatchNorm2d(3), nn.Linear(27, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.norm(self.conv(x)).relu().flatten(1))
        return out


RAGGED, EVEN = (40, 20, 32, 36, 38, 40), (40, 40, 40, 40, 40, 40)  # three quarters are for training


@pytest.mark.parametrize("name", ["fedavg", "dm-pfl", "fedpac", "apfl"])
@pytest.mark.parametrize(("sizes", "lanes"), [(RAGGED, 3), (EVEN, 8), (RAGGED, 0)])
@pytest.mark.filterwarnings("ignore:.*leave room", "ignore:.*leaves only")
@pytest.mark.usefixtures("pretended")
def test_recorded_rounds_are_those_of_every_client_alone(name: str, sizes: tuple[int, ...], lanes: int) -> None:
    """In lanes, or as one stack where there are none: momenta, statistics and moments come back to their clients."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = Normed()
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
