"""What personafl's client app takes beyond Flower's own: the age of its process when it answers, beside a bare app's.

python benchmarks/flower.py [--repeats 20] [--out FILE]

Flower starts a process for every message. The bare app imports torch and returns a blob of the same size; personafl's
plays a round of DM-PFL for a client with 100 examples, from its own file, and keeps its state on disk. Both answer the
same messages in turn, over one SuperLink and one SuperNode on this machine. Modules are compiled, as pip leaves them
and as any first run does, whatever PYTHONDONTWRITEBYTECODE says. Ages mean something on a machine that does nothing
else; the processes' own processor time, which is told beside them, on any.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from personafl import config
from personafl.deployment.coordinator import Coordinator
from personafl.deployment.flower.processes import Child, call, environment, free_port, program
from personafl.deployment.messages import Failure, Reply, Request
from personafl.deployment.node import Node
from personafl.deployment.settings import ClientSettings, Deployment
from personafl.experiment.environment import cpu
from personafl.storage.files import write

APP = """\
[project]
name = "{name}"
version = "0.1.0"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "personafl"

[tool.flwr.app.components]
serverapp = "{name}_app.server:app"
clientapp = "{name}_app.client:app"

[tool.flwr.app.config]
folder = ""
repeats = 1
"""

# One message after the other, each with the same request, until all are answered.
SERVER = """\
import json, time
from pathlib import Path
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import ServerApp

app = ServerApp()

@app.main()
def main(grid, context):
    folder = Path(context.run_config["folder"])
    told, blob = (folder / "told.json").read_text(), (folder / "blob.bin").read_bytes()
    while not list(grid.get_node_ids()):
        time.sleep(0.2)
    (node,) = grid.get_node_ids()
    array = Array(dtype="bytes", shape=(len(blob),), stype="personafl.wire.v3", data=blob)
    for _ in range(context.run_config["repeats"]):
        content = RecordDict({"told": ConfigRecord({"json": told}), "blobs": ArrayRecord({"0": array})})
        (number,) = grid.push_messages([Message(content, dst_node_id=node, message_type="train.work", ttl=600.0)])
        while not (replies := list(grid.pull_messages([number]))):
            time.sleep(0.1)
        assert not replies[0].has_error(), replies[0].error
        if "told" in replies[0].content:
            found = json.loads(replies[0].content["told"]["json"])
            assert "work" in found, found
"""

AGE = """\
import os, time

def age():
    fields = open("/proc/self/stat").read().rpartition(")")[2].split()
    began = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - began

def note(context, name):
    with open(context.run_config["folder"] + "/" + name + ".txt", "a") as file:
        file.write(f"{age()} {time.process_time()}\\n")
"""

BARE = """\
import torch
from flwr.app import Array, ArrayRecord, Message, RecordDict
from flwr.clientapp import ClientApp
from bare_app.age import note

app = ClientApp()

@app.train("work")
def work(message, context):
    data = message.content["blobs"]["0"].data
    array = Array(dtype="bytes", shape=(len(data),), stype="personafl.wire.v3", data=data)
    reply = Message(RecordDict({"blobs": ArrayRecord({"0": array})}), reply_to=message)
    note(context, "bare")
    return reply
"""

OURS = """\
from flwr.clientapp import ClientApp
from ours_app.age import note
from personafl.deployment.flower import client_app as _module

app = ClientApp()

@app.train("work")
def work(message, context):
    reply = _module.work(message, context)
    note(context, "ours")
    return reply
"""


class Captured(Exception):  # noqa: N818
    """The first request to work."""

    def __init__(self, request: Request) -> None:
        self.request = request


class OneNode:
    """A node within this process, until it is asked to work."""

    def __init__(self, node: Node) -> None:
        self.node = node

    def nodes(self) -> list[int]:
        return [1]

    def key(self, node: int) -> str:
        return str(node)

    def exchange(self, requests: Any, timeout: float) -> dict[int, Reply | Failure]:
        if requests[1].kind == "work":
            raise Captured(requests[1])
        return {1: self.node.answer(requests[1])}


def request(home: Path, settings: ClientSettings) -> Request:
    """What a server asks a client first: to play a round of DM-PFL."""
    recipe = {
        "data": {"dataset": "digits"},
        "model": {"name": "mlp"},
        "training": {"num_rounds": 8, "join_ratio": 1.0, "local_epochs": 1, "batch_size": 20, "lr": 0.1},
        "evaluation": {"shift": "none"},
        "algorithms": [{"name": "dm-pfl"}],
    }
    text = config.dump(config.load(recipe))
    try:
        Coordinator(home / "server", Deployment(clients=1), text, OneNode(Node(settings))).run()
    except Captured as e:
        return e.request
    raise AssertionError("no round was asked for")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--out", type=Path)
    told = parser.parse_args()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as box:
        home = Path(box)
        before = os.getloadavg()[0]
        noted = measured(home, told.repeats)
    record: dict[str, Any] = {"cpu": cpu(), "repeats": told.repeats, "load": [before, os.getloadavg()[0]]}
    for i, kind in enumerate(("seconds", "cpu_seconds")):
        found = {name: statistics.median(v[i] for v in values) for name, values in noted.items()}
        record[kind] = found | {"beyond": found["ours"] - found["bare"]}
    record["all"] = noted
    print(json.dumps({k: v for k, v in record.items() if k != "all"}, indent=1))
    if told.out:
        write(told.out, json.dumps(record, indent=1) + "\n")


def measured(home: Path, repeats: int) -> dict[str, list[list[float]]]:
    """Age and processor time, in seconds, of the processes of both apps when they had their answer."""
    draw = np.random.default_rng(0)
    (home / "data").mkdir()
    np.savez(home / "data" / "mine.npz", x=draw.random((134, 1, 8, 8), np.float32), y=np.arange(134) % 10)
    settings = ClientSettings(id="c", data=str(home / "data"), state=str(home / "state"), threads=1)
    asked = request(home, settings)
    (home / "told.json").write_text(json.dumps(asked.told))
    (home / "blob.bin").write_bytes(asked.blobs[0])
    table = {n: getattr(settings, n) for n in ClientSettings.names()}
    (home / "client.toml").write_text("[client]\n" + "".join(f"{k} = {json.dumps(v)}\n" for k, v in table.items()))
    for name, client in (("bare", BARE), ("ours", OURS)):
        package = home / name / f"{name}_app"
        package.mkdir(parents=True)
        (home / name / "pyproject.toml").write_text(APP.format(name=name))
        for file, text in (("__init__", ""), ("server", SERVER), ("client", client), ("age", AGE)):
            (package / f"{file}.py").write_text(text)
    port, flower = free_port(), home / "flower"
    flower.mkdir()
    (flower / "config.toml").write_text(
        f'[superlink]\ndefault = "link"\n[superlink.link]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
    )
    env = {k: v for k, v in environment(flower, home).items() if k != "PYTHONDONTWRITEBYTECODE"}
    link = ["--insecure", "--host", "127.0.0.1", "--port", str(port), "--database", str(home / "link.db")]
    node = ["--insecure", "--superlink", f"127.0.0.1:{port}", "--host", "127.0.0.1", "--port", str(free_port())]
    node += ["--node-config", f'client="{home / "client.toml"}"']
    children = [Child([program("flower-superlink"), *link], env, home, lambda line: None)]
    try:
        time.sleep(5)
        children.append(Child([program("flower-supernode"), *node], env, home, lambda line: None))
        for turn in range(4):  # in turn, so that both see the same machine
            for name in ("bare", "ours"):
                part = repeats // 4 + (turn < repeats % 4)
                if part:
                    run(home / name, env, home, part)
    finally:
        for child in reversed(children):
            child.stop()
    lines = {name: (home / f"{name}.txt").read_text().splitlines() for name in ("bare", "ours")}
    return {name: [[float(v) for v in line.split()] for line in held] for name, held in lines.items()}


def run(app: Path, env: dict[str, str], home: Path, repeats: int) -> None:
    """Play one app until its run has ended."""
    words = ["run", str(app), "link", "-c", f'folder="{home}" repeats={repeats}']
    done = subprocess.run([program("flwr"), *words], env=env, cwd=home, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    while True:
        runs = call(["list", "link"], env, home)["runs"]
        if all(str(r["status"]).startswith("finished") for r in runs):
            assert all(r["status"] == "finished:completed" for r in runs), runs
            return
        time.sleep(1)


if __name__ == "__main__":
    main()
