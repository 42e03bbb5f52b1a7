"""Deaths of engines as their agents announce them directly, before the log.

One connection to the agent of every registered worker. A notice about the incarnation
the fold knows as ready is an observation of this replica, like a reset: it is written
(`WorkerSuspected`, then what happens to each stream) and acted on immediately. `EngineDied`
follows through the log, and breaks the streams of an engine of which no notice came.

What the dead engine had sent before lies in our sockets by then. The streams are moved
one full pass of the event loop after the notice, so that those bytes are read and go to
their clients first; whatever comes later belongs to an abandoned attempt and goes nowhere.

Notices carry no credentials. A notice far ahead of the log is refused (`refusal`). A notice about
the present engine is believed once: it moves the streams, and the probes of suspected engines
(`stall_watch`) clear an engine that lives. Repetitions about that incarnation change nothing;
`EngineDied` and resets say when it dies.
"""

from __future__ import annotations

import asyncio
import socket
import time
from typing import cast

import structlog

from relume.controlplane.gateway.ports import GatewayPort
from relume.controlplane.replica.scheduler import Scheduler
from relume.events import vocabulary as v
from relume.events.log.errors import LogError
from relume.events.log.interface import RevisionGroup
from relume.events.vocabulary.enums import EnginePhase, TransportKind
from relume.events.wire.errors import NoticeError
from relume.events.wire.notices import DeathNotice, NoticeReader
from relume.policies.state.fleet import Worker

SEEN_DEAD = "its agent saw it die"
IN_THE_LOG = "its death is in the log"
CONNECT_TIMEOUT_S = 5.0
PAUSE_S, LONGEST_PAUSE_S = 0.05, 2.0  # before connecting again; doubled
RECHECK_S = 1.0  # how often the connections are compared with the fold, unasked
MOST_REVISIONS_AHEAD = 1 << 20
"""An epoch is a revision of etcd. A replica that is cut from etcd may lag; a fleet takes minutes
to write this many."""
MOST_STARTS_AHEAD = 1 << 10
"""Starts of an engine that its agent may have made while the log is away."""
KEEPALIVE = ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))

log = structlog.get_logger("relume.notices")


def refusal(notice: DeathNotice, incarnation: int, revision: int) -> str:
    """Why a notice cannot be that of the agent of a worker whose present engine is `incarnation`,
    for a replica that has read the log to `revision`; empty if it can be."""
    if notice.epoch > revision + MOST_REVISIONS_AHEAD:
        return f"epoch {notice.epoch} is far ahead of the log, which is at revision {revision}"
    if notice.incarnation > incarnation + MOST_STARTS_AHEAD:
        return f"incarnation {notice.incarnation} is far ahead of that in the log, {incarnation}"
    return ""


class NoticeWatch:
    """One for a replica. `connected`: workers whose agent has greeted us. `refused`: the number of
    connections that were closed because of what they said."""

    def __init__(self, scheduler: Scheduler, gateway: GatewayPort) -> None:
        self._scheduler = scheduler
        self._gateway = gateway
        self._due = False
        self._changed = asyncio.Event()
        self._links: dict[str, tuple[str, asyncio.Task[None]]] = {}
        self._noticed: dict[str, int] = {}
        self._died: list[v.EngineDied] = []
        self.connected: set[str] = set()
        self.refused = 0

    def seen(self, stream: str, position: int, event: object) -> None:
        """Called with each event folded.

        Broken streams are dispatched again immediately, and a decision's basis is a whole group:
        deaths are therefore only noted until the group is folded (`folded`).
        """
        if type(event) in (v.WorkerRegistered, v.WorkerDeregistered, v.WorkerLost):
            self._due = True
        elif type(event) is v.EngineDied:
            self._died.append(event)

    def folded(self, group: RevisionGroup) -> None:
        """Called when a whole group was folded and the scheduler has it."""
        died, self._died = self._died, []
        for event in died:
            self._gateway.break_streams(
                event.worker,
                event.incarnation,
                TransportKind.ENGINE_DEAD,
                f"{IN_THE_LOG} ({event.reason})",
            )
        if self._due:
            self._due = False
            self._changed.set()

    async def run(self) -> None:
        """Listen for ever; the caller owns the task."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                self._changed.clear()
                self._match(tasks)
                try:
                    async with asyncio.timeout(RECHECK_S):
                        await self._changed.wait()
                except TimeoutError:
                    pass

    def _match(self, tasks: asyncio.TaskGroup) -> None:
        """One link to each worker that is there and says where; no others."""
        workers = self._scheduler.view.fleet.workers
        wanted = {w.name: w.notices for w in workers.values() if w.present and w.notices}
        self._noticed = {name: number for name, number in self._noticed.items() if name in workers}
        for name, (address, task) in list(self._links.items()):
            if wanted.get(name) != address:
                task.cancel()
                del self._links[name]
        for name, address in wanted.items():
            if name not in self._links:
                task = tasks.create_task(self._listen(name, address), name=f"notices-{name}")
                self._links[name] = (address, task)

    async def _listen(self, worker: str, address: str) -> None:
        """Keep a connection to one agent. That it is lost says nothing of the engine."""
        host, _, port = address.rpartition(":")
        loop = asyncio.get_running_loop()
        pause_s = PAUSE_S
        while True:
            try:
                async with asyncio.timeout(CONNECT_TIMEOUT_S):
                    transport, link = await loop.create_connection(
                        lambda: _Link(self, worker), host, int(port)
                    )
            except (OSError, TimeoutError, ValueError, OverflowError) as error:
                log.debug("no_notices", worker=worker, address=address, reason=str(error))
            else:
                try:
                    await link.ended
                finally:
                    transport.abort()
                    self.connected.discard(worker)
                if link.reader.greeted and not link.refused:
                    pause_s = PAUSE_S
                log.info("notices_lost", worker=worker, address=address, reason=link.why)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def died(self, name: str, notice: DeathNotice) -> str:
        """An agent says that an engine is dead. What is not about the present one is old.
        Returns why the notice is refused, if it is."""
        fleet = self._scheduler.view.fleet
        worker = fleet.workers.get(name)
        if worker is not None and (why := refusal(notice, worker.incarnation, fleet.revision)):
            return why
        self._believe(name, worker, notice)
        return ""

    def _believe(self, name: str, worker: Worker | None, notice: DeathNotice) -> None:
        incarnation = notice.incarnation
        if (
            worker is None
            or worker.engine != EnginePhase.READY
            or self._noticed.get(name) == incarnation
        ):
            return
        if worker.incarnation != incarnation or notice.epoch < worker.epoch:
            return
        self._noticed[name] = incarnation
        log.warning("engine_told_dead", worker=name, incarnation=incarnation, at=time.monotonic())
        try:
            self._scheduler.emit(v.WorkerSuspected(name, incarnation, SEEN_DEAD))
        except LogError as error:
            log.warning("notice_not_written", reason=str(error))
        loop = asyncio.get_running_loop()
        # The first turn is before the next read of the sockets, the second after it.
        loop.call_soon(loop.call_soon, self._move, name, incarnation)

    def _move(self, worker: str, incarnation: int) -> None:
        self._gateway.break_streams(worker, incarnation, TransportKind.ENGINE_DEAD, SEEN_DEAD)


class _Link(asyncio.Protocol):
    """One connection. `ended` is done when it is lost; `why` says how."""

    def __init__(self, watch: NoticeWatch, worker: str) -> None:
        self._watch = watch
        self._worker = worker
        self._transport: asyncio.Transport | None = None
        self.reader = NoticeReader(worker)
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.why = "closed by the agent"
        self.refused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        sock = transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in KEEPALIVE:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)

    def data_received(self, data: bytes) -> None:
        try:
            notices = self.reader.feed(data)
        except NoticeError as error:
            self._refuse(str(error))
            return
        if self.reader.greeted:
            self._watch.connected.add(self._worker)
        for notice in notices:
            if why := self._watch.died(self._worker, notice):
                self._refuse(why)
                return

    def _refuse(self, why: str) -> None:
        """Close the connection: what comes on it is not the worker's agent's."""
        self.why, self.refused = why, True
        self._watch.refused += 1
        log.warning("notice_refused", worker=self._worker, reason=why)
        assert self._transport is not None
        self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is not None:
            self.why = str(exc)
        if not self.ended.done():
            self.ended.set_result(None)
