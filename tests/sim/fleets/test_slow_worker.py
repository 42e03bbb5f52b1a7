"""A worker that idles before each step is known as slow within seconds, and gets few requests."""

from __future__ import annotations

from msgspec import to_builtins

from relume.chaos.runner.judge import judge
from relume.chaos.scenario.language import Closed, Fault, Fleet, Scenario, Traffic, Uniform, When
from relume.chaos.sim.sim_fleet import run
from relume.chaos.validators.records import events_of
from relume.controlplane.admin.models import worker_info
from relume.controlplane.cli.fleet_commands import _note
from relume.events import vocabulary as v
from relume.events.vocabulary.enums import FailureClass, HealthState
from relume.policies.state.fleet import Fleet as FleetState
from relume.policies.state.fold import apply_group
from relume.policies.state.overlay.view import View

SLOW_FROM_S, SLOW_FOR_S, VERDICT_S = 2.0, 20.0, 5.0
SCENARIO = Scenario(
    name="pauses",
    about="One of four workers pauses for 60 ms before each step.",
    fleet=Fleet(workers=4, control_planes=2),
    traffic=Traffic(
        arrivals=Closed(32, (0.0, 0.2)),
        lengths=Uniform(prompt=(16, 400), output=(64, 192)),
        requests=500,
    ),
    faults=(
        Fault(
            what="worker-slow",
            when=When(at_s=SLOW_FROM_S),
            target="w0",
            for_s=SLOW_FOR_S,
            amount=1.0,
            pause_ms=60.0,
        ),
    ),
)


def test_a_worker_that_pauses_before_each_step_is_a_suspect_and_gets_few_requests() -> None:
    outcome = run(SCENARIO, 2)
    verdict = judge(outcome)
    assert (verdict.result, verdict.why) == ("passed", ())
    began_ms = outcome.began_ms + outcome.fired[0].at_ns // 1_000_000
    fleet, note, routes = FleetState(), "", []
    decisions = [at for at in events_of(outcome.groups) if type(at.event) is v.HealthDecided]
    (first, *_) = [at for at in decisions if at.event.worker == "w0"]
    decided = first.event
    assert (decided.state, decided.failure) == (HealthState.SUSPECT, FailureClass.SLOW)
    assert first.at_ms - began_ms < VERDICT_S * 1000, decided.evidence
    assert {at.event.worker for at in decisions} == {"w0"}, "the others stay healthy"
    until_ms = began_ms + SLOW_FOR_S * 1000
    for at in events_of(outcome.groups, "r."):
        if type(at.event) is v.RouteDecided and first.at_ms < at.at_ms < until_ms:
            routes.append(at.event.worker)
    assert len(routes) > 100
    assert routes.count("w0") < 0.1 * len(routes), "a quarter would be its part"
    for group in outcome.groups:
        apply_group(fleet, group)
        if group.revision == first.revision:
            info = worker_info(View("r.r0", fleet), fleet.workers["w0"])
            note = _note(to_builtins(info))
    assert note.startswith("suspect (slow) since ")
    assert note.endswith(decided.evidence) and "times those of its peers" in note
