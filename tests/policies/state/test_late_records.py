"""Records that come late, of what is over: they change nothing that is decided by."""

from __future__ import annotations

from msgspec import structs

from relume.events import vocabulary as v
from relume.events.vocabulary.enums import EnginePhase
from relume.policies.routing.eligibility import excluded_at
from relume.policies.state.invariants import check
from relume.policies.state.overlay.view import View
from tests.policies.story import (
    Story,
    arrived,
    assert_idle,
    decided,
    died,
    ended,
    engine_step,
    finished,
    queued,
    ready,
    started,
)


def test_a_ready_record_after_the_death_revives_no_engine() -> None:
    story = Story()
    worker = story.worker()
    story.replica()
    story.tell("w.w0", died())
    story.tell("w.w0", ready())
    assert worker.engine == EnginePhase.DEAD
    assert excluded_at(View("r.r0", story.fleet), worker)
    story.tell("w.w0", started("w0", 2), ready("w0", 2))
    assert not excluded_at(View("r.r0", story.fleet), worker)


def test_one_death_told_twice_is_one_death() -> None:
    """Its agent wrote of it, and the agent that took over as well."""
    story = Story()
    worker = story.worker()
    story.tell("w.w0", died())
    story.tell("w.w0", died())
    assert worker.deaths == 1
    story.tell("w.w0", started("w0", 2), died("w0", 2))
    assert worker.deaths == 2


def test_a_new_agent_has_ended_the_engine_of_the_one_before() -> None:
    story = Story()
    worker = story.worker()
    story.replica()
    story.tell("r.r0", arrived(), decided())
    story.tell("w.w0", engine_step(queued()))
    story.tell("w.w0", v.WorkerRegistered(worker="w0", domain="host", agent_pid=8))
    assert worker.engine == EnginePhase.DEAD
    assert excluded_at(View("r.r0", story.fleet), worker)
    assert_idle(worker)


def test_a_new_engine_counts_what_decodes_from_its_first_step_on() -> None:
    """Its steps begin at 1, below those of the engine before."""
    story = Story()
    worker = story.worker()
    story.tell("w.w0", structs.replace(engine_step(), step=500, batch=4))
    assert worker.decoding == 4
    story.tell("w.w0", died(), started("w0", 2), ready("w0", 2))
    story.tell("w.w0", structs.replace(engine_step(incarnation=2), step=1, batch=3))
    assert worker.decoding == 3


def test_a_dispatch_that_comes_after_the_engine_finished_is_not_held_there() -> None:
    story = Story()
    worker = story.worker()
    story.replica()
    story.tell("r.r0", arrived())
    story.tell("w.w0", engine_step(queued()), engine_step(finished()))
    story.tell("r.r0", decided())
    assert_idle(worker)
    assert story.fleet.requests["q1"].places == []


def test_prompts_of_a_dead_engine_are_not_left_to_the_next() -> None:
    story = Story()
    worker = story.worker()
    story.replica()
    story.tell("r.r0", arrived(), decided())
    story.tell("w.w0", engine_step(queued()))
    assert (worker.prefilling, worker.prefilling_tokens) == (1, 100)
    story.tell("w.w0", died(), started("w0", 2), ready("w0", 2))
    assert (worker.prefilling, worker.prefilling_tokens) == (0, 0)
    assert [*check(story.fleet)] == []


def test_an_engine_holds_an_ended_request_until_it_says_otherwise() -> None:
    story = Story()
    worker = story.worker()
    story.replica()
    story.tell("r.r0", arrived(), decided())
    story.tell("w.w0", engine_step(queued()))
    story.tell("r.r0", ended(outcome="cancelled"))
    assert (len(worker.attempts), worker.prefill_left) == (1, 100)
    story.tell("w.w0", engine_step(finished()))
    assert_idle(worker)


def test_a_dispatch_of_the_former_owner_does_not_say_where_an_adopted_request_runs() -> None:
    story = Story()
    for name in ("w0", "w1"):
        story.worker(name)
    for name in ("r0", "r1"):
        story.replica(name)
    story.tell("r.r0", structs.replace(arrived(), resumable="token", grace_ticks=9), decided())
    story.tell("r.r1", v.ClientReturned(request="q1", claim="c", attempt=1, tokens=0, events=0))
    story.tell("r.r1", decided(attempt=3))
    story.tell("r.r0", decided(attempt=2, worker="w1"))
    request = story.fleet.requests["q1"]
    assert (request.owner, request.attempt, request.worker) == ("r.r1", 3, "w0")


def test_a_gateways_death_that_is_told_twice_does_not_prolong_the_grace_of_its_streams() -> None:
    story = Story()
    story.replica()
    story.leader()
    story.healthy_ticks(5)
    story.tell("r.r0", structs.replace(arrived(), resumable="token", grace_ticks=9))
    lost = v.ReplicaLost("r0", story.epochs["r.r0"])
    story.tell("fleet", lost)
    due = story.fleet.requests["q1"].due
    story.healthy_ticks(4)
    story.tell("fleet", lost)
    assert story.fleet.requests["q1"].due == due > story.fleet.tick
