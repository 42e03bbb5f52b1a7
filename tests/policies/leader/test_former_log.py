"""What a log makes of requests that arrived in a former one: their engines report them, and the client of
a resumable stream may return."""

from __future__ import annotations

from typing import Any

import pytest

from relume.events import vocabulary as v
from relume.policies.agreement import LEADER_VERSION
from relume.policies.state.coverage import FORGET_TICKS
from relume.policies.state.fleet import Request, dump, load, state_hash
from relume.policies.state.lifecycles.stream_resumption import engine_with
from tests.policies.rollout.test_rollout import RollingFleet
from tests.policies.state.test_coverage import acknowledged, daemon
from tests.policies.state.test_released_blocks import ticks
from tests.policies.story import (
    Story,
    arrived,
    assert_idle,
    decided,
    died,
    ended,
    engine_step,
    finished,
    observed,
    queued,
    replica_started,
)


def adopted(version: str = "3") -> Story:
    """w0 came from a former log with attempt 2 of "q"; w1 has its blocks."""
    story = Story()
    story.worker("w0")
    story.worker("w1")
    for replica in ("r0", "r1"):
        settings = ((LEADER_VERSION, version),)
        story.tell(f"r.{replica}", replica_started(replica, settings=settings))
    story.tell("w.w0", engine_step(queued("q", 2), v.FirstToken("q", 2)))
    story.tell("w.w1", daemon("w1"), acknowledged("w1", 64))
    story.leader()
    return story


def returned(attempt: int = 2) -> v.ClientReturned:
    return v.ClientReturned(request="q", claim="c", attempt=attempt, tokens=5, events=0)


def place(request: Request) -> tuple[Any, ...]:
    return request.attempt, request.worker, request.incarnation, list(request.places)


@pytest.mark.parametrize(("version", "attempt"), [("3", 2), ("3", 0), ("2", 2)])
def test_the_log_learns_where_a_stream_runs_when_its_client_returns(
    version: str, attempt: int
) -> None:
    story = adopted(version)
    assert engine_with(story.fleet, "q") is story.fleet.workers["w0"]
    story.tell("r.r0", arrived("q"), returned(attempt))
    request = story.fleet.requests["q"]
    is_known = version == "3" and attempt > 0
    assert place(request) == ((2, "w0", 1, [("w0", "q/2")]) if is_known else (0, "", 0, []))
    assert state_hash(load(dump(story.fleet))) == state_hash(story.fleet)


def test_its_end_leaves_nothing_of_it() -> None:
    story = adopted()
    story.tell("r.r0", arrived("q"), returned(), ended("q"))
    story.tell("w.w0", engine_step(finished("q", 2)))
    assert not story.fleet.workers["w0"].finished_early, "its replica wrote of it"
    assert_idle(story.fleet.workers["w0"])
    assert (story.fleet.arrived, story.fleet.ended) == (1, 1)


def test_a_stream_that_its_engine_has_finished_is_still_found_there() -> None:
    story = adopted()
    story.tell("w.w0", engine_step(finished("q", 2)))
    assert engine_with(story.fleet, "q") is story.fleet.workers["w0"]
    story.tell("w.w0", died())
    assert engine_with(story.fleet, "q") is None


def test_a_stream_arrives_once_if_its_client_returns_to_two_replicas() -> None:
    """The second return is later in the log, and counts."""
    story = adopted()
    story.tell("r.r0", arrived("q"), returned())
    story.tell("r.r1", arrived("q"), returned())
    request = story.fleet.requests["q"]
    assert request.owner == "r.r1" and place(request) == (2, "w0", 1, [("w0", "q/2")])
    assert story.fleet.arrived == 1
    story.tell("r.r1", observed("q", 2), decided("q", 3, "w1"))
    assert place(request)[:2] == (3, "w1")


@pytest.mark.parametrize(("version", "released"), [("3", False), ("2", True)])
def test_blocks_of_a_stream_that_runs_are_not_asked_back(version: str, released: bool) -> None:
    """The new log knows nothing of the request; the former log's replicas may restore from them."""
    story = adopted(version)
    owed = ticks(story, 0, 3 * FORGET_TICKS)
    assert (v.CheckpointsReleased(("q",)) in owed) is released


@pytest.mark.parametrize("gone", [finished("q", 2), None])
def test_they_are_when_it_runs_no_more(gone: v.EngineFinished | None) -> None:
    story = adopted()
    ticks(story, 0, FORGET_TICKS)
    story.tell("w.w0", engine_step(gone) if gone else died())
    assert v.CheckpointsReleased(("q",)) in ticks(story, FORGET_TICKS + 1, 2 * FORGET_TICKS)


def test_a_rolling_restart_waits_for_the_streams_of_a_former_log() -> None:
    fleet = RollingFleet("a", "b")
    fleet.tell("w.w0", engine_step(queued("q", 2), v.FirstToken("q", 2)))
    fleet.command(deadline_ticks=20)
    fleet.healthy_ticks(10)
    assert fleet.told[-1] == ("draining", ("w0",))
    fleet.tell("w.w0", engine_step(finished("q", 2)))
    fleet.healthy_ticks(1)
    assert fleet.told[-1] == ("restarting", ("w0",))
