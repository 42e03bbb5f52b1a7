"""A drain that would leave too few open workers is refused."""

from __future__ import annotations

from typing import Any

import pytest

from relume.events import vocabulary as v
from relume.policies.health.open_workers import is_open
from relume.policies.leader.duties import step
from relume.policies.migration.migration_settings import MigrationConfig, settings_of
from tests.policies.story import Story, ready, replica_started


def fleet_of(floor: int | None = 1, workers: int = 3) -> Story:
    story = Story()
    for number in range(workers):
        story.worker(f"w{number}")
    settings = () if floor is None else settings_of(MigrationConfig(drain_floor=floor))
    story.replica_settings = settings
    story.tell("r.r0", replica_started(settings=settings))
    story.leader()
    story.healthy_ticks(2)
    return story


def command(name: str, target: str, **more: Any) -> v.AdminCommanded:
    return v.AdminCommanded(
        command_id=name, principal="ann", command="drain", target=target, **more
    )


def answer(story: Story, event: v.AdminCommanded) -> Any:
    """What the leader answers; it is in the log then."""
    story.tell("r.r0", event)
    (decided,) = step(story.fleet, event)
    story.tell("fleet", decided)
    return decided


def test_workers_drain_down_to_the_floor_and_further_only_by_force() -> None:
    story = fleet_of(floor=2)
    assert type(answer(story, command("c1", "w0"))) is v.EffectsDecided
    refused = answer(story, command("c2", "w1"))
    assert (refused.key, refused.decision) == ("", "c2")
    assert "1 of model" in refused.value and "minimum is 2" in refused.value
    assert not story.fleet.workers["w1"].draining
    assert type(answer(story, command("c3", "w1", force=True))) is v.EffectsDecided
    assert type(answer(story, command("c4", "w1"))) is v.EffectsDecided, "it drains already"


def test_a_worker_with_unreadable_records_is_not_open() -> None:
    story = fleet_of(floor=2)
    story.tell("w.w2", b"\xc1")
    refused = answer(story, command("c1", "w0"))
    assert "1 of model" in refused.value


@pytest.mark.parametrize("floor", [0, None])
def test_without_a_floor_and_in_earlier_logs_nothing_is_refused(floor: int | None) -> None:
    story = fleet_of(floor)
    for number in range(3):
        decided = answer(story, command(f"c{number}", f"w{number}"))
        assert type(decided) is v.EffectsDecided


def test_two_commands_that_the_leader_reads_together_do_not_both_pass() -> None:
    story = fleet_of(workers=2)
    both = command("c1", "w0"), command("c2", "w1")
    story.tell("r.r0", *both)
    answers = [step(story.fleet, event) for event in both]
    assert [type(a) for (a,) in answers] == [v.EffectsDecided, v.ConfigChanged]


def test_only_workers_that_may_get_requests_count() -> None:
    story = fleet_of(workers=2)
    story.tell("w.w1", v.EngineDied("w1", 1, "killed"))
    assert type(answer(story, command("c1", "w0"))) is v.ConfigChanged
    dead = answer(story, command("c2", "w1"))
    assert type(dead) is v.EffectsDecided, "the drain of a dead engine's worker takes no capacity"


def test_workers_of_another_model_do_not_count() -> None:
    story = fleet_of(workers=1)
    story.worker("w1")
    story.tell("w.w1", v.EngineStarted("w1", 2, 102, 2), ready("w1", 2, model="another"))
    assert is_open(story.fleet, story.fleet.workers["w1"])
    assert type(answer(story, command("c1", "w0"))) is v.ConfigChanged
