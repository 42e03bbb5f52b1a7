"""A storm of arrivals in a simulated fleet: all promises hold, and the room is what makes the
difference to who is served first."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from relume.chaos.runner.judge import Verdict, judge
from relume.chaos.scenario import scenario_reader
from relume.chaos.scenario.language import Bound, Fault, Scenario, When
from relume.chaos.sim.sim_fleet import run

STORM = scenario_reader.load(scenario_reader.find("storm"))


def smaller(waiting: dict[str, int], **more: object) -> Scenario:
    """The library's, with 1,500 requests for two workers."""
    settings = {f"waiting.{name}": value for name, value in waiting.items()}
    fleet = replace(STORM.fleet, workers=2, settings=settings)
    expect = (Bound("requests", least=1500), Bound("lost_streams", most=0))
    traffic = replace(STORM.traffic, requests=1500)
    return replace(STORM, fleet=fleet, traffic=traffic, expect=expect, **more)


def judged(scenario: Scenario) -> Verdict:
    return judge(run(scenario, 3))


@pytest.mark.full
def test_higher_tiers_do_not_wait_behind_lower_ones_and_tenants_get_equal_parts() -> None:
    room = judged(smaller({"queued": 32, "requests": 500, "tenant_percent": 100}))
    assert room.result == "passed", room.why
    none = judged(smaller({"queued": 0}))
    assert none.result == "passed", none.why
    with_us, without_us = (v.figures["ttft_ms_p99_interactive"] for v in (room, none))
    assert with_us is not None
    assert without_us is not None
    assert with_us * 2 < without_us
    assert room.figures["tenant_fairness"] == 1.0
    assert (room.figures["refused_streams"] or 0) > 0
    assert none.figures["refused_streams"] == 0


@pytest.mark.full
def test_promises_hold_while_engines_and_gateways_die_in_a_storm() -> None:
    faults = (
        Fault(what="engine-kill", when=When(at_s=1.0), target="w0"),
        Fault(what="gateway-kill", when=When(at_s=1.5), target="r1"),
    )
    verdict = judged(replace(smaller({"queued": 16, "requests": 400}), faults=faults, expect=()))
    assert not verdict.broken, verdict.violations
    assert not verdict.error
    assert verdict.result == "passed", verdict.why
