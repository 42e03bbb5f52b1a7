"""The time of canaries: an idle worker that answers them slowly is a suspect."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import UNSET

from relume.events.vocabulary.enums import FailureClass, HealthState
from relume.policies import decision_versions
from relume.policies.canary.canary_state import CanaryRecord
from relume.policies.health.canary_pace import LASTS_WINDOWS, SLOW_CANARIES
from relume.policies.health.health_settings import HealthConfig
from relume.policies.state.fleet import state_hash
from tests.policies.health.led_fleet import LedFleet, folded_again
from tests.policies.health.test_canaries import RIGHT, reports
from tests.policies.story import died, ready, replica_started, started

USUAL_MS = 20
COUNT = 4


def answers(
    fleet: LedFleet, worker: str, ms: float, canary: int = 0, wait_ms: float = 0, alone: bool = True
) -> None:
    """The worker answers a canary, after so long."""
    reports(
        fleet,
        worker,
        canary,
        tokens=(canary, 6, 7),
        logprobs=RIGHT[0][1],
        alone=alone,
        took_us=round(ms * 1000),
        wait_us=round(wait_ms * 1000),
    )


def rounds(fleet: LedFleet, count: int, ms: float, worker: str = "w0", wait_ms: float = 0) -> None:
    """The worker's canaries take that long, those of the others as long as ever. Two canaries differ
    by a factor of 3 on every worker."""
    for number in range(count):
        canary = number % COUNT
        times = 3 if canary == 1 else 1
        for name in fleet.fleet.workers:
            its_ms = ms + wait_ms if name == worker else USUAL_MS
            answers(fleet, name, its_ms * times, canary, wait_ms if name == worker else 0)
        fleet.ticks(1)


def known(workers: int = 3, **more: Any) -> LedFleet:
    """A fleet in which every canary took its usual time."""
    fleet = LedFleet(workers=workers, **more)
    rounds(fleet, COUNT, USUAL_MS)
    return fleet


def record(fleet: LedFleet, worker: str = "w0") -> CanaryRecord:
    found = fleet.fleet.workers[worker].canary
    assert isinstance(found, CanaryRecord)
    return found


@pytest.mark.parametrize("workers", [2, 3, 8])
def test_an_idle_worker_with_slow_canaries_is_a_suspect_until_they_are_fast(workers: int) -> None:
    fleet = known(workers)
    rounds(fleet, SLOW_CANARIES - 1, 62)
    assert fleet.state() == HealthState.HEALTHY
    rounds(fleet, 1, 62)
    health = fleet.health()
    assert (health.state, health.failure) == (HealthState.SUSPECT, FailureClass.SLOW)
    assert health.evidence == "its canaries take 3.1 times those of its peers"
    assert fleet.excluded() == "" and health.price_percent == 200
    assert all(fleet.state(f"w{n}") == HealthState.HEALTHY for n in range(1, workers))
    rounds(fleet, 5, 41)
    assert fleet.state() == HealthState.SUSPECT, "above four fifths of the limit"
    rounds(fleet, 1, 39)
    assert fleet.state() == HealthState.HEALTHY
    assert state_hash(folded_again(fleet)) == state_hash(fleet.fleet)


def test_neither_some_slow_ones_nor_those_that_waited_make_a_suspect() -> None:
    fleet = known()
    for _ in range(3):
        rounds(fleet, SLOW_CANARIES - 1, 200)
        rounds(fleet, 1, 30)
    for _ in range(3 * SLOW_CANARIES):
        answers(fleet, "w0", 500, alone=False)  # behind a prompt
        fleet.ticks(1)
    rounds(fleet, 2 * SLOW_CANARIES, 25, wait_ms=400)  # its host is busy
    assert fleet.decisions == []


def test_all_canaries_of_an_engine_that_just_started_are_one_measure() -> None:
    fleet = LedFleet(workers=3)
    for worker in ("w1", "w2", "w0"):
        for canary in range(COUNT):
            answers(fleet, worker, 500 if worker == "w0" else USUAL_MS, canary)
    assert record(fleet).slow == (1, fleet.fleet.tick, 2500)
    fleet.ticks(1)
    rounds(fleet, SLOW_CANARIES - 2, 200)
    assert fleet.decisions == []


def test_what_slows_all_workers_or_the_only_one_makes_none_a_suspect() -> None:
    fleet = known()
    for _ in range(10):
        for worker in fleet.fleet.workers:
            answers(fleet, worker, 400)
        fleet.ticks(1)
    assert fleet.decisions == []
    alone = known(workers=1)
    rounds(alone, 10, 400)
    assert alone.decisions == []


def test_a_slow_worker_that_becomes_the_only_one_is_slow_no_more() -> None:
    fleet = known(2)
    rounds(fleet, SLOW_CANARIES, 100)
    assert fleet.state() == HealthState.SUSPECT
    fleet.tell("w.w1", died("w1", 1))
    answers(fleet, "w0", 100)
    assert fleet.state() == HealthState.HEALTHY and record(fleet).slow is UNSET


def test_a_canary_that_is_not_known_is_not_measured() -> None:
    fleet = known()
    answers(fleet, "w0", 100, canary=10_000)
    assert isinstance(times := record(fleet).times, dict) and sorted(times) == [0, 1, 2, 3]


def test_a_leader_of_version_10_does_not_judge_what_was_measured() -> None:
    fleet = known()
    rounds(fleet, SLOW_CANARIES, 100)
    assert fleet.state() == HealthState.SUSPECT
    settings = (*decision_versions.settings(), ("version.health", "10"))
    fleet.tell("r.r0", replica_started("r0", "b2", settings=settings))
    fleet.ticks(1)
    assert fleet.state() == HealthState.HEALTHY


def test_the_next_engine_begins_anew() -> None:
    fleet = known()
    rounds(fleet, SLOW_CANARIES, 100)
    assert fleet.state() == HealthState.SUSPECT
    fleet.tell("w.w0", died("w0", 1), started("w0", 2), ready("w0", 2))
    rounds(fleet, SLOW_CANARIES - 1, 100)
    assert fleet.state() == HealthState.HEALTHY


def test_a_slow_worker_without_further_measures_is_tried_again_after_a_while() -> None:
    config = HealthConfig(window_ticks=3)
    fleet = known(config=config)
    rounds(fleet, SLOW_CANARIES, 100)
    fleet.ticks(LASTS_WINDOWS * config.window_ticks - 1)
    assert fleet.state() == HealthState.SUSPECT
    fleet.ticks(1)
    assert fleet.state() == HealthState.HEALTHY


def test_the_limit_is_a_setting_and_0_turns_it_off() -> None:
    strict, off = (known(config=HealthConfig(slow_percent=p)) for p in (150, 0))
    for fleet in (strict, off):
        rounds(fleet, SLOW_CANARIES, 32)
    assert (strict.state(), off.state()) == (HealthState.SUSPECT, HealthState.HEALTHY)


def test_replicas_that_decide_by_version_10_measure_no_canaries() -> None:
    fleet = known(version=10)
    rounds(fleet, 2 * SLOW_CANARIES, 400)
    assert fleet.decisions == [] and record(fleet).times is record(fleet).slow is UNSET
