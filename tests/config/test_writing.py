"""A recipe written as TOML says what it said before, whatever its strings hold."""

from __future__ import annotations

import dataclasses
import tomllib
from pathlib import Path

import pytest

from personafl import DMPFL, FedPeWS, FedRep, Inherit, UserError, config
from personafl.config.recipe import Data, Method, ModelChoice, Recipe
from personafl.experiment import run_folder

STRINGS = [
    "two\nlines",
    'a "quoted" name',
    "back\\slash",
    "tab\tand\rreturn",
    "\x01\x1b\x1f\x7f",  # a zero cannot be in a path, and is refused there
    "Zürich 漢字 🙂",
    "'",
    "#",
    "",
]


@pytest.mark.parametrize("text", STRINGS)
def test_any_string_survives_in_sections_and_methods(text: str) -> None:
    model = ModelChoice(head=f"fc{text}")
    recipe = Recipe("one", Data(dataset=f"./{text}"), model, algorithms=(Method(f"one {text}", text, FedRep()),))
    raw = tomllib.loads(config.dump(recipe))
    assert raw["data"]["dataset"] == f"./{text}"
    assert raw["model"]["head"] == f"fc{text}"
    assert [(m["name"], m["label"]) for m in raw["algorithms"]] == [(text, f"one {text}")]


def test_tables_within_tables_belong_to_their_method() -> None:
    """FedPeWS around DM-PFL that inherits is a table within a table; the methods beside it have none, and another."""
    base = DMPFL(sparsity=0.75, inherit=Inherit(transfer="kd", temperature=2.0))
    methods = (
        Method("first", "fedrep", FedRep(head_epochs=3.0)),
        Method("warm", "fedpews", FedPeWS(base=base)),
        Method("last", "fedrep", FedRep(inherit=Inherit(rate=0.5))),
    )
    recipe = dataclasses.replace(config.load(), algorithms=methods)
    raw = tomllib.loads(config.dump(recipe))
    assert [m["label"] for m in raw["algorithms"]] == ["first", "warm", "last"]
    first, warm, last = raw["algorithms"]
    assert warm["base"]["name"] == "dm-pfl"
    assert warm["base"]["sparsity"] == 0.75
    assert warm["base"]["inherit"]["transfer"] == "kd"
    assert last["inherit"] == {**dataclasses.asdict(Inherit()), "rate": 0.5}
    assert {"base", "inherit"}.isdisjoint(first)
    assert ("inherit" in warm, "base" in last) == (False, False)
    again = config.load(raw)
    assert again.algorithms == methods
    assert dataclasses.replace(again, name=recipe.name) == recipe


def test_sections_come_first_and_settings_stand_in_their_order() -> None:
    recipe = dataclasses.replace(config.load("inherited-model"), model=ModelChoice(head="fc.*"))
    text = config.dump(recipe)
    heads = [line for line in text.splitlines() if line.startswith("[")]
    wanted = ["[data]", "[model]", "[training]", "[evaluation]", "[faults]"]
    for m in recipe.algorithms:
        wanted += ["[[algorithms]]", *(["[algorithms.inherit]"] if m.algorithm.inherit else [])]
    assert heads == wanted
    raw = tomllib.loads(text)
    assert list(raw["model"]) == ["name", "head", "buffers"]
    assert list(raw["training"])[:3] == ["num_rounds", "join_ratio", "local_epochs"]
    assert all(list(m)[:2] == ["name", "label"] for m in raw["algorithms"])
    assert "\nlr_milestones = []\n" in text
    assert "\nseed = 0\n" in text


def test_a_run_folder_keeps_letters_of_any_language(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is UTF-8, as TOML wants it, also where that is not what files are by default."""
    monkeypatch.setattr("io.text_encoding", lambda encoding, *_: encoding or "ascii")
    recipe = dataclasses.replace(config.load(), model=ModelChoice(head="köpfe.*"))
    run_folder.begin(tmp_path, recipe, None, [0], run_folder.Conditions())
    assert 'head = "köpfe.*"' in (tmp_path / "recipe.toml").read_bytes().decode("utf-8")
    assert config.load(tmp_path / "recipe.toml").model.head == "köpfe.*"


@pytest.mark.parametrize("value", ["auto", "half", "standardize", ((0.5,), (0.25,)), ((0.1, 0.2, 0.3), (0.5,))])
def test_a_normalisation_is_read_back(value: object) -> None:
    recipe = dataclasses.replace(config.load(), data=Data(normalize=value))
    assert config.load(tomllib.loads(config.dump(recipe))).data.normalize == value


def test_what_no_file_can_hold_is_refused_by_its_line() -> None:
    recipe = config.load({"model": {"name": "mlp", "head": "caf\udce9"}, "algorithms": ["fedavg"]})
    with pytest.raises(UserError, match=r"not UTF-8: 'head = \"caf\\udce9\"'"):
        config.dump(recipe)
