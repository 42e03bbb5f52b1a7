"""How often hardware fails, by seed 004 ("Dynamo-style fault tolerance"), and what is wrong there.

The text takes a rate of GPU failures per year (2 to 5 percent) and asks how often a worker of a
fleet fails, where a worker is a group of GPUs that all must live (tensor parallelism).

Errors of the text, found by this arithmetic (`tests/policies/health/test_failure_rates.py`):

- "At 1,000 GPUs, the mean time between failures is roughly 1 day": at 2 to 5 percent a year it is
  7.3 to 18.3 days. One day would be a rate of 36 percent.
- It says that GPUs fail faster than groups do. Each failure of a GPU ends one group, and no group
  ends otherwise: both happen 0.084 times a day for 1,024 GPUs at 3 percent, once in 12 days.
- "33 checks per minute" at an interval of 30 seconds are 2.
- The breaker probes after 60 s of a hold in which nothing is checked, so a canary that passes after
  61 s cannot be what closes it after 60 s; and no way leads from UNHEALTHY to HEALTHY.
"""

from __future__ import annotations

DAYS = 365.0
"""Days of a year."""


def failures_per_day(gpus: int, yearly_rate: float) -> float:
    """Expected number of GPU failures per day of `gpus` GPUs, of which a share of `yearly_rate`
    (0 to 1) fails each year.

    Raises ValueError for a negative number or a rate outside of 0 to 1.
    """
    if gpus < 0 or not 0 <= yearly_rate <= 1:
        raise ValueError(f"{gpus} GPUs at a yearly rate of {yearly_rate}: out of bounds")
    return gpus * yearly_rate / DAYS


def worker_failures_per_day(workers: int, gpus_each: int, yearly_rate: float) -> float:
    """Expected number of workers per day that lose a GPU, each of `gpus_each`.

    A worker fails if any of its GPUs does: 1 - (1 - p) ** n per day for n GPUs of daily rate p.
    Raises ValueError as `failures_per_day`.
    """
    daily = failures_per_day(1, yearly_rate)
    if workers < 0 or gpus_each < 0:
        raise ValueError(f"{workers} workers of {gpus_each} GPUs: out of bounds")
    return workers * (1.0 - (1.0 - daily) ** gpus_each)


def days_between(per_day: float) -> float:
    """Mean time between failures in days. Raises ValueError if there are none."""
    if per_day <= 0:
        raise ValueError("without failures there is no time between them")
    return 1.0 / per_day


def corruption_hours(gpus: int, days_each: float = 115.0) -> float:
    """Hours between two silently corrupted computations in a fleet, if each GPU has one in
    `days_each` days (the text's figure for what ECC does not catch)."""
    return days_each * 24.0 / gpus


def check_share(step_ms: float, interval_s: float) -> float:
    """The share of a GPU's time that one check of `step_ms` each `interval_s` takes."""
    return step_ms / 1000.0 / interval_s
