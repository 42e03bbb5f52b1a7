"""I8 and I14: checkpoints stay within the budget, and no bad block is used."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from relume.chaos.validators.promises.workers import i8_budget, i14_no_bad_block
from relume.chaos.validators.records import ClientRecord
from relume.events import vocabulary as v
from tests.policies.story import Story, died, ended, engine_step, replica_started
from tests.validators.builders import about, chosen, daemon, held, short

# --- I8


def reported(worker: str, **figures: int) -> v.StateDaemonReported:
    return v.StateDaemonReported(worker, "b", tuple(figures.items()))


def hosts() -> Story:
    """w0 and w1 in one domain, w2 in another; each with a daemon."""
    story = Story()
    for name, domain in (("w0", "a"), ("w1", "a"), ("w2", "b")):
        story.tell(
            f"w.{name}", v.WorkerRegistered(worker=name, domain=domain, agent_pid=1), daemon(name)
        )
    story.tell("r.r0", replica_started())
    return story


def test_i8_finds_more_bytes_than_the_budget() -> None:
    story = hosts()
    story.tell("w.w1", held("w1", "q1", 64), reported("w1", memory_used=640, shared=0))
    assert i8_budget.check(story.groups, []) == []
    story.tell("w.w1", held("w1", "q2", 64))
    assert "1280 bytes were acknowledged" in about(i8_budget.check(story.groups, []))
    story.tell("w.w1", reported("w1", memory_used=640, shared=2))
    assert i8_budget.check(story.groups, []) == [], "blocks of both are the same"
    story.tell("w.w1", reported("w1", memory_used=1001, shared=2))
    assert "memory_used is 1001" in about(i8_budget.check(story.groups, []))


def test_i8_finds_a_daemon_that_takes_more_than_its_host_was_given() -> None:
    story = hosts()
    assert i8_budget.check(story.groups, [], given=1000) == []
    assert "given 999" in about(i8_budget.check(story.groups, [], given=999))


def test_i8_knows_that_a_budget_may_change_after_the_last_report() -> None:
    """Composed 169506: it was small for two seconds, and the run ended before the next report."""
    story = hosts()
    story.tell("w.w1", reported("w1", memory_used=0, memory_budget=640, shared=0))
    story.tell("w.w1", held("w1", "q1", 80))
    dropped = v.CheckpointDropped(holder="w1", boot="b", request="q1", child=0, reason="finished")
    story.tell("w.w1", dropped)
    assert i8_budget.check(story.groups, []) == []
    story.tell("w.w1", held("w1", "q2", 64), held("w1", "q3", 64))
    assert "1280 bytes were acknowledged" in about(i8_budget.check(story.groups, []))


@pytest.mark.parametrize(("now", "fine"), [(1300, True), (1200, False)])
def test_i8_knows_a_budget_that_changed_while_the_daemon_ran(now: int, fine: bool) -> None:
    """Composed 162342: it was small when an agent began, and came back to its size."""
    story = hosts()
    story.tell("w.w1", held("w1", "q1", 64), held("w1", "q2", 64))
    story.tell("w.w1", reported("w1", memory_used=1150, memory_budget=now, shared=0))
    assert (i8_budget.check(story.groups, [], given=1300) == []) is fine
    story.tell("w.w1", reported("w1", memory_used=640, memory_budget=640, shared=0))
    story.tell("w.w1", reported("w1", memory_used=641, memory_budget=640, shared=0))
    assert "memory_used is 641, its budget 640" in about(i8_budget.check(story.groups, []))
    assert "takes 1300" in about(i8_budget.check(story.groups, [], given=1299)) or not fine


def test_i8_counts_the_file_and_starts_over_with_a_new_daemon() -> None:
    story = hosts()
    both = tuple(
        v.HeldPrefix(request=f"q{n}", child=0, attempt=1, blocks=4, tokens=64, bytes=640)
        for n in range(2)
    )
    story.tell("w.w1", v.CheckpointsAcknowledged("w1", "b", both))
    story.tell("w.w1", reported("w1", memory_used=900, file_used=380, file_budget=400))
    assert i8_budget.check(story.groups, []) == []
    story.tell("w.w1", reported("w1", file_used=401, file_budget=400))
    assert "file of 401" in about(i8_budget.check(story.groups, []))
    story = hosts()
    story.tell("w.w1", held("w1", "q1", 64))
    story.tell("w.w1", v.StateDaemonLost("w1", "b", "killed"), daemon("w1"))
    story.tell("w.w1", held("w1", "q2", 64))
    assert i8_budget.check(story.groups, []) == [], "the first is gone with its daemon"


def test_i8_finds_a_holder_beside_its_primary() -> None:
    story = hosts()
    story.tell("r.r0", chosen("q1", "w2", revision=story.revision))
    assert i8_budget.check(story.groups, []) == []
    before = story.revision
    story.tell("r.r0", chosen("q2", "w1", revision=before))
    assert "q2: w1 is in the failure domain of w0; w2 was up" in about(
        i8_budget.check(story.groups, [])
    )
    story = hosts()
    story.tell("w.w2", v.StateDaemonLost("w2", "b", "killed"))
    story.tell("r.r0", chosen("q2", "w1", revision=story.revision))
    assert i8_budget.check(story.groups, []) == [], "nothing else was up"
    story.tell("r.r0", chosen("q3", "w0", revision=story.revision))
    assert "q3" in about(i8_budget.check(story.groups, [])), "never the primary itself"


# --- I14


def restoring(begun: int, end: Any, tokens: int = 64) -> Story:
    """An attempt that restores `tokens` from 16 on, and then computes from `begun` on."""
    story = short()
    story.tell(
        "w.w0",
        v.RestoreStarted(
            incarnation=1,
            request="q1",
            child=0,
            attempt=1,
            holder="unix:/s",
            tokens=tokens,
            first=16,
        ),
    )
    if end is not None:
        story.tell("w.w0", end)
    story.tell("w.w0", engine_step(v.PrefillChunkDone("q1", 1, 100 - begun, 100)))
    return story


def failed(tokens: int) -> v.RestoreFailed:
    return v.RestoreFailed(
        incarnation=1,
        request="q1",
        child=0,
        attempt=1,
        holder="unix:/s",
        tokens=tokens,
        reason="corrupt",
    )


def done(tokens: int) -> v.RestoreDone:
    return v.RestoreDone(
        incarnation=1,
        request="q1",
        child=0,
        attempt=1,
        holder="unix:/s",
        tokens=tokens,
        bytes=999,
        duration_us=9,
    )


@pytest.mark.parametrize(
    ("begun", "end", "fine"),
    [
        (80, done(64), True),
        (96, done(64), False),
        (48, failed(32), True),
        (0, failed(32), True),
        (64, failed(32), False),
        (80, failed(32), False),
        (80, None, False),
    ],
)
def test_i14_finds_blocks_that_were_used_though_they_failed(
    begun: int, end: Any, fine: bool
) -> None:
    story = restoring(begun, end)
    assert (i14_no_bad_block.check(story.groups, []) == []) == fine


def test_i14_leaves_out_what_the_log_cannot_tell() -> None:
    story = restoring(80, None)
    story.tell("w.w0", died())
    assert i14_no_bad_block.check(story.groups, []) == [], "it died in its restore"
    story = short()
    story.tell(
        "w.w0",
        v.RestoreStarted(
            incarnation=1, request="q1", child=0, attempt=1, holder="unix:/s", tokens=64, first=16
        ),
        failed(32),
    )
    lost = v.EngineStep(
        incarnation=1,
        step=9,
        duration_us=5,
        batch=0,
        sum_context=0,
        prefill_tokens=0,
        waiting=0,
        kv_used=0,
        changes=(v.PrefillChunkDone("q1", 1, 9, 100),),
        lost=3,
    )
    story.tell("w.w0", lost)
    assert i14_no_bad_block.check(story.groups, []) == [], "its first chunk may be lost"


@pytest.mark.parametrize(("shared", "fine"), [(64, True), (63, False), (0, False)])
def test_i14_knows_what_others_computed_meanwhile(shared: int, fine: bool) -> None:
    story = restoring(64, failed(32))
    story.tell("r.r0", ended())
    client = ClientRecord(request="q1", status=200, outcome="completed")
    found = i14_no_bad_block.check(story.groups, [client], {"q1": shared} if shared else {})
    assert (found == []) is fine


def test_i14_compares_what_restored_requests_answered() -> None:
    story = restoring(48, failed(32))
    story.tell("r.r0", ended())
    calm = ClientRecord(
        request="calm",
        status=200,
        outcome="completed",
        text="xy",
        token_count=2,
        finish="length",
        tokens=[1, 2],
    )
    calm.content_id, calm.undisturbed = "a", True
    same = msgspec.structs.replace(calm, request="q1", undisturbed=False)
    assert i14_no_bad_block.check(story.groups, [calm, same]) == []
    other = msgspec.structs.replace(same, tokens=[1, 3])
    assert "was restored, and tokens differ" in about(
        i14_no_bad_block.check(story.groups, [calm, other])
    )
