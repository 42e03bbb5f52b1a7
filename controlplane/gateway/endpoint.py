"""The gateway: listens, judges requests by their heads, and starts their sessions.

Offers `GatewayPort` to the stall watch. Everything runs on one event loop; the clock is
the loop's monotonic one unless a test brings its own.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Callable, Coroutine, Mapping
from contextlib import nullcontext
from email.utils import formatdate
from itertools import count
from typing import Any

import structlog

from relume.controlplane.gateway.config import GatewayConfig
from relume.controlplane.gateway.context import Context, Counters, LiveAttempt, StopCounts
from relume.controlplane.gateway.errors import ClientError
from relume.controlplane.gateway.http import local_answers, routes
from relume.controlplane.gateway.http.api_keys import Keys
from relume.controlplane.gateway.http.cross_origin import CrossOrigin
from relume.controlplane.gateway.http.reading import Request, bodies_full, too_large
from relume.controlplane.gateway.http.replies import Reply, client_error_reply, error_reply
from relume.controlplane.gateway.http.request_headers import (
    may_be_json,
    model_of,
    require_json,
    session_of,
    share_of,
    tier_of,
    trace_of,
    ttft_of,
    wants_resumable,
)
from relume.controlplane.gateway.http.server import ClientConnection
from relume.controlplane.gateway.http.upstream import UpstreamPool
from relume.controlplane.gateway.openai.body import (
    BYTES_PER_TOKEN,
    limit_output,
    parse,
    without_forbidden,
)
from relume.controlplane.gateway.openai.priority import checkpoint_weight
from relume.controlplane.gateway.openai.token_counts import Tokens
from relume.controlplane.gateway.ports import Activity, SchedulerPort
from relume.controlplane.gateway.request_session import RequestSession
from relume.controlplane.gateway.streams import Streams
from relume.controlplane.stream import error_codes, event_ids
from relume.controlplane.stream.arrival import Arrival
from relume.controlplane.stream.stream_data import RelayedRequest, Stream
from relume.events.log.errors import LogError
from relume.events.vocabulary.enums import Guarantee, TransportKind
from relume.events.wire.headers import PRIORITY_BYTES
from relume.policies.admission.admission_queue import by_tier

log = structlog.get_logger("relume.gateway")

Delegate = Callable[[Request], Reply]

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_USABLE_ID = re.compile(rb"[A-Za-z0-9_.\-]{1,64}").fullmatch


def _system_entropy(size: int) -> bytes:
    """Looked up at each call: simulated processes have an `os.urandom` of their own."""
    return os.urandom(size)


class Gateway:
    """The OpenAI endpoint of one control plane replica.

    `metrics` gives the text of /metrics, `delegates` answer GETs of further exact paths in
    its stead. `clock` gives monotonic seconds on the event loop's scale, `entropy(n)` returns n
    random bytes.
    """

    def __init__(
        self,
        scheduler: SchedulerPort,
        config: GatewayConfig,
        *,
        metrics: Callable[[], bytes] | None = None,
        delegates: Mapping[str, Delegate] | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        boot: str = "",
        entropy: Callable[[int], bytes] = _system_entropy,
    ) -> None:
        config.refuse_unsafe_bind()
        self.config = config
        self.clock = clock
        self.counters = Counters()
        self.clients: set[ClientConnection] = set()
        self.bodies_bytes = 0
        self.draining = False
        self.date_header = b""
        self._dated_unix = 0.0
        self._wall_clock = wall_clock
        self._started_unix = int(wall_clock())
        self._scheduler = scheduler
        self.metrics = metrics
        self._delegates = {"/metrics": self._serve_metrics, **(delegates or {})}
        self._delegated = frozenset(self._delegates)
        self._keys = Keys(config.api_keys)
        self.cross_origin = CrossOrigin(config.allowed_origins)
        self._boot = boot or entropy(6).hex()
        self._numbers = count(1)
        self._pool = UpstreamPool(
            clock,
            keepalive_s=config.upstream_keepalive_s,
            connect_timeout_s=config.connect_timeout_s,
            silence_s=config.upstream_silence_s,
            max_idle_per_engine=config.max_idle_per_engine,
        )
        self.activity: dict[tuple[str, int], Activity] = self._pool.activity
        self._attempts: dict[tuple[str, int], dict[LiveAttempt, None]] = {}
        self._streams = Streams(config.resume, wall_clock, entropy)
        wait_s = config.tokenize_wait_s
        self.tokens = Tokens(config.tokenizer, wait_s, clock) if config.tokenizer else None
        """Counts prompts; None: they are estimated."""
        self._context = Context(
            scheduler=scheduler,
            pool=self._pool,
            config=config,
            clock=clock,
            spawn=self._spawn,
            counters=self.counters,
            attempts=self._attempts,
            tokens=self.tokens,
        )
        self._server: asyncio.Server | None = None
        self._port = 0
        self._group: asyncio.TaskGroup | None = None
        self._runner: asyncio.Task[None] | None = None
        self._failure_raised = False  # `join` raised what broke the gateway
        self._stopping = asyncio.Event()
        self._ended_before = self._moved = 0  # requests when the gateway began to stop, and since

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
                lambda: ClientConnection(self),
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
            for client in list(self.clients):
                client.close_when_idle()
            if not self.counters.in_flight:
                return True
            if self.clock() >= until:
                return False
            await asyncio.sleep(0.05)

    def _begin_stop(self) -> None:
        if not self.draining:
            self.draining = True
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
        for client in list(self.clients):
            client.abort()
        # connection_lost runs in the next turns of the loop and ends the sessions
        for _ in range(50):
            if not self.clients:
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
        for client in [c for c in self.clients if now > c.deadline]:
            client.expire(now)
        self._streams.expire(now)
        self._streams.releases.flush(self._context)
        self._pool.sweep(now)

    def _set_date(self) -> None:
        self._dated_unix = self._wall_clock() // 1
        self.date_header = f"date: {formatdate(self._dated_unix, usegmt=True)}\r\n".encode()

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

    # --- Service, for the connections

    def identify(self, request: Request) -> None:
        given = request.headers.get(b"x-request-id")
        if given is not None and _USABLE_ID(given):
            request.request_id = given.decode()
        else:
            request.request_id = self._new_id()

    def admit(self, request: Request, expected_body: int | None) -> Reply | None:
        self.identify(request)
        path = request.path
        needs_key = path not in routes.OPEN and not self.cross_origin.is_preflight(request)
        if needs_key and self._keys.tenant_of(request) is None:
            return self._refused(
                error_reply(401, "missing or wrong API key", code="invalid_api_key")
            )
        route = routes.find(path, self._delegated)
        if route is None:
            return self._refused(error_reply(404, f"no route {path[:200]}", code="not_found"))
        if request.method not in route.methods:
            allow = ("allow", ", ".join(route.methods))
            return self._refused(error_reply(405, f"{path} takes {allow[1]}", headers=(allow,)))
        if route.kind in ("local", "delegated") or request.method == "OPTIONS":
            if expected_body:
                return self._refused(error_reply(400, "this route takes no body"))
            return None
        size = expected_body or 0
        if size > self.config.max_body_bytes:
            return self._refused(too_large(self.config))
        if self.bodies_bytes + size > self.config.max_bodies_bytes:
            return self._refused(bodies_full(self.config))
        if self.counters.in_flight >= self.config.max_requests:
            busy = "too many requests are under way; try again"
            return self._refused(error_reply(429, busy, retry_after_s=1, code="overloaded"))
        return None

    def serve(self, request: Request, connection: ClientConnection) -> Reply | RequestSession:
        route = routes.find(request.path, self._delegated)
        assert route is not None
        if self.cross_origin.is_preflight(request):
            return self.cross_origin.preflight(request, route.methods)
        if request.method == "OPTIONS":
            return Reply(status=204, headers=(("allow", ", ".join(route.methods)),))
        if route.kind == "protected":
            return self._serve_protected(request, connection)
        if route.kind == "relayed":
            return self._serve_relayed(request, connection)
        if route.kind == "delegated":
            return self._delegates[request.path](request)
        return self._serve_local(request)

    # --- routes

    def _serve_protected(
        self, request: Request, connection: ClientConnection
    ) -> Reply | RequestSession:
        shown = event_ids.parse(request.headers.get(b"last-event-id", b"").decode("latin-1"))
        if shown is not None:
            return self._serve_returned(shown, request, connection)
        try:
            require_json(request)
            api = routes.PROTECTED[request.path]
            parsed = parse(request.body, api)
            model = parsed.model or self._only_model()
            if limit := self._scheduler.waiting.output_limit(model):
                parsed = limit_output(parsed, limit, api)
            weight = checkpoint_weight(request.headers.get(PRIORITY_BYTES), parsed.priority)
            tier, ttft_ms = tier_of(request), ttft_of(request)
            tenant = self._keys.tenant_of(request) or ""
            share = share_of(request, tenant)
        except ClientError as error:
            return self._refused(client_error_reply(error))
        arrival = Arrival(
            request=self._new_id(),
            model=model,
            route=request.path,
            stream=parsed.stream,
            prompt_tokens=parsed.prompt_tokens,
            max_tokens=parsed.max_tokens,
            verdict=parsed.verdict,
            reason=parsed.reason,
            estimated=parsed.estimated,
            tenant=tenant,
            client_id=request.request_id,
            trace=trace_of(request),
            needs=parsed.needs,
            fallback=parsed.fallback,
            priority=weight,
            session=session_of(request, tenant),
            tier=tier,
            countable=parsed.countable,
            share=share,
            ttft_ms=ttft_ms,
            output_limit=parsed.output_limit,
            may_keep=parsed.may_keep and not {tenant, share} & self.config.unkept_tenants,
        )
        context = self._context
        if parsed.stream and wants_resumable(request) and "choices" not in parsed.needs:
            session = self._streams.new(
                context, connection, arrival, request.path, request.request_id, parsed.body
            )
            return self._started(session)
        stream = Stream(
            arrival=arrival,
            path=request.path,
            response_id=request.request_id,
            body=parsed.body,
            limits=self.config,
            now=self.clock(),
        )
        return self._started(RequestSession(context, connection, stream))

    def _serve_returned(
        self, shown: event_ids.EventId, request: Request, connection: ClientConnection
    ) -> Reply | RequestSession:
        tenant = self._keys.tenant_of(request) or ""
        if self.draining and shown.request not in self._streams.open:
            retry_after_s = self.config.retry_after_s  # another replica need not leave it again
            return self._refused(
                error_reply(503, error_codes.DRAINING, retry_after_s=retry_after_s)
            )
        try:
            served = self._streams.returned(
                self._context, connection, shown, request.path, request.request_id, tenant
            )
        except LogError as error:
            log.error("return_not_written", reason=str(error), request=shown.request)
            return self._unwritable(error_codes.NO_RESUMPTION)
        return self._refused(served) if isinstance(served, Reply) else served

    def _serve_relayed(
        self, request: Request, connection: ClientConnection
    ) -> Reply | RequestSession:
        body = request.body
        tenant = self._keys.tenant_of(request) or ""
        try:
            if body and may_be_json(request):
                body = without_forbidden(body)
            tier, ttft_ms, share = tier_of(request), ttft_of(request), share_of(request, tenant)
        except ClientError as error:
            return self._refused(client_error_reply(error))
        model = model_of(request)
        arrival = Arrival(
            request=self._new_id(),
            model=model or self._only_model(optional=True),
            route=request.path,
            stream=False,
            prompt_tokens=len(request.body) // BYTES_PER_TOKEN + 1,
            max_tokens=0,
            verdict=Guarantee.RESTART,
            reason="unprotected route",
            estimated=True,
            tenant=tenant,
            client_id=request.request_id,
            trace=trace_of(request),
            protected=False,
            tier=tier,
            share=share,
            ttft_ms=ttft_ms,
        )
        headers = tuple(
            (name.decode(), request.headers[name].decode("latin-1"))
            for name in (b"content-type", b"content-encoding", b"accept")
            if name in request.headers
        )
        target = f"{request.path}?{request.query}" if request.query else request.path
        stream = Stream(
            arrival=arrival,
            path=target,
            response_id=request.request_id,
            body=body,
            limits=self.config,
            now=self.clock(),
            relayed=RelayedRequest(request.method, headers),
        )
        return self._started(RequestSession(self._context, connection, stream))

    def _started(self, session: RequestSession) -> Reply | RequestSession:
        try:
            session.start()
        except LogError as error:  # nothing was accepted: the log does not take it
            log.error("request_not_written", reason=str(error), **session.about())
            return self._unwritable(error_codes.NO_LOG)
        return session

    def _unwritable(self, message: str) -> Reply:
        retry_after_s = self.config.retry_after_s
        return self._refused(error_reply(503, message, retry_after_s=retry_after_s))

    def _serve_local(self, request: Request) -> Reply:
        if request.path == routes.LIVE:
            return local_answers.live(self._runner is not None and not self._runner.done())
        if request.path == routes.READY:
            return local_answers.ready(self.draining, self.config.retry_after_s)
        if request.path == routes.HEALTH:
            retry_after_s = self.config.retry_after_s
            return local_answers.health(self.draining, self._scheduler.ready(), retry_after_s)
        scheduler = self._scheduler
        return local_answers.models(
            request.path, scheduler.models(), scheduler.model_lengths(), self._started_unix
        )

    def _serve_metrics(self, _request: Request) -> Reply:
        if self.metrics is None:
            return error_reply(404, "no metrics are served here", code="not_found")
        return Reply(status=200, body=self.metrics(), content_type=METRICS_TYPE)

    def _only_model(self, optional: bool = False) -> str:
        """The model meant when none is named: the only one there is."""
        models = self._scheduler.models()
        if len(models) == 1:
            return models[0]
        if optional or not models:
            return ""
        raise ClientError(400, "'model' is required", "model", "missing_required_parameter")

    # --- small parts

    def _refused(self, reply: Reply) -> Reply:
        self.counters.refused += 1
        return reply

    def _new_id(self) -> str:
        return f"{self._boot}-{next(self._numbers):x}"
