"""Is the engine hung? The rule by which an agent counts looks at its engine.

Theory of operation. A look counts against the engine if its loop took no turn, though it could
have. What is counted are looks, not time: an agent that was frozen itself, with its host or alone,
took none meanwhile. No look counts

- that began or ended late: then the agent had no CPU either;
- inside a step that is not older than FACTOR times what is expected of it;
- while the thread that steps computes, or waits for a CPU, and has used no more CPU time since its
  last turn than such a step may use. Beyond that it spins.

So a thread that is blocked counts at once, one that spins after SPIN_US of CPU time.
"""

from __future__ import annotations

from msgspec import Struct

LOOK_US = 1_000_000
PROBE_US = 400_000
"""Time between two looks at an engine that answers, and time that an answer may take."""
LATE_US = 250_000
FACTOR = 4
SPIN_US = 1_000_000
HUNG_LOOKS = 3
"""Counted looks in a row after which an engine is hung: 2.2 s after its last turn at most."""


class Look(Struct, frozen=True, kw_only=True):
    """What one look of `took_us` showed. `turned`: the engine's loop took a turn. `late_us`: by how
    much the agent was late. `step_age_us` (0: in no step) and `expected_us` (-1 unknown) are of the
    step in progress; `cpu_us` and `wait_us`: CPU time that the thread that steps used since the last
    look, and for which it waited for a CPU (-1 unknown)."""

    turned: bool
    took_us: int
    late_us: int = 0
    step_age_us: int = 0
    expected_us: int = -1
    cpu_us: int = -1
    wait_us: int = -1


class HangRule:
    """Counts looks at one engine. `counted`: in a row, since its last turn; `spent_us`: the CPU time
    it used since then."""

    def __init__(self) -> None:
        self.counted = 0
        self.spent_us = 0

    @property
    def hung(self) -> bool:
        """Whether the engine is hung."""
        return self.counted >= HUNG_LOOKS

    def take(self, look: Look) -> None:
        """Count one look, or not."""
        if look.turned:
            self.counted = self.spent_us = 0
            return
        self.spent_us += max(look.cpu_us, 0)
        if look.late_us <= LATE_US and self._could_turn(look):
            self.counted += 1

    def _could_turn(self, look: Look) -> bool:
        due_us = FACTOR * max(look.expected_us, 0) if look.step_age_us else 0
        if 0 < look.step_age_us < due_us:
            return False
        works = 2 * (look.cpu_us + look.wait_us) >= look.took_us
        return not works or self.spent_us >= due_us + SPIN_US
