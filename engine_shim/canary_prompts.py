"""The canaries: fixed prompts, as token ids, and how much of their greedy continuation is compared.

The ids follow from the model's vocabulary and a seed that is the number of the prompt set and of the
canary, so that all workers of a model get the same ones. They are spread over the middle of the
vocabulary, away from special tokens. Lengths differ, to reach more than one KV block.
"""

from __future__ import annotations

from random import Random

PROMPTS = 1
"""Number of this set of prompts. Raise it with any change here: values of another set do not apply."""
LENGTHS = (19, 43, 70, 101)
"""Prompt tokens of each canary."""
COUNT = len(LENGTHS)
TOKENS = 8
"""Generated tokens of each."""
TOP = 2
"""Log probabilities per token: those of the most likely ones."""


def prompt_of(canary: int, vocabulary: int, max_model_len: int) -> list[int]:
    """Token ids of a canary for a model with this number of tokens. A model with a short context
    gets as many as there is room for."""
    draw = Random(f"relume canary {PROMPTS}.{canary}")
    low, span = vocabulary // 8, max(vocabulary // 2, 1)
    ids = [low + draw.randrange(span) for _ in range(LENGTHS[canary])]
    return ids[: max(max_model_len - TOKENS, 1)]
