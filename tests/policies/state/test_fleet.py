"""The fold: workers, incarnations, replicas, leases, commands."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from relume.events import vocabulary as v
from relume.policies.state.account import TOMBSTONE_TICKS
from relume.policies.state.fleet import Fleet, dump, load, state_hash
from tests.policies.story import (
    Story,
    arrived,
    assert_idle,
    decided,
    died,
    ended,
    engine_step,
    finished,
    observed,
    queued,
    ready,
    replica_started,
    started,
)


def loaded_story() -> Story:
    """One worker with one attempt in its engine, one replica."""
    story = Story()
    story.worker()
    story.replica()
    story.tell("r.r0", arrived(), decided())
    story.tell("w.w0", engine_step(queued()))
    return story


def test_ready_engine_shows_what_it_reported() -> None:
    worker = Story().worker()
    assert (worker.engine, worker.incarnation, worker.present) == ("ready", 1, True)
    assert (worker.host, worker.port, worker.model) == ("127.0.0.1", 9000, "m")


def test_stale_incarnation_does_not_revive_worker() -> None:
    story = Story()
    worker = story.worker(incarnation=2)
    story.tell("w.w0", died(incarnation=2))
    for late in (started(incarnation=1), ready(incarnation=1), ready(incarnation=2)):
        story.tell("w.w0", late)
        assert (worker.engine, worker.incarnation) == ("dead", 2)
    story.tell("w.w0", started(incarnation=2))
    assert worker.engine == "dead", "an incarnation is never used twice"


def test_step_of_a_dead_engine_is_no_load() -> None:
    story = loaded_story()
    worker = story.fleet.workers["w0"]
    story.tell("w.w0", died())
    story.tell("w.w0", engine_step(queued("late")))
    assert_idle(worker)


def test_step_of_an_older_incarnation_is_ignored() -> None:
    story = loaded_story()
    worker = story.fleet.workers["w0"]
    story.tell("w.w0", died(), started(incarnation=2), ready(incarnation=2))
    story.tell("w.w0", engine_step(queued("late"), incarnation=1))
    assert_idle(worker)
    assert worker.batch == 0


def test_late_dispatch_to_a_dead_incarnation_opens_nothing() -> None:
    story = Story()
    worker = story.worker()
    story.replica()
    story.tell("w.w0", died(), started(incarnation=2), ready(incarnation=2))
    story.tell("r.r0", arrived(), decided(incarnation=1))
    assert_idle(worker)


def test_death_is_counted_once() -> None:
    story = Story()
    worker = story.worker()
    story.tell("w.w0", died(), died())
    assert worker.deaths == 1


def test_new_agent_means_the_engine_of_the_old_one_is_dead() -> None:
    story = loaded_story()
    worker = story.fleet.workers["w0"]
    epoch = story.own("w.w0")
    story.tell("w.w0", v.WorkerRegistered(worker="w0", domain="host", agent_pid=8))
    assert (worker.engine, worker.engine_pid, worker.epoch) == ("dead", 0, epoch)
    assert_idle(worker)


def test_resumed_stream_keeps_the_engine() -> None:
    story = loaded_story()
    worker = story.fleet.workers["w0"]
    old = worker.epoch
    story.lapse("w.w0")
    new = story.own("w.w0")
    story.tell("w.w0", v.StreamResumed(old, new))
    assert (worker.engine, worker.present, worker.epoch) == ("ready", True, new)
    assert len(worker.attempts) == 1


def test_loss_of_an_older_epoch_is_ignored() -> None:
    story = loaded_story()
    worker = story.fleet.workers["w0"]
    old = worker.epoch
    story.tell("w.w0", v.StreamResumed(old, story.own("w.w0")))
    story.tell("fleet", v.WorkerLost("w0", old, "lease lapsed"))
    assert worker.present
    story.tell("fleet", v.WorkerLost("w0", worker.epoch, "lease lapsed"))
    assert not worker.present
    assert_idle(worker)


def test_spool_lands_under_the_new_epoch_before_the_resumption() -> None:
    """StreamResumed stands behind the spooled events; a loss declared of the old epoch in
    between does not concern a stream that has been taken anew."""
    story = loaded_story()
    worker, replica = story.fleet.workers["w0"], story.fleet.replicas["r0"]
    old = {stream: story.epochs[stream] for stream in ("w.w0", "r.r0")}
    for stream in old:
        story.lapse(stream)
        story.own(stream)
    story.tell("w.w0", engine_step())
    story.tell("r.r0", arrived("q2"))
    story.tell("fleet", v.WorkerLost("w0", old["w.w0"], "lease lapsed"))
    story.tell("fleet", v.ReplicaLost("r0", old["r.r0"]))
    assert worker.present
    assert replica.alive
    assert len(worker.attempts) == 1


def test_deregistered_worker_holds_nothing() -> None:
    story = loaded_story()
    story.tell("w.w0", v.WorkerDeregistered("w0", "stopped"))
    worker = story.fleet.workers["w0"]
    assert (worker.present, worker.engine) == (False, "none")
    assert_idle(worker)


def test_prefill_left_follows_the_engine() -> None:
    story = loaded_story()
    worker = story.fleet.workers["w0"]
    assert worker.prefill_left == 100
    story.tell("w.w0", engine_step(v.RequestAdmitted("q1", 1, 16, 7)))
    assert worker.prefill_left == 84
    story.tell("w.w0", engine_step(v.PrefillChunkDone("q1", 1, 64, 80)))
    assert worker.prefill_left == 20
    story.tell("w.w0", engine_step(v.PrefillChunkDone("q1", 1, 20, 100), v.FirstToken("q1", 1)))
    assert worker.prefill_left == 0
    assert worker.attempts["q1/1"].decoding
    story.tell("w.w0", engine_step(v.PrefillChunkDone("q1", 1, 500, 600)))
    assert worker.prefill_left == 0, "recomputation after preemption never makes debt negative"


@pytest.mark.parametrize(("generated", "left"), [(20, 149), (0, 129)])
def test_what_a_preempted_request_had_generated_leaves_the_context_once(
    generated: int, left: int
) -> None:
    """Records without `generated` count it twice, as they always did: their logs fold unchanged."""
    story = loaded_story()
    worker = story.fleet.workers["w0"]
    first = v.FirstToken("q1", 1), queued("q2"), v.FirstToken("q2", 1)
    story.tell("w.w0", engine_step(*first))
    preempted = v.RequestPreempted("q1", 1, 120, generated)
    story.tell("w.w0", replace(engine_step(preempted), step=2, batch=2, sum_context=238))
    assert (worker.decoding, worker.context) == (1, 119)
    again = v.RequestAdmitted("q1", 1, 0), v.PrefillChunkDone("q1", 1, 120, 120)
    story.tell("w.w0", replace(engine_step(*again), step=3, sum_context=119))
    assert (worker.decoding, worker.context) == (2, 239)
    end = v.EngineFinished("q1", 1, "length", 50)
    story.tell("w.w0", replace(engine_step(end), step=4, batch=2, sum_context=298))
    assert (worker.decoding, worker.context) == (1, left)


def test_slowest_step_fades() -> None:
    story = Story()
    worker = story.worker()
    story.tell("w.w0", engine_step(us=320_000))
    story.tell("w.w0", *(engine_step(us=1000) for _ in range(32)))
    assert 100_000 < worker.step_us_high < 130_000
    story.tell("w.w0", engine_step(us=0))
    assert worker.step_us_high > 100_000, "changes between steps are no step"


def test_journalled_decision_folds_once() -> None:
    """The dispatch in RequestQueued is for `why`; the fold counts the record alone."""
    from relume.events.log.codec import encode

    for worker_first in (False, True):
        story = Story()
        worker = story.worker()
        story.replica()
        story.tell("r.r0", arrived())
        tellings = [
            lambda s=story: s.tell("r.r0", decided()),
            lambda s=story: s.tell("w.w0", engine_step(queued(dispatch=encode(decided())))),
        ]
        for tell in reversed(tellings) if worker_first else tellings:
            tell()
        assert story.fleet.decisions == 1
        assert (len(worker.attempts), worker.prefill_left) == (1, 100)


def test_repeated_arrival_at_the_engine_counts_once() -> None:
    story = loaded_story()
    story.tell("w.w0", engine_step(v.FirstToken("q1", 1)))
    story.tell("w.w0", engine_step(queued()))
    worker = story.fleet.workers["w0"]
    assert (len(worker.attempts), worker.prefill_left) == (1, 0)


def test_stock_traffic_is_load_and_leaves_nothing() -> None:
    story = Story()
    worker = story.worker()
    story.tell("w.w0", engine_step(queued("cmpl-1", 0), queued("q1#1", 1)))
    assert worker.prefill_left == 200
    story.tell("w.w0", engine_step(finished("cmpl-1", 0), finished("q1#1", 1)))
    assert_idle(worker)
    assert worker.finished_early == {}


def test_dispatch_that_comes_after_its_finish_opens_nothing() -> None:
    story = Story()
    worker = story.worker()
    story.replica()
    story.tell("w.w0", engine_step(queued()), engine_step(finished()))
    story.tell("r.r0", arrived(), decided())
    assert_idle(worker)
    assert worker.finished_early == {}


def test_early_finish_of_a_dead_gateway_is_forgotten() -> None:
    story = Story()
    worker = story.worker()
    story.leader()
    story.healthy_ticks(1, first=7 * TOMBSTONE_TICKS)
    story.tell("w.w0", engine_step(queued()), engine_step(finished()))
    assert list(worker.finished_early) == ["q1/1"]
    story.healthy_ticks(TOMBSTONE_TICKS + 1)
    assert list(worker.finished_early) == ["q1/1"]
    story.healthy_ticks(1)
    assert worker.finished_early == {}


def test_restart_of_a_replica_clears_its_suspicions() -> None:
    story = Story()
    story.worker()
    story.replica()
    story.tell("r.r0", observed())
    assert story.fleet.replicas["r0"].suspects == {"w0": 1}
    story.tell("r.r0", replica_started(boot="b2"))
    assert story.fleet.replicas["r0"].suspects == {}


def test_news_of_an_old_incarnation_does_not_hide_suspicion_of_the_new() -> None:
    story = Story()
    story.worker(incarnation=2)
    story.replica()
    story.tell("r.r0", v.WorkerSuspected("w0", 2, "silent"))
    story.tell("r.r0", observed(inc=1))
    assert story.fleet.replicas["r0"].suspects == {"w0": 2}
    story.tell("r.r0", v.WorkerCleared("w0", 1, "late"))
    assert story.fleet.replicas["r0"].suspects == {"w0": 2}
    story.tell("r.r0", v.WorkerCleared("w0", 2, "steps"))
    assert story.fleet.replicas["r0"].suspects == {}


def test_stale_refusal_is_not_suspicious() -> None:
    story = Story()
    story.worker()
    story.replica()
    story.tell("r.r0", observed(kind="stale"), observed(kind="timeout"))
    assert story.fleet.replicas["r0"].suspects == {}


def test_end_of_a_request_the_leader_had_ended_closes_its_attempts() -> None:
    """A replica cut from etcd goes on while the leader takes it for dead."""
    story = Story()
    worker = story.worker()
    story.replica()
    story.tell("r.r0", arrived())
    story.tell("fleet", ended(outcome="failed", attempts=0))
    story.tell("r.r0", decided(), observed(kind="timeout"), decided(attempt=2))
    assert len(worker.attempts) == 1
    story.tell("r.r0", ended(attempts=2))
    assert_idle(worker)
    assert story.fleet.ended == 1


def test_resent_command_changes_nothing() -> None:
    story = Story()
    story.worker()
    story.replica()
    command = v.AdminCommanded(command_id="c1", principal="root", command="drain", target="w0")
    story.tell("r.r0", command, command)
    assert list(story.fleet.open_commands) == ["c1"]
    effects = (v.Effect("drain", "w0"),)
    story.tell(
        "fleet",
        v.EffectsDecided(
            decision="c1", basis=v.Basis(1, 0), cause="root: drain w0", effects=effects
        ),
    )
    assert story.fleet.workers["w0"].draining
    assert story.fleet.open_commands == {}
    story.tell("r.r0", command)
    assert story.fleet.open_commands == {}
    assert list(story.fleet.pending_effects) == ["c1#0"]
    story.tell("w.w0", v.EffectApplied("c1", 0))
    assert story.fleet.pending_effects == {}


def test_snapshot_round_trip_keeps_everything() -> None:
    story = loaded_story()
    story.lapse("r.r0")
    again = load(dump(story.fleet))
    assert again == story.fleet
    assert dump(again) == dump(story.fleet)
    assert state_hash(again) == state_hash(story.fleet)


def test_state_hash_leaves_leases_out_and_the_fleet_as_it_was() -> None:
    story = loaded_story()
    before = state_hash(story.fleet)
    story.lapse("w.w0")
    assert state_hash(story.fleet) == before
    assert story.fleet.gone == {"w.w0": 0}
    assert story.fleet.revision == story.revision
    story.tell("r.r0", ended())
    assert state_hash(story.fleet) != before


def test_empty_fleet_round_trips() -> None:
    assert load(dump(Fleet())) == Fleet()
