"""What the connections of one gateway share: it judges requests by their heads, and answers each one
or starts its session.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from itertools import count

import structlog

from relume.controlplane.gateway.context import Context
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
from relume.controlplane.gateway.openai.body import (
    BYTES_PER_TOKEN,
    limit_output,
    parse,
    without_forbidden,
)
from relume.controlplane.gateway.openai.priority import checkpoint_weight
from relume.controlplane.gateway.request_session import RequestSession
from relume.controlplane.gateway.streams import Streams
from relume.controlplane.stream import error_codes, event_ids
from relume.controlplane.stream.arrival import Arrival
from relume.controlplane.stream.stream_data import RelayedRequest, Stream
from relume.events.log.errors import LogError
from relume.events.vocabulary.enums import Guarantee
from relume.events.wire.headers import PRIORITY_BYTES

log = structlog.get_logger("relume.gateway")

Delegate = Callable[[Request], Reply]

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_USABLE_ID = re.compile(rb"[A-Za-z0-9_.\-]{1,64}").fullmatch


class RequestService:
    """Offers `Service` to the connections.

    `boot` begins the names of requests. `is_alive` says whether the gateway's tasks run. `delegates`
    answer GETs of further exact paths.
    """

    def __init__(
        self,
        context: Context,
        streams: Streams,
        *,
        boot: str,
        started_unix: int,
        is_alive: Callable[[], bool],
        delegates: Mapping[str, Delegate] | None = None,
    ) -> None:
        self.config = context.config
        self.clock = context.clock
        self.counters = context.counters
        self.clients: set[ClientConnection] = set()
        self.bodies_bytes = 0
        self.draining = False
        self.date_header = b""
        self.cross_origin = CrossOrigin(context.config.allowed_origins)
        self.metrics: Callable[[], bytes] | None = None
        """Gives the text of /metrics; the owner of the gateway may set it."""
        self._context = context
        self._scheduler = context.scheduler
        self._streams = streams
        self._boot = boot
        self._started_unix = started_unix
        self._is_alive = is_alive
        self._delegates = {"/metrics": self._serve_metrics, **(delegates or {})}
        self._delegated = frozenset(self._delegates)
        self._keys = Keys(context.config.api_keys)
        self._numbers = count(1)

    # --- Service

    def identify(self, request: Request) -> None:
        given = request.headers.get(b"x-request-id")
        if given is not None and _USABLE_ID(given):
            request.request_id = given.decode()
        else:
            request.request_id = self.new_id()

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
            if parsed.runs_tools:
                return self._serve_relayed(request, connection)
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
            request=self.new_id(),
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
            return self.started(session)
        stream = Stream(
            arrival=arrival,
            path=request.path,
            response_id=request.request_id,
            body=parsed.body,
            limits=self.config,
            now=self.clock(),
        )
        return self.started(RequestSession(context, connection, stream))

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
            request=self.new_id(),
            model=model or self._only_model(optional=True),
            route=request.path,
            stream=False,
            prompt_tokens=len(request.body) // BYTES_PER_TOKEN + 1,
            max_tokens=0,
            verdict=Guarantee.RESTART,
            reason=routes.UNPROTECTED,
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
        return self.started(RequestSession(self._context, connection, stream))

    def started(self, session: RequestSession) -> Reply | RequestSession:
        """Start it; a reply refuses the request."""
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
            return local_answers.live(self._is_alive())
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

    def new_id(self) -> str:
        """A name for the next request, which no other gateway gives."""
        return f"{self._boot}-{next(self._numbers):x}"
