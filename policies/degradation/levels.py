"""Levels of degradation: which one is due, when it changes, and what it does. Pure.

The share of its demand that a model can serve says which level is due (seed 004): 0 from 100 % on,
1 from 75 %, 2 from 50 %, 3 from 25 %, else 4. With equal demand more capacity never makes a higher
level due (I11).

A level rises to the one due after a higher one was due for `rise_ticks`. It falls by one step, so
that it lifts what it imposed in reverse order, after a lower one was due for `fall_ticks` even with
a margin. Each step starts that time anew.

Demand is what clients send, with what was refused. So a refusal lowers no demand, and no level
undoes its own cause.
"""

from __future__ import annotations

from enum import IntEnum

from relume.events.vocabulary.enums import Tier

PERMILLE = 1000
THRESHOLDS = (1000, 750, 500, 250)
"""Levels 1, 2, 3, 4 are due below these parts of the demand, in thousandths."""
MARGIN_PERCENT = 10
"""A lower level is due if it would be with so much less capacity."""
UNBOUNDED = 1_000_000
"""The share without any demand, and the largest one."""


class Level(IntEnum):
    """What a model does without; each level also does what those below do."""

    NORMAL = 0
    SHORT_ANSWERS = 1
    """Requests that arrive have a maximum of output tokens, and engines may run fewer at once."""
    NO_BATCH = 2
    """Requests of the batch tier are refused."""
    LATE = 3
    """The TTFT goals of tiers count twice, and engines may run even fewer requests at once."""
    CLOSED = 4
    """All new requests are refused; those that were accepted are served."""


def share_of(capacity: int, demand: int) -> int:
    """The part of the demand that the capacity serves, in thousandths; both in one unit."""
    if demand <= 0:
        return UNBOUNDED
    return min(capacity * PERMILLE // demand, UNBOUNDED)


def level_due(share: int) -> Level:
    """The level that this share of the demand makes due."""
    return Level(sum(share < threshold for threshold in THRESHOLDS))


def may_fall(level: int, share: int) -> bool:
    """Whether a lower level is due even with a margin."""
    return level_due(share * (100 - MARGIN_PERCENT) // 100) < level


def next_level(
    level: int, share: int, higher_ticks: int, lower_ticks: int, rise_ticks: int, fall_ticks: int
) -> Level:
    """The level after `level`, which may be the same. `higher_ticks` and `lower_ticks`: for how
    long a higher or lower level has been due by now."""
    due = level_due(share)
    if due > level and higher_ticks >= rise_ticks:
        return due
    if may_fall(level, share) and lower_ticks >= fall_ticks:
        return Level(level - 1)
    return Level(level)


def sheds(level: int, tier: str) -> bool:
    """Whether new requests of this tier are refused."""
    return level >= Level.CLOSED or (level >= Level.NO_BATCH and tier == Tier.BATCH)


def slo_factor(level: int) -> int:
    """By what the TTFT goals of tiers are multiplied."""
    return 2 if level >= Level.LATE else 1


def batch_percent(level: int, percent: int) -> int:
    """Share of its maximum number of requests that an engine runs at once, where levels 1 and 2 limit
    it to `percent`. Level 3 limits it by as much again, as the seed's 75 % and 50 %."""
    if level < Level.SHORT_ANSWERS:
        return 100
    return max(2 * percent - 100, 1) if level >= Level.LATE else percent


def output_limit(level: int, max_tokens: int) -> int:
    """Maximum of output tokens of a request that arrives; 0: none."""
    return max_tokens if level >= Level.SHORT_ANSWERS else 0


def workers_wanted(demand: int, capacity: int, workers: int) -> int:
    """Workers that would serve the demand, if each serves as these `workers` do with their
    `capacity` in the same unit; at least one."""
    if capacity <= 0:
        return max(workers, 1)
    return max(-(-demand * workers // capacity), 1)
