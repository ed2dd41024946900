import dataclasses
import subprocess
import sys

import numpy as np
import pytest
import torch

from personafl import FedAvg, Machine, Simulation, config, experiment
from personafl.core.errors import UserError
from personafl.data import batches, federated
from personafl.data.client_corruption import corrupt_federation
from personafl.data.dataset import Source
from personafl.data.federated import Federation
from personafl.data.ragged import Ragged
from personafl.data.shift import draw
from tests import worlds

PARTS = [np.arange(0, 40), np.arange(40, 52), np.arange(52, 60)]  # 40, 12 and 8 samples


def source(n=60, classes=4):
    return Source("toy", torch.arange(float(n)).unsqueeze(1), torch.arange(n) % classes, classes)


def held(federation, split):
    ragged = federation.splits[split]
    return [ragged.values[a:b].tolist() for a, b in zip(ragged.offsets[:-1], ragged.offsets[1:], strict=True)]


def test_a_quarter_is_for_testing():
    built = Federation.build(source(), PARTS, seed=0)
    assert built.sizes("test").tolist() == [10, 3, 2]
    assert built.sizes("train").tolist() == [30, 9, 6]
    assert built.sizes("validation").tolist() == [0, 0, 0]


def test_splits_are_disjoint_and_together_what_the_client_holds():
    built = Federation.build(source(), PARTS, seed=0, validation_share=0.25)
    assert built.sizes("validation").tolist() == [10, 3, 2]
    assert built.sizes("train").tolist() == [20, 6, 4]
    for c, part in enumerate(PARTS):
        together = [row for split in built.splits for row in held(built, split)[c]]
        assert sorted(together) == part.tolist()


def test_splits_are_random():
    built = Federation.build(source(), PARTS, seed=0)
    assert held(built, "test")[0] != list(range(10))
    assert sorted(held(built, "test")[0]) != list(range(10))


def test_a_client_is_split_the_same_whoever_comes_after_it():
    all_of_them, first = Federation.build(source(), PARTS, seed=0), Federation.build(source(), PARTS[:1], seed=0)
    assert held(first, "test")[0] == held(all_of_them, "test")[0]


def test_a_small_client_still_gets_a_test_sample():
    built = Federation.build(source(), [np.array([0, 1])], seed=0)
    assert built.sizes("test").tolist() == [1]  # round(0.5) would be 0
    assert built.sizes("train").tolist() == [1]


def test_a_client_too_small_to_split_is_refused():
    with pytest.raises(ValueError, match="client 1 has 1 sample, too few for a training and a test part"):
        Federation.build(source(), [PARTS[0], np.array([41])], seed=0)
    with pytest.raises(ValueError, match=r"client 0 has 2 samples, too few .* a validation and a test part"):
        Federation.build(source(), [np.array([0, 1])], seed=0, validation_share=0.1)


def test_no_test_share_leaves_everything_for_training():
    built = Federation.build(source(), PARTS, seed=0, test_share=0.0)
    assert built.sizes("train").tolist() == [40, 12, 8]
    assert built.sizes("test").tolist() == [0, 0, 0]


def test_the_digest_tells_splits_apart():
    digest = Federation.build(source(), PARTS, seed=0).digest()
    assert digest == Federation.build(source(), PARTS, seed=0).digest()
    others = {
        Federation.build(source(), PARTS, seed=1).digest(),
        Federation.build(source(), PARTS[::-1], seed=0).digest(),
        Federation.build(source(), PARTS, seed=0, test_share=0.5).digest(),
        Federation.build(source(), PARTS, seed=0, validation_share=0.1).digest(),
    }
    assert len(others | {digest}) == 5


def test_class_counts_are_over_all_splits():
    built = Federation.build(source(), PARTS, seed=0, validation_share=0.1)
    assert built.class_counts().tolist() == [[10] * 4, [3] * 4, [2] * 4]  # labels go round 0, 1, 2, 3


def test_examples_are_rows_padded_with_zero():
    built = Federation.build(source(), PARTS, seed=0)
    data = built.examples("test", torch.tensor([0, 2]))
    assert data.rows.shape == (2, 10)
    assert data.count.tolist() == [10, 2]
    assert data.rows[0].tolist() == held(built, "test")[0]
    assert data.rows[1].tolist() == held(built, "test")[2] + [0] * 8
    assert data.x is built.source.x
    assert data.ids.tolist() == [0, 2]


def test_examples_come_in_the_order_asked_for():
    built = Federation.build(source(), PARTS, seed=0)
    data = built.examples("train", torch.tensor([2, 0]))
    assert data.rows[0, :6].tolist() == held(built, "train")[2]
    assert data.rows[1].tolist() == held(built, "train")[0]


def test_a_split_nobody_asked_for_has_no_examples():
    data = Federation.build(source(), PARTS, seed=0).examples("validation", torch.tensor([0, 1]))
    assert data.rows.shape == (2, 0)
    assert data.count.tolist() == [0, 0]


def test_moving_casts_floating_examples_and_leaves_bytes():
    built = Federation.build(source(), PARTS, seed=0).to(torch.device("cpu"), torch.float64)
    assert built.source.x.dtype == torch.float64
    assert built.source.y.dtype == torch.int64
    images = Source("toy", torch.zeros(60, 2, dtype=torch.uint8), torch.zeros(60, dtype=torch.int64), 1)
    moved = Federation.build(images, PARTS, seed=0).to(torch.device("cpu"), torch.float64)
    assert moved.source.x.dtype == torch.uint8
    assert moved.digest() == Federation.build(images, PARTS, seed=0).digest()


# One's own data


@pytest.mark.parametrize("validation_share", [0.0, 0.2])
def test_examples_of_one_group_are_never_split_apart(validation_share: float) -> None:
    groups = np.repeat(np.arange(20), 5)  # ten groups of five rows for each of two clients
    y = torch.arange(100) % 2
    source = Source("windows", torch.rand(100, 3), y, 2, groups=groups)
    parts = [np.arange(50), np.arange(50, 100)]
    fed = Federation.build(source, parts, 0, test_share=0.25, validation_share=validation_share)
    held = {split: set(groups[ragged.values.numpy()].tolist()) for split, ragged in fed.splits.items()}
    assert held["train"] | held["validation"] | held["test"] == set(range(20))
    assert len(held["train"]) + len(held["validation"]) + len(held["test"]) == 20
    # 12 or 13 of 50 rows asked for: the nearest end of a group is at 10 or 15
    assert all(n in (10, 15) for n in fed.sizes("test").tolist())
    assert all(n in ((5, 10, 15) if validation_share else (0,)) for n in fed.sizes("validation").tolist())


def test_a_client_of_one_group_cannot_be_split() -> None:
    source = Source("windows", torch.rand(8, 3), torch.arange(8) % 2, 2, groups=np.zeros(8, np.int64))
    with pytest.raises(ValueError, match="client 0: its 8 samples form 1 groups"):
        Federation.build(source, [np.arange(8)], 0)


# A test part the data came with


def with_test(n=400, tests=100, classes=4, **more):
    """Rows 0.. for training, the last for testing."""
    x = torch.rand(n, 5, generator=torch.Generator().manual_seed(0))
    return Source("parted", x, torch.arange(n) % classes, classes, test=np.arange(n) >= n - tests, **more)


def recipe(*changes):
    entries = [{"name": "fedavg"}]
    data = {"partition": "shards", "num_clients": 8, "classes_per_client": 2}
    return config.load({"data": data, "algorithms": entries}, ["evaluation.shift=none", *changes])


def test_a_pooled_test_part_changes_nothing():
    data = with_test()
    plain = Source(data.name, data.x, data.y, data.classes)
    assert experiment.federation(recipe(), data).digest() == experiment.federation(recipe(), plain).digest()


def test_a_dealt_test_part_is_the_clients_test_split():
    chosen = recipe("data.official_test=dealt", "data.samples_per_class=20", "data.test_samples_per_class=10")
    built = experiment.federation(chosen, with_test())
    # 8 clients x 2 of 4 classes: every class has four holders, of 75 training and 25 test rows each: 18 or 19, 6 or 7
    assert set(built.sizes("train").tolist()) <= {36, 37, 38}
    assert set(built.sizes("test").tolist()) <= {12, 13, 14}
    for train, test in zip(held(built, "train"), held(built, "test"), strict=True):
        assert max(train) < 300 <= min(test)
        assert {r % 4 for r in train} == {r % 4 for r in test}


def test_validation_is_split_off_the_training_rows():
    chosen = recipe("data.official_test=dealt", "data.validation_share=0.25", "data.partition=iid")
    built = experiment.federation(chosen, with_test())
    assert sum(built.sizes("test").tolist()) == 100
    assert [v + t for v, t in zip(built.sizes("validation"), built.sizes("train"), strict=True)] == [38] * 4 + [37] * 4
    assert set(built.sizes("validation").tolist()) == {9, 10}  # a quarter of 37 or 38
    assert max(r for rows in held(built, "validation") for r in rows) < 300


def test_held_out_clients_keep_their_test_rows():
    chosen = recipe("data.official_test=dealt", "data.unseen_ratio=0.25")
    built = experiment.federation(chosen, with_test())
    assert (built.num_clients, built.unseen) == (6, 2)
    for train, test in zip(held(built, "train"), held(built, "test"), strict=True):
        assert {r % 4 for r in train} == {r % 4 for r in test}


def test_an_official_test_part_of_nobody_scores_the_servers_model():
    data, chosen = with_test(), recipe("data.official_test=global", "evaluation.eval_every=1")
    built = experiment.federation(chosen, data)
    assert built.official.tolist() == list(range(300, 400))
    assert sorted(r for s in built.splits for rows in held(built, s) for r in rows) == list(range(300))
    sim = experiment.simulation(chosen, chosen.algorithms[0], fed=built)
    row = sim.step()
    net = sim.model.client({n: t[0] for n, t in sim.common().items()})
    right = (net(data.x[300:]).argmax(1) == data.y[300:]).double().mean()
    assert row["global"]["mean"] == pytest.approx(float(right))
    assert row["personal"]["mean"] != row["global"]["mean"]


COMMON = ("data.official_test=global", "data.test_share=0")


def test_without_a_test_share_all_clients_are_tested_on_the_common_test_part():
    """Rows 0 to 299 are for training, and no client gives any of them up; 300 to 399 test every client."""
    built = experiment.federation(recipe(*COMMON, "data.unseen_ratio=0.25"), with_test())
    assert sorted(r for rows in held(built, "train") for r in rows) == list(range(300))
    assert (built.num_clients, built.unseen) == (6, 2)
    for client in range(8):
        assert built.rows("test", client).tolist() == list(range(300, 400))
    assert built.sizes("test").tolist() == [100] * 8
    assert built.class_counts().sum() == 300  # the test part is no client's
    assert "300" in repr(built) and "test=100" in repr(built)


def test_validation_rows_are_split_off_where_the_test_set_is_common():
    built = experiment.federation(recipe(*COMMON, "data.partition=iid", "data.validation_share=0.25"), with_test())
    assert [v + t for v, t in zip(built.sizes("validation"), built.sizes("train"), strict=True)] == [38] * 4 + [37] * 4
    assert set(built.sizes("validation").tolist()) == {9, 10}  # a quarter of 37 or 38
    assert built.judged_by("validation").common_test is None


def test_on_a_common_test_set_one_model_for_all_has_one_accuracy():
    chosen = recipe(*COMMON, "evaluation.eval_every=1", "data.unseen_ratio=0.25")
    sim = experiment.simulation(chosen, chosen.algorithms[0], fed=experiment.federation(chosen, with_test()))
    row = sim.step()
    assert row["personal"]["mean"] == pytest.approx(row["global"]["mean"])
    assert row["personal"]["worst"] == pytest.approx(row["global"]["mean"])
    assert sim.newcomers()["mean"] == pytest.approx(row["global"]["mean"])
    scores = sim.evaluations()
    assert np.diff(scores["edges"]).tolist() == [100] * 6


def test_a_common_test_set_is_part_of_the_hash_and_the_same_where_clients_are_drawn_later(monkeypatch):
    tests = np.arange(60, 72)
    options = {"test_share": 0.0, "official": tests}
    eager = Federation.build(source(80), PARTS, 3, **options)
    assert Federation.build(source(80), PARTS, 3, test_share=0.0, official=tests[:-1]).digest() != eager.digest()
    monkeypatch.setattr(federated, "LAZY_FROM", 3)
    later = Federation.build(source(80), PARTS, 3, **options)
    assert isinstance(later.splits["train"], federated.LazySplit)
    ids = torch.tensor([2, 0])
    for split in ("train", "test"):
        a, b = eager.examples(split, ids), later.examples(split, ids)
        assert torch.equal(a.rows, b.rows) and torch.equal(a.count, b.count)
    assert later.materialize().digest() == eager.digest()


def test_a_common_test_set_is_refused_where_clients_need_test_data_of_their_own():
    with pytest.raises(
        UserError, match=r"data\.test_share=0\.0: clients would have no test data\. With data\.official_t"
    ):
        recipe("data.test_share=0")
    built = experiment.federation(recipe(*COMMON), with_test())
    for protocol in ("donor", "pool", "label"):
        with pytest.raises(UserError, match=f"evaluation.shift='{protocol}': all clients are tested on the same data"):
            draw(built, protocol, 0, 1)
    with pytest.raises(UserError, match=r"data\.corruption='per-client': all clients are tested on the same images"):
        corrupt_federation(built, "per-client")
    with pytest.warns(UserWarning, match=r"without effect here: data\.test_share \(the test part is dealt\)"):
        dealt = recipe("data.official_test=dealt", "data.test_share=0")
    assert experiment.federation(dealt, with_test()).common_test is None


@pytest.mark.parametrize("how", ["dealt", "global"])
def test_what_cannot_be_parted_is_refused(how):
    chosen = recipe(f"data.official_test={how}")
    with pytest.raises(ValueError, match=f"data.official_test='{how}': toy does not come with a training and a test"):
        experiment.federation(chosen, source())
    with pytest.raises(ValueError, match="group 2 of parted has samples in both parts"):
        experiment.federation(chosen, with_test(groups=np.arange(400) // 120))
    parted = with_test(groups=np.arange(400) // 20)  # 20 rows of one group each, 15 groups for training
    assert experiment.federation(recipe("data.official_test=dealt", "data.num_clients=4"), parted)


def test_a_rule_that_cannot_deal_a_test_part_is_refused():
    with pytest.raises(UserError, match=r"data\.official_test='dealt': dirichlet cannot deal a test part"):
        recipe("data.official_test=dealt", "data.partition=dirichlet")


def test_settings_of_test_parts_are_written_back_where_used():
    assert "test_share" not in config.dump(recipe("data.official_test=dealt"))
    assert "test_samples_per_class = 3" in config.dump(
        recipe("data.official_test=dealt", "data.test_samples_per_class=3")
    )
    assert "test_samples_per_class" not in config.dump(recipe())


# Very many clients: drawn when asked for


def both_forms(monkeypatch, parts=None, **options):
    parts = PARTS if parts is None else parts
    eager = Federation.build(source(), parts, seed=3, **options)
    monkeypatch.setattr(federated, "LAZY_FROM", len(parts))
    return eager, Federation.build(source(), parts, seed=3, **options)


@pytest.mark.parametrize("validation_share", [0.0, 0.2])
@pytest.mark.parametrize("dealt", [False, True])
def test_splits_drawn_later_are_those_drawn_at_once(monkeypatch, validation_share, dealt):
    tests = [np.array([57, 3]), np.array([8]), np.array([20, 21, 22])] if dealt else None
    eager, later = both_forms(monkeypatch, validation_share=validation_share, tests=tests)
    assert isinstance(later.splits["train"], federated.LazySplit) and isinstance(eager.splits["train"], Ragged)
    ids = torch.tensor([2, 0, 1, 0])
    for split in ("train", "validation", "test"):
        a, b = eager.examples(split, ids), later.examples(split, ids)
        assert torch.equal(a.rows, b.rows) and torch.equal(a.count, b.count)
        assert torch.equal(eager.sizes(split), later.sizes(split))
        assert torch.equal(eager.splits[split].lengths(ids), later.splits[split].lengths(ids))
        assert torch.equal(eager.splits[split].values, later.drawn(split).values)
    assert (eager.class_counts() == later.class_counts()).all()


def test_the_digest_of_later_draws_tells_apart_what_decides_them(monkeypatch):
    monkeypatch.setattr(federated, "LAZY_FROM", 1)
    digest = Federation.build(source(), PARTS, seed=0).digest()
    assert digest == Federation.build(source(), Ragged.of(PARTS), seed=0).digest()
    others = {
        Federation.build(source(), PARTS, seed=1).digest(),
        Federation.build(source(), PARTS[::-1], seed=0).digest(),
        Federation.build(source(), PARTS, seed=0, test_share=0.5).digest(),
        Federation.build(source(), PARTS, seed=0, validation_share=0.1).digest(),
        Federation.build(source(), PARTS, seed=0, tests=[np.array([1])] * 3).digest(),
    }
    assert len(others | {digest}) == 6


def test_many_clients_are_refused_as_few_are(monkeypatch):
    monkeypatch.setattr(federated, "LAZY_FROM", 1)
    with pytest.raises(ValueError, match=r"client 1 has 2 samples, too few .* a validation and a test part"):
        Federation.build(source(), [PARTS[0], np.array([41, 42])], seed=0, validation_share=0.1)
    with pytest.raises(ValueError, match="client 2 has no test samples"):
        Federation.build(source(), PARTS, seed=0, tests=[np.array([1]), np.array([2]), np.array([], int)])


def test_groups_are_split_at_once_however_many_clients(monkeypatch):
    monkeypatch.setattr(federated, "LAZY_FROM", 1)
    grouped = Source("toy", torch.zeros(60, 1), torch.zeros(60, dtype=torch.int64), 1, groups=np.arange(60) // 4)
    assert isinstance(Federation.build(grouped, PARTS, seed=0).splits["train"], Ragged)


def test_a_run_is_the_same_however_splits_are_drawn(monkeypatch):
    """Cohorts, batches, scores and shifted test sets."""
    chosen = recipe("data.partition=dirichlet", "training.num_rounds=2", "evaluation.shift=donor", "data.num_clients=9")
    rows = []
    for limit in (federated.LAZY_FROM, 1):
        monkeypatch.setattr(federated, "LAZY_FROM", limit)
        sim = experiment.simulation(chosen, chosen.algorithms[0], fed=experiment.federation(chosen, with_test()))
        sim.run()
        rows.append([{k: v for k, v in r.items() if k != "seconds"} for r in sim.rows] + [sim.clients_table()])
    assert rows[0] == rows[1]


# A hundred thousand clients

MANY = """
import resource, sys, time
from personafl import config, experiment
clients, dataset, partition = int(sys.argv[1]), sys.argv[2], sys.argv[3]
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
before, begun = peak(), time.perf_counter()
recipe = config.load(
    {
        "data": {"dataset": dataset, "partition": partition, "num_clients": clients},
        "training": {"num_rounds": 2, "join_ratio": 20 / clients},
        "evaluation": {"clients": 50, "eval_every": 1},
        "algorithms": [{"name": "fedavg"}],
    }
)
built = experiment.federation(recipe)
seconds = time.perf_counter() - begun
sim = experiment.simulation(recipe, recipe.algorithms[0], fed=built)
sim.run()
table, shift = sim.clients_table()
hashes = sim.hashes()
assert built.num_clients == clients and len(table) == 50 and all(r["clients"] == 20 for r in sim.rows)
print(peak() - before, seconds, time.perf_counter() - begun - seconds)
"""


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["iid", "dirichlet"])
def test_a_hundred_thousand_clients_fit_into_a_gibibyte(rule):
    done = subprocess.run([sys.executable, "-c", MANY, "100000", "synthetic-1m", rule], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[0]) < 1024  # MiB above what the imports take


# Where examples are, and what becomes of them


def outcome(sim):
    sim.run()
    return sim.server, [{k: v for k, v in r.items() if k != "seconds"} for r in sim.rows], sim.clients_table()


def same(a, b):
    return all(torch.equal(a[0][n], b[0][n]) for n in a[0]) and a[1:] == b[1:]


def test_a_run_is_the_same_with_examples_on_the_host(monkeypatch):
    shown = dataclasses.replace(worlds.QUIET, shift="donor", eval_every=3)
    runs = []
    for where in ("device", "host", "auto"):
        monkeypatch.setattr(batches, "_lies_on", lambda x, device, where=where: where != "host")
        train = worlds.training(num_rounds=3)
        sim = Simulation(
            worlds.federation("cnn"), worlds.model("cnn"), FedAvg(), train, shown, machine=Machine(data_on=where)
        )
        runs.append(outcome(sim))
    assert same(runs[0], runs[1]) and same(runs[0], runs[2])


def test_examples_too_large_for_a_device_stay_on_the_host(monkeypatch):
    gpu = torch.device("cuda")
    for free, large in ((8 * 240 - 1, True), (8 * 240, False)):  # 60 rows of one float32: 240 bytes, 480 as float64
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (free, 2**40))
        assert federated._too_large(source().x, gpu, torch.float64) is large
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (4 * 60 - 1, 2**40))
    assert federated._too_large(source().x.to(torch.uint8), gpu, torch.float64)  # bytes stay bytes: 60
    assert not federated._too_large(source().x, torch.device("cpu"), torch.float64)


def test_augmented_training_is_the_same_in_a_stack_and_alone():
    plain, together, alone = (
        worlds.simulation(FedAvg(), "cnn", num_rounds=2, augment=how, chunk=c)
        for how, c in (("none", 100), ("crop-flip", 100), ("crop-flip", 1))
    )
    for sim in (plain, together, alone):
        sim.run()
    for n, t in together.server.items():
        torch.testing.assert_close(alone.server[n], t, rtol=1e-10, atol=1e-10)
        assert not torch.allclose(plain.server[n], t)
    assert plain.totals == together.totals  # not charged


def test_what_are_no_images_is_not_augmented():
    with pytest.raises(ValueError, match=r"training.augment='crop-flip': toy is no set of images, .* shape \(6,\)"):
        worlds.simulation(FedAvg(), "mlp", augment="crop-flip")


def test_splits_drawn_later_are_cut_once_for_all_of_them(monkeypatch):
    early = Federation.build(source(), PARTS, seed=0, validation_share=0.25)
    monkeypatch.setattr(federated, "LAZY_FROM", 1)
    late, cuts = Federation.build(source(), PARTS, seed=0, validation_share=0.25), []
    real = federated.split_client
    monkeypatch.setattr(federated, "split_client", lambda client, *rest: cuts.append(client) or real(client, *rest))
    assert late.materialize().digest() == early.digest() == early.materialize().digest()
    assert cuts == [0, 1, 2]


def test_at_least_one_client_must_take_part():
    with pytest.raises(ValueError, match="3 of 3 clients held out: at least one must take part"):
        Federation.build(source(), PARTS, seed=0, unseen=3)
