"""I10: a stream continues within the recovery bound, measured from its loss to its next token."""

from __future__ import annotations

import msgspec
import pytest

from relume.chaos.validators.promises.requests import i10_recovery_bound
from relume.chaos.validators.records import ClientRecord, Log
from relume.events import vocabulary as v
from relume.events.log.interface import RevisionGroup
from tests.policies.story import (
    Story,
    decided,
    died,
    ended,
    engine_step,
    observed,
    queued,
)
from tests.validators.builders import about, short


def timed(story: Story, at_ms: dict[int, int]) -> list[RevisionGroup]:
    """The story's groups with a wall clock; revisions not named share the last time."""
    groups, now = [], 0
    for group in story.groups:
        now = at_ms.get(group.revision, now)
        segments = tuple(msgspec.structs.replace(s, at_ms=now) for s in group.segments)
        groups.append(msgspec.structs.replace(group, segments=segments))
    return groups


@pytest.mark.parametrize(("took_ms", "fine"), [(400, True), (900, False)])
def test_i10_measures_from_the_death_to_the_next_first_token(took_ms: int, fine: bool) -> None:
    story = short()
    story.tell("w.w0", died())
    dead = story.revision
    story.tell("r.r0", observed(), decided(attempt=2, worker="w1"))
    story.tell("w.w1", engine_step(queued(attempt=2), v.FirstToken("q1", 2)))
    back = story.revision
    story.tell("r.r0", ended(attempts=2))
    groups = timed(story, {1: 1000, dead: 5000, back: 5000 + took_ms, back + 1: 60_000})
    found = i10_recovery_bound.check(groups, [], bound_ms=500)
    assert (found == []) is fine


@pytest.mark.parametrize(("attempt", "fine"), [(2, True), (3, False)])
def test_i10_measures_to_the_attempt_that_was_sent_next(attempt: int, fine: bool) -> None:
    """An engine has attempt 2; if the owner skipped that number, its first token is no recovery."""
    story = short()
    story.tell("w.w1", engine_step(queued(attempt=2), v.FirstToken("q1", 2)))
    story.tell("r.r0", observed(), decided(attempt=attempt, worker="w1"))
    cut = story.revision
    story.tell("w.w1", engine_step(queued(attempt=3), v.FirstToken("q1", 3)))
    story.tell("r.r0", ended(attempts=3))
    groups = timed(story, {1: 1000, cut: 5000, cut + 1: 9000, cut + 2: 60_000})
    assert (i10_recovery_bound.check(groups, [], bound_ms=500) == []) is fine


@pytest.mark.parametrize(("took_ms", "fine"), [(400, True), (900, False)])
@pytest.mark.parametrize("back_ms", [2000, 137_000])
def test_i10_puts_a_clock_right_that_jumped_back(back_ms: int, took_ms: int, fine: bool) -> None:
    """The worker's clock shows less than before: its engine did not die that long ago."""
    story = short()
    asked = story.revision - 1
    story.tell("fleet", v.Tick(number=1, unix_ms=0))
    story.tell("w.w0", died())
    dead = story.revision
    story.tell("r.r0", observed(), decided(attempt=2, worker="w1"))
    story.tell("w.w1", engine_step(queued(attempt=2), v.FirstToken("q1", 2)))
    story.tell("r.r0", ended(attempts=2))
    times = {1: 200_000, asked: 204_990, dead: 205_000 - back_ms, dead + 1: 205_000}
    groups = timed(story, {**times, dead + 2: 205_000 + took_ms, dead + 3: 300_000})
    assert (i10_recovery_bound.check(Log(groups), [], bound_ms=500) == []) is fine


def test_i10_is_not_misled_by_a_worker_that_tells_late() -> None:
    """It was cut from the log; the gateway's word on the end came in time."""
    story = short()
    story.tell("r.r0", observed(), decided(attempt=2, worker="w1"))
    cut = story.revision
    story.tell("r.r0", ended(attempts=2))
    story.tell("w.w1", engine_step(queued(attempt=2), v.FirstToken("q1", 2)))
    groups = timed(story, {1: 1000, cut: 5000, cut + 1: 5400, cut + 2: 60_000})
    assert i10_recovery_bound.check(groups, [], bound_ms=500) == []
    assert i10_recovery_bound.check(groups, [], bound_ms=300)


def test_i10_starts_over_when_the_gateway_is_killed() -> None:
    story = short()
    story.tell("r.r0", observed())
    cut = story.revision
    story.tell("r.r0", ended())
    groups = timed(story, {1: 1000, cut: 5000, cut + 1: 5900})
    for stream, at_ms, fine in (
        ("r.r0", 5500, True), ("r.r0", 5100, False), ("r.r1", 5500, False), ("r.r0", 5950, False),
    ):  # fmt: skip
        found = i10_recovery_bound.check(groups, [], bound_ms=500, killed=[(stream, at_ms)])
        assert (found == []) is fine


@pytest.mark.parametrize(
    ("killed", "returned_ms", "fine"),
    [
        ("r.r0", 30_000, True),
        ("r.r0", 27_700, True),
        ("r.r0", 27_000, False),
        ("r.r0", 5_050, False),
        ("r.r1", 30_000, False),
    ],
)
def test_i10_begins_when_the_client_of_a_killed_gateway_returns(
    killed: str, returned_ms: int, fine: bool
) -> None:
    """Composed 174742: the next engine was stopped for 23 s. So was the client away: it returned to r1
    after the first token."""
    story = short()
    story.tell("r.r0", observed(), decided(attempt=2, worker="w1"))
    cut = story.revision
    back = v.ClientReturned(request="q1", claim="c", attempt=2, tokens=1, events=0)
    token = engine_step(queued(attempt=2), v.FirstToken("q1", 2))
    told = [("w.w1", token, 28_000), ("r.r1", back, returned_ms)]
    times = {1: 1000, cut: 5000}
    for stream, event, at_ms in sorted(told, key=lambda one: one[2]):
        story.tell(stream, event)
        times[story.revision] = at_ms
    story.tell("r.r1", ended(attempts=2))
    groups = timed(story, {**times, story.revision: 30_100})
    found = i10_recovery_bound.check(groups, [], bound_ms=500, killed=[(killed, 5020)])
    assert (found == []) is fine


def test_i10_finds_a_cut_that_nothing_followed() -> None:
    story = short()
    story.tell("r.r0", observed())
    assert "nothing followed" in about(i10_recovery_bound.check(story.groups, []))


def test_i10_finds_a_gap_a_client_saw() -> None:
    client = ClientRecord(
        request="q1", status=200, outcome="completed", gaps_ms=[3.0, 10_500.0, 4.0]
    )
    assert i10_recovery_bound.check([], [client])
    assert i10_recovery_bound.check([], [client], bound_ms=11_000) == []


@pytest.mark.parametrize(
    ("silent_ms", "steps", "fine"),
    [(3400, 500, True), (3600, 500, False), (3600, 40, True)],
)
def test_i10_bounds_the_silence_of_a_stuck_stream(silent_ms: int, steps: int, fine: bool) -> None:
    """An engine whose steps are slow must make enough of them first."""
    story = short()
    story.tell("r.r0", stuck(silent_ms, steps), observed(kind="stuck"), ended())
    assert (i10_recovery_bound.check(timed(story, {1: 1000}), []) == []) is fine


def stuck(silent_ms: int, steps: int) -> v.StreamJudged:
    return v.StreamJudged(
        decision="r0.b1.stream1",
        basis=v.Basis(0, 0),
        request="q1",
        attempt=1,
        worker="w0",
        incarnation=1,
        silent_us=silent_ms * 1000,
        from_step=1,
        probe="answered",
        steps=steps,
        decodes=True,
        finished=False,
        bound_us=1_500_000,
        stuck=True,
    )
