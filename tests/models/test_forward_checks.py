"""What keeps a module from being run for all clients in one call, and what keeps it from being run at all."""

from __future__ import annotations

import functools
import itertools
import logging
import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from personafl import FedAvg, StackedModel, UserError
from personafl.models import MODELS, agreement, forward_checks
from tests import worlds

EXAMPLE = torch.arange(12.0).view(2, 6) / 6


class Own(nn.Module):
    """A forward pass of one's own over two linear layers."""

    def __init__(self, forward: Callable[[Any, Tensor], Tensor], **attributes: Any) -> None:
        super().__init__()
        self.how, self.called, self.weight, self.scale = forward, False, None, None
        self.a, self.b, self.norm = nn.Linear(6, 5), nn.Linear(5, 3), nn.BatchNorm1d(5)
        self.calls, self.average, self.table = 0, torch.zeros(()), None
        self.seen: list[Tensor] = []
        self.log = {"calls": 0}
        self.__dict__ |= attributes

    def forward(self, x: Tensor) -> Tensor:
        return self.how(self, x)


def in_parts(m: Any, x: Tensor) -> Tensor:
    return torch.cat([m.b(m.a(part).relu()) for part in x.split(16)])


def ghost_norm(m: Any, x: Tensor) -> Tensor:
    return m.b(torch.cat([m.norm(part) for part in m.a(x).split(16)]))


def by_capacity(m: Any, x: Tensor) -> Tensor:
    """A router that has room for some rows only, as a mixture of experts has."""
    h = m.a(x)
    room = max(4, int(0.5 * len(x)))
    taken = h[:, 0].argsort().argsort() < room
    return m.b(torch.where(taken[:, None], h, -h))


def branching(m: Any, x: Tensor) -> Tensor:
    return m.b(m.a(x).tanh() if len(x) > 8 else m.a(x).relu())


def gate_with_hook(m: Any, x: Tensor) -> Tensor:
    out = m.b(m.a(x).relu())
    if out.requires_grad:
        out.register_hook(lambda g: g.clamp(-0.1, 0.1))
    return out


def by_data(m: Any, x: Tensor) -> Tensor:
    return m.b(m.a(x).relu() * (2.0 if bool((x.abs().sum() >= 0).item()) else 1.0))


ALONE = {
    "rows in parts": in_parts,
    "ghost batch norm": ghost_norm,
    "capacity": by_capacity,
    "a branch": branching,
    "odd or even": lambda m, x: m.b(m.a(x).relu()) * (1 + len(x) % 2),
    "a constant": lambda m, x: m.b(m.a(x)) * torch.tensor(float(max(len(x), 10))),
    "a gradient hook on the output": gate_with_hook,
    "a branch on data": by_data,
}


@pytest.mark.parametrize("how", ALONE.values(), ids=ALONE)
def test_a_forward_pass_that_looks_at_its_batch_sees_one_client_at_a_time(how):
    torch.manual_seed(0)
    module = Own(how)
    model = StackedModel(module, EXAMPLE)
    assert model.execution.mode == "layer by layer" and "its forward pass" in model.execution.reason
    servers = []
    for chunk in (0, 1):  # training sets of 28, 6, 16, 10, 3 and 22 examples
        sim = worlds.simulation(FedAvg(), model=model, chunk=chunk, num_rounds=2, join_ratio=1.0, batch_size=9)
        sim.run()
        servers.append(sim.server)
    for n in servers[0]:
        torch.testing.assert_close(servers[0][n], servers[1][n], rtol=1e-9, atol=1e-9)


def test_a_gradient_hook_on_the_output_is_heeded_in_training():
    """Gradients of zero move nothing, in whatever way they are computed."""

    def stopped(m: Any, x: Tensor) -> Tensor:
        out = m.b(m.a(x).relu())
        if out.requires_grad:
            out.register_hook(torch.zeros_like)
        return out

    module = Own(stopped)
    sim = worlds.simulation(FedAvg(), model=StackedModel(module, EXAMPLE), num_rounds=1)
    sim.run()
    for n, p in module.named_parameters():
        torch.testing.assert_close(sim.server[n], p.detach().double(), rtol=0, atol=0)


STACKED = {
    "plain": lambda m, x: m.b(m.a(x).relu()),
    "batch norm": lambda m, x: m.b(m.norm(m.a(x))),
    "shapes of its input": lambda m, x: m.b(m.a(x).view(x.shape[0], 5).reshape(len(x), -1)),
    "a state of zeros": lambda m, x: m.b(m.a(x) + torch.zeros(x.shape[0], 5, dtype=x.dtype)),
    "a constant beside the module": lambda m, x: m.b(m.a(x) * torch.ones(5, dtype=x.dtype)),
    "parts of a row": lambda m, x: m.b(torch.cat([m.a(x).chunk(2, 1)[0], m.a(x).split(3, 1)[1]], 1)),
}


@pytest.mark.parametrize("how", STACKED.values(), ids=STACKED)
def test_a_forward_pass_that_treats_any_number_of_rows_alike_is_stacked(how):
    assert str(StackedModel(Own(how), EXAMPLE).execution) == "stacked"


def test_hooks_on_layers_run_client_by_client():
    module = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    module[2].register_full_backward_hook(lambda m, given, out: None)
    model = StackedModel(module, EXAMPLE)
    assert str(model.execution) == "client by client: hooks are registered on its layers"


def test_layers_without_a_stacked_form_are_named():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gru, self.fc = nn.GRU(6, 4, batch_first=True), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(self.gru(x)[0][:, -1])

    execution = StackedModel(Net(), torch.randn(2, 5, 6)).execution
    assert execution.mode == "stacked"
    assert str(execution) == "stacked, except gru (GRU), which runs one client at a time"


def test_a_model_whose_own_parameters_have_no_stacked_form_runs_client_by_client() -> None:
    class Centred(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) - x.mean()

    execution = StackedModel(Centred(6, 3), torch.randn(2, 6)).execution
    assert str(execution) == "client by client: Centred has no stacked form, for its own parameters weight, bias"


def test_a_model_with_parameters_beside_its_layers_runs_layer_by_layer() -> None:
    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift, self.fc = nn.Parameter(torch.zeros(6)), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x + self.shift)

    execution = StackedModel(Shifted(), torch.randn(2, 6)).execution
    assert str(execution) == "layer by layer: Shifted has no stacked form, for its own parameters shift"


@pytest.mark.parametrize("name", MODELS)
def test_the_networks_of_the_package_need_no_check(name):
    """They are not looked at when a model is made, so they are here."""
    shape = {"token-lstm": (8,), "char-lstm": (8,), "har-dnn": (561,), "mlp": (6,), "pews-mlp": (6,)}
    size = shape.get(name, (3, 32, 32) if "mnist" not in name and "leaf" not in name else (1, 28, 28))
    module = MODELS[name].build(size, 10)
    example = torch.randint(10, (2, *size)) if "lstm" in name else torch.rand(2, *size)
    assert forward_checks.is_library_code(module)
    assert forward_checks.RowChecks(module, example).reason_not_to_stack() is None
    forward_checks.refuse_state(module, example)


def counting(m: Any, x: Tensor) -> Tensor:
    m.calls += 1
    return m.b(m.a(x)) * (1.0 if m.calls <= 10 else 2.0)


def averaging(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    m.average = 0.9 * m.average + 0.1 * h.detach().mean()
    return m.b(h - m.average)


def counting_large_batches(m: Any, x: Tensor) -> Tensor:
    m.calls += len(x) > 4
    return m.b(m.a(x)) / (1 + m.calls)


def keeping_the_tenth_row(m: Any, x: Tensor) -> Tensor:
    if len(x) > 10 and m.training:
        m.average = m.average + x[10].mean()
    return m.b(m.a(x)) + m.average


def writing_to_a_log(m: Any, x: Tensor) -> Tensor:
    m.log["calls"] += 1
    return m.b(m.a(x))


def remembering_the_largest(m: Any, x: Tensor) -> Tensor:
    m.average = torch.maximum(m.average, x.max())
    return m.b(m.a(x)) / m.average


def collecting(m: Any, x: Tensor) -> Tensor:
    m.seen.append(m.a(x).relu())
    return m.b(m.seen[-1] if len(m.seen) < 11 else torch.stack([s.mean(0) for s in m.seen[-3:]]).mean(0) + m.seen[-1])


@pytest.mark.parametrize(
    ("how", "name"),
    [
        (counting, "calls"),
        (averaging, "average"),
        (counting_large_batches, "calls"),
        (keeping_the_tenth_row, "average"),
        (writing_to_a_log, "log"),
        (remembering_the_largest, "average"),
        (collecting, "seen"),
    ],
)
def test_a_module_that_remembers_its_calls_is_refused(how, name):
    with pytest.raises(UserError, match=rf"Own: attribute '{name}' changes from one call of the forward pass"):
        StackedModel(Own(how), EXAMPLE)


CALLS, LOG = {"n": 0}, logging.getLogger("calls")


class Once:
    __slots__ = ("n",)

    def __init__(self) -> None:
        self.n = 0

    def __call__(self) -> int:
        self.n += 1
        return self.n


def added_to(values: Any) -> Callable[[], int]:
    def add() -> int:
        values.append(0)
        return len(values)

    return add


def with_global_variable() -> int:
    CALLS["n"] += 1
    return CALLS["n"]


def next_of(numbers: Iterator[int]) -> Callable[[], int]:
    return lambda: next(numbers)


def with_default() -> Callable[[], int]:
    def add(calls: list[int] = []) -> int:  # noqa: B006
        calls.append(0)
        return len(calls)

    return add


class Clock:
    step = 0

    @classmethod
    def tick(cls) -> int:
        Clock.step += 1
        return cls.step


class Watch:
    def tick(self) -> int:
        Clock.step += 1
        return Clock.step


def increased(numbers: np.ndarray[Any, Any]) -> Callable[[], int]:
    def increase() -> int:
        numbers[0] += 1
        return int(numbers[0])

    return increase


@pytest.mark.parametrize(
    "make",
    [
        Once,
        lambda: with_global_variable,
        lambda: added_to([]),
        lambda: added_to(deque()),
        lambda: added_to(bytearray()),
        lambda: increased(np.zeros(1)),
        lambda: itertools.count().__next__,
        lambda: itertools.cycle(range(1000)).__next__,
        lambda: iter(range(1000)).__next__,
        lambda: iter([*range(1000)]).__next__,
        lambda: next_of(i for i in range(1000)),
        lambda: with_default(),
        lambda: Clock.tick,
        lambda: Watch().tick,
        lambda: functools.partial(random.Random(0).randrange, 10**9),
        lambda: functools.partial(np.random.default_rng(0).integers, 10**9),
        lambda: functools.partial(torch.randint, 10**9, (1,), generator=torch.Generator()),
    ],
)
def test_whatever_counts_calls_is_refused(make: Callable[[], Callable[[], Any]]) -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.tick = nn.Linear(6, 3), make()

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x) * (1.0 if int(self.tick()) != 100 else 2.0)

    with pytest.raises(UserError, match="changes from one call of the forward pass to the next"):
        StackedModel(Counting(), EXAMPLE)


def test_hooks_of_all_modules_are_heeded_in_training() -> None:
    """A hook of `register_module_forward_hook` halves what every Tanh returns; two clients equal each alone."""
    halve = lambda module, given, out: out / 2 if isinstance(module, nn.Tanh) else None  # noqa: E731
    module = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    x = torch.linspace(-1, 1, 48, dtype=torch.float64).view(2, 4, 6)
    hook = nn.modules.module.register_module_forward_hook(halve)
    try:
        model = StackedModel(module, EXAMPLE.double())
        params = {n: torch.stack([t, t + 0.1]).requires_grad_() for n, t in model.initial.items()}
        grads = torch.autograd.grad(model(params, x).square().sum(), list(params.values()))
        for client in range(2):
            own = {n: t[client].detach().requires_grad_() for n, t in params.items()}
            plain = torch.func.functional_call(module, own, (x[client],))
            wanted = torch.autograd.grad(plain.square().sum(), list(own.values()))
            for found, expected in zip(grads, wanted, strict=True):
                torch.testing.assert_close(found[client], expected)
    finally:
        hook.remove()
    assert str(model.execution) == "client by client: hooks are registered on its layers"


def test_hooks_that_count_calls_are_refused() -> None:
    """Also on a module that PyTorch alone defines."""
    calls = [0]

    def double_the_tenth(module: nn.Module, inputs: Any, out: Tensor) -> Tensor:
        calls[0] += 1
        return out * (2.0 if calls[0] == 100 else 1.0)

    module = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    module[0].register_forward_hook(double_the_tenth)
    with pytest.raises(UserError, match="Sequential: what the forward hooks of layer '0' remember changes"):
        StackedModel(module, EXAMPLE)


def test_a_module_in_a_list_is_looked_at() -> None:
    """PyTorch knows nothing of it, so its running statistics are neither saved nor each client's own."""
    with pytest.raises(UserError, match="attribute 'norms' changes from one call"):
        StackedModel(Own(lambda m, x: m.b(m.norms[0](m.a(x))), norms=[nn.BatchNorm1d(5)]), EXAMPLE)


def test_what_cannot_be_copied_is_said() -> None:
    with pytest.raises(UserError, match=r"Own holds something that cannot be copied \(cannot pickle 'generator'"):
        StackedModel(Own(lambda m, x: m.b(m.a(x)), numbers=(i for i in range(9))), EXAMPLE)


def flagged(m: Any, x: Tensor) -> Tensor:
    """The first call gives other outputs."""
    first, m.called = not m.called, True
    return m.b(m.a(x)) * (2.0 if first else 1.0)


def flagged_in_training(m: Any, x: Tensor) -> Tensor:
    return flagged(m, x) if m.training else m.b(m.a(x))


def normalized(m: Any, x: Tensor) -> Tensor:
    """A weight that is computed in the first call."""
    if m.weight is None:
        m.weight = F.normalize(m.a.weight.detach())
    return m.b(F.linear(x, m.weight))


def standardized(m: Any, x: Tensor) -> Tensor:
    """Activations are divided by the deviation of the first batch, as ActNorm begins."""
    h = m.a(x)
    if m.scale is None:
        m.scale = float(1 / h.detach().std())
    return m.b(h * m.scale)


@pytest.mark.parametrize("how", [flagged, flagged_in_training, normalized])
def test_a_module_whose_first_call_decides_on_others_is_refused(how: Callable[..., Tensor]) -> None:
    with pytest.raises(UserError, match="Own: its outputs depend on what an earlier call"):
        StackedModel(Own(how), EXAMPLE)


def test_a_scale_of_the_first_batch_is_refused() -> None:
    with pytest.raises(UserError, match="Own: attribute 'scale' changes"):
        StackedModel(Own(standardized), EXAMPLE)


class ActNorm(nn.Module):
    """Parameters that the first batch decides on."""

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.began, self.fc = nn.Parameter(torch.zeros(6)), False, nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        if not self.began:
            self.shift.data.copy_(-x.mean(0))
            self.began = True
        return self.fc(x + self.shift)


def test_parameters_that_the_first_batch_decides_on_are_refused() -> None:
    with pytest.raises(UserError, match=r"ActNorm: .*(its outputs depend|parameter 'shift' is changed)"):
        StackedModel(ActNorm(), EXAMPLE)


def test_attributes_of_a_class_are_looked_at() -> None:
    class Counting(nn.Linear):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            type(self).calls += 1
            return super().forward(x) * (1.0 if self.calls < 100 else 2.0)

    with pytest.raises(UserError, match="attribute 'calls' of class Counting changes"):
        StackedModel(Counting(6, 3), EXAMPLE)


def test_a_module_may_log_and_call_functions_of_libraries() -> None:
    class Logging(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            LOG.warning("called with %d rows", len(x))
            return F.relu(super().forward(x))

    StackedModel(Logging(6, 3), EXAMPLE)


def storing(m: Any, x: Tensor) -> Tensor:
    m.hidden = m.a(x).relu()
    return m.b(m.hidden)


def listing(m: Any, x: Tensor) -> Tensor:
    m.seen = []
    m.seen.append(m.a(x).relu())
    return m.b(m.seen[-1])


def caching(m: Any, x: Tensor) -> Tensor:
    if m.table is None:
        m.table = torch.linspace(0, 1, 5).tolist()
    return m.b(m.a(x) * torch.tensor(m.table, dtype=x.dtype))


@pytest.mark.parametrize("how", [storing, listing, caching])
def test_activations_and_tables_may_be_stored(how):
    model = StackedModel(Own(how), EXAMPLE)
    assert model.execution.mode == "stacked"
    sim = worlds.simulation(FedAvg(), model=model, num_rounds=2)
    sim.run()
    model.copy()


def modulo(m: Any, x: Tensor) -> Tensor:
    """Does something else for 70 rows than for the few, or the very many, that are tried when a model is made."""
    return m.b(m.a(x).tanh() if len(x) % 70 == 0 else m.a(x).relu())


def test_numbers_of_rows_are_checked_when_they_first_come_up():
    model = StackedModel(Own(modulo), EXAMPLE)
    assert model.execution.mode == "stacked"
    params = {n: torch.stack([t] * 7) for n, t in model.initial.items()}
    model(params, torch.zeros(7, 9, 6))  # 63 rows
    with pytest.raises(UserError, match=r"its forward pass depends on the number of rows \(tanh differs.* 70 rows"):
        model(params, torch.zeros(7, 10, 6))
    one = {n: t[:1] for n, t in params.items()}
    assert model(one, torch.zeros(1, 70, 6)).shape == (1, 70, 3)  # a stack of one is that client


class FirstRows(torch.autograd.Function):
    """Gradients of the first twenty rows only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * (torch.arange(grad.shape[0]) < 20).unsqueeze(1)


def by_place(m: Any, x: Tensor) -> Tensor:
    return m.b(m.a(x) * (1 + (torch.arange(x.shape[0]) >= 20)).unsqueeze(1))


def clipped(m: Any, x: Tensor) -> Tensor:
    """Activations at most so many deviations from the mean of the batch."""
    h = m.a(x)
    middle, deviation = h.mean(), h.std()
    return m.b(h.clamp(middle - 3.2 * deviation, middle + 3.2 * deviation))


def with_room_for_six(m: Any, x: Tensor) -> Tensor:
    """Two experts that take the first six rows each."""
    h = m.a(x)
    chosen = F.one_hot((h[:, 0] > h[:, 1]).long(), 2)
    return m.b(h * (chosen * (chosen.cumsum(0) <= 6)).sum(1, keepdim=True))


BY_PLACE = {
    "capacity": (with_room_for_six, "outputs"),
    "place": (by_place, "outputs"),
    "clipped": (clipped, "outputs"),
    "gradients": (lambda m, x: m.b(FirstRows.apply(m.a(x)).relu()), "gradients"),
    "evaluation": (lambda m, x: m.b(m.a(x)) if m.training else by_place(m, x), "outputs"),
}


@pytest.mark.parametrize(("how", "what"), BY_PLACE.values(), ids=BY_PLACE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_depends_on_other_rows_through_the_data_is_refused_at_the_real_size(how, what, dtype) -> None:
    """The calls and shapes are the same for any number of rows, and a few rows do not show it."""
    torch.manual_seed(0)
    model = StackedModel(Own(how), EXAMPLE)
    assert model.execution.mode == "stacked"
    model = model.to(torch.device("cpu"), dtype)
    with pytest.raises(UserError, match=rf"Own: {what} differ from those of each client alone .*--chunk 1"):
        run_twice(model, 9, 6)


def run_twice(model: StackedModel, clients: int, rows: int) -> list[Tensor]:
    """Outputs in training and in evaluation, with padding in training."""
    draw = torch.Generator().manual_seed(0)
    dtype = next(iter(model.initial.values())).dtype
    params = {n: torch.stack([t * (1 + c / 9) for c in range(clients)]) for n, t in model.initial.items()}
    x = torch.randn(clients, rows, 6, generator=draw, dtype=torch.float64).to(dtype)
    x *= torch.linspace(0.2, 3, clients, dtype=dtype).view(-1, 1, 1)
    valid = torch.arange(rows) < torch.linspace(rows, 2, clients).long().unsqueeze(1)
    outputs = [model(params, x, valid, torch.arange(clients)), model(params, x)]
    return [*outputs, *(params[n] for n in sorted(model.info.buffers)), torch.get_rng_state()]


class Dropping(Own):
    def __init__(self) -> None:
        super().__init__(lambda m, x: m.b(m.drop(m.norm(m.gru(m.a(x).unsqueeze(1))[0][:, 0]))))
        self.gru, self.drop = nn.GRU(5, 5, num_layers=2, batch_first=True, dropout=0.3), nn.Dropout(0.4)


def test_comparing_a_stack_with_its_clients_changes_no_number() -> None:
    """Running statistics, random streams and PyTorch's generator included; dropout stays on."""
    torch.manual_seed(0)
    model = StackedModel(Dropping(), EXAMPLE)
    assert model.execution.mode == "stacked"
    plain = model.copy()
    plain._row_checks = None
    torch.manual_seed(1)
    without = run_twice(plain, 5, 7)
    torch.manual_seed(1)
    for a, b in zip(run_twice(model, 5, 7), without, strict=True):
        assert torch.equal(a, b)
    assert model._row_checks is not None and len(model._row_checks.compared) == 2


def test_few_of_many_shapes_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ragged clients: any shape up to 40 x 30 may come up, the largest among them."""
    model, shapes = StackedModel(Own(STACKED["plain"]), EXAMPLE), list[torch.Size]()

    def note(run: Any, params: Any, learnt: Any, x: Tensor, *rest: Any) -> None:
        shapes.append(x.shape[:2])

    monkeypatch.setattr(agreement, "difference_from_alone", note)
    for clients in range(40, 1, -1):
        for rows in (30, 30 - clients % 7, 1 + clients % 5):
            for _ in range(2):
                model({n: torch.stack([t] * clients) for n, t in model.initial.items()}, torch.zeros(clients, rows, 6))
    assert (40, 30) in shapes and len(set(shapes)) == len(shapes) <= 24
    model({n: torch.stack([t] * 41) for n, t in model.initial.items()}, torch.zeros(41, 30, 6))
    assert shapes[-1] == (41, 30)


def test_where_nothing_can_be_compared_a_shape_is_compared_later() -> None:
    """As while a CUDA graph is recorded."""
    checks = StackedModel(Own(STACKED["plain"]), EXAMPLE)._row_checks
    assert checks is not None
    checks.check(3, 4, True, None)
    assert not checks.checked
    with pytest.raises(UserError, match=r"outputs differ \(3 clients with 4 rows each, in training\), so the rows of"):
        checks.check(3, 4, True, lambda: "outputs differ")
    checks.check(3, 4, True, lambda: None)
    assert checks.checked == {(True, 3, 4)}


def test_what_differs_by_rounding_alone_is_not_refused() -> None:
    """Here a module gives something else in float32 than in float64, which decides."""
    model = StackedModel(Own(lambda m, x: by_place(m, x) if x.dtype == torch.float32 else m.b(m.a(x))), EXAMPLE)
    assert model.execution.mode == "stacked"
    run_twice(model, 5, 7)


def test_a_client_that_diverged_is_not_compared_and_must_not_reach_the_others() -> None:
    def leaking(m: Any, x: Tensor) -> Tensor:
        return m.b(m.a(x)) + torch.where(x.isnan().any(), 1.0, 0.0)

    x = torch.zeros(3, 4, 6)
    x[1] = torch.nan
    for how, refused in ((STACKED["plain"], False), (leaking, True)):
        model = StackedModel(Own(how), EXAMPLE)
        params = {n: torch.stack([t] * 3) for n, t in model.initial.items()}
        with pytest.raises(UserError, match="outputs differ") if refused else nullcontext():
            model(params, x)


def test_a_forward_pass_that_fails_for_single_rows_is_compared_for_the_others() -> None:
    def squeezing(m: Any, x: Tensor) -> Tensor:
        return m.b(m.a(x).squeeze())[: len(x)].view(-1, 3).flip(1)[:, [0, 1, 2]]

    run_twice(StackedModel(Own(squeezing), EXAMPLE), 4, 1)


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    # a layer, an example of its input, and the axis of the rows
    "linear": (lambda: nn.Linear(6, 3), (6,), 0),
    "linear over sequences": (lambda: nn.Linear(6, 3), (4, 6), 0),
    "linear over images": (lambda: nn.Linear(6, 3), (2, 2, 6), 0),
    "convolution of series": (lambda: nn.Conv1d(2, 3, 3), (2, 6), 0),
    "convolution of images": (lambda: nn.Conv2d(2, 3, 3), (2, 4, 4), 0),
    "convolution of volumes": (lambda: nn.Conv3d(2, 3, 2), (2, 3, 3, 3), 0),
    "embedding": (lambda: nn.Embedding(7, 3), (5,), 0),
    "LSTM": (lambda: nn.LSTM(6, 3, batch_first=True), (4, 6), 0),
    "LSTM, time first": (lambda: nn.LSTM(6, 3), (4, 6), 1),
    "GRU": (lambda: nn.GRU(6, 3, batch_first=True), (4, 6), 0),
    "GRU, time first": (lambda: nn.GRU(6, 3), (4, 6), 1),
    "attention": (lambda: nn.MultiheadAttention(6, 2, batch_first=True), (4, 6), 0),
    "attention, time first": (lambda: nn.MultiheadAttention(6, 2), (4, 6), 1),
    "layer norm": (lambda: nn.LayerNorm(6), (4, 6), 0),
    "group norm": (lambda: nn.GroupNorm(2, 4), (4, 6), 0),
    "batch norm": (lambda: nn.BatchNorm1d(4), (4, 6), 0),
    "batch norm of images": (lambda: nn.BatchNorm2d(2), (2, 4, 4), 0),
    "batch norm of volumes": (lambda: nn.BatchNorm3d(2), (2, 2, 2, 2), 0),
    "dropout": (lambda: nn.Dropout(0.5), (4, 6), 0),
    "dropout of channels": (lambda: nn.Dropout2d(0.5), (2, 4, 4), 0),
    "a layer without a stacked form": (lambda: nn.PReLU(), (4, 6), 0),
}


class Around(nn.Module):
    """One layer, called with examples first or second, and a parameter of its own that is always there."""

    def __init__(self, layer: nn.Module, axis: int) -> None:
        super().__init__()
        self.layer, self.axis, self.head = layer, axis, nn.Linear(1, 2)
        self.attends = isinstance(layer, nn.MultiheadAttention)

    def call(self, x: Tensor) -> Tensor:
        given = x.transpose(0, self.axis)
        out = self.layer(given, given, given) if self.attends else self.layer(given)
        return (out[0] if isinstance(out, tuple) else out).transpose(0, self.axis)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.call(x).flatten(1).mean(1, keepdim=True))


@pytest.mark.parametrize(("make", "shape", "axis"), LAYERS.values(), ids=LAYERS)
def test_a_layer_refuses_rows_that_are_not_all_of_each_client(
    make: Callable[[], nn.Module], shape: tuple[int, ...], axis: int
) -> None:
    """A forward pass may give it each row twice, but not half of them: ten of twenty with four steps are forty."""
    module = Around(make(), axis)

    def inputs(rows: int) -> Tensor:
        return torch.ones(rows, *shape, dtype=torch.int64 if isinstance(module.layer, nn.Embedding) else None)

    model = StackedModel(module, inputs(2))
    assert model.execution.mode == "stacked"
    params = {n: torch.stack([t] * 4) for n, t in model.initial.items()}
    model(
        params, inputs(20).view(4, 5, *shape), None, torch.arange(4)
    )  # the context is of four clients, five rows each
    model._context.params = params
    folded: Any = model._folded
    assert folded.layer.path == "layer" and len(folded.call(inputs(20))) == 20 and len(folded.call(inputs(40))) == 40
    for rows in (10, 30):
        with pytest.raises(UserError, match=rf"layer 'layer' received {rows} rows for 4 clients with 5 examples each"):
            folded.call(inputs(rows))
