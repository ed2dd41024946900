"""One word, one thing: names that were given up stay given up, and the glossary is short."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import personafl

ROOT = Path(personafl.__file__).parent
GLOSSARY = Path(__file__).parents[1] / "docs" / "design.md"

CLASSES = {
    *("Local", "Play", "Survey", "Probe", "Change", "Recorder", "Reel", "Alone", "Later", "Ask", "Part"),
    *("_Part", "Loaded", "Rows"),
}
FUNCTIONS = {"session", "slopes", "_stays", "joined", "scored", "judged", "ready", "trained", "survey", "probe"}
FILES = {
    "making",
    "look",
    "beside",
    "terms",
    "pieces",
    "artefact",
    "picture",
    "shifts",
    "corrupted",
    "scoring",
    "replay",
}


def test_names_that_were_given_up_are_not_defined_again() -> None:
    for path in sorted(ROOT.rglob("*.py")):
        assert path.stem not in FILES, path
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                assert node.name not in CLASSES, f"{path.name}: class {node.name}"
            elif isinstance(node, ast.FunctionDef):
                assert node.name not in FUNCTIONS, f"{path.name}: {node.name}"
            elif isinstance(node, ast.Assign):
                named = {t.id for t in node.targets if isinstance(t, ast.Name)}
                assert not named & CLASSES, f"{path.name}: {named}"


def test_no_tensor_is_named_as_if_it_were_a_count() -> None:
    for path in sorted(ROOT.rglob("*.py")):
        assert not re.search(r"""["'{/]count/[a-z]""", path.read_text()), path


def test_the_glossary_has_at_most_thirty_words_each_told_once() -> None:
    text = GLOSSARY.read_text().split("## Glossary", 1)[1].split("\n## ", 1)[0]
    words = re.findall(r"^\| `?([^`|]+?)`? \|", text, re.M)[1:]  # without the heading
    words = [w for w in words if not set(w) <= {"-"}]
    assert 10 <= len(words) <= 30
    assert len(set(words)) == len(words)
