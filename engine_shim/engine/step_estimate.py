"""How long the step in progress may take, by those before it.

The slowest recent step, or the slowest recent time per prompt token times the prompt tokens of the
step, whichever is longer: a bound, not a prediction. Both fade, so that one odd step is forgotten, and
at most double in a step: one that hung for seconds and went on must not let the next hang look
short. It is used to judge whether a step without an end is long or hung.

Attention makes prompt tokens dearer the more there are. So a step with many times the prompt tokens of
recent ones may take the square of that ratio, up to `LONGEST_US`. Until a prompt token's time is known,
it may be that of the slowest step over `PROMPT_TOKENS`.
"""

from __future__ import annotations

FADE_BITS = 5
"""A slower step is forgotten by 1/32 of its time a step."""
PROMPT_FADE_BITS = 3
"""A slower prompt token by 1/8 a step with prompts, of which there are fewer."""
GROWTH = 2
PROMPT_TOKENS = 16
"""Steps with fewer prompt tokens say little about the time that a token takes."""
FEW_TOKENS = 256
"""Below, a step's own cost is a large part of the time that a prompt token seems to take."""
LONGEST_US = 5_000_000
"""What a step may take where that does not follow from others in proportion."""


class StepEstimate:
    """Of one engine. Microseconds."""

    __slots__ = ("_most_tokens", "_per_token_ns", "_slowest_us")

    def __init__(self) -> None:
        self._slowest_us = 0
        self._per_token_ns = 0
        self._most_tokens = 0

    def learn(self, duration_us: int, prefill_tokens: int) -> None:
        """A step with so many prompt tokens took so long."""
        expected_us = self.of(prefill_tokens)
        if expected_us > 0:
            duration_us = min(duration_us, GROWTH * expected_us)
        if prefill_tokens >= PROMPT_TOKENS:
            each_ns = duration_us * 1000 // prefill_tokens
            self._per_token_ns = max(each_ns, _faded(self._per_token_ns))
            self._most_tokens = max(prefill_tokens, _faded(self._most_tokens))
        faded = self._slowest_us - (self._slowest_us >> FADE_BITS)
        self._slowest_us = max(duration_us, faded)

    def of(self, prefill_tokens: int) -> int:
        """The longest that a step with so many prompt tokens should take; -1 before the first
        step."""
        if not self._slowest_us:
            return -1
        if not self._per_token_ns:
            assumed_us = min(self._slowest_us * prefill_tokens // PROMPT_TOKENS, LONGEST_US)
            return max(self._slowest_us, assumed_us)
        linear_us = self._per_token_ns * prefill_tokens // 1000
        known = max(self._most_tokens, FEW_TOKENS)
        square_us = min(linear_us * prefill_tokens // known, LONGEST_US)
        return max(self._slowest_us, linear_us, square_us)


def _faded(value: int) -> int:
    return value - (value >> PROMPT_FADE_BITS)
