"""I20: an end of a process, or a wait, that nothing explains is named."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from relume.chaos.validators.ground_truth import GroundTruth
from relume.chaos.validators.promises.workers.i20_ends_of_processes import WAIT_MS, check
from relume.chaos.validators.records import ClientRecord
from relume.chaos.validators.strikes import THE_LOG, Strike
from relume.events import vocabulary as v
from relume.events.vocabulary.enums import DeathReason, EffectKind
from tests.policies.story import (
    Story,
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
    told: Story,
    *strikes: Strike,
    clients: Sequence[ClientRecord] = (),
    truth: GroundTruth | None = None,
) -> str:
    return "; ".join(map(str, check(told.groups, clients, strikes, truth)))


def story() -> Story:
    told = short()
    told.at_ms = AT_MS + 100
    return told


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
    told = story()
    told.tell("w.w0", died())
    says = found(told, strike(what, target))
    assert (says == "") is is_cause
    assert is_cause or "w0: its engine ended without a cause: killed" in says


def test_a_kill_ends_one_engine_and_not_the_next() -> None:
    told = story()
    told.tell("w.w0", died(), started("w0", 2), ready("w0", 2), died("w0", 2))
    assert found(told, strike("engine-kill")).count("I20") == 1
    assert found(told, strike("engine-kill"), strike("agent-kill")) == ""
    assert found(told, strike("worker-slow", until_ms=AT_MS + 1000)) == "", "it lasted"
    assert found(told, strike("reload-fails")) == "", "several starts fail"


def test_times_of_a_host_with_a_wrong_clock_mean_nothing() -> None:
    told = story()
    told.at_ms = AT_MS + 60_000
    told.tell("w.w0", engine_step())
    told.tell("w.w0", died())
    assert found(told, strike("engine-kill"), strike("clock-jump")) == ""
    assert found(told, strike("engine-kill"), strike("clock-jump", "w1")) != ""
    assert found(told, strike("clock-jump")) != ""


def test_an_end_may_stand_in_the_log_late() -> None:
    """The log was away: the segment before is as old as the kill."""
    told = story()
    told.tell("w.w0", engine_step())
    told.at_ms = AT_MS + 60_000
    told.tell("w.w0", died())
    assert found(told, strike("engine-kill")) == ""


def test_a_fault_of_long_ago_is_no_cause() -> None:
    told = story()
    told.at_ms = AT_MS + 60_000
    told.tell("w.w0", engine_step())
    told.tell("w.w0", died())
    assert found(told, strike("engine-kill")) != ""
    assert found(told, strike("reload-fails")) == "", "it strikes the next starts"


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
    told = story()
    told.tell("fleet", order)
    told.tell("w.w0", v.EngineDied("w0", 1, DeathReason.REPLACED, "restart requested by l.1.1"))
    assert (found(told) == "") is is_cause


def test_an_agent_that_leaves_ends_what_is_its_own_until_another_comes() -> None:
    told = story()
    told.tell("w.w0", daemon("w0"), v.WorkerLeaving("w0", 1000))
    told.tell("w.w0", v.EngineDied("w0", 1, DeathReason.STOPPED))
    told.tell("w.w0", v.StateDaemonLost("w0", "b", "stopped"))
    assert found(told) == ""
    told.worker("w0", 2)
    told.tell("w.w0", died("w0", 2))
    assert "incarnation" not in found(told) and "w0: its engine" in found(told)


def test_of_real_runs_a_hang_that_an_agent_found_counts() -> None:
    told = story()
    told.tell("w.w0", v.EngineDied("w0", 1, DeathReason.HUNG))
    assert found(told) == ""
    assert found(told, truth=GroundTruth()) != ""


# --- state daemons and replicas


def test_a_state_daemon_ends_by_a_fault_that_kills_it() -> None:
    told = story()
    told.tell("w.w0", daemon("w0"), v.StateDaemonLost("w0", "b", "killed signal 9"))
    assert "w0: its state daemon ended without a cause" in found(told, strike("engine-kill"))
    assert found(told, strike("holder-kill")) == ""


def test_a_replica_starts_again_after_a_fault_or_a_stop() -> None:
    told = story()
    told.tell("r.r0", replica_started(boot="b2"))
    assert "r0: its replica ended without a cause: it started again" in found(told)
    assert found(told, strike("record-unreadable")) != ""
    assert found(told, strike("gateway-kill", "r0")) == ""
    assert found(told, strike("etcd-stop", THE_LOG)) == ""
    stopped = story()
    stopped.tell("r.r0", v.ReplicaStopped("r0", "SIGTERM"))
    stopped.tell("r.r0", replica_started(boot="b2"))
    assert found(stopped) == ""


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
    told = whole()
    client = ClientRecord(request="q1", status=200, gaps_ms=[5.0, gap_ms])
    near = Strike(what="cut", targets=frozenset((struck,)), since_ms=0, until_ms=AT_MS)
    says = found(told, near, clients=[client], truth=GroundTruth())
    assert (says == "") is is_fine
    assert found(told, near, clients=[client]) == "", "a real machine may be busy"


@pytest.mark.parametrize(("queued_ms", "is_fine"), [(400, True), (100, False)])
def test_the_queue_of_a_full_engine_is_no_wait(queued_ms: int, is_fine: bool) -> None:
    told = short()
    told.tell("w.w0", engine_step(v.RequestPreempted("q1", 1, 100, 20)))
    told.at_ms = queued_ms
    told.tell("w.w0", engine_step(v.RequestAdmitted("q1", 1, 0)))
    told.tell("w.w0", engine_step(finished()))
    told.tell("r.r0", ended())
    client = ClientRecord(request="q1", status=200, gaps_ms=[WAIT_MS + 300.0])
    says = found(told, clients=[client], truth=GroundTruth())
    assert (says == "") is is_fine
    assert is_fine or "waited 550 ms for a token, bound 350 ms" in says


def test_nothing_is_asked_where_faults_are_unknown() -> None:
    told = story()
    told.tell("w.w0", died())
    assert check(told.groups, []) == []
