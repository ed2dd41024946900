"""Answers that go by the mix of classes of unlabelled inputs: `inference = "batch"`, `"stream"` and `"mixture"`."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import personafl
from personafl import (
    APFL,
    DMPFL,
    Algorithm,
    Ditto,
    Evaluation,
    FedAvg,
    Federation,
    FedFu,
    FedPeWS,
    FedRep,
    Inherit,
    LocalOnly,
    Simulation,
    Source,
)
from personafl.core.errors import UserError
from personafl.core.plugin_points import Inference
from personafl.core.types import Examples, Params
from personafl.evaluation import batch_inference, final
from personafl.experiment.results import Client
from personafl.models.client_module import ClientModule
from personafl.plugins import EstimatedPrior, Mixture, RunningPrior
from tests import worlds

RULES: dict[str, Inference] = {
    "batch": EstimatedPrior(pull=1.5, temperature=1.3, share=0.4, steps=7),
    "batch, the estimate alone": EstimatedPrior(doubt=0.0),
    "own prior taken out": EstimatedPrior(contains_prior=True),
    "stream": RunningPrior(pull=1.5, temperature=1.3, share=0.4, window=6, forgetting=0.1, steps=3),
    "mixture": Mixture(trust=0.3, strength=0.2),
}


def outputs(clients: int = 2, inputs: int = 9, classes: int = 4, seed: int = 0) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    one, other = torch.randn(2, clients, inputs, classes, generator=draw, dtype=torch.float64).unbind()
    return 2 * one, 2 * other


def ready(rule: Inference, clients: int = 2, classes: int = 4) -> Params:
    """What a rule measures, of clients whose first class is the most frequent one, the later the more so."""
    counts = torch.tensor([[3.0 * (c + 1), 2.0, 1.0, 0.0][:classes] for c in range(clients)], dtype=torch.float64)
    return rule.measure(None, {}, lambda _: {"examples": counts})  # type: ignore[arg-type]


# By hand


def by_hand(z: np.ndarray, weight: np.ndarray, prior: np.ndarray, q: np.ndarray, pull: float, steps: int) -> np.ndarray:
    """EM for one client, example by example: the frequencies q."""
    for _ in range(steps):
        total = pull * prior
        for one, counts in zip(z, weight, strict=True):
            p = np.exp(one) * q
            total = total + counts * p / p.sum()
        q = total / (weight.sum() + pull)
    return q


def answer(
    one: np.ndarray, z: np.ndarray, weight: np.ndarray, prior: np.ndarray, q: np.ndarray, doubt: float, own: float = 0.0
) -> Any:
    """Log-probabilities of one input, by how likely own, equal and estimated frequencies make all of `z`."""
    mixes, likely = (prior, (prior + 0.25) / 2, np.full(4, 0.25), q), []
    classes = sum(1 - (1 - share) ** sum(weight) for share in q)  # that so many inputs of this mix would show
    for mix, more in zip(mixes, (own, 0, 0, -doubt * (classes - 1)), strict=True):
        each = [c * math.log((np.exp(o) / np.exp(o).sum()) @ mix) for o, c in zip(z, weight, strict=True)]
        likely.append(sum(each) + more)
    share = np.exp(np.array(likely) - max(likely))
    share = share / share.sum()
    return np.log(sum(s * np.exp(one) * mix / (np.exp(one) @ mix) for s, mix in zip(share, mixes, strict=True)))


def own_frequencies(client: int) -> np.ndarray:
    counts = np.array([3.0 * (client + 1), 2, 1, 0]) + 1
    return counts / counts.sum()


@pytest.mark.parametrize("doubt", [0.0, 0.2, 1.0])
def test_a_batch_is_answered_for_its_estimated_mix_of_classes(doubt: float) -> None:
    rule = EstimatedPrior(share=0.4, temperature=1.3, pull=1.5, steps=7, doubt=doubt)
    own, common = outputs()
    found, changed = rule.decide(ready(rule), own, common)
    assert not changed
    for c in range(2):
        z = ((0.4 * own + 0.6 * common) / 1.3)[c].numpy()
        prior = own_frequencies(c)
        q = by_hand(z, np.ones(9), prior, prior, 1.5, 7)
        true = [answer(one, z, np.ones(9), prior, q, doubt) if doubt else one + np.log(q) for one in z]
        np.testing.assert_allclose(found[c].numpy(), true, rtol=0, atol=1e-12)


@pytest.mark.parametrize("doubt", [0.0, 0.2, 1.0])
def test_a_stream_is_answered_for_the_mix_of_the_last_inputs(doubt: float) -> None:
    rule = RunningPrior(share=0.4, temperature=1.3, pull=1.5, window=4, forgetting=0.1, steps=3, doubt=doubt)
    own, common = outputs()
    found, changed = rule.decide(ready(rule), own, common)
    for c in range(2):
        z = ((0.4 * own + 0.6 * common) / 1.3)[c].numpy()
        prior = q = own_frequencies(c)
        for i in range(9):
            last = z[max(0, i - 3) : i + 1]
            weight = 0.9 ** np.arange(len(last))[::-1]
            q = by_hand(last, weight, prior, q, 1.5, 3)
            true = answer(z[i], last, weight, prior, q, doubt) if doubt else z[i] + np.log(q)
            np.testing.assert_allclose(found[c, i].numpy(), true, rtol=0, atol=1e-12)
        np.testing.assert_allclose(changed["labels/now"][c].numpy(), np.log(q), rtol=0, atol=1e-12)


def test_a_mixture_weighs_the_own_model_by_whose_inputs_these_seem_to_be() -> None:
    rule = Mixture(trust=0.3, strength=0.2, temperature=1.5)
    own, common = outputs()
    found, _ = rule.decide(ready(rule), own, common)
    for c in range(2):
        fit = torch.softmax(common[c] / 1.5, -1).numpy()
        odds = math.log(0.3 / 0.7) + 0.2 * np.log(4 * fit @ own_frequencies(c)).sum()
        share = 1 / (1 + math.exp(-odds))
        both = share * torch.softmax(own[c], -1) + (1 - share) * torch.softmax(common[c], -1)
        torch.testing.assert_close(found[c].exp(), both, rtol=0, atol=1e-12)


def test_outputs_that_contain_the_clients_frequencies_lose_them() -> None:
    """A model's outputs with log pi in them, and the same without, come to the same answers."""
    rule = EstimatedPrior(contains_prior=True)
    have = ready(rule)
    own, common = outputs()
    plain, _ = EstimatedPrior().decide(have, own, common)
    taken, _ = rule.decide(have, own + have["labels/own"].unsqueeze(1), common)
    torch.testing.assert_close(taken, plain, rtol=0, atol=1e-12)


def test_em_finds_the_mix_of_classes_that_inputs_were_drawn_from() -> None:
    """With the true likelihoods of a Gaussian in each class and many inputs, q comes near the truth."""
    draw = torch.Generator().manual_seed(0)
    truth = torch.tensor([0.6, 0.3, 0.1, 0.0], dtype=torch.float64)
    y = torch.multinomial(truth, 4000, True, generator=draw)
    x = torch.randn(4000, generator=draw, dtype=torch.float64) + 1.5 * y
    z = -0.5 * (x.unsqueeze(1) - 1.5 * torch.arange(4)).square()
    have = {"labels/own": torch.full((1, 4), 0.25, dtype=torch.float64).log()}
    rule = EstimatedPrior(share=1.0, temperature=1.0, pull=1.0, steps=300, doubt=0.0)
    q = (rule.decide(have, z[None], z[None])[0] - z)[0, 0].exp()
    assert float((q - truth).abs().max()) < 0.03
    better = ((z + q.log()).argmax(1) == y).double().mean() - (z.argmax(1) == y).double().mean()
    assert float(better) > 0.05


def drawn(truth: list[float], many: int, seed: int) -> tuple[Tensor, Tensor]:
    """Labels, and the true log-likelihoods of a Gaussian in each class."""
    draw = torch.Generator().manual_seed(seed)
    y = torch.multinomial(torch.tensor(truth, dtype=torch.float64), many, True, generator=draw)
    x = torch.randn(many, generator=draw, dtype=torch.float64) + 1.5 * y
    return y, -0.5 * (x.unsqueeze(1) - 1.5 * torch.arange(4)).square()


@pytest.mark.parametrize(
    ("truth", "better"),
    [
        ([0.7, 0.1, 0.1, 0.1], True),  # the client's own mix
        ([0.25, 0.25, 0.25, 0.25], True),
        ([0.05, 0.05, 0.2, 0.7], False),  # another: here the estimate is right
    ],
)
def test_doubt_gains_where_a_simple_mix_is_the_true_one_and_costs_little_elsewhere(
    truth: list[float], better: bool
) -> None:
    """Over 400 batches of 20 inputs, in points: half a point is four standard errors of a paired difference."""
    have = {"labels/own": torch.tensor([[0.7, 0.1, 0.1, 0.1]], dtype=torch.float64).log()}
    rules = EstimatedPrior(share=1.0, temperature=1.0), EstimatedPrior(share=1.0, temperature=1.0, doubt=0.0)
    right = torch.zeros(2, dtype=torch.float64)
    for seed in range(400):
        y, z = drawn(truth, 20, seed)
        for place, rule in enumerate(rules):
            right[place] += (rule.decide(have, z[None], z[None])[0][0].argmax(1) == y).double().mean() / 4
    gained = float(right[0] - right[1])
    assert gained > 0.5 if better else gained > -0.5


# What all of them keep


@pytest.mark.parametrize("name", RULES)
def test_padding_changes_no_answer_and_nothing_that_is_kept(name: str) -> None:
    rule, (own, common) = RULES[name], outputs()
    have = ready(rule)
    valid = torch.arange(9) < torch.tensor([[9], [5]])
    found, changed = rule.decide(have, own, common, valid)
    alone, kept = rule.decide({n: t[1:] for n, t in have.items()}, own[1:, :5], common[1:, :5])
    torch.testing.assert_close(found[1:, :5], alone, rtol=0, atol=1e-12)
    assert changed.keys() == kept.keys()
    for n, t in kept.items():
        torch.testing.assert_close(changed[n][1:], t, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", RULES)
def test_no_answer_goes_by_another_client(name: str) -> None:
    rule, (own, common) = RULES[name], outputs()
    have = ready(rule)
    found, _ = rule.decide(have, own, common)
    alone, _ = rule.decide({n: t[:1] for n, t in have.items()}, own[:1], common[:1])
    torch.testing.assert_close(found[:1], alone, rtol=0, atol=1e-12)


def test_a_stream_is_the_same_however_it_is_cut() -> None:
    rule, (own, common) = RULES["stream"], outputs()
    have = ready(rule)
    whole, last = rule.decide(have, own, common)
    parts, state = [], dict(have)
    for now in (slice(0, 1), slice(1, 4), slice(4, 9)):
        out, changed = rule.decide(state, own[:, now], common[:, now])
        state |= changed
        parts.append(out)
    assert torch.equal(torch.cat(parts, 1), whole)
    assert all(torch.equal(state[n], t) for n, t in last.items())


def test_a_stream_without_inputs_has_no_answers() -> None:
    rule, (own, common) = RULES["stream"], outputs()
    found, changed = rule.decide(ready(rule), own[:, :0], common[:, :0])
    assert found.shape == (2, 0, 4) and torch.equal(changed["labels/now"], ready(rule)["labels/now"])


def test_a_stream_follows_a_change() -> None:
    """Inputs of the first class, then of the second: an input that fits both goes with those around it."""
    rule = RunningPrior(share=0.0, temperature=1.0, pull=1.0, window=32, forgetting=0.05)
    have = {n: t[:1] for n, t in ready(rule).items()}
    sure = 3 * torch.eye(4, dtype=torch.float64)
    unsure = torch.tensor([1.0, 1.0, 0.0, 0.0], dtype=torch.float64)
    stream = torch.stack([*(sure[0] for _ in range(20)), unsure, *(sure[1] for _ in range(40)), unsure])[None]
    out = rule.decide(have, stream, stream)[0][0].argmax(1)
    assert (int(out[20]), int(out[61])) == (0, 1)


# In a run


@dataclasses.dataclass(frozen=True)
class Case:
    method: Algorithm
    rule: Inference


CASES = {
    "ditto, batch": Case(Ditto(), RULES["batch"]),
    "ditto, stream": Case(Ditto(), RULES["stream"]),
    "ditto, mixture": Case(Ditto(), RULES["mixture"]),
    "fedrep, its own model alone": Case(FedRep(), EstimatedPrior(share=1.0, contains_prior=True)),
    "local, its own model alone, stream": Case(LocalOnly(), RunningPrior(share=1.0, contains_prior=True)),
    "dm-pfl, prior-free, stream": Case(DMPFL(iterations=1, prior_free=True), RULES["stream"]),
    "fedfu, batch": Case(FedFu(fusion="multi"), RULES["batch"]),
    "inherited, by contribution, batch": Case(FedAvg(inherit=Inherit(), weights="cowa"), RULES["batch"]),
    "apfl, stream": Case(APFL(), RULES["stream"]),
}


@pytest.mark.parametrize("name", CASES)
def test_a_clients_module_answers_as_the_simulation_and_keeps_what_it_learns(name: str) -> None:
    case = CASES[name]
    method = dataclasses.replace(case.method, inference=case.rule)
    sim = worlds.simulation(method, num_rounds=2)
    sim.run()
    for c in (0, 4):
        (have,) = sim.each(torch.tensor([c]), sim.deployed_models)
        client, module = (
            Client(c, sim, dict(have)),
            ClientModule(sim.model, sim.algorithm, have, sim.federation.source.normalization),
        )
        x = sim.federation.source.x[:11]
        once, again = client.predict(x), client.predict(x)
        torch.testing.assert_close(module(x), once, rtol=0, atol=1e-12)
        torch.testing.assert_close(module(x), again, rtol=0, atol=1e-12)
        assert torch.equal(once, again) != case.rule.in_turn  # a stream has seen these inputs the second time


# Fitted to validation data


def held_out(ends: tuple[int, ...] = (60, 120, 180, 240, 300)) -> Federation:
    """Six clients with validation data of three classes that overlap, one of them frequent at each."""
    draw = np.random.default_rng(0)
    mixes = [np.where(np.arange(3) == c % 3, 0.9, 0.05) for c in range(6)]
    y = np.concatenate([draw.choice(3, 60, p=mix) for mix in mixes])
    x = torch.tensor(draw.normal(size=(360, 6)) + 0.5 * y[:, None])
    return Federation.build(
        Source("overlapping", x, torch.tensor(y), 3), np.split(np.arange(360), ends), 0, validation_share=0.3
    )


@pytest.mark.parametrize("contained", [False, True])
def test_a_temperature_is_the_one_that_makes_validation_labels_likeliest(contained: bool) -> None:
    """Client by client, from its own models and the formula; a normal of log T around the given one stands for few."""
    rule = EstimatedPrior(share=0.3, temperature=1.5, calibrate=True, contains_prior=contained)
    sim = worlds.simulation(Ditto(inference=rule), fed=held_out(), num_rounds=6, lr=0.5)
    sim.run()
    have = sim.deployed_models(sim.model, sim.everybody)
    grid = 1.5 * 2.0 ** (np.arange(-12, 13) / 4)
    fitted = _fitted_by_hand(sim, have, grid, "validation", contained=contained)
    np.testing.assert_allclose(have["labels/temperature"].numpy(), fitted, rtol=1e-12)
    others = [("train", 1.0, contained), ("validation", 0.0, contained), ("validation", 1.0, not contained)]
    for split, prior, inside in others:  # each of these is seen
        assert _fitted_by_hand(sim, have, grid, split, prior, contained=inside) != fitted
    mine, theirs = outputs(clients=6, classes=3)
    found, _ = rule.decide(have, mine, theirs)
    alone = [
        dataclasses.replace(rule, temperature=t, calibrate=False).decide(
            {n: v[[c]] for n, v in have.items()}, mine[[c]], theirs[[c]]
        )[0]
        for c, t in enumerate(fitted)
    ]
    torch.testing.assert_close(found, torch.cat(alone), rtol=0, atol=1e-12)


def _fitted_by_hand(
    sim: Simulation, have: Params, grid: np.ndarray, split: str, prior: float = 1.0, *, contained: bool
) -> list[float]:
    fed = sim.federation
    data, fitted = fed.examples(split, sim.everybody), []  # type: ignore[arg-type]
    for c in range(6):
        rows = data.rows[c, : data.count[c]]
        x, y = fed.source.x[rows].double(), fed.source.y[rows].numpy()
        alone = {n: t[c : c + 1] for n, t in have.items()}
        own, common = (z[0].numpy() for z in sim.algorithm.both_answers(sim.model, alone, x.unsqueeze(0)))
        train = fed.source.y[fed.examples("train", torch.tensor([c])).rows[0]]
        pi = (np.bincount(train.numpy(), minlength=3) + 1) / (len(train) + 3)
        costs = []
        for t in grid:
            z = (0.3 * (own - np.log(pi) * contained) + 0.7 * common) / t + prior * np.log(pi)
            right = z[np.arange(len(y)), y]
            costs.append((np.log(np.exp(z).sum(1)) - right).sum() + math.log(t / 1.5) ** 2 / (2 * 0.5**2))
        fitted.append(float(grid[int(np.argmin(costs))]))
    return fitted


def test_the_usual_lead_is_that_on_validation_data() -> None:
    """Client by client, from its own models: the mean square of what the first class is ahead of the second."""
    rule = EstimatedPrior(share=0.3, wary=5.0)
    uneven = held_out((30, 120, 140, 240, 320))
    sim = worlds.simulation(Ditto(inference=rule), fed=uneven, num_rounds=6, lr=0.5)
    sim.run()
    have = sim.deployed_models(sim.model, sim.everybody)
    data = sim.federation.examples("validation", sim.everybody)
    for c in range(6):
        x = sim.federation.source.x[data.rows[c, : data.count[c]]].double()
        alone = {n: t[c : c + 1] for n, t in have.items()}
        own, common = (z[0].numpy() for z in sim.algorithm.both_answers(sim.model, alone, x.unsqueeze(0)))
        z = 0.3 * own + 0.7 * common
        rising = np.sort(z, 1)
        lead = ((rising[:, -1] - rising[:, -2]) ** 2).mean()
        assert float(have["labels/lead"][c]) == pytest.approx(lead, rel=1e-12)


@pytest.mark.parametrize(
    "rule", [EstimatedPrior(wary=0.5, doubt=0.2), RunningPrior(wary=0.5, doubt=0.2, window=12, forgetting=0.0)]
)
@pytest.mark.parametrize("calibrate", [False, True])
def test_small_leads_speak_for_the_clients_own_frequencies(rule: Any, calibrate: bool) -> None:
    """By hand: half as large as usual, less the 0.3 that is allowed, is 0.2 x 0.5 nats for each of nine inputs."""
    rule = dataclasses.replace(rule, calibrate=calibrate, temperature=2.0)
    have = {n: t[:1] for n, t in ready(EstimatedPrior()).items()}
    mine, _ = outputs(clients=1)
    z = mine[0].numpy() / 2
    warm = {"labels/temperature": torch.tensor([2.0], dtype=torch.float64)} if calibrate else {}
    rising = np.sort(z, 1)
    usual = 2 * 2**2 * ((rising[:, -1] - rising[:, -2]) ** 2).mean()  # twice that of these, before T
    nothing = torch.zeros(1, 12, 4, dtype=torch.float64)
    state = {"labels/now": have["labels/own"], "labels/seen": nothing, "labels/weight": nothing[..., 0]}
    given = have | warm | state | {"labels/lead": torch.tensor([usual], dtype=torch.float64)}
    prior = own_frequencies(0)

    def told(given: Params, extra: float) -> None:
        found = rule.decide(given, mine, mine)[0][0, -1].numpy()
        q = prior
        if rule.in_turn:
            for i in range(9):
                q = by_hand(z[: i + 1], np.ones(i + 1), prior, q, 2.0, 5)
        else:
            q = by_hand(z, np.ones(9), prior, prior, 2.0, 30)
        np.testing.assert_allclose(found, answer(z[-1], z, np.ones(9), prior, q, 0.2, extra), rtol=0, atol=1e-12)

    told(given, 9 * 0.5 * 0.2)
    told(given | {"labels/lead": given["labels/lead"] * 0.5}, 0.0)  # as large as usual
    told(given | {"labels/lead": given["labels/lead"] / 1.5}, 0.0)  # smaller by a quarter, which is allowed
    told(given | {"labels/lead": given["labels/lead"] * 0}, 0.0)  # nothing is known


def test_a_stream_that_forgets_counts_its_suspicion_by_what_inputs_count() -> None:
    """Nine inputs of which each counts 0.9 of the next, half as clear as usual: 0.2 nats of what they count in all."""
    rule = RunningPrior(share=1.0, temperature=2.0, wary=0.5, doubt=0.2, window=12, forgetting=0.1)
    have = {n: t[:1] for n, t in ready(dataclasses.replace(rule, wary=0.0)).items()}
    mine, _ = outputs(clients=1)
    z, weight = mine[0].numpy() / 2, 0.9 ** np.arange(8, -1, -1)
    rising = np.sort(z * 2, 1)
    usual = 2 * (weight * (rising[:, -1] - rising[:, -2]) ** 2).sum() / weight.sum()
    found = rule.decide(have | {"labels/lead": torch.tensor([usual], dtype=torch.float64)}, mine, mine)[0][0, -1]
    q = prior = own_frequencies(0)
    for i in range(9):
        q = by_hand(z[: i + 1], weight[8 - i :], prior, q, 2.0, 5)
    true = answer(z[-1], z, weight, prior, q, 0.2, weight.sum() * 0.5 * 0.2)
    np.testing.assert_allclose(found.numpy(), true, rtol=0, atol=1e-12)


def test_one_client_without_validation_data_is_not_wary_and_others_are() -> None:
    counts = {"examples": torch.ones(2, 4, dtype=torch.float64)}
    found = {"leads": torch.tensor([8.0, 0.0]), "inputs": torch.tensor([4.0, 0.0])}
    rule = EstimatedPrior(wary=1.0)
    have = rule.measure(None, {}, lambda _, split="train": counts if split == "train" else found)  # type: ignore[arg-type]
    assert have["labels/lead"].tolist() == [2, 0] and have["labels/lead"].dtype == torch.float64


@pytest.mark.parametrize("rule", [EstimatedPrior(wary=1.0), RunningPrior(wary=1.0)], ids=["batch", "stream"])
@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_an_input_that_is_not_finite_spoils_its_own_answer_alone(rule: Any, wrong: float) -> None:
    have = ready(dataclasses.replace(rule, wary=0.0)) | {"labels/lead": torch.full((2,), 30.0, dtype=torch.float64)}
    own, common = outputs(inputs=12)
    own[1, 3, 2] = wrong
    rest = [i for i in range(12) if i != 3]
    found, state = rule.decide(have, own, common)
    alone, kept = rule.decide(have, own[:, rest], common[:, rest])
    assert found[1, 3].isnan().all()
    torch.testing.assert_close(found[1, rest], alone[1], rtol=0, atol=1e-12)
    assert all(t.isfinite().all() for t in state.values())
    for n, t in state.items():
        torch.testing.assert_close(t[1], kept[n][1], rtol=0, atol=1e-12)


@pytest.mark.parametrize("rule", [EstimatedPrior(wary=2.0), RunningPrior(wary=2.0)], ids=["batch", "stream"])
def test_padding_may_hold_anything(rule: Any) -> None:
    have = ready(dataclasses.replace(rule, wary=0.0)) | {"labels/lead": torch.full((2,), 30.0, dtype=torch.float64)}
    own, common = outputs(inputs=12)
    valid = torch.arange(12).expand(2, 12) < torch.tensor([[12], [7]])
    plain = rule.decide(have, own, common, valid)[0]
    for anything in (math.nan, math.inf, -math.inf):
        found = rule.decide(have, own.masked_fill(~valid.unsqueeze(2), anything), common, valid)[0]
        torch.testing.assert_close(found[valid], plain[valid], rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", [EstimatedPrior, RunningPrior])
def test_a_share_of_all_or_nothing_leaves_the_other_model_out(kind: Any) -> None:
    own, common = outputs()
    have, lost = ready(kind()), torch.full_like(own, -math.inf)
    mine, theirs = (kind(share=share).decide(have, own, common)[0] for share in (1.0, 0.0))
    assert not mine.allclose(theirs)
    torch.testing.assert_close(kind(share=1.0).decide(have, own, lost)[0], mine, rtol=0, atol=0)
    torch.testing.assert_close(kind(share=0.0).decide(have, lost, common)[0], theirs, rtol=0, atol=0)
    torch.testing.assert_close(kind(share=0.5).decide(have, own, own)[0], mine)


@pytest.mark.parametrize("rule", [EstimatedPrior(wary=2.0), RunningPrior(wary=2.0)], ids=["batch", "stream"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_outputs_of_few_digits_are_answered_as_exactly_as_they_are(rule: Any, dtype: torch.dtype) -> None:
    have = ready(dataclasses.replace(rule, wary=0.0)) | {"labels/lead": torch.full((2,), 30.0, dtype=torch.float64)}
    own, common = (t.to(dtype) for t in outputs(inputs=150))
    found = rule.decide(have, own, common)[0]
    exact = rule.decide(have, own.double(), common.double())[0]
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), exact, rtol=2 * torch.finfo(dtype).eps, atol=1e-5)


def test_doubt_never_speaks_for_an_estimate() -> None:
    """One input shows one class, whatever the mix: no penalty, and no reward by rounding, however great the doubt."""
    counts = {"examples": torch.ones(3, 1000)}
    have = EstimatedPrior().measure(None, {}, lambda _: counts)  # type: ignore[arg-type]
    z = torch.randn(3, 1, 1000, generator=torch.Generator().manual_seed(0))
    little, much = (EstimatedPrior(doubt=d).decide(have, z, z)[0] for d in (1.0, 1e6))
    exact = EstimatedPrior(doubt=1.0).decide(have, z.double(), z.double())[0]
    torch.testing.assert_close(little.double(), exact, rtol=0, atol=1e-4)
    assert float((much - little).max()) < 0.05  # a mix that rounding charges for loses, and wins nothing


def test_wariness_goes_by_leads_whatever_the_temperature_and_the_scale() -> None:
    own, _ = outputs(clients=1, inputs=50)
    first, second = own[0].topk(2, -1).values.unbind(-1)
    have = {n: t[:1] for n, t in ready(EstimatedPrior()).items()}
    for scale, temperature in ((1.0, 1.0), (1.0, 1e5), (1e-5, 1.0), (1e5, 1e-3)):
        lead = ((first - second) * scale).square().mean().view(1)
        plain, wary = (
            EstimatedPrior(share=1.0, temperature=temperature, wary=w).decide(
                have | {"labels/lead": lead}, own * scale, own * scale
            )[0]
            for w in (0.0, 3e38)
        )
        torch.testing.assert_close(wary, plain, rtol=0, atol=1e-9)  # as clear as usual
    for usual in (lead * 1e10, lead / 0):  # never mind how wary, or what cannot be
        for z in (own, own.float()):
            found = EstimatedPrior(share=1.0, wary=3e38).decide(have | {"labels/lead": usual}, z, z)[0]
            assert found.isfinite().all()
    own[0, :, 1:] = -math.inf  # leads without end, as on validation data
    plain, wary = (
        EstimatedPrior(share=1.0, wary=w).decide(have | {"labels/lead": lead / 0}, own, own)[0] for w in (0.0, 2.0)
    )
    torch.testing.assert_close(wary, plain, rtol=0, atol=0)


def test_who_has_no_validation_data_keeps_the_given_temperature() -> None:
    rule = EstimatedPrior(temperature=2.3, calibrate=True, wary=1.0)
    counts = {"examples": torch.ones(3, 4, dtype=torch.float64)}
    found = rule.measure(None, {}, lambda _, split="train": counts if split == "train" else {})  # type: ignore[arg-type]
    assert found["labels/temperature"].tolist() == [2.3, 2.3, 2.3]
    assert found["labels/lead"].tolist() == [0, 0, 0]  # nothing is known


@pytest.mark.parametrize(
    "rule",
    [EstimatedPrior(calibrate=True), RunningPrior(calibrate=True), EstimatedPrior(wary=9.0), RunningPrior(wary=9.0)],
    ids=["batch", "stream", "wary batch", "wary stream"],
)
def test_a_module_has_the_fitted_temperature(rule: EstimatedPrior | RunningPrior) -> None:
    sim = worlds.simulation(Ditto(inference=rule), fed=held_out(), num_rounds=2)
    sim.run()
    (have,) = sim.each(torch.tensor([4]), sim.deployed_models)
    module = ClientModule(sim.model, sim.algorithm, have, sim.federation.source.normalization)
    x = sim.federation.source.x[:11]
    torch.testing.assert_close(module(x), Client(4, sim, dict(have)).predict(x), rtol=0, atol=1e-12)


def test_calibration_needs_validation_data_that_judge_nothing() -> None:
    method = Ditto(inference=EstimatedPrior(calibrate=True))
    with pytest.raises(UserError, match=r"calibrate=true: needs validation data.*data.validation_share, such as 0.1"):
        worlds.simulation(method)
    warmed = FedPeWS(base=method)
    with pytest.raises(UserError, match="calibrate=true: needs validation data"):
        worlds.simulation(warmed)
    with pytest.raises(UserError, match="calibrate=true: needs validation data"):
        worlds.simulation(Ditto(inference=RunningPrior(calibrate=True)))
    with pytest.raises(UserError, match=r"evaluation.split='validation', as of a sweep, would judge them"):
        worlds.simulation(method, fed=held_out(), evaluation=Evaluation(split="validation"))
    with pytest.raises(UserError, match=r"inference.wary=3: needs validation data"):
        worlds.simulation(Ditto(inference=EstimatedPrior(wary=3.0)))


@pytest.mark.parametrize("start", ["run", "sweep"])
def test_what_needs_validation_data_is_refused_before_anything_is_trained(start: str) -> None:
    """Though the first method does not need them."""
    seen: list[Any] = []
    told: dict[str, Any] = {
        "run": {"watch": lambda *row: seen.append(row)},
        "sweep": {"told": lambda *trial: seen.append(trial)},
    }
    more = ["training.lr=0.1,0.2"] if start == "sweep" else []
    methods = [FedAvg(), Ditto(inference=EstimatedPrior(wary=3.0))]
    with pytest.raises(UserError, match=r"inference\.wary=3: "):
        getattr(personafl, start)("demo", "training.num_rounds=1", *more, algorithms=methods, **told[start])
    assert not seen


# In a run


def played(rule: Inference, asked: Evaluation) -> tuple[Simulation, list[Tensor], Examples, Tensor]:
    """A run, the scores of its clients' test sets, these, and the order in which they were met."""
    sim = worlds.simulation(Ditto(inference=rule), num_rounds=2, evaluation=asked)
    sim.run()
    found = sim.evaluator.on_test(sim.model, sim.deployed_models(sim.model, sim.everybody), sim.everybody)
    data = sim.federation.examples("test", sim.everybody)
    return sim, found, data, batch_inference.shuffled(data, sim.training.seed)


def test_batches_of_an_evaluation_are_answered_by_themselves() -> None:
    """Scores of batches of four are those of each batch given alone, in the order drawn for the client."""
    asked = Evaluation(shift="none", eval_every=10_000, batch=4)
    rule = EstimatedPrior(pull=0.5, temperature=1.0, doubt=0.0)
    sim, found, data, order = played(rule, asked)
    for i, c in enumerate(sim.everybody.tolist()):
        n = int(data.count[i])
        mine = order[i, :n]
        assert sorted(mine.tolist()) == list(range(n))
        (have,) = sim.each(torch.tensor([c]), sim.deployed_models)
        for part in torch.split(mine, 4):
            rows = data.rows[i, part]
            out = Client(c, sim, dict(have)).predict(sim.federation.source.x[rows])
            right = (out.argmax(1) == sim.federation.source.y[rows]).float()
            assert torch.equal(found[i][part], right)


def test_a_stream_may_have_seen_inputs_before_those_that_are_judged() -> None:
    rule = RunningPrior(pull=0.5, temperature=1.0, window=8, doubt=0.0)
    for before in (0, 3, 25):
        asked = Evaluation(shift="none", eval_every=10_000, inputs_before=before)
        sim, found, data, order = played(rule, asked)
        for i, c in enumerate(sim.everybody.tolist()):
            n = int(data.count[i])
            places = [int(order[i, (j - before) % n]) for j in range(before + n)]
            (have,) = sim.each(torch.tensor([c]), sim.deployed_models)
            client = Client(c, sim, dict(have))
            out = client.predict(sim.federation.source.x[data.rows[i, places]])[before:]
            right = (out.argmax(1) == sim.federation.source.y[data.rows[i, places[before:]]]).float()
            assert torch.equal(found[i][places[before:]], right)


@pytest.mark.parametrize(
    ("rule", "key"),
    [
        (EstimatedPrior(pull=0.5, temperature=1.0, doubt=0.0), "batch"),
        (RunningPrior(pull=0.5, window=8, doubt=0.0), "inputs_before"),
    ],
    ids=["batch", "stream"],
)
def test_one_training_is_judged_with_several_numbers_of_inputs(rule: Inference, key: str) -> None:
    """Each number has what a run of its own has that is judged with it alone."""
    usual = {"eval_every": 10_000, "draws": 2, "degrees": (0.0, 0.5, 1.0)}

    def told(**asked: object) -> dict[str, object]:
        sim = worlds.simulation(Ditto(inference=rule), num_rounds=2, lr=0.5, evaluation=Evaluation(**usual, **asked))
        sim.run()
        found = sim.evaluations()
        return final.robustness(found, sim.evaluation, sim.task.metric) | {
            "shift": final.shift_summary(found, sim.evaluation)
        }

    several = told(input_counts=(1, 3))
    means = []
    for count in (1, 3):
        alone = told(**{key: count})
        cells = several["inputs"][str(count)]
        assert cells.keys() == alone["shift"]["degrees"].keys() == {"0.0", "0.5", "1.0"}
        for degree, cell in cells.items():
            assert cell["mean"] == pytest.approx(alone["shift"]["degrees"][degree]["mean"], abs=1e-7)
        means.append([c["mean"] for c in cells.values()])
    assert means[0] != means[1] and several["shift"] == told()["shift"]
    plain = worlds.simulation(Ditto(), num_rounds=1, evaluation=Evaluation(**usual, input_counts=(1,)))
    plain.run()
    assert "count_accuracy" not in plain.evaluations()


def test_label_shift_costs_less_where_clients_estimate_the_mix() -> None:
    """Three overlapping classes, one of them frequent at each client: at full shift the estimate pays."""
    draw = np.random.default_rng(0)
    parts, xs, ys, first = [], [], [], 0
    for c in range(9):
        mix = np.full(3, 0.08)
        mix[c % 3] = 0.84
        y = draw.choice(3, 200, p=mix)
        ys.append(y)
        xs.append(draw.normal(size=(200, 6)) + 0.6 * y[:, None])
        parts.append(np.arange(first, first + 200))
        first += 200
    made = Source("overlapping", torch.tensor(np.concatenate(xs)), torch.tensor(np.concatenate(ys)), 3)
    fed = Federation.build(made, parts, 0)
    asked = Evaluation(eval_every=10_000, draws=3)
    scored = {}
    for name, method in {
        "own": Ditto(),
        "batch": FedAvg(prior_free=True, inference=EstimatedPrior(temperature=1.0)),
    }.items():
        sim = worlds.simulation(method, fed=fed, num_rounds=30, lr=0.05, batch_size=20, evaluation=asked)
        sim.run()
        shift = sim.clients_table()[1]
        assert shift is not None
        scored[name] = [shift["degrees"][d]["mean"] for d in ("0.0", "1.0")]
    assert scored["batch"][1] > scored["own"][1] + 0.1
    assert scored["batch"][0] > scored["own"][0] - 0.05


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (lambda: EstimatedPrior(share=1.2), r"share=1.2: must be in \[0, 1\]"),
        (lambda: EstimatedPrior(temperature=0), "temperature=0: must be positive"),
        (lambda: EstimatedPrior(pull=math.inf), "pull=inf: must be positive"),
        (lambda: EstimatedPrior(doubt=-1.0), "doubt=-1.0: must be a number that is not negative"),
        (lambda: RunningPrior(doubt=math.nan), "doubt=nan: must be a number that is not negative"),
        (lambda: EstimatedPrior(wary=math.inf), "wary=inf: must be a number that is not negative"),
        (lambda: EstimatedPrior(wary=-1.0), "wary=-1.0: must be a number that is not negative"),
        (lambda: EstimatedPrior(wary=2.0, doubt=0.0), "wary=2.0: needs doubt in the estimate"),
        (lambda: RunningPrior(window=0), "window=0: must be at least 1"),
        (lambda: RunningPrior(forgetting=1.0), r"forgetting=1.0: must be in \[0, 1\)"),
        (lambda: Mixture(trust=0.0), r"trust=0.0: must be in \(0, 1\)"),
        (lambda: Mixture(strength=-1.0), "strength=-1.0: must be positive"),
        (lambda: Evaluation(batch=-1), "evaluation.batch"),
        (lambda: Evaluation(inputs_before=-1), "evaluation.inputs_before"),
        (lambda: Evaluation(input_counts=(4, -1)), "evaluation.input_counts"),
        (lambda: Evaluation(input_counts=(4, 4)), "evaluation.input_counts"),
    ],
)
def test_impossible_settings_are_refused(made: object, why: str) -> None:
    with pytest.raises(UserError, match=why):
        made()  # type: ignore[operator]


def test_modules_are_exported_for_any_batch_and_for_a_stream_of_single_inputs() -> None:
    for name in ("batch", "stream"):
        sim = worlds.simulation(Ditto(inference=RULES[name]), num_rounds=1)
        sim.run()
        (have,) = sim.each(torch.tensor([2]), sim.deployed_models)
        first, second = (ClientModule(sim.model, sim.algorithm, have) for _ in range(2))
        x = sim.federation.source.x[:7]
        if name == "batch":
            sizes = {"x": {0: torch.export.Dim("batch")}}
            program = torch.export.export(first, (x[:3],), dynamic_shapes=sizes).module()
            torch.testing.assert_close(program(x), second(x), rtol=0, atol=1e-12)
        else:
            program = torch.export.export(first, (x[:1],)).module()
            for one in torch.split(x, 1):
                torch.testing.assert_close(program(one), second(one), rtol=0, atol=1e-12)


def test_a_method_takes_a_rule_as_a_table() -> None:
    made = Ditto(inference={"name": "stream", "window": 8, "calibrate": True})  # type: ignore[arg-type]
    assert made == Ditto(inference=RunningPrior(window=8, calibrate=True))
    for table, why in (
        ({"name": "bach"}, "inference.name=.bach.: no such choice; did you mean batch"),
        ({"name": "batch", "shares": 1}, "inference.shares=1: no such setting of .inference.; did you mean share"),
        ({"name": "per-sample", "calibrate": True}, "inference.calibrate=True: no such setting"),
        ({"name": "batch", "calibrate": "yes"}, "inference.calibrate=.yes.: must be true or false"),
    ):
        with pytest.raises(UserError, match=why):
            Ditto(inference=table)  # type: ignore[arg-type]


def test_the_numbers_of_inputs_are_a_table() -> None:
    pytest.importorskip("pandas")
    found = personafl.run(
        data={"dataset": "digits", "num_clients": 4},
        training={"num_rounds": 1, "local_epochs": 1},
        evaluation={"input_counts": [1, 8], "degrees": [0.0, 1.0], "draws": 1},
        algorithms=[{"name": "fedavg-ft", "inference": "batch"}],
        quiet=True,
        threads=1,
    )
    told, frame = found.summaries[0]["robustness"]["inputs"], found.to_pandas("inputs")
    assert list(frame[["inputs", "degree"]].itertuples(index=False, name=None)) == [(1, 0), (1, 1), (8, 0), (8, 1)]
    assert frame["mean"].tolist() == [told[n][d]["mean"] for n in ("1", "8") for d in ("0.0", "1.0")]
