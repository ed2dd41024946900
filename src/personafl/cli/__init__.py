"""The command line: thin, it calls the rest."""

from __future__ import annotations

import errno
import os
import sys
import warnings
from typing import Annotated

# Before PyTorch is imported: threads that wait for one another soon sleep. By default they look out for each other a
# third of a million times, and where another program has a core, nothing else gets done on the ones that are left.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import typer

from personafl.cli import compare, deploy, doctor, info, partition, reproduce, run, sweep
from personafl.cli.plain_help import Command
from personafl.cli.terminal import errors, fail, find_own_code, warn
from personafl.core.errors import UserError
from personafl.simulation.ranks import LostError
from personafl.version import __version__

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)


RUN_CODE = ("run", "resume", "sweep", "deploy")  # commands for which a recipe's own code is imported; the others look


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context, version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False
) -> None:
    """Personalised federated learning: simulate, compare, take every client's model away.

    What is wrong with an input is said in one line; --traceback, anywhere, shows where it was found.
    """
    if version:
        print(__version__)
        raise typer.Exit
    if context.invoked_subcommand in RUN_CODE:
        find_own_code()


app.command(cls=Command, context_settings={"allow_extra_args": True})(run.run)
app.command(cls=Command)(run.resume)
app.command(cls=Command)(sweep.sweep)
app.command(cls=Command)(reproduce.reproduce)
app.command(cls=Command)(compare.compare)
app.command("list", cls=Command)(info.list_)
app.command(cls=Command)(info.info)
app.command(cls=Command)(partition.partition)
app.command(cls=Command)(doctor.doctor)
app.add_typer(deploy.app, name="deploy")


TRACEBACK = "--traceback"  # anywhere on the command line


def main() -> None:
    """The console script: what a user did wrong ends in one line and exit code 2, a bug in its traceback."""
    warnings.showwarning = warn
    whole = TRACEBACK in sys.argv
    sys.argv = [a for a in sys.argv if a != TRACEBACK]
    try:
        code = app(standalone_mode=False)
        if code == 130:  # typer's word for Ctrl-C
            errors.print("stopped")
        sys.exit(code)
    except Exception as e:
        if whole or (told := _told(e)) is None:
            raise
        fail(*told)


def _told(error: Exception) -> tuple[str, int] | None:
    """What is said of an error instead of its traceback, and the exit code; None for a bug."""
    if isinstance(error, UserError):
        return str(error), 2
    if isinstance(error, LostError):
        return str(error), 1
    if isinstance(error, OSError) and error.filename:  # the system's own words about a file or folder
        return f"{error.filename}: {error.strerror or error}", 2
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return f"the disk is full: {error.strerror}", 1
    if hasattr(error, "format_message"):  # typer's own usage errors
        return str(error.format_message()), 2
    return None
