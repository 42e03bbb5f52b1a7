"""When the next canary is due. Pure: times are seconds that the caller measures.

A canary costs engine time. The pause before it is so long that canaries take at most the budgeted
share of it, and at least the interval. Canaries differ in length, so the cost is the shortest time that
this one took on this engine, at its start or later: a longer one waited in the engine's queue, which
costs nothing. The busiest engines would hardly
be checked otherwise. For the same reason no pause is longer than `MOST_INTERVALS`. A jitter of a
quarter keeps workers that started together apart. A due canary waits for an idle engine for as long
as half an interval, and is then sent to a busy one: an engine that is never idle is checked too.
"""

from __future__ import annotations

from random import Random

JITTER = 0.25
MOST_INTERVALS = 20
"""Intervals in the longest pause, whatever a canary costs."""
PATIENCE = 0.5
"""Part of the interval for which a due canary waits for an idle engine."""


class CanarySchedule:
    """Of one engine. `interval_s` between canaries at least, on average; `budget_ppm`: millionths of
    the engine's time that they may take. `seed` names the engine, so that a run can be repeated."""

    def __init__(self, interval_s: float, budget_ppm: int, seed: str) -> None:
        self._interval_s = interval_s
        self._budget_ppm = budget_ppm
        self._random = Random(f"canary {seed}")
        self._costs_us: dict[int, int] = {}

    def note_cost(self, number: int, took_us: int) -> None:
        """Canary `number` took this long (0: it got no answer)."""
        if took_us > 0:
            self._costs_us[number] = min(self._costs_us.get(number, took_us), took_us)

    def pause_s(self, number: int) -> float:
        """Pause before the next canary, which is `number`; one that was never answered costs as much as
        the dearest. All of its cost counts as the engine's time, though other requests share its steps."""
        base = self._interval_s * (1 + JITTER * (2 * self._random.random() - 1))
        longest = self._interval_s * MOST_INTERVALS
        cost_us = self._costs_us.get(number) or max(self._costs_us.values(), default=0)
        return max(base, min(cost_us / max(self._budget_ppm, 1), longest))

    @property
    def patience_s(self) -> float:
        """Maximum time that a due canary waits for an idle engine."""
        return self._interval_s * PATIENCE
