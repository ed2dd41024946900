"""Requests and replies over Flower's grid: one outstanding message per node, and never without a timeout."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace

from flwr.app import Message
from flwr.serverapp import Grid

from personafl.core.errors import UserError
from personafl.deployment.flower.records import from_records, to_records
from personafl.deployment.messages import Failure, Kind, Reply, Request

TYPES: dict[Kind, str] = {"hello": "query.hello", "describe": "query.describe", "work": "train.work"}
POLL = 0.2  # seconds between looks for replies; Flower's own loop has 3
SPARE = 600.0  # seconds a message lives beyond its timeout: a node that is late is still at it
CODES = {
    1: "its app cannot be loaded",
    2: "its app failed",
    3: "the message was gone before the node took it",
    4: "its answer was gone",
    5: "the node is gone",
    7: "its app is another one",
    8: "its process died",
}


class FlowerTransport:
    """A grid, as the coordinator sees it."""

    def __init__(
        self,
        grid: Grid,
        keys: Callable[[], Mapping[str, str]] | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`keys` gives the names of keys and the node ids they are registered under; None where nodes have none."""
        self.grid, self.keys, self.sleep = grid, keys, sleep
        self.outstanding: dict[int, str] = {}  # message ids by node
        self._requests: dict[int, Request] = {}  # what these messages ask

    def nodes(self) -> list[int]:
        return sorted(self.grid.get_node_ids())

    def key(self, node: int) -> str:
        """The name of the file in `keys/` that has a node's public key, without `.pub`."""
        if self.keys is None:
            return str(node)
        return next((name for name, number in self.keys().items() if number == str(node)), "")

    def exchange(self, requests: Mapping[int, Request], timeout: float) -> dict[int, Reply | Failure]:
        """Ask each node one thing; a node that is still at an earlier request is sent no other one."""
        awaited = {n for n in requests if n in self.outstanding and self._requests[n] == requests[n]}
        self._drop_late(self.outstanding.keys() & requests.keys() - awaited)
        found: dict[int, Reply | Failure] = {
            n: Failure("still at an earlier request", busy=True, sent=False)
            for n in requests
            if n in self.outstanding and n not in awaited
        }
        asked = [n for n in requests if n not in found and n not in awaited]
        messages = [
            Message(
                to_records(requests[n].told, requests[n].blobs),
                dst_node_id=n,
                message_type=TYPES[requests[n].kind],
                ttl=timeout + SPARE,
            )
            for n in asked
        ]
        ids = list(self.grid.push_messages(messages)) if messages else []
        for n, number in zip(asked, ids, strict=True):
            if number:
                self.outstanding[n], self._requests[n] = number, requests[n]
            else:  # Flower says why in its log
                found[n] = Failure("the message could not be sent", sent=False)
        until = time.monotonic() + timeout
        waiting = {n for n in requests if n not in found}
        while waiting:
            for n, reply in self._pulled(waiting):
                found[n] = replace(reply, sent=n not in awaited)
                waiting.discard(n)
            if waiting and time.monotonic() >= until:
                late = f"no answer within {timeout:g} s"
                found |= {n: Failure(late, busy=True, sent=n not in awaited) for n in waiting}
                break
            if waiting:
                self.sleep(POLL)
        return found

    def _drop_late(self, nodes: Collection[int]) -> None:
        """Drop the answers that came after all of nodes that are asked something else now.

        Those of nodes that are not asked now are kept: they may be asked the same again.
        """
        for _ in self._pulled(nodes):
            pass

    def _pulled(self, nodes: Collection[int]) -> Iterable[tuple[int, Reply | Failure]]:
        by_message = {self.outstanding[n]: n for n in list(nodes)}
        for message in self.grid.pull_messages(list(by_message)) if by_message else ():
            node = by_message.pop(message.metadata.reply_to_message_id, None)
            if node is None:  # nothing that was asked, or an answer that came before
                continue
            del self.outstanding[node], self._requests[node]
            yield node, _reply(message)


def _reply(message: Message) -> Reply | Failure:
    if message.has_error():
        reason = " ".join(str(message.error.reason or "").split())
        if "ActorDied" in reason:
            raise UserError(
                "a worker of Flower's simulation died, and all later messages to it would fail; start again"
            )
        why = CODES.get(message.error.code, f"error {message.error.code}")
        return Failure(f"{why} ({reason[:160]})" if reason else why)
    try:
        told, blobs = from_records(message.content)
    except UserError as e:
        return Failure(str(e))
    return Reply(told, blobs[0] if blobs else b"")
