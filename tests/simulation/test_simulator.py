"""The round, chunks and threads, homes of clients' rows, fairness of comparisons, and running statistics."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from personafl import (
    ALGORITHMS,
    DMPFL,
    Algorithm,
    Ditto,
    Evaluation,
    FedAvg,
    FedAvgFT,
    Federation,
    FedRep,
    LocalOnly,
    Simulation,
    Source,
    StackedModel,
    UserError,
)
from personafl.core import tree
from personafl.core.types import Stage
from personafl.data.federated import LAZY_FROM, LazySplit
from personafl.data.ragged import Ragged
from personafl.engine.aggregation import add, total
from personafl.evaluation.rounds import divergence
from personafl.simulation.execution_plan import PASS, ExecutionPlan, choose
from personafl.simulation.stack_pool import StackPool
from personafl.storage.store import HOST, Store
from tests import worlds


def test_every_method_sees_the_same_split_cohorts_initial_weights_and_shift() -> None:
    seen = [
        worlds.simulation(cls(), evaluation=Evaluation(shift="donor", eval_every=100)).hashes()
        for cls in ALGORITHMS.values()
    ]
    assert all(h == seen[0] for h in seen)
    other = worlds.simulation(FedAvg(), seed=1, evaluation=Evaluation(shift="donor", eval_every=100)).hashes()
    assert other["cohorts"] != seen[0]["cohorts"]
    assert other["shift"] != seen[0]["shift"]


def test_a_cohort_is_a_fresh_sample_sorted_by_size() -> None:
    sim = worlds.simulation(FedAvg(), join_ratio=0.5)
    drawn = [sim.cohort(Stage(t)) for t in range(20)]
    assert all(len(set(ids.tolist())) == 3 for ids in drawn)
    assert len({tuple(ids.tolist()) for ids in drawn}) > 5
    for ids in drawn:
        sizes = sim.federation.sizes("train")[ids].tolist()
        assert sizes == sorted(sizes, reverse=True)
    assert len(worlds.simulation(FedAvg(), join_ratio=0.01).cohort(Stage(0))) == 1


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.lstm(x.squeeze(1))[0][:, -1])
        return out


@pytest.mark.parametrize("module", [worlds.module("cnn"), Recurrent()], ids=["cnn", "lstm"])
def test_clients_run_one_per_thread_with_the_same_result(module: nn.Module) -> None:
    model = StackedModel(module, worlds.federation("cnn").source.x[:2])
    assert not model.stacks and not model.random
    one, two = (worlds.simulation(Ditto(), "cnn", join_ratio=1.0, num_rounds=3, model=model) for _ in range(2))
    one.plan, two.plan = ExecutionPlan(1, 1, 1), ExecutionPlan(1, 2, 1)
    one.run()
    two.run()
    assert torch.get_num_threads() == 1
    assert all(torch.equal(one.server[n], two.server[n]) for n in one.server)
    kept = one.store.gather(one.everybody), two.store.gather(two.everybody)
    assert all(torch.equal(kept[0][n], kept[1][n]) for n in kept[0])


@pytest.mark.parametrize(("clients", "numbers"), [(1, 5), (3, 5), (3, 2**15)])
def test_stacks_are_added_up_in_float64(clients: int, numbers: int) -> None:
    first, second = torch.rand(2, clients, numbers, generator=torch.Generator().manual_seed(0))
    given, sums = first.clone(), dict[str, Tensor]()
    for stack in (first, second):
        add(sums, {"a": total(stack)})
    torch.testing.assert_close(sums["a"], torch.cat([first, second]).double().sum(0), rtol=1e-14, atol=0)
    assert torch.equal(first, given)  # a term is not added to in its place


def test_float32_stacks_agree_up_to_rounding() -> None:
    stacked, alone = (worlds.simulation(FedAvg(), "cnn", precision="float32", chunk=c) for c in (100, 1))
    stacked.run()
    alone.run()
    for n in stacked.server:
        assert stacked.server[n].dtype == torch.float32
        torch.testing.assert_close(stacked.server[n], alone.server[n], rtol=1e-3, atol=1e-4)


def test_accuracy_over_clients_is_the_mean_of_each_clients_own() -> None:
    sim = worlds.simulation(LocalOnly(), evaluation=Evaluation(shift="none", eval_every=100))
    sim.run()
    table, shift = sim.clients_table()
    assert shift is None
    found = []
    ready = sim.deployed_models(sim.model, sim.everybody)
    for c in range(6):
        rows = sim.federation.examples("test", torch.tensor([c])).rows[0]
        module = sim.model.client({n: t[c] for n, t in ready.items()})
        with torch.no_grad():
            guess = module(sim.federation.source.x[rows]).argmax(1)
        found.append(float((guess == sim.federation.source.y[rows]).double().mean()))
    assert [r["accuracy"] for r in table] == pytest.approx(found)
    assert sim.rows[-1]["personal"]["mean"] == pytest.approx(sum(found) / 6)
    assert sim.rows[-1]["personal"]["worst"] == pytest.approx(min(found))


def test_evaluating_selected_clients_after_local_training() -> None:
    """Scored is the locally trained model, before the server averages: for FedAvg not what it then sends."""
    late = Evaluation(shift="none", eval_every=1, when="after_local", clients="selected")
    sim = worlds.simulation(FedAvg(), evaluation=late, num_rounds=1, lr=0.5, local_epochs=8)
    ids = sim.cohort(sim.schedule[0])
    alone = worlds.simulation(LocalOnly(), num_rounds=1, lr=0.5, local_epochs=8, evaluation=Evaluation(shift="none"))
    sim.run()
    alone.run()
    by_client = {r["client"]: r["accuracy"] for r in alone.clients_table()[0]}
    assert sim.rows[-1]["personal"]["mean"] == pytest.approx(sum(by_client[int(c)] for c in ids) / len(ids))
    judged, sent = (
        sim.evaluated_models(sim.model, ids),
        sim.deployed_models(sim.model, ids),
    )  # just trained, and what the server has then
    assert not torch.allclose(judged["head.weight"], sent["head.weight"])


def test_a_keyed_sample_of_clients_can_be_scored() -> None:
    few = Evaluation(shift="donor", eval_every=100, clients=2)
    sim, again = (worlds.simulation(FedAvg(), evaluation=few) for _ in range(2))
    assert torch.equal(sim.evaluated_clients(sim.schedule[0]), again.evaluated_clients(again.schedule[-1]))
    sim.run()
    assert len(sim.clients_table()[0]) == 2


def test_full_shift_under_one_donor_is_the_donors_test_set() -> None:
    sim = worlds.simulation(FedAvg(), evaluation=Evaluation(shift="donor", draws=1, degrees=(0.0, 1.0)))
    sim.run()
    table, shift = sim.clients_table()
    assert shift is not None
    assert shift["degrees"]["0.0"]["mean"] == pytest.approx(sim.rows[-1]["personal"]["mean"])
    assert shift["average"] == pytest.approx(sum(shift["degrees"][d]["mean"] for d in ("0.0", "1.0")) / 2)
    client = 4  # its test set is one row, so at full shift it is scored on one row of its donor's
    donor = int(sim.shift.donors_of(torch.tensor([client]))[0, 0])  # type: ignore[union-attr]
    drawn = sim.shift.rows[0]  # type: ignore[union-attr]
    row = drawn.values[drawn.offsets[client] : drawn.offsets[client + 1]]
    assert set(row.tolist()) <= set(sim.federation.examples("test", torch.tensor([donor])).rows[0].tolist())
    with torch.no_grad():
        guess = sim.model({n: t[None] for n, t in sim.server.items()}, sim.federation.source.x[row][None])[0].argmax(1)
    right = float((guess == sim.federation.source.y[row]).double().mean())
    assert table[client]["shift_1"] == pytest.approx(right)


class Normed(nn.Module):
    """A batch norm between two linear layers, and dropout."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.first, self.norm, self.drop, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(p), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.drop(self.norm(self.first(x)).relu()))  # type: ignore[no-any-return]


@functools.cache
def normed(policy: str, p: float = 0.0, freeze: bool = False) -> StackedModel:
    torch.manual_seed(0)
    module = Normed(p)
    if freeze:
        module.first.requires_grad_(False)
    return StackedModel(module, worlds.federation().source.x[:2], policy=policy)  # type: ignore[arg-type]


STATS = {"norm.running_mean", "norm.running_var"}


SPARSE = DMPFL(allocation="erk")  # the first layer is most of the model


@pytest.mark.parametrize("algorithm", [FedAvg(), FedRep(), Ditto(), SPARSE])
def test_running_statistics_follow_the_policy(algorithm: Algorithm) -> None:
    average = worlds.simulation(algorithm, model=normed("average"))
    local = worlds.simulation(algorithm, model=normed("local"))
    drop = worlds.simulation(algorithm, model=normed("drop"))
    for sim in (average, local, drop):
        sim.run()
        assert 0 <= sim.rows[-1]["personal"]["mean"] <= 1
    assert average.server.keys() >= STATS
    assert not torch.equal(average.server["norm.running_mean"], average.model.initial["norm.running_mean"])
    assert not STATS & local.server.keys()
    kept = local.store.gather(local.everybody)
    assert kept.keys() >= STATS
    assert not torch.equal(kept["norm.running_mean"][0], kept["norm.running_mean"][1])
    assert not any("running" in n for n in (*drop.server, *drop.store.gather(drop.everybody)))
    assert local.totals.up_bytes < average.totals.up_bytes


# FedPeWS takes chains of layers only.
ANY_MODEL = sorted(n for n in ALGORITHMS if not n.startswith("fedpews"))


def rounds(name: str) -> int:
    """As many as it takes for all of a method to happen."""
    return {"dm-pfl": 8, "dm-pfl-plus": 8, "fedselect": 5}.get(name, 3)  # two iterations, a personal side


@pytest.mark.parametrize("policy", ["average", *(pytest.param(p, marks=pytest.mark.slow) for p in ("local", "drop"))])
@pytest.mark.parametrize("name", ANY_MODEL)
def test_normed_models_with_dropout_stack(name: str, policy: str) -> None:
    """Padding reaches neither batch statistics nor dropout: ragged stacks equal single clients."""
    algorithm = ALGORITHMS[name](**({"allocation": "erk"} if name in ("dm-pfl", "dm-pfl-plus", "feddst") else {}))
    together, alone = (
        worlds.simulation(algorithm, model=normed(policy, 0.4), chunk=c, num_rounds=rounds(name)) for c in (100, 1)
    )
    together.run()
    alone.run()
    for n in together.server:
        torch.testing.assert_close(together.server[n], alone.server[n], rtol=1e-7, atol=1e-7)
    ready = [s.deployed_models(s.model, s.everybody) for s in (together, alone)]
    for n in ready[0]:
        torch.testing.assert_close(ready[0][n], ready[1][n], rtol=1e-7, atol=1e-7)
    assert together.rows[-1]["personal"] == pytest.approx(alone.rows[-1]["personal"])


@pytest.mark.parametrize("name", ANY_MODEL)
def test_frozen_parameters_are_neither_stacked_nor_sent(name: str) -> None:
    model = normed("average", freeze=True)
    sim = worlds.simulation(ALGORITHMS[name](), model=model, num_rounds=rounds(name))
    before = sim.model.module.first.weight.clone()  # type: ignore[union-attr]
    sim.run()
    frozen = {"first.weight", "first.bias"}
    names = set(sim.server) | set(sim.store.gather(sim.everybody)) | set(sim.deployed_models(sim.model, sim.everybody))
    assert not any(n.endswith(tuple(frozen)) for n in names)
    assert torch.equal(sim.model.module.first.weight, before)  # type: ignore[union-attr]
    client = sim.model.client(
        {n: t[0] for n, t in tree.select(sim.deployed_models(sim.model, sim.everybody), model.info.shapes).items()}
    )
    assert torch.equal(client.first.weight, before)  # type: ignore[union-attr]


def absolute_error(out: Tensor, y: Tensor) -> Tensor:
    return (out[:, 0] - y).abs()


def near(out: Tensor, y: Tensor) -> Tensor:
    return ((out[:, 0] - y).abs() < 0.5).float()


def test_loss_and_metric_can_be_ones_own() -> None:
    sim = worlds.simulation(FedAvg(), criterion=absolute_error, metric=near, lr=0.02, num_rounds=30)
    sim.run()
    assert sim.rows[-1]["loss"] < 0.5 * sim.rows[0]["loss"]
    ready = sim.deployed_models(sim.model, sim.everybody)
    scores = []
    for c in range(6):
        rows = sim.federation.examples("test", torch.tensor([c])).rows[0]
        with torch.no_grad():
            out = sim.model({n: t[c : c + 1] for n, t in ready.items()}, sim.federation.source.x[rows][None])[0]
        scores.append(float(near(out, sim.federation.source.y[rows]).mean()))
    assert sim.rows[-1]["personal"]["mean"] == pytest.approx(sum(scores) / 6)


def test_a_rows_totals_never_fall() -> None:
    sim: Simulation = worlds.simulation(dataclasses.replace(DMPFL(), iterations=1))
    sim.run()
    for key in ("up_bytes", "down_bytes", "gflop"):
        values = [r[key] for r in sim.rows]
        assert values == sorted(values)
    assert {r["phase"] for r in sim.rows} == {"masks", "global", "personal"}


@pytest.mark.parametrize("shift", ["donor", "pool"])
def test_models_that_look_at_batches_are_scored_on_the_mixed_sets_themselves(shift: str) -> None:
    """Without running statistics an answer depends on its neighbours: no degree may borrow another's."""
    judge = Evaluation(shift=shift, draws=2, degrees=(0.0, 0.5, 1.0), eval_every=100)  # type: ignore[arg-type]
    sim = worlds.simulation(FedAvg(), model=normed("drop"), evaluation=judge)
    sim.run()
    assert sim.model.looks_at_batches
    table, found = sim.clients_table()
    assert found is not None
    assert found["degrees"]["0.0"]["mean"] == pytest.approx(sim.rows[-1]["personal"]["mean"])
    client, half = 0, []
    for d in range(2):
        part = slice(int(sim.shift.rows[d].offsets[client]), int(sim.shift.rows[d].offsets[client + 1]))  # type: ignore[union-attr]
        rows = sim.federation.examples("test", torch.tensor([client])).rows[0].clone()
        count = round(0.5 * len(rows))
        places = sim.shift.places[d].values[part][:count]  # type: ignore[union-attr]
        rows[places] = sim.shift.rows[d].values[part][:count]  # type: ignore[union-attr]
        with torch.no_grad():
            guess = sim.model({n: t[None] for n, t in sim.server.items()}, sim.federation.source.x[rows][None])[
                0
            ].argmax(1)
        half.append(float((guess == sim.federation.source.y[rows]).double().mean()))
    assert table[client]["shift_0.5"] == pytest.approx(sum(half) / 2)


def test_a_client_of_one_example_and_a_cohort_of_one() -> None:
    fed = worlds.federation(sizes=(2, 9))
    for algorithm in (FedAvg(), Ditto(), DMPFL(iterations=1)):
        sim = worlds.simulation(algorithm, fed=fed, join_ratio=0.1, num_rounds=5, batch_size=1000)
        sim.run()
        assert 0 <= sim.rows[-1]["personal"]["mean"] <= 1


@pytest.mark.parametrize("head", ["*", None])
def test_a_method_that_needs_a_head_and_a_body_says_so(head: str | None) -> None:
    model = StackedModel(nn.Linear(6, 3), worlds.federation().source.x[:2], head)  # its last layer is all of it
    with pytest.raises(ValueError, match=r"FedRep needs a head and a body; model.head covers all of the parameters"):
        worlds.simulation(FedRep(), model=model)


def test_a_share_of_refinement_below_one_step_is_one_step() -> None:
    """One epoch, join ratio 1/6, two rounds of refinement: a third of an epoch, of one batch."""
    sim = worlds.simulation(
        DMPFL(readjust_share=0.3, readjust_interval=1, iterations=1),
        join_ratio=0.17,
        num_rounds=8,
        local_epochs=1,
        batch_size=64,
    )
    before = 0.0
    while sim.played < len(sim.schedule):
        stage = sim.schedule[sim.played]
        sim.step()
        if stage.phase == "personal" and stage.who == "all":
            assert sim.totals.flops > before
        before = sim.totals.flops


def test_a_loss_that_is_no_number_is_written_as_none() -> None:
    sim = worlds.simulation(FedAvg(), lr=3e38, num_rounds=3)
    sim.run()
    assert sim.rows[-1]["loss"] is None


def validated() -> Federation:
    fed = worlds.federation()
    parts = np.split(np.arange(sum(worlds.SIZES)), np.cumsum(worlds.SIZES)[:-1])
    return Federation.build(fed.source, parts, seed=0, validation_share=0.25)


EVERY = Evaluation(shift="none", eval_every=1)


@pytest.mark.parametrize("algorithm", [FedAvgFT(), FedRep(final_head_epochs=1.0), Ditto()], ids=lambda a: a.called)
def test_a_run_that_stops_early_is_the_run_of_as_many_rounds(algorithm: Algorithm) -> None:
    """To the last bit, closing stages too: they follow at once, with the rate they have there."""
    options: dict[str, object] = {"evaluation": EVERY, "lr": 0.02, "lr_decay": 0.9}
    long = worlds.simulation(algorithm, fed=validated(), num_rounds=6, **options)
    long.run()
    curve = [r["validation"]["mean"] for r in long.rows[:6]]
    target = sorted(curve[:4])[-1]  # reached before the fifth round
    end = curve.index(target) + 1
    early = worlds.simulation(algorithm, fed=validated(), num_rounds=6, target=target, **options)
    short = worlds.simulation(algorithm, fed=validated(), num_rounds=end, **options)
    early.run()
    short.run()
    assert early.rounds == end < 6
    assert [r.get("stopped") for r in early.rows].index("target") == end - 1
    assert early.schedule == short.schedule
    assert all(torch.equal(early.server[n], short.server[n]) for n in short.server)
    a, b = (sim.store.gather(sim.everybody) for sim in (early, short))
    assert all(torch.equal(a[n], b[n]) for n in b)
    assert [r["personal"] for r in early.rows] == [r["personal"] for r in short.rows]
    assert early.hashes()["cohorts"] == long.hashes()["cohorts"]  # comparable with methods that went on


def test_patience_counts_evaluations_and_needs_validation_data() -> None:
    sim = worlds.simulation(FedAvg(), fed=validated(), num_rounds=8, patience=2, lr=1e-9, evaluation=EVERY)
    sim.run()
    assert [r.get("stopped") for r in sim.rows] == [None, None, "patience"]  # nothing moves, so the first is the best
    with pytest.raises(UserError, match=r"training.patience=2: needs validation data, .*data.validation_share"):
        worlds.simulation(FedAvg(), patience=2)
    with pytest.raises(UserError, match=r"training.target=90: must be a share in \(0, 1\]"):
        worlds.simulation(FedAvg(), target=90.0)


def test_a_client_that_diverges_alone_is_the_only_one_counted() -> None:
    """Under Local nothing travels: the one with examples of 1e30 is the one whose loss is no number."""
    fed = worlds.federation()
    fed.source.x[fed.splits["train"][2]] *= 1e30
    sim = worlds.simulation(LocalOnly(), fed=fed, num_rounds=8, precision="float32")
    sim.run()
    assert sim.state.diverged == {2}
    assert 2 not in sim.store.ids  # its model stays what it was at first
    found = divergence(sim.rows, len(sim.state.diverged), 6)
    drawn = [t + 1 for t in range(8) if 2 in sim.cohort(Stage(number=t)).tolist()]
    assert found is not None and (found["clients"], found["of"], found["final"]) == (1, 6, 0)
    assert (found["first_round"], found["last_round"], found["rounds"]) == (drawn[0], drawn[-1], len(drawn))


@pytest.mark.parametrize(("room", "share"), [(0.0, PASS), (2.0**28, 2.0**26), (2.0**40, PASS)])
def test_a_limit_leaves_a_quarter_to_the_activations_of_an_evaluation(room: float, share: float) -> None:
    fed, cpu = worlds.federation(), torch.device("cpu")
    assert choose(worlds.model(), worlds.training(), cpu, fed.sizes("train"), room=room).activations == share


# Homes of clients' rows, and rounds that cost what their cohort costs

KEEPS = ("ditto", "scaffold", "fedpac", "fedselect", "co-pfl", "fedphp", "dm-pfl", "fedavg-ft")


def long_enough(name: str) -> int:
    """As many as it takes for all of a method to happen: two iterations, two selections, or what comes back."""
    return {"dm-pfl": 8, "fedselect": 7}.get(name, 4)


def state(sim: Simulation) -> dict[str, Tensor]:
    """All that a simulation ended up with."""
    kept, known = sim.store.gather(sim.everybody), sim.known.gather(sim.everybody)
    return {
        f"{where}:{n}": t
        for where, part in (("server", sim.server), ("kept", kept), ("known", known))
        for n, t in part.items()
    }


@pytest.mark.parametrize("name", KEEPS)
def test_every_home_gives_the_same_numbers(name: str, tmp_path: Path) -> None:
    found = []
    for home in ("device", "host", tmp_path / "store"):
        sim = worlds.simulation(ALGORITHMS[name](), store=home, num_rounds=long_enough(name))
        sim.run()
        found.append(state(sim))
        assert sim.store.home == (tmp_path / "store" / "clients" if isinstance(home, Path) else HOST)
    assert all(torch.equal(other[n], t) for other in found[1:] for n, t in found[0].items())


@pytest.fixture(scope="module", params=KEEPS)
def whole(request: pytest.FixtureRequest) -> tuple[str, dict[str, Tensor]]:
    """A method, and what it ends up with when all clients are one stack."""
    sim = worlds.simulation(
        ALGORITHMS[request.param](), join_ratio=1.0, chunk=100, num_rounds=long_enough(request.param)
    )
    sim.run()
    return request.param, state(sim)


@pytest.mark.parametrize("chunk", [1, 2, 5])
def test_stacks_smaller_than_the_cohort_give_the_same_numbers(
    whole: tuple[str, dict[str, Tensor]], chunk: int, tmp_path: Path
) -> None:
    """In float64; products of one client alone and of several may differ in the last bit of some thousand."""
    name, expected = whole
    sim = worlds.simulation(
        ALGORITHMS[name](), join_ratio=1.0, chunk=chunk, num_rounds=long_enough(name), store=tmp_path / "store"
    )
    sim.run()
    for (n, a), b in zip(expected.items(), state(sim).values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11, msg=lambda m, n=n: f"{n}: {m}")


def test_a_run_expects_the_clients_its_stages_come_across() -> None:
    """Six clients, three a round, eight rounds; DM-PFL's sampled phases see those drawn, its usual one sees all."""
    assert worlds.simulation(Ditto(), num_rounds=1).touched() == 3
    assert worlds.simulation(Ditto()).touched() == 6
    assert worlds.simulation(Ditto(), join_ratio=0.17, num_rounds=4).touched() == 4  # one a round
    assert worlds.simulation(DMPFL(iterations=1), join_ratio=0.17, num_rounds=4).touched() == 6
    sim = worlds.simulation(DMPFL(iterations=1, personal_share="sampled"), join_ratio=0.17, num_rounds=4)
    assert sim.touched() == 4


@pytest.fixture(scope="module")
def many() -> Federation:
    """More clients than splits are drawn for at once, of four points each."""
    draw = torch.Generator().manual_seed(0)
    y = torch.randint(3, (8 * LAZY_FROM,), generator=draw)
    x = torch.randn(8 * LAZY_FROM, 6, generator=draw) + y.view(-1, 1)
    return Federation.build(Source("many", x, y, 3), Ragged.cut(np.arange(8 * LAZY_FROM), np.full(2 * LAZY_FROM, 4)), 0)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How many rows and splits of clients are asked for."""
    found = {"rows": 0, "most": 0, "splits": 0}
    gather, client = Store.gather, LazySplit.client

    def counted(store: Store, ids: Tensor) -> dict[str, Tensor]:
        found["rows"] += len(ids)
        found["most"] = max(found["most"], len(ids))
        return gather(store, ids)

    def drawn(split: LazySplit, id: int) -> np.ndarray:
        found["splits"] += 1
        return client(split, id)

    monkeypatch.setattr(Store, "gather", counted)
    monkeypatch.setattr(LazySplit, "client", drawn)
    return found


def test_a_round_touches_its_cohort_alone(many: Federation, asked: dict[str, int], tmp_path: Path) -> None:
    """Forty thousand clients, twenty a round: rows and splits of twenty, and of those scored in the end."""
    judge = Evaluation(shift="none", eval_every=1000, clients=30)
    sim = worlds.simulation(
        DMPFL(iterations=1, personal_share="sampled"),
        fed=many,
        join_ratio=20 / many.num_clients,
        num_rounds=4,
        evaluation=judge,
        store=tmp_path / "store",
    )
    for t in range(3):
        before = dict(asked)
        sim.step()
        assert asked["splits"] - before["splits"] == 20
        assert asked["rows"] - before["rows"] == 20 * (3 if sim.schedule[t].up else 2)  # kept; known, sent and received
    assert len(sim.store) <= 4 * 20
    sim.run()
    sim.clients_table()
    assert asked["most"] == 30


def test_a_stage_of_all_clients_goes_through_in_stacks(asked: dict[str, int], tmp_path: Path) -> None:
    sizes = (5,) * 200
    sim = worlds.simulation(
        DMPFL(iterations=1),
        fed=worlds.federation(sizes=sizes),
        join_ratio=0.05,
        chunk=16,
        num_rounds=4,
        store=tmp_path / "s",
    )
    sim.run()
    assert any(s.who == "all" for s in sim.schedule)
    assert len(sim.store) == 200
    assert asked["most"] == 16


def test_nothing_of_a_stack_outlives_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """What many stacks leave behind would keep the memory around it from being used again."""
    alive: weakref.WeakSet[object] = weakref.WeakSet()
    most, play = [], StackPool._play_stack

    def counted(*args: object) -> object:
        most.append(len(alive))
        result, spent = play(*args)  # type: ignore[arg-type]
        alive.add(spent.work)
        return result, spent

    monkeypatch.setattr(StackPool, "_play_stack", counted)
    sim = worlds.simulation(DMPFL(iterations=1), fed=worlds.federation(sizes=(5,) * 40), chunk=2, num_rounds=4)
    sim.run()
    assert len(most) > 40 / 2
    assert max(most) == 1  # the one before


# What is kept from round to round


def test_a_cohort_is_ones_own_to_do_with_as_one_likes() -> None:
    quiet, watched = (worlds.simulation(FedAvg(), join_ratio=1.0, num_rounds=2) for _ in range(2))
    watched.cohort(watched.schedule[0]).fill_(0)
    for sim in (quiet, watched):
        sim.run()
    assert [r["loss"] for r in quiet.rows] == [r["loss"] for r in watched.rows]


def test_kept_training_data_are_of_these_clients_in_this_order() -> None:
    sim = worlds.simulation(FedAvg(), join_ratio=1.0)
    there = torch.tensor([2, 0, 1])
    first = sim._training_data(there)
    assert sim._training_data(there.clone()).rows is first.rows
    first.ids.fill_(1)  # as a method may that was handed them
    again = sim._training_data(torch.tensor([2, 0, 1]))
    assert again.rows is first.rows and again.ids.tolist() == [2, 0, 1]
    again.ids.fill_(1)
    assert sim._training_data(torch.tensor([2, 0, 1])).rows is first.rows
    for other in (there.flip(0), there[:2], torch.tensor([0, 1, 2])):
        found = sim._training_data(other)
        assert torch.equal(found.ids, other)
        assert torch.equal(found.rows, sim.federation.examples("train", other).rows)


def test_kept_training_data_are_of_this_federation() -> None:
    sim = worlds.simulation(FedAvg(), join_ratio=1.0)
    ids = torch.tensor([0, 1])
    sim._training_data(ids)
    splits = {**sim.federation.splits, "train": sim.federation.splits["test"]}
    sim.federation = dataclasses.replace(sim.federation, splits=splits)
    assert torch.equal(sim._training_data(ids).rows, sim.federation.examples("train", ids).rows)


def test_what_a_method_does_to_clients_sizes_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are kept with the training data from round to round."""

    def weigh(self: FedAvg, server: object, known: object, upload: object, examples: Tensor, rnd: object) -> Tensor:
        seen.append(examples.tolist())
        return examples.mul_(2)

    seen: list[list[float]] = []
    monkeypatch.setattr(FedAvg, "weigh", weigh)
    sim = worlds.simulation(FedAvg(), join_ratio=1.0, num_rounds=3)
    sim.run()
    assert seen == [sim.federation.train_sizes(sim.cohort(sim.schedule[0])).double().tolist()] * 3


def test_nothing_is_weighed_where_nothing_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last stage of FedAvg+FT trains and sends nothing."""
    method = ALGORITHMS["fedavg-ft"]
    weighed: list[bool] = []

    class Watched(method):  # type: ignore[misc, valid-type]
        def weigh(self, server, known, upload, examples, rnd):
            weighed.append(rnd.stage.up)
            return super().weigh(server, known, upload, examples, rnd)

    sim = worlds.simulation(Watched(), join_ratio=1.0, num_rounds=2)
    assert not all(stage.up for stage in sim.schedule)
    sim.run()
    assert weighed and all(weighed)
