"""Blocks that no request may use any more are voided, and asked back from their holders."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from relume.events import vocabulary as v
from relume.policies.agreement import LEADER_VERSION
from relume.policies.leader.duties import step
from relume.policies.state.coverage import (
    FORGET_TICKS,
    RELEASE_TICKS,
    covered_tokens,
)
from relume.policies.state.fleet import dump, load, state_hash
from tests.policies.state.test_coverage import acknowledged, chosen, daemon, scene
from tests.policies.story import (
    Story,
    arrived,
    decided,
    ended,
    replica_started,
)


def ticks(story: Story, first: int, last: int) -> list[Any]:
    """What the leader owes for each of them, written as it would."""
    owed = []
    for number in range(first, last + 1):
        tick = v.Tick(number, number * 1000)
        story.tell("fleet", tick)
        owed += step(story.fleet, tick)
    return owed


def quarantined(worker: str = "w0", incarnation: int = 1) -> v.HealthDecided:
    return v.HealthDecided(
        worker=worker, incarnation=incarnation, state="quarantined", failure="corruption",
        evidence="wrong", since=1,
    )  # fmt: skip


def decide(story: Story, event: Any) -> list[Any]:
    """The event lands, and then what the leader owes, without restarts."""
    story.tell("fleet" if type(event) is v.HealthDecided else "r.r0", event)
    owed = [e for e in step(story.fleet, event) if type(e) is not v.EffectsDecided]
    if owed:
        story.tell("fleet", *owed)
    return owed


def test_blocks_of_a_quarantined_worker_cover_nothing_and_never_again() -> None:
    story = scene()
    story.leader()
    story.tell("r.r0", decided("q"), chosen("w1"))
    story.tell("w.w1", acknowledged("w1", 64))
    assert decide(story, quarantined()) == [v.CheckpointsVoided("w0", 1, (("q", 1),))]
    site = story.fleet.holders["w1"]
    assert covered_tokens(story.fleet, "w1", "q") == 0 and site.held_bytes == 0
    story.tell("w.w1", acknowledged("w1", 80))
    assert covered_tokens(story.fleet, "w1", "q") == 0, "it was on its way"
    story.tell("r.r0", decided("q", 2, "w2"), chosen("w1", attempt=2, primary="w2"))
    story.tell("w.w1", msgspec.structs.replace(acknowledged("w1", 32), attempt=2))
    assert covered_tokens(story.fleet, "w1", "q") == 32
    assert decide(story, quarantined()) == [], "once"
    fleet = load(dump(story.fleet))
    assert state_hash(fleet) == state_hash(story.fleet)


def test_blocks_that_a_later_attempt_restored_and_wrote_again_are_void_too() -> None:
    """The holder has them as that attempt's: their bytes are the same."""
    story = scene()
    story.leader()
    story.tell("r.r0", decided("q"), chosen("w1"))
    story.tell("w.w1", acknowledged("w1", 64))
    story.tell("r.r0", decided("q", 2, "w2"), chosen("w1", attempt=2, primary="w2"))
    story.tell("w.w1", msgspec.structs.replace(acknowledged("w1", 64), attempt=2))
    assert decide(story, quarantined()) == [v.CheckpointsVoided("w0", 1, (("q", 2),))]
    assert covered_tokens(story.fleet, "w1", "q") == 0
    story.tell("r.r0", decided("q", 3, "w1"))
    assert decide(story, quarantined()) == [], "the third restored none of them"


def test_a_request_that_comes_to_a_quarantined_worker_late_leaves_no_blocks() -> None:
    """Its replica did not know of the decision yet."""
    story = scene()
    story.leader()
    assert decide(story, quarantined()) == []
    late = decided("q")
    assert decide(story, late) == [v.CheckpointsVoided("w0", 1, (("q", 1),))]
    assert decide(story, decided("q", 2, "w1")) == []


def test_a_new_leader_voids_what_its_predecessor_did_not() -> None:
    story = scene()
    story.leader()
    story.tell("r.r0", decided("q"), chosen("w1"))
    story.tell("fleet", quarantined())
    elected = v.LeaderElected("r0", "b1")
    story.tell("fleet", elected)
    owed = step(story.fleet, elected)
    assert v.CheckpointsVoided("w0", 1, (("q", 1),)) in owed


def test_blocks_of_ended_requests_are_released_at_once_by_a_quarantine() -> None:
    """Others may share them."""
    story = scene()
    story.leader()
    ticks(story, 0, 1)
    story.tell("r.r0", decided("q"), chosen("w1"))
    story.tell("w.w1", acknowledged("w1", 64))
    story.tell("r.r0", ended("q"))
    assert decide(story, quarantined()) == [v.CheckpointsReleased(("q",))]


def test_blocks_that_outlive_their_request_are_asked_back_by_the_leader() -> None:
    story = scene()
    story.leader()
    ticks(story, 0, 1)
    story.tell("r.r0", chosen("w1"))
    story.tell("w.w1", acknowledged("w1", 64))
    assert ticks(story, 2, 10) == [], "it runs"
    story.tell("r.r0", ended("q"))
    assert ticks(story, 11, 9 + RELEASE_TICKS) == [], "its engine may still say so itself"
    owed = ticks(story, 10 + RELEASE_TICKS, 10 + RELEASE_TICKS)
    assert owed == [v.CheckpointsReleased(("q",))]
    story.tell("fleet", *owed)
    assert ticks(story, 11 + RELEASE_TICKS, 40) == [] and story.fleet.ending == {}


@pytest.mark.parametrize(("version", "released"), [("2", True), ("1", False)])
def test_blocks_without_a_chosen_holder_are_asked_back(version: str, released: bool) -> None:
    """Composed 171304: `HolderChosen` was lost with its gateway, and another replica ended the request."""
    story = scene()
    story.tell("r.r0", replica_started(settings=((LEADER_VERSION, version),)), arrived("q"))
    story.leader()
    ticks(story, 0, 1)
    story.tell("w.w1", acknowledged("w1", 64))
    story.tell("r.r0", ended("q"))
    assert ticks(story, 2, RELEASE_TICKS) == [], "its engine may still say so itself"
    owed = ticks(story, RELEASE_TICKS + 1, RELEASE_TICKS + 2)
    assert (v.CheckpointsReleased(("q",)) in owed) is released


def test_blocks_written_long_after_the_end_are_asked_back() -> None:
    """An engine that stood still writes what it was about to, for a request that went on
    elsewhere and has ended."""
    story = scene()
    story.leader()
    ticks(story, 0, 1)
    story.tell("r.r0", chosen("w1"), ended("q"))
    ticks(story, 2, 2 + FORGET_TICKS)
    assert story.fleet.ending == {}
    story.tell("w.w1", acknowledged("w1", 64))
    late = 3 + 2 * FORGET_TICKS
    assert ticks(story, 3 + FORGET_TICKS, late - 2) == [], "its arrival may still be told"
    owed = ticks(story, late - 1, late)
    assert owed and set(owed) == {v.CheckpointsReleased(("q",))}
    story.tell("fleet", owed[0])
    assert ticks(story, late + 1, late + 40) == [] and story.fleet.ending == {}


def test_blocks_told_ahead_of_the_arrival_are_the_requests() -> None:
    story = Story()
    for worker in ("w0", "w1"):
        story.worker(worker)
    story.replica()
    story.leader()
    story.tell("w.w1", daemon("w1"), acknowledged("w1", 64))
    story.tell("r.r0", arrived("q"), chosen("w1"))
    assert ticks(story, 0, 3 * FORGET_TICKS) == []
    story.tell("r.r0", ended("q"))
    assert v.CheckpointsReleased(("q",)) in ticks(story, 60, 60 + FORGET_TICKS)


def test_an_end_the_engine_told_its_holder_concerns_no_leader() -> None:
    story = scene()
    story.leader()
    ticks(story, 0, 1)
    story.tell("r.r0", chosen("w1"))
    story.tell("w.w1", acknowledged("w1", 64))
    story.tell("r.r0", ended("q"))
    story.tell(
        "w.w1", v.CheckpointDropped(holder="w1", boot="b1", request="q", child=0, reason="finished")
    )
    assert ticks(story, 2, 20) == [] and story.fleet.ending == {}
