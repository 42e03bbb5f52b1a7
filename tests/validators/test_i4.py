"""I4: a request has at most one live attempt and one owner."""

from __future__ import annotations

import msgspec
import pytest

from relume.chaos.validators.promises.requests import (
    i1_one_terminal_event,
    i3_indices,
    i4_one_live_epoch,
)
from relume.events import vocabulary as v
from relume.events.log.codec import encode
from tests.policies.story import Story, arrived, decided, ended, engine_step, observed, queued
from tests.validators.builders import about, held, moved, short, whole


def test_i4_finds_two_live_attempts() -> None:
    story = short()
    story.tell("r.r0", decided(attempt=2, worker="w1"))
    assert "while 1 was live" in about(i4_one_live_epoch.check(story.groups, []))
    assert i4_one_live_epoch.check(moved(17).groups, []) == []


def test_i4_finds_two_gateways() -> None:
    story = short()
    story.replica("r1")
    story.tell("r.r1", observed())
    assert "r.r0 and r.r1" in about(i4_one_live_epoch.check(story.groups, []))


def test_a_client_that_came_back_changes_the_owner_and_nothing_else() -> None:
    story = short()
    story.replica("r1")
    story.tell("r.r1", v.ClientReturned(request="q1", claim="c1", attempt=1, tokens=5, events=0))
    story.tell("r.r0", observed(attempt=7), ended())  # it had not heard of it: void
    assert "no terminal event" in about(i1_one_terminal_event.check(story.groups, []))
    story.tell("r.r1", observed())
    assert "had delivered 0 tokens, 5" in about(i3_indices.check(story.groups, []))
    story.tell("r.r1", ended())
    assert i1_one_terminal_event.check(story.groups, []) == []
    assert i4_one_live_epoch.check(story.groups, []) == []
    story.tell(
        "r.r0", v.ClientReturned(request="q1", claim="c2", attempt=1, tokens=5, events=0)
    )  # it was over
    assert i1_one_terminal_event.check(story.groups, []) == []


@pytest.mark.parametrize("told", ["before", "after"])
def test_what_an_owner_wrote_is_void_once_another_has_dispatched(told: str) -> None:
    story = short()
    story.worker("w1")
    story.replica("r1")
    story.tell("r.r1", v.ClientReturned(request="q1", claim="c1", attempt=1, tokens=5, events=0))
    if told == "before":
        story.tell("r.r0", observed(), decided(attempt=2, worker="w1"))
    story.tell("r.r1", observed(), decided(attempt=2, worker="w1"))
    if told == "after":
        story.tell("r.r0", observed(), decided(attempt=2, worker="w1"))
    story.tell("r.r0", v.ClientReturned(request="q1", claim="c2", attempt=2, tokens=5, events=0))
    assert i4_one_live_epoch.check(story.groups, []) == []


@pytest.mark.parametrize("told", [True, False])
def test_what_an_owner_wrote_before_its_client_came_back_counts(told: bool) -> None:
    """It had gone on meanwhile; what it did not write did not happen."""
    story = short()
    story.worker("w1")
    story.replica("r1")
    story.tell("r.r1", v.ClientReturned(request="q1", claim="c1", attempt=1, tokens=5, events=0))
    if told:
        story.tell("r.r0", observed(attempt=1))
    story.tell("r.r0", v.ClientReturned(request="q1", claim="c2", attempt=1, tokens=5, events=0))
    story.tell("r.r0", decided(attempt=2, worker="w1"))
    found = i4_one_live_epoch.check(story.groups, [])
    assert found == [] if told else "while 1 was live" in about(found)


def test_i4_finds_a_dispatch_after_the_end() -> None:
    story = whole()
    story.tell("r.r0", decided(attempt=2, worker="w1"))
    assert "after the end" in about(i4_one_live_epoch.check(story.groups, []))


def test_i4_finds_a_skipped_attempt() -> None:
    story = short()
    story.tell("r.r0", observed(), decided(attempt=3, worker="w1"))
    assert "follows attempt 1" in about(i4_one_live_epoch.check(story.groups, []))


def test_i4_finds_an_engine_that_was_never_chosen() -> None:
    story = short()
    story.tell("w.w1", engine_step(queued()))
    found = about(i4_one_live_epoch.check(story.groups, []))
    assert "taken by w1:1" in found
    assert "2 engines" in found


def of_a_former_log(*events: object, stated: int = 3) -> Story:
    """w0 reports an attempt that it has (0: it had finished it before), and no dispatch of it; its client
    returns to r0."""
    story = Story()
    story.replica()
    for worker in ("w0", "w1"):
        story.worker(worker)
    if stated:
        story.tell("w.w0", engine_step(queued(attempt=stated)))
    returned = v.ClientReturned(request="q1", claim="c1", attempt=3, tokens=5, events=0)
    story.tell("r.r0", arrived(), returned, *events)
    return story


@pytest.mark.parametrize(
    ("story", "says"),
    [
        (of_a_former_log(), ""),
        (of_a_former_log(observed(attempt=3), decided(attempt=4, worker="w1")), ""),
        (of_a_former_log(decided(attempt=4, worker="w1")), "attempt 4 was dispatched while 3 was live"),
        (of_a_former_log(observed(attempt=3), decided(attempt=3, worker="w1")), "attempt 3 follows attempt 3"),
        (of_a_former_log(observed(attempt=3), decided(attempt=5, worker="w1")), "attempt 5 follows attempt 3"),
        (of_a_former_log(decided(attempt=4, worker="w1"), stated=2), "attempt 4 follows attempt 0"),
        (of_a_former_log(observed(attempt=3), decided(attempt=4, worker="w1"), stated=0), ""),
        (of_a_former_log(observed(attempt=3), decided(attempt=5, worker="w1"), stated=0), "attempt 5 follows"),
    ],
)  # fmt: skip
def test_i4_counts_the_attempt_under_which_a_stream_of_a_former_log_runs(
    story: Story, says: str
) -> None:
    found = i4_one_live_epoch.check(story.groups, [])
    assert says in about(found) if says else found == []


def adopted(
    attempt: int, worker: str = "w1", killed: bool = True, queues: bool = True, holds: bool = False
) -> Story:
    """r0 sent attempt 2 to `worker` and did not write it, w1 took it; r1 goes on with `attempt`."""
    story = short()
    story.worker("w2")
    sent = msgspec.structs.replace(decided(attempt=2, worker=worker), decision="r0.b1.7")
    if queues:
        story.tell("w.w1", engine_step(queued(attempt=2, dispatch=encode(sent))))
    if holds:
        story.tell("w.w2", msgspec.structs.replace(held("w2", "q1", 32), attempt=2))
    if killed:
        story.own("r.r0")
        story.replica("r0", "b2")
    story.replica("r1")
    returned = v.ClientReturned(request="q1", claim="c1", attempt=1, tokens=5, events=0)
    basis = v.Basis(story.revision, 1)
    story.tell("r.r1", returned, observed(), decided(attempt=attempt, worker="w2", basis=basis))
    return story


@pytest.mark.parametrize(
    ("attempt", "changes", "says"),
    [
        (3, {}, ""),
        (2, {}, ""),
        (4, {}, "attempt 4 follows attempt 1"),
        (3, {"queues": False}, "attempt 3 follows attempt 1"),
        (3, {"queues": False, "holds": True}, ""),
        (2, {"killed": False}, "attempt 2 was sent to w2:1 and taken by w1:1"),
        (2, {"worker": "w0"}, "attempt 2 was sent to w2:1 and taken by w1:1"),
    ],
)
def test_i4_knows_attempts_that_a_killed_gateway_did_not_write(
    attempt: int, changes: dict[str, bool | str], says: str
) -> None:
    found = i4_one_live_epoch.check(adopted(attempt, **changes).groups, [])
    assert says in about(found) if says else found == []


@pytest.mark.parametrize("has_read", [False, True])
def test_i4_knows_what_an_owner_sent_before_it_read_that_another_one_is(has_read: bool) -> None:
    """Composed 25577: r0 moved the stream in the millisecond in which its client returned to r1."""
    story = short()
    story.worker("w2")
    story.replica("r1")
    story.tell("r.r1", v.ClientReturned(request="q1", claim="c1", attempt=1, tokens=5, events=0))
    basis = v.Basis(story.revision if has_read else story.revision - 1, 1)
    sent = msgspec.structs.replace(decided(attempt=2, worker="w1"), basis=basis)
    story.tell("w.w1", engine_step(queued(attempt=2)))
    story.tell("r.r0", observed(), sent)
    story.tell("r.r1", observed(), decided(attempt=2, worker="w2"))
    story.tell("w.w2", engine_step(queued(attempt=2)))
    found = [str(one) for one in i4_one_live_epoch.check(story.groups, [])]
    assert any("attempt 2 was taken by 2 engines" in one for one in found) is has_read
    assert has_read or not found


@pytest.mark.parametrize("has_read", [False, True])
def test_i4_knows_what_an_owner_sent_whose_client_was_elsewhere_meanwhile(has_read: bool) -> None:
    """Composed 82269: etcd's answers to r0 were lost. Its client was at r1, and came back to r0."""
    story = short()
    story.worker("w2")
    story.replica("r1")
    before = v.Basis(story.revision, 1)
    story.tell("r.r1", v.ClientReturned(request="q1", claim="c1", attempt=1, tokens=5, events=0))
    story.tell("r.r1", observed(), decided(attempt=2, worker="w2"))
    story.tell("w.w2", engine_step(queued(attempt=2)))
    story.tell("w.w1", engine_step(queued(attempt=2)))
    basis = v.Basis(story.revision, 1) if has_read else before
    sent = msgspec.structs.replace(decided(attempt=2, worker="w1"), basis=basis)
    back = v.ClientReturned(request="q1", claim="c2", attempt=1, tokens=5, events=0)
    story.tell("r.r0", back, observed(), sent)
    found = [str(one) for one in i4_one_live_epoch.check(story.groups, [])]
    assert any("attempt 2 was taken by 2 engines" in one for one in found) is has_read
    assert has_read or not found


@pytest.mark.parametrize(("returns_to", "fine"), [("r.r0", True), ("r.r1", False)])
def test_a_return_that_lands_late_ends_what_was_dispatched_meanwhile(
    returns_to: str, fine: bool
) -> None:
    """Composed 1067: r0 writes late. Its client was there, and then at r1, which moved the stream."""

    def back() -> v.ClientReturned:
        claim = f"c{len(story.groups)}"
        return v.ClientReturned(request="q1", claim=claim, attempt=1, tokens=5, events=0)

    story = short()
    story.replica("r1")
    story.tell("r.r1", back(), observed(), decided(attempt=2, worker="w1"))
    story.tell(returns_to, back())
    sent = decided(attempt=3, worker="w1", basis=v.Basis(story.revision, 1))
    story.tell("r.r1", back(), sent)
    found = i4_one_live_epoch.check(story.groups, [])
    assert found == [] if fine else "while 2 was live" in about(found)


def test_numbers_that_an_owner_used_before_it_had_read_of_the_next_one_may_be_skipped() -> None:
    """Composed 120668: the client came back to it before either replica could write."""

    def back(attempt: int) -> v.ClientReturned:
        return v.ClientReturned(
            request="q1", claim=f"c{attempt}", attempt=attempt, tokens=5, events=0
        )

    story = short()
    story.replica("r1")
    before = v.Basis(story.revision, 1)
    story.tell("r.r1", back(1))
    meanwhile = decided(attempt=2, worker="w1", basis=before)
    story.tell("r.r0", observed(), meanwhile, observed(attempt=2, worker="w1"), back(2))
    story.tell("r.r0", decided(attempt=3, worker="w1", basis=v.Basis(story.revision, 1)))
    assert i4_one_live_epoch.check(story.groups, []) == []


@pytest.mark.parametrize("has_read", [False, True])
def test_numbers_of_dispatches_that_an_owner_had_not_read_are_free_to_it(has_read: bool) -> None:
    """Composed 169804: a client went to and fro while the log was slow."""

    def back(claim: str) -> v.ClientReturned:
        return v.ClientReturned(request="q1", claim=claim, attempt=1, tokens=5, events=0)

    story = short()
    story.replica("r1")
    story.tell("r.r1", back("c1"))
    before = v.Basis(story.revision, 1)
    story.tell(
        "r.r1", observed(), decided(attempt=2, worker="w1", basis=before),
        observed(attempt=2, worker="w1"), decided(attempt=3, worker="w1", basis=before),
    )  # fmt: skip
    basis = v.Basis(story.revision, 1) if has_read else before
    story.tell("r.r0", back("c2"), decided(attempt=2, worker="w1", basis=basis))
    found = i4_one_live_epoch.check(story.groups, [])
    assert ("attempt 2 follows attempt 3" in about(found)) if has_read else found == []
