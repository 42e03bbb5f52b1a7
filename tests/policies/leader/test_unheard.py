"""Requests of which only their engine told: who ends them."""

from __future__ import annotations

from typing import Any

import msgspec

from relume.events import vocabulary as v
from relume.events.log.codec import encode
from relume.policies.leader.duties import HEALTHY_TICKS, step
from relume.policies.state.lifecycles.unacknowledged import WAIT_TICKS
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


def led() -> Story:
    """A worker, r0 that serves and r1 that leads."""
    story = Story()
    story.worker()
    story.replica("r0")
    story.replica("r1")
    story.leader("r1")
    story.healthy_ticks(HEALTHY_TICKS + 1)
    return story


def position(story: Story) -> int:
    """Events that r0 has written."""
    return story.fleet.streams["r.r0"].position


def dispatch(request: str, behind: int, **more: Any) -> bytes:
    """The decision that a request travels with; its arrival is at position `behind`."""
    event = decided(request, basis=v.Basis(0, behind))
    return encode(msgspec.structs.replace(event, **{"decision": "r0.b1.9", **more}))


def tell_engine(story: Story, request: str, behind: int, **more: Any) -> None:
    """The engine queues and ends it."""
    record = dispatch(request, behind, **more)
    story.tell("w.w0", engine_step(queued(request, dispatch=record), finished(request)))


def ticks(story: Story, count: int = 3) -> list[tuple[str, str, str]]:
    """What the leader ends meanwhile, and writes."""
    found = []
    for _ in range(count):
        story.healthy_ticks(1)
        ends = [e for e in step(story.fleet, story.seen[-1]) if type(e) is v.RequestEnded]
        found += [(e.request, e.outcome, e.detail) for e in ends]
        if ends:
            story.tell("fleet", *ends)
    return found


def test_the_next_life_of_its_gateway_leaves_it_to_the_leader_once() -> None:
    story = led()
    tell_engine(story, "q", position(story) + 1)
    assert ticks(story) == [], "its gateway lives: its word is on its way"
    story.lapse("r.r0")
    story.own("r.r0")
    story.tell("r.r0", replica_started("r0", "b2"))
    told = "its gateway was gone before it wrote of it; its engine did"
    assert ticks(story) == [("q", "failed", told)]
    assert not story.fleet.unacknowledged and not story.fleet.requests


def test_one_whose_engine_tells_after_the_next_life_began() -> None:
    story = led()
    behind = position(story) + 1
    story.tell("r.r0", replica_started("r0", "b2"))
    story.tell("r.r0", arrived("other"), decided("other"))
    tell_engine(story, "q", behind)
    assert [found[0] for found in ticks(story)] == ["q"]


def test_what_arrived_is_ended_by_its_gateway_alone() -> None:
    """Whichever is folded first, and also when the engine tells after the end."""
    story = led()
    tell_engine(story, "q1", position(story) + 1)
    basis = v.Basis(0, position(story) + 1)
    story.tell("r.r0", arrived("q1"), decided("q1", basis=basis), ended("q1"))
    behind = position(story) + 1
    basis = v.Basis(0, behind)
    story.tell("r.r0", arrived("q2"), decided("q2", basis=basis), ended("q2"))
    tell_engine(story, "q2", behind)
    story.tell("r.r0", replica_started("r0", "b2"))
    tell_engine(story, "q2", behind)
    assert ticks(story) == [] and not story.fleet.unacknowledged


def test_what_a_life_left_in_its_spool_has_arrived() -> None:
    """It lands in the very transaction in which the next life begins."""
    story = led()
    behind = position(story) + 1
    basis = v.Basis(0, behind)
    story.tell(
        "r.r0", arrived("q"), decided("q", basis=basis), ended("q"), replica_started("r0", "b2")
    )
    tell_engine(story, "q", behind)
    assert ticks(story) == []


def test_an_orphan_that_the_leader_ended_is_not_ended_again() -> None:
    """Its arrival had landed, its decision had not."""
    story = led()
    behind = position(story) + 1
    story.tell("r.r0", arrived("q"))
    story.tell("fleet", v.ReplicaLost("r0", story.epochs["r.r0"]))
    story.tell("fleet", *step(story.fleet, story.seen[-1]))
    assert story.fleet.ended == 1
    tell_engine(story, "q", behind)
    assert ticks(story, WAIT_TICKS + 2) == []


def test_a_lost_gateway_has_time_to_come_back() -> None:
    story = led()
    tell_engine(story, "q", position(story) + 1)
    story.tell("fleet", v.ReplicaLost("r0", story.epochs["r.r0"]))
    assert ticks(story, WAIT_TICKS - 1) == []
    basis = v.Basis(0, position(story) + 1)
    story.tell("r.r0", arrived("q"), decided("q", basis=basis), ended("q"))
    assert ticks(story, 3) == [] and not story.fleet.unacknowledged


def test_a_word_that_comes_after_the_leaders_end_revives_nothing() -> None:
    story = led()
    behind = position(story) + 1
    tell_engine(story, "q", behind)
    story.tell("fleet", v.ReplicaLost("r0", story.epochs["r.r0"]))
    assert [found[0] for found in ticks(story, WAIT_TICKS + 1)] == ["q"]
    story.tell("r.r0", arrived("q"), decided("q", basis=v.Basis(0, behind)), ended("q"))
    assert not story.fleet.requests and not story.fleet.unacknowledged
    assert story.fleet.arrived == story.fleet.ended == 1
    assert ticks(story) == []


def test_the_next_leader_ends_what_was_due() -> None:
    story = led()
    tell_engine(story, "q", position(story) + 1)
    story.tell("r.r0", replica_started("r0", "b2"))
    story.healthy_ticks(1)
    story.own("fleet")
    story.tell("fleet", v.LeaderElected("r1", "b1"))
    owed = step(story.fleet, story.seen[-1])
    assert [e.request for e in owed] == ["q"]
    story.tell("fleet", *owed)
    assert ticks(story) == []


def test_stock_traffic_and_later_attempts_tell_nothing() -> None:
    story = led()
    behind = position(story) + 1
    tell_engine(story, "q1", behind, cause="reset", attempt=2)
    story.tell("w.w0", engine_step(queued("q2"), queued("q3", dispatch=b"x")))
    tell_engine(story, "q4", behind, decision="r9.b1.2")
    story.tell("r.r0", replica_started("r0", "b2"))
    assert ticks(story) == [] and not story.fleet.unacknowledged
