"""A rolling restart of workers by SIGTERM: streams move or end, nothing is lost, nothing failed."""

from __future__ import annotations

from relume.chaos.runner.judge import judge
from relume.chaos.scenario import scenario_reader
from relume.chaos.sim.sim_fleet import run
from relume.chaos.validators.records import events_of
from relume.controlplane.incidents.incident_fold import incidents_of
from relume.controlplane.replay.rendering import lines_of
from relume.controlplane.replay.why import why
from relume.events import vocabulary as v
from relume.events.vocabulary.enums import TransportKind


def test_no_request_notices_and_there_is_no_incident() -> None:
    scenario = scenario_reader.load(scenario_reader.find("agents-terminated-in-turn"))
    outcome = run(scenario, 1)
    assert judge(outcome).why == ()
    events = [at.event for at in events_of(outcome.groups)]
    left = [e for e in events if type(e) is v.WorkerLeaving]
    assert [e.worker for e in left] == ["w0", "w1", "w2", "w3"]
    moves = [e for e in events if type(e) is v.TransportObserved]
    assert {e.kind for e in moves} == {TransportKind.MOVED}
    assert incidents_of(outcome.groups) == []
    told = "\n".join(lines_of(why(outcome.groups, moves[0].request)))
    assert f"the agent of {moves[0].worker} stops: requests leave within 25 s" in told
