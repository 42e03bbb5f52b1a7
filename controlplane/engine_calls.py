"""What watches ask of engines: `POST /relume/<call>` about one running attempt."""

from __future__ import annotations

from typing import Any

import aiohttp

from relume.policies.state import Fleet

TIMEOUT_S = 2.0
LOST = (aiohttp.ClientError, TimeoutError, OSError)
"""What a call raises when it got no answer."""


def session() -> aiohttp.ClientSession:
    """For the calls of one watch."""
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S))


async def ask(
    session: aiohttp.ClientSession, fleet: Fleet, call: str, about: Any, **more: Any
) -> str:
    """Ask the engine of `about` (request, attempt, worker, incarnation), with `more` in the
    body. Empty when it did as asked, else why not. Raises what `LOST` names."""
    worker = fleet.workers.get(about.worker)
    if worker is None or worker.incarnation != about.incarnation:
        return "its engine is gone"
    body = {
        "request": about.request,
        "attempt": about.attempt,
        "incarnation": about.incarnation,
        **more,
    }
    url = f"http://{worker.host}:{worker.port}/relume/{call}"
    async with session.post(url, json=body) as answer:
        return "" if answer.status == 200 else f"answered {answer.status}"
