"""Help as plain text, with what every argument means."""

from __future__ import annotations

import typing
from typing import Any

from typer.core import TyperCommand
from typer.models import ParameterInfo


class Command(TyperCommand):
    """A command of this command line.

    typer escapes the brackets of `[default: auto]` for rich also where rich prints no help, and click 8.5 takes the
    sentences of arguments away that typer prints; both are put right here.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        declared = typing.get_type_hints(self.callback, include_extras=True)
        for param in self.params:
            for told in typing.get_args(declared.get(param.name or "")):
                if isinstance(told, ParameterInfo) and not getattr(param, "help", None):
                    typing.cast(Any, param).help = told.help

    def format_arguments(self, ctx: Any, formatter: Any) -> None:
        """Nothing: typer has the arguments among the options."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        super().format_help(ctx, formatter)
        formatter.buffer[:] = [part.replace("\\[", "[") for part in formatter.buffer]
