"""Payloads sent for real: packed, unpacked, and handed on as the other side would see them."""

from __future__ import annotations

import torch
from torch import Tensor

from personafl.core import tree, wire
from personafl.core.types import Download, Masked, Payload
from personafl.engine.server_round import ServerRound


class WireRound(ServerRound):
    """A stage in which all that is sent goes through the wire format, as it does in a deployment."""

    def download(self, ids: Tensor) -> Download:
        return delivered(super().download(ids), len(ids), self.device) if self.rnd.stage.down else Download()

    def receive(self, upload: Payload, download: Download, rows: Tensor | None, count: int) -> Payload:
        return returned(upload, download, rows, count, self.device) if self.rnd.stage.up else upload


def delivered(down: Download, count: int, device: torch.device) -> Download:
    """A download after it went through the codec."""
    shared = tree.moved(_sent(down.shared, {}), device)
    return Download(shared, _rows(down.own, count, {}, device))


def returned(upload: Payload, received: Download, rows: Tensor | None, count: int, device: torch.device) -> Payload:
    """Uploads after each client's went through the codec; the server knows the masks it sent.

    `received` is what a stack of `count` clients got, and `rows` are those of it that sent something; None for all.
    """
    known = tree.masks(tree.received(received, count))
    if rows is None:
        return _rows(upload, count, known, device)
    return _rows(upload, len(rows), {n: m[rows] for n, m in known.items()}, device)


def _rows(payload: Payload, count: int, known: dict[str, Tensor], device: torch.device) -> Payload:
    sent = []
    for c in range(count):
        row: Payload = {}
        for n, t in payload.items():
            row[n] = Masked(t.values[c], t.mask[c], t.known) if isinstance(t, Masked) else t[c]
        sent.append(_sent(row, {n: m[c] for n, m in known.items()}))
    out: Payload = {}
    for n, first in sent[0].items() if sent else ():
        column = [s[n] for s in sent]
        if isinstance(first, Masked):
            masked = [t for t in column if isinstance(t, Masked)]
            out[n] = Masked(torch.stack([t.values for t in masked]), torch.stack([t.mask for t in masked]), first.known)
        else:
            out[n] = torch.stack([t for t in column if isinstance(t, Tensor)])
    return tree.moved(out, device)


def _sent(payload: Payload, known: dict[str, Tensor]) -> Payload:
    """One message; whoever receives it knows how large the model is."""
    return wire.unpack(wire.pack(payload), known, limit=wire.numbers(payload))
