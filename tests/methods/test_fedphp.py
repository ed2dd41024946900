"""FedPHP: what is inherited, what teaches, what answers, what stays at home."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from personafl import (
    Algorithm,
    Evaluation,
    FedAvg,
    FedPeWSFixed,
    FedPHP,
    FedProx,
    FedRep,
    Inherit,
    Simulation,
    StackedModel,
)
from personafl.core import tree
from personafl.core.types import Round, Stage
from personafl.plugins.inherited import Inherited
from tests import checks, worlds

SHORT = {"num_rounds": 4, "local_epochs": 1}
LATE = Evaluation(shift="none", eval_every=1, when="after_local", clients="selected")


def hpm(sim: Simulation, ids: Tensor) -> dict[str, Tensor]:
    return tree.select(tree.under(sim.store.gather(ids), "inherited"), sim.model.info.shapes)


def test_without_teaching_and_momentum_the_hpm_is_fedavgs_personalised_model() -> None:
    php = worlds.simulation(FedPHP(inherit=Inherit(weight=0.0, momentum="mu-b", rate=0.0)), num_rounds=4)
    fedavg = worlds.simulation(FedAvg(weights="uniform"), num_rounds=4)
    for _ in php.schedule:
        _, ids, trained = checks.rehearsed(fedavg)
        php.step()
        fedavg.step()
        checks.assert_agree(hpm(php, ids), trained.local.params)
        checks.assert_agree(php.server, fedavg.server)


def test_a_first_session_leaves_no_trace_of_the_initial_model() -> None:
    """mu_k = 0.9 * 0 / (Q T): theta_p is what the client sends, whatever it was before."""
    sim = worlds.simulation(FedPHP())
    _, _, done = checks.rehearsed(sim)
    checks.assert_agree(tree.select(tree.under(done.kept, "inherited"), done.upload), dict(done.upload))
    constant = worlds.simulation(FedPHP(inherit=Inherit(momentum="mu-b")))
    _, _, done = checks.rehearsed(constant)
    w, start = done.upload["head.weight"], constant.model.initial["head.weight"]
    torch.testing.assert_close(done.kept["inherited/head.weight"], 0.1 * w + 0.9 * start)  # and a constant one does


@pytest.mark.parametrize(
    ("form", "rate", "expected"),
    [
        ("mu-a", 0.9, [0.0, 0.09, 0.45, 0.9, 0.9]),  # 0.9 z / (0.5 * 20), at most 0.9
        ("mu-a", 0.5, [0.0, 0.05, 0.25, 0.5, 0.6]),
        ("mu-a", 1.0, [0.0, 0.1, 0.5, 0.9, 0.9]),
        ("mu-b", 0.7, [0.7] * 5),
        ("mu-c", 0.9, [0.25] * 5),  # round 5 of 20, for all
    ],
)
def test_the_momentum_by_hand(form: str, rate: float, expected: list[float]) -> None:
    sim = worlds.simulation(FedPHP(inherit=Inherit(momentum=form, rate=rate)), num_rounds=20, join_ratio=0.5)
    sessions = torch.tensor([0, 1, 5, 10, 12], dtype=torch.int32)
    found = sim.algorithm._momentum(sessions, Round(Stage(5), 0.1))  # type: ignore[attr-defined]
    assert found.tolist() == pytest.approx(expected)


def test_the_expected_number_of_sessions_need_not_be_whole() -> None:
    """mu = 0.9, Q = 0.03, T = 50: a client is expected in 1.5 rounds, so mu_k = 0.9 * 1 / 1.5 after one session."""
    sim = worlds.simulation(FedPHP(), num_rounds=50, join_ratio=0.03)
    found = sim.algorithm._momentum(torch.tensor([0, 1, 2]), Round(Stage(5), 0.1))  # type: ignore[attr-defined]
    assert found.tolist() == pytest.approx([0.0, 0.6, 0.9])


def test_a_momentum_that_grows_with_rounds_grows_to_one() -> None:
    """Mu-C: t / T without the bound of Mu-A; a stage behind the last round keeps all."""
    sim = worlds.simulation(FedPHP(inherit=Inherit(momentum="mu-c")), num_rounds=20)
    found = [float(sim.algorithm._momentum(torch.zeros(1), Round(Stage(t), 0.1))) for t in (0, 18, 19, 20, 21)]  # type: ignore[attr-defined]
    assert found == pytest.approx([0.0, 0.9, 0.95, 1.0, 1.0])


def test_the_hpm_mixes_trained_and_inherited_by_the_number_of_sessions() -> None:
    """Everybody in all of 8 rounds: mu = 0, 0.9 / 8, 1.8 / 8."""
    sim = worlds.simulation(FedPHP(), join_ratio=1.0)
    for t in range(3):
        _, ids, done = checks.rehearsed(sim)
        before = hpm(sim, ids)
        sim.step()
        mu = 0.9 * t / 8
        expected = {n: (1 - mu) * done.local.params[n] + mu * before[n] for n in before}
        checks.assert_close(hpm(sim, ids), expected)
    assert checks.everyone(sim)["inherited/aux/sessions"].tolist() == [3] * 6


def term(transfer: str, student: dict[str, Tensor], teacher: dict[str, Tensor], x: Tensor) -> Tensor:
    """L_kt of one client, from the paper."""
    if transfer == "prox":
        return sum(((student[n] - teacher[n]) ** 2).sum() for n in student)  # type: ignore[return-value]
    if transfer == "kd":
        s, p = checks.outputs(student, x) / 3.0, checks.outputs(teacher, x) / 3.0
        return 9.0 * functional.kl_div(s.log_softmax(1), p.softmax(1), reduction="batchmean")
    h_s, h_p = checks.hidden(student, x), checks.hidden(teacher, x)
    if transfer == "l2":
        return ((h_s - h_p) ** 2).sum() / (2 * len(x))
    points = torch.cat([h_s, h_p])
    d = (points.unsqueeze(0) - points.unsqueeze(1)).square().sum(2)
    n = len(points)
    b = d.sum().detach() / (n * n - n)
    k = sum(torch.exp(-d / (b * 2**i / 4)) for i in range(5))
    m = len(x)
    return (k[:m, :m] + k[m:, m:] - k[:m, m:] - k[m:, :m]).mean()  # type: ignore[union-attr,index]


@pytest.mark.parametrize("transfer", ["mmd", "kd", "l2", "prox"])
def test_a_step_is_that_of_the_papers_loss(transfer: str) -> None:
    """One step on the full batch: w - eta grad((1 - lambda) CE + lambda L_kt), the HPM fixed."""
    algorithm = FedPHP(inherit=Inherit(transfer=transfer, weight=0.3, temperature=3.0))
    sim = worlds.simulation(algorithm, batch_size=64, local_epochs=1, join_ratio=1.0)
    sim.step()  # from now on the HPM is not the received model
    _, ids, done = checks.rehearsed(sim)
    for i, c in list(enumerate(ids.tolist()))[:2]:
        x, y = checks.rows_of(sim, c)
        teacher = {n: t[i] for n, t in hpm(sim, ids).items()}
        w = {n: t.clone().requires_grad_() for n, t in sim.server.items()}
        transferred = term(transfer, w, teacher, x)
        assert transferred.item() > 0
        loss = 0.7 * checks.cross_entropy(w, x, y) + 0.3 * transferred
        grads = dict(zip(w, torch.autograd.grad(loss, list(w.values()), materialize_grads=True), strict=True))
        expected = {n: (w[n] - 0.1 * grads[n]).detach() for n in w}
        checks.assert_close(expected, {n: t[i] for n, t in done.local.params.items()}, tolerance=1e-9)


def test_the_teacher_has_no_dropout() -> None:
    """With p = 0.5 an input x becomes 0 or 2x, and either is |x| away from the x that the teacher's head sees.

    So the term 1/(2B) sum ||h_s - h_p||^2 is 1/(2B) sum ||x||^2 whatever is drawn, in a client's only minibatch.
    """
    sim = worlds.simulation(
        FedPHP(inherit=Inherit(transfer="l2", weight=1.0)),
        model=StackedModel(nn.Sequential(nn.Dropout(0.5), nn.Linear(6, 3)), worlds.federation().source.x[:2]),
        batch_size=64,
        local_epochs=1,
        join_ratio=1.0,
    )
    inputs = [checks.rows_of(sim, c)[0] for c in range(6)]
    expected = [float(x.double().square().sum() / (2 * len(x))) for x in inputs]
    assert sim.step()["loss"] == pytest.approx(sum(expected) / 6)


def test_the_hpm_has_running_statistics_mixed_like_weights() -> None:
    """mu = 0.4: 0.6 of those of the model just trained, and 0.4 of those it had."""
    network = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3))
    model = StackedModel(network, worlds.federation(sizes=(37, 21, 14)).source.x[:2])
    sim = worlds.simulation(
        FedPHP(inherit=Inherit(momentum="mu-b", rate=0.4)),
        fed=worlds.federation(sizes=(37, 21, 14)),
        model=model,
        join_ratio=1.0,
        batch_size=7,
    )
    for _ in range(2):
        _, ids, done = checks.rehearsed(sim)
        before = hpm(sim, ids)
        assert not torch.allclose(done.local.params["1.running_mean"], before["1.running_mean"])
        sim.step()
        mixed = {n: 0.6 * done.local.params[n] + 0.4 * t for n, t in before.items()}
        checks.assert_close(hpm(sim, ids), mixed)


def test_inherited_personalised_or_both_models_answer() -> None:
    sims = {
        a: worlds.simulation(FedPHP(inherit=Inherit(answers=a)), **SHORT) for a in ("inherited", "personalised", "both")
    }
    for _ in range(3):
        for sim in sims.values():
            *_, ids, done = checks.rehearsed(sim)
            sim.step()
    servers = [sim.server for sim in sims.values()]
    checks.assert_agree(servers[0], servers[1])  # they differ in the answer only
    checks.assert_agree(servers[0], servers[2])
    x = sim.federation.source.x[:5].expand(len(ids), 5, -1)
    answers = {}
    for name, sim in sims.items():
        ready = sim.deployed_models(sim.model, ids)
        answers[name] = sim.algorithm.predict(sim.model, ready, x)
    inherited = sim.model(hpm(sim, ids), x)
    torch.testing.assert_close(answers["inherited"], inherited)
    torch.testing.assert_close(answers["personalised"], sim.model(done.local.params, x))
    assert not torch.allclose(answers["personalised"], answers["inherited"])
    mean = (answers["inherited"].softmax(-1) + answers["personalised"].softmax(-1)) / 2
    torch.testing.assert_close(answers["both"].softmax(-1), mean)


def test_until_its_first_session_a_client_personalises_by_the_global_model() -> None:
    sim = worlds.simulation(FedPHP(inherit=Inherit(answers="personalised")), num_rounds=1)
    absent = [c for c in range(6) if c not in sim.cohort(sim.schedule[0]).tolist()]
    sim.run()
    ready = sim.deployed_models(sim.model, torch.tensor(absent))
    checks.assert_agree(ready, {n: t.expand(3, *t.shape) for n, t in sim.server.items()})


@pytest.mark.parametrize("answers", ["inherited", "both"])
def test_the_hpm_never_travels(answers: str) -> None:
    php = checks.played(FedPHP(inherit=Inherit(answers=answers)), **SHORT)
    fedavg = checks.played(FedAvg(weights="uniform"), **SHORT)
    assert (php.totals.up_bytes, php.totals.down_bytes) == (fedavg.totals.up_bytes, fedavg.totals.down_bytes)
    again = worlds.simulation(FedPHP(inherit=Inherit(answers=answers)))
    rnd, ids, done = checks.rehearsed(again)
    names = set(again.model.info.shapes)
    assert set(done.upload) == set(again.download(ids, rnd).shared) == set(again.server) == names
    assert not again.download(ids, rnd).own


def test_the_hpm_costs_a_forward_pass_and_the_weights_nothing() -> None:
    base = checks.played(FedAvg(), **SHORT).totals.flops  # three forward passes an example
    assert checks.played(FedPHP(), **SHORT).totals.flops == pytest.approx(base * 4 / 3)
    assert checks.played(FedPHP(inherit=Inherit(transfer="prox")), **SHORT).totals.flops == pytest.approx(base)


def test_beside_a_pull_the_student_is_trained_once() -> None:
    """FedProx's three forward passes, which give the features, too, and one of the HPM."""
    base = checks.played(FedProx(), **SHORT).totals.flops
    taught = checks.played(FedProx(inherit=Inherit()), **SHORT).totals.flops
    assert taught == pytest.approx(base * 4 / 3)


def accuracy(params: dict[str, Tensor], x: Tensor, y: Tensor) -> float:
    return float((checks.outputs(params, x).argmax(1) == y).double().mean())


@pytest.mark.parametrize(
    "algorithm",
    [FedAvg(), *(FedPHP(inherit=Inherit(answers=a, weight=0.3)) for a in ("inherited", "personalised", "both"))],
    ids=["fedavg", "inherited", "personalised", "both"],
)
def test_delta_compares_the_downloaded_model_with_the_one_last_trained(algorithm: Algorithm) -> None:
    """delta = Acc(newly downloaded) - Acc(last personalised), over the clients that come back (Eq. 4).

    FedPHP's clients download theta_s and train theta_s^k, whichever model answers for them.
    """
    sim = worlds.simulation(algorithm, evaluation=LATE, lr=0.3, local_epochs=4)
    left: dict[int, float] = {}
    told = []
    for _ in sim.schedule:
        _, ids, done = checks.rehearsed(sim)
        came = {c: accuracy(sim.server, *checks.rows_of(sim, c, "test")) for c in ids.tolist()}
        found = sim.step()
        assert found["before"]["mean"] == pytest.approx(sum(came.values()) / 3)
        gained = [came[c] - left[c] for c in came if c in left]
        assert found["delta"] == (pytest.approx(sum(gained) / len(gained)) if gained else None)
        told.append(found["delta"])
        for i, c in enumerate(ids.tolist()):
            own = {n: t[i] for n, t in done.local.params.items()}
            left[c] = accuracy(own, *checks.rows_of(sim, c, "test"))
    assert told[0] is None
    assert any(told[1:])


def test_around_a_method_with_a_private_head_the_downloaded_model_has_that_head() -> None:
    """Everybody in both rounds: FedRep begins the second with the received body and the head that it trained."""
    sim = worlds.simulation(FedRep(inherit=Inherit(momentum="mu-b")), evaluation=LATE, lr=0.3, join_ratio=1.0)
    _, ids, first = checks.rehearsed(sim)
    sim.step()
    gained = []
    for i, c in enumerate(ids.tolist()):
        trained = {n: t[i] for n, t in first.local.params.items()}
        downloaded = trained | sim.server  # which has no head
        assert {n for n in trained if n not in sim.server} == {"head.weight", "head.bias"}
        test = checks.rows_of(sim, c, "test")
        gained.append(accuracy(downloaded, *test) - accuracy(trained, *test))
    assert any(gained)
    assert sim.step()["delta"] == pytest.approx(sum(gained) / len(gained))


def test_behind_a_warm_up_delta_is_that_of_the_method() -> None:
    """Two rounds of warm-up, in which nobody keeps a model, then FedPHP's, with the same models as FedAvg's."""
    rows = [
        checks.played(
            FedPeWSFixed(base=base, warmup_share=0.25), evaluation=LATE, lr=0.3, join_ratio=1.0, local_epochs=4
        ).rows
        for base in (FedPHP(inherit=Inherit(weight=0.0)), FedAvg(weights="uniform"))
    ]
    php, fedavg = ([(r["before"]["mean"], r["delta"]) for r in of if "before" in r] for of in rows)
    assert len(php) == 8
    assert php == fedavg
    assert any(delta for _, delta in php[3:])


def test_in_a_warm_up_the_downloaded_model_is_the_one_received() -> None:
    """Everybody is there. FedRep's clients have heads of their own from the first round after the warm-up on."""
    fedrep, fedavg = (
        checks.played(
            FedPeWSFixed(base=base, warmup_share=0.5),
            evaluation=LATE, lr=0.3, join_ratio=1.0, local_epochs=4, num_rounds=6,
        ).rows
        for base in (FedRep(inherit=Inherit(weight=0.0), weights="uniform"), FedAvg(weights="uniform"))
    )  # fmt: skip
    before = [[(r["before"]["mean"], r["delta"]) for r in rows if "before" in r] for rows in (fedrep, fedavg)]
    assert len(before[0]) == 6
    assert before[0][:3] == before[1][:3]
    assert any(delta for _, delta in before[0][1:3])


def test_whose_session_failed_has_trained_nothing() -> None:
    """The other five clients have; for the first, what it came with is compared with itself."""
    fed = worlds.federation()
    x = fed.source.x.double()
    x[fed.splits["train"][0]] *= 1e200
    fed = dataclasses.replace(fed, source=dataclasses.replace(fed.source, x=x))
    php, fedavg = (
        worlds.simulation(m, fed=fed, join_ratio=1.0, num_rounds=2, evaluation=LATE)
        for m in (FedPHP(inherit=Inherit(weight=0.0)), FedAvg(weights="uniform"))
    )
    for sim in (php, fedavg):
        sim.run()
        assert sim.state.diverged == {0}
    assert php.state.left == fedavg.state.left
    assert [r["delta"] for r in php.rows] == [r["delta"] for r in fedavg.rows]


def test_fedphp_is_fedavg_with_the_slot_filled() -> None:
    assert isinstance(worlds.simulation(FedPHP()).algorithm, Inherited)
    slot = Inherit(weight=0.2)
    a, b = (checks.played(m, **SHORT) for m in (FedPHP(inherit=slot), FedAvg(weights="uniform", inherit=slot)))
    checks.assert_agree(a.server, b.server)
    checks.assert_agree(checks.everyone(a), checks.everyone(b))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FedPHP(inherit=None), "inherit: FedPHP without an inherited model is fedavg"),
        (lambda: Inherit(transfer="none"), "transfer='none': possible are mmd, kd, l2, prox"),
        (lambda: Inherit(weight=1.5), r"weight=1.5: must be in \[0, 1\]"),
        (lambda: Inherit(rate=-0.1), r"rate=-0.1: must be in \[0, 1\]"),
        (lambda: Inherit(temperature=0.0), "temperature=0.0: must be greater than 0"),
    ],
)
def test_impossible_settings_are_refused(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
