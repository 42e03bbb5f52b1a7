"""A simulated fleet that is idle most of the time, with a slow worker."""

from __future__ import annotations

from pathlib import Path

import pytest

from relume.chaos.runner.judge import judge
from relume.chaos.scenario import scenario_reader
from relume.chaos.sim.sim_fleet import run
from relume.chaos.validators.records import events_of
from relume.controlplane.replay.verify import verify
from relume.events import vocabulary as v
from relume.events.vocabulary.enums import FailureClass, HealthState

SCENARIO = Path(__file__).parent / "idle-worker-slow.yaml"


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_its_canaries_make_it_a_suspect_and_no_other_worker(seed: int) -> None:
    outcome = run(scenario_reader.load(SCENARIO), seed)
    verdict = judge(outcome)
    assert (verdict.result, verdict.why) == ("passed", ())
    assert not verify(outcome.groups).divergences
    events = [at.event for at in events_of(outcome.groups)]
    suspect, healthy = [e for e in events if type(e) is v.HealthDecided]
    assert (suspect.worker, suspect.state) == ("w1", HealthState.SUSPECT)
    assert suspect.failure == FailureClass.SLOW and "its canaries take" in suspect.evidence
    assert (healthy.worker, healthy.state) == ("w1", HealthState.HEALTHY)
