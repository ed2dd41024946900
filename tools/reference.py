"""Fill the tables of docs/reference.md with every key of a recipe, as the code has it.

    python tools/reference.py

A table stands between `<!-- training -->` and `<!-- /training -->`; what is written around it stays.
"""

from __future__ import annotations

from pathlib import Path

from personafl.config import reference
from personafl.config.recipe import SECTIONS
from personafl.core.table import Table

PAGE = Path(__file__).parents[1] / "docs" / "reference.md"
LISTED = {
    "data.dataset": "datasets",
    "data.partition": "partitions",
    "data.corruption": "corruptions",
    "model.name": "models",
    "evaluation.corruptions": "corruptions",
}
"""Keys with many possible names, and the list that has them."""


def table(section: str) -> str:
    """The keys of a section, a row each."""
    head = ("key", "type", "default", "meaning", "possible", "looked at by")
    rows = []
    for key in reference.keys(section):
        possible = f"`personafl list {LISTED[key.dotted]}`" if key.dotted in LISTED else key.possible
        default = f"`{key.default}`" + (" or by the data" if reference.by_data(key.dotted) else "")
        by = "" if key.looked_at_by == "all" else key.looked_at_by
        rows.append((f"`{key.dotted}`", key.type, default, key.help, possible, by))
    return Table(head, rows, marked=True).markdown()


def filled(text: str) -> str:
    """The page with its tables as they should be."""
    for section in SECTIONS:
        begin, end = f"<!-- {section} -->\n", f"\n<!-- /{section} -->"
        if text.count(begin) != 1 or text.count(end) != 1:
            raise ValueError(f"{PAGE.name}: {begin.strip()} and {end.strip()} must be there once each")
        before, _, rest = text.partition(begin)
        text = before + begin + table(section) + end + rest.partition(end)[2]
    return text


def main() -> None:
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
