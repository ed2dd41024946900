"""The console that runs and commands print to."""

from __future__ import annotations

from typing import Any

from rich.console import Console as RichConsole
from rich.text import Text

from personafl.core.plain_text import harmless


class Console(RichConsole):
    """A console on which no text is markup, an emoji code or a control sequence; styles are given beside it."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **settings)

    def render_str(self, text: str, **settings: Any) -> Text:
        return super().render_str(harmless(text, keep="\n\t"), **settings)
