"""Hands over a running request that will continue elsewhere.

`POST /relume/handover {request, attempt, incarnation}`: the engine core stops the attempt
between two steps, with the blocks its holders have left where they are; what it made until
then leaves in the stream, which ends with `:x moved`. When that frame is out nothing of the
attempt is computed any more, so the next one may begin (I4).

404: the attempt is not here, or has ended by itself; its stream ends as it would have.
"""

from __future__ import annotations

import weakref
from typing import Any

from relume.engine_shim.generation import Generation
from relume.events.wire.errors import CallError
from relume.events.wire.worker_calls import Handover, decode


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
    """(status, JSON) of a call with `body`; `hand_over(request, attempt)` returns whether the
    attempt was here."""
    try:
        call = decode(body, Handover)
    except CallError as malformed:
        return 400, _error(400, str(malformed))
    if call.incarnation != incarnation:
        return 409, {**_error(409, "stale incarnation"), "incarnation": incarnation}
    if not await hand_over(call.request, call.attempt):
        return 404, _error(404, "not here, or at its end")
    return 200, {"request": call.request, "attempt": call.attempt}


def _error(status: int, message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "relume", "code": status, "param": None}}
