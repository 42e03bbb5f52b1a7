"""The rule by which an agent finds its engine hung: which looks count."""

from __future__ import annotations

import pytest

from relume.engine_shim.agent.engine_process.hang_rule import (
    FACTOR,
    HUNG_LOOKS,
    LATE_US,
    SPIN_US,
    HangRule,
    Look,
)

S = 1_000_000
BLOCKED = {"turned": False, "took_us": S // 2, "cpu_us": 0, "wait_us": 0}


def after(*looks: Look) -> HangRule:
    rule = HangRule()
    for look in looks:
        rule.take(look)
    return rule


def test_a_blocked_engine_is_hung_after_some_looks_and_a_turn_ends_that() -> None:
    rule = after(*[Look(**BLOCKED)] * (HUNG_LOOKS - 1))
    assert not rule.hung
    rule.take(Look(**BLOCKED))
    assert rule.hung
    rule.take(Look(turned=True, took_us=1000))
    assert (rule.hung, rule.counted, rule.spent_us) == (False, 0, 0)


def test_an_engine_of_which_nothing_is_known_counts_as_blocked() -> None:
    assert after(*[Look(turned=False, took_us=S // 2)] * HUNG_LOOKS).hung


def test_a_look_that_came_late_does_not_count() -> None:
    """Whether the agent slept too long or its host stood still."""
    assert after(*[Look(**BLOCKED, late_us=LATE_US + 1)] * 100).counted == 0
    assert after(*[Look(**BLOCKED, late_us=LATE_US)] * HUNG_LOOKS).hung


def test_a_step_within_what_is_expected_of_it_is_long_and_no_hang() -> None:
    """A thread that waits for a GPU need not use a CPU."""
    inside = Look(**BLOCKED, expected_us=3 * S, step_age_us=FACTOR * 3 * S - 1)
    beyond = Look(**BLOCKED, expected_us=3 * S, step_age_us=FACTOR * 3 * S)
    assert after(*[inside] * 100).counted == 0
    assert after(*[beyond] * HUNG_LOOKS).hung


def test_a_starved_thread_is_not_hung() -> None:
    """It waits for a CPU, for as long as that takes, and uses little of its share."""
    starved = Look(
        turned=False,
        took_us=S // 2,
        cpu_us=S // 100,
        wait_us=S // 2,
        step_age_us=S,
        expected_us=900,
    )
    assert after(*[starved] * 90).counted == 0


@pytest.mark.parametrize("share", [100, 40])
def test_a_thread_that_spins_is_hung_once_it_used_more_than_its_step_may(share: int) -> None:
    """CPU time counts, so that a spinning thread on a busy machine is found too."""
    used = S // 2 * share // 100
    spins = Look(
        turned=False,
        took_us=S // 2,
        cpu_us=used,
        wait_us=S // 2 - used,
        step_age_us=5 * S,
        expected_us=1000,
    )
    rule, looks = HangRule(), 0
    while not rule.hung:
        rule.take(spins)
        looks += 1
    assert rule.spent_us >= FACTOR * 1000 + SPIN_US
    assert looks == -(-(FACTOR * 1000 + SPIN_US) // used) + HUNG_LOOKS - 1


def test_cpu_time_stretches_only_a_step_that_is_expected_to_need_it() -> None:
    computes = {"turned": False, "took_us": S // 2, "cpu_us": S // 2, "wait_us": 0}
    long = Look(**computes, step_age_us=FACTOR * 2 * S, expected_us=2 * S)
    idle = Look(**computes, step_age_us=0, expected_us=2 * S)
    assert after(*[long] * 17).counted == 0
    assert after(*[idle] * (2 + HUNG_LOOKS)).hung


def test_cpu_time_from_before_a_turn_does_not_count_after_it() -> None:
    """A busy engine takes a turn between long steps; it never spins."""
    computes = Look(turned=False, took_us=S // 2, cpu_us=S // 2, wait_us=0)
    turns = Look(turned=True, took_us=1000)
    assert after(*[turns, computes] * 100).counted == 0
