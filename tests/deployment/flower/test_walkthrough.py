"""The walk-through of docs/deployment.md, played by its own commands on one machine: a folder stands for each host."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("flwr")

from personafl.deployment.flower import proxy
from personafl.deployment.flower.processes import family, free_port

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
PAGE = Path(__file__).parents[3] / "docs" / "deployment.md"
SERVER, CLIENTS = "fl.example.org", ("north.example.org", "south.example.org")
WARDS = {"north.example.org": ("surgery", "maternity"), "south.example.org": ("surgery", "oncology", "eyes")}


@dataclass(frozen=True)
class Block:
    """A fenced block of a step: where it belongs, its language and what is in it."""

    step: int
    hosts: tuple[str, ...]
    language: str
    text: str


def blocks() -> list[Block]:
    """The blocks of the walk-through in their order."""
    section = re.search(r"^## From nothing to running.*?\n(.*?)^## ", PAGE.read_text(), re.M | re.S)
    assert section is not None
    found = []
    steps = re.split(r"^\*\*(\d+)\. At (the server|each client):", section[1], flags=re.M)[1:]
    for number, where, text in zip(steps[::3], steps[1::3], steps[2::3], strict=True):
        hosts = (SERVER,) if where == "the server" else CLIENTS
        for language, body in re.findall(r"^```(\w+)\n(.*?)^```$", text, re.M | re.S):
            found.append(Block(int(number), hosts, language, body))
    return found


def table(header: str, wards: tuple[str, ...], seed: int) -> str:
    """Admissions of one hospital, in the columns of the page: fever is an infection, everywhere but at the eyes."""
    assert header == "age,temperature,ward,diagnosis"
    draw = np.random.default_rng(seed)
    rows = [header]
    for i in range(80):
        ward = wards[i % len(wards)]
        fever = bool(draw.integers(2))
        ill = fever != (ward == "eyes")
        temperature = draw.normal(38.8 if fever else 36.6, 0.3)
        rows.append(f"{draw.integers(20, 90)},{temperature:.1f},{ward},{'infection' if ill else 'healthy'}")
    return "\n".join(rows) + "\n"


class Hosts:
    """A folder for each host, in which the page's commands are run; what they left running ends with it."""

    def __init__(self, root: Path) -> None:
        self.root, self.outer, self.inner = root, free_port(), free_port()
        self.running: dict[tuple[str, str], subprocess.Popen[str]] = {}
        for host in (SERVER, *CLIENTS):
            (root / host / "srv").mkdir(parents=True)

    def here(self, host: str, text: str) -> str:
        """What stands on the page, with the paths of a host and the address of this machine."""
        text = re.sub(rf"{re.escape(SERVER)}:\d+", f"localhost:{self.outer}", text)
        text = re.sub(r"(\w+\.example\.org):/srv/", lambda m: f"{self.root / m[1]}/srv/", text)
        return re.sub(r"(?<![\w.])/srv/", f"{self.root / host}/srv/", text)

    def write(self, host: str, text: str) -> None:
        """A file whose name is in its first line."""
        name = re.match(r"# ([\w.]+)\n", text)
        assert name is not None, text
        (self.root / host / name[1]).write_text(self.here(host, text))

    def play(self, host: str, line: str) -> str:
        """One command on a host; what it said, or nothing of one that is left running."""
        words = shlex.split(self.here(host, line))
        env = {w.split("=", 1)[0]: w.split("=", 1)[1] for w in words if re.match(r"[A-Z]+=", w)}
        words = [w for w in words if not re.match(r"[A-Z]+=", w)]
        programs = {"personafl": [sys.executable, "-m", "personafl"], "python": [sys.executable], "scp": ["cp"]}
        command = [*programs.get(words[0], [words[0]]), *words[1:]]
        if words[:3] == ["personafl", "deploy", "init"]:
            command += ["--port", str(self.inner)]
        given = {"cwd": self.root / host, "env": _environment(env), "text": True}
        if words[:2] == ["personafl", "deploy"] and words[2] in ("server", "client"):
            log = (self.root / f"{host}.log").open("w")
            self.running[host, words[2]] = subprocess.Popen(command, stdout=log, stderr=log, **given)  # type: ignore[call-overload]
            self.until(host, "ready" if words[2] == "server" else "online at")
            return ""
        done = subprocess.run(command, capture_output=True, **given)  # type: ignore[call-overload]
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
        return str(done.stdout)

    def until(self, host: str, words: str) -> None:
        end, log = time.monotonic() + 180, self.root / f"{host}.log"
        while words not in log.read_text():
            assert time.monotonic() < end, log.read_text()
            time.sleep(0.3)

    def end(self) -> None:
        for process in reversed(list(self.running.values())):
            started = [process.pid, *family(process.pid)]
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)
            for pid in started:
                with contextlib.suppress(ProcessLookupError):
                    subprocess.run(["kill", "-9", str(pid)], capture_output=True, check=False)


def _environment(changes: dict[str, str]) -> dict[str, str]:
    paths = [*changes.pop("PYTHONPATH", "").split(os.pathsep), os.environ.get("PYTHONPATH", "")]
    return os.environ | changes | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(p for p in paths if p)}


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    if proxy.find() is None:
        pytest.skip("nginx is not installed (apt install nginx-light)")
    found = Hosts(tmp_path)
    try:
        yield found
    finally:
        found.end()


def test_the_walk_through_of_the_page_leads_to_a_model_at_each_client(hosts: Hosts) -> None:
    said: dict[tuple[str, str], str] = {}
    for block in blocks():
        for host in block.hosts:
            if block.language in ("toml", "python"):
                hosts.write(host, block.text)
            elif block.language == "csv":
                text = table(block.text.splitlines()[0], WARDS[host], CLIENTS.index(host))
                (hosts.root / host / "admissions.csv").write_text(text)
            else:
                assert block.language == "bash", block
                for line in block.text.strip().splitlines():
                    said[host, line] = hosts.play(host, line)
    told = {line: words for (host, line), words in said.items() if host == SERVER}
    assert "copied to" in told[next(line for line in told if " init " in line)]
    assert "is completed" in told["personafl deploy start /srv/fed --wait"]
    assert "2 of 2 online" in told["personafl deploy status /srv/fed"]
    collected = told["personafl deploy collect /srv/fed"]
    assert "(mean over the final models of 2 clients)" in collected and "client-1" in collected
    for i, host in enumerate(CLIENTS):
        used = said[host, "PYTHONPATH=/srv/personafl/modules python use.py"]
        name, own = used.split()[:2]
        assert name == f"client-{i}" and float(own) > 0.8, used
        features = ("age", "temperature", "ward=eyes", "ward=maternity", "ward=oncology", "ward=surgery")
        assert str(features) in used and str(("healthy", "infection")) in used


def test_every_step_of_the_page_has_commands_to_play() -> None:
    """Steps 1 to 7, each with a block; a step that is worded in another way would not be played."""
    assert sorted({block.step for block in blocks()}) == list(range(1, 8))
    assert sum(len(block.text.split("\n")) for block in blocks() if block.language == "bash") > 12
