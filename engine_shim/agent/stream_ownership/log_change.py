"""From one log to the next: an agent notices that etcd does not hold its log any more.

An agent with something to write learns it from its writer (`LogReplaced`). An idle one compares the id
of the log periodically. Until a new log begins, the agent waits and its engine serves, as in an outage:
replicas that survive continue their streams. A new log is one with another id, or an empty etcd.
"""

from __future__ import annotations

import asyncio
import time

from relume.engine_shim.agent.agent_errors import LogNotFollowed
from relume.engine_shim.agent.agent_logging import Logger
from relume.engine_shim.agent.effects import EffectReader
from relume.engine_shim.agent.journal import Journal
from relume.engine_shim.agent.run_directory import RunDirectory
from relume.events.log.errors import LogError, LogUnavailable

ID_POLL_S = 10.0
"""Period in which an agent compares the id of the log."""
FIRST_POLL_S = 0.5
"""The same while the log has no id: its first leader names it."""
WAIT_POLL_S = 0.5
SAY_S = 30.0
REMEDY = "relume doctor says what etcd holds; relume log begin begins a new log"


class LogChange:
    """Which log etcd holds, compared with the one of the run directory."""

    def __init__(self, reader: EffectReader, directory: RunDirectory, logger: Logger) -> None:
        self._reader = reader
        self._directory = directory
        self._logger = logger

    async def log_ended(self, journal: Journal) -> None:
        """Return when the stream is not ours any more, or when etcd holds another log."""
        fenced = asyncio.ensure_future(journal.fenced())
        try:
            while not fenced.done() and not await self._is_another():
                pause_s = ID_POLL_S if self._directory.state.log else FIRST_POLL_S
                await asyncio.wait({fenced}, timeout=pause_s)
        finally:
            fenced.cancel()

    async def _is_another(self) -> bool:
        """Whether the log has another id; notes the first one seen."""
        known = self._directory.state.log
        try:
            found = await self._reader.identity()
        except LogError:
            return False  # the writer says what is wrong, and tries again
        if found and not known:
            self._directory.remember_log(found)
        return bool(found and known) and found != known

    async def new_log(self) -> None:
        """Return when etcd holds a log that begins after ours. Raises LogNotFollowed."""
        logged_at = float("-inf")
        while True:
            try:
                found = await self._reader.identity()
                if found != self._directory.state.log if found else await self._reader.is_empty():
                    self._logger.info("a new log began", log=found or "not named yet")
                    self._directory.remember_log(found)
                    return
            except LogUnavailable as away:
                self._logger.info("etcd does not answer", why=str(away))
            except LogError as error:
                raise LogNotFollowed(self._directory.state.log, str(error)) from None
            if time.monotonic() - logged_at > SAY_S:
                logged_at = time.monotonic()
                log_id = self._directory.state.log
                self._logger.error(
                    "etcd lost the log; the engine serves on", log=log_id, remedy=REMEDY
                )
            await asyncio.sleep(WAIT_POLL_S)
