"""When the next canary is due. Pure: times are seconds that the caller measures.

A canary costs engine time. The pause after it is so long that canaries take at most the budgeted
share of it, and at least the interval. A jitter of a quarter keeps workers that started together
apart. A due canary waits for an idle engine for as long as half an interval, and is then sent to a
busy one: an engine that is never idle is checked too.
"""

from __future__ import annotations

from random import Random

JITTER = 0.25
PATIENCE = 0.5
"""Part of the interval for which a due canary waits for an idle engine."""


class CanarySchedule:
    """Of one engine. `interval_s` between canaries at least, on average; `budget_ppm`: millionths of
    the engine's time that they may take. `seed` names the engine, so that a run can be repeated."""

    def __init__(self, interval_s: float, budget_ppm: int, seed: str) -> None:
        self._interval_s = interval_s
        self._budget_ppm = budget_ppm
        self._random = Random(f"canary {seed}")

    def pause_s(self, cost_us: int) -> float:
        """Pause after a canary that took `cost_us`. All of it counts as the engine's time, though
        other requests share its steps."""
        base = self._interval_s * (1 + JITTER * (2 * self._random.random() - 1))
        return max(base, cost_us / max(self._budget_ppm, 1))

    @property
    def patience_s(self) -> float:
        """Maximum time that a due canary waits for an idle engine."""
        return self._interval_s * PATIENCE
