"""The ClientApp: a node's answers as Flower's messages. Flower runs every message in a process of its own."""

from __future__ import annotations

import logging
from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from personafl.core.errors import UserError
from personafl.deployment.flower.records import from_records, to_records
from personafl.deployment.messages import Kind, Reply, Request
from personafl.deployment.node import Node
from personafl.deployment.settings import ClientSettings

app = ClientApp()


@app.query("hello")
def hello(message: Message, context: Context) -> Message:
    return _answered("hello", message, context)


@app.query("describe")
def describe(message: Message, context: Context) -> Message:
    return _answered("describe", message, context)


@app.train("work")
def work(message: Message, context: Context) -> Message:
    return _answered("work", message, context)


def _answered(kind: Kind, message: Message, context: Context) -> Message:
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("personafl").setLevel(logging.INFO)
    try:
        told, blobs = from_records(message.content)
        reply = Node(client_settings(context)).answer(Request(kind, told, blobs))
    except UserError as e:
        logging.getLogger("personafl").error("%s", e)
        reply = Reply({"error": "its client.toml cannot be used, or the message; its log has why"})
    return Message(to_records(reply.told, (reply.blob,) if reply.blob else ()), reply_to=message)


def client_settings(context: Context) -> ClientSettings:
    """The client.toml the node was started with; in Flower's own simulation a client of the recipe's data."""
    told = context.node_config
    if "client" in told:
        return ClientSettings.read(Path(str(told["client"])))
    if "partition-id" in told:
        number, home = int(told["partition-id"]), Path(str(context.run_config["folder"]))
        return ClientSettings(id=f"client-{number}", data=f"recipe:{number}", state=str(home / "nodes"), threads=1)
    raise UserError("node_config: must name a client.toml, client='...'")
