"""A worker whose agent stops: nothing new goes there, and its requests leave within its time."""

from __future__ import annotations

from relume.events import vocabulary as v
from relume.events.vocabulary.enums import Exclusion, HealthState
from relume.policies.health.open_workers import is_open
from relume.policies.leader.duties import step
from relume.policies.migration import moves
from relume.policies.routing.eligibility import excluded_as_holder, excluded_at
from tests.policies.health.led_fleet import LedFleet
from tests.policies.leader.test_drain_floor import command
from tests.policies.test_migration import asked, drain, fleet_of, running, view_of

LEAVES = v.WorkerLeaving("w0", 20_000)


def test_nothing_new_goes_to_a_worker_that_leaves_until_its_next_agent() -> None:
    story = fleet_of()
    worker = story.fleet.workers["w0"]
    for leaves in (True, False):
        again = v.WorkerRegistered(worker="w0", domain="host-w0", agent_pid=8)
        story.tell("w.w0", *((LEAVES,) if leaves else (again, v.EngineStarted("w0", 2, 102, 1))))
        if not leaves:
            ready = v.EngineReady(
                worker="w0", incarnation=2, host="127.0.0.1", port=9000, model=worker.model,
                max_model_len=4096, block_size=16, kv_blocks=512,
            )  # fmt: skip
            story.tell("w.w0", ready)
        expected = Exclusion.DRAINING if leaves else Exclusion.NONE
        assert excluded_at(view_of(story), worker) == expected
        assert excluded_as_holder(worker) == expected
        assert is_open(story.fleet, worker) is not leaves
        assert not worker.draining, "no operator drains it"


def test_the_leader_says_that_a_worker_leaves() -> None:
    fleet = LedFleet()
    fleet.tell("w.w0", LEAVES)
    assert fleet.state() == HealthState.DRAINING
    assert fleet.health().evidence == "its agent stops"


def test_an_undrain_does_not_keep_a_worker_that_leaves() -> None:
    story = fleet_of()
    drain(story)
    story.tell("w.w0", LEAVES)
    undrain = v.AdminCommanded(command_id="c9", principal="ann", command="undrain", target="w0")
    story.tell("r.r0", undrain)
    story.tell("fleet", *step(story.fleet, undrain))
    worker = story.fleet.workers["w0"]
    assert not worker.draining
    assert excluded_at(view_of(story), worker) == Exclusion.DRAINING


def test_an_operators_drain_outlives_the_agent() -> None:
    story = fleet_of()
    drain(story)
    story.tell("w.w0", LEAVES, v.WorkerDeregistered("w0", "agent stopped"))
    story.tell("w.w0", v.WorkerRegistered(worker="w0", domain="host-w0", agent_pid=8))
    assert story.fleet.workers["w0"].draining and story.fleet.workers["w0"].drains


def test_a_worker_that_leaves_does_not_count_for_the_floor() -> None:
    story = fleet_of()
    story.tell("w.w0", LEAVES)
    event = command("c1", "w1")
    story.tell("r.r0", event)
    (first,) = step(story.fleet, event)
    assert type(first) is v.EffectsDecided, "w2 is open"
    story.tell("fleet", first)
    event = command("c2", "w2")
    story.tell("r.r0", event)
    (refused,) = step(story.fleet, event)
    assert type(refused) is v.ConfigChanged and "0 of model" in refused.value


def test_requests_leave_at_any_pause_in_the_second_half_of_the_time() -> None:
    story = fleet_of(prefill_ns=100_000_000)
    running(story, "lags", blocks=5)
    running(story, "unheld", blocks=0)
    story.tell("w.w0", LEAVES)
    assert moves.sources(view_of(story)) == [("w0", "drain")]
    for ticks, reasons in ((0, ["catching up"] * 2), (9, ["too long a pause"] * 2), (1, ["", ""])):
        story.healthy_ticks(ticks)
        choices = moves.plan(view_of(story), "drain", "w0", 1, asked("lags", "unheld"))
        assert [c.reason for c in choices] == reasons
    assert all(c.chosen >= 0 for c in choices)


def test_a_drain_before_the_first_tick_has_a_beginning() -> None:
    story = fleet_of()
    running(story, "q1")
    story.fleet.tick = -1
    drain(story)
    (choice,) = moves.plan(view_of(story), "drain", "w0", 1, asked("q1"))
    assert choice.chosen >= 0
