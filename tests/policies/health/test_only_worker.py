"""How long the breaker of a worker holds while no other worker of its model can serve."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from relume.events import vocabulary as v
from relume.events.vocabulary.enums import EffectKind, HealthState
from relume.policies.health.health_settings import HealthConfig
from relume.policies.state.fleet import state_hash
from tests.policies.health.led_fleet import LedFleet, folded_again
from tests.policies.story import died, dropped, found_hung, ready, started

CONFIG = HealthConfig(hold_ticks=8, longest_ticks=64, window_ticks=20)
BASE = range(4, 9)
"""Ticks of a hold that was not doubled, with its jitter."""


def drain(worker: str, kind: EffectKind = EffectKind.DRAIN) -> v.EffectsDecided:
    return v.EffectsDecided(
        decision=f"{kind}.{worker}", basis=v.Basis(1, 0), cause=f"op: {kind} {worker}",
        effects=(v.Effect(kind, worker),),
    )  # fmt: skip


def hold_of_next_failure(fleet: LedFleet, worker: str = "w0") -> int:
    """A probe fails, or as many requests as open the breaker; returns the ticks of the hold, after
    which the worker is probed."""
    is_probed = fleet.state(worker) == HealthState.PROBING
    for _ in range(1 if is_probed else CONFIG.errors):
        fleet.fails(worker)
    assert fleet.state(worker) == HealthState.UNHEALTHY
    hold = fleet.health(worker).until - fleet.fleet.tick
    fleet.ticks(hold)
    assert fleet.state(worker) == HealthState.PROBING
    return hold


def without_others(version: int = 12) -> LedFleet:
    """A fleet of two, of which an operator drains w1."""
    fleet = LedFleet(workers=2, config=CONFIG, version=version)
    fleet.tell("fleet", drain("w1"))
    return fleet


@pytest.mark.parametrize(("version", "doubles"), [(11, True), (12, False)])
def test_the_hold_of_the_only_worker_does_not_double(version: int, doubles: bool) -> None:
    """Composed 164836: clients were refused although the only worker might serve."""
    fleet = without_others(version)
    holds = [hold_of_next_failure(fleet) for _ in range(5)]
    assert all(hold in BASE for hold in holds) is not doubles
    if doubles:
        for hold, most in zip(holds, (8, 16, 32, 64, 64), strict=True):
            assert most / 2 <= hold <= most
    assert len(set(holds)) > 1, "with a jitter"
    assert fleet.health().trips == 5
    assert state_hash(folded_again(fleet)) == state_hash(fleet.fleet)


Excluding = Callable[[LedFleet], object]

EXCLUDED: dict[str, Excluding] = {
    "drained": lambda fleet: fleet.tell("fleet", drain("w1")),
    "dead": lambda fleet: fleet.tell("w.w1", died("w1", 1)),
    "starting": lambda fleet: fleet.tell("w.w1", died("w1", 1), started("w1", 2)),
    "of another model": lambda fleet: fleet.tell("w.w1", ready("w1", 1, model="other")),
    "gone": lambda fleet: fleet.tell("w.w1", v.WorkerDeregistered("w1", "it stops")),
    "with an unreadable record": lambda fleet: fleet.tell("w.w1", b"\xc1"),
}
OPEN: dict[str, Excluding] = {
    "healthy": lambda fleet: None,
    "a suspect": lambda fleet: fleet.fails("w1"),
    "suspected by one replica": lambda fleet: fleet.tell(
        "r.r0", v.WorkerSuspected("w1", 1, "reset")
    ),
}


@pytest.mark.parametrize("why", EXCLUDED)
def test_another_worker_counts_only_if_it_is_open(why: str) -> None:
    """The guard is off: it lets no breaker open on the only worker with an engine."""
    fleet = LedFleet(workers=2, config=replace(CONFIG, share_percent=100))
    EXCLUDED[why](fleet)
    holds = [hold_of_next_failure(fleet) for _ in range(4)]
    assert all(hold in BASE for hold in holds), holds


@pytest.mark.parametrize("why", OPEN)
def test_the_hold_doubles_while_another_worker_is_open(why: str) -> None:
    fleet = LedFleet(workers=2, config=CONFIG)
    OPEN[why](fleet)
    assert hold_of_next_failure(fleet) in BASE
    OPEN[why](fleet)
    assert 8 <= hold_of_next_failure(fleet) <= 16
    OPEN[why](fleet)
    assert 16 <= hold_of_next_failure(fleet) <= 32


@pytest.mark.parametrize(
    "evidence", [found_hung("w1"), dropped(muted=True)], ids=["hung", "unreadable"]
)
def test_a_worker_that_is_unhealthy_is_not_open(evidence: object) -> None:
    """Two of four may fail at once."""
    fleet = LedFleet(workers=4, config=CONFIG)
    fleet.tell("w.w1", evidence)
    assert fleet.state("w1") == HealthState.UNHEALTHY
    assert hold_of_next_failure(fleet) in BASE
    assert 8 <= hold_of_next_failure(fleet) <= 16
    for other in ("w2", "w3"):
        fleet.tell("fleet", drain(other))
    assert hold_of_next_failure(fleet) in BASE


def test_once_another_worker_is_open_all_openings_count() -> None:
    fleet = without_others()
    for _ in range(3):
        assert hold_of_next_failure(fleet) in BASE
    fleet.tell("fleet", drain("w1", EffectKind.UNDRAIN))
    assert 32 <= hold_of_next_failure(fleet) <= 64
    fleet.tell("fleet", drain("w1"))
    assert hold_of_next_failure(fleet) in BASE


def test_two_that_are_probed_in_turn_hold_for_the_base_time() -> None:
    """Neither is open while it is half open."""
    fleet = LedFleet(workers=4, config=CONFIG)
    for _ in range(CONFIG.errors):
        fleet.fails("w0")
        fleet.fails("w1")
    for other in ("w2", "w3"):
        fleet.tell("fleet", drain(other))
    fleet.ticks(CONFIG.hold_ticks)
    for _ in range(3):
        for worker in ("w0", "w1"):
            assert fleet.state(worker) == HealthState.PROBING
            assert hold_of_next_failure(fleet, worker) in BASE
