"""Requests of which only their engine told: who ends them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from relume.events import vocabulary as v
from relume.events.log.codec import encode
from relume.policies import decision_versions
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


def settings(version: int = decision_versions.DECISION_VERSIONS["leader"]) -> Any:
    """What a replica records that has this version of the leader's duties."""
    return (*decision_versions.settings(), ("version.leader", str(version)))


def led(*versions: int) -> Story:
    """A worker, r0 that serves and r1 that leads. `versions`: of the leader's duties, of both."""
    story = Story()
    story.worker()
    for name, version in zip(("r0", "r1"), versions or (2, 2), strict=True):
        story.tell(f"r.{name}", replica_started(name, settings=settings(version)))
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


def new_life(story: Story) -> None:
    """r0 begins anew; the record of it is on its way."""
    story.lapse("r.r0")
    story.own("r.r0")


def tell_of_new_life(story: Story, request: str, behind: int) -> None:
    tell_engine(story, request, behind, decision="r0.b2.1")


def test_a_new_life_may_write_of_its_beginning_after_engines_have_its_requests() -> None:
    """Composed 168210: its disk was slow, and the leader ended a stream that it served."""
    story = led()
    new_life(story)
    behind = position(story) + 2
    tell_of_new_life(story, "q", behind)
    assert ticks(story) == [], "its beginning and its word are on their way"
    story.tell("r.r0", replica_started("r0", "b2", settings=settings()))
    assert ticks(story) == []
    story.tell("r.r0", arrived("q"), decided("q", basis=v.Basis(0, behind)))
    assert [*story.fleet.requests] == ["q"] and not story.fleet.unacknowledged
    story.tell("r.r0", ended("q"))
    assert ticks(story) == [] and story.fleet.arrived == story.fleet.ended == 1


def test_a_life_that_never_writes_of_its_beginning_leaves_its_requests_to_the_leader() -> None:
    """It is lost, or the life after it has begun."""
    story = led()
    new_life(story)
    behind = position(story) + 2
    tell_of_new_life(story, "q1", behind)
    story.tell("r.r0", replica_started("r0", "b3", settings=settings()))
    assert [found[0] for found in ticks(story)] == ["q1"]
    tell_engine(story, "q2", behind + 1, decision="r0.b4.1")
    story.tell("fleet", v.ReplicaLost("r0", story.epochs["r.r0"]))
    assert [found[0] for found in ticks(story, WAIT_TICKS + 2)] == ["q2"]


@pytest.mark.parametrize("between", [(), ("b2",)])
def test_a_late_beginning_does_not_revive_what_the_leader_ended(between: tuple[str, ...]) -> None:
    """Whichever lives begin before that of the request."""
    story = led()
    behind = position(story) + 9
    tell_engine(story, "q", behind, decision="r0.b3.1")
    story.tell("fleet", v.ReplicaLost("r0", story.epochs["r.r0"]))
    assert [found[0] for found in ticks(story, WAIT_TICKS + 2)] == ["q"]
    for boot in (*between, "b3"):
        story.tell("r.r0", replica_started("r0", boot, settings=settings()))
    story.tell("r.r0", arrived("q"), decided("q", basis=v.Basis(0, behind)))
    assert not story.fleet.requests and story.fleet.arrived == story.fleet.ended == 1


@pytest.mark.parametrize("versions", [(1, 2), (2, 1)])
def test_a_replica_with_the_rule_of_before_has_it_applied_by_all(versions: tuple[int, int]) -> None:
    """All fold the same state; replay too, of a log of before."""
    story = led(*versions)
    new_life(story)
    tell_of_new_life(story, "q", position(story) + 2)
    assert [found[0] for found in ticks(story)] == ["q"]


def test_without_a_living_replica_the_last_ones_say_which_rule_applies() -> None:
    """A fleet of one replica, which leaves and returns: its first tick may come before its beginning."""
    story = led()
    story.tell("r.r1", v.ReplicaStopped("r1", "stopped"))
    story.tell("r.r0", v.ReplicaStopped("r0", "stopped"))
    new_life(story)
    tell_of_new_life(story, "q", position(story) + 2)
    assert ticks(story) == []


def test_a_life_with_another_kind_of_name_is_one_of_before() -> None:
    story = led()
    tell_engine(story, "q", position(story) + 2, decision="r0.zz.1")
    assert [found[0] for found in ticks(story)] == ["q"]
