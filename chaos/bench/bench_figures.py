"""Figures as the runner of benches wants them."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterable
from typing import Any


def figure(value: float, unit: str, goal: float | None = None, digits: int = 4) -> dict[str, Any]:
    """One figure, rounded to `digits` decimal digits; 0: a whole number."""
    return {"value": round(value, digits or None), "goal": goal, "unit": unit}


def percentile(values: Iterable[float], share: float) -> float:
    """Nearest-rank percentile. Raises IndexError if there are no values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def interval(ratios: list[float], rounds: int = 2000) -> tuple[float, float]:
    """Bootstrap 95 % interval of the median."""
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(rounds))
    return medians[int(0.025 * rounds)], medians[int(0.975 * rounds)]


def cpu_s(pid: int) -> float:
    """User + system time of a process, all threads, in seconds, to the nanosecond.

    Linux names the CPU clock of process `pid` by the id `~pid << 3 | 2`.
    """
    return time.clock_gettime(~pid << 3 | 2)
