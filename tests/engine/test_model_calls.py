"""What losses of authors cost: every forward pass they take, and every backward pass through each."""

from __future__ import annotations

import functools
import gc
import traceback
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

from personafl import StackedModel
from personafl.core import tree
from personafl.core.algorithm import Algorithm
from personafl.core.criteria import divergence
from personafl.core.local_work import ClientState, GradientPass, LocalWork, Loss, Turn, own_loss, whole
from personafl.core.types import Batch, Params, Round, Stage, Task, per_example
from personafl.engine import cost
from personafl.engine.dry_run import estimate_cost
from personafl.engine.local import run_local_work
from personafl.engine.model_calls import identity
from personafl.evaluation import metrics
from tests import worlds
from tests.accel import test_second_derivatives as second_derivatives

# The MLP has layers of 6 x 12, 12 x 8 and 8 x 3: a forward pass takes 2 * 72 + 12 = 156, 2 * 96 + 8 = 200 and
# 2 * 24 + 3 = 51 FLOP. A backward pass takes twice as much: one product for the weights, one for what enters.
FIRST, SECOND, HEAD = 156, 200, 51
FORWARD = FIRST + SECOND + HEAD  # 407
BACKWARD = 2 * FORWARD
FED = worlds.federation().to(torch.device("cpu"), torch.float64)
MODEL = worlds.model().to(torch.device("cpu"), torch.float64)
NAMES = MODEL.info.parameters
BODY, LAST = NAMES[:4], NAMES[4:]
IDS = torch.tensor([0, 5, 2, 3, 1, 4])
COUNTS = (28, 22, 16, 10, 6, 3)


def flops(
    loss: Loss,
    moves: tuple[str, ...] = NAMES,
    active: Mapping[str, Tensor] | None = None,
    kind: type[Turn] | type[GradientPass] = Turn,
    **fixed: Tensor,
) -> list[float]:
    """FLOP of an example with masks and without them, each client's the same."""
    state = tree.stack(MODEL.initial | tree.prefixed(MODEL.initial, "personal"), len(IDS))
    local = ClientState(state, dict(fixed) | tree.stack(tree.prefixed(MODEL.initial, "teacher"), len(IDS)))
    turn: LocalWork = Turn(whole(moves), loss=loss, epochs=2, minibatches=2, active=dict(active or {}))
    if kind is GradientPass:
        turn = GradientPass(moves, lambda state, _: state, loss=loss, active=dict(active or {}))
    task = Task(MODEL, metrics.cross_entropy, metrics.accuracy)
    data = FED.examples("train", IDS)
    _, work = run_local_work(task, local, [turn], data, worlds.training(), Round(Stage(1), 0.1))
    seen = 2 * torch.tensor(COUNTS) if kind is Turn else torch.tensor(COUNTS).clamp(max=5)
    each = torch.stack([work.flops / seen, work.dense_flops / seen], 1)
    torch.testing.assert_close(each, each[:1].expand_as(each))
    return each[0].tolist()


def adapted(task: Task, local: ClientState, batch: Batch, names: tuple[str, ...], second_order: bool) -> Params:
    """The weights after a gradient step on a minibatch."""
    leaves = [local.params[n] for n in names]
    grads = torch.autograd.grad(task.loss(local.params, batch).sum(), leaves, create_graph=second_order)
    return local.params | {n: w - 0.1 * g for n, w, g in zip(names, leaves, grads, strict=True)}


def maml(
    task: Task, local: ClientState, batch: Batch, names: tuple[str, ...] = NAMES, second_order: bool = True
) -> Tensor:
    return task.loss(adapted(task, local, batch, names, second_order), batch.others[0])


first_order = functools.partial(maml, second_order=False)


def three_clusters(task: Task, local: ClientState, batch: Batch) -> Tensor:
    """IFCA in a loss: three models are tried without gradients, and the best one is trained."""
    with torch.no_grad():
        tried = torch.stack([task.loss(local.params, batch) for _ in range(3)])
    return task.loss(local.params, batch) + 0 * tried.min(0).values


def taught(task: Task, local: ClientState, batch: Batch) -> Tensor:
    """A teacher's outputs are learned from."""
    with torch.no_grad():
        teacher = task.model(tree.under(local.fixed, "teacher"), batch.x, batch.valid)
    out = task.model(local.params, batch.x, batch.valid, batch.keys)
    return batch.mean(per_example(task.criterion, out, batch.y) + divergence(teacher, out))


def both(task: Task, local: ClientState, batch: Batch) -> Tensor:
    """Two models that teach each other."""
    a, b = (
        task.model(p, batch.x, batch.valid, batch.keys) for p in (local.params, tree.under(local.params, "personal"))
    )
    return batch.mean(divergence(a, b) + divergence(b, a) + per_example(task.criterion, a + b, batch.y))


def pulled(task: Task, local: ClientState, batch: Batch) -> Tensor:
    """FedProx, its term in the loss."""
    anchor = tree.under(local.fixed, "teacher")
    return task.loss(local.params, batch) + tree.squared_distance(tree.select(local.params, anchor), anchor)


def without_gradients(task: Task, local: ClientState, batch: Batch) -> Tensor:
    with torch.no_grad():
        loss = task.loss(local.params, batch)
    return loss + 0 * local.params[NAMES[0]].flatten(1).sum(1)


def features_alone(task: Task, local: ClientState, batch: Batch) -> Tensor:
    z, _ = task.model.features(local.params, batch.x, batch.valid, batch.keys)
    return batch.mean(z.square().sum(-1))


def half_of_the_minibatch(task: Task, local: ClientState, batch: Batch) -> Tensor:
    some = slice(0, 2)  # of five examples
    valid = None if batch.valid is None else batch.valid[:, some]
    return task.model(local.params, batch.x[:, some], valid, batch.keys).square().sum((1, 2))


def against_inputs(task: Task, local: ClientState, batch: Batch) -> Tensor:
    """Adversarial training: inputs are moved against the loss first."""
    x = batch.x.detach().requires_grad_()
    out = task.model({n: t.detach() for n, t in local.params.items()}, x, batch.valid)
    (slope,) = torch.autograd.grad(per_example(task.criterion, out, batch.y).sum(), [x])
    out = task.model(local.params, x.detach() + 0.1 * slope.sign(), batch.valid, batch.keys)
    return batch.mean(per_example(task.criterion, out, batch.y))


def two_gradients_of_a_call(task: Task, local: ClientState, batch: Batch) -> Tensor:
    """The head's gradient and then the body's, of one forward pass, and the usual one of the sum."""
    loss = task.loss(local.params, batch)
    for names in (LAST, BODY):
        torch.autograd.grad(loss.sum(), [local.params[n] for n in names], retain_graph=True)
    return loss


def hessian_times_vector(task: Task, local: ClientState, batch: Batch) -> Tensor:
    leaves = [local.params[n] for n in NAMES]
    grads = torch.autograd.grad(task.loss(local.params, batch).sum(), leaves, create_graph=True)
    products = torch.autograd.grad(grads, leaves, [g.detach() for g in grads])
    return torch.stack([tree.flat(p * w).sum(1) for p, w in zip(products, leaves, strict=True)]).sum(0)


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (own_loss, FORWARD + BACKWARD),
        (lambda task, local, batch: task.loss(local.params, batch), FORWARD + BACKWARD),
        (pulled, FORWARD + BACKWARD),
        (without_gradients, FORWARD),
        (first_order, 2 * (FORWARD + BACKWARD)),
        # of the first step: forward, backward, the gradients of that backward pass, and those of the forward pass
        (maml, (FORWARD + BACKWARD + 2 * BACKWARD + BACKWARD) + (FORWARD + BACKWARD)),
        (hessian_times_vector, FORWARD + BACKWARD + 2 * BACKWARD + BACKWARD),
        (three_clusters, 3 * FORWARD + FORWARD + BACKWARD),
        (taught, FORWARD + FORWARD + BACKWARD),
        (features_alone, FORWARD + 2 * (FIRST + SECOND)),
        (half_of_the_minibatch, 0.4 * (FORWARD + BACKWARD)),
        (against_inputs, FORWARD + FORWARD + FORWARD + BACKWARD),  # one product of each layer leads to its input
        # to the head; through it, to the body; all
        (two_gradients_of_a_call, FORWARD + 2 * HEAD + HEAD + 2 * (FIRST + SECOND) + BACKWARD),
    ],
)
def test_a_step_costs_what_its_loss_runs(loss: Loss, expected: float) -> None:
    assert flops(loss) == pytest.approx([expected, expected])


def test_two_models_that_teach_each_other_are_both_trained() -> None:
    assert flops(both, (*NAMES, *(f"personal/{n}" for n in NAMES))) == [2 * (FORWARD + BACKWARD)] * 2
    assert flops(both) == [FORWARD + BACKWARD + FORWARD] * 2  # the second one is a teacher


def test_a_gradient_that_stops_at_the_head_costs_its_head_alone() -> None:
    """ANIL adapts the head: its step takes a backward pass of the head, and that one's gradients twice as much."""
    anil = functools.partial(maml, names=LAST)
    assert flops(anil) == [FORWARD + 2 * HEAD + 2 * 2 * HEAD + BACKWARD + FORWARD + BACKWARD] * 2
    assert flops(functools.partial(maml, names=LAST, second_order=False)) == [
        FORWARD + 2 * HEAD + FORWARD + BACKWARD
    ] * 2  # fmt: skip


def test_every_call_runs_under_the_masks_of_its_own_weights() -> None:
    """A quarter of the first layer's 72 weights is on: 2 * 18 + 12 = 48 FLOP instead of 156."""
    mask = torch.zeros(len(IDS), 12, 6, dtype=torch.bool)
    mask[:, :3] = True
    active = {NAMES[0]: mask}
    sparse = FORWARD - FIRST + 48
    assert flops(own_loss, active=active) == [3 * sparse, 3 * FORWARD]
    assert flops(first_order, active=active) == [2 * 3 * sparse, 2 * 3 * FORWARD]  # also what is computed from them
    assert flops(maml, active=active) == [(9 + 3) * sparse, (9 + 3) * FORWARD]
    assert flops(taught, active=active) == [3 * sparse + FORWARD, 4 * FORWARD]  # the teacher is dense
    assert flops(three_clusters, active=active) == [6 * sparse, 6 * FORWARD]
    pair = (*NAMES, *(f"personal/{n}" for n in NAMES))
    assert flops(both, pair, active={f"personal/{NAMES[0]}": mask}) == [3 * sparse + 3 * FORWARD, 6 * FORWARD]
    # for regrowth the gradient of the weights is dense: 156 of three times
    assert flops(own_loss, active=active, kind=GradientPass) == [3 * sparse - 48 + FIRST, 3 * FORWARD]
    assert flops(taught, active=active, kind=GradientPass) == [3 * sparse - 48 + FIRST + FORWARD, 4 * FORWARD]


def test_counting_changes_no_number() -> None:
    """Running statistics and random streams are as they would be without it."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Dropout(0.5), nn.Linear(5, 3))
    model = StackedModel(module, FED.source.x[:2])

    class Counted(Algorithm):
        counts = True

        def turns(self, local: ClientState, rnd: Round) -> list[LocalWork]:
            return [self.usual_turn(whole(self.info.parameters), loss=self._loss, count_calls=self.counts)]

        def _loss(self, task: Task, local: ClientState, batch: Batch) -> Tensor:
            return 2 * task.loss(local.params, batch)

    class Uncounted(Counted):
        counts = False

    a, b = (worlds.simulation(method(), model=model, num_rounds=2) for method in (Counted, Uncounted))
    before = torch.random.get_rng_state()
    for sim in (a, b):
        sim.run()
    assert torch.equal(before, torch.random.get_rng_state())
    assert a.totals == b.totals
    for n, t in a.server.items():
        assert torch.equal(t, b.server[n])


def test_a_loss_is_run_for_its_cost_once_however_often_it_is_made() -> None:
    class Calls:
        number = 0

    def made(factor: float) -> Loss:
        def loss(task: Task, local: ClientState, batch: Batch) -> Tensor:
            if task.model is not MODEL:
                Calls.number += 1
            return factor * task.loss(local.params, batch)

        return loss

    for _ in range(3):
        flops(made(2.0))
    assert Calls.number == 1
    flops(made(3.0))
    assert Calls.number == 2


def test_losses_differ_by_their_code_and_what_they_hold() -> None:
    def made(part: object) -> Loss:
        return lambda task, local, batch: task.loss(local.params, batch) if part else batch.x

    assert identity(made(1)) == identity(made(1)) != identity(made(2))
    assert identity(made(True)) != identity(made(1))
    assert identity(functools.partial(maml, names=BODY)) != identity(functools.partial(maml, names=LAST))
    assert identity(made(torch.zeros(2))) == identity(made(torch.ones(2))) != identity(made(torch.ones(3)))
    assert identity(made(made(1))) == identity(made(made(1))) != identity(made(made(2)))


class Holder:
    """An owner of a loss that is no method of a federation."""

    def __init__(self, times: int = 1) -> None:
        self.times = times

    def loss(self, task: Task, local: ClientState, batch: Batch) -> Tensor:
        return torch.stack([task.loss(local.params, batch) for _ in range(self.times)]).mean(0)


TIMES = 1


def as_often_as_a_global_says(task: Task, local: ClientState, batch: Batch) -> Tensor:
    return torch.stack([task.loss(local.params, batch) for _ in range(TIMES)]).mean(0)


def as_a_helper_does(task: Task, local: ClientState, batch: Batch) -> Tensor:
    return as_often_as_a_global_says(task, local, batch)


@pytest.mark.parametrize("loss", [as_often_as_a_global_says, as_a_helper_does])
def test_a_global_number_that_changes_is_counted_anew(loss: Loss, monkeypatch: pytest.MonkeyPatch) -> None:
    assert flops(loss) == [FORWARD + BACKWARD] * 2
    monkeypatch.setitem(globals(), "TIMES", 4)
    assert flops(loss) == [4 * (FORWARD + BACKWARD)] * 2
    monkeypatch.setitem(globals(), "TIMES", 1)
    assert flops(loss) == [FORWARD + BACKWARD] * 2


def test_an_attribute_of_a_loss_s_owner_that_changes_is_counted_anew() -> None:
    holder = Holder()
    assert flops(holder.loss) == [FORWARD + BACKWARD] * 2
    holder.times = 4
    assert flops(holder.loss) == [4 * (FORWARD + BACKWARD)] * 2
    assert flops(lambda task, local, batch: holder.loss(task, local, batch)) == [4 * (FORWARD + BACKWARD)] * 2


def test_a_default_that_has_to_be_named_tells_losses_apart() -> None:
    def made(times: int) -> Loss:
        def loss(task: Task, local: ClientState, batch: Batch, *, times: int = times) -> Tensor:
            return torch.stack([task.loss(local.params, batch) for _ in range(times)]).mean(0)

        return loss

    assert [flops(made(k))[0] for k in (1, 3)] == [FORWARD + BACKWARD, 3 * (FORWARD + BACKWARD)]


def test_a_function_that_calls_itself_has_an_identity() -> None:
    def made() -> Callable[[int], int]:
        def factorial(n: int) -> int:
            return n * factorial(n - 1) if n else 1

        return factorial

    assert identity(made()) == identity(made())


def test_client_states_and_rounds_are_compared_by_what_they_hold() -> None:
    def state(width: int) -> ClientState:
        return ClientState({"w": torch.rand(2, width)}, {"step": torch.zeros(2)})

    assert identity(state(3)) == identity(state(3)) != identity(state(4))
    first, again, second = (Round(Stage(number), 0.1) for number in (1, 1, 2))
    assert identity(first) == identity(again) != identity(second)
    assert identity(replace(first, lr=0.2)) != identity(first)


def test_an_object_that_is_gone_equals_nothing() -> None:
    holder = Holder()
    before, alive = identity(holder.loss), weakref.ref(holder)
    assert before == identity(holder.loss) != identity(Holder().loss)
    del holder
    gc.collect()
    assert alive() is None
    assert before != identity(Holder().loss)


class Seen:
    """What the losses of the next two methods leave behind."""

    states: ClassVar[list[weakref.ref[ClientState]]] = []
    counted = 0  # how often a loss was run for its cost


class Captures(Algorithm):
    """Its loss is made anew in every round and holds the clients' state."""

    def turns(self, local: ClientState, rnd: Round) -> list[LocalWork]:
        Seen.states.append(weakref.ref(local))

        def loss(task: Task, seen: ClientState, batch: Batch) -> Tensor:
            Seen.counted += not isinstance(task.model, StackedModel)
            return len(local.params) * task.loss(seen.params, batch)

        return [self.usual_turn(whole(self.info.parameters), loss=loss)]


class HoldsRound(Algorithm):
    """Its loss is made anew in every round and holds the round, of which the number may change what it runs."""

    def turns(self, local: ClientState, rnd: Round) -> list[LocalWork]:
        return [self.usual_turn(whole(self.info.parameters), loss=functools.partial(self._loss, rnd))]

    def _loss(self, rnd: Round, task: Task, local: ClientState, batch: Batch) -> Tensor:
        Seen.counted += not isinstance(task.model, StackedModel)
        return rnd.number * task.loss(local.params, batch)


@pytest.mark.parametrize(("method", "runs"), [(Captures(), 1), (HoldsRound(), 6)])
def test_a_loss_made_anew_is_run_for_its_cost_only_where_it_may_differ(method: Algorithm, runs: int) -> None:
    Seen.states.clear()
    Seen.counted = 0
    worlds.simulation(method, num_rounds=6, join_ratio=1.0).run()
    gc.collect()
    assert Seen.counted == runs
    assert not [ref for ref in Seen.states if ref() is not None]  # no state of clients is kept alive


def trained(loss: Loss, fixed: Params, moves: tuple[str, ...] = NAMES) -> Params:
    """Three clients after a minibatch or several of this loss, in which they see these tensors."""
    task = Task(MODEL, metrics.cross_entropy, metrics.accuracy)
    local = ClientState(tree.stack(MODEL.initial, 3), fixed)
    turns = [Turn(whole(moves), loss=loss, epochs=1)]
    return run_local_work(
        task, local, turns, FED.examples("train", IDS[:3]), worlds.training(), Round(Stage(1), 0.1)
    )[0].params  # fmt: skip


def test_counting_leaves_what_a_loss_writes_to_as_it_was() -> None:
    """Clients of 28, 22 and 16 examples take 6, 5 and 4 steps in minibatches of 5."""

    def made() -> Loss:
        def counting(task: Task, local: ClientState, batch: Batch) -> Tensor:
            return task.loss(local.params, batch) * local.fixed["steps"].add_(1)

        return counting

    found = []
    for _ in range(2):  # it is run for its cost the first time
        steps = torch.zeros(3, dtype=torch.float64)
        found.append(trained(made(), {"steps": steps}))
        assert steps.tolist() == [6, 5, 4]
    for n, t in found[0].items():
        assert torch.equal(t, found[1][n])


def test_counting_leaves_the_global_generator_as_it_was() -> None:
    def drawing(task: Task, local: ClientState, batch: Batch) -> Tensor:
        return task.loss(local.params, batch) * torch.rand(())

    found = []
    with torch.random.fork_rng():
        for _ in range(2):  # it is run for its cost the first time
            torch.manual_seed(0)
            found.append(trained(drawing, {}))
    for n, t in found[0].items():
        assert torch.equal(t, found[1][n])


def test_a_loss_that_fails_does_so_as_in_training() -> None:
    def failing(task: Task, local: ClientState, batch: Batch) -> Tensor:
        return task.loss(local.params, batch) @ torch.zeros(2, 7, dtype=torch.float64)

    ends = []
    for count_calls in (True, False):
        turn = Turn(whole(NAMES), loss=failing, epochs=1, count_calls=count_calls)
        task = Task(MODEL, metrics.cross_entropy, metrics.accuracy)
        local = ClientState(tree.stack(MODEL.initial, 1), {})
        with pytest.raises(RuntimeError) as error:
            run_local_work(
                task, local, [turn], FED.examples("train", IDS[:1]), worlds.training(), Round(Stage(1), 0.1)
            )  # fmt: skip
        ends.append((str(error.value), error.value.__context__, traceback.extract_tb(error.tb)[-1].name))
    assert ends[0] == ends[1]
    assert ends[0][2] == "failing"


class Meta(Algorithm):
    """MAML as a method."""

    def turns(self, local: ClientState, rnd: Round) -> list[LocalWork]:
        return [self.usual_turn(whole(self.info.parameters), loss=maml, minibatches=2)]


@pytest.mark.parametrize("batch_size", [5, 100])
def test_the_cost_expected_of_a_run_is_that_of_the_run(batch_size: int) -> None:
    fed = worlds.federation(sizes=(20, 20, 20, 20))  # 15 for training
    sim = worlds.simulation(Meta(), fed=fed, num_rounds=2, join_ratio=1.0, batch_size=batch_size)
    sim.run()
    expected = estimate_cost(Meta(), MODEL, sim.training, num_clients=4, examples=15)
    assert sim.totals.flops / 4 == expected.flops == 2 * 2 * 15 * 12 * FORWARD
    assert sim.totals.up_bytes / 4 == expected.up_bytes


def test_forward_passes_are_those_of_the_model() -> None:
    assert cost.forward_pass(MODEL.info) == FORWARD


@pytest.mark.parametrize("task", ["classification", "regression", "multilabel", "sequence"])
def test_the_cost_of_a_loss_can_be_expected_for_every_task(task: str) -> None:
    """A training step of 2 * 6 * 4 + 4 = 52 FLOP at each place, twice."""

    class Doubled(Algorithm):
        def turns(self, local: ClientState, rnd: Round) -> list[LocalWork]:
            return [self.usual_turn(whole(self.info.parameters), loss=self._loss)]

        def _loss(self, task: Task, local: ClientState, batch: Batch) -> Tensor:
            return task.loss(local.params, batch) + task.loss(local.params, batch)

    places = 5 if task == "sequence" else 1
    model = StackedModel(nn.Linear(6, 4), torch.zeros(2, *([places] if places > 1 else []), 6))
    training = worlds.training(num_rounds=1, join_ratio=1.0, local_epochs=1, task=task)
    assert estimate_cost(Doubled(), model, training, num_clients=3, examples=7).flops == 7 * places * 2 * 3 * 52


class Mixing(nn.Module):
    """What runs client by client: its forward looks at the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        out: Tensor = self.last(torch.tanh(h - h.mean(0)))
        return out


@pytest.mark.parametrize("kind", [*second_derivatives.MODULES, "client by client"])
def test_every_kind_of_network_is_counted_alike(kind: str) -> None:
    """Second-order MAML takes twelve forward passes of any network, batch norms and attention included."""
    make, shape = second_derivatives.MODULES.get(kind, (Mixing, (6,)))
    fed = second_derivatives.federation(shape)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = StackedModel(make(), fed.source.x[:2])
    options = {"num_rounds": 1, "join_ratio": 1.0, "local_epochs": 1, "batch_size": 4}
    sim = worlds.simulation(second_derivatives.MAML(), fed=fed, model=model, **options)
    sim.run()
    examples = int(fed.sizes("train").sum())
    assert sim.totals.flops == examples * 12 * cost.forward_pass(model.info)
