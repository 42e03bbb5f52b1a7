"""Incidents of state daemons and of gateways."""

from __future__ import annotations

import pytest

from relume.controlplane.incidents.sentences import find, summary
from relume.events import vocabulary as v
from relume.events.vocabulary.enums import FailedPart, RestoreFailure
from tests.incidents.failure_log import BEGIN_MS, FailureLog
from tests.policies.story import replica_started


def chosen(request: str, holders: tuple[str, ...], cause: str = "arrival") -> v.HolderChosen:
    return v.HolderChosen(
        decision=f"d-{request}-{cause}", basis=v.Basis(0, 0), request=request, attempt=1,
        cause=cause, primary="w1", holders=holders, policy="neighbour", wanted=1,
        expected_blocks=1, expected_bytes=1,
    )  # fmt: skip


def daemon_started(boot: str = "d1") -> v.StateDaemonStarted:
    return v.StateDaemonStarted(
        worker="w0", boot=boot, epoch=1, address="tcp://h0:6000", budget_bytes=1 << 20
    )


def test_a_lost_state_daemon_and_the_checkpoints_that_moved() -> None:
    log = FailureLog()
    log.tell("w.w0", daemon_started())
    for name, holder in (("a", "w0"), ("b", "w0"), ("c", "w2")):
        log.stream(name, "w1")
        log.tell("r.r0", chosen(name, (holder,)))
    log.after(1000).tell("w.w0", v.StateDaemonLost("w0", "d1", "killed SIGKILL"))
    log.after(50).tell("r.r0", *(chosen(n, ("w2",), "holder_lost") for n in ("a", "b")))
    log.after(500).tell("w.w0", daemon_started("d2"))
    log.ended("a", 999_000)
    incident = log.one()
    assert (incident.part, incident.subject) == (FailedPart.DAEMON, "daemon:w0")
    assert summary(incident) == (
        "the state daemon of w0 was lost (killed SIGKILL); 2 checkpoints moved to w2."
    )
    assert incident.decided_ms == incident.last_stream_on_ms == BEGIN_MS + 1050
    assert not incident.open and incident.capacity_back_ms == BEGIN_MS + 1550


def test_a_restore_that_failed_for_a_lost_daemon_is_in_its_incident() -> None:
    log = FailureLog()
    log.tell("w.w0", daemon_started())
    log.stream("a", "w1")
    log.tell("w.w0", v.StateDaemonLost("w0", "d1", "killed SIGKILL"))
    for holder in ("tcp://h1:6000", "tcp://h0:6000"):
        failed = v.RestoreFailed(
            incarnation=1, request="a", child=0, attempt=2, holder=holder, tokens=0,
            reason=RestoreFailure.UNREACHABLE,
        )  # fmt: skip
        log.after(10).tell("w.w1", failed)
    kinds = [event.type for event in log.one().events]
    assert kinds.count("restore_failed") == 1


def test_the_incident_of_a_daemon_ends_when_its_worker_is_forgotten() -> None:
    log = FailureLog()
    log.tell("w.w0", daemon_started(), v.StateDaemonLost("w0", "d1", "killed SIGKILL"))
    log.lapse("w.w0")
    log.tell("fleet", v.WorkerLost("w0", log.epochs["w.w0"], "lease lapsed"))
    log.tell("fleet", v.WorkerForgotten("w0", log.epochs["w.w0"]))
    of_daemon = next(r for r in log.incidents() if r.part == FailedPart.DAEMON)
    assert not of_daemon.open and of_daemon.capacity_back_ms < 0


def test_a_daemon_that_its_agent_stops_is_no_incident() -> None:
    log = FailureLog()
    log.tell("w.w0", daemon_started(), v.StateDaemonLost("w0", "d1", "stopped"))
    assert log.incidents() == []


def test_a_lost_gateway_and_its_streams() -> None:
    log = FailureLog(replicas=2)
    for name in ("failed", "returned", "over"):
        log.stream(name, replica="r1")
    log.stream("other", replica="r0")
    log.ends("over", replica="r1")
    log.after(1000).tell("r.r1", v.GroupsReceived(1, (0,)))
    log.after(4000).tell("fleet", v.ReplicaLost("r1", log.epochs["r.r1"]))
    log.first_token("returned", "w0", 2)
    log.after(100).tell(
        "r.r0", v.ClientReturned(request="returned", claim="c1", attempt=1, tokens=3, events=0)
    )
    log.tell(
        "fleet",
        v.RequestEnded(
            request="failed", outcome="failed", status=502, tokens=3, finish="", attempts=1,
            verdict="exact",
        ),
    )  # fmt: skip
    log.own("r.r1")
    log.after(900).tell("r.r1", replica_started("r1", "b2"))
    incident = log.one()
    assert summary(incident) == (
        "gateway r1 was lost (its lease lapsed); 1 stream continued on r0; 1 failed."
    )
    assert incident.began_ms == BEGIN_MS + 1000, "when it wrote something last"
    assert incident.noticed_ms == incident.decided_ms == BEGIN_MS + 5000
    assert incident.first_stream_on_ms == BEGIN_MS + 5100
    assert not incident.open and incident.capacity_back_ms == BEGIN_MS + 6000


def test_a_gateway_that_starts_again_without_a_stop_had_died() -> None:
    log = FailureLog(replicas=2)
    log.own("r.r1")
    log.after(700).tell("r.r1", replica_started("r1", "b2"))
    incident = log.one()
    assert incident.reason == "restarted without a stop" and not incident.open
    log.tell("fleet", v.ReplicaLost("r1", 1))
    assert len(log.incidents()) == 1, "that was its former life"


def test_a_gateway_that_stops_is_no_incident() -> None:
    log = FailureLog(replicas=2)
    log.tell("r.r1", v.ReplicaStopped("r1", "stopped"), v.GroupsReceived(1, (0,)))
    log.tell("fleet", v.ReplicaLost("r1", log.epochs["r.r1"]))
    log.own("r.r1")
    log.tell("r.r1", replica_started("r1", "b2"))
    assert log.incidents() == []


@pytest.mark.parametrize(
    ("asked", "subject"),
    [("w0", "w0:2"), ("w0:1", "w0:1"), ("daemon:w0", "daemon:w0"), ("2", "w0:2"), ("w9", "")],
)
def test_incidents_are_found_by_the_names_that_people_use(asked: str, subject: str) -> None:
    log = FailureLog()
    log.dies()
    log.restarts()
    log.dies(inc=2)
    log.tell("w.w0", v.StateDaemonLost("w0", "d1", "killed"))
    records = [r for r in log.incidents() if r.subject != "daemon:w0"] + [
        r for r in log.incidents() if r.subject == "daemon:w0"
    ]
    assert find(records, records[0].id) is records[0]
    found = find(records, asked) if asked != "w0" else find(records[:2], asked)
    assert (found.subject if found else "") == subject
