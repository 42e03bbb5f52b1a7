"""What a simulated engine answers to canaries: the same on every engine of right weights.

Weights with a flipped bit of a mantissa give the same tokens with other log probabilities. So the
streams of clients stay right, and only a comparison of log probabilities finds the worker.
"""

from __future__ import annotations

from random import Random

from relume.engine_shim.canary_prompts import PROMPTS, TOKENS, TOP
from relume.events.wire.worker_calls import CanaryAnswered

TOOK_US = 20_000
FLIPPED = 1e-6
"""By how much log probabilities differ after a flip."""


def answer(number: int, flipped: bool, alone: bool) -> CanaryAnswered:
    """An engine's answer to a canary."""
    draw = Random(f"{PROMPTS}.{number}")
    tokens = tuple(draw.randrange(1000) for _ in range(TOKENS))
    drift = FLIPPED if flipped else 0.0
    logprobs: list[float] = []
    for _ in range(TOKENS):
        found = sorted((-4 * draw.random() for _ in range(TOP)), reverse=True)
        logprobs += [value - drift for value in found]
    return CanaryAnswered(tokens=tokens, logprobs=tuple(logprobs), took_us=TOOK_US, alone=alone)
