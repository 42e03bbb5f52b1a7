"""Calls of the watches to engines (`relume.events.wire.worker_calls`)."""

from __future__ import annotations

import aiohttp
import msgspec

from relume.events.decode_errors import UNREADABLE
from relume.events.wire.worker_calls import Handover, Retarget
from relume.policies.state.fleet import Fleet, Worker

TIMEOUT_S = 2.0
LOST = (aiohttp.ClientError, TimeoutError, OSError)
"""What a call raises when it got no answer."""
UNUSABLE = (*LOST, *UNREADABLE)
"""The same of a call whose answer is decoded: also if it cannot be."""


def url_of(worker: Worker, path: str) -> str:
    """Where the engine of `worker` serves `path`."""
    return f"http://{worker.host}:{worker.port}{path}"


def session() -> aiohttp.ClientSession:
    """For the calls of one watch."""
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S))


async def ask(
    session: aiohttp.ClientSession, fleet: Fleet, worker: str, path: str, call: Handover | Retarget
) -> str:
    """POST `call`, about one running attempt, to the engine of `worker`. Returns empty if it complied,
    else why not. Raises what `LOST` names."""
    at = fleet.workers.get(worker)
    if at is None or at.incarnation != call.incarnation:
        return "its engine is gone"
    async with session.post(url_of(at, path), json=msgspec.to_builtins(call)) as answer:
        return "" if answer.status == 200 else f"answered {answer.status}"
