"""The level of the fleet: raised when all replicas read it, never before, never lowered."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import UNSET

from relume.events import vocabulary as v
from relume.policies.leader import feature_level
from relume.policies.leader.duties import HEALTHY_TICKS, step
from relume.policies.leader.feature_level import RESTATE_TICKS, FleetTooNew
from relume.policies.state.fleet import dump, load, state_hash
from tests.policies.story import Story, replica_started


def starts(story: Story, name: str, level: int, boot: str = "b1") -> None:
    """A replica of a build with that level; 0: from before levels."""
    settings = feature_level.settings_of(level) if level else ()
    story.own(f"r.{name}")
    story.tell(f"r.{name}", replica_started(name, boot, settings=settings))


def fleet_of(*levels: int) -> Story:
    """Replicas r0, r1, ... of these levels; r0 leads a healthy log."""
    story = Story()
    for number, level in enumerate(levels):
        starts(story, f"r{number}", level)
    story.leader("r0")
    story.healthy_ticks(HEALTHY_TICKS + 1)
    return story


def tick(story: Story) -> list[Any]:
    """What the leader owes at the next tick of this kind."""
    story.healthy_ticks(1)
    owed = step(story.fleet, story.seen[-1])
    return [event for event in owed if type(event) is v.FeatureLevelRaised]


def raised(level: int, was: int, *replicas: str) -> v.FeatureLevelRaised:
    return v.FeatureLevelRaised(level=level, was=was, replicas=replicas)


def test_it_is_raised_once_all_replicas_read_it() -> None:
    story = fleet_of(2, 1)
    assert feature_level.in_force(story.fleet) == 1
    assert tick(story) == []
    starts(story, "r1", 2, "b2")
    assert tick(story) == [raised(2, 1, "r0", "r1")]
    story.tell("fleet", raised(2, 1, "r0", "r1"))
    assert feature_level.in_force(story.fleet) == 2
    assert tick(story) == []


@pytest.mark.parametrize("levels", [(2, 0), (0, 2), (1, 1), (0,), (2, 3, 1)])
def test_one_live_replica_that_does_not_read_it_is_enough(levels: tuple[int, ...]) -> None:
    assert tick(fleet_of(*levels)) == []


@pytest.mark.parametrize("left", [v.ReplicaStopped("r1", "stopped"), None])
def test_a_replica_that_left_or_is_lost_does_not_count(left: v.ReplicaStopped | None) -> None:
    story = fleet_of(3, 0)
    assert tick(story) == []
    epoch = story.epochs["r.r1"]
    if left is not None:
        story.tell("r.r1", left)
    story.lapse("r.r1")
    if left is None:
        story.tell("fleet", v.ReplicaLost("r1", epoch))
    assert tick(story) == [raised(3, 1, "r0")]


def test_a_replica_that_owns_its_stream_and_has_not_started_may_be_an_old_one() -> None:
    story = fleet_of(2, 2)
    story.own("r.r2")
    assert tick(story) == []
    story.tell("r.r2", replica_started("r2", settings=feature_level.settings_of(2)))
    assert tick(story) == [raised(2, 1, "r0", "r1", "r2")]
    story.own("r.r1")  # another process, perhaps of another build
    assert tick(story) == []


def test_nothing_is_raised_while_the_log_is_not_healthy() -> None:
    story = fleet_of(2)
    late = v.Tick(story.fleet.tick + 1, story.fleet.tick_unix_ms + 60_000)
    story.tell("fleet", late)
    assert step(story.fleet, late) == []


def test_it_is_stated_again_for_agents_that_start_later() -> None:
    story = fleet_of(2)
    story.tell("fleet", raised(2, 1, "r0"))
    owed = [event for _ in range(RESTATE_TICKS) for event in tick(story)]
    assert owed == [raised(2, 2, "r0")]
    story.tell("fleet", *owed)
    assert feature_level.in_force(story.fleet) == 2


def test_it_never_falls() -> None:
    story = fleet_of(2)
    story.tell("fleet", raised(3, 1, "r0"), raised(2, 2, "r0"))
    assert feature_level.in_force(story.fleet) == 3
    starts(story, "r1", 1)
    assert tick(story) == [] and feature_level.in_force(story.fleet) == 3


def test_until_then_the_state_is_that_of_builds_from_before_levels() -> None:
    """They fold the announcement as a setting, and have no more."""
    story = fleet_of(2, 0)
    assert story.fleet.feature_level is UNSET
    assert dump(story.fleet).count(b"feature_level") == 1, "the setting of r0"
    before = state_hash(story.fleet)
    story.tell("fleet", raised(2, 1, "r0"))
    assert state_hash(story.fleet) != before
    assert load(dump(story.fleet)).feature_level == 2


def test_an_older_build_is_refused_with_the_remedy() -> None:
    story = fleet_of(2)
    feature_level.check_build(story.fleet, 1)
    story.tell("fleet", raised(2, 1, "r0"))
    feature_level.check_build(story.fleet, 2)
    with pytest.raises(FleetTooNew, match="feature level 2, and this build reads up to level 1"):
        feature_level.check_build(story.fleet, 1)
