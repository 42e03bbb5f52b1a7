"""What the bench `cross-checks` counts: in simulated fleets, and of the budget."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from relume.chaos.bench.failover import simulated_checks
from relume.chaos.bench.failover.cross_checks import _share, _worst
from relume.chaos.scenario.language import When
from relume.chaos.sim.world.replica_settings import replica_config
from relume.controlplane.replica.loop import ReplicaConfig
from relume.policies.crosscheck.check_settings import CrossCheckConfig

ALL = {"crosscheck.share_ppm": 1_000_000, "crosscheck.budget_ppm": 1_000_000}


def test_the_worst_window_begins_with_the_measurement() -> None:
    """A first check without savings shows there, although the whole window is long enough."""
    spent = {"w0": [(100.0, 400_000), (500.0, 400_000)], "w1": [(250.0, 400_000)]}
    assert _share(spent, 600, 2) == pytest.approx(0.1)
    assert _worst(spent) == pytest.approx(0.4)
    assert _worst({}) == 0


def test_simulated_fleets_have_the_default_settings() -> None:
    checks = replica_config(simulated_checks.scenario().fleet, ReplicaConfig()).cross_checks
    assert checks == CrossCheckConfig()
    assert (checks.share_ppm, checks.budget_ppm) == (10_000, 2_000)


def test_a_run_counts_what_the_engine_completed_until_the_verdict(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With all requests checked it takes seconds."""
    usual = simulated_checks.scenario()
    (fault,) = usual.faults
    often = replace(
        usual,
        fleet=replace(usual.fleet, settings=ALL),
        traffic=replace(usual.traffic, requests=400),
        faults=(replace(fault, when=When(at_s=5.0)),),
    )
    monkeypatch.setattr(simulated_checks, "scenario", lambda: often)
    found = simulated_checks.simulated(1)
    assert found is not None and found.others == 0
    assert 0 < found.until_difference <= found.requests < found.by_all < 300
    assert 0 < found.seconds < 150
    never = replace(often, fleet=replace(often.fleet, settings={"crosscheck.share_ppm": 0}))
    never = replace(never, traffic=replace(never.traffic, requests=40))
    monkeypatch.setattr(simulated_checks, "scenario", lambda: never)
    assert simulated_checks.simulated(1) is None
