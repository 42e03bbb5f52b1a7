"""A worker that answers 500 at once looks idle: it must not draw the fleet's requests."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from relume.chaos.runner.judge import judge
from relume.chaos.scenario import scenario_reader
from relume.chaos.scenario.language import (
    Closed,
    Fault,
    Fleet,
    FromTrace,
    Scenario,
    Trace,
    Traffic,
    Uniform,
    When,
)
from relume.chaos.scenario.schedule import expand
from relume.chaos.sim.sim_fleet import Settings, run
from relume.chaos.validators.records import events_of
from relume.controlplane.replay.verify import verify
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


TRACE = Scenario(
    name="probed-by-those-who-wait",
    about="One worker gets no requests for what its agent wrote, the other one for its errors.",
    fleet=Fleet(workers=2, domains=2, control_planes=2),
    traffic=Traffic(arrivals=Trace("trace.csv"), lengths=FromTrace("trace.csv"), requests=20),
    faults=(
        Fault(what="record-unreadable", when=When(at_s=0.7), target="w0"),
        Fault(what="frame-lost", when=When(at_s=1.0), target="w1", for_s=2, amount=1.0),
    ),
)


def test_the_probes_go_to_the_replica_whose_requests_wait(tmp_path: Path) -> None:
    """The leader, r1, has short requests alone, which end before it probes."""
    rows = (f"40,180,0.{n}\n40,2,0.{n}2" for n in range(10))
    header = "prompt_tokens,output_tokens,arrival_s"
    (tmp_path / "trace.csv").write_text("\n".join((header, *rows)))
    outcome = run(TRACE, 1, schedule=expand(TRACE, 1, tmp_path))
    verdict = judge(outcome)
    assert (verdict.result, verdict.why) == ("passed", ())
    assert not verify(outcome.groups).divergences
    events = [at.event for at in events_of(outcome.groups)]
    probing = [e for e in events if type(e) is v.HealthDecided and e.state == HealthState.PROBING]
    assert [(e.worker, e.prober) for e in probing] == [("w1", "r1"), ("w1", "r0")]


def test_the_only_worker_gets_a_request_every_few_ticks() -> None:
    """Composed 164836: its breaker held twice as long each time, and clients were refused."""
    scenario = scenario_reader.load(Path(__file__).parents[1] / "only-worker-fails.yaml")
    outcome = run(scenario, 1)
    verdict = judge(outcome)
    assert (verdict.result, verdict.why) == ("passed", ())
    assert not verify(outcome.groups).divergences
    events = [at.event for at in events_of(outcome.groups)]
    opened = [e for e in events if type(e) is v.HealthDecided and e.until >= 0]
    assert len(opened) > 5
    assert all(e.until - e.since <= HealthConfig().hold_ticks for e in opened)
