"""Requests that leave a spare that was promoted, and those that a failure brings to one."""

from __future__ import annotations

from msgspec.structs import replace

from relume.events import vocabulary as v
from relume.events.vocabulary.enums import Exclusion, MigrationCause, Tier
from relume.policies.checkpoints import decisions
from relume.policies.checkpoints.decisions import Lost
from relume.policies.migration import moves
from relume.policies.migration.migration_settings import MigrationConfig
from relume.policies.routing.eligibility import excluded_at
from relume.policies.spares.spare_decisions import PROMOTED_TICKS
from tests.policies.story import MODEL, Story
from tests.policies.test_migration import asked, fleet_of, running, view_of


def spares(story: Story, *names: str, was: tuple[str, ...] = ()) -> None:
    decision = v.SparesDecided(
        model=MODEL, spares=names, was=was, since=story.fleet.tick, workers=4, failed=0,
        due=len(names), short_ticks=5,
    )  # fmt: skip
    story.tell("fleet", decision)


def promoted(requests: int, config: MigrationConfig | None = None) -> Story:
    """w0 was a spare; so many requests run there."""
    story = fleet_of("w0", "w1", "w2", "w3", config=config)
    spares(story, "w0")
    for number in range(requests):
        running(story, f"q{number}")
    assert moves.sources(view_of(story)) == []
    spares(story, was=("w0",))
    return story


def plan(story: Story, *tiers: Tier) -> list[str]:
    """What happens to q0, q1 and so on: the worker that each goes to, or why it stays."""
    asked_for = asked(*(f"q{number}" for number in range(len(tiers))))
    wanted = [replace(r, tier=tier) for r, tier in zip(asked_for, tiers, strict=True)]
    choices = moves.plan(view_of(story), MigrationCause.PROMOTION, "w0", 1, wanted)
    return [c.reason or c.options[c.chosen].worker for c in choices]


def test_batch_requests_leave_and_others_stay() -> None:
    story = promoted(5)
    assert moves.sources(view_of(story)) == [("w0", MigrationCause.PROMOTION)]
    found = plan(story, Tier.BATCH, Tier.STANDARD, Tier.BATCH, Tier.INTERACTIVE, Tier.BATCH)
    assert (found[1], found[3]) == ("not of tier batch", "not of tier batch")
    assert sorted([found[0], found[2], found[4]]) == ["w1", "w2", "w3"]


def test_they_leave_only_for_workers_with_fewer_requests() -> None:
    story = promoted(2)
    for worker in ("w1", "w2", "w3"):
        running(story, f"other on {worker}", worker, 0)
    assert plan(story, Tier.BATCH, Tier.BATCH) == ["balanced", "balanced"]


def test_they_leave_within_a_time_and_not_with_moves_off() -> None:
    story = promoted(2)
    story.healthy_ticks(PROMOTED_TICKS)
    assert moves.sources(view_of(story)) == []
    assert moves.sources(view_of(promoted(2, MigrationConfig(moves="off")))) == []


def test_a_spare_that_died_is_left_by_recovery_alone() -> None:
    story = fleet_of("w0", "w1", "w2", "w3")
    spares(story, "w0")
    running(story, "q0")
    story.tell("w.w0", v.EngineDied("w0", 1, "killed"))
    spares(story, was=("w0",))
    assert moves.sources(view_of(story)) == []


def test_a_request_that_a_worker_failed_may_be_restored_on_a_spare() -> None:
    story = fleet_of("w0", "w1", "w2", "w3")
    spares(story, "w3")
    running(story, "q0")
    story.tell("w.w0", v.EngineDied("w0", 1, "killed"))
    view = view_of(story)
    assert excluded_at(view, story.fleet.workers["w3"]) == Exclusion.SPARE
    (choice,) = decisions.plan(view, "w0", 1, [Lost("q0", 1, 321)])
    assert {o.worker: o.excluded for o in choice.options}["w3"] == Exclusion.NONE
