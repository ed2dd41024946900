"""The pages of the methods against the code: golden traces, settings, names and files."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import personafl
from personafl import ALGORITHMS, Evaluation, Inherit, Simulation, StackedModel
from personafl.config import reference
from personafl.core.algorithm import Algorithm
from personafl.core.method_settings import FROM_TRAINING, RECIPE
from tests.references import golden
from tests.test_references import ENGINE

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "docs" / "algorithms"
ROOMS = {"accel", "core", "data", "engine", "methods", "plugins", "simulation", "sparse", "storage"}
"""Packages whose modules and their contents the pages of methods may name."""
NAMES = sorted(ALGORITHMS)
INDEX = PAGES / "README.md"

trace = cache(golden.trace)


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    """Tensors this small lose time to threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def page(name: str) -> str:
    return (PAGES / f"{name}.md").read_text(encoding="utf-8")


def section(text: str, title: str) -> str:
    """What stands under a heading."""
    found = re.search(rf"^## {re.escape(title)}$(.*?)(?=^## |\Z)", text, re.M | re.S)
    assert found, f"no section {title!r}"
    return found[1]


def tables(text: str, first: str) -> list[list[str]]:
    """The cells of all rows of tables whose header begins with a word."""
    rows, inside = [], False
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        inside = bool(cells) and (inside or cells[0] == first)
        if inside and cells[0] != first and set(cells[0]) != {"-"}:
            rows.append(cells)
    return rows


def shown(value: object) -> str:
    """A default as the pages write it."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Algorithm):
        return reference.toml_value(value)
    return f"{type(value).__name__}()" if dataclasses.is_dataclass(value) else str(value)


def defaults(kind: type[Any]) -> dict[str, str]:
    found = {f.name: shown(f.default) for f in dataclasses.fields(kind) if f.name != "bound"}
    return found | {n: RECIPE for n in FROM_TRAINING if issubclass(kind, Algorithm) and found[n] == "none"}


def told(text: str) -> dict[str, str]:
    """Settings and defaults as a page gives them."""
    return {cells[0].strip("`"): cells[1].strip("`") for cells in tables(text, "setting")}


def test_every_method_has_a_page_and_a_line_in_the_index() -> None:
    assert sorted(p.stem for p in PAGES.glob("*.md") if p != INDEX) == NAMES
    rows = tables(INDEX.read_text(encoding="utf-8"), "name")
    assert [cells[0] for cells in rows] == [f"[{name}]({name}.md)" for name in ALGORITHMS]


@pytest.mark.parametrize("name", NAMES)
def test_a_page_shows_the_trace_of_the_slow_reference(name: str) -> None:
    text = page(name)
    (block,) = re.findall(r"^```golden\n(.*?)^```$", text, re.M | re.S)
    found = [line.split() for line in block.splitlines()[1:]]
    wanted = trace(name)
    assert [row[0] for row in found] == [label for label, _ in wanted]
    for (label, *cells), (_, margins) in zip(found, wanted, strict=True):
        for cell, margin in zip(cells, margins, strict=True):
            if margin is None:
                assert cell == "-", label
            else:
                assert float(cell) == pytest.approx(margin, abs=1e-6), label


@pytest.mark.parametrize("name", NAMES)
def test_the_engine_gives_the_trace_of_the_slow_reference(name: str) -> None:
    module, federation = golden.world()
    settings = ENGINE.get(name, dict)(golden.SETTINGS.get(name, {}))
    model = StackedModel(module, federation.source.x[:2])
    quiet = Evaluation(shift="none", eval_every=1000)
    sim = Simulation(federation, model, ALGORITHMS[name](**settings), golden.TRAINING, quiet)
    x = torch.tensor([[golden.AT]], dtype=torch.float64)
    assert len(sim.schedule) == len(trace(name))
    for label, wanted in trace(name):
        sim.step()
        with torch.no_grad():
            common = sim.common()
            found = [None if common is None else sim.algorithm.common_answer(sim.model, common, x)[0]]
            for c in range(federation.num_clients):
                ready = sim.deployed_models(sim.model, torch.tensor([c]))
                found.append(sim.algorithm.predict(sim.model, ready, x)[0])
        for logits, margin in zip(found, wanted, strict=True):
            assert golden.margin(logits) == (None if margin is None else pytest.approx(margin, abs=1e-9)), label


@pytest.mark.parametrize("name", NAMES)
def test_a_trace_says_how_it_was_made(name: str) -> None:
    said = section(page(name), "Golden trace")
    assert f"`python -m tests.references.golden {name}`" in said
    listed = " ".join(said[said.index("Settings: ") : said.index("```golden")].split())
    changes = {k: f'"{v}"' if isinstance(v, str) else shown(v) for k, v in golden.SETTINGS.get(name, {}).items()}
    assert dict(re.findall(r"`(\w+) = ([^`]+)`", listed)) == changes
    assert ("the defaults" in listed) == (not changes)


@pytest.mark.parametrize("name", NAMES)
def test_a_page_gives_the_true_defaults_of_all_own_settings(name: str) -> None:
    true, given = defaults(ALGORITHMS[name]), told(page(name))
    nested = {f"inherit.{k}": v for k, v in defaults(Inherit).items()} if name == "fedphp" else {}
    assert given == {k: (true | nested).get(k, "no such setting") for k in given}
    usual = defaults(personafl.DMPFL if name == "dm-pfl-plus" else Algorithm)
    own = {k for k, v in true.items() if usual.get(k) != v} | nested.keys()
    assert own <= given.keys()


def test_the_index_gives_the_settings_all_methods_have() -> None:
    assert told(INDEX.read_text(encoding="utf-8")) == defaults(Algorithm)


@pytest.mark.parametrize("name", NAMES)
def test_a_page_says_what_is_evaluated_and_what_a_newcomer_gets(name: str) -> None:
    said, method = " ".join(section(page(name), "What is evaluated").split()), ALGORITHMS[name]
    assert f"Personal: {method().evaluated('after_aggregation')}." in said
    assert f"A newcomer gets {method.newcomers}." in said


@cache
def named() -> dict[str, list[object]]:
    """What the pages may name: modules of the package by their last name, and what is defined in them."""
    found: dict[str, list[object]] = {}
    for info in pkgutil.walk_packages(personafl.__path__, "personafl."):
        needs_triton = info.name.endswith("kernels")
        if info.name.split(".")[1] in ROOMS and not needs_triton:
            module = importlib.import_module(info.name)
            found.setdefault(info.name.rpartition(".")[2], []).append(module)
            for name, thing in vars(module).items():
                if getattr(thing, "__module__", "") == module.__name__:
                    found.setdefault(name, []).append(thing)
    return found


def has(thing: object, parts: list[str]) -> bool:
    """Whether a thing has an attribute (or a field), that one the next, and so on."""
    if not parts:
        return True
    first, *rest = parts
    if not rest and first in getattr(thing, "__dataclass_fields__", {}):
        return True
    return hasattr(thing, first) and has(getattr(thing, first), rest)


@pytest.mark.parametrize("name", NAMES)
def test_names_in_the_table_of_equations_exist(name: str) -> None:
    text = section(page(name), "Equations to code")
    rows = tables(text, "paper") + tables(text, "method")
    assert len(rows) > 2
    for cells in rows:
        for dotted in re.findall(r"`([^`]+)`", cells[-1]):
            first, *rest = dotted.split(".")
            known = any(has(thing, rest) for thing in named().get(first, []))
            assert known or dotted in defaults(ALGORITHMS[name]), dotted


@pytest.mark.parametrize("name", [*NAMES, "README"])
def test_files_a_page_mentions_exist(name: str) -> None:
    text = page(name)
    mentioned = set(re.findall(r"[\w.-]+/[\w./-]*\w\.(?:py|md|json|toml)\b", text))
    mentioned |= set(re.findall(r"`([\w.-]+/[\w./-]*)`", text))
    missing = [m for m in sorted(mentioned) if not (ROOT / m).exists()]
    missing += [m for m in re.findall(r"\]\(([\w./-]+)[#)]", text) if not (PAGES / m).exists()]
    assert not missing
    assert mentioned


WRITTEN = [
    p for p in (ROOT / "docs").rglob("*.md") if p.parent.parent.name != "results"
]  # pages of runs write themselves


@pytest.mark.parametrize("path", sorted([*ROOT.glob("*.md"), *WRITTEN]), ids=lambda p: p.name)
def test_prose_wraps_at_a_hundred_characters(path: Path) -> None:
    inside = False
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if line.lstrip().startswith("```"):
            inside = not inside
        whole = inside or line.lstrip().startswith("|") or " " not in line.strip()  # code, tables, one long word
        assert whole or len(line) <= 100, f"{path.name}:{number}"
