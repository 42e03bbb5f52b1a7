"""I17: a loss is declared only of an owner that is gone."""

from __future__ import annotations

import pytest

from relume.chaos.validators.promises.workers import i17_living_owners
from relume.chaos.validators.records import Violation
from relume.events import vocabulary as v
from tests.policies.story import Story
from tests.validators.builders import about


@pytest.fixture
def story() -> Story:
    story = Story()
    story.worker("w0")
    story.replica()
    story.leader()
    return story


def lost(story: Story, cut_off: list[tuple[str, int, int]] | None = None) -> list[Violation]:
    """w0 is declared lost now."""
    story.tell("fleet", v.WorkerLost("w0", story.epochs["w.w0"], "lease lapsed"))
    return i17_living_owners.check(story.groups, [], cut_off)


def test_an_owner_whose_key_is_there_is_not_lost(story: Story) -> None:
    assert "I17 w.w0: was declared lost, and owns its stream" in about(lost(story))


def test_one_whose_key_is_gone_may_be(story: Story) -> None:
    story.lapse("w.w0")
    assert lost(story) == []


def test_a_declaration_of_an_earlier_owner_may_be_late(story: Story) -> None:
    before = story.epochs["w.w0"]
    story.lapse("w.w0")
    story.own("w.w0")
    story.tell("fleet", v.WorkerLost("w0", before, "lease lapsed"))
    assert i17_living_owners.check(story.groups, []) == []


def test_replicas_count_too(story: Story) -> None:
    story.tell("fleet", v.ReplicaLost("r0", story.epochs["r.r0"]))
    assert "r.r0" in about(i17_living_owners.check(story.groups, []))


def test_the_process_was_dead_or_cut_off(story: Story) -> None:
    story.at_ms = 90_000
    story.lapse("w.w0")
    assert "its owner was alive and connected" in about(lost(story, []))
    assert lost(story, [("w.w0", 1_000, 60_000)]) == []
    assert len(lost(story, [("w.w1", 1_000, 60_000)])) == 3, "it was another one"
    assert len(lost(story, [("w.w0", 1_000, 59_999)])) == 4, "that is long ago"
