"""I12: nothing is left after the last request."""

from __future__ import annotations

from relume.chaos.validators.promises.workers import i12_drained
from relume.events import vocabulary as v
from tests.policies.story import ended, engine_step, finished
from tests.validators.builders import about, chosen, daemon, held, idle, short


def test_i12_finds_what_is_left() -> None:
    story = short()
    found = about(i12_drained.check(story.groups, []))
    assert "q1: is still live" in found
    assert "still holds q1/1" in found
    story.tell("w.w0", engine_step(finished()), idle())
    story.tell("r.r0", ended())
    assert i12_drained.check(story.groups, []) == []
    assert "owner" in about(i12_drained.check(story.groups, [], stopped=True))
    story.tell("w.w0", idle(kv_used=2))
    assert "2 KV blocks" in about(i12_drained.check(story.groups, []))
    story.tell("w.w0", idle(waiting=1))
    assert "waiting" in about(i12_drained.check(story.groups, []))
    story.tell(
        "r.r0", v.AdminCommanded(command_id="c1", principal="root", command="drain", target="w0")
    )
    assert "never carried out" in about(i12_drained.check(story.groups, []))


def test_i12_finds_unreleased_checkpoints() -> None:
    story = short()
    story.tell("w.w0", engine_step(finished()), idle())
    story.tell("w.w1", daemon("w1"))
    story.tell("r.r0", chosen("q1", "w1"), ended())
    assert i12_drained.check(story.groups, []) == []
    story.tell("w.w1", held("w1", "q1", 64))
    assert "checkpoints of q1" in about(i12_drained.check(story.groups, []))
    story.tell(
        "w.w1", v.CheckpointDropped(holder="w1", boot="b", request="q1", child=0, reason="finished")
    )
    assert i12_drained.check(story.groups, []) == []
