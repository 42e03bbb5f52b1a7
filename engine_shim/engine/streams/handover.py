"""Hands over a running request that will continue elsewhere.

`POST /relume/handover {request, attempt, incarnation, unbegun}`: the engine core stops the attempt
between two steps, with the blocks its holders have left where they are; what it made until
then leaves in the stream, which ends with `:x moved`. When that frame is out nothing of the
attempt is computed any more, so the next one may begin (I4).

404: the attempt is not here, or has ended by itself; its stream ends as it would have. 409: it has
generated a token, and was to be handed over only before its first one.
"""

from __future__ import annotations

import weakref
from enum import StrEnum
from typing import Any

from relume.engine_shim.generation import Generation
from relume.events.wire.errors import CallError
from relume.events.wire.worker_calls import Handover, decode


class Refusal(StrEnum):
    """Why an attempt is not handed over."""

    NONE = ""
    GONE = "not here, or at its end"
    BEGUN = "it has generated a token"


class HandedOver(RuntimeError):
    """What ends the stream of an attempt that was given up."""

    def __init__(self) -> None:
        super().__init__("handed over to another engine")


_running: weakref.WeakSet[Generation] = weakref.WeakSet()


def note_running(generation: Generation, engine_id: str) -> None:
    """The engine is given a request of `generation`, which it calls `engine_id`."""
    _running.add(generation)
    generation.engine_ids.append(engine_id)


def given_up(request: str, attempt: int) -> list[str]:
    """What the engine calls the requests of an attempt that is handed over; marks it so."""
    found = [g for g in _running if (g.request, g.attempt) == (request, attempt)]
    for generation in found:
        generation.moving = True
    return [engine_id for generation in found for engine_id in generation.engine_ids]


async def answer(body: bytes, incarnation: int, hand_over: Any) -> tuple[int, dict[str, Any]]:
    """(status, JSON) of a call with `body`; `hand_over(request, attempt, unbegun)` returns the
    `Refusal`."""
    try:
        call = decode(body, Handover)
    except CallError as malformed:
        return 400, _error(400, str(malformed))
    if call.incarnation != incarnation:
        return 409, {**_error(409, "stale incarnation"), "incarnation": incarnation}
    if refusal := await hand_over(call.request, call.attempt, call.unbegun):
        status = 404 if refusal == Refusal.GONE else 409
        return status, _error(status, refusal)
    return 200, {"request": call.request, "attempt": call.attempt}


def _error(status: int, message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "relume", "code": status, "param": None}}
