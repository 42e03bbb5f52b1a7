"""Whichever of worker and replica stream comes first, the account converges."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from relume.events import vocabulary as v
from relume.events.vocabulary.step_changes import AnyChange
from relume.policies.state.account import CHANGES, TOMBSTONE_TICKS
from relume.policies.state.invariants import check
from tests.policies.story import (
    Story,
    arrived,
    assert_idle,
    decided,
    dropped,
    ended,
    engine_step,
    finished,
    observed,
    queued,
)

REPLICA_STORIES: dict[str, list[Any]] = {
    "completed": [decided(), ended()],
    "cancelled at once": [decided(), ended(outcome="cancelled")],
    "refused, then ended": [decided(), observed(kind="refused"), ended(outcome="failed")],
    "cut, and never ended": [decided(), observed(kind="timeout")],
}
WORKER_STORIES: dict[str, list[Any]] = {
    "never reached the engine": [],
    "finished": [
        engine_step(queued()),
        engine_step(v.RequestAdmitted("q1", 1, 16), v.PrefillChunkDone("q1", 1, 84, 100)),
        engine_step(v.FirstToken("q1", 1)),
        engine_step(finished()),
    ],
    "aborted while waiting": [engine_step(queued()), engine_step(finished())],
    "finish dropped": [engine_step(queued()), engine_step(lost=3)],
    "all dropped": [engine_step(lost=9)],
    "finish dropped by its agent": [engine_step(queued()), dropped()],
    "all dropped by its agent": [dropped()],
    "finished after a drop": [engine_step(queued()), engine_step(lost=1), engine_step(finished())],
    "preempted": [
        engine_step(queued()),
        engine_step(v.RequestAdmitted("q1", 1, 0), v.RequestPreempted("q1", 1)),
        engine_step(v.RequestAdmitted("q1", 1, 99), v.FirstToken("q1", 1)),
        engine_step(finished()),
    ],
}


def interleavings(left: list[Any], right: list[Any]) -> Iterator[list[tuple[str, Any]]]:
    if not left or not right:
        yield [("r.r0", e) for e in left] + [("w.w0", e) for e in right]
        return
    for rest in interleavings(left[1:], right):
        yield [("r.r0", left[0]), *rest]
    for rest in interleavings(left, right[1:]):
        yield [("w.w0", right[0]), *rest]


def told(order: list[tuple[str, Any]]) -> Story:
    story = Story()
    story.worker()
    story.replica()
    story.tell("r.r0", arrived())
    for stream, event in order:
        story.tell(stream, event)
    return story


# A finish that was dropped is known by the request's end alone.
PAIRS = [
    (ours, theirs)
    for ours in REPLICA_STORIES
    for theirs in WORKER_STORIES
    if not ("never ended" in ours and "drop" in theirs)
]


@pytest.mark.parametrize(("replica_story", "worker_story"), PAIRS)
def test_every_interleaving_ends_with_an_empty_account(
    replica_story: str, worker_story: str
) -> None:
    orders = list(interleavings(REPLICA_STORIES[replica_story], WORKER_STORIES[worker_story]))
    for order in orders:
        story = told(order)
        worker = story.fleet.workers["w0"]
        assert_idle(worker)
        story.leader()
        story.healthy_ticks(TOMBSTONE_TICKS + 2)
        assert worker.finished_early == {}, order


def test_the_load_of_an_engine_whose_reports_are_dropped_is_known_with_its_next_step() -> None:
    """It may be idle since, and then reports nothing more."""
    story = told([("r.r0", decided()), ("w.w0", engine_step(queued()))])
    worker = story.fleet.workers["w0"]
    story.tell("w.w0", dropped(incarnation=2))
    assert (worker.batch, worker.decoding, worker.context, worker.lost_records) == (1, 1, 100, 0)
    story.tell("w.w0", dropped(count=3))
    assert worker.batch == worker.sum_context == worker.decoding == worker.context == 0
    assert worker.kv_used == worker.waiting == 0 and worker.lost_records == 3
    assert list(check(story.fleet)) == []
    story.tell("w.w0", structs.replace(engine_step(), step=2))
    assert (worker.batch, worker.decoding, worker.context, worker.kv_used) == (1, 1, 100, 8)


def test_live_attempt_is_counted_once_in_every_interleaving() -> None:
    replica = [decided()]
    worker = [engine_step(queued(prompt=120)), engine_step(v.RequestAdmitted("q1", 1, 20))]
    for order in interleavings(replica, worker):
        account = told(order).fleet.workers["w0"]
        assert (account.prefill_left, len(account.attempts)) == (100, 1), order
        assert account.attempts["q1/1"].dispatched
        assert account.attempts["q1/1"].queued


ENDED = [name for name in REPLICA_STORIES if "never ended" not in name]
LIVES = st.lists(
    st.tuples(st.sampled_from(ENDED), st.sampled_from(list(WORKER_STORIES))),
    min_size=1,
    max_size=5,
)


def renamed(event: Any, request: str) -> Any:
    """`event` about another request."""
    if isinstance(event, v.EngineStep):
        return structs.replace(event, changes=tuple(renamed(c, request) for c in event.changes))
    return structs.replace(event, request=request) if hasattr(event, "request") else event


@settings(max_examples=150, deadline=None)
@given(LIVES, st.randoms(use_true_random=False))
def test_many_requests_in_any_order_drain_to_zero(lives: Any, rng: Any) -> None:
    """Streams keep their own order; beyond that anything may come between."""
    replica: list[list[Any]] = []
    worker: list[list[Any]] = []
    for number, (ours, theirs) in enumerate(lives):
        name = f"q{number}"
        replica.append([arrived(name), *(renamed(e, name) for e in REPLICA_STORIES[ours])])
        worker.append([renamed(e, name) for e in WORKER_STORIES[theirs]])
    queues = [("r.r0", q) for q in replica] + [("w.w0", q) for q in worker if q]
    story = Story()
    story.worker()
    story.replica()
    while queues:
        index = rng.randrange(len(queues))
        stream, queue = queues[index]
        story.tell(stream, queue.pop(0))
        assert [*check(story.fleet)] == []
        if not queue:
            del queues[index]
    assert_idle(story.fleet.workers["w0"])
    assert story.fleet.requests == {}
    assert story.fleet.arrived == story.fleet.ended == len(lives)


def test_every_change_of_an_engine_step_has_a_handler() -> None:
    """The fold looks it up without a default, so one that lacks would end every replica."""
    assert CHANGES.keys() == set(get_args(AnyChange))
