"""Calls of the watches to engines about one running attempt (`relume.events.wire.worker_calls`)."""

from __future__ import annotations

import aiohttp
import msgspec

from relume.events.wire.worker_calls import Handover, Retarget
from relume.policies.state.fleet import Fleet

TIMEOUT_S = 2.0
LOST = (aiohttp.ClientError, TimeoutError, OSError)
"""What a call raises when it got no answer."""


def session() -> aiohttp.ClientSession:
    """For the calls of one watch."""
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S))


async def ask(
    session: aiohttp.ClientSession, fleet: Fleet, worker: str, path: str, call: Handover | Retarget
) -> str:
    """POST `call` to the engine of `worker`. Returns empty if it complied, else why not. Raises
    what `LOST` names."""
    at = fleet.workers.get(worker)
    if at is None or at.incarnation != call.incarnation:
        return "its engine is gone"
    url = f"http://{at.host}:{at.port}{path}"
    async with session.post(url, json=msgspec.to_builtins(call)) as answer:
        return "" if answer.status == 200 else f"answered {answer.status}"
