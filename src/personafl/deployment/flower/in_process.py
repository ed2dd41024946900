"""A grid within the process: the two apps as they are, without Flower's processes. For tests and trials."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

RUN = 1


class InProcessGrid(Grid):
    """Hands every message to a client app at once, and has its reply ready."""

    def __init__(self, app: ClientApp, nodes: Mapping[int, Mapping[str, Any]], run_config: Mapping[str, Any]) -> None:
        """`nodes` are node ids and what each was started with."""
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, RUN, 1
        self.app = app
        self.contexts = {n: Context(RUN, n, dict(told), RecordDict(), dict(run_config)) for n, told in nodes.items()}
        self.ready: dict[str, Message] = {}
        self.numbers = itertools.count(1)

    def set_run(self, run: Any) -> None: ...

    @property
    def run(self) -> Any:
        raise NotImplementedError

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        return Message(content, dst_node_id=dst_node_id, message_type=message_type, group_id=group_id, ttl=ttl)

    def get_node_ids(self) -> Iterable[int]:
        return list(self.contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        out = []
        for message in messages:
            number = f"message-{next(self.numbers)}"
            message.metadata.__dict__["_message_id"] = number
            try:
                reply = self.app(message, self.contexts[message.metadata.dst_node_id])
            except Exception as e:  # as a node does
                reply = Message(Error(2, str(e)), reply_to=message)
            self.ready[number] = reply
            out.append(number)
        return out

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [self.ready.pop(m) for m in message_ids if m in self.ready]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        return self.pull_messages(self.push_messages(messages))
