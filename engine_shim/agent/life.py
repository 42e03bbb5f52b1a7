"""The agent's life: what comes up in which order, and how it leaves.

    kill an orphan engine -> take the stream (WorkerRegistered) -> catch up on effects
    -> supervise, take reports, follow effects, keep the state daemon, answer GET /state
    -> drain: WorkerLeaving, requests leave the engine
    -> leave: stop the engine (EngineDied: stopped) and the daemon, WorkerDeregistered, flush

Reports, supervision and effects continue while etcd is unavailable; only taking ownership of the
stream at the start waits for it. Fenced, the agent kills its engine and stops: another one answers
for the worker now. If etcd lost the log, the engine continues to serve, and the agent waits for a new
log, takes its stream there and states again what runs (`log_change`). A killed agent leaves its state
daemon running for its successor; one that leaves or is fenced ends it.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Any, TypeVar

from relume.engine_shim.agent.agent_config import AgentConfig
from relume.engine_shim.agent.agent_errors import WorkerFenced, WorkerOwned
from relume.engine_shim.agent.agent_logging import Logger
from relume.engine_shim.agent.effects import EffectReader, EffectRunner
from relume.engine_shim.agent.engine_process import ipc_directory
from relume.engine_shim.agent.engine_process.drain import drained
from relume.engine_shim.agent.engine_process.engine_hosts import EngineHost
from relume.engine_shim.agent.engine_process.orphan_engine import kill_orphan
from relume.engine_shim.agent.engine_process.supervisor import Supervisor
from relume.engine_shim.agent.host_daemon.checkpoint_options import checkpoints_of
from relume.engine_shim.agent.host_daemon.coverage_events import StateDaemonKeeper
from relume.engine_shim.agent.host_daemon.daemon_process import DaemonProcess, end_unwanted
from relume.engine_shim.agent.journal import FLUSH_TIMEOUT_S, Journal
from relume.engine_shim.agent.notice_server import NoticeBoard
from relume.engine_shim.agent.report_server import ReportServer
from relume.engine_shim.agent.run_directory import RunDirectory
from relume.engine_shim.agent.status_page import StatusServer, notice
from relume.engine_shim.agent.stream_ownership.log_change import LogChange
from relume.engine_shim.agent.stream_ownership.takeover import FreeStream
from relume.events.log.errors import LogUnavailable, StreamOwned
from relume.events.log.interface import StreamWriter
from relume.events.systemd import keep_informed
from relume.events.vocabulary import (
    EngineDied,
    StateDaemonLost,
    WorkerDeregistered,
    WorkerLeaving,
    WorkerRegistered,
)

OWNED_POLL_S = 0.25
UNAVAILABLE_POLL_S = 0.5
TELL_EVERY_S = 5.0
SAVE_AGAIN_S = 1.0

MakeWriter = Callable[[str], AbstractAsyncContextManager[StreamWriter]]
T = TypeVar("T")


class Agent:
    """One worker's agent on one log. `run` returns once it has left; `stop` requests that.

    `make_writer(stream)` gives a writer to enter; `free_stream(stream, epoch)` removes
    the ownership a dead predecessor left.
    """

    def __init__(
        self,
        config: AgentConfig,
        directory: RunDirectory,
        make_writer: MakeWriter,
        free_stream: FreeStream,
        reader: EffectReader,
        host: EngineHost,
        logger: Logger,
    ) -> None:
        self._config = config
        self._directory = directory
        self._make_writer = make_writer
        self._free_stream = free_stream
        self._reader = reader
        self._host = host
        self._logger = logger
        self._draining = asyncio.Event()
        self._stopping = asyncio.Event()
        self._journal: Journal | None = None
        self._reports: ReportServer | None = None
        self._board: NoticeBoard | None = None
        self._supervisor: Supervisor | None = None
        self._daemon: StateDaemonKeeper | None = None
        self._writers = AsyncExitStack()
        """Has the writer of the stream."""
        self._addresses = "", ""
        """URL of the status page, and address of the notices."""

    @property
    def is_leaving(self) -> bool:
        """Whether a stop was requested."""
        return self._draining.is_set()

    def stop(self, reason: str) -> None:
        """Leave when the requests have left the engine, or the time for that is over. On a second
        request, do not wait for them, nor for the engine to end."""
        again = self.is_leaving
        self._logger.info("stop requested", reason=reason, again=again)
        self._draining.set()
        if self._supervisor is None or not self._config.drain_s:
            self._stopping.set()
        if again:
            self._stopping.set()
            if self._supervisor is not None:
                self._supervisor.kill_now()

    async def run(self) -> None:
        """Raises WorkerFenced, WorkerOwned, and what a broken log raises."""
        died = await kill_orphan(self._directory, self._config.worker, self._logger)
        ipc_directory.remove(self._directory.path)
        async with AsyncExitStack() as stack:
            status = StatusServer(self._config.status_port, self.describe, self._not_ready)
            await stack.enter_async_context(status)
            notices = asyncio.create_task(keep_informed(self._notice))
            stack.callback(notices.cancel)
            await stack.enter_async_context(self._writers)
            writer = await self._unless_stopped(self._take_stream(self._writers))
            if writer is None:
                await self._end_recorded_daemon()
                return
            journal = self._journal = Journal(writer, self._logger)
            board = await stack.enter_async_context(self._make_board(journal))
            self._addresses = status.url, board.address
            self._register(journal, died)
            reports = ReportServer(self._directory.socket_path, journal, self._logger)
            self._reports = await stack.enter_async_context(reports)
            await self._serve(journal, reports, board)

    async def _take_stream(self, stack: AsyncExitStack) -> StreamWriter:
        """Own the worker's stream; waits for etcd, and for a dead owner's lease to lapse."""
        stream = f"w.{self._config.worker}"
        began = logged = time.monotonic()
        bound_s = 2 * self._config.lease_ttl_s + 10
        while True:
            try:
                epoch = self._directory.state.epoch
                if epoch and await self._free_stream(stream, epoch):
                    self._logger.info("freed the stream of the dead agent", epoch=epoch)
                log_id = await self._reader.identity()
                writer = await stack.enter_async_context(self._make_writer(stream))
                self._directory.remember_log(log_id)
                return writer
            except StreamOwned as owned:
                waited_s, pause_s, why = time.monotonic() - began, OWNED_POLL_S, str(owned)
                if waited_s > bound_s:
                    raise WorkerOwned(stream, owned.owner, waited_s) from None
            except LogUnavailable as away:
                began, pause_s, why = time.monotonic(), UNAVAILABLE_POLL_S, str(away)
            if time.monotonic() - logged > TELL_EVERY_S or logged == began:
                logged = time.monotonic()
                self._logger.warning("waiting for the worker's stream", stream=stream, why=why)
            await asyncio.sleep(pause_s)

    def _make_board(self, journal: Journal) -> NoticeBoard:
        config = self._config
        board = self._board = NoticeBoard(
            config.worker,
            config.engine_host,
            config.notice_port,
            config.advertise_host,
            lambda: journal.epoch,
            self._logger,
        )
        return board

    def _register(self, journal: Journal, died: EngineDied | None) -> None:
        self._directory.remember_epoch(journal.epoch)
        journal.on_epoch(self._directory.remember_epoch)
        self._say_registered(journal)
        if died is not None:
            journal.record(died)
        self._directory.remember_engine(None)

    def _say_registered(self, journal: Journal) -> None:
        config, (url, notices) = self._config, self._addresses
        self._logger.info("owns the stream", stream=journal.stream, epoch=journal.epoch, url=url)
        journal.record(
            WorkerRegistered(
                worker=config.worker,
                domain=config.domain,
                agent_pid=os.getpid(),
                agent_url=url,
                notices=notices,
            )
        )

    async def _serve(self, journal: Journal, reports: ReportServer, board: NoticeBoard) -> None:
        config = self._config
        supervisor = self._supervisor = Supervisor(
            config,
            self._directory,
            self._host,
            journal,
            reports,
            board,
            self._logger,
        )
        effects = EffectRunner(
            config.worker,
            self._reader,
            self._directory,
            journal,
            supervisor,
            self._logger,
            self._released,
            self._voided,
        )
        self._daemon = self._make_daemon(journal)
        if self._daemon is None and (boot := end_unwanted(self._directory, self._logger)):
            journal.record(StateDaemonLost(config.worker, boot, "not wanted any more"))
        try:
            await self._unless_stopped(self._work(supervisor, effects, journal))
            await supervisor.leave(config.stop_timeout_s)
            if self._daemon is not None:
                await self._daemon.leave("stopped")
        finally:
            await supervisor.abandon()
            if self._daemon is not None and journal.is_fenced:
                await self._daemon.leave("fenced")
        journal.record(WorkerDeregistered(config.worker, "agent stopped"))
        if not await journal.flush(FLUSH_TIMEOUT_S):
            self._logger.warning("left before etcd took everything", **journal.describe())

    def _make_daemon(self, journal: Journal) -> StateDaemonKeeper | None:
        checkpoints = checkpoints_of(self._config)
        if checkpoints is None:
            return None
        process = DaemonProcess(checkpoints, self._directory, self._logger)
        return StateDaemonKeeper(self._config, checkpoints, process, journal, self._logger)

    async def _end_recorded_daemon(self) -> None:
        """Stop before it owned the stream: a predecessor's daemon stops too."""
        if (checkpoints := checkpoints_of(self._config)) is not None:
            process = DaemonProcess(checkpoints, self._directory, self._logger)
            if (found := process.recorded()) is not None:
                await process.end(found)

    def _released(self, requests: tuple[str, ...]) -> None:
        if self._daemon is not None:
            self._daemon.release(requests)

    def _voided(self, attempts: tuple[tuple[str, int], ...]) -> None:
        if self._daemon is not None:
            self._daemon.void(attempts)

    async def _work(self, supervisor: Supervisor, effects: EffectRunner, journal: Journal) -> None:
        """All there is to do until the agent leaves; ends only by cancellation or error."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._drain(supervisor, journal))
            tasks.create_task(self._follow_log(journal, supervisor, effects))
            tasks.create_task(self._keep_saved())
            if self._daemon is not None:
                tasks.create_task(self._daemon.run())
            await effects.catch_up()
            tasks.create_task(effects.run())
            tasks.create_task(supervisor.run())

    async def _drain(self, supervisor: Supervisor, journal: Journal) -> None:
        """Once a stop is requested, have the requests leave, and then stop."""
        await self._draining.wait()
        if await supervisor.unfinished() is not None:
            within_s = self._config.drain_s
            journal.record(WorkerLeaving(self._config.worker, round(within_s * 1000)))
            await drained(supervisor, within_s, self._logger)
        self._stopping.set()

    async def _follow_log(
        self, journal: Journal, supervisor: Supervisor, effects: EffectRunner
    ) -> None:
        """Stay in the log that etcd holds: from each to the next, until another agent has the
        stream. Raises WorkerFenced, WorkerOwned, LogNotFollowed."""
        change = LogChange(self._reader, self._directory, self._logger)
        while True:
            await change.log_ended(journal)
            if journal.is_fenced and not journal.is_replaced:
                raise WorkerFenced(journal.stream, journal.epoch)
            journal.suspend()
            await change.new_log()
            await self._writers.aclose()
            writer = await self._take_stream(self._writers)
            journal.continue_in(writer)
            effects.begin_anew()
            self._say_registered(journal)
            supervisor.state_again()

    async def _keep_saved(self) -> None:
        """Write the state file when there is room again, for ever."""
        directory, logged = self._directory, False
        while True:
            await asyncio.sleep(SAVE_AGAIN_S)
            if directory.save():
                if logged:
                    self._logger.info("the state file is up to date again")
                logged = False
            elif not logged:
                remedy = f"make room on the disk of {directory.path}"
                self._logger.error("no room for state", why=directory.unsaved, remedy=remedy)
                logged = True

    async def _unless_stopped(self, work: Coroutine[Any, Any, T]) -> T | None:
        """The result of `work`; None if a stop was requested before it ended."""
        task = asyncio.create_task(work)
        stopped = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopped.cancel()
            if not task.done():
                task.cancel()
                await asyncio.wait({task})
        return None if task.cancelled() else task.result()

    def _not_ready(self) -> str:
        """Why the worker may not serve; empty if it may."""
        if self.is_leaving:
            return "its agent stops"
        if self._supervisor is None:
            return "its agent waits for the worker's stream in the log"
        return self._supervisor.not_ready()

    def _notice(self) -> str:
        return notice(self._not_ready(), self.is_leaving)

    def describe(self) -> dict[str, Any]:
        """The answer of GET /state."""
        return {
            "worker": self._config.worker,
            "domain": self._config.domain,
            "model": self._config.served_model_name or self._config.model,
            "host_kind": self._config.host_kind,
            "pid": os.getpid(),
            "stopping": self.is_leaving,
            "run_dir": str(self._directory.path),
            "unsaved": self._directory.unsaved,
            "engine": self._supervisor.describe() if self._supervisor is not None else None,
            "log": self._journal.describe() if self._journal is not None else None,
            "gateways_listening": self._board.listeners if self._board is not None else 0,
            "reports": self._reports.describe() if self._reports is not None else None,
            "state_daemon": self._daemon.describe() if self._daemon is not None else None,
        }
