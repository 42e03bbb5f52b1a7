"""A replica that an idle worker's answers do not reach is cut off; the worker is not hung."""

from __future__ import annotations

import pytest

from relume.chaos.runner.judge import judge
from relume.chaos.scenario.language import Closed, Fault, Fleet, Scenario, Traffic, Uniform, When
from relume.chaos.sim.sim_fleet import run
from relume.chaos.validators.records import events_of
from relume.events import vocabulary as v
from relume.events.vocabulary.enums import FailureClass, HealthState, ProbeResult

SCENARIO = Scenario(
    name="cut-off",
    about="Two of four replicas cannot reach a worker, which has few requests.",
    fleet=Fleet(workers=4, domains=4, control_planes=4),
    traffic=Traffic(
        arrivals=Closed(4, (0.5, 2.0)),
        lengths=Uniform(prompt=(16, 100), output=(16, 60)),
        requests=120,
    ),
    faults=(Fault(what="cut-from-half", when=When(at_s=3.0), target="w1", for_s=15.0),),
)


@pytest.mark.parametrize("seed", [2, 4])
def test_a_worker_that_half_of_the_replicas_cannot_reach_is_hung_for_none_of_the_others(
    seed: int,
) -> None:
    outcome = run(SCENARIO, seed)
    verdict = judge(outcome)
    assert (verdict.result, verdict.why) == ("passed", ())
    events = [at.event for at in events_of(outcome.groups)]
    judged = [e.probe for e in events if type(e) is v.StallJudged and e.hung]
    assert ProbeResult.SILENT in judged, "the seed has what the test is about"
    decided = [e for e in events if type(e) is v.HealthDecided and e.state != HealthState.HEALTHY]
    assert {(e.worker, e.state, e.failure) for e in decided} == {
        ("w1", HealthState.SUSPECT, FailureClass.UNREACHABLE)
    }
