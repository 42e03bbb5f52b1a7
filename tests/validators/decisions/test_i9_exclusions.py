"""I9: two of four replicas that cannot reach a worker exclude it for none of the others."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from relume.chaos.validators.promises.health import i9_breakers
from relume.events import vocabulary as v
from relume.events.log.interface import RevisionGroup
from relume.events.vocabulary.enums import FailureClass, HealthState
from tests.policies.rollout.test_rollout import health_decided
from tests.policies.story import Story, observed, replica_started

EXCLUDED = structs.replace(
    health_decided("w0", HealthState.UNHEALTHY), failure=FailureClass.UNREACHABLE
)


@pytest.fixture
def story() -> Story:
    """Four replicas, of which r0 suspects w0."""
    story = Story()
    story.worker("w0")
    for number in range(4):
        story.tell(f"r.r{number}", replica_started(f"r{number}"))
    story.tell("fleet", v.Tick(1, 0))
    suspects(story, "r0")
    return story


def suspects(story: Story, *names: str) -> None:
    for name in names:
        story.tell(f"r.{name}", v.WorkerSuspected("w0", 1, "reset"))


def found(story: Story, *, lasts_ms: int = 60_000) -> list[str]:
    """Each event comes a minute after the one before, the last one `lasts_ms`."""
    groups = list[RevisionGroup]()
    at_ms = 0
    for number, group in enumerate(story.groups, 1):
        at_ms += lasts_ms if number == len(story.groups) else 60_000
        segments = tuple(structs.replace(s, at_ms=at_ms) for s in group.segments)
        groups.append(structs.replace(group, segments=segments))
    return [each.detail for each in i9_breakers.check(groups, [])]


def few(count: int, alive: int = 4) -> list[str]:
    return [f"is excluded for all, and {count} of {alive} replicas suspect it"]


@pytest.mark.parametrize(("more", "wrong"), [((), few(1)), (("r1",), few(2)), (("r1", "r2"), [])])
def test_more_than_half_must_suspect_it(story: Story, more: tuple[str, ...], wrong: Any) -> None:
    suspects(story, *more)
    story.tell("fleet", EXCLUDED)
    assert found(story) == wrong


@pytest.mark.parametrize(("lasts_ms", "wrong"), [(1000, []), (9000, few(2))])
def test_what_was_just_cleared_may_count(story: Story, lasts_ms: int, wrong: Any) -> None:
    suspects(story, "r1", "r2")
    cleared = v.WorkerCleared("w0", 1, "idle and answering")
    story.tell("r.r2", cleared)
    story.tell("fleet", EXCLUDED)
    assert found(story, lasts_ms=lasts_ms) == wrong


def test_dead_replicas_do_not_count(story: Story) -> None:
    story.tell("r.r1", observed())
    story.tell("fleet", v.ReplicaLost("r3", 1))
    story.tell("fleet", EXCLUDED)
    assert found(story) == []


def test_other_verdicts_are_those_of_one_replica(story: Story) -> None:
    story.tell("fleet", structs.replace(EXCLUDED, failure=FailureClass.HANG))
    assert found(story) == []
