"""I27: a rolling restart goes domain by domain, and returns new engines alone."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from relume.chaos.validators.promises.workers import i27_rolling_restart
from relume.events import vocabulary as v
from relume.events.vocabulary.enums import AdminCommand, EffectKind, HealthState, RolloutStage
from tests.policies.rollout.test_rollout import RollingFleet, health_decided
from tests.policies.story import MODEL, Story, ready, started


def found(story: Story) -> list[str]:
    return [each.detail for each in i27_rolling_restart.check(story.groups, [])]


def stage(stage: RolloutStage, *workers: str) -> v.RolloutDecided:
    return v.RolloutDecided(rollout="c", model=MODEL, stage=stage, workers=workers, left=0)


@pytest.fixture
def story() -> Story:
    """w0 and w1 in one domain, w2 in another."""
    story = Story()
    for name, domain in (("w0", "a"), ("w1", "a"), ("w2", "b")):
        registered = v.WorkerRegistered(worker=name, domain=domain, agent_pid=7)
        story.tell(f"w.{name}", registered, started(name), ready(name))
    story.leader()
    story.healthy_ticks(2)
    return story


def test_what_the_leader_decides_is_right() -> None:
    fleet = RollingFleet("a", "a", "b")
    for name in ("w0", "w1", "w2"):
        fleet.canary(name)
    fleet.command()
    for names in (("w0", "w1"), ("w2",)):
        fleet.healthy_ticks(3)
        for name in names:
            fleet.again(name)
        fleet.healthy_ticks(1)
        for name in names:
            fleet.canary(name)
        fleet.healthy_ticks(2)
    assert fleet.stages[-1].stage == RolloutStage.DONE
    assert found(fleet) == []


def test_two_domains_at_once_are_found(story: Story) -> None:
    story.tell("fleet", stage(RolloutStage.DRAINING, "w0", "w2"))
    assert found(story) == ["w0, w2 drain at once, of 2 domains"]


def test_a_step_before_the_last_one_is_over_is_found(story: Story) -> None:
    for name in ("w0", "w2"):
        story.tell("fleet", stage(RolloutStage.DRAINING, name))
    assert found(story) == ["w2 drain before w0 returned"]


def test_a_step_that_leaves_nobody_open_is_found(story: Story) -> None:
    story.tell("w.w2", v.EngineDied("w2", 1, "killed"))
    story.healthy_ticks(1)
    story.tell("fleet", stage(RolloutStage.DRAINING, "w0", "w1"))
    assert found(story) == [f"w0, w1 drain, and no other worker of {MODEL} is open"]


def test_a_step_beside_a_quarantined_worker_is_found(story: Story) -> None:
    story.tell("fleet", health_decided("w2", HealthState.QUARANTINED))
    story.healthy_ticks(1)
    story.tell("fleet", stage(RolloutStage.DRAINING, "w0"))
    assert found(story) == ["w0 drain while w2 is quarantined"]


def test_an_old_engine_that_returns_is_found(story: Story) -> None:
    story.tell("fleet", stage(RolloutStage.DRAINING, "w0"), stage(RolloutStage.RESTARTING, "w0"))
    story.healthy_ticks(1)
    story.tell("fleet", stage(RolloutStage.RETURNED, "w0"))
    assert found(story) == ["w0 returns with engine 1, ready"]


def test_an_engine_that_returns_without_its_canary_is_found(story: Story) -> None:
    answer = v.CanaryReported(worker="w0", incarnation=1, canary=0, prompts=1, tokens=(1,))
    story.tell("w.w0", answer)
    story.tell("fleet", stage(RolloutStage.DRAINING, "w0"))
    story.tell("w.w0", v.EngineDied("w0", 1, "replaced"), started("w0", 2), ready("w0", 2))
    story.healthy_ticks(1)
    story.tell("fleet", stage(RolloutStage.RETURNED, "w0"))
    assert found(story) == ["w0 returns before its new engine answered a canary"]


def test_a_canary_answered_after_the_tick_is_another_one(story: Story) -> None:
    answer = v.CanaryReported(worker="w0", incarnation=1, canary=0, prompts=1, tokens=(1,))
    again = replace(answer, incarnation=2)
    story.tell("w.w0", answer)
    story.tell("fleet", stage(RolloutStage.DRAINING, "w0"))
    story.tell("w.w0", v.EngineDied("w0", 1, "replaced"), started("w0", 2), ready("w0", 2), again)
    story.healthy_ticks(1)
    story.tell("w.w0", replace(again, canary=1))
    story.tell("fleet", stage(RolloutStage.RETURNED, "w0"))
    assert found(story) == []


def test_a_cancelled_one_returns_what_it_has(story: Story) -> None:
    story.tell("fleet", stage(RolloutStage.DRAINING, "w0"))
    story.tell("fleet", stage(RolloutStage.CANCELLED, "w0"))
    story.tell("fleet", stage(RolloutStage.DRAINING, "w2"))
    assert found(story) == []


@pytest.mark.parametrize("back", [False, True])
def test_a_step_beside_a_lost_host_is_found(story: Story, back: bool) -> None:
    story.tell("fleet", stage(RolloutStage.BEGUN, "w0", "w1", "w2"))
    story.lapse("w.w2")
    story.tell("fleet", v.WorkerLost("w2", story.fleet.workers["w2"].epoch, "lease lapsed"))
    story.healthy_ticks(1)
    if back:
        story.tell("w.w2", v.WorkerRegistered(worker="w2", domain="b", agent_pid=8))
        story.healthy_ticks(1)
    story.tell("fleet", stage(RolloutStage.DRAINING, "w0", "w1"))
    assert ("w0, w1 drain while the host of w2 is lost" in found(story)) is not back


def test_a_lost_worker_that_counts_as_back_is_found(story: Story) -> None:
    story.tell("fleet", stage(RolloutStage.BEGUN, "w2"), stage(RolloutStage.DRAINING, "w2"))
    story.lapse("w.w2")
    story.tell("fleet", v.WorkerLost("w2", story.fleet.workers["w2"].epoch, "lease lapsed"))
    story.healthy_ticks(1)
    story.tell("fleet", stage(RolloutStage.RETURNED, "w2"))
    assert found(story) == ["w2 counts as back while its host is lost"]


@pytest.mark.parametrize("other", ["well", "dead", "none fit"])
def test_a_restart_that_leaves_no_worker_is_found(story: Story, other: str) -> None:
    story.tell("fleet", stage(RolloutStage.DRAINING, "w0", "w1"))
    if other != "well":
        story.tell("w.w2", v.EngineDied("w2", 1, "killed"))
    if other == "none fit":
        for name in ("w0", "w1"):
            story.tell(f"w.{name}", v.EngineDied(name, 1, "killed"))
    story.healthy_ticks(1)
    story.tell("fleet", stage(RolloutStage.RESTARTING, "w0", "w1"))
    wrong = [f"w0, w1 restart, and no other worker of {MODEL} is open"]
    assert found(story) == (wrong if other == "dead" else [])


def test_a_step_that_is_given_up_returns_its_old_engines(story: Story) -> None:
    story.tell("fleet", stage(RolloutStage.DRAINING, "w0"))
    story.healthy_ticks(1)
    given_up = replace(stage(RolloutStage.RETURNED, "w0"), reason="too few")
    story.tell("fleet", given_up)
    assert found(story) == []
    story.tell("fleet", stage(RolloutStage.DRAINING, "w0"))
    story.healthy_ticks(1)
    story.tell("fleet", stage(RolloutStage.RETURNED, "w0"))
    assert found(story) == ["w0 returns before its restart, without a reason"]


def test_a_step_that_is_restarted_is_not_given_up_whatever_it_says(story: Story) -> None:
    given_up = replace(stage(RolloutStage.RETURNED, "w0"), reason="too few")
    story.tell("fleet", stage(RolloutStage.DRAINING, "w0"), stage(RolloutStage.RESTARTING, "w0"))
    story.healthy_ticks(1)
    story.tell("fleet", given_up)
    assert found(story) == ["w0 returns with engine 1, ready"]


# --- drains


def drain(story: Story, *names: str, force: bool = False) -> None:
    """Commands, and the decisions that follow all of them."""
    known = story.revision
    for name in names:
        command = v.AdminCommanded(
            command_id=f"drain-{name}",
            principal="o",
            command=AdminCommand.DRAIN,
            target=name,
            force=force,
        )
        story.tell("r.r0", command)
    for name in names:
        story.tell("fleet", effects(f"drain-{name}", EffectKind.DRAIN, name, known))


def effects(decision: str, kind: EffectKind, name: str, basis: int) -> v.EffectsDecided:
    return v.EffectsDecided(
        decision=decision,
        basis=v.Basis(basis, 0),
        cause="o",
        effects=(v.Effect(kind, name),),
    )


def none_left(name: str, floor: int = 1) -> str:
    return f"drained {name}, and 0 of model {MODEL} stayed open, of at least {floor}"


def test_a_drain_that_leaves_an_open_worker_is_right(story: Story) -> None:
    drain(story, "w0", "w1")
    story.tell("fleet", effects("undrain", EffectKind.UNDRAIN, "w0", story.revision))
    drain(story, "w2")
    assert found(story) == []


def one_stays_open(story: Story) -> None:
    """Leaders of earlier builds, which record no minimum, have none."""
    story.tell("fleet", v.ConfigChanged("migration.drain_floor", "1", "c"))


def test_leaders_of_earlier_builds_have_no_minimum(story: Story) -> None:
    drain(story, "w0", "w1", "w2")
    assert found(story) == []


@pytest.mark.parametrize("force", [False, True])
def test_drains_decided_together_that_leave_no_worker_are_found(story: Story, force: bool) -> None:
    """The basis of each knows of none of them."""
    one_stays_open(story)
    drain(story, "w0", "w1", "w2", force=force)
    assert found(story) == ([] if force else [none_left("w2")])


@pytest.mark.parametrize("model", [MODEL, "other"])
def test_workers_of_other_models_are_not_left_for_a_model(story: Story, model: str) -> None:
    one_stays_open(story)
    story.tell("w.w2", started("w2", 2), ready("w2", 2, model))
    drain(story, "w0")
    drain(story, "w1")
    assert found(story) == ([] if model == MODEL else [none_left("w1")])


def test_a_worker_that_is_not_open_may_be_drained(story: Story) -> None:
    drain(story, "w0", "w1")
    story.tell("w.w2", v.EngineDied("w2", 1, "killed"))
    drain(story, "w2")
    assert found(story) == []


def test_the_minimum_is_that_of_the_log(story: Story) -> None:
    story.tell("fleet", v.ConfigChanged("migration.drain_floor", "3", "c"))
    drain(story, "w0")
    assert found(story) == [f"drained w0, and 2 of model {MODEL} stayed open, of at least 3"]
