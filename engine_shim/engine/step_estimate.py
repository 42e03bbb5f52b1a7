"""How long the step in progress may take, by those before it.

The slowest recent step, or the slowest recent time per prompt token times the prompt tokens of the
step, whichever is longer: a bound, not a prediction. Both fade, so that one odd step is forgotten.
It is used to judge whether a step without an end is long or hung.
"""

from __future__ import annotations

FADE_BITS = 5
"""A slower step is forgotten by 1/32 of its time a step."""
PROMPT_TOKENS = 16
"""Steps with fewer prompt tokens say little about the time that a token takes."""


class StepEstimate:
    """Of one engine. Microseconds."""

    __slots__ = ("_per_token_ns", "_slowest_us")

    def __init__(self) -> None:
        self._slowest_us = 0
        self._per_token_ns = 0

    def learn(self, duration_us: int, prefill_tokens: int) -> None:
        """A step with so many prompt tokens took so long."""
        if prefill_tokens >= PROMPT_TOKENS:
            faded = self._per_token_ns - (self._per_token_ns >> FADE_BITS)
            self._per_token_ns = max(duration_us * 1000 // prefill_tokens, faded)
        faded = self._slowest_us - (self._slowest_us >> FADE_BITS)
        self._slowest_us = max(duration_us, faded)

    def of(self, prefill_tokens: int) -> int:
        """The longest that a step with so many prompt tokens should take; -1 before the first
        step."""
        if not self._slowest_us:
            return -1
        return max(self._slowest_us, self._per_token_ns * prefill_tokens // 1000)
