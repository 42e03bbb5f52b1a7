"""Canaries in simulated fleets: what follows from slow answers, and from wrong ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from relume.chaos.outcome import Outcome
from relume.chaos.runner.judge import judge
from relume.chaos.scenario import scenario_reader
from relume.chaos.sim.sim_fleet import run
from relume.chaos.validators.records import events_of
from relume.controlplane.replay.verify import verify
from relume.events import vocabulary as v
from relume.events.vocabulary.enums import EffectKind, FailureClass, HealthState

HERE = Path(__file__).parent


def passed(name: str, seed: int) -> Outcome:
    outcome = run(scenario_reader.load(HERE / name), seed)
    verdict = judge(outcome)
    assert (verdict.result, verdict.why) == ("passed", ())
    assert not verify(outcome.groups).divergences
    return outcome


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_an_idle_worker_that_is_slow_is_a_suspect_and_no_other_one(seed: int) -> None:
    outcome = passed("idle-worker-slow.yaml", seed)
    events = [at.event for at in events_of(outcome.groups)]
    suspect, healthy = [e for e in events if type(e) is v.HealthDecided]
    assert (suspect.worker, suspect.state) == ("w1", HealthState.SUSPECT)
    assert suspect.failure == FailureClass.SLOW and "its canaries take" in suspect.evidence
    assert (healthy.worker, healthy.state) == ("w1", HealthState.HEALTHY)


def test_engines_that_may_have_wrong_blocks_empty_their_prefix_caches() -> None:
    """Those that restored some between the flip and the verdict, as far as they are other engines."""
    emptied, corrupt, restored = set[tuple[int, str]](), "w0", set[tuple[int, str]]()
    for seed in (1, 2, 3):
        outcome = passed("wrong-weights-restored.yaml", seed)
        verdict = 0
        for at in events_of(outcome.groups):
            event = at.event
            if type(event) is v.HealthDecided and event.state == HealthState.QUARANTINED:
                assert (event.worker, verdict) == (corrupt, 0)
                verdict = at.revision
            elif type(event) is v.RestoreStarted and not verdict:
                restored.add((seed, at.stream[2:]))
            elif type(event) is v.EffectsDecided:
                kinds = EffectKind.RESET_PREFIX_CACHE
                names = [x.worker for x in event.effects if x.kind == kinds]
                assert verdict or not names
                emptied.update((seed, name) for name in names)
    wanted = {(seed, name) for seed, name in restored if name != corrupt}
    assert wanted and wanted <= emptied
