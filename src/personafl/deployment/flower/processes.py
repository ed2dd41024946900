"""Flower's programs as processes of ours: with which environment they run, how they are read and how they end."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Self

from personafl.core.errors import UserError

QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",  # seconds; of what waits for a message, 1 as shipped
}
"""What Flower is told: nothing is reported, looked up or installed, and work begins at once."""

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_SET_CHILD_SUBREAPER = 36  # of Linux's prctl

# Linux ends a process with the one that started it, however that ended.
TIED = """\
import os, sys
if sys.platform == "linux":
    import ctypes
    ctypes.CDLL(None).prctl(1, 15)
os.execv(sys.argv[1], sys.argv[1:])
"""


def environment(home: Path, *code: Path) -> dict[str, str]:
    """The environment of Flower's programs.

    `home` is Flower's own folder; modules in the folders `code` are found behind those of PYTHONPATH.
    """
    kept = {k: v for k, v in os.environ.items() if not k.startswith("FLWR_")}
    paths = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
    return kept | {
        **QUIET,
        "FLWR_HOME": str(home),
        "PATH": os.pathsep.join([str(programs()), os.environ.get("PATH", os.defpath)]),
        "PYTHONPATH": os.pathsep.join([*paths, *map(str, code)]),
        "PYTHONUNBUFFERED": "1",
    }


def programs() -> Path:
    """The folder of the commands that were installed with this Python."""
    return Path(sys.executable).parent


def program(name: str) -> str:
    """One of Flower's commands."""
    found = shutil.which(name, path=str(programs())) or shutil.which(name)
    if found is None:
        raise UserError(f"{name}: no such command beside {sys.executable}; pip install 'personafl[flower]' installs it")
    return found


def option(key: str, path: Path) -> str:
    """`key="path"`, as Flower's options for settings are written."""
    return f'{key}="{path}"'


def free_port() -> int:
    """A port of the loopback interface that nobody uses."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
    return port


def has_ipv6() -> bool:
    """Whether this machine has the loopback address of IPv6."""
    try:
        with socket.socket(socket.AF_INET6) as s:
            s.bind(("::1", 0))
    except OSError:
        return False
    return True


def answers(port: int, host: str = "127.0.0.1") -> bool:
    """Whether something listens there."""
    with socket.socket() as s:
        s.settimeout(2)
        return s.connect_ex((host, port)) == 0


class Child:
    """A process in a group of its own; every line it prints is handed to a function."""

    def __init__(self, command: Sequence[str], env: dict[str, str], cwd: Path, heard: Callable[[str], None]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-S", "-c", TIED, *command],
            env=env,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._heard = heard
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._heard(_COLOUR.sub("", line.rstrip()))

    def ended(self) -> int | None:
        """The exit code, once there is one."""
        return self.process.poll()

    def wait(self, seconds: float) -> int | None:
        """The exit code, if there is one within so many seconds."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def stop(self, patience: float = 20.0) -> None:
        """Ask the process to end, and end the rest of its group."""
        if self.ended() is None:
            self.process.terminate()
            self.wait(patience)
        self.clear()

    def clear(self) -> None:
        """Kill what is left of the group, and hear what it had said."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._reader.join(0.5)  # longer where a process of another group holds the pipe
        if self.process.stdout is not None and not self._reader.is_alive():
            self.process.stdout.close()


def adopt() -> None:
    """Be the parent of whatever this process's children leave behind (Linux), so that `end_family` finds it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1)


def family(parent: int) -> list[int]:
    """The children of a process, their children and so on, as Linux knows them."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text(errors="replace").rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        if fields[0] != "Z":
            parents[int(entry.parent.name)] = int(fields[1])
    found, new = [], [parent]
    while new:
        new = [child for child, above in parents.items() if above in new]
        found += new
    return found


def end_family(patience: float = 5.0) -> None:
    """End all that this process's children have left running: a SuperLink starts its server app in another group."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in family(os.getpid()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        until = time.monotonic() + patience
        while family(os.getpid()) and time.monotonic() < until:
            time.sleep(0.1)


class Stop:
    """Whether this process was asked to end: by SIGTERM, Ctrl-C or a closed terminal."""

    def __init__(self) -> None:
        self._asked = threading.Event()
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        hangup = getattr(signal, "SIGHUP", None)  # Windows does not know it
        for number in (signal.SIGTERM, signal.SIGINT, *([hangup] if hangup else [])):
            if number != hangup or signal.getsignal(number) != signal.SIG_IGN:  # under `nohup` it is ignored
                self._before[number] = signal.signal(number, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self._asked.set()

    def __bool__(self) -> bool:
        return self._asked.is_set()

    def wait(self, seconds: float) -> bool:
        """Sleep, but no longer than until that was asked; whether it was."""
        return self._asked.wait(seconds)


def call(arguments: Sequence[str], env: dict[str, str], cwd: Path) -> dict[str, Any]:
    """What the command `flwr` answers as JSON; a refusal is a `UserError` in its words."""
    command = [program("flwr"), *arguments, "--format", "json"]
    done = subprocess.run(command, env=env, cwd=cwd, capture_output=True, text=True, errors="replace", check=False)
    begin = done.stdout.find("{")
    try:
        answer = json.loads(done.stdout[begin:] if begin >= 0 else "")
    except ValueError:
        said = " ".join(f"{done.stdout} {done.stderr}".split())
        raise UserError(f"flwr {arguments[0]}: no answer: {said[-300:]}") from None
    if not answer.get("success"):
        why = " ".join(str(answer.get("error-message", done.stderr)).split())
        raise UserError(f"flwr {arguments[0]}: {why[-400:]}")
    found: dict[str, Any] = answer
    return found
