"""The local-training loop: what its turns see of each other, of the data and of their optimisers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from personafl import FedAvg, StackedModel
from personafl.core import tree
from personafl.core.algorithm import Algorithm
from personafl.core.errors import UserError
from personafl.core.local_work import (
    ClientState,
    DataPass,
    GradientPass,
    LocalWork,
    Pull,
    StateUpdate,
    Turn,
    own_loss,
    whole,
)
from personafl.core.optim import SGD, Adam
from personafl.core.types import Batch, Params, Round, Stage, Task, per_example
from personafl.engine.local import run_local_work
from personafl.evaluation import metrics
from tests import worlds

FED = worlds.federation().to(torch.device("cpu"), torch.float64)
MODEL = worlds.model().to(torch.device("cpu"), torch.float64)
TASK = Task(MODEL, metrics.cross_entropy, metrics.accuracy)
NAMES = MODEL.info.parameters
IDS = torch.tensor([0, 5, 2, 3, 1, 4])  # 28, 22, 16, 10, 6, 3 examples
DATA = FED.examples("train", IDS)
RND = Round(Stage(2), 0.1)


def begin(ids: Tensor = IDS, **fixed: Tensor) -> ClientState:
    return ClientState(tree.stack(MODEL.initial, len(ids)), dict(fixed))


def go(
    turns: list[LocalWork], local: ClientState | None = None, ids: Tensor = IDS, train: bool = True, **changes: object
) -> ClientState:
    data = FED.examples("train", ids)
    return run_local_work(TASK, local or begin(ids), turns, data, worlds.training(**changes), RND, train=train)[0]


def seeing(seen: list[tuple[Tensor, Tensor]], weight: float = 1.0):
    """The usual loss, which notes each minibatch and its keys."""

    def loss(task: Task, local: ClientState, batch: Batch) -> Tensor:
        if task.model is MODEL:  # else the loss is run to count what it costs
            seen.append((batch.x.clone(), batch.keys.clone()))
        return weight * task.loss(local.params, batch)

    return loss


# Turns on the same minibatches


def test_a_second_part_sees_the_same_minibatch_with_noise_of_its_own() -> None:
    first: list[tuple[Tensor, Tensor]] = []
    second: list[tuple[Tensor, Tensor]] = []
    head, body = ["head.weight"], ["layers.0.weight"]
    go([Turn(whole(head), loss=seeing(first), epochs=2, then=Turn(whole(body), loss=seeing(second)))])
    assert len(first) == len(second) == 2 * 6  # 28 examples in batches of 5
    for (x, keys), (again, others) in zip(first, second, strict=True):
        assert torch.equal(x, again)
        assert (keys != others).all()


def test_a_later_part_sees_what_the_earlier_one_has_just_moved() -> None:
    """One full batch: the head by its gradient at w, then the body by its gradient at the new head."""
    head = [n for n in NAMES if n.startswith("head")]
    body = [n for n in NAMES if not n.startswith("head")]
    one = torch.tensor([2])
    done = go([Turn(whole(head), steps=1, then=Turn(whole(body), lr=0.3))], ids=one, batch_size=64)
    x, y = (t[DATA.rows[2, :16]] for t in (FED.source.x, FED.source.y))
    w = {n: t.clone() for n, t in MODEL.initial.items()}
    for names, lr in ((head, 0.1), (body, 0.3)):
        leaves = {n: w[n].requires_grad_() for n in names}
        loss = torch.nn.functional.cross_entropy(
            torch.func.functional_call(worlds.module().double(), w | leaves, (x,)), y
        )
        grads = torch.autograd.grad(loss, list(leaves.values()))
        w = {n: t.detach() for n, t in w.items()} | {
            n: (w[n] - lr * g).detach() for n, g in zip(names, grads, strict=True)
        }
    for n in NAMES:
        torch.testing.assert_close(done.params[n][0], w[n], rtol=1e-10, atol=1e-12)


def test_parts_on_a_shrinking_stack_equal_each_client_alone() -> None:
    turn = Turn(whole(["head.weight"]), epochs=2, optimizer=SGD(0.9), then=Turn(whole(["layers.0.weight"])))
    together = go([turn])
    for i in range(6):
        alone = go([turn], ids=IDS[i : i + 1])
        for n in NAMES:
            torch.testing.assert_close(together.params[n][i], alone.params[n][0], rtol=1e-10, atol=1e-12)


# Streams


def test_turns_go_on_in_their_stream_and_other_streams_have_their_own() -> None:
    """Three turns of one epoch see what one of three sees, whatever is played in another stream between them."""
    one: list[tuple[Tensor, Tensor]] = []
    apart: list[tuple[Tensor, Tensor]] = []
    other: list[tuple[Tensor, Tensor]] = []
    names = whole(["head.weight"])
    go([Turn(names, loss=seeing(one), epochs=3)])
    go(
        [
            Turn(names, loss=seeing(apart), epochs=1),
            Turn(names, loss=seeing(other), epochs=1, stream="personal"),
            Turn(names, loss=seeing(apart), epochs=1),
            Turn(names, loss=seeing(apart), epochs=1),
        ]
    )
    # The one turn mixes clients' epochs step by step, so compare the largest client's examples.
    assert len(one) == 3 * 6
    assert all(torch.equal(a[0], b[0]) for (a, _), (b, _) in zip(one, apart, strict=True))
    assert not any(torch.equal(a[0], b[0]) for (a, _), (b, _) in zip(one[:6], other, strict=True))
    keys = {int(k) for _, stack in (*apart, *other) for k in stack}
    assert len(keys) == sum(len(stack) for _, stack in (*apart, *other))  # no noise twice


def test_steps_of_all_streams_are_counted() -> None:
    names = whole(["head.weight"])
    done = go([Turn(names, steps=3), Turn(names, steps=2, stream="personal")])
    assert done.steps is not None
    assert done.steps.tolist() == [5] * 6


# Surveys, probes, changes


def losses(task: Task, local: ClientState, batch: Batch) -> Params:
    out = task.model(local.params, batch.x, batch.valid)
    loss = batch.mean(per_example(task.criterion, out, batch.y)) * batch.count
    return {"loss": loss, "count": batch.count.to(loss.dtype), "x": (batch.x * _real(batch)).sum(1)}


def _real(batch: Batch) -> Tensor:
    real = torch.ones(batch.x.shape[:2], dtype=torch.bool) if batch.valid is None else batch.valid
    return real.unsqueeze(2)


def noted(local: ClientState, sums: Params) -> ClientState:
    return dataclasses.replace(local, fixed=local.fixed | tree.prefixed(sums, "sum"))


def test_a_survey_sums_over_every_example_once() -> None:
    done = go([DataPass(losses, noted)])
    for i, n in enumerate(DATA.count.tolist()):
        rows = DATA.rows[i, :n]
        x, y = FED.source.x[rows], FED.source.y[rows]
        total = sum(
            float(metrics.cross_entropy(MODEL.client(MODEL.initial)(x[j : j + 1]).detach(), y[j : j + 1]))
            for j in range(n)
        )
        assert float(done.fixed["sum/loss"][i]) == pytest.approx(total)
        assert float(done.fixed["sum/count"][i]) == n
        torch.testing.assert_close(done.fixed["sum/x"][i], x.sum(0))


def test_a_survey_of_more_examples_than_a_sweep_holds_sums_over_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("personafl.data.batches.SWEEP", 7)
    small = go([DataPass(losses, noted)])
    monkeypatch.undo()
    at_once = go([DataPass(losses, noted)])
    for n in at_once.fixed:
        torch.testing.assert_close(small.fixed[n], at_once.fixed[n])


def test_a_survey_sees_the_model_as_it_then_is_and_leaves_it() -> None:
    turn = Turn(whole(NAMES), epochs=1)
    before, after = go([DataPass(losses, noted), turn]), go([turn, DataPass(losses, noted)])
    assert (after.fixed["sum/loss"] < before.fixed["sum/loss"]).all()
    assert all(torch.equal(before.params[n], after.params[n]) for n in NAMES)


@pytest.mark.parametrize("models", [0, 1, 3])
def test_a_data_pass_costs_the_forward_passes_it_takes(models: int) -> None:
    """2 (6 * 12 + 12 * 8 + 8 * 3) + 12 + 8 + 3 = 407 FLOP, masked or not; to choose of three models takes three."""

    def measure(task: Task, local: ClientState, batch: Batch) -> Params:
        outputs = [task.model(local.params, batch.x, batch.valid) for _ in range(models)]
        return {f"out {i}": out.sum(1) for i, out in enumerate(outputs)} | {"count": batch.count}

    _, work = run_local_work(TASK, begin(), [DataPass(measure, noted)], DATA, worlds.training(), RND)
    assert work.flops.tolist() == [models * 407 * n for n in (28, 22, 16, 10, 6, 3)]
    assert torch.equal(work.dense_flops, work.flops)


def test_a_loss_and_a_data_pass_see_the_ids_and_streams_of_the_clients_at_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Minibatches of 12 over 28, 22, 16, 10, 6 and 3 rows: six clients, then three, then one."""
    monkeypatch.setattr("personafl.data.batches.SWEEP", 12)
    trained: list[tuple[Tensor | None, Tensor | None]] = []
    measured: list[tuple[Tensor | None, Tensor | None]] = []

    def loss(task: Task, local: ClientState, batch: Batch) -> Tensor:
        if task.model is MODEL:  # else it is run to count what it costs
            trained.append((local.ids, local.keys))
        return task.loss(local.params, batch)

    def measure(task: Task, local: ClientState, batch: Batch) -> Params:
        if task.model is MODEL:
            measured.append((local.ids, local.keys))
        return {"count": batch.count}

    done = go([Turn(whole(NAMES), loss=loss, epochs=1), DataPass(measure, noted)], batch_size=12)
    assert done.keys is not None and len(set(done.keys.tolist())) == 6
    for seen in (trained, measured):
        assert [len(ids) for ids, _ in seen if ids is not None] == [6, 3, 1]
        for ids, keys in seen:
            assert ids is not None and torch.equal(ids, IDS[: len(ids)])
            assert keys is not None and torch.equal(keys, done.keys[: len(ids)])


def test_a_change_is_made_between_turns() -> None:
    def zero(local: ClientState) -> ClientState:
        return dataclasses.replace(
            local, params=local.params | {"head.bias": torch.full_like(local.params["head.bias"], 7.0)}
        )

    body = whole(["layers.0.weight"])
    done = go([Turn(body, epochs=1), StateUpdate(zero), Turn(body, epochs=1)])
    assert (done.params["head.bias"] == 7.0).all()
    late = go([Turn(body, epochs=2), StateUpdate(zero)])
    assert not torch.equal(done.params["layers.0.weight"], late.params["layers.0.weight"])
    assert torch.equal(MODEL.initial["head.bias"], worlds.module().double().head.bias)  # nobody else's changed


def test_moves_are_asked_for_when_a_turn_begins() -> None:
    """A change of masks counts for the turns behind it."""

    def shut(local: ClientState) -> ClientState:
        return dataclasses.replace(local, fixed={"mask": torch.zeros_like(local.fixed["mask"])})

    def moves(local: ClientState) -> dict[str, Tensor]:
        return {"head.weight": local.fixed["mask"]}

    mask = torch.ones(6, 3, 8, dtype=torch.bool)
    open_, closed = (
        go([Turn(moves, epochs=1)], begin(mask=mask)),
        go([StateUpdate(shut), Turn(moves, epochs=1)], begin(mask=mask)),
    )
    assert not torch.equal(open_.params["head.weight"][0], MODEL.initial["head.weight"])
    assert torch.equal(closed.params["head.weight"][0], MODEL.initial["head.weight"])


def test_a_probe_hands_over_the_gradient_of_one_minibatch() -> None:
    def keep(local: ClientState, grads: Params) -> ClientState:
        return dataclasses.replace(local, fixed=grads)

    done = go([GradientPass(["head.bias"], keep)], batch_size=64)
    for i, n in enumerate(DATA.count.tolist()):
        rows = DATA.rows[i, :n]
        w = {k: t.clone() for k, t in MODEL.initial.items()}
        w["head.bias"].requires_grad_()
        out = torch.func.functional_call(worlds.module().double(), w, (FED.source.x[rows],))
        (g,) = torch.autograd.grad(torch.nn.functional.cross_entropy(out, FED.source.y[rows]), w["head.bias"])
        torch.testing.assert_close(done.fixed["head.bias"][i], g)
    assert all(torch.equal(done.params[n], begin().params[n]) for n in NAMES)


@pytest.mark.parametrize("rule", [SGD(0.9), Adam()])
def test_what_an_optimiser_remembers_outlives_the_session_where_it_is_told_to(rule: SGD | Adam) -> None:
    """Two sessions of one epoch and the memory between them equal one session of two, on the same full batches."""
    turn = Turn(whole(NAMES), epochs=1, optimizer=rule, memory="kept")
    options = {"batch_size": 64, "lr": 0.1}
    first = go([turn], **options)
    assert any(n.startswith("kept/") and bool(t.any()) for n, t in first.fixed.items())
    second = go(
        [turn],
        ClientState(first.params, tree.select(first.fixed, [n for n in first.fixed if n.startswith("kept/")])),
        **options,
    )
    forgetful = go([turn], ClientState(first.params), **options)
    whole_session = go([dataclasses.replace(turn, epochs=2)], **options)
    for n in NAMES:
        torch.testing.assert_close(second.params[n], whole_session.params[n], rtol=1e-10, atol=1e-12)
    assert not torch.allclose(forgetful.params["head.weight"], whole_session.params["head.weight"])


def test_what_was_remembered_is_not_overwritten_where_it_came_from() -> None:
    turn = Turn(whole(NAMES), epochs=1, optimizer=SGD(0.9), memory="kept")
    first = go([turn])
    copy = {n: t.clone() for n, t in first.fixed.items()}
    go([turn], ClientState(first.params, first.fixed))
    assert all(torch.equal(first.fixed[n], t) for n, t in copy.items())


def test_without_a_name_memory_lasts_from_turn_to_turn_of_a_session() -> None:
    turn = Turn(whole(NAMES), epochs=1, optimizer=SGD(0.9))
    options = {"batch_size": 64}
    two, one = go([turn, turn], **options), go([dataclasses.replace(turn, epochs=2)], **options)
    for n in NAMES:
        torch.testing.assert_close(two.params[n], one.params[n], rtol=1e-10, atol=1e-12)
    assert not any("momentum" in n for n in two.fixed)


# Only counting


def test_without_training_nothing_changes_and_the_cost_is_the_same() -> None:
    def never(*args: object) -> ClientState:
        raise AssertionError("asked without training")

    plays: list[LocalWork] = [DataPass(losses, never), GradientPass(["head.bias"], never), Turn(whole(NAMES), epochs=2)]  # type: ignore[arg-type]
    local, told = run_local_work(TASK, begin(), plays, DATA, worlds.training(), RND, train=False)
    assert all(torch.equal(local.params[n], begin().params[n]) for n in NAMES)
    real: list[LocalWork] = [DataPass(losses, noted), GradientPass(["head.bias"], lambda now, grads: now), plays[2]]
    _, work = run_local_work(TASK, begin(), real, DATA, worlds.training(), RND)
    assert torch.equal(told.flops, work.flops)
    assert torch.equal(told.dense_flops, work.dense_flops)


def test_without_training_a_change_is_still_made() -> None:
    """Masks and payloads of a rehearsal are real."""
    done = go([StateUpdate(lambda local: dataclasses.replace(local, fixed={"made": torch.ones(6)}))], train=False)
    assert done.fixed["made"].tolist() == [1.0] * 6


# What a method's author may get wrong


# Proximal terms


def anchored(**more: Tensor) -> ClientState:
    """Two models away from their anchors, a tenth and a fifth at every position."""
    second = {f"second/{n}": t + 0.2 for n, t in tree.stack(MODEL.initial, len(IDS)).items()}
    state = begin(**tree.prefixed({n: t - 0.1 for n, t in begin().params.items()}, "anchor"), **more)
    return dataclasses.replace(state, params=state.params | second)


@pytest.mark.parametrize("rule", [SGD(), SGD(momentum=0.9, grad_clip=0.5), Adam(weight_decay=0.1)])
@pytest.mark.parametrize("of", ["", "second"])
def test_a_pull_is_its_term_of_the_loss(of: str, rule: SGD | Adam) -> None:
    """Of one model or of the other one beside it, under masks and on a shrinking stack; and so is the loss told."""
    names = [f"{of}/{n}" if of else n for n in NAMES]
    masks = {n: anchored().params[n] > 0 if n.endswith("weight") else None for n in names}

    def usual(task: Task, local: ClientState, batch: Batch) -> Tensor:
        return task.loss(tree.under(local.params, of) if of else local.params, batch)

    def written_out(task: Task, local: ClientState, batch: Batch) -> Tensor:
        mine = tree.under(local.params, of) if of else tree.select(local.params, NAMES)
        anchor = tree.select(tree.under(local.fixed, "anchor"), NAMES)
        return usual(task, local, batch) + 0.7 / 2 * tree.squared_distance(tree.select(mine, NAMES), anchor)

    training = worlds.training()
    closed = Turn(masks, usual if of else own_loss, epochs=2, optimizer=rule, pulls=(Pull("anchor", 0.7, of=of),))
    both = [
        run_local_work(TASK, anchored(), [turn], DATA, training, RND)
        for turn in (closed, Turn(masks, written_out, epochs=2, optimizer=rule))
    ]
    (pulled, work), (true, expected) = both
    for n in (*names, *NAMES):
        torch.testing.assert_close(pulled.params[n], true.params[n], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(work.loss, expected.loss, rtol=1e-10, atol=1e-12)
    unpulled = run_local_work(TASK, anchored(), [dataclasses.replace(closed, pulls=())], DATA, training, RND)[0]
    assert not torch.allclose(unpulled.params[names[0]], true.params[names[0]])


def test_pulls_add_up_and_leave_what_does_not_move() -> None:
    """A pull of 0.3 and one of 0.4 are one of 0.7; of a turn that moves the head alone, the head's term is told."""
    head = [n for n in NAMES if n.startswith("head")]
    ends = [
        run_local_work(TASK, anchored(), [Turn(whole(head), epochs=1, pulls=p)], DATA, worlds.training(), RND)
        for p in ((Pull("anchor", 0.7),), (Pull("anchor", 0.3), Pull("anchor", 0.4)), ())
    ]
    (one, told), (two, same), (none, _) = ends
    for n in head:
        torch.testing.assert_close(one.params[n], two.params[n], rtol=1e-12, atol=1e-14)
        assert not torch.allclose(one.params[n], none.params[n])
    torch.testing.assert_close(told.loss, same.loss, rtol=1e-12, atol=1e-14)
    far = 0.7 / 2 * 0.01 * sum(MODEL.initial[n].numel() for n in head)  # of the first step, a tenth everywhere
    first = run_local_work(
        TASK, anchored(), [Turn(whole(head), steps=1, pulls=(Pull("anchor", 0.7),))], DATA, worlds.training(), RND
    )[1].loss
    plain = run_local_work(TASK, anchored(), [Turn(whole(head), steps=1)], DATA, worlds.training(), RND)[1].loss
    torch.testing.assert_close(first - plain, torch.full_like(plain, far), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (lambda: Pull("anchor", -0.5), "the weight must be a number, not negative"),
        (lambda: Pull("anchor", float("nan")), "the weight must be a number"),
        (lambda: Pull("anchor", True), "the weight must be a number"),
        (lambda: Pull("anchor", "1"), "the weight must be a number"),
        (lambda: Pull("", 1.0), "prefixes are texts"),
        (lambda: Pull("anchor", 1.0, of=None), "prefixes are texts"),
    ],
)
def test_an_impossible_pull_is_refused(made: Callable[[], Pull], why: str) -> None:
    with pytest.raises(UserError, match=why):
        made()


@pytest.mark.parametrize("pulls", [Pull("anchor", 0.1), None, [Pull("anchor", 0.1)], (("anchor", 0.1),)])
def test_pulls_that_are_no_tuple_of_them_are_refused(pulls: object) -> None:
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Mine(FedAvg):
        def turns(self, local: ClientState, rnd: Round) -> list[LocalWork]:
            return [self.usual_turn(whole(self.info.parameters), pulls=pulls)]

    with pytest.raises(UserError, match=r"pulls=.*: must be a tuple of Pull, such as"):
        worlds.simulation(Mine()).run()


def test_a_pull_to_nothing_is_refused() -> None:
    with pytest.raises(UserError, match=r"nothing to pull, the turn moves no X for which `fixed` has elsewhere/X"):
        go([Turn(whole(NAMES), epochs=1, pulls=(Pull("elsewhere", 0.1),))], anchored())
    with pytest.raises(UserError, match=r"moves no second/X for which `fixed` has anchor/X"):  # without training, too
        go([Turn(whole(NAMES), epochs=1, pulls=(Pull("anchor", 0.1, of="second"),))], anchored(), train=False)


class _PartlyTrained(nn.Module):
    """A body that no gradient reaches, a layer that is not used, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.unused, self.head = nn.Linear(6, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            z = self.body(x).relu()
        return self.head(z)


@pytest.mark.parametrize("rule", [SGD(0.9, 0.5), Adam(weight_decay=0.5), Adam(weight_decay=0.5, decoupled=True)])
def test_weight_decay_leaves_parameters_without_a_gradient_alone(rule: SGD | Adam) -> None:
    torch.manual_seed(0)
    module = _PartlyTrained().double()
    model = StackedModel(module, FED.source.x[:2]).to(torch.device("cpu"), torch.float64)
    task = Task(model, metrics.cross_entropy, metrics.accuracy)
    begun = ClientState(tree.stack(model.initial, 1), {})
    turn = Turn(whole(model.info.parameters), epochs=1, optimizer=rule, lr=0.1)
    ids = torch.tensor([4])  # three examples: one minibatch
    data = FED.examples("train", ids)
    ended = run_local_work(task, begun, [turn], data, worlds.training(), RND)[0].params

    kinds = {SGD: torch.optim.SGD, Adam: torch.optim.AdamW if getattr(rule, "decoupled", False) else torch.optim.Adam}
    own = {"momentum": 0.9} if isinstance(rule, SGD) else {}
    optimizer = kinds[type(rule)](module.parameters(), lr=0.1, weight_decay=0.5, **own)
    rows = data.rows[0]
    F.cross_entropy(module(FED.source.x[rows].double()), FED.source.y[rows]).backward()
    optimizer.step()
    for n, p in module.named_parameters():
        torch.testing.assert_close(ended[n][0], p.detach(), rtol=1e-12, atol=1e-12)
        assert torch.equal(ended[n], begun.params[n]) == (not n.startswith("head"))


class _UsedByLargeMinibatches(nn.Module):
    """A layer that only minibatches of more than three examples go through."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.more = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x) + (self.more(x) if len(x) > 3 else 0)


@pytest.mark.parametrize("rule", [SGD(0.9, 0.5), Adam(weight_decay=0.5), Adam(weight_decay=0.5, decoupled=True)])
def test_clients_whose_minibatch_uses_a_parameter_do_not_move_it_for_others(rule: SGD | Adam) -> None:
    """In a stack of clients, a parameter has a gradient as soon as one client's minibatch gives it one."""
    torch.manual_seed(0)
    model = StackedModel(_UsedByLargeMinibatches(), FED.source.x[:2]).to(torch.device("cpu"), torch.float64)
    task = Task(model, metrics.cross_entropy, metrics.accuracy)
    turn = Turn(whole(model.info.parameters), epochs=3, optimizer=rule, lr=0.1)

    def train(ids: list[int]) -> Params:
        begun = ClientState(tree.stack(model.initial, len(ids)), {})
        data = FED.examples("train", torch.tensor(ids))
        return run_local_work(task, begun, [turn], data, worlds.training(batch_size=5), RND)[0].params

    together = train([0, 1, 4])  # 28, 6 and 3 examples: minibatches of 5 and 3, of 5 and 1, of 3
    for place, client in enumerate((0, 1, 4)):
        for n, t in train([client]).items():  # alone it is a plain optimiser's step, as tested above
            torch.testing.assert_close(together[n][place], t[0], rtol=1e-12, atol=1e-12)
    assert torch.equal(together["more.weight"][2], model.initial["more.weight"])


def _with_penalty(task: Task, local: ClientState, batch: Batch) -> Tensor:
    """Depends on all parameters of every client, also where it is zero."""
    return task.loss(local.params, batch) + 0.1 * tree.flat(local.params["more.bias"]).square().sum(1)


def _with_mixture(task: Task, local: ClientState, batch: Batch) -> Tensor:
    """Gives the model weights that are computed from those that train."""
    return task.loss({n: 0.5 * t + 0.1 for n, t in local.params.items()}, batch)


@pytest.mark.parametrize("loss", [_with_penalty, _with_mixture])
@pytest.mark.parametrize("rule", [SGD(0.9, 0.5), Adam(weight_decay=0.5)])
def test_all_that_a_loss_does_with_a_parameter_counts(loss: Callable[..., Tensor], rule: SGD | Adam) -> None:
    """A loss may use a parameter outside of the model, and may give the model weights that it computes."""
    torch.manual_seed(0)
    model = StackedModel(_UsedByLargeMinibatches(), FED.source.x[:2]).to(torch.device("cpu"), torch.float64)
    task = Task(model, metrics.cross_entropy, metrics.accuracy)
    turn = Turn(whole(model.info.parameters), epochs=2, optimizer=rule, lr=0.1, loss=loss)

    def train(ids: list[int]) -> Params:
        begun = ClientState(tree.stack(model.initial, len(ids)), {})
        data = FED.examples("train", torch.tensor(ids))
        return run_local_work(task, begun, [turn], data, worlds.training(batch_size=5), RND)[0].params

    together = train([0, 1, 4])
    for place, client in enumerate((0, 1, 4)):
        for n, t in train([client]).items():
            torch.testing.assert_close(together[n][place], t[0], rtol=1e-12, atol=1e-12)
    moved = not torch.equal(together["more.bias"][2], model.initial["more.bias"])
    assert moved == (loss is _with_penalty)


def test_a_pull_moves_a_parameter_the_loss_does_not_depend_on() -> None:
    torch.manual_seed(0)
    model = StackedModel(_PartlyTrained(), FED.source.x[:2]).to(torch.device("cpu"), torch.float64)
    task = Task(model, metrics.cross_entropy, metrics.accuracy)
    anchor = {f"anchor/{n}": tree.stack(model.initial, 1)[n] + 1 for n in model.info.parameters}
    turn = Turn(whole(model.info.parameters), epochs=1, lr=0.1, pulls=(Pull("anchor", 0.5),))
    begun = ClientState(tree.stack(model.initial, 1), anchor)
    data = FED.examples("train", torch.tensor([4]))
    ended = run_local_work(task, begun, [turn], data, worlds.training(), RND)[0].params
    # One step: w - 0.1 * 0.5 * (w - (w + 1)) = w + 0.05.
    torch.testing.assert_close(ended["unused.weight"], begun.params["unused.weight"] + 0.05)


def test_a_loss_that_trains_nothing_is_refused() -> None:
    def detached(task: Task, local: ClientState, batch: Batch) -> Tensor:
        return task.loss(local.params, batch).detach()

    with pytest.raises(UserError, match=r"loss .*detached depends on nothing that trains \(.*\): it is detached"):
        go([Turn(whole(NAMES), epochs=1, loss=detached)])


def test_a_loss_that_is_a_mean_over_clients_is_refused() -> None:
    def over_all(task: Task, local: ClientState, batch: Batch) -> Tensor:
        return task.loss(local.params, batch).mean()

    with pytest.raises(UserError, match=r"loss .*over_all must give one number for each client, shape \(6,\), .*\(\)"):
        go([Turn(whole(NAMES), loss=over_all, epochs=1)])
    with pytest.raises(UserError, match="one number for each client"):
        go([GradientPass(NAMES, lambda local, grads: local, loss=over_all)])


def test_a_loss_per_example_is_refused() -> None:
    def per_row(task: Task, local: ClientState, batch: Batch) -> Tensor:
        return per_example(task.criterion, task.model(local.params, batch.x, batch.valid, batch.keys), batch.y)

    with pytest.raises(UserError, match=r"shape \(6,\), and gave shape \(6, 5\); use batch.mean"):
        go([Turn(whole(NAMES), loss=per_row, epochs=1)])


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (None, "Own.turns must return a list of turns; it gave nothing"),
        (Turn(whole(NAMES), epochs=1), "must return a list of turns; it gave a single one"),
        ([Turn], r"gave the class Turn; give an object of it, Turn\(...\)"),
        ([whole(NAMES)], "each must be one of Turn, GradientPass, DataPass, StateUpdate"),
    ],
)
def test_what_is_no_list_of_turns_is_refused_in_a_line(given: object, why: str) -> None:
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Own(Algorithm):
        def turns(self, local: ClientState, rnd: Round) -> list[LocalWork]:
            return given  # type: ignore[return-value]

    with pytest.raises(UserError, match=why):
        worlds.simulation(Own()).step()


def seeing_several(seen: list[Batch]):
    """The usual loss of all minibatches of a step, which notes them."""

    def loss(task: Task, local: ClientState, batch: Batch) -> Tensor:
        if task.model is MODEL:
            seen.append(batch)
        return torch.stack([task.loss(local.params, b) for b in (batch, *batch.others)]).sum(0)

    return loss


@pytest.mark.parametrize("length", [{"epochs": 2}, {"epochs": 0.5}, {"steps": 7}])
def test_further_minibatches_of_a_step_have_orders_and_noise_of_their_own(length: dict[str, float]) -> None:
    """Each epoch of each order has every example once, and minibatches of a step are equally large."""
    seen: list[Batch] = []
    go([Turn(whole(NAMES), loss=seeing_several(seen), minibatches=3, **length)], batch_size=5)  # type: ignore[arg-type]
    assert {len(batch.others) for batch in seen} == {2}
    for batch in seen:
        for other in batch.others:
            assert torch.equal(other.count, batch.count)
            assert (other.valid is None) == (batch.valid is None)
            assert not set(other.keys.tolist()) & set(batch.keys.tolist())
        a, b = batch.others
        assert (
            not torch.equal(a.x, b.x)
            and not torch.equal(a.x, batch.x)
            and not set(a.keys.tolist()) & set(b.keys.tolist())
        )
    if length == {"epochs": 2}:
        every = DATA.x[DATA.rows[0, :28]].sort(0).values
        for place in range(3):
            steps = [(batch, *batch.others)[place] for batch in seen]
            for epoch in (steps[:6], steps[6:]):  # 28 examples in minibatches of 5
                own = torch.cat([b.x[0, : int(b.count[0])] for b in epoch])
                assert torch.equal(own.sort(0).values, every)


def test_the_first_minibatches_are_those_of_a_turn_without_others() -> None:
    seen: list[Batch] = []
    alone: list[tuple[Tensor, Tensor]] = []
    go([Turn(whole(NAMES), loss=seeing_several(seen), minibatches=2, epochs=2), Turn(whole(NAMES), epochs=1)])
    go([Turn(whole(NAMES), loss=seeing(alone), epochs=2)])
    assert all(torch.equal(b.x, x) and torch.equal(b.keys, k) for b, (x, k) in zip(seen, alone, strict=True))


def test_a_clients_further_minibatches_do_not_depend_on_its_stack() -> None:
    turns: list[LocalWork] = [
        Turn(whole(NAMES), loss=seeing_several([]), minibatches=2, epochs=2),
        Turn(whole(NAMES), loss=seeing_several([]), minibatches=2, steps=3),
    ]
    together = go(turns)
    for place, client in enumerate(IDS):
        alone = go(turns, ids=client[None])
        for n in NAMES:
            torch.testing.assert_close(alone.params[n][0], together.params[n][place], rtol=1e-12, atol=1e-12)


def test_a_second_turn_on_the_same_minibatches_sees_the_further_ones_too() -> None:
    first: list[Batch] = []
    second: list[Batch] = []
    then = Turn(whole(["head.bias"]), loss=seeing_several(second))
    go([Turn(whole(["head.weight"]), loss=seeing_several(first), minibatches=2, steps=3, then=then)])
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a.others[0].x, b.others[0].x)
        assert not set(a.others[0].keys.tolist()) & set(b.others[0].keys.tolist())


@pytest.mark.parametrize("count", [0, True, 1.5])
def test_a_step_sees_a_whole_number_of_minibatches(count: object) -> None:
    with pytest.raises(UserError, match=r"minibatches=.*: must be a whole number, at least 1"):
        Turn(whole(NAMES), minibatches=count)  # type: ignore[arg-type]
