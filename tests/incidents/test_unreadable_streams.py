"""A worker that gets no requests because its stream cannot be read has an incident until the trust."""

from __future__ import annotations

import msgspec
import pytest

from relume.controlplane.incidents.incident import MOST_EVENTS, MOST_OF_FACTS
from relume.controlplane.incidents.sentences import find, lines, summary
from relume.events import vocabulary as v
from relume.events.vocabulary.enums import AdminCommand, FailedPart, FailureClass
from tests.incidents.failure_log import BEGIN_MS, FailureLog, live

UNKNOWN, BROKEN = b"\x92\xabtelepathy/9\x01", b"\xc1"
MALFORMED = "w1 wrote a record that cannot be read (malformed record: "


def trusts(log: FailureLog, worker: str = "w1", command: str = "c1") -> None:
    log.tell(
        "r.r0",
        v.AdminCommanded(
            command_id=command, principal="ann", command=AdminCommand.TRUST, target=worker
        ),
    )


def skipped(stream: str = "w.w1") -> v.SegmentSkipped:
    return v.SegmentSkipped(stream=stream, segment=7, after=6, reason="its bytes are no segment")


def registered(worker: str = "w1") -> v.WorkerRegistered:
    return v.WorkerRegistered(worker=worker, domain="host", agent_pid=8)


def test_an_unreadable_record_opens_one_and_the_trust_ends_it() -> None:
    log = FailureLog()
    log.after(1000).tell("w.w1", BROKEN)
    assert log.excluded("w1") == "unreadable records"
    incident = log.one()
    assert (incident.part, incident.subject) == (FailedPart.STREAM, "stream:w1")
    assert (incident.failure, incident.open) == (FailureClass.REPORTS, True)
    assert summary(incident).startswith(MALFORMED)
    assert summary(incident).endswith("; it gets no requests until an operator trusts it again.")
    log.after(12_000)
    trusts(log)
    assert log.excluded("w1") == ""
    incident = log.one()
    assert incident.began_ms == incident.noticed_ms == incident.decided_ms == BEGIN_MS + 1000
    assert (incident.open, incident.capacity_back_ms) == (False, BEGIN_MS + 13_000)
    assert summary(incident).startswith(MALFORMED)
    assert summary(incident).endswith("; ann trusted it again after 12 s.")
    assert [event.type for event in incident.events] == ["unreadable_record", "admin_commanded"]
    assert incident.events[0].text.startswith("a record that cannot be read: malformed record")
    assert msgspec.to_builtins(live(log.groups)) == msgspec.to_builtins(log.incidents())


def test_further_records_belong_to_the_open_incident() -> None:
    log = FailureLog()
    for record in (UNKNOWN, BROKEN, UNKNOWN):
        log.after(1000).tell("w.w1", record)
    log.tell("fleet", skipped())
    incident = log.one()
    assert "unknown event 'telepathy/9'" in incident.reason, "the first says why"
    assert incident.decided_ms == BEGIN_MS + 1000
    kinds = [event.type for event in incident.events]
    assert kinds == [*["unreadable_record"] * 3, "segment_skipped"]


def test_a_record_after_the_trust_is_another_incident() -> None:
    log = FailureLog()
    for command in ("c1", "c2"):
        log.tell("w.w1", UNKNOWN)
        log.after(3000)
        trusts(log, command=command)
    first, second = log.incidents()
    assert not first.open and not second.open
    assert second.noticed_ms == first.capacity_back_ms


def test_a_command_that_is_written_again_trusts_nothing() -> None:
    """As in the fold of the fleet: what came after the command was not acknowledged."""
    log = FailureLog()
    log.tell("w.w1", UNKNOWN)
    trusts(log)
    log.tell("w.w1", UNKNOWN)
    trusts(log)
    assert log.excluded("w1") == "unreadable records"
    assert [incident.open for incident in log.incidents()] == [False, True]


def test_a_damaged_segment_opens_one_as_well() -> None:
    log = FailureLog()
    log.after(500).tell("fleet", skipped())
    what = "a segment of w1's stream in the log is damaged (segment 7: its bytes are no segment); "
    assert summary(log.one()) == what + "it gets no requests until an operator trusts it again."
    log.after(90_000)
    trusts(log)
    assert summary(log.one()) == what + "ann trusted it again after 90 s."
    assert log.one().decided_ms == BEGIN_MS + 500


def test_each_worker_has_its_own() -> None:
    log = FailureLog()
    log.tell("w.w1", UNKNOWN)
    log.tell("w.w2", UNKNOWN)
    trusts(log, "w2")
    assert [(i.subject, i.open) for i in log.incidents()] == [
        ("stream:w1", True),
        ("stream:w2", False),
    ]


def test_a_record_of_a_replica_or_the_leader_is_none() -> None:
    """It excludes no worker."""
    log = FailureLog()
    log.tell("r.r0", UNKNOWN)
    log.tell("fleet", BROKEN)
    assert log.incidents() == []


def test_a_trust_of_a_worker_that_can_be_read_is_none() -> None:
    log = FailureLog()
    trusts(log)
    assert log.incidents() == []


def test_a_death_of_its_engine_is_an_incident_of_its_own() -> None:
    log = FailureLog()
    log.stream("a", "w1")
    log.tell("w.w1", UNKNOWN)
    log.dies(worker="w1")
    log.breaks("a", "engine_dead", "w1")
    log.goes_on("a", "w0")
    log.restarts("w1")
    unreadable, death = log.incidents()
    assert unreadable.subject == "stream:w1" and unreadable.open, "its next engine ends nothing"
    assert not unreadable.streams
    assert (death.subject, death.open, death.continued) == ("w1:1", False, 1)
    assert find(log.incidents(), "w1") is not None
    assert find(log.incidents(), "stream:w1").id == unreadable.id  # type: ignore[union-attr]


def test_a_worker_that_leaves_and_returns_is_still_excluded() -> None:
    log = FailureLog()
    log.tell("w.w1", UNKNOWN)
    log.after(1000).tell("w.w1", v.WorkerDeregistered("w1", "stopped"))
    left = log.one()
    assert (left.open, left.capacity_back_ms) == (False, -1)
    assert summary(left).endswith("; it left before an operator trusted it again.")
    log.own("w.w1")
    log.after(1000).worker("w1", 2)
    assert log.excluded("w1") == "unreadable records" and log.one().open
    log.after(2000)
    trusts(log)
    assert summary(log.one()).endswith("; ann trusted it again after 4 s.")
    log.own("w.w1")
    log.tell("w.w1", registered())
    assert not log.one().open


@pytest.mark.parametrize("first", [registered(), v.StreamResumed(1, 2)], ids=["new", "cut off"])
def test_one_that_is_gone_for_good_is_over_until_its_agent_writes_again(first: v.Event) -> None:
    log = FailureLog()
    log.tell("w.w1", UNKNOWN)
    epoch = log.epochs["w.w1"]
    log.lapse("w.w1")
    log.tell("fleet", v.WorkerLost("w1", epoch, "lease lapsed"))
    assert [i.open for i in log.incidents() if i.part == FailedPart.STREAM] == [True]
    log.tell("fleet", v.WorkerForgotten("w1", epoch))
    assert [i.open for i in log.incidents()] == [False, False]
    log.own("w.w1")
    log.tell("w.w1", first)
    assert log.incidents()[0].open


def test_many_records_leave_room_for_the_trust() -> None:
    log = FailureLog()
    for _ in range(2 * MOST_EVENTS):
        log.tell("w.w1", UNKNOWN)
    trusts(log)
    incident = log.one()
    assert incident.events[-1].type == "admin_commanded"
    assert len(incident.events) == MOST_OF_FACTS + 1
    assert incident.events_left_out == 2 * MOST_EVENTS - MOST_OF_FACTS
    shown = list(lines(incident))
    assert f"incident {incident.id}: reports of stream w1" in shown
    assert shown[-1] == f"  and {incident.events_left_out} more"
