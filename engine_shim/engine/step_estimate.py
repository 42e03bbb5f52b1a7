"""How long the step in progress may take, by those before it.

The slowest recent step, or the slowest recent time per prompt token times the prompt tokens of the
step, whichever is longer: a bound, not a prediction. Both fade, so that one odd step is forgotten, and
at most double in a step: one that hung for seconds and went on must not let the next hang look
short. It is used to judge whether a step without an end is long or hung.
"""

from __future__ import annotations

FADE_BITS = 5
"""A slower step is forgotten by 1/32 of its time a step."""
PROMPT_FADE_BITS = 3
"""A slower prompt token by 1/8 a step with prompts, of which there are fewer."""
GROWTH = 2
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
        expected_us = self.of(prefill_tokens)
        if expected_us > 0:
            duration_us = min(duration_us, GROWTH * expected_us)
        if prefill_tokens >= PROMPT_TOKENS:
            known_ns = self._per_token_ns
            each_ns = duration_us * 1000 // prefill_tokens
            if known_ns:
                each_ns = min(each_ns, GROWTH * known_ns)
            self._per_token_ns = max(each_ns, known_ns - (known_ns >> PROMPT_FADE_BITS))
        faded = self._slowest_us - (self._slowest_us >> FADE_BITS)
        self._slowest_us = max(duration_us, faded)

    def of(self, prefill_tokens: int) -> int:
        """The longest that a step with so many prompt tokens should take; -1 before the first
        step."""
        if not self._slowest_us:
            return -1
        return max(self._slowest_us, self._per_token_ns * prefill_tokens // 1000)
