"""I20: an end of a process, or a wait, that nothing explains is named."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from relume.chaos.scenario.catalogue import FAULTS
from relume.chaos.validators.ground_truth import GroundTruth
from relume.chaos.validators.promises.workers.i20_ends_of_processes import (
    CAUSES,
    OF_CLOCKS,
    WAIT_MS,
    check,
)
from relume.chaos.validators.records import ClientRecord
from relume.chaos.validators.strikes import THE_LOG, Strike
from relume.events import vocabulary as v
from relume.events.vocabulary.enums import DeathReason, EffectKind
from tests.policies.story import (
    Story,
    decided,
    died,
    ended,
    engine_step,
    finished,
    ready,
    replica_started,
    started,
)
from tests.validators.builders import daemon, short, whole

AT_MS = 30_000


def strike(what: str, target: str = "w0", until_ms: int = AT_MS) -> Strike:
    return Strike(what=what, targets=frozenset((target,)), since_ms=AT_MS, until_ms=until_ms)


def found(
    log: Story,
    *strikes: Strike,
    clients: Sequence[ClientRecord] = (),
    truth: GroundTruth | None = None,
) -> str:
    return "; ".join(map(str, check(log.groups, clients, strikes, truth)))


def story() -> Story:
    log = short()
    log.at_ms = AT_MS + 100
    return log


def restarted(incarnation: int = 0, worker: str = "w0") -> v.EffectsDecided:
    effect = v.Effect(EffectKind.RESTART, worker, incarnation)
    return v.EffectsDecided(
        decision="l.1.1", basis=v.Basis(1, 0), cause="health", effects=(effect,)
    )


# --- engines


@pytest.mark.parametrize(
    ("what", "target", "is_cause"),
    [
        ("engine-kill", "w0", True),
        ("domain-loss", "w0", True),
        ("worker-slow", "w0", True),
        ("segment-damaged", "w0", True),
        ("engine-kill", "w1", False),
        ("holder-kill", "w0", False),
        ("record-unreadable", "w0", False),
        ("reports-unreadable", "w0", False),
        ("etcd-stop", THE_LOG, False),
    ],
)
def test_an_engine_ends_by_a_fault_that_kills_engines(
    what: str, target: str, is_cause: bool
) -> None:
    log = story()
    log.tell("w.w0", died())
    says = found(log, strike(what, target))
    assert (says == "") is is_cause
    assert is_cause or "w0: its engine ended without a cause: killed" in says


def test_a_kill_ends_one_engine_and_not_the_next() -> None:
    log = story()
    log.tell("w.w0", died(), started("w0", 2), ready("w0", 2), died("w0", 2))
    assert found(log, strike("engine-kill")).count("I20") == 1
    assert found(log, strike("engine-kill"), strike("agent-kill")) == ""
    assert found(log, strike("worker-slow", until_ms=AT_MS + 1000)) == "", "it lasted"
    assert found(log, strike("reload-fails")) == "", "several starts fail"


def test_times_of_a_host_with_a_wrong_clock_mean_nothing() -> None:
    log = story()
    log.at_ms = AT_MS + 60_000
    log.tell("w.w0", engine_step())
    log.tell("w.w0", died())
    assert found(log, strike("engine-kill"), strike("clock-jump")) == ""
    assert found(log, strike("engine-kill"), strike("clock-jump", "w1")) != ""
    assert found(log, strike("clock-jump")) != ""


def test_an_end_may_stand_in_the_log_late() -> None:
    """The log was away: the segment before is as old as the kill."""
    log = story()
    log.tell("w.w0", engine_step())
    log.at_ms = AT_MS + 60_000
    log.tell("w.w0", died())
    assert found(log, strike("engine-kill")) == ""


def test_what_came_before_an_outage_may_land_after_it() -> None:
    """The next agent writes what the one that was killed had left, and then that its engine ended."""
    log = story()
    log.at_ms = AT_MS + 20_000
    log.tell("w.w0", engine_step())
    log.at_ms = AT_MS + 20_050
    log.tell("w.w0", died())
    outage = Strike(
        what="etcd-stop",
        targets=frozenset((THE_LOG,)),
        since_ms=AT_MS - 500,
        until_ms=AT_MS + 19_000,
    )
    assert found(log, strike("agent-kill"), outage) == ""
    assert found(log, strike("agent-kill")) != "" and found(log, outage) != ""


def test_an_order_for_the_next_engine_hides_none_for_this_one() -> None:
    log = story()
    log.tell("fleet", restarted(incarnation=1), restarted(incarnation=2))
    log.tell("w.w0", v.EngineDied("w0", 1, DeathReason.REPLACED, "restart requested by l.1.1"))
    assert found(log) == ""


def test_causes_are_faults_of_the_catalogue() -> None:
    assert OF_CLOCKS.union(*CAUSES.values()) <= FAULTS.keys()


def test_a_fault_of_long_ago_is_no_cause() -> None:
    log = story()
    log.at_ms = AT_MS + 60_000
    log.tell("w.w0", engine_step())
    log.tell("w.w0", died())
    assert found(log, strike("engine-kill")) != ""
    assert found(log, strike("reload-fails")) == "", "it strikes the next starts"


@pytest.mark.parametrize(
    ("order", "is_cause"),
    [
        (restarted(), True),
        (restarted(incarnation=1), True),
        (restarted(incarnation=2), False),
        (restarted(worker="w1"), False),
    ],
)
def test_an_engine_ends_by_an_order_for_it(order: v.EffectsDecided, is_cause: bool) -> None:
    log = story()
    log.tell("fleet", order)
    log.tell("w.w0", v.EngineDied("w0", 1, DeathReason.REPLACED, "restart requested by l.1.1"))
    assert (found(log) == "") is is_cause


def test_an_agent_that_leaves_ends_what_is_its_own_until_another_comes() -> None:
    log = story()
    log.tell("w.w0", daemon("w0"), v.WorkerLeaving("w0", 1000))
    log.tell("w.w0", v.EngineDied("w0", 1, DeathReason.STOPPED))
    log.tell("w.w0", v.StateDaemonLost("w0", "b", "stopped"))
    assert found(log) == ""
    log.worker("w0", 2)
    log.tell("w.w0", died("w0", 2))
    assert "incarnation" not in found(log) and "w0: its engine" in found(log)


def test_of_real_runs_a_hang_that_an_agent_found_counts() -> None:
    log = story()
    log.tell("w.w0", v.EngineDied("w0", 1, DeathReason.HUNG))
    assert found(log) == ""
    assert found(log, truth=GroundTruth()) != ""


# --- state daemons and replicas


def test_a_state_daemon_ends_by_a_fault_that_kills_it() -> None:
    log = story()
    log.tell("w.w0", daemon("w0"), v.StateDaemonLost("w0", "b", "killed signal 9"))
    assert "w0: its state daemon ended without a cause" in found(log, strike("engine-kill"))
    assert found(log, strike("holder-kill")) == ""


def test_a_replica_starts_again_after_a_fault_or_a_stop() -> None:
    log = story()
    log.tell("r.r0", replica_started(boot="b2"))
    assert "r0: its replica ended without a cause: it started again" in found(log)
    assert found(log, strike("record-unreadable")) != ""
    assert found(log, strike("gateway-kill", "r0")) == ""
    assert found(log, strike("etcd-stop", THE_LOG)) == ""
    stopped = story()
    stopped.tell("r.r0", v.ReplicaStopped("r0", "SIGTERM"))
    stopped.tell("r.r0", replica_started(boot="b2"))
    assert found(stopped) == ""


@pytest.mark.parametrize("is_heir", [True, False])
def test_a_replica_writes_what_its_predecessor_left_ahead_of_its_own_start(is_heir: bool) -> None:
    """Composed 140665: it was killed 20 s before, while etcd was full."""
    log = story()
    log.at_ms += 20_000
    if is_heir:
        log.own("r.r0")
    log.tell("r.r0", ended())
    log.at_ms += 20_000
    log.tell("r.r0", replica_started(boot="b2"))
    assert (found(log, strike("gateway-kill", "r0")) == "") is is_heir


# --- waits


@pytest.mark.parametrize(
    ("gap_ms", "struck", "is_fine"),
    [
        (WAIT_MS - 1, "w1", True),
        (WAIT_MS + 1, "w1", False),
        (WAIT_MS + 1, "w0", True),
        (WAIT_MS + 1, "r0", True),
        (WAIT_MS + 1, THE_LOG, True),
    ],
)
def test_streams_far_from_every_fault_do_not_wait(gap_ms: int, struck: str, is_fine: bool) -> None:
    log = whole()
    client = ClientRecord(request="q1", status=200, gaps_ms=[5.0, gap_ms])
    near = Strike(what="cut", targets=frozenset((struck,)), since_ms=0, until_ms=AT_MS)
    says = found(log, near, clients=[client], truth=GroundTruth())
    assert (says == "") is is_fine
    assert found(log, near, clients=[client]) == "", "a real machine may be busy"


@pytest.mark.parametrize(("worker", "is_fine"), [("w0", True), ("w1", False)])
def test_streams_of_an_engine_that_is_to_restart_may_wait(worker: str, is_fine: bool) -> None:
    """Composed 130473: the operator restarts both engines of the fleet."""
    log = short()
    log.tell("fleet", restarted(worker=worker))
    log.tell("w.w0", engine_step(finished()))
    log.tell("r.r0", ended())
    client = ClientRecord(request="q1", status=200, gaps_ms=[WAIT_MS + 900.0])
    assert (found(log, clients=[client], truth=GroundTruth()) == "") is is_fine


@pytest.mark.parametrize(("queued_ms", "is_fine"), [(400, True), (100, False)])
def test_the_queue_of_a_full_engine_is_no_wait(queued_ms: int, is_fine: bool) -> None:
    log = short()
    log.tell("w.w0", engine_step(v.RequestPreempted("q1", 1, 100, 20)))
    log.at_ms = queued_ms
    log.tell("w.w0", engine_step(v.RequestAdmitted("q1", 1, 0)))
    log.tell("w.w0", engine_step(finished()))
    log.tell("r.r0", ended())
    client = ClientRecord(request="q1", status=200, gaps_ms=[WAIT_MS + 300.0])
    says = found(log, clients=[client], truth=GroundTruth())
    assert (says == "") is is_fine
    assert is_fine or "waited 550 ms for a token, bound 350 ms" in says


@pytest.mark.parametrize("is_preempted", [True, False])
def test_one_that_leaves_the_queue_of_a_full_engine_waited_there(is_preempted: bool) -> None:
    """Composed 140153: it was preempted, and handed over."""
    log = short()
    preempted, admitted = v.RequestPreempted("q1", 1, 100, 20), v.RequestAdmitted("q1", 1, 0)
    log.tell("w.w0", engine_step(preempted if is_preempted else admitted))
    log.at_ms = 400
    log.tell("w.w0", engine_step(finished()))
    log.tell("r.r0", ended())
    client = ClientRecord(request="q1", status=200, gaps_ms=[WAIT_MS + 300.0])
    assert (found(log, clients=[client], truth=GroundTruth()) == "") is is_preempted


@pytest.mark.parametrize("worker", ["", "w1"])
def test_one_that_no_worker_could_take_waited_for_one(worker: str) -> None:
    """Composed 150101: of two workers one failed requests, and the other one drained."""
    log = short()
    log.tell("r.r0", decided(attempt=2, worker=worker))
    log.at_ms = 400
    log.tell("r.r0", decided(attempt=2, worker="w0"), ended())
    client = ClientRecord(request="q1", status=200, gaps_ms=[WAIT_MS + 300.0])
    assert (found(log, clients=[client], truth=GroundTruth()) == "") is not worker


@pytest.mark.parametrize(("worker", "is_fine"), [("w0", True), ("w1", False)])
def test_a_queue_is_unknown_where_reports_were_lost(worker: str, is_fine: bool) -> None:
    """Composed 120268: engines of few blocks preempt, and keep few reports."""
    log = short()
    log.tell("w.w0", engine_step(finished()))
    log.tell("r.r0", ended())
    log.tell(f"w.{worker}", engine_step(lost=7))
    client = ClientRecord(request="q1", status=200, gaps_ms=[WAIT_MS + 300.0])
    assert (found(log, clients=[client], truth=GroundTruth()) == "") is is_fine


def test_nothing_is_asked_where_faults_are_unknown() -> None:
    log = story()
    log.tell("w.w0", died())
    assert check(log.groups, []) == []
