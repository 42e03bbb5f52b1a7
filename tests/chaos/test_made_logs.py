"""The log that the replay bench makes is one that a fleet could have written."""

from __future__ import annotations

from relume.chaos.bench.eventlog.replay_log import make_log
from relume.chaos.bench.eventlog.replay_speed import read
from relume.controlplane.replay.verify import verify
from relume.events import vocabulary as v
from relume.events.log.entries import entries


def test_every_decision_of_a_made_log_is_taken_again_also_after_a_death() -> None:
    groups = read(make_log(4000, seed=9))
    kinds = {type(entry.event) for entry in entries(groups)}
    assert {v.EngineDied, v.HealthDecided, v.RouteDecided, v.StateHashed} <= kinds
    verdict = verify(groups)
    assert verdict.ok, verdict.divergences
    assert verdict.decisions > 100 and verdict.hashes > 3
