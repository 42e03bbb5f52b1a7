"""Workers whose engines report what their agents cannot read."""

from __future__ import annotations

import pytest

from relume.events import vocabulary as v
from relume.events.vocabulary.enums import FailureClass, HealthState
from relume.policies.health.health_settings import HealthConfig
from tests.policies.health.led_fleet import LedFleet, folded_again
from tests.policies.story import died, dropped, ready, started

CONFIG = HealthConfig(window_ticks=20, dropped_ticks=3)


def reporting_garbage(ticks: int, version: int = 8, config: HealthConfig = CONFIG) -> LedFleet:
    """w0's agent cannot read some of its reports, in so many ticks."""
    fleet = LedFleet(config=config, version=version)
    for _ in range(ticks):
        fleet.tell("w.w0", dropped())
        fleet.ticks(1)
    return fleet


def test_one_that_goes_on_gets_no_requests_until_its_reports_can_be_read_again() -> None:
    fleet = reporting_garbage(1)
    assert (fleet.state(), fleet.health().failure) == (HealthState.SUSPECT, FailureClass.REPORTS)
    assert fleet.excluded() == ""
    fleet.tell("w.w0", dropped())
    fleet.tell("w.w0", dropped())
    assert fleet.excluded() == "", "ticks count, not events"
    fleet.ticks(1)
    fleet.tell("w.w0", dropped(count=1))
    health = fleet.health()
    assert (health.state, health.failure) == (HealthState.UNHEALTHY, FailureClass.REPORTS)
    assert health.evidence == "16 reports of the engine unreadable: malformed record"
    assert fleet.excluded() == "unhealthy" and fleet.excluded("w1") == ""
    fleet.ticks(CONFIG.window_ticks - 2)
    assert fleet.state() == HealthState.SUSPECT, "two ticks are left"
    fleet.ticks(2)
    assert fleet.state() == HealthState.HEALTHY and fleet.excluded() == ""
    assert fleet.health().trips == 0, "no breaker opened"
    fleet.ticks(1)
    assert folded_again(fleet).workers["w0"].health == fleet.health()


def test_one_of_which_nothing_is_read_any_more_gets_none_until_its_next_engine() -> None:
    fleet = LedFleet(config=CONFIG)
    fleet.tell("w.w0", dropped(muted=True))
    assert fleet.excluded() == "unhealthy"
    assert "reads no more reports of the engine: malformed" in fleet.health().evidence
    fleet.ticks(2 * CONFIG.window_ticks)
    assert fleet.excluded() == "unhealthy"
    fleet.tell("w.w0", died("w0", 1), started("w0", 2), ready("w0", 2))
    assert fleet.state() == HealthState.HEALTHY
    fleet.tell("w.w0", dropped(muted=True, incarnation=1))
    assert fleet.state() == HealthState.HEALTHY, "late word of an engine that is gone"


@pytest.mark.parametrize(
    ("version", "ticks", "state"),
    [(8, 0, HealthState.SUSPECT), (7, 3, HealthState.HEALTHY)],
)
def test_a_fleet_may_do_without(version: int, ticks: int, state: HealthState) -> None:
    config = HealthConfig(window_ticks=20, dropped_ticks=ticks)
    fleet = reporting_garbage(10, version, config)
    assert fleet.state() == state and fleet.excluded() == ""
    muted = LedFleet(config=config, version=version)
    muted.tell("w.w0", dropped(muted=True))
    assert muted.excluded() == ("unhealthy" if version == 8 else "")


def test_reports_of_all_engines_that_cannot_be_read_exclude_none() -> None:
    """Agents of an older build than their engines, say: no worker would be left."""
    fleet = LedFleet(config=CONFIG)
    for name in ("w0", "w1", "w2"):
        fleet.tell(f"w.{name}", dropped(worker=name, muted=True))
    assert [fleet.excluded(f"w{n}") for n in range(3)] == [""] * 3
    assert any(isinstance(d, v.VerdictsWithheld) and d.workers for d in fleet.decisions)
