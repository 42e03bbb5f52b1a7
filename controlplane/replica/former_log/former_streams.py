"""Resumable streams that began in a former log: what their engines know of them.

The log that begins in another one's place names no request of it. The engines run on, and report the
attempts that they have (`EngineStep`), so the log knows where a stream runs, but not whose it is. When
a client returns to such a stream, the engine is requested to say how the request arrived (`ORIGIN_PATH`).
For a while after engines came from a former log, so are those that do not report it: one that finished
it before has its stream. If no engine has it, one reads the arrival from the request's holders. The
client returns again meanwhile. The arrival is then written into this log, as one of this replica, and
all is as in any resumption.

The engine names the log that the stream belongs to. One of this log is never taken up: the log had its
arrival, and its end as well.
"""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import msgspec
import structlog
from msgspec import Struct

from relume.controlplane.replica import engine_calls
from relume.controlplane.replica.decision_writer import DecisionWriter
from relume.controlplane.stream.arrival import Arrival, arrival_of
from relume.events import vocabulary as v
from relume.events.decode_errors import UNREADABLE
from relume.events.vocabulary.enums import EnginePhase
from relume.events.wire.errors import HeaderError
from relume.events.wire.headers import MAX_ENDPOINTS
from relume.events.wire.stream_origin import StreamOrigin
from relume.events.wire.worker_calls import ORIGIN_PATH, OriginAnswered, OriginRequest
from relume.policies.state import coverage
from relume.policies.state.fleet import Fleet, Worker
from relume.policies.state.lifecycles.stream_resumption import engine_with

log = structlog.get_logger("relume.returns")

LOOKUPS = 8
"""Maximum number of engines that are requested at once."""
MOST = 1024
"""Maximum number of streams that are looked for, or found; the oldest are dropped first."""
FOUND_S = 15.0
"""Time for which what was found is stored: its client returns again, after the gateway's `retry_after_s`. An
engine has a stream for `resume_grace_s` at most, so an older answer may be wrong."""
ADOPTED_TICKS = 300
"""Time after an engine came from a former log for which all engines are requested."""
MOST_ENGINES = 64
"""Maximum number of engines that are requested for one stream that none of them reports."""
ABSENT_S = 2.0
"""Time after which an engine is requested again for a stream that it did not have."""


class FormerStream(Struct, frozen=True):
    """How it arrived, and the attempt that an engine has. `attempt` 0: none has it any more."""

    arrival: Arrival
    worker: str = ""
    incarnation: int = 0
    attempt: int = 0


class FormerStreams:
    """Looks for streams of a former log, for the clients that return to them."""

    def __init__(self, decisions: DecisionWriter) -> None:
        self._decisions = decisions
        self._sought: dict[str, None] = {}
        self._found: dict[str, tuple[FormerStream | None, float]] = {}
        self._wanted: asyncio.Queue[str] = asyncio.Queue(MOST)
        self._started: set[str] = set()
        """Streams whose engine started in the present transaction."""
        self._adopted_tick = -ADOPTED_TICKS

    def known(self, request: str) -> FormerStream | None:
        """A stream of a former log. The first question begins to look for it, if an engine may have it."""
        now = asyncio.get_running_loop().time()
        found, until = self._found.get(request, (None, 0.0))
        if now < until:
            return found
        self._found.pop(request, None)
        if request not in self._sought and self._decisions.log_id and self._may_be(request):
            if not self._wanted.full():
                self._sought[request] = None
                self._wanted.put_nowait(request)
        return None

    def take(self, request: str) -> FormerStream | None:
        """The same if it is known already, for the replica that takes it over."""
        return self._found.pop(request, (None, 0.0))[0]

    def is_sought(self, request: str) -> bool:
        """Whether it is not known yet if there is such a stream."""
        return request in self._sought

    def seen(self, stream: str, position: int, event: Any) -> None:
        """An engine starts and is ready in one transaction: it ran before, under a former log."""
        if type(event) is v.EngineStarted:
            self._started.add(stream)
        elif type(event) is v.EngineReady and stream in self._started:
            self._adopted_tick = self._decisions.view.fleet.tick

    def folded(self, group: Any) -> None:
        """What is not ready yet did not run before."""
        self._started.clear()

    async def run(self) -> None:
        """Look for streams until cancelled."""
        async with engine_calls.session() as session, asyncio.TaskGroup() as tasks:
            for _ in range(LOOKUPS):
                tasks.create_task(self._look(session))

    async def _look(self, session: aiohttp.ClientSession) -> None:
        while True:
            request = await self._wanted.get()
            try:
                self._note(request, await self._find(session, request))
            except engine_calls.LOST as error:
                log.info("former_stream_unknown", request=request, reason=repr(error))
            finally:
                del self._sought[request]

    def _note(self, request: str, found: FormerStream | None) -> None:
        stored_s = ABSENT_S if found is None else FOUND_S
        self._found[request] = found, asyncio.get_running_loop().time() + stored_s
        if len(self._found) > MOST:
            del self._found[next(iter(self._found))]

    def _may_be(self, request: str) -> bool:
        fleet = self._decisions.view.fleet
        if self._has_adopted or engine_with(fleet, request) is not None:
            return True
        return coverage.held_somewhere(fleet, request)

    @property
    def _has_adopted(self) -> bool:
        return self._decisions.view.fleet.tick - self._adopted_tick < ADOPTED_TICKS

    async def _find(self, session: aiohttp.ClientSession, request: str) -> FormerStream | None:
        """Raises what `LOST` names."""
        fleet = self._decisions.view.fleet
        if (worker := engine_with(fleet, request)) is not None:
            found = self._read(request, worker, await _request(session, worker, request))
            if found is not None:
                return found
        if self._has_adopted and (found := await self._find_anywhere(session, request)):
            return found
        if (reader := _reader(fleet, request)) is not None:
            worker, holders = reader
            answered = await _request(session, worker, request, holders)
            return self._read(request, worker, answered)
        return None

    async def _find_anywhere(
        self, session: aiohttp.ClientSession, request: str
    ) -> FormerStream | None:
        ready = [w for w in self._decisions.view.fleet.workers.values() if _is_ready(w)]
        some = ready[:MOST_ENGINES]
        requests = (_request(session, worker, request) for worker in some)
        answers = await asyncio.gather(*requests, return_exceptions=True)
        for worker, answer in zip(some, answers, strict=True):
            if isinstance(answer, OriginAnswered) and (
                found := self._read(request, worker, answer)
            ):
                return found
        return None

    def _read(
        self, request: str, worker: Worker, answered: OriginAnswered | None
    ) -> FormerStream | None:
        """The stream, if it is one of a former log."""
        log_id = self._decisions.log_id
        if answered is None or answered.log == log_id:
            return None
        try:
            origin = StreamOrigin.parse(answered.origin)
        except HeaderError as error:
            log.warning("origin_unreadable", request=request, reason=str(error))
            return None
        if origin.arrival.request != request:
            return None
        log.info("former_stream_found", request=request, log=answered.log, worker=worker.name)
        arrival = arrival_of(origin.arrival, log_id)
        if not answered.attempt:
            return FormerStream(arrival)
        return FormerStream(arrival, worker.name, worker.incarnation, answered.attempt)


def _is_ready(worker: Worker) -> bool:
    return worker.engine == EnginePhase.READY


def _reader(fleet: Fleet, request: str) -> tuple[Worker, tuple[str, ...]] | None:
    """An engine that can read the request's envelope from its holders, and where these are."""
    holders = [site.name for site in fleet.holders.values() if request in site.covered]
    for worker in fleet.workers.values():
        places = tuple(e for n in holders if (e := coverage.endpoint(fleet, n, worker.name)))
        if places and _is_ready(worker):
            return worker, places[:MAX_ENDPOINTS]
    return None


async def _request(
    session: aiohttp.ClientSession, worker: Worker, request: str, holders: tuple[str, ...] = ()
) -> OriginAnswered | None:
    """What the engine, or one of the holders, knows of the stream. Raises what `LOST` names."""
    call = OriginRequest(request=request, incarnation=worker.incarnation, holders=holders)
    url = engine_calls.url_of(worker, ORIGIN_PATH)
    async with session.post(url, json=msgspec.to_builtins(call)) as answer:
        if answer.status != 200:
            return None
        try:
            return msgspec.json.decode(await answer.read(), type=OriginAnswered)
        except UNREADABLE:
            return None
