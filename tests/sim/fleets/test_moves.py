"""Balancing while workers' speeds are noisy: each is for moments fifty times slower than it is."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from relume.chaos.runner.judge import judge
from relume.chaos.scenario.language import Closed, Fault, Fleet, Scenario, Traffic, Uniform, When
from relume.chaos.sim.sim_fleet import Settings, run
from relume.chaos.validators.records import events_of
from relume.controlplane.replica.loop import ReplicaConfig
from relume.events import vocabulary as v
from relume.policies.migration.migration_settings import MigrationConfig

DWELL_TICKS = 40
SCENARIO = Scenario(
    name="speeds-noisy",
    about="Each worker is for moments fifty times slower than it is.",
    fleet=Fleet(workers=3, control_planes=2, checkpoint_mb=256),
    traffic=Traffic(
        arrivals=Closed(18, (0.0, 0.5)),
        lengths=Uniform(prompt=(16, 400), output=(1000, 1500)),
        requests=100,
    ),
    faults=tuple(
        Fault(
            what="worker-slow",
            when=When(at_s=(3.0 * n, 3.0 * n + 3.0)),
            target="any",
            for_s=(2.0, 5.0),
            amount=50.0,
        )
        for n in range(1, 14)
    ),
)


def moves(seed: int, **settings: Any) -> dict[str, list[int]]:
    """The ticks at which each request was planned to move, without moves that were abandoned."""
    config = MigrationConfig(moves="all", gap=2, ticks=1, cool_ticks=1, **settings)
    outcome = run(SCENARIO, seed, settings=Settings(replica=ReplicaConfig(migration=config)))
    verdict = judge(outcome)
    assert (verdict.result, verdict.why) == ("passed", ())
    found: dict[str, list[int]] = {}
    for at in events_of(outcome.groups, "r."):
        if type(at.event) is v.MigrationPlanned:
            for choice in at.event.choices:
                if choice.chosen >= 0:
                    found.setdefault(choice.request, []).append(at.event.tick)
        elif type(at.event) is v.MigrationAbandoned:
            found[at.event.request].pop()
    return found


@pytest.mark.full
@pytest.mark.parametrize("seed", [5, 7])
def test_a_request_that_moved_stays_for_its_dwell_time(seed: int) -> None:
    steady = moves(seed, dwell_ticks=DWELL_TICKS)
    assert steady, "nothing moved"
    assert all(b - a >= DWELL_TICKS for at in steady.values() for a, b in pairwise(at))
    flapping = moves(seed, dwell_ticks=0, trust_percent=0)
    assert any(b - a < DWELL_TICKS for at in flapping.values() for a, b in pairwise(at)), (
        "without a dwell time nothing moves again either"
    )
