"""Deployment folders for tests."""

from __future__ import annotations

from pathlib import Path

from personafl.deployment.flower import folder, keys
from personafl.deployment.flower.folder import Folder


def made(root: Path, clients: int = 2, port: int = 8443, link: int = 9443) -> Folder:
    """A folder as `init` writes it, with ports of one's own."""
    found = folder.init("demo", ["algorithms=fedavg"], root, clients, f"localhost:{port}")
    for file in (found.deployment, found.nginx):
        file.write_text(file.read_text().replace("9443", str(link)))
    return found


def with_keys(root: Path, clients: int = 2, port: int = 8443, link: int = 9443) -> Folder:
    found = made(root, clients, port, link)
    keys.make(found, clients)
    return found
