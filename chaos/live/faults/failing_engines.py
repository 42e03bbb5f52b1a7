"""Engines that answer requests with 500, by a failpoint of their servers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack

from relume.chaos.live.failpoint_server import FailpointError, FailpointServer
from relume.events.failpoints.points import Action, Failpoint

PERIOD_S = 0.2


class FailingEngines:
    """While it runs, each of these workers' engines fails all its requests for a `share` of each
    period."""

    def __init__(self, failpoints: FailpointServer, workers: Sequence[str], share: float) -> None:
        self._failpoints = failpoints
        self._workers = workers
        self._share = share
        self._task: asyncio.Task[None] | None = None

    async def begin(self) -> None:
        """Returns once they fail. Raises FailpointError, also if one has no failpoints."""
        wanted = {f"engine {worker}" for worker in self._workers}
        if missing := wanted - self._failpoints.processes:
            raise FailpointError(f"no failpoints in {', '.join(sorted(missing))}")
        begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._run(begun))
        await asyncio.wait({self._task, begun}, return_when=asyncio.FIRST_COMPLETED)
        if not begun.done():
            self._task.result()

    async def end(self) -> None:
        """They serve again."""
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self, begun: asyncio.Future[None]) -> None:
        while True:
            async with AsyncExitStack() as stack:
                for worker in self._workers:
                    rule = self._failpoints.armed(
                        Failpoint.ENGINE_REQUEST, Action.FAIL, process=f"engine {worker}", times=0
                    )
                    await stack.enter_async_context(rule)
                if not begun.done():
                    begun.set_result(None)
                await asyncio.sleep(PERIOD_S * self._share)
                if self._share >= 1:
                    await asyncio.Event().wait()
            await asyncio.sleep(PERIOD_S * (1 - self._share))
