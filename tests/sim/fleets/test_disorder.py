"""Reports of engines that come late or not at all, and notices that come twice."""

from __future__ import annotations

import pytest

from relume.chaos.outcome import Outcome
from relume.chaos.runner import world
from relume.chaos.runner.cases import case_of
from relume.chaos.runner.composed.compose import COMPOSED
from relume.chaos.runner.judge import judge
from relume.chaos.scenario.language import (
    Closed,
    Disorder,
    Fault,
    Fleet,
    Scenario,
    Traffic,
    Uniform,
    When,
)
from relume.chaos.sim.sim_fleet import run
from relume.chaos.validators.records import events_of, log_of
from relume.events import vocabulary as v

KILL = Fault(what="engine-kill", when=When(at_s=2.0), target="w0")


def disordered(
    disorder: Disorder, *faults: Fault, seed: int = 3, resumable: float = 0.0
) -> Outcome:
    """A run that keeps every promise."""
    scenario = Scenario(
        name="disordered",
        about="",
        fleet=Fleet(workers=3, domains=3, control_planes=2, checkpoint_mb=64, disorder=disorder),
        traffic=Traffic(
            arrivals=Closed(12, (0.0, 0.2)),
            lengths=Uniform(prompt=(16, 300), output=(32, 160)),
            requests=160,
            resumable=resumable,
        ),
        faults=faults,
    )
    outcome = run(scenario, seed)
    verdict = judge(outcome)
    assert (verdict.result, verdict.why) == ("passed", ())
    return outcome


def test_steps_of_a_dead_engine_come_after_its_death() -> None:
    outcome = disordered(Disorder(report_delay_ms=300, notices_repeated=True), KILL)
    died, late = 0, 0
    for at in events_of(log_of(outcome.groups), "w.w0"):
        if type(at.event) is v.EngineDied:
            died = at.event.incarnation
        elif type(at.event) is v.EngineStep and at.event.incarnation <= died:
            late += 1
    assert late > 3


@pytest.mark.parametrize("seed", [24, 137])
def test_an_idle_engine_whose_last_reports_were_dropped_holds_nothing(seed: int) -> None:
    """It says so when its agent looks after it: nothing else would for as long as it is idle. The
    first seed left blocks and requests in the state for ever."""
    case = case_of(COMPOSED, seed)
    assert case.scenario.fleet.disorder.kept_reports == 2
    done = world.judged(lambda: world.simulate(case), 60.0)
    assert (done.result, done.why) == ("passed", ()) and done.run is not None
    steps = [at.event for at in events_of(done.run.groups, "w.") if type(at.event) is v.EngineStep]
    assert any(step.lost and not step.changes for step in steps)


@pytest.mark.parametrize("name", ["w0", "r1"])
def test_what_a_late_writer_writes_comes_after_what_others_write_later(name: str) -> None:
    outcome = disordered(Disorder(late_writer=name, late_writer_ms=500), KILL)
    late_ms: dict[str, list[int]] = {}
    newest_ms = outcome.began_ms
    for group in outcome.groups:
        for segment in group.segments:
            if segment.at_ms >= outcome.began_ms:
                late_ms.setdefault(segment.stream[2:], []).append(newest_ms - segment.at_ms)
                newest_ms = max(newest_ms, segment.at_ms)
    others = [max(late) for stream, late in late_ms.items() if stream in {"w1", "w2", "r0"}]
    assert max(late_ms[name]) > 450 > 250 > max(others)


def test_clients_that_lose_the_last_bytes_return_for_them() -> None:
    def returns(lost_ends: float) -> int:
        outcome = disordered(Disorder(lost_ends=lost_ends), resumable=0.9)
        return sum(type(at.event) is v.ClientReturned for at in events_of(outcome.groups, "r."))

    assert returns(0.5) > returns(0.0) + 40
