"""What a simulated engine answers to canaries: the same on every engine of a model with right weights.

Weights with a flipped bit give other log probabilities. The tokens of canaries stay equal, so only a
comparison of log probabilities finds the worker. Of the answers to clients some are wrong from a token
on, as of a real engine: there 2 of 6 canaries had other tokens after a flip.
"""

from __future__ import annotations

from random import Random

from relume.engine_shim.canary_prompts import PROMPTS, TOKENS, TOP
from relume.events.wire.worker_calls import CanaryAnswered

TOOK_US = 20_000
"""The shortest time of a canary. Some take up to twice as long, as on real engines."""
FLIPPED = 0.2
"""By how much log probabilities differ after a flip: more than the tolerance, so that a busy engine is
found too."""


WRONG_SHARE = 1 / 3
"""Of the requests, those that get wrong tokens from an engine with a flipped bit."""


def first_wrong(content_id: str, output_tokens: int) -> int:
    """The first token of the answer to `content_id` that a flipped bit makes wrong; -1: none."""
    draw = Random(f"{content_id}:flipped")
    return draw.randrange(output_tokens) if draw.random() < WRONG_SHARE else -1


def time_us(draw: Random, slower: float, pause_us: float) -> int:
    """The time of a canary on an idle engine, whose steps take `slower` times as long, each after a
    pause."""
    return round(TOOK_US * (1 + draw.random()) * slower + (TOKENS + 1) * pause_us)


def answer(model: str, number: int, flipped: bool, alone: bool, took_us: int) -> CanaryAnswered:
    """The answer of an engine of `model` to a canary."""
    draw = Random(f"{PROMPTS}.{number}:{model}")
    tokens = tuple(draw.randrange(1000) for _ in range(TOKENS))
    drift = FLIPPED if flipped else 0.0
    logprobs: list[float] = []
    for _ in range(TOKENS):
        found = sorted((-4 * draw.random() for _ in range(TOP)), reverse=True)
        logprobs += [value - drift for value in found]
    return CanaryAnswered(tokens=tokens, logprobs=tuple(logprobs), took_us=took_us, alone=alone)
