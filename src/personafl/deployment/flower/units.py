"""Units for systemd, which start server and clients with their machines and restart them.

The restrictions are those that leave Python, PyTorch, nginx and Flower's subprocesses working. Left out are
MemoryDenyWriteExecute, because PyTorch compiles convolutions while it runs and fails under it, ProcSubset=pid, because
PyTorch reads /proc/cpuinfo, and IPAddressDeny, because the addresses of clients and servers are not known here.
"""

from __future__ import annotations

import sys
from pathlib import Path

TEXT = """\
# {how}
[Unit]
Description={what}
After=network-online.target
Wants=network-online.target
StartLimitIntervalSec=0

[Service]
User=personafl
WorkingDirectory={folder}
ExecStart={command}
Restart=always
RestartSec=15
# The command stops what it started; what is left then is killed.
KillMode=mixed
TimeoutStopSec=60
LimitNOFILE=8192

# What the processes can write and see. Everything else is read-only or hidden.
ReadWritePaths="{folder}"
UMask=0077
ProtectSystem=strict
{home}
PrivateTmp=true
{devices}
ProtectProc=invisible
ProtectClock=true
ProtectControlGroups=true
ProtectHostname=true
ProtectKernelLogs=true
ProtectKernelModules=true
ProtectKernelTunables=true
KeyringMode=private
RemoveIPC=true

# What they can do.
NoNewPrivileges=true
{capabilities}
LockPersonality=true
RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX
RestrictNamespaces=true
RestrictRealtime=true
RestrictSUIDSGID=true
SystemCallArchitectures=native
SystemCallErrorNumber=EPERM
SystemCallFilter=@system-service
SystemCallFilter=~@privileged

[Install]
WantedBy=multi-user.target
"""
NO_HOME = "ProtectHome=true"
READ_HOME = "ProtectHome=read-only"
NO_CAPABILITIES = "CapabilityBoundingSet=\nAmbientCapabilities=\nPrivateUsers=true"
LOW_PORT = "CapabilityBoundingSet=CAP_NET_BIND_SERVICE\nAmbientCapabilities=CAP_NET_BIND_SERVICE"
NO_DEVICES = "PrivateDevices=true\nDevicePolicy=closed"
CLIENT_HOME = f"""\
# read-only in place of true lets the client read data, or a virtual environment, in /home.
{NO_HOME}"""
CLIENT_DEVICES = f"""\
# For a GPU delete these two lines. The user then needs the right to open its device files.
{NO_DEVICES}"""


def server(programs: Path, root: Path, port: int = 8443) -> str:
    """Return the unit of a server, for this machine.

    Args:
        programs: The folder of the command `personafl`.
        root: The deployment folder.
        port: Where nginx listens; ports below 1024 need a capability.
    """
    needed = [root, programs, Path(sys.base_prefix)]
    return TEXT.format(
        how="Put into /etc/systemd/system; User= must be able to write to the folder and to read the keys in it.",
        what=f"personafl server of {root.name}",
        folder=root,
        command=f'"{programs / "personafl"}" deploy server "{root}"',
        home=READ_HOME if any(_is_in_home(path) for path in needed) else NO_HOME,
        devices=NO_DEVICES,
        capabilities=LOW_PORT if port < 1024 else NO_CAPABILITIES,
    )


def client() -> str:
    """Return the unit of a client, whose paths are another machine's."""
    return TEXT.format(
        how="Put into a client's /etc/systemd/system; change the paths to where personafl and its folder are.",
        what="personafl client",
        folder="/srv/personafl",
        command="/opt/personafl/bin/personafl deploy client /srv/personafl/client.toml",
        home=CLIENT_HOME,
        devices=CLIENT_DEVICES,
        capabilities=NO_CAPABILITIES,
    )


def _is_in_home(path: Path) -> bool:
    """Whether ProtectHome would hide a path."""
    return any(path.is_relative_to(home) for home in ("/home", "/root", "/run/user"))
