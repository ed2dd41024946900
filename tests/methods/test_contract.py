"""What every registered algorithm owes the engine, through one list of checks."""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from personafl import ALGORITHMS, APFL, DMPFL, Algorithm, Evaluation, FedSelect, Simulation, config
from personafl.core import tree, wire
from personafl.core.local_work import ClientState, GradientPass, Turn
from personafl.core.types import Download, Examples, Masked, Params, Payload, Round, Task
from personafl.engine.local import Outcome, client_round
from personafl.simulation import stack_pool
from tests import worlds

# Six clients share four channels of the CNN.
pytestmark = pytest.mark.filterwarnings("ignore:.*units for")

KINDS = ("mlp", "cnn")
# Settings that make a method's own machinery work within a few rounds.
BUSY: dict[str, dict[str, object]] = {
    "dm-pfl": {"readjust_share": 0.3, "readjust_interval": 1},
    "dm-pfl-plus": {"readjust_share": 0.3, "readjust_interval": 1, "personal_share": "sampled"},
    "fedrep": {"final_head_epochs": 1.0},
    "feddst": {"readjust_share": 0.3, "readjust_interval": 2, "readjust_until": 1.0},
    "fedselect": {"select_interval": 1},
    "fedpews": {"warmup_share": 0.4},
    "fedpews-fixed": {"warmup_share": 0.4},
}


@pytest.fixture(scope="module", params=sorted(ALGORITHMS))
def algorithm(request: pytest.FixtureRequest) -> Algorithm:
    return ALGORITHMS[request.param](**BUSY.get(request.param, {}))


def simulation(algorithm: Algorithm, kind: str = "mlp", **options: object) -> Simulation:
    """As many rounds as it takes for all of a method to happen."""
    options.setdefault("num_rounds", 8 if isinstance(algorithm, DMPFL) else 4)
    return worlds.simulation(algorithm, kind, **options)


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def everyone(sim: Simulation) -> dict[str, Tensor]:
    return sim.store.gather(sim.everybody)


def assert_agree(a: dict[str, Tensor], b: dict[str, Tensor], tolerance: float) -> None:
    assert a.keys() == b.keys()
    for n in a:
        if a[n].is_floating_point():
            torch.testing.assert_close(a[n], b[n], rtol=tolerance, atol=tolerance, msg=lambda m, n=n: f"{n}: {m}")
        else:
            assert torch.equal(a[n], b[n]), n


@dataclass(frozen=True)
class Visit:
    """What the clients of one stage had, received and made of it."""

    data: Examples
    kept: Params
    down: Download
    rnd: Round
    done: Outcome


@dataclass(frozen=True)
class Story:
    """A run whose cohorts were one stack each, and the visits of which it consisted."""

    sim: Simulation
    visits: list[Visit]


def told(algorithm: Algorithm, kind: str = "mlp", **options: object) -> Story:
    story = Story(simulation(algorithm, kind, chunk=100, **options), [])

    def noted(
        algorithm: Algorithm, task: Task, data: Examples, kept: Params, down: Download, rnd: Round, **options: object
    ) -> Outcome:
        before = copy.deepcopy((kept, down))
        done = client_round(algorithm, task, data, kept, down, rnd, **options)  # type: ignore[arg-type]
        story.visits.append(Visit(data, *before, rnd, done))
        return done

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stack_pool, "client_round", noted)
        story.sim.run()
    assert len(story.visits) == sum(len(story.sim.cohort(stage)) > 0 for stage in story.sim.schedule)
    return story


@pytest.fixture(scope="module")
def story(algorithm: Algorithm, kind: str) -> Story:
    """Told once for all tests that look at it; they leave it as it is."""
    return told(algorithm, kind)


def test_a_stack_equals_each_client_alone(story: Story, algorithm: Algorithm, kind: str) -> None:
    together = story.sim
    alone = simulation(algorithm, kind, chunk=1)
    pairs = simulation(algorithm, kind, chunk=2)
    for sim in (alone, pairs):
        sim.run()
    assert together.totals == alone.totals == pairs.totals
    for other in (alone, pairs):
        assert_agree(together.server, other.server, 1e-10)
        assert_agree(everyone(together), everyone(other), 1e-10)
    assert_agree(
        together.deployed_models(together.model, together.everybody),
        alone.deployed_models(alone.model, alone.everybody),
        1e-10,
    )


def test_clients_do_not_see_each_other(story: Story) -> None:
    first, sim = story.visits[0], story.sim
    x = first.data.x.clone()
    x[first.data.rows[0, : int(first.data.count[0])]] += 1.0  # the first client's examples and nobody else's
    data = dataclasses.replace(first.data, x=x)
    before, after = first.done, client_round(sim.algorithm, sim.task, data, first.kept, first.down, first.rnd)
    assert_agree(tree.take(before.kept, slice(1, None)), tree.take(after.kept, slice(1, None)), 1e-12)
    sent, resent = tree.values(before.upload), tree.values(after.upload)
    assert_agree(tree.take(sent, slice(1, None)), tree.take(resent, slice(1, None)), 1e-12)
    assert any(not torch.equal(before.local.params[n][0], after.local.params[n][0]) for n in before.local.params)


def started(story: Story, visit: Visit) -> ClientState:
    """What a visit's clients began with."""
    return story.sim.algorithm.start(visit.kept, tree.received(visit.down, len(visit.data.ids)), visit.rnd)


def chain(turn: Turn) -> list[Turn]:
    """A turn and those on the same minibatches."""
    return [turn] if turn.then is None else [turn, *chain(turn.then)]


def test_only_what_a_turn_moves_moves(story: Story, algorithm: Algorithm, kind: str) -> None:
    if isinstance(algorithm, APFL):  # its probe, in every round, moves the share of the private model
        story = told(dataclasses.replace(algorithm, learn_alpha=False), kind)
    moved = 0
    for visit in story.visits:
        start = started(story, visit)
        plays = story.sim.algorithm.turns(start, visit.rnd)
        if any(isinstance(t, GradientPass) for t in plays):
            continue  # a probe may change masks in between
        turns = [part for t in plays if isinstance(t, Turn) for part in chain(t)]
        done = visit.done.local
        for n, before in start.params.items():
            may = torch.zeros_like(before, dtype=torch.bool)
            for turn in turns:
                moves = turn.moves(start) if callable(turn.moves) else turn.moves
                if n in moves:
                    mask = moves[n]
                    may |= torch.ones_like(may) if mask is None else mask
            assert torch.equal(before[~may], done.params[n][~may]), n
            moved += int((before[may] != done.params[n][may]).sum())
    assert moved > 0


def test_what_is_kept_survives_the_store(story: Story, algorithm: Algorithm, kind: str) -> None:
    store = simulation(algorithm, kind).store
    for visit in story.visits:
        fresh = story.sim.algorithm.init_clients(story.sim.model.initial, visit.data.ids)
        assert {n: (t.shape, t.dtype) for n, t in visit.kept.items()} == {
            n: (t.shape, t.dtype) for n, t in fresh.items()
        }
        store.scatter(visit.data.ids, visit.done.kept)
        assert_agree(store.gather(visit.data.ids), visit.done.kept, 0)


def test_aggregation_keeps_the_servers_names_and_shapes(story: Story, algorithm: Algorithm, kind: str) -> None:
    before = simulation(algorithm, kind).server
    assert {n: (t.shape, t.dtype) for n, t in story.sim.server.items()} == {
        n: (t.shape, t.dtype) for n, t in before.items()
    }


def row(payload: Payload, c: int) -> Payload:
    return {n: Masked(t.values[c], t.mask[c], t.known) if isinstance(t, Masked) else t[c] for n, t in payload.items()}


def test_counted_bytes_are_packed_bytes(story: Story) -> None:
    up = down = 0
    for visit in story.visits:
        sent, clients = visit.down, range(len(visit.data.ids))
        if visit.rnd.stage.down:
            down += sum(len(wire.pack(sent.shared | row(sent.own, c))) for c in clients)
        if visit.rnd.stage.up:
            up += sum(len(wire.pack(row(visit.done.upload, c))) for c in clients)
    assert (story.sim.totals.up_bytes, story.sim.totals.down_bytes) == (up, down)


def test_nothing_hidden_crosses_the_network(story: Story, algorithm: Algorithm, kind: str) -> None:
    packed = simulation(algorithm, kind, chunk=100, through_wire=True)
    packed.run()
    assert_agree(story.sim.server, packed.server, 0)
    assert_agree(everyone(story.sim), everyone(packed), 0)


@pytest.mark.parametrize("kind", ["mlp"], indirect=True)
def test_the_same_seed_gives_the_same_result(story: Story, algorithm: Algorithm) -> None:
    first, again, other = story.sim, *(simulation(algorithm, chunk=100, seed=s) for s in (0, 1))
    for sim in (again, other):
        sim.run()
    assert first.training.seed == 0
    assert_agree(first.server, again.server, 0)
    assert_agree(everyone(first), everyone(again), 0)
    a, b = (s.deployed_models(s.model, s.everybody) for s in (first, other))
    assert any(not torch.equal(a[n], b[n]) for n in a)


@pytest.mark.parametrize("rounds", [1, 2, 3, 5])
def test_few_rounds_work(algorithm: Algorithm, rounds: int) -> None:
    if "iterations" in {f.name for f in algorithm.settings()}:
        algorithm = dataclasses.replace(algorithm, iterations=1)  # type: ignore[call-arg]
    sim = simulation(algorithm, num_rounds=rounds)
    sim.run()
    assert len(sim.rows) >= rounds
    assert 0 <= sim.rows[-1]["personal"]["mean"] <= 1


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_recipe_to_object_and_back(name: str) -> None:
    made = config.method({"name": name, "label": "mine", **BUSY.get(name, {})})
    assert config.method({"name": name, "label": "mine", **config.settings(made.algorithm)}) == made
    assert made.label == "mine"


def test_local_steps_instead_of_epochs(algorithm: Algorithm) -> None:
    """Steps fall into different epochs for clients of different size; a stack must not feel that."""
    together, alone = (simulation(algorithm, local_steps=7, join_ratio=1.0, chunk=c) for c in (100, 1))
    together.run()
    alone.run()
    assert_agree(together.server, alone.server, 1e-10)
    assert_agree(everyone(together), everyone(alone), 1e-10)
    story = told(algorithm, local_steps=3)
    for visit in story.visits:
        assert visit.done.local.steps is not None
        turns = [t for t in story.sim.algorithm.turns(started(story, visit), visit.rnd) if isinstance(t, Turn)]
        if visit.rnd.stage.who == "sampled" and len(turns) == 1:
            assert visit.done.local.steps.tolist() == [3] * len(visit.data.ids)


@pytest.mark.parametrize(
    ("optimizer", "momentum"),
    [pytest.param("sgd", 0.9, marks=pytest.mark.slow), ("adam", 0.0)],  # the references are played with momentum
)
def test_momentum_and_adam_stack_too(algorithm: Algorithm, optimizer: str, momentum: float) -> None:
    options = {"optimizer": optimizer, "momentum": momentum, "weight_decay": 0.01, "grad_clip": 1.0, "lr": 0.02}
    options["local_epochs"] = 1  # between one and six steps
    together, alone = (simulation(algorithm, chunk=c, **options) for c in (100, 1))
    for sim in (together, alone):
        sim.run()
    assert_agree(together.server, alone.server, 1e-9)
    assert_agree(everyone(together), everyone(alone), 1e-9)


@pytest.mark.parametrize(
    ("when", "clients"),
    [
        ("after_aggregation", "all"),
        ("after_aggregation", "selected"),
        ("after_aggregation", 2),
        ("after_local", "selected"),
    ],
)
def test_rows_table_and_shift_tell_of_the_same_models(algorithm: Algorithm, when: str, clients: str | int) -> None:
    judge = Evaluation(eval_every=3, when=when, clients=clients, draws=2, degrees=(0.0, 1.0))  # type: ignore[arg-type]
    sim = simulation(algorithm, evaluation=judge)
    sim.run()
    table, shift = sim.clients_table()
    assert shift is not None
    last = sim.rows[-1]["personal"]["mean"]
    assert shift["degrees"]["0.0"]["mean"] == pytest.approx(last)
    assert sum(r["accuracy"] for r in table) / len(table) == pytest.approx(last)
    assert len(table) == len(sim.evaluated_clients(sim.now.stage))


def test_a_method_says_which_model_was_judged(algorithm: Algorithm) -> None:
    own = dataclasses.replace(algorithm, inference="own")
    assert own.evaluated("after_aggregation") == algorithm.evaluates or own.inherit is not None
    assert "right after local training" in algorithm.evaluated("after_local")
    if not isinstance(algorithm, FedSelect):  # its clients never have the whole global model
        assert "per sample" in dataclasses.replace(algorithm, inference="per-sample").evaluated("after_aggregation")
