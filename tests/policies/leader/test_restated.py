"""What the leader states again when an agent restarts: the newest word on each target."""

from __future__ import annotations

from relume.events import vocabulary as v
from relume.policies.leader.duties import step
from tests.policies.story import Story, replica_started


def decided(kind: str, number: int) -> v.EffectsDecided:
    """The leader's answer to a command on w0."""
    return v.EffectsDecided(
        decision=f"r0.{number}",
        basis=v.Basis(1, 0),
        cause=f"someone: {kind} w0",
        effects=(v.Effect(kind, "w0", 0, ""),),
    )


def test_a_drain_that_was_never_answered_is_not_stated_after_the_undrain() -> None:
    story = Story()
    story.tell("r.r0", replica_started())
    story.worker()
    story.leader()
    story.tell("fleet", decided("drain", 1))
    story.tell("fleet", decided("undrain", 2))
    story.tell("w.w0", v.EffectApplied("r0.2", 0, "applied"))
    story.tell("w.w0", v.WorkerRegistered(worker="w0", domain="host", agent_pid=8))
    assert not story.fleet.pending_effects
    story.healthy_ticks(1)
    tick = story.seen[-1]
    assert step(story.fleet, tick) == []
