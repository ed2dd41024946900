"""Recipes: TOML in, objects out, and one clear line for everything that cannot be."""

from __future__ import annotations

import tomllib
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from personafl import DMPFL, Ditto, FedAvg, Robust, config
from personafl.core.errors import Note, UserError


def test_the_demo_has_the_seven_methods_of_the_first_screen() -> None:
    recipe = config.load()
    six = ["local", "fedavg", "fedavg-ft", "ditto", "dm-pfl", "dm-pfl-plus"]
    assert [m.label for m in recipe.algorithms] == [*six, "fedavg-adaptive"]
    assert recipe.data.dataset == "digits"
    assert recipe.data.num_clients == 20


@pytest.mark.parametrize("name", sorted(config.recipes()))
def test_shipped_recipes_resolve_to_themselves(name: str) -> None:
    recipe = config.load(name)
    again = config.load(tomllib.loads(config.dump(recipe)))
    assert again.algorithms == recipe.algorithms
    assert (again.data, again.model, again.training, again.evaluation) == (
        recipe.data,
        recipe.model,
        recipe.training,
        recipe.evaluation,
    )
    assert {"local", "fedavg-ft"} <= {m.name for m in recipe.algorithms}


def test_overrides_reach_sections_and_methods() -> None:
    recipe = config.load(
        None, ["training.num_rounds=7", "dm-pfl.sparsity=0.8", "data.alpha=1", "evaluation.degrees=0,1"]
    )
    assert recipe.training.num_rounds == 7
    assert recipe.data.partition_settings == {"alpha": 1.0, "self_balancing": True}
    assert isinstance(recipe.data.partition_settings["alpha"], float)
    assert recipe.evaluation.degrees == (0.0, 1.0)
    by_label = {m.label: m.algorithm for m in recipe.algorithms}
    assert by_label["dm-pfl"] == DMPFL(sparsity=0.8, **_demo("dm-pfl", "sparsity"))


def _demo(label: str, *but: str) -> dict[str, object]:
    """What the demo sets for a method."""
    raw = tomllib.loads(config.recipes()["demo"])["algorithms"]
    mine = next(m for m in raw if m.get("label", m["name"]) == label)
    return {k: v for k, v in mine.items() if k not in ("name", "label", *but)}


def test_a_robust_mean_is_a_name_or_a_table() -> None:
    chosen = [
        config.load(None, ["algorithms=ditto", *overrides]).algorithms[0].algorithm.robust
        for overrides in (
            [],
            ["ditto.robust=krum"],
            ["ditto.robust=krum", "ditto.robust.share=0.3"],
            ["ditto.robust.bound=2"],
            ["ditto.robust=none"],
        )
    ]
    assert chosen == [None, Robust(rule="krum"), Robust(rule="krum", share=0.3), Robust(bound=2.0), None]


def test_algorithms_chooses_exactly_those_and_keeps_their_settings() -> None:
    recipe = config.load(None, ["dm-pfl.sparsity=0.8", "algorithms=dm-pfl,fedrep", "fedrep.head_epochs=3"])
    assert [m.label for m in recipe.algorithms] == ["dm-pfl", "fedrep"]
    assert config.settings(recipe.algorithms[0].algorithm)["sparsity"] == 0.8
    assert config.settings(recipe.algorithms[1].algorithm)["head_epochs"] == 3.0


def test_one_method_twice_under_two_labels() -> None:
    raw = {"algorithms": [{"name": "ditto"}, {"name": "ditto", "label": "near", "proximal_weight": 2}]}
    methods = config.load(raw, ["near.proximal_weight=3"]).algorithms
    assert [(m.label, m.algorithm) for m in methods] == [("ditto", Ditto()), ("near", Ditto(proximal_weight=3.0))]


def test_a_method_of_ones_own_by_dotted_path() -> None:
    found = config.load({"algorithms": [{"name": "personafl.methods.ditto:Ditto", "label": "mine"}]})
    assert found.algorithms[0].algorithm == Ditto()


def test_natural_takes_all_clients_unless_told() -> None:
    assert config.load(None, ["data.partition=natural"]).data.num_clients is None
    assert config.load(None, ["data.partition=natural", "data.num_clients=5"]).data.num_clients == 5
    assert "num_clients" not in config.dump(config.load(None, ["data.partition=natural"]))


def test_a_folder_brings_its_clients_unless_told(tmp_path: Path) -> None:
    plain, pfllib = tmp_path / "homes", tmp_path / "them"
    plain.mkdir()
    for part in ("train", "test"):
        (pfllib / part).mkdir(parents=True)

    def asked(*overrides: str, **recipe: object) -> tuple[object, ...]:
        data = config.load({"data": recipe, "algorithms": [{"name": "local"}]}, overrides).data
        return data.partition, data.num_clients, data.official_test

    there = {"dataset": "mnist", "partition": "shards", "num_clients": 7, "official_test": "global"}
    assert asked(f"data.dataset={plain}", **there) == ("natural", None, "pooled")
    assert asked(f"data.dataset={pfllib}", **there) == ("natural", None, "dealt")
    assert asked(f"data.dataset={pfllib}", "data.num_clients=3", "data.official_test=pooled", **there) == (
        "natural",
        3,
        "pooled",
    )
    assert asked(f"data.dataset={plain}", "data.partition=iid", **there) == ("iid", 7, "global")
    assert asked("data.dataset=cifar10", **there) == ("shards", 7, "global")
    assert asked(dataset=str(plain), num_clients=3) == ("natural", 3, "pooled")
    assert asked(dataset=str(plain), partition="iid", num_clients=3) == ("iid", 3, "pooled")


def test_settings_a_partition_does_not_use_are_dropped() -> None:
    text = config.dump(config.load(None, ["data.partition=iid"]))
    assert "alpha" not in text
    assert "classes_per_client" not in text


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.partition=iid", "data.alpha=1"], r"data.alpha \(iid does not use it\)"),
        (
            ["data.partition=p.json", "data.num_clients=5", "training.lr=0.2", "data.test_share=0.5"],
            r"data.num_clients \(the partition file says who holds what\), data.test_share \(the partition file .*\)",
        ),
        (
            ["data.partition=shards", "data.test_samples_per_class=5"],
            r"data.test_samples_per_class \(goes with official_test=dealt\)",
        ),
        (
            ["data.partition=shards", "data.official_test=dealt", "data.test_share=0.5"],
            r"data.test_share \(the test part is dealt\)",
        ),
        (["data.corruption_severity=2"], r"data.corruption_severity \(data.corruption=none\)"),
        (["data.small_clients=drop"], r"data.small_clients \(goes with partition=natural\)"),
        (["data.missing=mean"], r"data.missing \(goes with data of one's own\)"),
        (
            ["data.dataset=mine.npz", "data.label=y", "data.image_size=8", "data.missing=mean"],
            r"data.label \(goes with a folder of one's own\), data.image_size \(goes with a folder of one's own\)",
        ),
        (["faults.late=stale"], r"faults.late \(faults.straggler_ratio=0\)"),
        (["faults.fault=nan", "faults.strength=2"], r"faults.fault \(faults.faulty_ratio=0\), faults.strength .*"),
        (["faults.faulty_ratio=0.1", "faults.strength=2"], r"faults.strength \(faults.fault=nan\)"),
        (["evaluation.severities=3"], r"evaluation.severities \(no evaluation.corruptions\)"),
        (["evaluation.corrupted=whole"], r"evaluation.corrupted \(no evaluation.corruptions\)"),
    ],
)
def test_what_has_no_effect_is_said(overrides: list[str], message: str) -> None:
    with pytest.warns(UserWarning, match=f"^without effect here: {message}$"):
        config.load(None, overrides)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.global_rounds=3", "did you mean num_rounds?"),
        ("training.learning_rate=3", "did you mean lr?"),
        ("data.alhpa=3", "did you mean alpha?"),
        ("data.alpha=0", "data.alpha=0.0: must be greater than 0"),
        ("data.alpha=-1", "data.alpha=-1.0: must be greater than 0"),
        ("data.alpha=nan", "data.alpha=nan: must be finite"),
        ("data.num_clients=0", "data.num_clients=0: must be at least 1"),
        ("data.test_share=1", r"data.test_share=1.0: must be in \[0, 1\)"),
        ("data.dataset=mnits", "no such data set"),
        ("data.partition=dirichelt", "did you mean dirichlet?"),
        ("model.name=mpl", "did you mean mlp?"),
        ("model.buffers=forget", "possible are average, local, drop"),
        ("training.lr=fast", "training.lr='fast': must be a number"),
        ("training.num_rounds=2.5", "training.num_rounds=2.5: must be a whole number"),
        ("training.num_rounds=true", "training.num_rounds=True: must be a whole number"),
        ("training.join_ratio=0", r"must be in \(0, 1\]"),
        ("training.loss=crossentropy", "did you mean cross_entropy?"),
        ("evaluation.shift=weather", "possible are donor, pool, label, none"),
        ("evaluation.corruptions=foggy", "no such corruption; did you mean fog?"),
        ("evaluation.corruptions=fog,fog", r"evaluation.corruptions=\['fog', 'fog'\]: must be named once each"),
        ("evaluation.corruptions=all,fog", r"evaluation.corruptions=\['all', 'fog'\]: must be all, or some kinds"),
        ("evaluation.degrees=0.5,0.5", r"evaluation.degrees=\[0.5, 0.5\]: must be named once each"),
        ("evaluation.severities=0", r"evaluation.severities=\[0\]: must be some of 1 to 5"),
        ("evaluation.rotations=left", "evaluation.rotations='left': must be a number"),
        ("evaluation.matrix=1", "evaluation.matrix=1: must be true or false"),
        ("data.corruption=perclient", "did you mean per-client?"),
        ("data.corruption_severity=6", "data.corruption_severity=6: must be 1 to 5"),
        ("data.missing=median", "data.missing='median': possible are refuse, mean, zero"),
        ("data.small_clients=keep", "data.small_clients='keep': possible are refuse, drop"),
        ("data.label=a,a", r"data.label=\['a', 'a'\]: must be names of columns, each once"),
        ("data.image_size=-1", "data.image_size=-1: must be a number of pixels, or 0"),
        ("evaluation.degrees=0,2", "must be shares in"),
        ("evaluation.clients=some", "possible are all, selected, a whole number"),
        ("faults.fault=lie", "faults.fault='lie': possible are nan, inf, .*, sign-flip, noise"),
        ("faults.drop_rate=2", r"faults.drop_rate=2.0: must be in \[0, 1\]"),
        ("ditto.robust=mean", "ditto.robust: rule='mean': possible are clip, median, trimmed-mean, krum"),
        ("ditto.robust.share=0.5", r"share=0.5: must be in \[0, 0.5\)"),
        ("ditto.robust.trim=0.1", "ditto.robust.trim=0.1: no such setting of"),
        ("dm-pfl.sparsity=1", r"dm-pfl: sparsity=1.0: must be in \[0, 1\)"),
        ("dm-pfl.sparcity=0.5", "did you mean sparsity?"),
        ("algorithms=dmpfl", "did you mean dm-pfl?"),
        ("algorithms=no.such:Thing", "cannot be imported"),
        ("algorithms=personafl.core.tree:select", "not a subclass"),
        ("algorithms=", "no algorithms"),
        ("algorithms=ditto,ditto", "two methods are called 'ditto'"),
        ("nonsense", "expected section.key=value"),
        ("fedprox.mu=1", "neither a section"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(override: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as refused:
        config.load(None, [override])
    assert "\n" not in str(refused.value)


def test_corruptions_beyond_the_standard_fifteen_go_by_name() -> None:
    recipe = config.load(None, ["evaluation.corruptions=gaussian_blur,speckle_noise", "data.corruption=speckle_noise"])
    assert recipe.evaluation.corruptions == ("gaussian_blur", "speckle_noise")
    assert recipe.data.corruption == "speckle_noise"


def test_an_unknown_section_and_a_broken_file_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"section \[trainig\]: no such section; did you mean training?"):
        config.load({"trainig": {}, "algorithms": [{"name": "local"}]})
    broken = tmp_path / "broken.toml"
    broken.write_text("[data\n")
    with pytest.raises(UserError, match="not valid TOML"):
        config.load(broken)
    with pytest.raises(UserError, match="no such file"):
        config.load(tmp_path / "absent.toml")


def test_a_label_that_would_leave_the_run_folder_is_refused() -> None:
    with pytest.raises(UserError, match="names a folder"):
        config.load({"algorithms": [{"name": "local", "label": "../up"}]})


OWN = {
    "training": {"lr": 0.5},
    "algorithms": [
        {"name": "fedavg", "lr": 0.3, "weights": "uniform"},
        {"name": "fedavg", "label": "slow", "lr": 0.1, "prior_free": True},
        {"name": "dm-pfl", "lr": 0.7, "allocation": "erk"},
        Ditto(lr=0.9, proximal_weight=3.0),
    ],
}
"""A recipe with settings of its own for methods."""


@pytest.mark.parametrize(
    "form",
    [
        ["fedavg"],
        "fedavg",
        {"name": "fedavg"},
        [{"name": "fedavg"}],
        {"fedavg": "fedavg"},
        {"fedavg": {"name": "fedavg"}},
        FedAvg,
        [FedAvg],
        FedAvg(weights="uniform"),
    ],
    ids=str,
)
def test_a_method_has_the_recipes_own_settings_in_whatever_form_it_is_named(form: Any) -> None:
    named = config.load(OWN, ["algorithms=fedavg"]).algorithms
    assert [(m.label, m.algorithm) for m in named] == [("fedavg", FedAvg(lr=0.3, weights="uniform"))]
    assert config.load(OWN, given={"algorithms": form}).algorithms == named


def test_what_a_method_is_given_stands_above_the_recipes_own_settings() -> None:
    forms = [
        config.load(OWN, ["algorithms=dm-pfl", "dm-pfl.sparsity=0.8"]),
        config.load(OWN, given={"algorithms": {"name": "dm-pfl", "sparsity": 0.8}}),
        config.load(OWN, ["dm-pfl.sparsity=0.8"], {"algorithms": ["dm-pfl"]}),
        config.load(OWN, ["algorithms=dm-pfl", "dm-pfl.sparsity=0.8"], {"algorithms": ["fedavg"]}),
    ]
    for recipe in forms:
        assert [m.algorithm for m in recipe.algorithms] == [DMPFL(lr=0.7, allocation="erk", sparsity=0.8)]
    other = config.load(OWN, given={"algorithms": {"name": "fedavg", "lr": "recipe"}})
    assert other.algorithms[0].algorithm == FedAvg(weights="uniform")


def test_labels_of_a_recipe_are_names_of_its_methods() -> None:
    asked = ["slow", "ditto", {"name": "slow", "label": "slower", "lr": 0.01}, {"name": "fedavg", "label": "second"}]
    found = {m.label: m.algorithm for m in config.load(OWN, given={"algorithms": asked}).algorithms}
    assert found == {
        "slow": FedAvg(lr=0.1, prior_free=True),
        "ditto": Ditto(lr=0.9, proximal_weight=3.0),
        "slower": FedAvg(lr=0.01, prior_free=True),
        "second": FedAvg(lr=0.3, weights="uniform"),
    }


def test_an_object_keeps_its_settings_and_takes_the_recipes_rate_where_it_has_none() -> None:
    asked = [DMPFL(sparsity=0.8), FedAvg(lr=0.2), Ditto()]
    dm_pfl, fedavg, ditto = (m.algorithm for m in config.load(OWN, given={"algorithms": asked}).algorithms)
    assert dm_pfl == DMPFL(sparsity=0.8, lr=0.7)  # the recipe's allocation is not the object's
    assert fedavg == FedAvg(lr=0.2)
    assert ditto == Ditto(lr=0.9)


def test_settings_that_hold_for_all_methods_stand_above_a_shipped_recipes() -> None:
    for overrides, given in ((["training.lr=0.05"], {}), ([], {"training": {"lr": 0.05}})):
        for form in ({"algorithms": ["fedavg", "dm-pfl"]}, {"algorithms": [FedAvg(), DMPFL(allocation="erk")]}):
            recipe = config.load("demo", overrides, given | form)
            assert (recipe.training.lr, [m.algorithm.lr for m in recipe.algorithms]) == (0.05, [None, None])


def test_methods_that_are_given_import_no_code_of_an_untrusted_recipe() -> None:
    recipe = {"algorithms": [{"name": "nowhere:Evil", "label": "fedavg"}, {"name": "fedpews", "base": "nowhere:Evil"}]}
    found = config.load(recipe, given={"algorithms": ["fedavg", "fedpews"]}, trust=False)
    assert [(m.name, m.label) for m in found.algorithms] == [("fedavg", "fedavg"), ("fedpews", "fedpews")]
    with pytest.raises(UserError, match="cannot be imported"):
        config.load(recipe, given={"algorithms": ["fedavg"]})


def test_tables_given_in_python_mean_what_overrides_mean(tmp_path: Path) -> None:
    for c in "ab":
        np.savez(tmp_path / f"{c}.npz", x=np.zeros((9, 3), np.float32), y=np.arange(9) % 2)
    cases: list[tuple[list[str], dict[str, Any]]] = [
        (["data.dataset=har", "data.partition=natural"], {"data": {"dataset": "har", "partition": "natural"}}),
        ([f"data.dataset={tmp_path}"], {"data": str(tmp_path)}),
        ([f"data.dataset={tmp_path}"], {"data": tmp_path}),
        ([f"data.dataset={tmp_path}", "data.partition=iid"], {"data": {"dataset": tmp_path, "partition": "iid"}}),
        (["training.lr=0.1", "training.momentum=0.5"], {"training": {"lr": 0.1, "momentum": 0.5}}),
        (["evaluation.shift=none"], {"evaluation": {"shift": "none"}}),
        (["faults.straggler_ratio=0.5"], {"faults": {"straggler_ratio": 0.5}}),
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Note)  # the demo's rates are not for other data
        for overrides, given in cases:
            assert config.load("demo", overrides) == config.load("demo", given=given)
    for overrides, given in (
        (["data.partition=iid", "data.alpha=2"], {}),
        ([], {"data": {"partition": "iid", "alpha": 2}}),
    ):
        with pytest.warns(UserWarning, match=r"without effect here: data.alpha \(iid does not use it\)"):
            config.load("demo", overrides, given)
