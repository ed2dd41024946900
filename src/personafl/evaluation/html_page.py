"""A whole HTML page, as reports and reproductions are written."""

from __future__ import annotations

from personafl.core.html_elements import Html, element, join_html

_HEAD = Html('<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">')


def page(title: str, style: str, *body: str) -> str:
    """A page with its title as the heading; `style` is CSS, the body one part a line."""
    head = element("head", _HEAD, element("title", title), element("style", Html(style)))
    parts = [element("h1", title), *(join_html([part]) for part in body if part)]
    return f'<!doctype html>\n<html lang="en">{head}<body>\n' + "\n".join(parts) + "\n</body></html>\n"
