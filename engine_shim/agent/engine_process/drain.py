"""An agent that is asked to stop: its requests leave the engine first.

The agent writes `WorkerLeaving`. Replicas send no more requests there, and move or end those that
run. When the engine has had none for a while, or the time is over, the agent stops it.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from relume.engine_shim.agent.agent_logging import Logger

LOOK_S = 0.1
QUIET_S = 0.5
"""Time for which the engine is without requests first: a replica may not know yet that the worker
leaves, and the next attempt of a request may be on its way."""
UNKNOWN = -1
"""Number of requests of an engine that does not answer."""


class DrainedEngine(Protocol):
    """The engine as its agent sees it, whichever it is now."""

    async def unfinished(self) -> int | None:
        """Number of requests that it has; `UNKNOWN` if it does not answer, None if none serves."""
        ...


async def drained(engine: DrainedEngine, within_s: float, logger: Logger) -> bool:
    """Wait until the requests have left, for `within_s` at most. Returns whether they have."""
    loop = asyncio.get_running_loop()
    begun = busy_at = loop.time()
    while (count := await engine.unfinished()) is not None:
        now = loop.time()
        if count:
            busy_at = now
        if now - busy_at >= QUIET_S:
            break
        if now - begun >= within_s:
            logger.warning("requests run although the time to drain is over", requests=count)
            return False
        await asyncio.sleep(LOOK_S)
    logger.info("drained", seconds=round(loop.time() - begun, 3))
    return True
