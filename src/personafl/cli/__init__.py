"""The command line: thin, it calls the rest."""

from __future__ import annotations

import os
import sys
import warnings
from typing import Annotated

import typer

from personafl import __version__
from personafl.cli import compare, doctor, info, partition, run
from personafl.cli.terminal import errors, fail, warn

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    """Personalised federated learning: simulate, compare, take every client's model away."""
    if version:
        print(__version__)
        raise typer.Exit


app.command(context_settings={"allow_extra_args": True})(run.run)
app.command()(compare.compare)
app.command("list")(info.list_)
app.command()(info.info)
app.command()(partition.partition)
app.command()(doctor.doctor)


def main() -> None:
    """The console script: every wrong input ends in one line and exit code 2."""
    warnings.showwarning = warn
    sys.path.insert(0, os.getcwd())  # one's own model, data or method in a file beside the recipe
    try:
        code = app(standalone_mode=False)
        if code == 130:  # typer's word for Ctrl-C
            errors.print("stopped; what was written so far is kept")
        sys.exit(code)
    except ValueError as e:
        fail(str(e))
    except ConnectionError as e:  # another rank is gone
        fail(str(e), 1)
    except OSError as e:
        fail(f"{e.filename or 'file'}: {e.strerror or e}")
    except Exception as e:  # typer's own usage errors have a message and an exit code
        if not hasattr(e, "format_message"):
            raise
        fail(str(e.format_message()))
