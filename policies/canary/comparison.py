"""Is an answer to a canary right? It is compared with the golden values, token by token.

If the answer and the golden values are exact, every token and every bit of every log probability
must be equal. An answer is exact if its engine gave the same bits alone and in a batch in its
self-test, and computed nothing else meanwhile: what a large batch does to the bits, four short
prompts do not show. Otherwise a log probability must be within the learnt range, widened by a
tolerance. There the most likely two tokens may change places: if they are closer than the tolerance,
another token is no difference, and what follows it is not compared, because it continues another text.

At each position stand the log probabilities of the most likely tokens, as many for each, largest
first.
"""

from __future__ import annotations

from relume.policies.canary.canary_state import CanaryAnswer, CanaryValues


def difference(answer: CanaryAnswer, values: CanaryValues, tolerance: float) -> str:
    """What is wrong with the answer, in words; empty: it is right. A value that is no number is
    never right."""
    exact = values.exact and answer.exact
    margin = 0.0 if exact else tolerance
    if len(answer.tokens) != len(values.tokens):
        return f"{len(answer.tokens)} tokens instead of {len(values.tokens)}"
    if len(answer.logprobs) != len(values.low):
        return f"{len(answer.logprobs)} log probabilities instead of {len(values.low)}"
    top = len(values.low) // max(len(values.tokens), 1)
    for place, (token, expected) in enumerate(zip(answer.tokens, values.tokens, strict=True)):
        for at in range(place * top, place * top + top):
            given = answer.logprobs[at]
            if not values.low[at] - margin <= given <= values.high[at] + margin:
                return f"log probability {at % top + 1} of token {place + 1} is {given:.9g}, " + (
                    f"expected {values.low[at]:.9g}"
                    if values.low[at] == values.high[at]
                    else f"expected {values.low[at]:.9g} to {values.high[at]:.9g}"
                )
        if token != expected:
            if not exact and _is_tie(values, place * top, top, margin):
                return ""
            return f"token {place + 1} is {token} instead of {expected}"
    return ""


def _is_tie(values: CanaryValues, at: int, top: int, margin: float) -> bool:
    return top > 1 and values.low[at] - values.high[at + 1] <= 2 * margin


def agree(one: CanaryAnswer, other: CanaryAnswer, tolerance: float) -> bool:
    """Whether two answers may both be right."""
    return not difference(other, values_like(one), tolerance)


def values_like(answer: CanaryAnswer) -> CanaryValues:
    """As if the answer were golden."""
    return CanaryValues(
        version=0,
        tokens=answer.tokens,
        low=answer.logprobs,
        high=answer.logprobs,
        exact=answer.exact,
        witnesses=(),
    )
