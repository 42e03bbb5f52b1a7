"""Each failure that a run injects has exactly one incident, with the right class and times."""

from __future__ import annotations

import pytest

from relume.chaos.outcome import Outcome
from relume.chaos.runner.judge import judge
from relume.chaos.scenario.language import (
    Burst,
    Commands,
    Fault,
    Fixed,
    Fleet,
    Scenario,
    Traffic,
    When,
)
from relume.chaos.sim.sim_fleet import run
from relume.controlplane.incidents.incident import Incident
from relume.controlplane.incidents.incident_fold import incidents_of
from relume.controlplane.incidents.sentences import summary
from relume.events import vocabulary as v
from relume.events.log.entries import Entry, entries
from relume.events.vocabulary.enums import AdminCommand, FailedPart, FailureClass

KILLS = tuple(
    Fault(what="engine-kill", when=When(at_s=at_s), target=target)
    for at_s, target in ((20.5, "w0"), (40.5, "w1"), (41.0, "w2"))
)
OTHERS = (
    Fault(what="engine-stop", when=When(at_s=70.0), target="w0", for_s=2.5),
    Fault(what="agent-kill", when=When(at_s=110.0), target="w1"),
    Fault(what="holder-kill", when=When(at_s=140.0), target="w2"),
    Fault(what="gateway-kill", when=When(at_s=155.0), target="r1"),
)
CLASS = {
    "engine-kill": (FailedPart.WORKER, FailureClass.CRASH),
    "engine-stop": (FailedPart.WORKER, FailureClass.HANG),
    "agent-kill": (FailedPart.WORKER, FailureClass.CRASH),
    "holder-kill": (FailedPart.DAEMON, FailureClass.CRASH),
    "gateway-kill": (FailedPart.GATEWAY, FailureClass.CRASH),
}


def scenario(name: str, faults: tuple[Fault, ...]) -> Scenario:
    return Scenario(
        name=name,
        about="Failures one after another, under load.",
        fleet=Fleet(workers=4, control_planes=2, checkpoint_mb=64),
        traffic=Traffic(arrivals=Burst(10, 5.0), lengths=Fixed(64, 400), requests=340),
        promises=("I1", "I2", "I3", "I4", "I7"),
        faults=faults,
    )


def of_fault(outcome: Outcome, incidents: list[Incident], number: int) -> list[Incident]:
    """The incidents of the target's part that were noticed after the fault, and before the next."""
    fired = outcome.fired[number]
    begin_ms = outcome.began_ms + fired.at_ns // 1_000_000
    part, _ = CLASS[fired.what]
    later = [f.at_ns for f in outcome.fired if f.target == fired.target and f.at_ns > fired.at_ns]
    end_ms = outcome.began_ms + min(later, default=1 << 62) // 1_000_000
    return [
        r
        for r in incidents
        if r.part == part and r.name == fired.target and begin_ms <= r.noticed_ms < end_ms
    ]


@pytest.mark.parametrize("faults", [KILLS, (*KILLS, *OTHERS)], ids=["kills", "others"])
@pytest.mark.parametrize("seed", [1, 2])
def test_each_injected_failure_has_exactly_one_incident(
    seed: int, faults: tuple[Fault, ...]
) -> None:
    outcome = run(scenario("incidents", faults), seed)
    assert judge(outcome).why == ()
    incidents = incidents_of(outcome.groups)
    assert len(outcome.fired) == len(faults)
    for number, fired in enumerate(outcome.fired):
        (incident,) = of_fault(outcome, incidents, number)
        assert (incident.part, incident.failure) == CLASS[fired.what], fired
        assert not incident.open
        begin_ms = outcome.began_ms + fired.at_ns // 1_000_000
        assert abs(incident.began_ms - begin_ms) < 3000
    assert len(incidents) == len(faults), [r.subject for r in incidents]
    kills = [r for r in incidents if r.failure == FailureClass.CRASH and r.continued]
    assert any(r.streams == r.continued and r.longest_gap_us > 0 for r in kills)


def test_a_run_without_faults_has_no_incident() -> None:
    assert incidents_of(run(scenario("calm", ()), 1).groups) == []


UNREADABLE = Scenario(
    name="unreadable",
    about="Streams of two workers cannot be read. An operator trusts each worker in turn.",
    fleet=Fleet(
        workers=4,
        control_planes=2,
        operator=Commands(each=(("trust",),), every_s=8.0, most=2),
    ),
    traffic=Traffic(arrivals=Burst(10, 3.0), lengths=Fixed(64, 400), requests=60),
    faults=(
        Fault(what="record-unreadable", when=When(at_s=2.0), target="w1"),
        Fault(what="record-unreadable", when=When(at_s=3.0), target="w1"),
        Fault(what="segment-damaged", when=When(at_s=6.2), target="w2"),
    ),
)


@pytest.mark.parametrize("seed", [1, 2])
def test_a_worker_with_an_unreadable_stream_has_one_incident_until_the_trust(seed: int) -> None:
    outcome = run(UNREADABLE, seed)
    assert judge(outcome).why == () and len(outcome.fired) == 3
    incidents = incidents_of(outcome.groups)
    record, segment = (i for i in incidents if i.part == FailedPart.STREAM)
    for incident, number in ((record, 0), (segment, 2)):
        fired_ms = outcome.began_ms + outcome.fired[number].at_ns // 1_000_000
        assert 0 <= incident.noticed_ms - fired_ms < 3000
    trust = next(at for at in entries(outcome.groups) if trusts(at, "w1"))
    assert (record.name, record.open, record.capacity_back_ms) == ("w1", False, trust.at_ms)
    assert dispatches(outcome, "w1", record.noticed_ms + 500, trust.at_ms) == 0
    assert dispatches(outcome, "w1", trust.at_ms, 1 << 62), "it gets requests again"
    assert "; operator trusted it again after " in summary(record)
    assert (segment.name, segment.open) == ("w2", True), "no operator trusted it"
    assert summary(segment).startswith("a segment of w2's stream in the log is damaged (segment ")
    others = [(i.subject, i.failure) for i in incidents if i.part != FailedPart.STREAM]
    assert others == [("w2:1", FailureClass.HOST)], "its agent ends, which is a failure of its own"


def trusts(at: Entry, worker: str) -> bool:
    """Whether an operator's trust of the worker stands there."""
    event = at.event
    return (
        type(event) is v.AdminCommanded
        and event.command == AdminCommand.TRUST
        and event.target == worker
    )


def dispatches(outcome: Outcome, worker: str, since_ms: int, until_ms: int) -> int:
    """How many requests the worker got in that time."""
    return sum(
        type(at.event) is v.RouteDecided
        and at.event.worker == worker
        and since_ms <= at.at_ms < until_ms
        for at in entries(outcome.groups)
    )
