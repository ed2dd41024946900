"""When a stage has enough updates, whom it asks again, and what its row says."""

from __future__ import annotations

import pytest

from personafl.core.types import Stage
from personafl.deployment.conversation import Talk
from personafl.deployment.roster import Member
from personafl.deployment.stage_progress import StageProgress, updates_needed


@pytest.mark.parametrize(
    ("stage", "cohort", "quorum", "needed"),
    [
        (Stage(0), 4, 0, 2),  # half of the sampled clients
        (Stage(0), 5, 0, 3),  # rounded up
        (Stage(0), 1, 0, 1),
        (Stage(0), 4, 3, 3),
        (Stage(0), 2, 3, 2),  # never more than were sampled
        (Stage(0, up=False), 4, 3, 1),  # training that stays at the client
        (Stage(0, who="all", up=False), 4, 3, 0),  # fine-tuning: those that are away make up for it
        (Stage(0, who="all"), 4, 3, 3),
        (Stage(0, who="nobody"), 0, 3, 0),
    ],
)
def test_a_stage_with_uploads_needs_a_quorum(stage: Stage, cohort: int, quorum: int, needed: int) -> None:
    assert updates_needed(stage, cohort, quorum) == needed


def talk(*, busy: bool = False, answered: bool = False, diverged: bool = False) -> Talk:
    made = Talk(Member("c", 0))
    made.busy, made.answered, made.diverged = busy, answered, int(diverged)
    return made


def test_a_client_that_failed_is_asked_again_when_its_time_has_come() -> None:
    progress = StageProgress([2, 0, 1], 2)
    assert progress.to_ask([0, 1, 2], now=0.0) == [0, 1, 2]
    progress.record_update(0, {}, talk())
    progress.record_failure(1, "No space left on device", talk(), now=0.0)
    assert len(progress.updates) < progress.needed
    assert progress.to_ask([0, 1], now=29.0) == [] and progress.to_ask([0, 1], now=30.0) == [1]
    progress.record_update(1, {}, talk())
    assert progress.is_complete and list(progress.cohort_updates()) == [0, 1]
    assert progress.failure_columns() == {"dropped": 1}  # client 2 never came


def test_a_client_whose_updates_are_refused_is_asked_again_after_ever_longer_times() -> None:
    """After 30, 60 and 120 seconds; one that sent nothing is asked again after 30 every time."""
    progress = StageProgress([0, 1], 2)
    times = []
    for _ in range(3):
        progress.record_failure(0, "a value is not finite", talk(answered=True), now=100.0)
        progress.record_failure(1, "No space left on device", talk(), now=100.0)
        times.append((progress.retry_at[0] - 100, progress.retry_at[1] - 100))
    assert times == [(30, 30), (60, 30), (120, 30)]


def test_clients_that_diverged_are_not_asked_again() -> None:
    progress = StageProgress([0, 1], 1)
    for n in (0, 1):
        progress.record_failure(n, "its loss is not finite", talk(answered=True, diverged=True), now=0.0)
    assert progress.is_complete and progress.to_ask([0, 1], now=10.0) == []
    assert progress.diverged == {0, 1}


def test_a_row_tells_updates_that_did_not_come_from_those_that_cannot_be_used() -> None:
    progress = StageProgress([0, 1, 2], 1)
    progress.record_update(0, {}, talk())
    progress.record_failure(1, "no answer within 1 s", talk(), now=0.0)
    progress.record_failure(2, "not all values are finite", talk(answered=True), now=0.0)
    assert progress.failure_columns() == {
        "dropped": 1,
        "failed": [{"client": 1, "why": "no answer within 1 s"}],
        "quarantined": [{"client": 2, "why": "not all values are finite"}],
    }
