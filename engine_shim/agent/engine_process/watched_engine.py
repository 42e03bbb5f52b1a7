"""A real engine as `hang_watch` sees it: the page on which it counts its steps, its HTTP server, and
what /proc says of its threads."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from relume.engine_shim.agent.agent_config import is_unspecified
from relume.engine_shim.agent.engine_process import stack_dump
from relume.engine_shim.agent.engine_process.child import EngineProcesses
from relume.engine_shim.agent.engine_process.process_identity import stat_of
from relume.engine_shim.agent.run_directory import RunDirectory
from relume.engine_shim.engine.cpu_clocks import ThreadClock
from relume.engine_shim.engine.progress import Progress
from relume.events.vocabulary.enums import DeathReason
from relume.events.wire.worker_calls import PROBE_PATH


class ServingEngine:
    """See `WatchedEngine`. It listens on `host:port`."""

    def __init__(
        self,
        engine: EngineProcesses,
        incarnation: int,
        host: str,
        port: int,
        directory: RunDirectory,
    ) -> None:
        self._engine = engine
        self._incarnation = incarnation
        self._host = "127.0.0.1" if is_unspecified(host) else host
        self._port = port
        self._directory = directory
        self._page = Progress(str(directory.progress))
        self._front = ThreadClock()

    def read(self) -> dict[str, int]:
        """See WatchedEngine."""
        state, leader = self._page.read(), self._engine.leader.pid
        state["front_us"] = 0
        with suppress(OSError, ValueError, IndexError):
            state["front_us"] = self._front.own(leader, leader)[1]
        return state

    async def turned(self, timeout_s: float) -> bool:
        """See WatchedEngine."""
        place = f"{self._host}:{self._port}"
        request = f"GET {PROBE_PATH} HTTP/1.1\r\nHost: {place}\r\nConnection: close\r\n\r\n"
        try:
            async with asyncio.timeout(timeout_s):
                reader, writer = await asyncio.open_connection(self._host, self._port)
                try:
                    writer.write(request.encode())
                    return (await reader.readline()).startswith(b"HTTP/")
                finally:
                    writer.close()
        except (OSError, TimeoutError):
            return False

    def process_state(self) -> str:
        """See WatchedEngine: that of the first of its processes that is stopped, or of its first."""
        stats = [stat_of(process.pid) for process in (self._engine.leader, *self._engine.members)]
        states = [stat.state for stat in stats if stat is not None]
        return next((s for s in states if s in stack_dump.STOPPED), "".join(states[:1]))

    async def dump(self) -> str:
        """See WatchedEngine."""
        return await stack_dump.dump(self._engine, self._directory, self._incarnation)

    def condemn(self, reason: DeathReason, detail: str) -> None:
        """See WatchedEngine."""
        self._engine.condemn(reason, detail)
