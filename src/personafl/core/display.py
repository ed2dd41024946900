"""How objects are shown: in one line, and as a small table in a notebook."""

from __future__ import annotations

from collections.abc import Mapping

from personafl.core.plain_text import harmless
from personafl.core.table import Table


class Displayed:
    """An object that is shown by a few facts, not by all it holds."""

    def _facts(self) -> Mapping[str, object]:
        """What is worth knowing of it, by name."""
        raise NotImplementedError

    def __repr__(self) -> str:
        facts = ", ".join(f"{name}={value}" for name, value in self._facts().items())
        return f"{type(self).__name__}({harmless(facts)})"

    def _repr_html_(self) -> str:
        rows = [(name.replace("_", " "), str(value)) for name, value in self._facts().items()]
        return in_notebook(Table((), rows, caption=type(self).__name__))


def in_notebook(table: Table) -> str:
    """A table as a notebook shows it, which would have its text on the right."""
    return table.html(style=lambda row, column: "text-align: left")
