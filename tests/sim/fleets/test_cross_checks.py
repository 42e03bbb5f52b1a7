"""Idle engines answer finished requests again; a majority finds a worker that no canary finds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from relume.chaos.outcome import Outcome
from relume.chaos.runner.judge import judge
from relume.chaos.scenario import scenario_reader
from relume.chaos.scenario.language import Closed, Fault, Fleet, Scenario, Traffic, Uniform, When
from relume.chaos.sim.sim_fleet import Settings, run
from relume.chaos.validators.records import Entry, events_of
from relume.controlplane.incidents.incident_fold import incidents_of
from relume.controlplane.replay.verify import verify
from relume.controlplane.replica.loop import ReplicaConfig
from relume.events import vocabulary as v
from relume.events.vocabulary.enums import (
    AttemptMode,
    CheckCause,
    EffectKind,
    FailureClass,
    HealthState,
    RouteCause,
)
from relume.policies.crosscheck import choice, disputes
from relume.policies.health.health_settings import HealthConfig

ALL = {"crosscheck.share_ppm": 1_000_000, "crosscheck.budget_ppm": 1_000_000}
UNSEEN = Fault(what="weights-flipped-unseen", when=When(at_s=4.0), target="w1")


def scenario(
    *faults: Fault,
    workers: int = 4,
    requests: int = 300,
    clients: int = 6,
    output: tuple[int, int] = (32, 96),
) -> Scenario:
    """Few clients, so that engines are idle; canaries that find nothing end doubts."""
    return Scenario(
        name="checked",
        about="Every finished request is answered again.",
        fleet=Fleet(
            workers=workers,
            domains=2,
            control_planes=2,
            canary_s=5.0,
            checkpoint_mb=64,
            settings=ALL,
        ),
        traffic=Traffic(
            arrivals=Closed(clients, (0.0, 1.5)),
            lengths=Uniform(prompt=(16, 400), output=output),
            requests=requests,
        ),
        faults=faults,
    )


@pytest.fixture(scope="module")
def wrong() -> Outcome:
    """A worker's weights change where no canary touches them."""
    return run(scenario(UNSEEN), 3)


def events(outcome: Outcome, kind: type) -> list[Entry]:
    return [at for at in events_of(outcome.groups) if type(at.event) is kind]


def checks(outcome: Outcome) -> list[v.CrossChecked]:
    return [at.event for at in events(outcome, v.CrossChecked)]


def quarantines(outcome: Outcome) -> list[Entry]:
    decided = events(outcome, v.HealthDecided)
    return [at for at in decided if at.event.state == HealthState.QUARANTINED]


def test_a_majority_quarantines_the_worker_and_nobody_else(wrong: Outcome) -> None:
    verdict = judge(wrong)
    assert (verdict.result, verdict.why) == ("passed", ())
    (quarantine,) = quarantines(wrong)
    assert quarantine.event.worker == "w1"
    assert quarantine.event.failure == FailureClass.CORRUPTION
    assert "differ from what most engines answer" in quarantine.event.evidence
    reports = [at.event for at in events(wrong, v.CanaryReported)]
    assert reports and not any(report.confirms for report in reports), "no canary finds it"
    causes = {at.event.cause for at in events(wrong, v.CrossCheckDecided)}
    assert {CheckCause.SHARE, CheckCause.DISPUTE} <= causes
    states = [at.event.state for at in events(wrong, v.HealthDecided) if at.event.worker == "w1"]
    assert states[-3:] == [HealthState.QUARANTINED, HealthState.PROBING, HealthState.HEALTHY]
    others = {at.event.state for at in events(wrong, v.HealthDecided) if at.event.worker != "w1"}
    assert others <= {HealthState.SUSPECT, HealthState.HEALTHY}


def test_a_difference_has_canaries_of_both_engines_sent_at_once(wrong: Outcome) -> None:
    first = next(at for at in events(wrong, v.CrossChecked) if at.event.differs >= 0)
    effects = next(
        at.event for at in events(wrong, v.EffectsDecided)
        if at.event.decision == f"dispute.{first.event.decision}"
    )  # fmt: skip
    assert {effect.kind for effect in effects.effects} == {EffectKind.CANARY}
    both = {first.event.worker, first.event.by}
    assert {effect.worker for effect in effects.effects} == both and "w1" in both
    soon = [
        at.event for at in events(wrong, v.CanaryReported)
        if at.stream == "w.w1" and first.at_ms <= at.at_ms < first.at_ms + 500
    ]  # fmt: skip
    assert {report.canary for report in soon} == {0, 1, 2, 3}


def test_its_streams_leave_and_are_compared() -> None:
    """A suspect gets as many requests as others here, so that one is under way at the verdict."""
    even = Settings(replica=ReplicaConfig(health=HealthConfig(price_percent=100)))
    for seed in range(1, 9):
        outcome = run(scenario(UNSEEN, clients=5, output=(16, 300)), seed, settings=even)
        routes = [at.event for at in events(outcome, v.RouteDecided)]
        if moved := [route for route in routes if route.cause == RouteCause.CORRUPT]:
            break
    verdict = judge(outcome)
    assert (verdict.result, verdict.why) == ("passed", ())
    assert {at.event.worker for at in quarantines(outcome)} == {"w1"}
    assert moved and all(route.worker != "w1" for route in moved)
    assert all(route.doubted == (route.mode == AttemptMode.REPLAY) for route in moved)


def test_its_incident_lists_what_it_served_since_its_engine_started(wrong: Outcome) -> None:
    (incident,) = [i for i in incidents_of(wrong.groups) if i.failure == FailureClass.CORRUPTION]
    (quarantine,) = quarantines(wrong)
    assert quarantine.event.good_tick < 0, "nothing says when it began"
    served = {
        at.event.request for at in events(wrong, v.RouteDecided)
        if at.event.worker == "w1" and at.revision < quarantine.revision
    }  # fmt: skip
    assert {one.request for one in incident.served_requests} == served and len(served) > 4


def never_idle(view: Any, worker: Any) -> bool:
    return False


def undecided(fleet: Any, known: Any, request: str, dispute: Any) -> list[Any]:
    return []


PLANTED: tuple[tuple[Any, str, Callable[..., Any], str], ...] = (
    (choice, "_is_idle", never_idle, "CheckChoice"),
    (choice, "is_drawn", lambda request, share_ppm: False, "CheckChoice"),
    (choice, "_is_trusted", lambda worker: False, "CheckChoice"),
    (disputes, "_decide", undecided, "QUARANTINED"),
    (disputes, "is_outvoted", lambda record, config: False, "QUARANTINED"),
)


def test_verification_retakes_every_check_and_the_quarantine(
    wrong: Outcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    verdict = verify(wrong.groups)
    assert verdict.divergences == []
    decided = len(events(wrong, v.CrossCheckDecided))
    assert decided > 50 and verdict.decisions > decided
    for module, name, changed, seen in PLANTED:
        with monkeypatch.context() as patch:
            patch.setattr(module, name, changed)
            missed = verify(wrong.groups).divergences
        assert any(seen in f"{d.expected!r}{d.actual!r}" for d in missed), name


@pytest.mark.full
def test_right_workers_are_never_suspected() -> None:
    """An engine dies and comes back, and two replicas lead for a while."""
    faults = (
        Fault(what="engine-kill", when=When(at_s=20.0), target="w2"),
        Fault(what="leader-stop", when=When(at_s=60.0), target="leader", for_s=20.0),
        Fault(what="engine-kill", when=When(at_s=110.0), target="w0"),
    )
    outcome = run(scenario(*faults, requests=900), 4)
    verdict = judge(outcome)
    assert (verdict.result, verdict.why) == ("passed", ())
    answered = [check for check in checks(outcome) if not check.error]
    assert len(answered) > 150 and {check.differs for check in answered} == {-1}
    assert {check.by for check in answered} == {"w0", "w1", "w2", "w3"}
    assert not [at for at in events(outcome, v.EffectsDecided) if "dispute" in at.event.decision]
    failures = {at.event.failure for at in events(outcome, v.HealthDecided)}
    assert FailureClass.CORRUPTION not in failures


@pytest.mark.full
def test_engines_of_the_named_scenario_are_idle_often_enough_to_convict_one() -> None:
    """Seed 21112: clients paused for half a second, each engine was busy for nine tenths of the time,
    and a check that an engine gives up for a request ended without a result in four of five cases."""
    outcome = run(scenario_reader.load(scenario_reader.find("wrong-weights-unseen")), 21112)
    verdict = judge(outcome)
    assert (verdict.result, verdict.why) == ("passed", ())
    found = checks(outcome)
    assert len([check for check in found if not check.error]) > len(found) / 2


def test_of_two_workers_both_are_suspects_until_canaries_or_time_end_it() -> None:
    fault = replace(UNSEEN, when=When(at_s=2.0))
    outcome = run(scenario(fault, workers=2, clients=2, requests=160), 5)
    assert not quarantines(outcome)
    decided = [at.event for at in events(outcome, v.HealthDecided)]
    suspects = {event.worker for event in decided if event.state == HealthState.SUSPECT}
    assert suspects == {"w0", "w1"}
    for name in suspects:
        states = [event.state for event in decided if event.worker == name]
        assert states[-1] == HealthState.HEALTHY, name
    assert verify(outcome.groups).divergences == []


@pytest.mark.full
def test_a_replica_that_dies_in_a_check_keeps_no_engine_busy_beyond_its_bound() -> None:
    during = When(event="CrossCheckDecided", nth=12, after_s=0.1)
    killed = Fault(what="gateway-kill", when=during, target="any")
    outcome = run(scenario(killed, requests=300, output=(150, 250)), 1)
    assert judge(outcome).result == "passed", judge(outcome).why
    died_ms = outcome.began_ms + outcome.fired[0].at_ns // 1_000_000
    ended = {check.decision for check in checks(outcome)}
    begun = events(outcome, v.CrossCheckDecided)
    (cut,) = [a for a in begun if a.event.decision not in ended and a.at_ms <= died_ms]
    later = [at for at in begun if at.event.by == cut.event.by and at.at_ms > cut.at_ms]
    waited_s = (later[0].at_ms - cut.at_ms) / 1000
    assert disputes.CHECK_TICKS - 5 < waited_s < disputes.CHECK_TICKS + 15
