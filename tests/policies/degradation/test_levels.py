"""Levels: monotone in capacity, no flapping, and recovery in reverse order."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest

from relume.events.vocabulary.enums import Tier
from relume.policies.degradation import levels
from relume.policies.degradation.levels import (
    Level,
    level_due,
    may_fall,
    next_level,
    output_limit,
    share_of,
    sheds,
    slo_factor,
    workers_wanted,
)

RISE, FALL = 3, 15
TIERS = (Tier.INTERACTIVE, Tier.STANDARD, Tier.BATCH)


class Course:
    """The level of one model over ticks, as the fold and the leader have it."""

    def __init__(self, level: int = 0) -> None:
        self.level, self.tick = level, 0
        self.higher = self.lower = -1
        self.changes: list[tuple[int, int]] = []

    def ticks(self, count: int, share: int) -> int:
        for _ in range(count):
            self.tick += 1
            is_higher, is_lower = level_due(share) > self.level, may_fall(self.level, share)
            self.higher = (self.higher if self.higher >= 0 else self.tick) if is_higher else -1
            self.lower = (self.lower if self.lower >= 0 else self.tick) if is_lower else -1
            since = [self.tick - at if at >= 0 else -1 for at in (self.higher, self.lower)]
            level = next_level(self.level, share, *since, RISE, FALL)
            if level != self.level:
                self.level, self.higher, self.lower = level, -1, -1
                self.changes.append((self.tick, level))
        return self.level


@pytest.mark.parametrize(
    ("share", "level"),
    [(2000, 0), (1000, 0), (999, 1), (750, 1), (749, 2), (500, 2), (499, 3), (250, 3), (249, 4)],
)
def test_the_part_of_the_demand_that_is_served_makes_a_level_due(share: int, level: int) -> None:
    assert level_due(share) == level


def test_no_demand_needs_no_capacity() -> None:
    assert level_due(share_of(0, 0)) == 0
    assert level_due(share_of(0, 1)) == Level.CLOSED


@pytest.mark.parametrize("seed", range(20))
def test_more_capacity_for_the_same_demand_makes_no_higher_level(seed: int) -> None:
    random = Random(seed)
    for _ in range(500):
        demand, level = random.randrange(1, 10**7), random.randrange(5)
        less, more = sorted(random.randrange(0, 2 * 10**7) for _ in range(2))
        ticks = random.randrange(-1, 40), random.randrange(-1, 40)
        shares = share_of(less, demand), share_of(more, demand)
        assert level_due(shares[1]) <= level_due(shares[0]), (demand, less, more)
        after = [next_level(level, share, *ticks, RISE, FALL) for share in shares]
        assert after[1] <= after[0], f"seed {seed}: {demand=} {less=} {more=} {level=} {ticks=}"


def test_a_short_dip_changes_nothing() -> None:
    course = Course()
    for _ in range(10):
        course.ticks(RISE, 400)
        course.ticks(1, 1200)
    assert course.changes == []


def test_a_level_is_reached_in_one_step_and_left_one_by_one() -> None:
    course = Course()
    course.ticks(100, 100)
    assert course.changes == [(RISE + 1, 4)]
    course.ticks(200, 5000)
    assert [level for _, level in course.changes] == [4, 3, 2, 1, 0]
    falls = [tick for tick, _ in course.changes[1:]]
    assert all(b - a > FALL for a, b in pairwise(falls))


def test_demand_that_flaps_faster_than_the_dwell_time_holds_the_level() -> None:
    course = Course()
    for _ in range(20):
        course.ticks(RISE + 2, 600)
        course.ticks(FALL, 3000)
    assert course.changes == [(RISE + 1, 2)]


def test_a_level_does_not_fall_at_the_threshold_it_rose_at() -> None:
    course = Course(level=1)
    course.ticks(200, 1050)
    assert course.level == 1, "within the margin"
    course.ticks(FALL + 1, 1120)
    assert course.level == 0


@pytest.mark.parametrize("seed", range(10))
def test_no_level_changes_twice_within_the_shortest_dwell_time(seed: int) -> None:
    random, course = Random(seed), Course()
    for _ in range(300):
        course.ticks(random.randrange(1, 30), random.randrange(0, 1500))
    for (before, _), (after, level) in pairwise(course.changes):
        assert after - before > RISE, f"seed {seed}"
        fell = level < dict(course.changes)[before]
        assert not fell or after - before > FALL, f"seed {seed}"


def test_each_level_does_what_those_below_do() -> None:
    for low, high in zip(range(4), range(1, 5), strict=True):
        assert output_limit(high, 64) >= output_limit(low, 64)
        assert slo_factor(high) >= slo_factor(low)
        for tier in TIERS:
            assert sheds(high, tier) >= sheds(low, tier)


def test_lower_tiers_are_refused_first_and_all_at_the_last_level() -> None:
    refused = {level: [t for t in TIERS if sheds(level, t)] for level in range(5)}
    assert refused == {0: [], 1: [], 2: [Tier.BATCH], 3: [Tier.BATCH], 4: list(TIERS)}
    assert not sheds(3, Tier.NONE)


def test_as_many_workers_are_wanted_as_the_demand_needs() -> None:
    assert workers_wanted(4000, 1000, 2) == 8
    assert workers_wanted(1, 1000, 2) == 1
    assert workers_wanted(1001, 1000, 1) == 2
    assert workers_wanted(10, 0, 3) == 3, "without a measure as many as there are"
    assert levels.UNBOUNDED > levels.THRESHOLDS[0]
