"""Reports what the host's state daemon holds to the log, and ends of requests to the daemon.

    found or started -> ask for all it holds -> StateDaemonStarted + acknowledgements
          -> five times a second: positions, evictions, ends; periodically its statistics
          -> dead (or it stops answering, and is killed) -> StateDaemonLost
          -> wait the backoff -> again

The daemon keeps running while the agent is away; the log then lags behind it until the
next agent asks. What the daemon dropped meanwhile is not reported by name, so a new registration
voids earlier reports.
"""

from __future__ import annotations

import asyncio
from typing import Any

from relume.engine_shim.agent.agent_config import AgentConfig
from relume.engine_shim.agent.agent_logging import Logger
from relume.engine_shim.agent.engine_process.process_identity import ProcessId
from relume.engine_shim.agent.engine_process.supervisor import Backoff
from relume.engine_shim.agent.host_daemon.checkpoint_options import Checkpoints
from relume.engine_shim.agent.host_daemon.daemon_process import DaemonProcess
from relume.engine_shim.agent.journal import Journal
from relume.engine_shim.checkpoints.daemon.coverage_changes import CoverageReports, together
from relume.engine_shim.checkpoints.link.channel import LocalChannel
from relume.engine_shim.checkpoints.link.peer import Peer
from relume.events.vocabulary import StateDaemonLost, StateDaemonReported, StateDaemonStarted
from relume.events.wire.kv import kv_messages as m
from relume.events.wire.kv.kv_errors import KvStreamError

POLL_S = 0.2
REPORT_EVERY = 50
"""Polls between two reports of statistics, if they changed."""

START_S = 20.0
ANSWER_S = 5.0
SILENCES = 3
"""Number of unanswered polls after which the daemon is killed."""

LAST_ATTEMPT = (1 << 31) - 1
MAX_RELEASES = 4096
_STAGING_BYTES = 1 << 16


class _DaemonSilent(Exception):
    """The daemon does not answer."""


class StateDaemonKeeper:
    """Keeps one daemon running and records its events. `run` until cancelled, then `leave`."""

    def __init__(
        self,
        config: AgentConfig,
        checkpoints: Checkpoints,
        process: DaemonProcess,
        journal: Journal,
        logger: Logger,
    ) -> None:
        self._worker = config.worker
        self._checkpoints = checkpoints
        self._process = process
        self._journal = journal
        self._logger = logger
        self._backoff = Backoff((0.1, *config.backoff_s[1:]), config.stable_after_s)
        self._released: dict[str, None] = {}
        self._voided: dict[str, int] = {}
        self._anew = self._can_void = False
        self._id: ProcessId | None = None
        self._boot = ""
        self._figures: dict[str, int] = {}
        self.restarts = 0
        journal.on_epoch(lambda _: self.renew())

    def release(self, requests: tuple[str, ...]) -> None:
        """They ended: the daemon drops what it holds of them, soon."""
        self._released.update(dict.fromkeys(requests))
        while len(self._released) > MAX_RELEASES:
            del self._released[next(iter(self._released))]

    def void(self, attempts: tuple[tuple[str, int], ...]) -> None:
        """What these attempts and earlier ones wrote is wrong: the daemon drops it, soon."""
        for request, attempt in attempts:
            self._voided[request] = max(attempt, self._voided.pop(request, 0))
        while len(self._voided) > MAX_RELEASES:
            del self._voided[next(iter(self._voided))]

    def renew(self) -> None:
        """The stream changed hands in between: say everything again."""
        self._anew = True

    async def run(self) -> None:
        """One life of a daemon after another, for ever."""
        self._id = self._process.recorded()
        if killed := await self._process.clear(self._id):
            self._logger.warning("state daemons of no known life killed", pids=killed)
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            served = await self._live()
            delay_s = self._backoff.after(loop.time() - began if served else 0.0)
            self.restarts += 1
            self._logger.warning("state daemon restarts", delay_s=delay_s)
            await asyncio.sleep(delay_s)

    async def _live(self) -> bool:
        """One life, until it is dead; whether it ever served."""
        if self._id is None:
            try:
                self._id = self._process.start(self._journal.epoch)
            except OSError as error:
                self._logger.error("state daemon could not be started", why=str(error))
                return False
        process = self._id
        ended = asyncio.create_task(self._process.ended(process))
        reported = asyncio.create_task(self._tell())
        try:
            await asyncio.wait({ended, reported}, return_when=asyncio.FIRST_COMPLETED)
            if reported.done() and not ended.done():
                reported.result()
                self._logger.error("state daemon does not answer; killing it", pid=process.pid)
                await self._process.end(process)
            reason = await ended
        finally:
            for task in (ended, reported):
                task.cancel()
            await asyncio.gather(ended, reported, return_exceptions=True)
        self._id = None
        served = bool(self._boot)
        self._lost(reason)
        self._logger.warning("state daemon died", reason=reason, said=self._process.last_words())
        return served

    def _lost(self, reason: str) -> None:
        if self._boot:
            self._journal.record(StateDaemonLost(self._worker, self._boot, reason))
        self._boot, self._figures = "", {}

    # --- speaking with it ----------------------------------------------------------------

    async def _tell(self) -> None:
        """Returns when it is silent for too long."""
        hello = m.Hello(
            version=m.VERSION,
            worker=self._worker,
            epoch=self._journal.epoch,
            incarnation=0,
            role="control",
            nonce=b"",
            fingerprint=None,
        )
        path = self._checkpoints.socket
        peer = Peer(path, lambda wake: LocalChannel(path, wake, _STAGING_BYTES), hello)
        try:
            await self._converse(peer)
        except _DaemonSilent:
            return
        finally:
            await asyncio.to_thread(peer.close)

    async def _converse(self, peer: Peer) -> None:
        """Raises _Silent."""
        reports = CoverageReports(self._worker)
        polls = silences = 0
        wait_s = START_S
        while True:
            try:
                if not self._boot or self._anew:
                    reports = CoverageReports(self._worker)
                    await self._introduce(peer, reports, wait_s)
                else:
                    await self._drop_released(peer)
                    await self._drop_voided(peer)
                    await self._changes(peer, reports)
                    if polls % REPORT_EVERY == 0:
                        await self._report(peer)
                    polls += 1
                silences, wait_s = 0, ANSWER_S
            except KvStreamError as error:
                silences += 1
                self._logger.warning("state daemon does not answer", why=str(error))
                if silences >= SILENCES:
                    raise _DaemonSilent from None
            await asyncio.sleep(POLL_S)

    async def _ask(self, peer: Peer, message: Any, wait_s: float = ANSWER_S) -> Any:
        answer, _ = await asyncio.to_thread(peer.ask, message, wait_s)
        return answer

    async def _introduce(self, peer: Peer, reports: CoverageReports, wait_s: float) -> None:
        """Registration and all that it holds, in one transaction."""
        stats = await self._ask(peer, m.StatsAsk(0), wait_s)
        held: list[Any] = []
        more = True
        while more:
            changed = await self._ask(peer, m.Changes(0, reports.cursor))
            held += together(reports.take(changed))
            more = changed.more
        started = StateDaemonStarted(
            worker=self._worker,
            boot=stats.boot,
            epoch=peer.daemon_epoch,
            address=self._checkpoints.address,
            budget_bytes=stats.figures["memory_budget"],
            local=self._checkpoints.local,
            machine=self._checkpoints.machine,
            file_bytes=stats.figures.get("file_budget", 0),
        )
        self._anew = False
        self._can_void = "voided" in stats.figures
        self._journal.record(started, *held)
        self._logger.info("state daemon serves", boot=stats.boot, adopted=len(held))
        self._boot = stats.boot
        self._process.named(stats.boot)

    async def _changes(self, peer: Peer, reports: CoverageReports) -> None:
        more = True
        while more:
            changed = await self._ask(peer, m.Changes(0, reports.cursor))
            self._journal.record(*together(reports.take(changed)))
            more = changed.more

    async def _drop_released(self, peer: Peer) -> None:
        while self._released:
            names = tuple(self._released)[: m.MAX_REQUESTS]
            await self._ask(peer, m.Drop(0, names, LAST_ATTEMPT))
            for name in names:
                self._released.pop(name, None)

    async def _drop_voided(self, peer: Peer) -> None:
        """A daemon older than `Void`, which does not count what it voids, would close the
        connection. It drops them instead, and keeps what later attempts wrote meanwhile."""
        while self._voided:
            attempts = tuple(self._voided.items())[: m.MAX_REQUESTS]
            if self._can_void:
                await self._ask(peer, m.Void(0, attempts))
            else:
                for last in sorted({number for _, number in attempts}):
                    names = tuple(name for name, number in attempts if number == last)
                    await self._ask(peer, m.Drop(0, names, last))
            for request, attempt in attempts:
                if self._voided.get(request) == attempt:
                    del self._voided[request]

    async def _report(self, peer: Peer) -> None:
        figures = (await self._ask(peer, m.StatsAsk(0))).figures
        if figures != self._figures:
            self._figures = figures
            reported = tuple(figures.items())
            self._journal.record(StateDaemonReported(self._worker, self._boot, reported))

    # --- leaving -------------------------------------------------------------------------

    async def leave(self, reason: str) -> None:
        """End it: the worker leaves for good. To be called once `run` was cancelled."""
        process, self._id = self._id, None
        if process is not None:
            await self._process.end(process)
        self._lost(reason)

    def describe(self) -> dict[str, Any]:
        """For the status endpoint."""
        return {
            "pid": self._id.pid if self._id is not None else 0,
            "boot": self._boot,
            "restarts": self.restarts,
            "local": self._checkpoints.local,
            "address": self._checkpoints.address,
            "figures": self._figures,
        }
