"""The gateway: listens, stops, and offers `GatewayPort` to the watches. What its connections share is
`request_service.RequestService`.

Everything runs on one event loop; the clock is the loop's monotonic one unless a test brings its own.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Coroutine, Mapping
from contextlib import nullcontext
from email.utils import formatdate
from typing import Any

from relume.controlplane.gateway.config import GatewayConfig
from relume.controlplane.gateway.context import Context, Counters, LiveAttempt, StopCounts
from relume.controlplane.gateway.http.server import ClientConnection
from relume.controlplane.gateway.http.upstream import UpstreamPool
from relume.controlplane.gateway.openai.token_counts import Tokens
from relume.controlplane.gateway.ports import Activity, SchedulerPort
from relume.controlplane.gateway.request_service import Delegate, RequestService
from relume.controlplane.gateway.streams import Streams
from relume.events.vocabulary.enums import TransportKind
from relume.policies.admission.admission_queue import by_tier


def _system_entropy(size: int) -> bytes:
    """Looked up at each call: simulated processes have an `os.urandom` of their own."""
    return os.urandom(size)


class Gateway:
    """The OpenAI endpoint of one control plane replica.

    `delegates` answer GETs of further exact paths. `clock` gives monotonic seconds on the event loop's
    scale, `entropy(n)` returns n random bytes.
    """

    def __init__(
        self,
        scheduler: SchedulerPort,
        config: GatewayConfig,
        *,
        delegates: Mapping[str, Delegate] | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        entropy: Callable[[int], bytes] = _system_entropy,
    ) -> None:
        config.refuse_unsafe_bind()
        self.config = config
        self.clock = clock
        self.counters = Counters()
        self._dated_unix = 0.0
        self._wall_clock = wall_clock
        self._scheduler = scheduler
        self._boot = entropy(6).hex()
        self._attempts: dict[tuple[str, int], dict[LiveAttempt, None]] = {}
        wait_s = config.tokenize_wait_s
        self.tokens = Tokens(config.tokenizer, wait_s, clock) if config.tokenizer else None
        """Counts prompts; None: they are estimated."""
        self._server: asyncio.Server | None = None
        self._port = 0
        self._group: asyncio.TaskGroup | None = None
        self._runner: asyncio.Task[None] | None = None
        self._failure_raised = False  # `join` raised what broke the gateway
        self._stopping = asyncio.Event()
        self._ended_before = self._moved = 0  # requests when the gateway began to stop, and since
        pool = UpstreamPool(
            clock,
            keepalive_s=config.upstream_keepalive_s,
            connect_timeout_s=config.connect_timeout_s,
            silence_s=config.upstream_silence_s,
            max_idle_per_engine=config.max_idle_per_engine,
        )
        self._assemble(pool, Streams(config.resume, wall_clock, entropy), self.tokens, delegates)

    def _assemble(
        self,
        pool: UpstreamPool,
        streams: Streams,
        tokens: Tokens | None,
        delegates: Mapping[str, Delegate] | None = None,
    ) -> None:
        """Put together what serves requests; a simulated gateway brings parts of its own."""
        self._pool = pool
        self.activity: dict[tuple[str, int], Activity] = pool.activity
        self._streams = streams
        self._context = Context(
            scheduler=self._scheduler,
            pool=pool,
            config=self.config,
            clock=self.clock,
            spawn=self._spawn,
            counters=self.counters,
            attempts=self._attempts,
            tokens=tokens,
        )
        self.service = RequestService(
            self._context,
            streams,
            boot=self._boot,
            started_unix=int(self._wall_clock()),
            is_alive=lambda: self._runner is not None and not self._runner.done(),
            delegates=delegates,
        )

    # --- life

    async def start(self) -> None:
        """Listen. Raises `OSError` when the address cannot be had."""
        self._set_date()
        ready = asyncio.Event()
        self._runner = asyncio.create_task(self._run(ready), name="gateway")
        await ready.wait()
        loop = asyncio.get_running_loop()
        try:
            self._server = await loop.create_server(
                lambda: ClientConnection(self.service),
                self.config.host,
                self.config.port,
                backlog=self.config.backlog,
            )
            self._port = int(self._server.sockets[0].getsockname()[1])
        except OSError:
            await self.stop()
            raise

    async def drain(self, timeout_s: float, announce_s: float = 0.0) -> bool:
        """Wait for the requests under way, at most `timeout_s`; False if some remain. New connections
        and their requests are accepted for the first `announce_s`, in which load balancers see that
        this replica is not ready. Queued requests are refused then: another replica may have a
        worker."""
        until = self.clock() + timeout_s
        self._begin_stop()
        self._leave_absent()
        if announce_s:
            await asyncio.sleep(min(announce_s, timeout_s))
        self._take_no_more()
        while True:
            self._leave_absent()
            for client in list(self.service.clients):
                client.close_when_idle()
            if not self.counters.in_flight:
                return True
            if self.clock() >= until:
                return False
            await asyncio.sleep(0.05)

    def _begin_stop(self) -> None:
        if not self.service.draining:
            self.service.draining = True
            self._ended_before = self.counters.ended

    def _leave_absent(self) -> None:
        """Streams without a client would not end here: another replica may have it."""
        self._moved += self._streams.let_go(lambda session: session.stream.is_absent)

    def _take_no_more(self) -> None:
        self._scheduler.waiting.close()
        if self._server is not None:
            self._server.close()

    async def stop(self) -> StopCounts:
        """Close everything: resumable streams are left to other replicas. Other requests under way
        get an error that says we stop, and end as failed. Returns what became of all since the
        drain began."""
        self._begin_stop()
        self._take_no_more()
        self._streams.deliveries.look()
        self._streams.releases.flush(self._context)
        ended = self.counters.ended
        self._moved += self._streams.let_go(lambda session: session.stream.is_resumable)
        for attempts in [a for group in list(self._attempts.values()) for a in list(group)]:
            attempts.shut_down()
        await asyncio.sleep(0)
        for client in list(self.service.clients):
            client.abort()
        # connection_lost runs in the next turns of the loop and ends the sessions
        for _ in range(50):
            if not self.service.clients:
                break
            await asyncio.sleep(0.01)
        self._pool.close()
        self._stopping.set()
        runner, self._runner = self._runner, None
        if runner is not None:
            await asyncio.wait([runner])
            if not self._failure_raised:
                await runner
        return StopCounts(
            ended=ended - self._ended_before, moved=self._moved, cut=self.counters.ended - ended
        )

    async def join(self) -> None:
        """Wait until the gateway is stopped; raises what broke it, as a group. The owner runs
        this beside its other tasks: a broken gateway serves nothing."""
        runner = self._runner
        if runner is None:
            return
        await asyncio.wait([runner])
        if not runner.cancelled() and runner.exception() is not None:
            self._failure_raised = True
        await runner

    async def __aenter__(self) -> Gateway:
        await self.start()
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.stop()

    @property
    def draining(self) -> bool:
        """Whether it has begun to stop."""
        return self.service.draining

    @property
    def port(self) -> int:
        """The port it listens on, or listened on."""
        return self._port

    async def _run(self, ready: asyncio.Event) -> None:
        async with self.tokens or nullcontext(), asyncio.TaskGroup() as group:
            self._group = group
            ready.set()
            while not self._stopping.is_set():
                try:
                    async with asyncio.timeout(self.config.sweep_interval_s):
                        await self._stopping.wait()
                except TimeoutError:
                    self._sweep()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        assert self._group is not None
        return self._group.create_task(work)

    def _sweep(self) -> None:
        """Enforce every deadline of the token path."""
        now = self.clock()
        if self._wall_clock() - self._dated_unix >= 1.0:
            self._set_date()
        for client in [c for c in self.service.clients if now > c.deadline]:
            client.expire(now)
        self._streams.expire(now)
        self._streams.releases.flush(self._context)
        self._pool.sweep(now)

    def _set_date(self) -> None:
        self._dated_unix = self._wall_clock() // 1
        self.service.date_header = f"date: {formatdate(self._dated_unix, usegmt=True)}\r\n".encode()

    # --- GatewayPort

    def break_streams(
        self, worker: str, incarnation: int, cause: TransportKind, detail: str = ""
    ) -> int:
        """Fail over every attempt on that incarnation now, those of higher tiers first; returns how
        many there were."""
        found = self._attempts.get((worker, incarnation), ())
        attempts = by_tier(found, lambda attempt: attempt.arrival.tier)
        activity = self.activity.get((worker, incarnation))
        if activity is not None:
            self._pool.drop(activity)
        for attempt in attempts:
            attempt.worker_lost(cause, detail)
        if cause in (TransportKind.CORRUPT, TransportKind.ENGINE_DEAD):
            self._streams.leave(worker, incarnation, cause, detail)
        return len(attempts)

    def doubt_stream(self, worker: str, incarnation: int, request: str, detail: str = "") -> None:
        """See GatewayPort.doubt_stream."""
        for attempt in list(self._attempts.get((worker, incarnation), ())):
            if attempt.arrival.request == request:
                attempt.doubted(detail)
                return
        session = self._streams.open.get(request)
        if session is not None and session.stream.is_absent:
            session.doubted(detail)

    def silent_on(
        self, worker: str, incarnation: int, before: float
    ) -> dict[tuple[str, int], float]:
        """See GatewayPort.silent_on."""
        found = {}
        for attempt in self._attempts.get((worker, incarnation), ()):
            since = attempt.silence_began(before)
            if since < before:
                found[attempt.arrival.request, attempt.attempt] = since
        return found

    def withheld_on(self, worker: str, incarnation: int) -> list[tuple[str, int]]:
        """See GatewayPort.withheld_on."""
        found = self._attempts.get((worker, incarnation), ())
        return [(one.arrival.request, one.attempt) for one in found if one.withholds]

    def break_stream(
        self,
        worker: str,
        incarnation: int,
        request: str,
        attempt: int,
        cause: TransportKind,
        detail: str = "",
    ) -> bool:
        """See GatewayPort.break_stream."""
        for found in self._attempts.get((worker, incarnation), ()):
            if (found.arrival.request, found.attempt) == (request, attempt):
                found.worker_lost(cause, detail)
                return True
        return False

    def let_go(self, request: str) -> None:
        """Another replica serves the client of that stream now."""
        if (session := self._streams.open.get(request)) is not None:
            session.let_go()

    def is_absent(self, request: str) -> bool:
        """Whether that stream is here, and its client is not."""
        session = self._streams.open.get(request)
        return session is not None and session.stream.is_absent

    def delivered_on(self, worker: str, incarnation: int) -> dict[str, int]:
        """Requests under way on that incarnation, and the tokens the gateway has of each."""
        attempts = self._attempts.get((worker, incarnation), ())
        return {a.arrival.request: a.delivered for a in attempts}

    def movable_on(self, worker: str, incarnation: int) -> dict[str, int]:
        """Of these the ones that may be handed over now."""
        attempts = self._attempts.get((worker, incarnation), ())
        return {a.arrival.request: a.delivered for a in attempts if a.is_movable}

    def away_on(self, worker: str, incarnation: int) -> dict[str, int]:
        """Requests that run there for absent clients and can resume on another worker."""
        return self._streams.away_on(worker, incarnation)

    def movable_tokens(self, worker: str, incarnation: int, request: str) -> int | None:
        """The tokens of one that may be handed over now, or that runs there for an absent client."""
        for attempt in self._attempts.get((worker, incarnation), ()):
            if attempt.arrival.request == request and attempt.is_movable:
                return attempt.delivered
        return self._streams.away_on(worker, incarnation).get(request)

    def given_up(self, request: str, attempt: int) -> None:
        """The engine handed that attempt over, whose client may be away."""
        self._streams.given_up(request, attempt)
