"""One set of corrupted images for every client's model, against one client and one image at a time."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import personafl
from personafl import Algorithm, Ditto, Evaluation, FedAvg, Federation, LocalOnly, Metric, Result
from personafl.core import rng
from personafl.data.corruptions import corrupt
from personafl.evaluation import final, image_transforms, matrix, whole_set
from personafl.evaluation.metrics import METRICS
from personafl.experiment import Client
from tests import kills
from tests.evaluation.common import METHODS, SIZES, accuracy, federation, played

KINDS, SEVERITIES = ("fog", "gaussian_noise", "glass_blur"), (2, 5)
WHOLE = Evaluation(eval_every=100, shift="none", corruptions=KINDS, severities=SEVERITIES, corrupted="whole")
BOTH, OWN = dataclasses.replace(WHOLE, corrupted="both"), dataclasses.replace(WHOLE, corrupted="own")
NAMES = {"whole_rows", "whole_accuracy", "whole_corruption_accuracy"}


def with_test_part(fed: Federation) -> Federation:
    """The same data, which came with a test part: every third row."""
    mask = np.arange(sum(SIZES)) % 3 == 0
    return dataclasses.replace(fed, source=dataclasses.replace(fed.source, test=mask))


def alone(x: Tensor, row: int, kind: str, severity: int) -> Tensor:
    """One image corrupted by itself."""
    return corrupt(x[[row]], kind, severity, rng.key(0, "corruption", torch.tensor([row])))


def all_test_rows(fed: Federation, clients: int = 6) -> list[int]:
    return sorted(r for c in range(clients) for r in fed.rows("test", c).tolist())


@pytest.mark.parametrize("algorithm", METHODS, ids=lambda a: type(a).__name__)
def test_every_model_is_scored_on_every_image(algorithm: Algorithm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix, "ROWS", 12)  # 29 test rows: blocks of 12, 12 and 5
    sim = played(algorithm, federation(3, as_bytes=True), evaluation=WHOLE)
    found, source = sim.evaluations(), sim.federation.source
    rows = all_test_rows(sim.federation)
    assert found["whole_rows"].tolist() == rows and len(rows) == 29
    assert found["whole_corruption_accuracy"].shape == (6, 3, 2)
    for client in range(6):
        assert found["whole_accuracy"][client] == accuracy(sim, client, source.x[rows], source.y[rows])
        for k, kind in enumerate(KINDS):
            for j, severity in enumerate(SEVERITIES):
                images = torch.cat([alone(source.x, r, kind, severity) for r in rows])
                expected = accuracy(sim, client, images, source.y[rows])
                assert found["whole_corruption_accuracy"][client, k, j] == expected, (kind, severity, client)


def test_an_image_is_corrupted_as_it_is_among_its_clients_own() -> None:
    fed = federation(3, as_bytes=True)
    rows = whole_set.chosen_rows(fed, WHOLE)
    for kind in KINDS:
        data = whole_set.images(fed, rows, (kind, 5), seed=7)
        common = {int(r): data.x[at] for r, at in zip(rows, data.rows[0], strict=True)}
        for ids in (torch.tensor([0, 3, 4]), torch.tensor([5]), torch.tensor([2, 1])):
            own = fed.examples("test", ids)
            changed = image_transforms.corrupted(own, kind, 5, 7)
            for i in range(len(ids)):
                for m in range(int(own.count[i])):
                    row, image = int(own.rows[i, m]), changed.x[changed.rows[i, m]]
                    assert torch.equal(image, common[row])
                    assert changed.y[changed.rows[i, m]] == fed.source.y[row]
        for r, at in zip(rows, data.rows[0], strict=True):
            assert data.y[at] == fed.source.y[r]


def test_the_set_is_the_test_part_the_data_came_with() -> None:
    fed = with_test_part(federation())
    test_part = list(range(0, sum(SIZES), 3))
    assert whole_set.chosen_rows(fed, WHOLE).tolist() == test_part
    trained_on = {int(r) for c in range(6) for r in fed.rows("train", c)}
    assert trained_on & set(test_part)  # pooled: some are training images
    sim = played(LocalOnly(), fed, evaluation=dataclasses.replace(WHOLE, corruptions=("fog",), severities=(3,)))
    found, source = sim.evaluations(), sim.federation.source
    assert found["whole_rows"].tolist() == test_part
    images = torch.cat([alone(source.x, r, "fog", 3) for r in test_part])
    for client in range(6):
        assert found["whole_corruption_accuracy"][client, 0, 0] == accuracy(sim, client, images, source.y[test_part])


def test_nobody_trains_on_the_set_of_data_without_a_test_part() -> None:
    fed = federation()
    rows = set(whole_set.chosen_rows(fed, WHOLE).tolist())
    assert rows == set(all_test_rows(fed))
    assert all(rows.isdisjoint(fed.rows("train", c).tolist()) for c in range(6))
    empty = dataclasses.replace(fed, source=dataclasses.replace(fed.source, test=np.zeros(sum(SIZES), np.bool_)))
    assert set(whole_set.chosen_rows(empty, WHOLE).tolist()) == rows


def test_test_data_are_not_looked_at_where_validation_data_judge() -> None:
    whole = with_test_part(federation())
    parts = np.split(np.arange(sum(SIZES)), np.cumsum(SIZES)[:-1])
    fed = Federation.build(whole.source, parts, seed=0, validation_share=0.2)
    sim = played(LocalOnly(), fed, evaluation=dataclasses.replace(WHOLE, split="validation"))
    expected = sorted(r for c in range(6) for r in fed.rows("validation", c).tolist())
    assert sim.evaluations()["whole_rows"].tolist() == expected


def test_a_large_set_is_thinned_out_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    fed = with_test_part(federation())  # 38 rows: 0, 3, ..., 111
    monkeypatch.setattr(whole_set, "MOST", 38)
    assert len(whole_set.chosen_rows(fed, WHOLE)) == 38
    monkeypatch.setattr(whole_set, "MOST", 10)
    # place i is floor(3.8 i) of the 38: 0, 3, 7, 11, 15, 19, 22, 26, 30, 34
    assert [r // 3 for r in whole_set.chosen_rows(fed, WHOLE).tolist()] == [0, 3, 7, 11, 15, 19, 22, 26, 30, 34]


def test_own_numbers_are_the_same_beside_those_of_the_set() -> None:
    own, whole, both = (played(Ditto(), evaluation=asked).evaluations() for asked in (OWN, WHOLE, BOTH))
    assert both.keys() == own.keys() | NAMES
    assert whole.keys() == both.keys() - {"corruption_scores", "corruption_accuracy"}
    for name, held in (own | whole).items():
        assert np.array_equal(both[name], held), name


@pytest.mark.parametrize("norm", [False, True])
def test_stacks_and_passes_change_nothing(norm: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    one = played(Ditto(), evaluation=WHOLE, norm=norm, chunk=100).evaluations()
    for chunk in (1, 4):
        monkeypatch.setattr(whole_set, "KEPT", 1 if chunk == 1 else 3 * 29 * 64 * 4)  # one cell, or three
        other = played(Ditto(), evaluation=WHOLE, norm=norm, chunk=chunk).evaluations()
        assert one.keys() == other.keys()
        for name, held in one.items():
            assert np.array_equal(held, other[name]), (name, chunk)


def test_images_are_held_as_far_as_memory_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    fed = federation()
    rows = whole_set.chosen_rows(fed, WHOLE)
    cells = [None, *((k, s) for k in KINDS for s in SEVERITIES)]
    assert whole_set.passes(fed, WHOLE, rows) == [cells]
    monkeypatch.setattr(whole_set, "KEPT", 4 * 29 * 64 * 3)  # three times 29 images of 64 floats
    assert whole_set.passes(fed, WHOLE, rows) == [cells[:3], cells[3:6], cells[6:]]
    monkeypatch.setattr(whole_set, "KEPT", 1)
    assert whole_set.passes(fed, WHOLE, rows) == [[c] for c in cells]


def test_a_block_is_corrupted_once_for_all_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[str, int, int]] = []
    real = image_transforms.corrupted

    def counted(data: Any, kind: str, severity: int, seed: int) -> Any:
        made.append((kind, severity, int(data.rows[0, 0])))
        return real(data, kind, severity, seed)

    sim = played(LocalOnly(), evaluation=WHOLE, chunk=1)  # six stacks
    monkeypatch.setattr(matrix, "ROWS", 12)
    monkeypatch.setattr(image_transforms, "corrupted", counted)
    sim.evaluations()
    assert len(made) == 3 * 2 * 3  # kinds, severities, blocks
    assert len(set(made)) == len(made)


def test_a_model_that_looks_at_batches_is_shown_the_set_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix, "ROWS", 12)
    sim = played(FedAvg(), evaluation=WHOLE, norm=True)
    assert sim.model.looks_at_batches
    found, source = sim.evaluations(), sim.federation.source
    rows = all_test_rows(sim.federation)
    params = {n: t[None] for n, t in sim.server.items()}

    def right(x: Tensor) -> float:
        with torch.no_grad():
            return float((sim.model(params, x[None])[0].argmax(1) == source.y[rows]).double().mean())

    assert (found["whole_accuracy"] == right(source.x[rows])).all()
    for k, kind in enumerate(KINDS):
        for j, severity in enumerate(SEVERITIES):
            images = torch.cat([alone(source.x, r, kind, severity) for r in rows])
            assert (found["whole_corruption_accuracy"][:, k, j] == right(images)).all()


def test_a_metric_that_is_no_mean_is_of_the_set_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """The share of images taken for class 0, squared: no mean over the blocks."""
    monkeypatch.setattr(matrix, "ROWS", 12)
    square = Metric(
        lambda logits, _: torch.stack([(logits.argmax(1) == 0).float()] * 2, 1),
        "square",
        reduce=lambda found: found.mean(0)[..., 0] * found.mean(0)[..., 1],
    )
    sim = played(LocalOnly(), evaluation=dataclasses.replace(WHOLE, metric=square))
    found, source = sim.evaluations(), sim.federation.source
    rows = all_test_rows(sim.federation)
    for client in range(6):
        model = Client(client, sim, sim.deployed_models(sim.model, torch.tensor([client])))
        of_first = sum(int(model.predict(source.x[[r]]).argmax()) == 0 for r in rows)
        assert found["whole_accuracy"][client] == pytest.approx((of_first / 29) ** 2)
    assert found["whole_accuracy"].max() > 0


def test_a_sample_of_clients_and_newcomers_are_scored_on_the_same_set() -> None:
    whole = played(Ditto(), evaluation=WHOLE).evaluations()
    few = played(Ditto(), evaluation=dataclasses.replace(WHOLE, clients=2)).evaluations()
    assert len(few["ids"]) == 2 and np.array_equal(few["whole_rows"], whole["whole_rows"])
    for name in ("whole_accuracy", "whole_corruption_accuracy"):
        assert np.array_equal(few[name], whole[name][few["ids"]]), name
    sim = played(LocalOnly(), dataclasses.replace(federation(), num_clients=4, unseen=2), evaluation=WHOLE)
    found, source = sim.evaluations(), sim.federation.source
    held = final.newcomers(found)
    rows = all_test_rows(sim.federation)  # theirs too
    assert found["whole_rows"].tolist() == held["whole_rows"].tolist() == rows
    assert held["whole_corruption_accuracy"].shape == (2, 3, 2)
    model = Client(5, sim, sim.newcomer_models(sim.model, torch.tensor([5])))
    images = torch.cat([alone(source.x, r, "glass_blur", 2) for r in rows])
    right = [int(model.predict(x[None]).argmax()) == int(y) for x, y in zip(images, source.y[rows], strict=True)]
    assert held["whole_corruption_accuracy"][1, 2, 0] == sum(right) / len(rows)


def test_nothing_is_scored_without_corruptions() -> None:
    asked = dataclasses.replace(WHOLE, corruptions=())
    assert played(LocalOnly(), evaluation=asked).evaluations().keys() == {"ids", "edges", "rows", "scores"}


def test_the_summary_has_means_over_clients() -> None:
    cells = np.array([[[0.1, 0.3]], [[0.5, 0.3]]])  # two clients, fog, severities 2 and 5
    found = {"kinds": np.array(["fog"]), "severities": np.array([2, 5]), "whole_corruption_accuracy": cells}
    metric = METRICS["classification"]["accuracy"]
    out = final.robustness(found | {"whole_accuracy": np.array([0.4, 0.8])}, WHOLE, metric)
    assert out.keys() == {"whole_corruptions", "whole_corruption_average", "whole_clean"}
    assert out["whole_corruptions"]["fog"]["2"] == pytest.approx({"mean": 0.3, "std": 0.2})
    assert out["whole_corruptions"]["fog"]["5"] == pytest.approx({"mean": 0.3, "std": 0.0})
    assert out["whole_corruption_average"] == pytest.approx({"mean": 0.3, "std": 0.1})  # clients: 0.2, 0.4
    assert out["whole_clean"] == pytest.approx({"mean": 0.6, "std": 0.2})


RECIPE: dict[str, Any] = {
    "data": {"dataset": "digits", "num_clients": 4},
    "training": {"num_rounds": 2, "join_ratio": 0.5, "local_epochs": 1, "batch_size": 64},
    "evaluation": {"eval_every": 2, "shift": "none", "corruptions": ["fog"], "severities": [2, 4], "corrupted": "both"},
    "algorithms": [{"name": "local"}],
}


def test_results_are_read_back_also_of_a_run_that_was_interrupted(tmp_path: Path) -> None:
    def cut(*_: object) -> None:
        raise KeyboardInterrupt

    made = personafl.run(RECIPE, out=tmp_path / "run")["local"]
    with pytest.raises(KeyboardInterrupt):
        personafl.run(RECIPE, out=tmp_path / "cut", watch=cut, checkpoint_every=1)
    personafl.resume(tmp_path / "cut", quiet=True)
    assert kills.differences(tmp_path / "cut", tmp_path / "run") == []
    again = Result.load(tmp_path / "run")
    assert again.recipe.evaluation.corrupted == "both"
    robust = json.loads((tmp_path / "run" / "local" / "seed-0" / "summary.json").read_text())["robustness"]
    assert again["local"].summary["robustness"] == made.summary["robustness"] == robust
    assert robust.keys() == {
        *("corruptions", "corruption_average"),
        *("whole_corruptions", "whole_corruption_average", "whole_clean"),
    }
    for name, held in made.evaluations.items():
        assert np.array_equal(held, again["local"].evaluations[name]), name
    assert robust["whole_clean"]["mean"] == pytest.approx(made.evaluations["whole_accuracy"].mean())
    # The numbers a loaded run would be scored with are those it was scored with.
    for name, held in again["local"].simulation.evaluations().items():
        assert np.array_equal(held, made.evaluations[name]), name
    page = (tmp_path / "run" / "report.html").read_text()
    assert "Corrupted images</h2>" in page and "Corrupted images, every model on the whole test set</h2>" in page
    assert "Every model on the whole test set: local" in (tmp_path / "run" / "table.md").read_text()


@pytest.mark.parametrize("which", ["whole", "both"])
def test_images_are_asked_of_images_alone(which: str, tmp_path: Path) -> None:
    asked = ("data.dataset=synthetic-3.2k", "evaluation.corruptions=fog", f"evaluation.corrupted={which}")
    message = rf"evaluation.corrupted='{which}', evaluation.corruptions=\['fog'\] on synthetic-3.2k: images must be"
    with pytest.raises(ValueError, match=message):
        personafl.run("demo", *asked, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_another_word_is_refused() -> None:
    with pytest.raises(ValueError, match=r"evaluation.corrupted='all': possible are own, whole, both"):
        personafl.config.load("demo", ["evaluation.corrupted=all"])
