"""A small network of Linux network namespaces: a server and clients with addresses of their own.

Every host is a namespace whose only link goes to a bridge in a further namespace, so that a host reaches the others by
their addresses alone, and cutting a link is taking it down, as a pulled cable would.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import uuid
from typing import Any, Self

from tests.deployment.flower.loopback import Loopback

SERVER = "10.77.0.1"


class Network:
    """The namespaces of a server and its clients; all of them are removed with it."""

    def __init__(self, clients: int) -> None:
        self._mark = f"pfl{uuid.uuid4().hex[:6]}"
        self.hosts = {"server": SERVER} | {f"client-{i}": f"10.77.0.{10 + i}" for i in range(clients)}

    def __enter__(self) -> Self:
        try:
            self._make()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in ("switch", *self.hosts):
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip("netns", "delete", self.namespace(name))

    def _make(self) -> None:
        switch = self.namespace("switch")
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", switch, "link", "set", "bridge", "up")
        for i, (name, address) in enumerate(self.hosts.items()):
            here = self.namespace(name)
            _ip("netns", "add", here)
            _ip("-n", here, "link", "set", "lo", "up")
            _ip("-n", switch, "link", "add", f"port{i}", "type", "veth", "peer", "name", "eth0", "netns", here)
            _ip("-n", switch, "link", "set", f"port{i}", "master", "bridge", "up")
            _ip("-n", here, "address", "add", f"{address}/24", "dev", "eth0")
            _ip("-n", here, "link", "set", "eth0", "up")

    def namespace(self, host: str) -> str:
        return f"{self._mark}-{host}"

    def inside(self, host: str) -> list[str]:
        """What a command is given in front of it to run on a host."""
        return ["ip", "netns", "exec", self.namespace(host)]

    def cut(self, host: str) -> None:
        """Take a host's link down."""
        _ip("-n", self.namespace(host), "link", "set", "eth0", "down")

    def restore(self, host: str) -> None:
        _ip("-n", self.namespace(host), "link", "set", "eth0", "up")


def obstacle() -> str:
    """Why network namespaces cannot be made here; nothing where they can."""
    if shutil.which("ip") is None:
        return "the command ip is not installed (apt install iproute2)"
    if os.geteuid() != 0:
        return "making network namespaces needs root"
    try:
        with Network(1):
            return ""
    except subprocess.CalledProcessError as e:
        return f"network namespaces cannot be made here: {e.stderr.strip()}"


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


class Federation(Loopback):
    """A deployment whose server and clients are hosts of a network."""

    def __init__(self, network: Network, *arguments: Any, **settings: Any) -> None:
        self.network = network
        super().__init__(*arguments, **settings)

    def host(self) -> str:
        return SERVER

    def inside(self, name: str) -> list[str]:
        return self.network.inside(name)
