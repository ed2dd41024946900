"""What server and clients say to each other, whatever carries it.

A request and a reply are what JSON takes, and blobs in the form of `core/wire.py`. Tensors travel in blobs alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

Kind = Literal["hello", "describe", "work"]
"""Who are you; what are your data like; play these stages, and be scored."""


@dataclass(frozen=True)
class Request:
    """What the server asks of one client."""

    kind: Kind
    told: dict[str, Any]
    blobs: tuple[bytes, ...] = ()


@dataclass(frozen=True)
class Reply:
    """What a client answers."""

    told: dict[str, Any] = field(default_factory=dict)
    blob: bytes = b""
    sent: bool = True  # whether the request was sent for it; not where it answers the same one, sent before


@dataclass(frozen=True)
class Failure:
    """Why there is no reply, in words."""

    why: str
    busy: bool = False  # whether the node is still at an earlier request
    sent: bool = True  # whether the request was sent


class Transport(Protocol):
    """Carries requests to nodes, which have numbers of its own."""

    def nodes(self) -> list[int]:
        """The nodes that are there."""
        ...

    def key(self, node: int) -> str:
        """The name of a node's key, which stays however often it registers.

        Empty where its key is not known; the node's number as text where nodes have no keys.
        """
        ...

    def exchange(self, requests: Mapping[int, Request], timeout: float) -> dict[int, Reply | Failure]:
        """Ask each of these nodes one thing; an answer of some kind from each within so many seconds.

        A node that is still at an earlier request is not sent another one: where both are the same, its answer is
        waited for once more, else it counts as busy.
        """
        ...
