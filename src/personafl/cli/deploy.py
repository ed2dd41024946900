"""`personafl deploy`: a real federation, with Flower."""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from personafl.cli.plain_help import Command
from personafl.cli.terminal import console, errors, print_table
from personafl.core.errors import UserError

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)

Dir = Annotated[Path, typer.Argument(metavar="DIR", help="The deployment folder.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print as JSON and nothing else.")]


@app.callback()
def _extra() -> None:
    """Deploy a recipe on real machines, with Flower: docs/deployment.md."""
    if importlib.util.find_spec("flwr") is None:
        raise UserError("personafl deploy needs Flower: pip install 'personafl[flower]'")


def say(line: str) -> None:
    """A line with the time, for whoever looks at a server or a client."""
    console.print(f"{time.strftime('%H:%M:%S')} {line}", soft_wrap=True)
    sys.stdout.flush()


@app.command(cls=Command)
def init(
    recipe: Annotated[str, typer.Argument(help="A path or a shipped recipe, of one method.")],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Overrides, section.key=value.")
    ] = None,
    clients: Annotated[int | None, typer.Option(help="How many clients; default data.num_clients.")] = None,
    address: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Where clients reach the server; default localhost:8443.")
    ] = None,
    port: Annotated[
        int | None, typer.Option(help="Of Flower's SuperLink on this machine, for nobody else; default 9443.")
    ] = None,
) -> None:
    """Write a deployment folder: recipe, settings, Flower app, nginx configuration, systemd units."""
    from personafl.deployment.flower import folder as deployment

    lines: list[str] = []
    made = deployment.init(recipe, overrides or [], folder, clients, address, port, lines.append)
    for line in (f"written to {folder}", *lines):
        console.print(line, soft_wrap=True)
    console.print(
        f"look through {made.deployment} and {made.client}, then: personafl deploy keys {folder}", soft_wrap=True
    )


@app.command(cls=Command)
def keys(
    folder: Dir,
    clients: Annotated[int | None, typer.Option(help="Keys of how many clients; default those of the folder.")] = None,
    host: Annotated[
        list[str] | None, typer.Option(metavar="NAME_OR_IP", help="A further name or address of the server.")
    ] = None,
) -> None:
    """Make what is missing of CA, server certificate and clients' keys; nothing is overwritten."""
    from personafl.deployment.flower import keys as making
    from personafl.deployment.flower.folder import Folder
    from personafl.deployment.flower.settings import read_tables

    opened = Folder.open(folder)
    number = read_tables(opened.deployment).get("deployment", {}).get("clients") if clients is None else clients
    if not isinstance(number, int):
        raise UserError(
            f"{opened.deployment}: deployment.clients={number!r}: must be a whole number; or give --clients"
        )
    made = making.make(opened, number, host or ())
    lines = [f"new: {', '.join([*made.certificates, *made.clients]) or 'nothing, all was there'}"]
    lines += [
        f"the server keeps {opened.keys}: ca.crt, server.crt, server.key, and the clients' public keys",
        f"take {opened.keys / 'ca.key'} away and keep it offline: only new server certificates need it",
    ]
    if made.clients:
        with_modules = ", modules" if opened.modules.is_dir() else ""
        lines += [
            f"each client gets its own folder of {opened.clients}, by a way nobody can listen to: ca.crt, node.key, "
            f"client.toml{with_modules}; then delete the copy here, at least node.key",
        ]
    for line in lines:
        console.print(line, soft_wrap=True)


@app.command(cls=Command)
def server(
    folder: Dir,
    no_proxy: Annotated[bool, typer.Option("--no-proxy", help="Do not start nginx.")] = False,
    plain: Annotated[
        bool, typer.Option("--plain", help="No TLS and no keys, this machine only: who reaches the port can run code.")
    ] = False,
) -> None:
    """Run the server in the foreground: Flower's SuperLink, and nginx in front of it."""
    from personafl.deployment.flower import server as serving
    from personafl.deployment.flower.folder import Folder

    try:
        serving.serve(Folder.open(folder), plain, not no_proxy, say)
    except serving.EndedError as e:
        errors.print(f"personafl: {e}", soft_wrap=True)
        raise typer.Exit(1) from None


@app.command(cls=Command)
def client(
    file: Annotated[Path | None, typer.Argument(metavar="CLIENT.TOML", help="The client's settings.")] = None,
    data: Annotated[str | None, typer.Option(help="Its data: a folder or package.module:load.")] = None,
    client_id: Annotated[str | None, typer.Option(metavar="NAME", help="Its name, for good.")] = None,
    link: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="The server.")] = None,
    ca: Annotated[Path | None, typer.Option(help="The CA's certificate.")] = None,
    key: Annotated[Path | None, typer.Option(help="Its private key.")] = None,
    state: Annotated[Path | None, typer.Option(metavar="DIR", help="Its private state; default ./NAME.")] = None,
    plain: Annotated[
        bool, typer.Option("--plain", help="No TLS and no keys, this machine only: who reaches the port can run code.")
    ] = False,
) -> None:
    """Run a client in the foreground: by its client.toml, or by options."""
    from personafl.deployment.flower import client as node

    options = {"--data": data, "--client-id": client_id, "--link": link, "--ca": ca, "--key": key, "--state": state}
    given = [name for name, value in options.items() if value is not None]
    if file is not None and given:
        raise UserError(f"{file} has all settings: leave {', '.join(given)} away, or the file")
    code = None
    if file is None:
        if data is None or client_id is None or link is None or (not plain and (ca is None or key is None)):
            needed = ["--data", "--client-id", "--link", *([] if plain else ["--ca", "--key"])]
            missing = [name for name in needed if name not in given]
            raise UserError(f"a client needs its client.toml, or options; missing are {', '.join(missing)}")
        file = node.write(state or Path(client_id), client_id, data, link, ca, key)
        code = Path.cwd()
    try:
        node.take_part(file, plain, say, code)
    except node.RefusedError as e:
        errors.print(f"personafl: {e}", soft_wrap=True)
        raise typer.Exit(1) from None


@app.command(cls=Command)
def start(
    folder: Dir,
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait until the run has ended; exit code 1 if it failed.")
    ] = False,
) -> None:
    """Start a run, or go on where the last one stopped."""
    from personafl.deployment.flower import control
    from personafl.deployment.flower.folder import Folder

    opened = Folder.open(folder)
    number = control.submit(opened)
    console.print(f"run {number}; its log: {control.by_hand(opened)} flwr log {number} {control.LINK}", soft_wrap=True)
    if not wait:
        return
    run = control.await_end(opened, number)
    if not run.completed:
        errors.print(f"personafl: run {number}: {run.status}: {run.details or 'no reason given'}", soft_wrap=True)
        raise typer.Exit(1)
    console.print(f"run {number} is completed; personafl deploy collect {folder}", soft_wrap=True)


@app.command(cls=Command)
def status(folder: Dir, as_json: AsJson = False) -> None:
    """Who is online, how far the run is, what has been sent."""
    from personafl.deployment.flower import report
    from personafl.deployment.flower.folder import Folder

    found = report.status(Folder.open(folder))
    if as_json:
        print(json.dumps(found))
        return
    for line in report.status_lines(found):
        console.print(line, soft_wrap=True)


@app.command(cls=Command)
def collect(folder: Dir, as_json: AsJson = False) -> None:
    """The final metrics of every client, and what was sent: by our count and by Flower's."""
    from personafl.deployment.flower import report
    from personafl.deployment.flower.folder import Folder

    found = report.collect(Folder.open(folder))
    if as_json:
        print(json.dumps(found))
        return
    print_table(report.client_table(found))
    for line in report.collect_lines(found):
        console.print(line, soft_wrap=True)
