"""Supervision: one engine after another; each death is detected, reported and followed by a
restart.

A life of an engine:

    held? -> count the incarnation (durable) -> start -> EngineStarted
          -> its ready frame: EngineReady  (or the ready timeout condemns it)
          -> a process ends, or an effect or its hang condemns it
          -> kill the rest, take its last reports, EngineDied
          -> EngineRestartScheduled -> wait the backoff -> again

Nothing here waits for etcd: facts go to the journal, which spools.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from relume.engine_shim.agent.agent_config import AgentConfig
from relume.engine_shim.agent.agent_errors import HostRefused
from relume.engine_shim.agent.agent_logging import Logger
from relume.engine_shim.agent.canaries.canary_watch import CanaryWatch
from relume.engine_shim.agent.canaries.model_files import LocalModelFiles, ModelFiles
from relume.engine_shim.agent.canaries.weights_watch import WeightsWatch
from relume.engine_shim.agent.engine_process import ipc_directory, stack_dump
from relume.engine_shim.agent.engine_process.child import EngineProcesses
from relume.engine_shim.agent.engine_process.drain import UNKNOWN
from relume.engine_shim.agent.engine_process.engine_hosts import EngineHost, EngineOrder, make_order
from relume.engine_shim.agent.engine_process.hang_watch import HangWatch
from relume.engine_shim.agent.engine_process.loading_watch import LoadingWatch
from relume.engine_shim.agent.engine_process.process_identity import stat_of
from relume.engine_shim.agent.engine_process.watched_engine import ServingEngine, WatchedServer
from relume.engine_shim.agent.host_daemon.checkpoint_options import checkpoints_of
from relume.engine_shim.agent.journal import Journal
from relume.engine_shim.agent.notice_server import NoticeBoard
from relume.engine_shim.agent.report_server import ReportServer
from relume.engine_shim.agent.run_directory import EngineRecord, RunDirectory
from relume.engine_shim.engine.hosts import deathwatch
from relume.engine_shim.engine.progress import Progress
from relume.events.vocabulary import (
    EngineDied,
    EngineReady,
    EngineRestartScheduled,
    EngineStarted,
    WeightsLoaded,
)
from relume.events.vocabulary.enums import DeathReason, EngineKind, HealthState
from relume.events.wire.reports import Hello, Layout, Ready, Weights


class Backoff:
    """Delays before restarts: in list order, the last repeats; a stable life starts the list
    over."""

    def __init__(self, delays_s: Sequence[float], stable_after_s: float) -> None:
        self._delays_s = tuple(delays_s)
        self._stable_after_s = stable_after_s
        self._next = 0

    def after(self, ready_for_s: float) -> float:
        """Seconds to wait after a life that was ready for this time (0: never ready)."""
        if ready_for_s >= self._stable_after_s:
            self._next = 0
        delay_s = self._delays_s[min(self._next, len(self._delays_s) - 1)]
        self._next += 1
        return delay_s


class Supervisor:
    """Keeps one worker's engine running. `run` until cancelled, then `leave`."""

    def __init__(
        self,
        config: AgentConfig,
        directory: RunDirectory,
        host: EngineHost,
        journal: Journal,
        reports: ReportServer,
        board: NoticeBoard,
        logger: Logger,
    ) -> None:
        self._config = config
        self._checkpoints = checkpoints_of(config)
        self._directory = directory
        self._host = host
        self._journal = journal
        self._reports = reports
        self._board = board
        self._logger = logger
        self._layout = Layout("", 0)
        self._loaded: list[Weights] = []
        self._backoff = Backoff(config.backoff_s, config.stable_after_s)
        self._engine: EngineProcesses | None = None
        self._starting: asyncio.Task[EngineProcesses] | None = None
        self._order: EngineOrder | None = None
        self._canaries: CanaryWatch | None = None
        self._weights: WeightsWatch | None = None
        self._serving: WatchedServer | None = None
        self._judged: tuple[int, HealthState] = 0, HealthState.HEALTHY
        self._death_noted = True
        self._ready: EngineReady | None = None
        """Of the engine that runs."""
        self._watched = True
        self._ready_at = 0.0
        self._wake = asyncio.Event()
        self._timers: list[asyncio.TimerHandle] = []
        self.phase = "idle"
        self.restarts = 0
        reports.on_hello = self._on_hello
        reports.on_ready = self._on_ready
        reports.on_layout = self._on_layout
        reports.on_weights = self._on_weights

    @property
    def incarnation(self) -> int:
        """The latest incarnation, running or not; 0 before the first."""
        return self._directory.state.incarnation

    # --- called by effects --------------------------------------------------------

    def poke(self) -> None:
        """End a backoff now, and look again whether the worker is held."""
        self._wake.set()

    def replace(self, detail: str) -> None:
        """Kill the engine, if one runs, and start the next at once."""
        if self._engine is not None:
            self._engine.condemn(DeathReason.REPLACED, detail)
        self.poke()

    def hurry_canaries(self) -> None:
        """Send all canaries to the engine now, if there are any."""
        if self._canaries is not None:
            self._canaries.hurry()

    def judge(self, incarnation: int, state: HealthState) -> None:
        """Note what the leader decided about the health of an engine."""
        self._judged = incarnation, state
        if state == HealthState.QUARANTINED and incarnation < self.incarnation:
            if self._weights is not None:
                self._weights.read_anew()

    def not_ready(self) -> str:
        """Why the worker may not serve, for its readiness probe; empty if it may."""
        engine = self._engine
        if engine is None or not engine.ready or engine.dead.is_set():
            return f"no engine is ready: {self.phase}"
        if self._judged == (self.incarnation, HealthState.QUARANTINED):
            return "the worker is quarantined"
        if self._has_canaries and (self._canaries is None or not self._canaries.is_answered):
            return "its engine has not answered each canary yet"
        return ""

    @property
    def _has_canaries(self) -> bool:
        return self._watched and self._config.canary_interval_s > 0

    def limit_batch(self, percent: int) -> None:
        """Let the engine run at most this share of its maximum number of requests at once."""
        if (serving := self._serving_engine()) is not None:
            serving.limit_batch(percent)

    def reset_prefix_cache(self) -> None:
        """Let no further request read what the engine's prefix cache holds now."""
        if (serving := self._serving_engine()) is not None:
            serving.reset_prefix_cache()

    async def unfinished(self) -> int | None:
        """See DrainedEngine."""
        engine = self._engine
        if engine is None or not engine.ready or engine.dead.is_set():
            return None
        serving = self._serving_engine()
        return UNKNOWN if serving is None else await serving.unfinished()

    def _serving_engine(self) -> WatchedServer | None:
        """The engine, once it is needed; None: there is none, or its page cannot be mapped."""
        if self._serving is None and self._engine is not None and self._order is not None:
            try:
                self._serving = self._watched_engine(self._engine, self._order)
            except OSError as error:
                self._logger.error("the engine's page cannot be mapped", why=str(error))
        return self._serving

    # --- lives -----------------------------------------------------------------------

    async def run(self) -> None:
        """Start and restart engines for ever. Cancellation leaves the engine to `leave`."""
        while True:
            self.phase = "waiting"
            await self._host.available()
            await self._while_held()
            ready_for_s, reason = await self._live()
            delay_s = 0.0 if reason == DeathReason.REPLACED else self._backoff.after(ready_for_s)
            self.restarts += 1
            if not self._directory.state.held:
                await self._pause(delay_s)

    async def _while_held(self) -> None:
        while self._directory.state.held:
            self.phase = "held"
            self._wake.clear()
            await self._wake.wait()

    async def _pause(self, delay_s: float) -> None:
        """Announce the next start and wait for it. A poke ends the wait."""
        self._journal.record(
            EngineRestartScheduled(
                worker=self._config.worker,
                incarnation=self.incarnation + 1,
                delay_ms=round(delay_s * 1000),
            )
        )
        self._logger.info("restart scheduled", incarnation=self.incarnation + 1, delay_s=delay_s)
        self.phase = "backoff"
        self._wake.clear()
        if delay_s > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(delay_s):
                    await self._wake.wait()

    async def _live(self) -> tuple[float, str]:
        """One engine from start to end: (seconds it was ready, reason of its death)."""
        self.phase = "starting"
        try:
            incarnation = self._count()
            order = self._order = self._prepare(incarnation)
            self._starting = asyncio.create_task(self._host.start(order))
            engine = await asyncio.shield(self._starting)
        except HostRefused as refused:
            self._starting = None
            self._logger.error("engine could not be started", why=refused.detail)
            return 0.0, "refused"
        self._started(engine, order)
        async with asyncio.TaskGroup() as tasks:
            watches = [
                tasks.create_task(watch(engine, order))
                for watch in (self._watch_loading, self._watch_hangs, self._send_canaries)
            ]
            await engine.dead.wait()
            for watch in watches:
                watch.cancel()
        ready_for_s = engine.died_at - self._ready_at if engine.ready else 0.0
        await self._bury(engine, engine.reason, engine.detail)
        return ready_for_s, engine.reason

    async def _watch_loading(self, engine: EngineProcesses, order: EngineOrder) -> None:
        """Until its files are read, or cancelled."""
        if self._checkpoints is not None and self._checkpoints.pools:
            page, worker = Progress(str(self._directory.progress)), self._config.worker
            watch = LoadingWatch(worker, order.incarnation, page, self._journal, engine.serving)
            await watch.run()

    async def _watch_hangs(self, engine: EngineProcesses, order: EngineOrder) -> None:
        """Until cancelled. What stands in for a plain server watches that by itself."""
        await engine.serving.wait()
        if not self._watched:
            return
        await HangWatch(
            self._watched_engine(engine, order),
            order.incarnation,
            self._config,
            self._directory,
            self._journal,
            self._logger,
        ).run()

    async def _send_canaries(self, engine: EngineProcesses, order: EngineOrder) -> None:
        """Until cancelled, or until the engine turns out not to know canaries. The files that it loads
        are read beside them."""
        weights = self._watch_weights(order)
        if weights is not None:
            await weights.note()
        await engine.serving.wait()
        if not self._has_canaries:
            return
        watched = self._watched_engine(engine, order)
        canaries = CanaryWatch(
            watched, order.incarnation, self._config, self._journal, self._logger
        )
        self._canaries, self._weights = canaries, weights
        async with asyncio.TaskGroup() as tasks:
            if weights is not None:
                await weights.begin()
                tasks.create_task(weights.run())
            tasks.create_task(canaries.run())

    def _watch_weights(self, order: EngineOrder) -> WeightsWatch | None:
        config = self._config
        if not (config.canary_interval_s and config.weights_read_mb_s):
            return None
        return WeightsWatch(
            self._model_files(),
            order.incarnation,
            config,
            self._journal,
            self._logger,
            self._is_quarantined,
        )

    def _is_quarantined(self) -> bool:
        return self._judged[1] == HealthState.QUARANTINED

    def _model_files(self) -> ModelFiles:
        return LocalModelFiles(self._config.model, self._directory.path / "model-files.json")

    def _watched_engine(self, engine: EngineProcesses, order: EngineOrder) -> WatchedServer:
        host, model = self._config.engine_host, self._config.model
        return ServingEngine(engine, order.incarnation, host, order.port, self._directory, model)

    def _count(self) -> int:
        """The next incarnation. Raises HostRefused: one that is not on disk might be given
        to another engine."""
        try:
            return self._directory.next_incarnation()
        except OSError as error:
            where = f"make room on the disk of {self._directory.path}"
            raise HostRefused(f"its incarnation cannot be remembered ({error}); {where}") from None

    def _prepare(self, incarnation: int) -> EngineOrder:
        """All the next engine needs. Raises HostRefused."""
        more: tuple[str, ...] = ()
        pools: dict[str, str] = {}
        if self._checkpoints is not None:
            more = self._checkpoints.engine_arguments(self._directory.state.fence)
            pools = self._checkpoints.engine_environment(anew=self._is_quarantined())
        try:
            ipc_directory.renew(self._directory.path)
        except OSError as error:
            raise HostRefused(str(error)) from None
        return make_order(self._config, self._directory, incarnation, more, pools)

    def _tidy(self) -> None:
        """Remove what the engine left."""
        ipc_directory.remove(self._directory.path)
        stack_dump.tidy(self._directory)

    def _started(self, engine: EngineProcesses, order: EngineOrder) -> None:
        """Record the engine in the run directory and the log, open the report socket, set the
        timers."""
        loop = asyncio.get_running_loop()
        config = self._config
        self._starting = None
        self._engine, self._serving = engine, None
        self._canaries = self._weights = None
        self._death_noted = False
        self._ready = None
        engine.on_dying = partial(self._board.tell, order.incarnation)
        self._directory.remember_engine(EngineRecord(order.incarnation, engine.leader))
        self._say_started(engine)
        self._logger.info("engine started", incarnation=order.incarnation, pid=engine.leader.pid)
        self._layout = Layout("", 0)
        self._loaded = []
        self._reports.begin(order.incarnation)
        self._timers = [loop.call_later(config.ready_timeout_s, self._not_ready, engine)]

    def _say_started(self, engine: EngineProcesses) -> None:
        self._journal.record(
            EngineStarted(
                worker=self._config.worker,
                incarnation=self.incarnation,
                pid=engine.leader.pid,
                start_ticks=engine.leader.start_ticks,
            )
        )

    def state_again(self) -> None:
        """Record the engine that runs in a log that knows nothing of it; the engine reports the
        requests that it has."""
        if self._engine is None or self._death_noted:
            return
        self._say_started(self._engine)
        if self._ready is not None:
            self._journal.record(self._ready)
            self._say_loaded()
        if self._weights is not None:
            self._weights.state_again()
        self._reports.state_again()
        if (serving := self._serving_engine()) is not None:
            serving.request_statement()

    async def _bury(self, engine: EngineProcesses, reason: str, detail: str) -> None:
        """The engine is dead or condemned: notify gateways and the log first, then clean up."""
        engine.kill()
        if not self._death_noted:
            self._board.tell(self.incarnation)
        self._cancel_timers()
        self._reports.end()
        self.phase = "cleaning"
        if not self._death_noted:
            self._death_noted = True
            incarnation = self.incarnation
            self._journal.record(
                EngineDied(self._config.worker, incarnation, DeathReason(reason), detail)
            )
            self._logger.warning(
                "engine died",
                incarnation=incarnation,
                reason=reason,
                detail=detail,
                notified_at=self._board.notified_at,
                output=str(self._directory.engine_log),
            )
        await engine.destroy()
        self._tidy()
        self._engine = None
        self._directory.remember_engine(None)

    async def leave(self, timeout_s: float) -> None:
        """Stop the engine for good (SIGTERM, after `timeout_s` SIGKILL) and record it in the log.

        To be called once `run` has been cancelled.
        """
        self._cancel_timers()
        if self._starting is not None and self._order is not None:
            with contextlib.suppress(HostRefused, TimeoutError):
                async with asyncio.timeout(timeout_s):
                    self._started(await self._starting, self._order)
        engine, self.phase = self._engine, "stopping"
        if engine is None:
            return
        was_dead = engine.dead.is_set()
        self._logger.info("stopping the engine", incarnation=self.incarnation)
        await engine.stop(timeout_s)
        reason, detail = (
            (engine.reason, engine.detail) if was_dead else (DeathReason.STOPPED, "agent leaves")
        )
        await self._bury(engine, reason, detail)
        self.phase = "stopped"

    def kill_now(self) -> None:
        """SIGKILL what runs, at once."""
        if self._engine is not None:
            self._engine.kill()

    async def abandon(self) -> None:
        """Kill what still runs without a record in the log: the exit of a fenced or failing agent.
        The file stays; a successor records the death from it."""
        self._cancel_timers()
        self._reports.end()
        if self._engine is not None:
            self._logger.warning("killing the engine", incarnation=self.incarnation)
            await self._engine.destroy()
            self._tidy()
            self._engine = None

    # --- what engines say, and what their silence says ---------------------------------

    def _on_hello(self, pid: int, hello: Hello) -> None:
        engine, stat = self._engine, stat_of(pid)
        if engine is None or stat is None:
            return
        alive_path = deathwatch.path_of(str(self._directory.socket_path), hello.pid)
        if stat.id == engine.leader:
            engine.watch_early(stat.id, "engine", alive_path)
            return
        if stat.session != engine.leader.pid:
            # Its death shall not end the engine: it only holds a lifeline.
            self._logger.warning("process outside the engine's session", pid=pid, role=hello.role)
            return
        if not engine.adopt(stat.id, hello.role):
            return
        engine.watch_early(stat.id, hello.role, alive_path)
        self._logger.info("engine process joined", pid=pid, role=hello.role)
        self._directory.remember_engine(
            EngineRecord(self.incarnation, engine.leader, tuple(engine.members))
        )

    def _on_layout(self, layout: Layout) -> None:
        self._layout = layout  # of the scheduler's process, which is up before HTTP answers

    def _on_weights(self, weights: Weights) -> None:
        self._loaded.append(weights)  # a draft model is loaded, too

    def _say_loaded(self) -> None:
        """Record where the engine's ranks had their weights from, if they are to be in pools."""
        loaded = self._loaded
        if loaded:
            event = WeightsLoaded(
                worker=self._config.worker,
                incarnation=self.incarnation,
                ranks=len({part.rank for part in loaded}),
                bytes=sum(part.bytes for part in loaded),
                read_bytes=sum(part.read_bytes for part in loaded),
                took_ms=max(part.took_us for part in loaded) // 1000,
                why=next((part.why for part in loaded if part.why), ""),
            )
            self._journal.record_when_readable(event)

    def _on_ready(self, ready: Ready) -> None:
        engine, config = self._engine, self._config
        if engine is None or engine.ready or engine.dead.is_set():
            return
        self._cancel_timers()
        self._ready_at = time.monotonic()
        inexact = tuple((n, str(why)) for n, why in ready.exact.items() if why is not True)
        # An engine that does not restore what it writes takes no part in checkpoints.
        layout = self._layout if "restore" not in dict(inexact) else Layout("", 0)
        self._ready = EngineReady(
            worker=config.worker,
            incarnation=self.incarnation,
            host=config.advertise_host or config.engine_host,
            port=ready.port,
            model=config.served_model_name or ready.model,
            max_model_len=ready.max_model_len,
            block_size=ready.block_size,
            kv_blocks=ready.kv_blocks,
            build=ready.vllm,
            exact=tuple(name for name, verdict in ready.exact.items() if verdict is True),
            family=layout.family,
            block_bytes=layout.block_bytes,
            inexact=inexact,
            hardware=ready.hardware,
            step_tokens=ready.step_tokens,
            kind=ready.kind,
            max_seqs=ready.max_seqs,
        )
        self._journal.record(self._ready)
        self._say_loaded()
        self.phase = "ready"
        self._logger.info("engine ready", incarnation=self.incarnation, port=ready.port)
        self._watched = ready.kind != EngineKind.PLAIN
        engine.serving.set()

    def _not_ready(self, engine: EngineProcesses) -> None:
        engine.condemn(DeathReason.HUNG, f"not ready within {self._config.ready_timeout_s:g} s")

    def _cancel_timers(self) -> None:
        for timer in self._timers:
            timer.cancel()
        self._timers = []

    def describe(self) -> dict[str, Any]:
        """For the status endpoint. `process_state` is that of /proc: R, S, D, T (stopped)..."""
        engine = self._engine
        stat = stat_of(engine.leader.pid) if engine is not None else None
        return {
            "phase": self.phase,
            "incarnation": self.incarnation,
            "restarts": self.restarts,
            "held": self._directory.state.held,
            "draining": self._directory.state.draining,
            "pid": engine.leader.pid if engine is not None else 0,
            "process_state": stat.state if stat is not None else "",
            "url": f"http://{self._config.engine_host}:{self._order.port}" if self._order else "",
            "ready": engine is not None and engine.ready,
            "members": [
                {"pid": process.pid, "role": role}
                for process, role in (engine.members.items() if engine is not None else ())
            ],
            "model_files": self._weights.describe() if self._weights is not None else {},
        }
