"""HTML built from elements, whose text is always escaped."""

from __future__ import annotations

import html
from collections.abc import Iterable


class Html(str):
    """Text that is HTML already and is not escaped again."""

    __slots__ = ()


def join_html(parts: Iterable[str]) -> Html:
    """The parts one after another; those that are not `Html` are escaped."""
    return Html("".join(part if isinstance(part, Html) else html.escape(part) for part in parts))


def element(tag: str, *inside: str, **attributes: str) -> Html:
    """An element around its parts. Empty attributes are left out, and `class_` stands for `class`."""
    given = "".join(f' {name.rstrip("_")}="{html.escape(value)}"' for name, value in attributes.items() if value)
    return Html(f"<{tag}{given}>{join_html(inside)}</{tag}>")
