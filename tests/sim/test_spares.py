"""Simulated fleets with spares: one is promoted when a worker dies, and may die itself."""

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
from relume.events.vocabulary.enums import MigrationCause, RouteCause, Tier


def passed(scenario: str | Path, seed: int = 1) -> Outcome:
    outcome = run(scenario_reader.load(scenario_reader.find(str(scenario))), seed)
    verdict = judge(outcome)
    assert (verdict.result, verdict.why) == ("passed", ())
    assert not verify(outcome.groups).divergences
    return outcome


BATCH_BESIDE_A_SPARE = Path(__file__).parent / "batch-beside-a-spare.yaml"


def decided(outcome: Outcome) -> list[v.SparesDecided]:
    return [at.event for at in events_of(outcome.groups) if type(at.event) is v.SparesDecided]


@pytest.mark.full
def test_a_spare_takes_the_place_of_a_dead_worker_which_is_the_next_spare() -> None:
    outcome = passed("spare-promoted")
    first, promoted, last = decided(outcome)
    assert promoted.was == first.spares and promoted.spares == () and promoted.failed == 1
    assert len(last.spares) == 1 and last.failed == 0
    sent = [at.event for at in events_of(outcome.groups) if type(at.event) is v.RouteDecided]
    (spare,) = first.spares
    reported = [at for at in events_of(outcome.groups) if type(at.event) is v.CanaryReported]
    idle = [at.event for at in reported if at.event.worker == spare and at.event.alone]
    assert [e.error for e in idle[:3]] == [""] * 3, "it answers canaries while it is idle"
    there = [(e.tier, at) for at, e in enumerate(sent) if e.worker == spare]
    assert {tier for tier, _ in there[:5]} == {Tier.BATCH}, "until it is promoted"
    assert {tier for tier, _ in there} > {Tier.BATCH}, "and then all tiers"
    events = [at.event for at in events_of(outcome.groups)]
    moves = [e for e in events if type(e) is v.MigrationPlanned]
    assert {(e.worker, e.cause) for e in moves} == {(spare, MigrationCause.PROMOTION)}


@pytest.mark.full
def test_a_promoted_spare_that_dies_leaves_no_stream_behind() -> None:
    outcome = passed("spare-dies-while-promoted")
    first, *_, last = decided(outcome)
    died = [at.event.worker for at in events_of(outcome.groups) if type(at.event) is v.EngineDied]
    assert len({*died}) == 2 and {*first.spares} <= {*died}
    assert len(last.spares) == 1 and last.failed == 0


def test_a_spare_takes_batch_requests_before_those_that_it_does_not_take() -> None:
    """The other workers are full. What they have room for goes to the higher tier all the same."""
    outcome = passed(BATCH_BESIDE_A_SPARE)
    (first,) = decided(outcome)
    (spare,) = first.spares
    higher: set[str] = set()
    before_higher: set[tuple[str, RouteCause]] = set()
    for at in events_of(outcome.groups):
        match at.event:
            case v.RequestHeld(tier=Tier.INTERACTIVE) as held:
                higher.add(held.request)
            case v.RouteDecided(tier=Tier.BATCH) as sent if higher:
                before_higher.add((sent.worker, sent.cause))
            case v.RouteDecided() as over:
                higher.discard(over.request)
    assert before_higher == {(spare, RouteCause.ARRIVAL), (spare, RouteCause.WAIT_OVER)}
