"""Units for systemd, which start server and clients with their machines and restart them."""

from __future__ import annotations

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
NoNewPrivileges=true
PrivateTmp=true
ProtectSystem=full

[Install]
WantedBy=multi-user.target
"""


def server(programs: Path, root: Path) -> str:
    """The unit of a server, for this machine."""
    return TEXT.format(
        how="Put into /etc/systemd/system; User= must be able to write to the folder and to read the keys in it.",
        what=f"personafl server of {root.name}",
        folder=root,
        command=f'"{programs / "personafl"}" deploy server "{root}"',
    )


def client() -> str:
    """The unit of a client, whose paths are another machine's."""
    return TEXT.format(
        how="Put into a client's /etc/systemd/system; change the paths to where personafl and its folder are.",
        what="personafl client",
        folder="/srv/personafl",
        command="/opt/personafl/bin/personafl deploy client /srv/personafl/client.toml",
    )
