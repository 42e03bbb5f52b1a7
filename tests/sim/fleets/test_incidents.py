"""Each failure that a run injects has exactly one incident, with the right class and times."""

from __future__ import annotations

import pytest

from relume.chaos.outcome import Outcome
from relume.chaos.runner.judge import judge
from relume.chaos.scenario.language import Burst, Fault, Fixed, Fleet, Scenario, Traffic, When
from relume.chaos.sim.sim_fleet import run
from relume.controlplane.incidents.incident import Incident
from relume.controlplane.incidents.incident_fold import incidents_of
from relume.events.vocabulary.enums import FailedPart, FailureClass

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
