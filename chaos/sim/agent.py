"""The process of a worker's agent in virtual time: the real supervisor, journal and effects on a
simulated host.

The simulation replaces only the parts that touch the machine: processes, sockets and the state
file. The host restarts a dead agent, as systemd would.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from functools import partial
from random import Random
from typing import Any, Protocol, cast

from relume.chaos.scenario.language import Disorder
from relume.chaos.sim.canary_answers import answer, time_us
from relume.chaos.sim.daemon_keeper import SimKeeper
from relume.chaos.sim.engine.worker_engine import EngineProcess
from relume.chaos.sim.etcd.members import SimEtcd
from relume.chaos.sim.message_ports import Board
from relume.chaos.sim.world.model_files import HostFiles, SimModelFiles
from relume.chaos.sim.world.network import Wires
from relume.chaos.sim.world.virtual_loop import Process, VirtualLoop
from relume.chaos.sim.world.worker_machine import HostDirectory, WorkerSettings
from relume.engine_shim.agent.agent_config import AgentConfig
from relume.engine_shim.agent.canaries.model_files import ModelFiles
from relume.engine_shim.agent.effects import EffectRunner
from relume.engine_shim.agent.engine_process.drain import UNKNOWN
from relume.engine_shim.agent.engine_process.engine_hosts import EngineOrder
from relume.engine_shim.agent.engine_process.process_identity import ProcessId
from relume.engine_shim.agent.engine_process.supervisor import Supervisor
from relume.engine_shim.agent.engine_process.watched_engine import CANARY_S, WatchedServer
from relume.engine_shim.agent.journal import FLUSH_TIMEOUT_S, Journal
from relume.engine_shim.agent.life import Agent
from relume.engine_shim.agent.stream_ownership.takeover import free_stream
from relume.engine_shim.agent.stream_reader import FleetReader
from relume.engine_shim.agent.unread_reports import UnreadReports
from relume.events.etcd.client.connection import EtcdClient
from relume.events.etcd.errors import LogWentBack
from relume.events.etcd.keys import Keys
from relume.events.etcd.writer.stream_writer import WriterClosed
from relume.events.log.errors import RelumeError
from relume.events.log.interface import RevisionGroup
from relume.events.vocabulary import EngineDied, WorkerDeregistered
from relume.events.vocabulary.enums import DeathReason
from relume.events.wire.notices import DeathNotice
from relume.events.wire.reports import Layout, Ready
from relume.events.wire.worker_calls import CanaryAnswered

SEEN_S = 0.001
"""Delay until an agent sees the death of a process of its host."""
FORK_S = 0.02
PROBE_AGAIN_S = 0.1
CANARY_BUDGET_PPM = 10_000
"""Canaries of a simulated engine cost nothing: they may be as frequent as a scenario needs."""
SILENT = dict.fromkeys(
    ("steps", "turns", "step_age_us", "cpu_us", "wait_us", "front_us", "running", "waiting"), 0
) | {"expected_us": -1}
"""The page of an engine that counts no steps on it."""
STEP = b"\xadengine_step/1"
TAGS = (
    b"effects_decided/1", b"checkpoints_released/1", b"checkpoints_voided/1", b"detail_decided/1",
    b"feature_level_raised/1", b"health_decided/1",
)  # fmt: skip
REPORT_LIMIT = 4096
"""Maximum number of queued reports to an agent that does not read; engines drop and count more."""


class Quiet:
    """A logger without output: a run leaves the log of events."""

    def debug(self, event: str, **fields: Any) -> None: ...
    def info(self, event: str, **fields: Any) -> None: ...
    def warning(self, event: str, **fields: Any) -> None: ...
    def error(self, event: str, **fields: Any) -> None: ...


QUIET = Quiet()


class EngineHandle:
    """`EngineProcesses` of the supervisor: one simulated process."""

    def __init__(self, engine: EngineProcess, agent: Process) -> None:
        self.engine = engine
        self.leader = ProcessId(engine.process.pid, 1)
        self.members: dict[ProcessId, str] = {}
        self.dead = asyncio.Event()
        self.serving = asyncio.Event()
        self.reason = self.detail = ""
        self.died_at = 0.0
        self.on_dying: Callable[[], None] = lambda: None
        self._agent = agent
        self._loop = engine.machine.loop
        self._canaries = Random(f"canaries {engine.machine.name} {engine.process.pid}")
        engine.process.at_death.append(self._died)

    def _died(self) -> None:
        self._agent.call_at(self._loop.time() + SEEN_S, self._seen)

    def _seen(self) -> None:
        self.on_dying()
        self._dead(self.engine.died_of, self.engine.died_how)

    def _dead(self, reason: str, detail: str) -> None:
        if not self.dead.is_set():
            self.reason, self.detail, self.died_at = reason, detail, self._loop.time()
            self.dead.set()

    @property
    def ready(self) -> bool:
        """See EngineProcesses."""
        return self.serving.is_set()

    def read(self) -> dict[str, int]:
        """See WatchedEngine. Its steps are not asked for: it is probed."""
        return SILENT

    async def turned(self, timeout_s: float) -> bool:
        """See WatchedEngine: whether its process may run within that time."""
        deadline = self._loop.time() + timeout_s
        while self.engine.process.stopped:
            if self._loop.time() >= deadline:
                return False
            await asyncio.sleep(PROBE_AGAIN_S)
        return True

    async def unfinished(self) -> int:
        """See WatchedServer."""
        return UNKNOWN if self.engine.process.stopped else len(self.engine.tracks)

    def limit_batch(self, percent: int) -> None:
        """See WatchedServer."""
        self.engine.engine.limit_batch(percent)

    def reset_prefix_cache(self) -> None:
        """See WatchedServer."""
        self.engine.engine.kv.forget()

    def request_statement(self) -> None:
        """See WatchedServer: it reports its requests once more."""
        self.engine.process.call_soon(self.engine.state_again)

    async def weights(self) -> str:
        """See CanaryEngine."""
        return self.engine.machine.files.short

    async def canary(self, number: int) -> CanaryAnswered | str:
        """See CanaryEngine. A canary takes its time, but no step of the engine."""
        if not await self.turned(CANARY_S):
            return f"no answer within {CANARY_S:g} s"
        machine, alone = self.engine.machine, self._is_idle()
        took_us = time_us(self._canaries, machine.slower, machine.pause_ns / 1000)
        await asyncio.sleep(took_us / 1e6)
        is_wrong = self.engine.flipped and not self.engine.unseen
        return answer(machine.model, number, is_wrong, alone and self._is_idle(), took_us)

    def _is_idle(self) -> bool:
        return not self.engine.engine.running and not self.engine.engine.waiting

    def process_state(self) -> str:
        """See WatchedEngine."""
        return "T" if self.engine.process.stopped else "S"

    async def dump(self) -> str:
        """See WatchedEngine: there are no stacks."""
        return ""

    def condemn(self, reason: str, detail: str) -> None:
        """Kill it, with the reason in the log."""
        self._dead(reason, detail)
        self.kill()

    def kill(self) -> None:
        self.engine.kill()

    async def destroy(self) -> None:
        """Kill its remaining processes."""
        self.kill()
        await asyncio.sleep(SEEN_S)

    async def stop(self, timeout_s: float) -> None:
        """SIGTERM: it ends within a moment."""
        if not self.dead.is_set():
            await asyncio.sleep(min(timeout_s, 0.1))
        await self.destroy()


class Reports:
    """The report socket: reports of one engine incarnation to its agent."""

    def __init__(
        self, process: Process, journal: Journal, disorder: Disorder, host: AgentHost
    ) -> None:
        self._process = process
        self._journal = journal
        self._unread = UnreadReports(journal)
        self._host = host
        self._garbled = 0.0
        self._delay_s = disorder.report_delay_ms / 1e3
        self._report_limit = disorder.kept_reports or REPORT_LIMIT
        self._waiting: deque[bytes] = deque()
        self._coming = 0
        self._retry: asyncio.TimerHandle | None = None
        self.on_hello: Callable[..., None] = lambda *_: None
        self.on_ready: Callable[[Ready], None] = lambda _: None
        self.on_layout: Callable[[Layout], None] = lambda _: None

    def send(self, record: bytes) -> bool:
        """A report from the engine; False: it was dropped."""
        if self._coming + len(self._waiting) >= self._report_limit:
            return False
        self._coming += 1
        if self._delay_s:
            at = asyncio.get_running_loop().time() + self._delay_s
            self._process.call_at(at, self._take, record)
        else:
            self._process.call_soon(self._take, record)
        return True

    def begin(self, incarnation: int) -> None:
        """An engine lives."""
        self._unread.begin(incarnation)

    def state_again(self) -> None:
        """The log is new, and knows nothing of the engine."""
        self._unread.state_again()

    def end(self) -> None:
        """The engine is dead: all its reports are here, but for those that are delayed."""
        self._again()
        self._waiting.clear()
        self._unread.end()

    def _take(self, record: bytes) -> None:
        self._coming -= 1
        self._garbled += self._host.garbling if record.startswith(STEP, 1) else 0.0
        if self._garbled >= 1.0:
            self._garbled -= 1.0
            self._unread.note("malformed record")
            return
        try:
            is_taken = not self._waiting and self._journal.step(record)
        except WriterClosed:
            return  # it was delayed, and the agent has written its last
        if not is_taken:
            self._waiting.append(record)
            if self._retry is None:
                self._retry = asyncio.get_running_loop().call_later(0.25, self._again)

    def _again(self) -> None:
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        while self._waiting and self._journal.step(self._waiting[0]):
            self._waiting.popleft()
        if self._waiting:
            self._retry = asyncio.get_running_loop().call_later(0.25, self._again)


class _Starts:
    """An `EngineHost`: a host as its supervisor sees it."""

    def __init__(self, host: AgentHost) -> None:
        self._host = host

    async def available(self) -> None:
        """See EngineHost."""

    async def start(self, order: EngineOrder) -> Any:
        """See EngineHost."""
        return await self._host.start_engine(order)

    @property
    def files(self) -> HostFiles:
        """Of the model."""
        return self._host.files


class SimBoard(Board):
    """The notice board of an agent."""

    def __init__(self, address: str, loop: VirtualLoop, journal: Journal, repeats: bool) -> None:
        self.address = address
        self._repeats = repeats
        self.notified_at = 0.0
        self._loop = loop
        self._journal = journal
        self._hear: list[Callable[[DeathNotice], None]] = []
        self._died: DeathNotice | None = None

    @property
    def listeners(self) -> int:
        return len(self._hear)

    def listen(self, hear: Callable[[DeathNotice], None]) -> None:
        """See ports.Board."""
        self._hear.append(hear)
        if self._died is not None:
            hear(self._died)

    def send(self, notice: DeathNotice) -> int:
        """Send a notice that the agent has not written. Returns how many listeners there are."""
        for hear in self._hear:
            hear(notice)
        return len(self._hear)

    def tell(self, incarnation: int) -> None:
        """Announce the death of this engine, once."""
        if self._died is not None and incarnation <= self._died.incarnation:
            return
        self.notified_at = self._loop.time()
        before, self._died = self._died, DeathNotice(self._journal.epoch, incarnation)
        for hear in self._hear:
            hear(self._died)
            if self._repeats:
                hear(self._died)
                if before is not None:
                    hear(before)


class SimSupervisor(Supervisor):
    """The real one, without files."""

    def _prepare(self, incarnation: int) -> EngineOrder:
        return EngineOrder(incarnation, 9000 + incarnation, {}, ())

    def _tidy(self) -> None:
        pass

    def _watched_engine(self, engine: Any, order: EngineOrder) -> WatchedServer:
        return cast(EngineHandle, engine)

    def _model_files(self) -> ModelFiles:
        return SimModelFiles(cast(_Starts, self._host).files)


class Feed:
    """Groups of the leader's stream for agents; one feed serves all agents."""

    def __init__(self, etcd: SimEtcd) -> None:
        self.etcd = etcd
        self.revisions: list[int] = []
        """Of groups that concern agents, in order."""
        self.news = asyncio.Event()
        self._key = Keys(etcd.config.prefix).stream("fleet")
        etcd.observers.append(self._changed)
        etcd.on_new_state.append(self._begin_anew)

    def _begin_anew(self) -> None:
        """Etcd is another one."""
        self.revisions.clear()
        news, self.news = self.news, asyncio.Event()
        news.set()

    def _changed(self, first: int, of_leader: bool) -> None:
        for revision, events in self.etcd.store.changes_from(first) if of_leader else ():
            if any(e.kv.key.startswith(self._key) and concerns(e.kv.value) for e in events):
                self.revisions.append(revision)
                news, self.news = self.news, asyncio.Event()
                news.set()


def concerns(segment: bytes) -> bool:
    """Whether a segment of stream `fleet` holds anything an agent acts on."""
    return any(tag in segment for tag in TAGS)


class Follower(FleetReader):
    """The real reader, except that it reads the leader's stream only if there is an event for
    agents: most of that stream is ticks, which every agent would read. Its reads use the network,
    and fail with it."""

    def __init__(self, feed: Feed, client: EtcdClient, worker: str) -> None:
        super().__init__(client, ("fleet", f"w.{worker}"))
        self._feed = feed

    async def identity(self) -> str:
        """See FleetReader. Where no fault restores etcd, it holds one log for ever, and a read would
        cost the network."""
        return await super().identity() if self._feed.etcd.may_be_restored else "simulated"

    async def follow(self, after: int = 0) -> AsyncIterator[RevisionGroup]:
        """See FleetReader."""
        feed = self._feed
        number = feed.etcd.log_number
        while True:
            news = feed.news
            if feed.etcd.log_number != number:
                raise LogWentBack(after, feed.etcd.store.revision)
            found = feed.revisions[bisect_right(feed.revisions, after) :]
            if found:
                answer = await self._client.range(self._keys.own, count_only=True)
                for revision in found:
                    if revision <= answer.header.revision:
                        after = revision
                        (group,) = feed.etcd.groups_from(revision, revision)
                        yield group
            if not feed.revisions or feed.revisions[-1] <= after:
                await news.wait()


class AgentHost(Protocol):
    """An agent's interface to its host. `engine`: the last one that was started."""

    name: str
    loop: VirtualLoop
    net: Wires
    etcd: SimEtcd
    config: AgentConfig
    directory: HostDirectory
    settings: WorkerSettings
    files: HostFiles
    feed: Feed
    engine: EngineProcess | None
    garbling: float

    async def start_engine(self, order: EngineOrder) -> EngineHandle:
        """Start the next engine, which loads for a while."""
        ...

    def keeper_of(self, process: Process, journal: Journal) -> SimKeeper | None:
        """The keeper of the host's state daemon, if it has one."""
        ...


class SimAgent(Agent):
    """The agent's life on a simulated host."""

    def __init__(self, host: AgentHost, process: Process) -> None:
        etcd, client = host.etcd, host.etcd.log(process).client
        super().__init__(
            host.config,
            host.directory,
            lambda stream: etcd.writer(stream, process),
            partial(free_stream, client),
            Follower(host.feed, client, host.name),
            _Starts(host),
            QUIET,
        )
        self.process = process
        self.host = host
        self.board: SimBoard | None = None

    async def run(self) -> None:
        """See Agent.run."""
        died = await self._bury_orphan()
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._writers)
            writer = await self._unless_stopped(self._take_stream(self._writers))
            if writer is None:
                return
            journal = self._journal = Journal(writer, QUIET)
            disorder = self.host.settings.disorder
            address = f"{self.host.name}:7000"
            board = SimBoard(address, self.host.loop, journal, disorder.notices_repeated)
            self.board = board
            self.host.net.serve(board.address, self.process, board)
            self._addresses = "", board.address
            self._register(journal, died)
            reports = self.reports = Reports(self.process, journal, disorder, self.host)
            await self._supervise(journal, reports, board)

    async def _bury_orphan(self) -> EngineDied | None:
        """As agent_orphan.kill_orphan."""
        record = self._directory.state.engine
        if record is None:
            return None
        engine = self.host.engine
        alive = engine is not None and engine.process.alive
        if engine is not None:
            engine.kill()
        await asyncio.sleep(0.01)
        detail = "orphan of a dead agent" if alive else "gone with its agent"
        reason = DeathReason.KILLED if alive else DeathReason.UNKNOWN_REASON
        return EngineDied(self._config.worker, record.incarnation, reason, detail)

    async def _supervise(self, journal: Journal, reports: Any, board: Any) -> None:
        """As Agent._serve."""
        config = self._config
        supervisor = self._supervisor = SimSupervisor(
            config, self._directory, self._host, journal, reports, board, QUIET,
        )  # fmt: skip
        effects = EffectRunner(
            config.worker, self._reader, self._directory, journal, supervisor, QUIET,
            self._released, self._voided,
        )  # fmt: skip
        keeper: Any = self.host.keeper_of(self.process, journal)  # in place of the real one
        self._daemon = keeper
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
        await journal.flush(FLUSH_TIMEOUT_S)


def config_of(name: str, domain: str, model: str, settings: WorkerSettings) -> AgentConfig:
    """An agent's configuration; settings of the machine have no effect."""
    return AgentConfig(
        worker=name,
        run_dir=f"/nowhere/{name}",
        model=model,
        served_model_name=model,
        domain=domain,
        engine_host=name,
        lease_ttl_s=settings.lease_ttl_s,
        canary_interval_s=settings.canary_interval_s,
        canary_budget_ppm=CANARY_BUDGET_PPM,
    )


def expected(error: BaseException) -> bool:
    """Whether an agent may end with this error: fenced, owned by another, or its log is broken."""
    if isinstance(error, BaseExceptionGroup):
        return all(expected(one) for one in error.exceptions)
    return isinstance(error, RelumeError)
