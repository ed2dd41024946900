"""Clients whose images are corrupted."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

from personafl import config, experiment
from personafl.core import rng
from personafl.data import DATASETS, Federation, Source
from personafl.data.client_corruption import client_kinds, corrupt_federation
from personafl.data.corruptions import STANDARD, corrupt

KINDS = list(STANDARD)


def federation(clients: int = 17, channels: int = 3, official: int = 0, seed: int = 0) -> Federation:
    rows = 6 * clients + official
    x = torch.randint(256, (rows, channels, 8, 8), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    source = Source("noise", x, torch.arange(rows) % 2, 2)
    parts = np.split(np.arange(6 * clients), clients)
    return Federation.build(source, parts, seed, validation_share=0.2, official=np.arange(6 * clients, rows))


def test_every_client_has_a_corruption_for_all_its_images() -> None:
    fed = federation()
    out = corrupt_federation(fed, "per-client", 3)
    for client in range(17):  # the sixteenth begins anew
        for row in range(6 * client, 6 * client + 6):  # in whichever split
            key = rng.key(0, "corrupted data", torch.tensor([row]))
            alone = corrupt(fed.source.x[[row]], KINDS[client % 15], 3, key)[0]
            assert torch.equal(out.source.x[row], alone), (client, row)
    assert torch.equal(out.source.y, fed.source.y)
    assert client_kinds(out) == [KINDS[c % 15] for c in range(17)]
    assert client_kinds(fed) == client_kinds(corrupt_federation(fed, "fog")) == []
    assert out.digest() == fed.digest()


def test_rows_of_no_client_stay_clean_unless_all_have_one_corruption() -> None:
    fed = federation(clients=2, official=5)
    assert torch.equal(corrupt_federation(fed, "per-client").source.x[12:], fed.source.x[12:])
    out = corrupt_federation(fed, "contrast", 5).source.x
    assert torch.equal(out, corrupt(fed.source.x, "contrast", 5, torch.zeros(17, dtype=torch.int64)))


def test_the_images_are_those_of_every_seed() -> None:
    a, b = (corrupt_federation(federation(seed=s), "per-client") for s in (0, 1))
    assert a.digest() != b.digest()
    assert torch.equal(a.source.x, b.source.x)  # the clients hold the same rows


def test_nothing_is_changed_in_place_and_none_is_none() -> None:
    fed = federation(clients=3)
    before = fed.source.x.clone()
    assert corrupt_federation(fed, "none").source is fed.source
    corrupt_federation(fed, "per-client")
    corrupt_federation(fed, "snow")
    assert torch.equal(fed.source.x, before)


def test_a_recipe_corrupts_its_clients() -> None:
    overrides = ["data.num_clients=5", "data.partition=iid", "data.corruption=per-client", "data.corruption_severity=2"]
    recipe = config.load("demo", overrides)
    fed = experiment.federation(recipe)
    plain = experiment.federation(config.load("demo", overrides[:2]))
    assert fed.digest() == plain.digest()  # the clients hold the same rows
    assert fed.source.digest != plain.source.digest
    again = corrupt_federation(plain, "per-client", 2)
    assert torch.equal(fed.source.x, again.source.x)
    assert not torch.equal(fed.source.x, plain.source.x)
    assert "corruption_severity = 2" in config.dump(recipe)
    assert "corruption_severity" not in config.dump(config.load("demo"))


def test_cifar10_c_has_a_corruption_per_client_unless_told() -> None:
    assert "cifar10-c" in DATASETS
    assert config.load(None, ["data.dataset=cifar10-c"]).data.corruption == "per-client"
    assert config.load(None, ["data.dataset=cifar10-c", "data.corruption=fog"]).data.corruption == "fog"
    assert config.load(None, ["data.dataset=cifar10"]).data.corruption == "none"


@pytest.mark.skipif("PERSONAFL_DATA" not in os.environ, reason="CIFAR-10 lies in $PERSONAFL_DATA, which is not set")
def test_cifar10_c_is_made_of_the_official_test_images() -> None:
    clean, whole = DATASETS["cifar10-c"](), DATASETS["cifar10"]()
    assert whole.test is not None and clean.test is not None
    assert torch.equal(clean.x, whole.x[torch.from_numpy(whole.test)])
    assert torch.bincount(clean.y).tolist() == [1000] * 10
    assert torch.bincount(clean.y[torch.from_numpy(clean.test)]).tolist() == [500] * 10
    # CO-PFL: ten clients of two classes, 50 images of each to train on and 100 to test
    recipe = config.load(
        "demo",
        [
            "data.dataset=cifar10-c",
            "data.num_clients=10",
            "data.partition=shards",
            "data.official_test=dealt",
            "data.samples_per_class=50",
            "data.test_samples_per_class=100",
        ],
    )
    fed = experiment.federation(recipe, clean)
    assert fed.sizes("train").tolist() == [100] * 10
    assert fed.sizes("test").tolist() == [200] * 10
    rows = fed.examples("test", torch.tensor([3])).rows[0]
    key = rng.key(0, "corrupted data", rows)
    assert torch.equal(fed.source.x[rows], corrupt(clean.x[rows], KINDS[3], 5, key))
