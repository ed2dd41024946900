"""Requests over a grid that is late, broken, or somebody else's."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest
from flwr.app import ConfigRecord, Error, Message, RecordDict

from personafl.core.errors import UserError
from personafl.deployment.flower import client_app
from personafl.deployment.flower.in_process import InProcessGrid
from personafl.deployment.flower.records import from_records, to_records
from personafl.deployment.flower.transport import CODES, POLL, SPARE, TYPES, FlowerTransport
from personafl.deployment.messages import Failure, Reply, Request


class SlowGrid(InProcessGrid):
    """Answers what it is told to, when it is told to."""

    def __init__(self) -> None:
        super().__init__(client_app.app, {1: {}, 2: {}, 3: {}}, {})
        self.sent: list[Message] = []
        self.unsent: set[int] = set()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        out = []
        for message in messages:
            number = f"message-{next(self.numbers)}"
            message.metadata.__dict__["_message_id"] = number
            self.sent.append(message)
            out.append("" if message.metadata.dst_node_id in self.unsent else number)
        return out

    def answer(self, node: int, content: RecordDict | Error | None = None) -> None:
        """Have the answer to the last message to a node ready."""
        message = next(m for m in reversed(self.sent) if m.metadata.dst_node_id == node)
        made = content or to_records({"of": message.metadata.message_id}, (b"blob",))
        self.ready[message.metadata.message_id] = Message(made, reply_to=message)  # type: ignore[call-overload]


def transport(grid: SlowGrid, *steps: Any) -> FlowerTransport:
    """One that does a thing each time it would sleep."""
    left = iter(steps)
    return FlowerTransport(grid, sleep=lambda seconds: next(left, lambda: None)())


HELLO = Request("hello", {"experiment": "e"})


def test_each_node_is_asked_and_its_answer_is_its_own() -> None:
    grid = SlowGrid()
    made = transport(grid, lambda: grid.answer(2), lambda: grid.answer(1))
    assert made.nodes() == [1, 2, 3]
    found = made.exchange({1: HELLO, 2: Request("work", {"a": 1}, (b"x", b"y"))}, 60)
    assert found == {1: Reply({"of": "message-1"}, b"blob"), 2: Reply({"of": "message-2"}, b"blob")}
    assert [m.metadata.message_type for m in grid.sent] == ["query.hello", "train.work"]
    assert from_records(grid.sent[1].content) == ({"a": 1}, (b"x", b"y"))
    assert all(m.metadata.ttl == 60 + SPARE for m in grid.sent)
    assert not made.outstanding


LATE = Failure("no answer within 0 s", busy=True)


def test_who_is_still_at_something_is_not_asked_another_thing_and_its_late_answer_is_dropped() -> None:
    grid = SlowGrid()
    made = transport(grid)
    other = Request("hello", {"another": "thing"})
    assert made.exchange({1: HELLO}, 0.0) == {1: LATE}
    assert made.exchange({1: other}, 0.0) == {1: Failure("still at an earlier request", busy=True, sent=False)}
    assert len(grid.sent) == 1
    grid.answer(1)  # late
    made.sleep = lambda seconds: grid.answer(1)
    assert made.exchange({1: other}, 60) == {1: Reply({"of": "message-2"}, b"blob")}
    assert len(grid.sent) == 2


def test_who_is_asked_the_same_again_may_answer_late() -> None:
    """It is sent once: a client that takes longer than an exchange would else begin anew with every one."""
    grid = SlowGrid()
    made = transport(grid)
    assert made.exchange({1: HELLO}, 0.0) == {1: LATE}
    assert made.exchange({1: HELLO}, 0.0) == {1: Failure("no answer within 0 s", busy=True, sent=False)}
    grid.answer(1)
    assert made.exchange({1: HELLO}, 60) == {1: Reply({"of": "message-1"}, b"blob", sent=False)}
    assert len(grid.sent) == 1 and not made.outstanding


def test_a_late_answer_outlives_exchanges_with_others() -> None:
    grid = SlowGrid()
    made = transport(grid)
    assert made.exchange({1: HELLO}, 0.0) == {1: LATE}
    grid.answer(1)
    made.sleep = lambda seconds: grid.answer(2)
    assert made.exchange({2: HELLO}, 60) == {2: Reply({"of": "message-2"}, b"blob")}
    assert made.exchange({1: HELLO}, 60) == {1: Reply({"of": "message-1"}, b"blob", sent=False)}


def test_one_that_is_late_does_not_hold_up_the_others() -> None:
    grid = SlowGrid()
    made = transport(grid, lambda: grid.answer(1))
    times = itertools.chain([0.0, 1.0], itertools.repeat(10.0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("personafl.deployment.flower.transport.time.monotonic", lambda: next(times))
        found = made.exchange({1: HELLO, 2: HELLO}, 5.0)
    assert found[2] == Failure("no answer within 5 s", busy=True) and isinstance(found[1], Reply)
    assert made.outstanding.keys() == {2}


def test_a_message_that_could_not_be_sent_is_not_waited_for() -> None:
    grid = SlowGrid()
    grid.unsent = {2}
    made = transport(grid, lambda: grid.answer(1))
    found = made.exchange({1: HELLO, 2: HELLO}, 60)
    assert found[2] == Failure("the message could not be sent", sent=False) and isinstance(found[1], Reply)
    assert not made.outstanding


@pytest.mark.parametrize("code", [*CODES, 77])
def test_errors_have_words(code: int) -> None:
    grid = SlowGrid()
    made = transport(grid, lambda: grid.answer(1, Error(code, "it\nsays  " + "x" * 500)))
    found = made.exchange({1: HELLO}, 60)[1]
    assert isinstance(found, Failure)
    assert found.why.startswith(CODES.get(code, "error 77") + " (it says xxx")
    assert "\n" not in found.why and len(found.why) < 300


def test_an_error_without_a_reason_has_its_words_alone() -> None:
    grid = SlowGrid()
    assert transport(grid, lambda: grid.answer(1, Error(5))).exchange({1: HELLO}, 60) == {1: Failure(CODES[5])}


def test_a_dead_worker_of_a_simulation_ends_the_run() -> None:
    grid = SlowGrid()
    made = transport(grid, lambda: grid.answer(1, Error(0, "ray.exceptions.ActorDiedError: ...")))
    with pytest.raises(UserError, match="a worker of Flower's simulation died"):
        made.exchange({1: HELLO}, 60)


def test_a_message_that_is_none_of_ours_is_a_failure() -> None:
    grid = SlowGrid()
    made = transport(grid, lambda: grid.answer(1, RecordDict({"x": ConfigRecord({"a": 1})})))
    found = made.exchange({1: HELLO}, 60)[1]
    assert isinstance(found, Failure) and found.why.startswith("a message that is none of personafl's")


def test_nobody_is_asked_nothing() -> None:
    grid = SlowGrid()
    assert transport(grid).exchange({}, 60) == {} and not grid.sent
    assert TYPES.keys() == {"hello", "describe", "work"} and POLL < 3


class EchoingGrid(SlowGrid):
    """Hands out every answer twice, behind one to a message that was not asked for."""

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        asked = Message(to_records({}, ()), dst_node_id=1, message_type="query.hello")
        asked.metadata.__dict__["_message_id"] = "of somebody else"
        stray = Message(to_records({"of": "somebody else"}, ()), reply_to=asked)
        return [stray, *(m for found in super().pull_messages(message_ids) for m in (found, found))]


def test_an_answer_counts_once_and_only_for_what_is_outstanding() -> None:
    grid = EchoingGrid()
    made = transport(grid, lambda: (grid.answer(1), grid.answer(2)))
    found = made.exchange({1: HELLO, 2: HELLO}, 60)
    assert found == {1: Reply({"of": "message-1"}, b"blob"), 2: Reply({"of": "message-2"}, b"blob")}
    assert not made.outstanding


def test_a_node_is_known_by_the_file_of_its_key() -> None:
    keyed = FlowerTransport(SlowGrid(), lambda: {"client-0": "1", "client-1": "3"})
    assert [keyed.key(n) for n in (1, 2, 3)] == ["client-0", "", "client-1"]
    assert FlowerTransport(SlowGrid()).key(2) == "2"
