"""A worker that gets few requests, and fails them all: each failure leaves the window before the next."""

from __future__ import annotations

import pytest

from relume.events.vocabulary.enums import HealthState
from relume.policies.health.health_settings import HealthConfig
from relume.policies.health.judgement import FADE_WINDOWS
from relume.policies.state.fleet import state_hash
from relume.policies.state.overlay.view import View
from tests.policies.health.led_fleet import LedFleet, folded_again

CONFIG = HealthConfig(hold_ticks=8, longest_ticks=64, window_ticks=20)
RARE = CONFIG.window_ticks + 5


def failing(version: int = 6, times: int = 2) -> LedFleet:
    """A fleet whose w0 failed so many requests, each longer ago than a window."""
    fleet = LedFleet(config=CONFIG, version=version)
    for _ in range(times):
        fleet.fails()
        assert fleet.state() == HealthState.SUSPECT
        fleet.ticks(RARE)
        assert fleet.state() == HealthState.HEALTHY
    return fleet


@pytest.mark.parametrize(
    ("version", "state"), [(5, HealthState.SUSPECT), (6, HealthState.UNHEALTHY)]
)
def test_failures_count_until_a_request_succeeds(version: int, state: HealthState) -> None:
    fleet = failing(version)
    last = fleet.fails()
    assert fleet.state() == state
    assert state_hash(folded_again(fleet)) == state_hash(fleet.fleet)
    if version == 6:
        assert fleet.health().evidence == f"3 requests failed on it: q1, q2, {last}"


def test_they_open_nothing_without_another_failure() -> None:
    fleet = LedFleet(config=HealthConfig(errors=2, window_ticks=20))
    fleet.fails()
    fleet.ticks(10)
    fleet.fails(worker="w1")
    fleet.ticks(100)
    assert fleet.state() == fleet.state("w1") == HealthState.HEALTHY


def test_a_success_there_ends_it_and_one_elsewhere_does_not() -> None:
    fleet = failing()
    fleet.ends(fleet.request("w1"))
    fleet.ends(fleet.request(), "rejected", 400)
    fleet.ends(fleet.request(), "cancelled", 499)
    fleet.fails()
    assert fleet.state() == HealthState.UNHEALTHY
    fleet = failing()
    fleet.ends(fleet.request())
    fleet.fails()
    assert fleet.state() == HealthState.SUSPECT


def test_a_success_within_the_window_ends_it_too() -> None:
    fleet = LedFleet(config=CONFIG)
    for _ in range(4):
        fleet.fails()
        fleet.ticks(1)
        fleet.ends(fleet.request())
        fleet.ticks(RARE)
    fleet.fails()
    fleet.fails()
    assert fleet.state() == HealthState.SUSPECT
    assert state_hash(folded_again(fleet)) == state_hash(fleet.fleet)


def test_a_request_that_failed_there_and_succeeded_elsewhere_is_no_success_there() -> None:
    fleet = failing()
    name = fleet.fails()
    assert fleet.state() == HealthState.UNHEALTHY
    fleet = failing(times=1)
    name = fleet.fails()
    fleet.request("w1", name=name)
    fleet.ends(name)
    fleet.ticks(RARE)
    fleet.fails()
    assert fleet.state() == HealthState.UNHEALTHY


def test_after_ten_windows_it_is_forgotten() -> None:
    fleet = failing()
    fleet.ticks(CONFIG.window_ticks * FADE_WINDOWS)
    for _ in range(2):
        fleet.fails()
    assert fleet.state() == HealthState.SUSPECT


def test_it_is_no_reason_to_send_it_less() -> None:
    """Else it would get no request, and nothing would show whether it still fails."""
    fleet = failing()
    view = View("r.r0", fleet.fleet)
    assert fleet.excluded() == "" and view.fleet.workers["w0"].health.price_percent == 100


def test_a_new_incarnation_and_passed_probes_begin_anew() -> None:
    fleet = failing()
    fleet.fails()
    fleet.ticks(CONFIG.hold_ticks)
    for _ in range(CONFIG.passes):
        fleet.ends(fleet.request())
    assert fleet.state() == HealthState.HEALTHY
    fleet.fails()
    assert fleet.state() == HealthState.SUSPECT
    fleet = failing()
    fleet.worker("w0", incarnation=2)
    fleet.fails()
    assert fleet.state() == HealthState.SUSPECT
