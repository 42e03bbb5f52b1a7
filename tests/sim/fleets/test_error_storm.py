"""A worker that answers 500 at once looks idle: it must not draw the fleet's requests."""

from __future__ import annotations

from dataclasses import dataclass

from msgspec.structs import replace

from relume.chaos.runner.judge import judge
from relume.chaos.scenario.language import Closed, Fault, Fleet, Scenario, Traffic, Uniform, When
from relume.chaos.sim.sim_fleet import Settings, run
from relume.chaos.validators.records import events_of
from relume.controlplane.replica.loop import ReplicaConfig
from relume.events import vocabulary as v
from relume.events.vocabulary.enums import HealthState, TransportKind
from relume.policies.health.health_settings import HealthConfig

SCENARIO = Scenario(
    name="errs-for-good",
    about="One of three workers answers every request with an error.",
    fleet=Fleet(workers=3, control_planes=2),
    traffic=Traffic(
        arrivals=Closed(12, (0.0, 0.2)),
        lengths=Uniform(prompt=(16, 200), output=(32, 64)),
        requests=200,
    ),
    faults=(Fault(what="engine-errors", when=When(at_s=1.0), target="w0", for_s=600, amount=1.0),),
)


OFF = HealthConfig(errors=100, window_ticks=1, price_percent=100)
"""No breaker opens, and suspects cost nothing more."""


@dataclass
class Storm:
    """Dispatches to the failing worker that failed, all dispatches meanwhile, and what was decided."""

    failed: int
    dispatched: int
    states: list[HealthState]


def storm(seed: int, config: HealthConfig, scenario: Scenario = SCENARIO) -> Storm:
    outcome = run(scenario, seed, settings=Settings(replica=ReplicaConfig(health=config)))
    verdict = judge(outcome)
    assert (verdict.result, verdict.why) == ("passed", ())
    found = Storm(0, 0, [])
    for at in events_of(outcome.groups):
        event = at.event
        if type(event) is v.TransportObserved and event.kind == TransportKind.ENGINE_ERROR:
            found.failed += 1
        elif type(event) is v.RouteDecided and event.worker:
            found.dispatched += found.failed > 0
        elif type(event) is v.HealthDecided and event.worker == "w0":
            found.states.append(event.state)
    return found


def test_a_worker_that_fails_fast_draws_few_requests_and_without_verdicts_most() -> None:
    judged = storm(5, HealthConfig())
    assert HealthState.UNHEALTHY in judged.states
    assert judged.failed <= 8 < judged.dispatched / 10
    ignored = storm(5, OFF)
    assert HealthState.UNHEALTHY not in ignored.states
    assert ignored.failed > 5 * judged.failed


def test_without_the_log_a_replica_itself_prefers_others() -> None:
    """No decision comes while etcd is away; what failed is in the log afterwards."""
    away = Fault(what="etcd-stop", when=When(at_s=0.5), target="all", for_s=20)
    scenario = replace(SCENARIO, faults=(*SCENARIO.faults, away))
    preferred = storm(5, HealthConfig(), scenario)
    ignored = storm(5, HealthConfig(unjudged=0), scenario)
    print(preferred.failed, ignored.failed)
    assert preferred.failed <= 12 < ignored.failed / 3
