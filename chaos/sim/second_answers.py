"""Answers of a simulated engine to cross-checks: a finished request, answered again.

It takes as long as the prompt and the tokens take an idle engine, on its own clock: the steps of the
engine's other requests do not change. So a check never delays a client here; whether an engine with
requests gets one is for a validator to say.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec import convert, to_builtins

from relume.chaos.sim.canary_answers import first_wrong
from relume.chaos.sim.engine.step_cost import StepCost
from relume.chaos.sim.gateway import request_body
from relume.chaos.sim.gateway.answer_bytes import WRONG, tokens_of
from relume.chaos.sim.gateway.request_body import RequestBody
from relume.events.wire.worker_calls import CrossCheckAnswered, CrossCheckRequest

Reply = Callable[[int, dict[str, Any]], None]
"""Takes the status and the JSON of an answer."""


def request_of(body: dict[str, Any]) -> tuple[CrossCheckRequest, RequestBody]:
    """The call, and the request that is answered again."""
    call = convert(body, CrossCheckRequest)
    return call, request_body.decode(call.body)


def took_ns(cost: StepCost, request: RequestBody) -> int:
    """Time of an engine that does nothing else: the prompt in one step, then one step per token."""
    first, more = cost.decode(1, request.prompt_tokens + 1)
    count = request.output_tokens - 1
    decode_ns = count * first + more * (count * (count - 1) // 2)
    prompt_ns = cost.step([(request.prompt_tokens, 0)], 0, 0)
    return prompt_ns + decode_ns + cost.pause_ns * request.output_tokens


def answer(request: RequestBody, wrong: bool, flipped: bool, ns: int) -> dict[str, Any]:
    """What the engine answers: the tokens that its clients get."""
    tokens = tokens_of(request.content_id, 0, request.output_tokens)
    first = first_wrong(request.content_id, request.output_tokens) if flipped else -1
    if wrong or first >= 0:
        first = 0 if wrong else first
        tokens[first:] = [WRONG] * (len(tokens) - first)
    answered = CrossCheckAnswered(tokens=tuple(tokens), took_us=ns // 1000)
    found: dict[str, Any] = to_builtins(answered)
    return found
