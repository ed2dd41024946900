"""What is imported when it is first asked for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import personafl
from personafl import data, experiment, methods
from personafl.core.lazy import Registry, attributes

HEAVY = ("json.tool", "wave")  # modules of the standard library that nothing else here imports


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Registry[Any]:
    for module in HEAVY:
        monkeypatch.delitem(sys.modules, module, raising=False)
    return Registry({"tool": "json.tool:main", "sound": "wave:open", "error": "wave:Error"})


def imported() -> set[str]:
    return {module for module in HEAVY if module in sys.modules}


def test_names_import_nothing(registry: Registry[Any]) -> None:
    assert list(registry) == ["tool", "sound", "error"] and len(registry) == 3
    assert "sound" in registry and "noise" not in registry
    assert registry.name_of(print) is None
    assert not imported()


def test_an_entry_imports_its_module_and_no_other(registry: Registry[Any]) -> None:
    found = registry["sound"]
    assert imported() == {"wave"} and found is sys.modules["wave"].open
    assert registry["sound"] is found
    with pytest.raises(KeyError, match="noise"):
        registry["noise"]


def test_entries_may_be_set_and_removed(registry: Registry[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(registry, "mine", print)
        patch.setitem(registry, "sound", repr)
        assert [*registry] == ["tool", "sound", "error", "mine"]
        assert registry["mine"] is print and registry["sound"] is repr and registry.name_of(repr) == "sound"
    assert [*registry] == ["tool", "sound", "error"] and registry["sound"] is sys.modules["wave"].open
    del registry["tool"]
    assert [*registry] == ["sound", "error"] and "tool" not in registry


def test_an_entry_is_found_by_what_it_is(registry: Registry[Any]) -> None:
    import wave

    assert registry.name_of(wave.Error) == "error"  # imported by somebody else
    assert registry.name_of(None) is None
    assert imported() == {"wave"}


def test_modules_are_listed_with_what_they_have(registry: Registry[Any]) -> None:
    registry["mine"] = print
    assert registry.modules == {"json.tool": {"main"}, "wave": {"open", "Error"}}


def test_an_attribute_comes_from_its_module_or_is_one() -> None:
    assert attributes("json", {"json.tool": ("main",)}, "tool") is sys.modules["json.tool"]
    assert attributes("box", {"wave": ("Error",)}, "Error") is sys.modules["wave"].Error
    with pytest.raises(AttributeError, match="module 'box' has no attribute 'open'"):
        attributes("box", {"wave": ("Error",)}, "open")


@pytest.mark.parametrize("package", [personafl, methods, experiment])
def test_a_package_has_what_it_says_it_has(package: Any) -> None:
    assert {name for name in package.__all__ if getattr(package, name) is None} == set()
    assert set(package.__all__) <= set(dir(package))
    with pytest.raises(AttributeError):
        package.__getattr__("nothing_of_this_name")


@pytest.mark.parametrize("name", ["nothing_of_this_name", "core_"])
def test_importing_what_is_not_there_is_an_import_error(name: str) -> None:
    with pytest.raises(ImportError, match=name):
        exec(f"from personafl import {name}")


def run(code: str, *words: str) -> Any:
    """What a fresh process prints, as JSON."""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_package_alone_imports_no_torch() -> None:
    code = "import json, sys, personafl; print(json.dumps([personafl.__version__, *sys.modules]))"
    version, *modules = run(code)
    assert version == personafl.__version__
    assert "torch" not in modules and "personafl.methods" not in modules


def test_its_packages_are_attributes_as_they_are_asked_for() -> None:
    assert run("import json, personafl; print(json.dumps([*personafl.config.recipes()]))")


def test_slots_can_be_filled_whatever_was_imported_first() -> None:
    code = """
import json
from personafl import Algorithm
class Mine(Algorithm): pass
print(json.dumps([Mine(weights="cowa").weights]))
"""
    assert run(code) == ["cowa"]


DEPLOYED = """
import json, sys
from pathlib import Path
import numpy as np
import personafl.deployment.flower.client_app
from personafl.deployment.node import Node
from personafl.deployment.messages import Request
from personafl.deployment.settings import ClientSettings
from personafl.deployment.federation_spec import FORMAT
home, recipe = Path(sys.argv[1]), sys.argv[2]
(home / "data").mkdir()
np.savez(home / "data" / "mine.npz", x=np.zeros((8, 4), np.float32), y=np.arange(8) % 2)
node = Node(ClientSettings(id="c", data=str(home / "data"), state=str(home / "state")))
told = node.answer(Request("describe", {"experiment": "e", "recipe": recipe, "number": 0, "format": FORMAT})).told
print(json.dumps([told["form"]["classes"], *sys.modules]))
"""


def test_a_deployed_client_imports_its_method_and_no_simulator(tmp_path: Path) -> None:
    pytest.importorskip("flwr")
    recipe = '[evaluation]\nshift = "none"\n[[algorithms]]\nname = "dm-pfl"\n'
    classes, *modules = run(DEPLOYED, str(tmp_path), recipe)
    assert classes == 2
    known = set(methods.ALGORITHMS.modules)
    assert known & set(modules) == {"personafl.methods.dm_pfl"}
    readers = set(data.DATASETS.modules)
    assert not readers & set(modules)
    assert not {"personafl.simulation.simulator", "personafl.experiment.running", "sklearn", "matplotlib"} & set(
        modules
    )
