"""Corrupted and rotated test images, against one client and one image at a time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import personafl
from personafl import Algorithm, Ditto
from personafl.core import rng
from personafl.data.corruptions import STANDARD, corrupt, rotate
from personafl.evaluation import final
from tests.evaluation.common import METHODS, accuracy, federation, own_rows, played


@pytest.mark.parametrize(("channels", "as_bytes"), [pytest.param(1, False, marks=pytest.mark.slow), (3, True)])
@pytest.mark.parametrize("algorithm", METHODS, ids=lambda a: type(a).__name__)
def test_corruptions_are_those_of_each_image_alone(algorithm: Algorithm, channels: int, as_bytes: bool) -> None:
    sim = played(algorithm, federation(channels, as_bytes))
    found = sim.evaluations()
    assert found["kinds"].tolist() == list(STANDARD)
    assert found["corruption_accuracy"].shape == (6, 15, 2)
    source = sim.federation.source
    for k, kind in enumerate(STANDARD):
        for j, severity in enumerate((1, 5)):
            for client in range(6):
                rows = own_rows(sim, client)
                images = torch.cat(
                    [
                        corrupt(source.x[[r]], kind, severity, rng.key(0, "corruption", torch.tensor([r])))
                        for r in rows.tolist()
                    ]
                )
                expected = accuracy(sim, client, images, source.y[rows])
                assert found["corruption_accuracy"][client, k, j] == expected, (kind, severity, client)
    assert found["corruption_scores"].shape == (29, 15, 2)
    means = [part.mean(0) for part in np.split(found["corruption_scores"], found["edges"][1:-1])]
    np.testing.assert_allclose(found["corruption_accuracy"], means, atol=1e-15)


def test_rotations_are_those_of_each_image_alone() -> None:
    sim = played(Ditto())
    found = sim.evaluations()
    source = sim.federation.source
    for client in range(6):
        rows = own_rows(sim, client)
        for j, angle in enumerate((-20.0, 0.0, 90.0)):
            images = torch.cat([rotate(source.x[[r]], angle) for r in rows.tolist()])
            assert found["rotation_accuracy"][client, j] == accuracy(sim, client, images, source.y[rows])
    assert np.array_equal(found["rotation_accuracy"][:, 1], final.own_accuracy(found, sim.task.metric))
    assert found["rotation_scores"].dtype == np.uint8  # each is right or wrong
    assert np.array_equal(found["rotation_scores"][:, 1], found["scores"])  # not turned at all, sample by sample


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("evaluation.corruptions=fog", r"evaluation.corruptions=\['fog'\] on synthetic-3.2k: images must be"),
        ("evaluation.rotations=10", r"evaluation.rotations=\[10.0\] on synthetic-3.2k: images must be"),
        ("data.corruption=fog", "data.corruption='fog' on synthetic-3.2k: images must be"),
    ],
)
def test_images_are_asked_of_images_alone(override: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        personafl.run("demo", "data.dataset=synthetic-3.2k", override, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
