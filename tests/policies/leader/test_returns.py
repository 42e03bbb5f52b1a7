"""Requests whose clients may come back: owners, expiry, and what the leader owes."""

from __future__ import annotations

import msgspec

from relume.events import vocabulary as v
from relume.policies.leader.duties import step
from relume.policies.state.fleet import Fleet
from relume.policies.state.fold import fold
from relume.policies.state.lifecycles.stream_resumption import UNWRITTEN_ATTEMPTS, newest_attempt
from tests.policies.story import (
    Story,
    arrived,
    decided,
    ended,
    engine_step,
    finished,
    queued,
    replica_started,
)


def _fleet(grace_ticks: int = 3) -> Fleet:
    fleet = Fleet()
    for name in ("r0", "r1"):
        fold(fleet, f"r.{name}", 1, msgspec.structs.replace(replica_started(name), boot=name))
    asked = msgspec.structs.replace(arrived("q"), resumable="d", grace_ticks=grace_ticks)
    fold(fleet, "r.r0", 1, asked)
    return fleet


def _owed(fleet: Fleet, stream: str, event: object) -> list[object]:
    fold(fleet, stream, 1, event)
    return step(fleet, event)


def _ticks(fleet: Fleet, first: int, last: int) -> list[tuple[int, str]]:
    """What the leader ends at which tick."""
    found = []
    for number in range(first, last + 1):
        owed = _owed(fleet, "fleet", v.Tick(number, 1000 * number))
        found += [(number, e.detail) for e in owed if type(e) is v.RequestEnded]
    return found


def test_an_orphan_waits_its_grace_and_expires_once() -> None:
    fleet = _fleet()
    _ticks(fleet, 1, 10)
    assert _owed(fleet, "fleet", v.ReplicaLost("r0", 1)) == []
    assert _ticks(fleet, 11, 20) == [(13, "its gateway is gone and its client did not come back")]


def test_an_orphan_that_cannot_be_resumed_ends_at_once() -> None:
    fleet = _fleet(grace_ticks=0)
    owed = _owed(fleet, "fleet", v.ReplicaLost("r0", 1))
    assert [type(e) for e in owed] == [v.RequestEnded]
    assert _ticks(fleet, 11, 20) == []


def test_a_client_that_returns_gives_its_request_a_new_owner() -> None:
    fleet = _fleet()
    _ticks(fleet, 1, 10)
    fold(fleet, "fleet", 1, v.ReplicaLost("r0", 1))
    fold(fleet, "r.r1", 1, v.ClientReturned(request="q", claim="c1", attempt=1, tokens=5, events=0))
    assert fleet.requests["q"].owner == "r.r1"
    assert _ticks(fleet, 11, 30) == []
    fold(fleet, "r.r0", 1, ended("q"))
    assert "q" in fleet.requests, "an earlier owner's word is void"
    fold(fleet, "r.r1", 1, ended("q"))
    assert "q" not in fleet.requests and fleet.ended == 1


def test_a_return_after_the_expiry_changes_nothing() -> None:
    fleet = _fleet()
    fold(fleet, "fleet", 1, v.ReplicaLost("r0", 1))
    assert _ticks(fleet, 1, 5)
    fold(fleet, "r.r1", 1, v.ClientReturned(request="q", claim="c1", attempt=1, tokens=5, events=0))
    assert fleet.requests["q"].owner == "r.r0"


def test_the_next_leader_ends_what_expired_and_nothing_else() -> None:
    fleet = _fleet()
    fold(fleet, "fleet", 1, v.ReplicaLost("r0", 1))
    assert _owed(fleet, "fleet", v.LeaderElected("r1", "r1")) == []
    assert len(_ticks(fleet, 1, 5)) == 1  # written by a leader that died with it
    owed = _owed(fleet, "fleet", v.LeaderElected("r1", "r1"))
    assert [type(e) for e in owed] == [v.RequestEnded]


def test_a_new_owner_knows_attempts_that_the_former_one_did_not_write() -> None:
    story = Story()
    story.worker("w0")
    story.worker("w1")
    story.replica()
    story.tell("r.r0", arrived(), decided())
    assert newest_attempt(story.fleet, "q1", 1) == 1
    story.tell("w.w1", engine_step(queued(attempt=3), queued("q2", attempt=4)))
    assert newest_attempt(story.fleet, "q1", 1) == 3
    story.tell("w.w1", engine_step(finished(attempt=3)))
    assert newest_attempt(story.fleet, "q1", 1) == 3, "its engine has finished it"
    daemon = v.StateDaemonStarted(worker="w0", boot="b", epoch=1, address="", budget_bytes=999)
    held = v.CheckpointAcknowledged(
        holder="w0", boot="b", request="q1", child=0, attempt=5, blocks=2, tokens=32, bytes=320
    )
    story.tell("w.w0", daemon, held)
    assert newest_attempt(story.fleet, "q1", 1) == 5
    absurd = 1 + UNWRITTEN_ATTEMPTS + 1
    story.tell("w.w1", engine_step(queued(attempt=absurd)))
    story.tell("w.w0", msgspec.structs.replace(held, attempt=absurd))
    assert newest_attempt(story.fleet, "q1", 1) == 3, "no engine or holder makes it grow at will"
    assert newest_attempt(story.fleet, "q1", 7) == absurd


def test_a_new_owner_knows_attempts_that_its_predecessor_had_not_read_of() -> None:
    """Composed 130989: r1's return landed late, after r0 had sent attempt 3, which has finished since."""
    story = Story()
    for name in ("w0", "w1"):
        story.worker(name)
    for name in ("r0", "r1"):
        story.replica(name)
    story.tell("r.r0", arrived(), decided(attempt=3, worker="w1"))
    story.tell("w.w1", engine_step(queued(attempt=3)))
    story.tell("w.w1", engine_step(finished(attempt=3)))
    back = v.ClientReturned(request="q1", claim="c", attempt=1, tokens=5, events=0)
    story.tell("r.r1", back, decided(attempt=2))
    assert story.fleet.requests["q1"].attempt == 2
    assert newest_attempt(story.fleet, "q1", 2) == 3
