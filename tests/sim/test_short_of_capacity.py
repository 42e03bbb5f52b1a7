"""A simulated fleet that loses workers and gets them back: levels follow, and the log says why."""

from __future__ import annotations

import pytest

from relume.chaos.runner.judge import judge
from relume.chaos.scenario import scenario_reader
from relume.chaos.sim.sim_fleet import run
from relume.chaos.validators.records import events_of
from relume.controlplane.replay.rendering import lines_of
from relume.controlplane.replay.verify import verify
from relume.controlplane.replay.why import why
from relume.events import vocabulary as v
from relume.events.vocabulary.enums import ShedReason, Tier


@pytest.mark.full
def test_levels_follow_a_staircase_of_capacity_both_ways() -> None:
    outcome = run(scenario_reader.load(scenario_reader.find("capacity-staircase")), 1)
    verdict = judge(outcome)
    assert (verdict.result, verdict.why) == ("passed", ())
    events = [at.event for at in events_of(outcome.groups)]
    decided = [e for e in events if type(e) is v.DegradationDecided]
    levels = [e.level for e in decided]
    top = levels.index(max(levels))
    assert levels[: top + 1] == sorted(levels[: top + 1]), "up"
    assert levels[top:] == [*range(levels[top], -1, -1)], "and down, one by one"
    assert decided[top].workers == 1 and decided[-1].workers == 4
    assert {e.wanted for e in decided} <= {3, 4}, "what the demand needs is no matter of faults"
    refused = [e for e in events if type(e) is v.RequestShed and e.reason == ShedReason.DEGRADED]
    assert len(refused) > 100 and {e.tier for e in refused} == {Tier.BATCH}
    assert not verify(outcome.groups).divergences
    chain = why(outcome.groups, refused[0].request)
    assert chain is not None
    text = "\n".join(lines_of(chain))
    assert "requests/s arrive" in text and "refused on arrival: degraded" in text


@pytest.mark.full
def test_demand_that_flaps_leaves_the_level_alone() -> None:
    outcome = run(scenario_reader.load(scenario_reader.find("demand-flaps")), 1)
    verdict = judge(outcome)
    assert (verdict.result, verdict.why) == ("passed", ())
    decided = [
        at.event for at in events_of(outcome.groups) if type(at.event) is v.DegradationDecided
    ]
    bursts = len({request.at_ns for request in outcome.schedule.requests})
    assert bursts >= 7 and 1 <= sum(e.level > e.was for e in decided) <= 2
