"""Rules of versions: which decisions the replicas of the fleet know."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from relume.events import vocabulary as v
from relume.policies.agreement import (
    decided_for_all,
    has_version,
    known_to_all,
    leaders_version,
    version_of,
)
from relume.policies.health.judgement import VERSION, Review
from relume.policies.leader import feature_level
from relume.policies.state.fleet import Fleet
from tests.policies.health.led_fleet import LedFleet
from tests.policies.story import Story, replica_started

SETTING = "version.some"
RECORDED = (None, "", "soon", "-2", "9" * 5000, "1", "2", "3")
VERSIONS = (0, 0, 0, 0, 0, 1, 2, 3)


def fleet_with(*recorded: str | None, leader: bool = True) -> Story:
    """Replicas r0, r1, ..., each with that version; r0 leads."""
    story = Story()
    for number, version in enumerate(recorded):
        settings = () if version is None else ((SETTING, version),)
        story.tell(f"r.r{number}", replica_started(f"r{number}", settings=settings))
    if leader:
        story.leader("r0")
    return story


def all_alike(rule: Callable[[Fleet], bool]) -> list[bool]:
    """What the rule says of fleets in which one replica of two has recorded each of `RECORDED`."""
    return [rule(fleet_with(text, "3").fleet) for text in RECORDED]


@pytest.mark.parametrize(("recorded", "version"), tuple(zip(RECORDED, VERSIONS, strict=True)))
def test_text_that_is_no_version_counts_as_none(recorded: str | None, version: int) -> None:
    fleet = fleet_with(recorded).fleet
    assert version_of(fleet.replicas["r0"], SETTING) == version


def test_each_rule_looks_at_every_living_replica() -> None:
    assert all_alike(lambda fleet: known_to_all(fleet, SETTING)) == [False, *[True] * 7]
    assert all_alike(lambda fleet: known_to_all(fleet, SETTING, 2)) == [*[False] * 6, True, True]
    assert all_alike(lambda fleet: decided_for_all(fleet, SETTING)) == [*[False] * 5, *[True] * 3]
    assert all_alike(lambda fleet: decided_for_all(fleet, SETTING, 3)) == [*[False] * 7, True]
    assert all_alike(lambda fleet: has_version(fleet, SETTING, 1)) == [True] * 8
    assert all_alike(lambda fleet: has_version(fleet, SETTING, 2)) == [*[False] * 6, True, True]


def test_without_a_leader_nothing_is_decided_for_all() -> None:
    fleet = fleet_with("3", "3", leader=False).fleet
    assert not decided_for_all(fleet, SETTING)
    assert known_to_all(fleet, SETTING) and has_version(fleet, SETTING, 3)
    assert leaders_version(fleet, SETTING, unrecorded=7) == 1


def test_if_no_replica_lives_the_known_ones_have_the_version() -> None:
    story = fleet_with("1", "3")
    lost = (v.ReplicaLost(name, story.epochs[f"r.{name}"]) for name in ("r0", "r1"))
    story.tell("fleet", *lost)
    assert not any(replica.alive for replica in story.fleet.replicas.values())
    assert known_to_all(story.fleet, SETTING, 3)
    assert has_version(story.fleet, SETTING, 1) and not has_version(story.fleet, SETTING, 2)


def test_the_leaders_version_is_the_leaders_alone() -> None:
    found = [leaders_version(fleet_with(text, "1").fleet, SETTING, 7) for text in RECORDED]
    assert found == [7, 7, 0, 0, 0, 1, 2, 3]


def test_a_replica_with_text_for_a_version_ends_no_other() -> None:
    """The fold judges health by the recorded versions."""
    story = LedFleet()
    settings = ((VERSION, "soon"), (feature_level.SETTING, "soon"))
    story.tell("r.r1", replica_started("r1", settings=settings))
    for _ in range(5):
        story.ends(story.fails(), "failed", 502)
        story.ends(story.request("w1"))
        story.ticks(1)
    assert story.decisions == []
    assert feature_level.read_by_all(story.fleet) == 0
    story.leader("r1", "b1")
    assert not Review(story.fleet).by_pace
