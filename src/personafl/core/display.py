"""How objects are shown: in one line, and as a small table in a notebook."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from personafl.core.html_elements import Html, element
from personafl.core.plain_text import harmless


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
        return table((), rows, caption=type(self).__name__)


def table(head: Sequence[str], rows: Iterable[Sequence[str]], caption: str = "") -> str:
    """An HTML table of text."""

    def line(tag: str, cells: Sequence[str]) -> Html:
        return element("tr", *(element(tag, c, style="text-align: left") for c in cells))

    top = [element("caption", caption)] if caption else []
    top += [element("thead", line("th", head))] if head else []
    return element("table", *top, element("tbody", *(line("td", r) for r in rows)))
