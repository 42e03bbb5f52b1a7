"""A worker whose weights are wrong is quarantined within one round of canaries, and nobody else is."""

from __future__ import annotations

import pytest

from relume.chaos.runner.judge import judge
from relume.chaos.scenario.language import Closed, Fault, Fleet, Scenario, Traffic, Uniform, When
from relume.chaos.sim.sim_fleet import run
from relume.chaos.validators.records import events_of
from relume.controlplane.incidents.incident_fold import incidents_of
from relume.controlplane.replay.verify import verify
from relume.controlplane.stream.error_codes import CORRUPTED
from relume.events import vocabulary as v
from relume.events.vocabulary.enums import (
    AttemptMode,
    FailureClass,
    HealthState,
    RequestOutcome,
    RequestState,
    RouteCause,
)
from relume.policies.canary import answers, golden_values
from relume.policies.recovery.lineage import Lineage

CANARY_S, LATE_S = 2.0, 1.5
"""Time between canaries; and that which the jitter, the log and the leader may add."""


def scenario(*faults: Fault, requests: int = 400) -> Scenario:
    return Scenario(
        name="wrong-for-good",
        about="A bit of one worker's weights flips.",
        fleet=Fleet(workers=4, domains=2, control_planes=2, checkpoint_mb=64, canary_s=CANARY_S),
        traffic=Traffic(
            arrivals=Closed(24, (0.0, 0.1)),
            lengths=Uniform(prompt=(16, 400), output=(64, 192)),
            requests=requests,
        ),
        faults=faults,
    )


FLIPPED = Fault(what="weights-flipped", when=When(at_s=4.0), target="w1")


def test_a_wrong_worker_is_quarantined_within_a_round_and_its_streams_leave() -> None:
    outcome = run(scenario(FLIPPED), 3)
    verdict = judge(outcome)
    assert (verdict.result, verdict.why) == ("passed", ())
    struck_ms = outcome.began_ms + outcome.fired[0].at_ns // 1_000_000
    events = list(events_of(outcome.groups))
    decided = [at for at in events if type(at.event) is v.HealthDecided]
    assert {at.event.worker for at in decided} == {"w1"}
    (verdict_at,) = [at for at in decided if at.event.state == HealthState.QUARANTINED]
    assert verdict_at.event.failure == FailureClass.CORRUPTION
    assert verdict_at.at_ms - struck_ms < (CANARY_S + LATE_S) * 1000
    wrong = [at.event for at in events if type(at.event) is v.CanaryReported and at.event.confirms]
    assert wrong[0].worker == "w1"
    routes = [at for at in events if type(at.event) is v.RouteDecided]
    moved = [at.event for at in routes if at.event.cause == RouteCause.CORRUPT]
    assert moved and all(route.worker != "w1" for route in moved)
    states = [at.event.state for at in decided]
    assert states[-3:] == [HealthState.QUARANTINED, HealthState.PROBING, HealthState.HEALTHY]
    back_ms = decided[-2].at_ms
    after = [r.event.worker for r in routes if verdict_at.at_ms + 100 < r.at_ms < back_ms]
    assert len(after) > 20 and "w1" not in after
    (restart,) = [at.event for at in events if type(at.event) is v.EffectsDecided]
    assert restart.decision == "quarantine.w1.1"
    restored = {at.event.request for at in events if type(at.event) is v.RestoreStarted}
    assert not restored & {route.request for route in moved}, "blocks of a wrong engine"
    voided = {name for at in events if type(at.event) is v.CheckpointsVoided
              for name, _ in at.event.attempts}  # fmt: skip
    assert voided >= {route.request for route in moved}


def test_wrong_tokens_are_compared_and_those_of_before_are_listed() -> None:
    outcome = run(scenario(FLIPPED), 2)
    events = list(events_of(outcome.groups))
    moved = [
        at.event for at in events
        if type(at.event) is v.RouteDecided and at.event.cause == RouteCause.CORRUPT
    ]  # fmt: skip
    compared = {route.request for route in moved if route.mode == AttemptMode.REPLAY}
    assert compared and all(route.doubted == (route.mode == AttemptMode.REPLAY) for route in moved)
    ends = {at.event.request: at.event for at in events if type(at.event) is v.RequestEnded}
    failed = {name for name in compared if CORRUPTED in ends[name].detail}
    assert failed and compared - failed, "some answers were right and some were not"
    assert all(ends[name].outcome == RequestOutcome.COMPLETED for name in compared - failed)
    (incident,) = [i for i in incidents_of(outcome.groups) if i.failure == FailureClass.CORRUPTION]
    listed = {one.request: one.state for one in incident.served_requests}
    assert incident.served == len(listed) and compared <= listed.keys()
    assert RequestState.COMPLETED in listed.values() and RequestState.FAILED in listed.values()


def test_replay_takes_golden_values_and_quarantines_again(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = run(scenario(FLIPPED, requests=200), 3).groups
    assert verify(groups).divergences == []
    with monkeypatch.context() as patch:
        patch.setattr(answers, "difference", lambda answer, values, tolerance: "")
        missed = verify(groups).divergences
    assert any("QUARANTINED" in str(found.expected) + str(found.actual) for found in missed), missed
    with monkeypatch.context() as patch:
        patch.setattr(golden_values, "_bounds", lambda found, choose: ())
        other = verify(groups).divergences
    assert any("CanaryValuesDecided" in str(found.actual) for found in other), other
    with monkeypatch.context() as patch:
        patch.setattr(Lineage, "is_doubted", lambda self, corrupt, request: False)
        forgotten = verify(groups).divergences
    assert any(found.expected == "doubted: True" for found in forgotten), forgotten


def test_right_workers_are_never_quarantined() -> None:
    """An engine that dies and comes back answers as before."""
    killed = Fault(what="engine-kill", when=When(at_s=5.0), target="w2")
    outcome = run(scenario(killed), 4)
    verdict = judge(outcome)
    assert (verdict.result, verdict.why) == ("passed", ())
    events = [at.event for at in events_of(outcome.groups)]
    reports = [event for event in events if type(event) is v.CanaryReported]
    assert len(reports) > 40 and {report.incarnation for report in reports} == {1, 2}
    failures = {event.failure for event in events if type(event) is v.HealthDecided}
    assert FailureClass.CORRUPTION not in failures
