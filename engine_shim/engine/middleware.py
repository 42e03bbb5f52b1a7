"""The worker protocol on top of vLLM's own HTTP handlers, as pure ASGI middleware.

Loaded with `vllm serve --middleware relume.engine_shim.engine.middleware.RelumeMiddleware`.
Requests without our headers pass through untouched. The others run through the stock
handler, and what it answers is cut into frames (`relume.events.wire.frames`).
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import msgspec

from relume.engine_shim import identity
from relume.engine_shim.checkpoints.envelope_links import EnvelopeLinks
from relume.engine_shim.engine import cross_check, plugin
from relume.engine_shim.engine.streams import handover, responses
from relume.engine_shim.engine.streams.buffer_report import BufferReport
from relume.engine_shim.engine.streams.buffered_streams import RELEASED, StreamBuffers, StreamGone
from relume.engine_shim.engine.streams.framing import FramedResponse
from relume.engine_shim.generation import CURRENT, Generation
from relume.events.failpoints import failpoint_client
from relume.events.failpoints.points import Failpoint
from relume.events.wire import frames, worker_calls
from relume.events.wire import headers as h
from relume.events.wire.envelope import Envelope, unpack
from relume.events.wire.errors import CallError, EnvelopeError, HeaderError
from relume.events.wire.reports import Ready
from relume.events.wire.resumption import parse_resume
from relume.events.wire.stream_origin import log_of

logger = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

FRAMED = ("/v1/completions", "/v1/chat/completions", "/v1/messages", responses.ROUTE)

ENGINE_DEAD_EXIT = 71
ENGINE_POLL_S = 0.05
LAST_WORDS_S = 0.5
"""Between the engine's death and the process's: broken streams get their `:x` frame."""


class RelumeMiddleware:
    """Outermost middleware of the engine's HTTP server."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self._app = app
        self._identity = identity.from_environment()
        self._companion: asyncio.Task[None] | None = None
        self._buffers = StreamBuffers()
        self._envelopes: EnvelopeLinks | None = None
        self._turning: asyncio.Task[None] | None = None
        plugin.register()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, self._watching_startup(scope, send))
        elif scope["type"] != "http":
            await self._app(scope, receive, send)
        elif scope["path"] == worker_calls.STATE_PATH:
            await _send_json(send, 200, self._state())
        elif scope["path"] == worker_calls.PROBE_PATH:
            await self._turned()
            await send({"type": "http.response.start", "status": 204, "headers": []})
            await send({"type": "http.response.body", "body": b""})
        elif scope["path"] == worker_calls.CHECKPOINT_PATH and scope["method"] == "POST":
            await self._retarget(receive, send)
        elif (
            scope["path"] in (worker_calls.ATTACH_PATH, worker_calls.RELEASE_PATH)
            and scope["method"] == "POST"
        ):
            await self._attached(scope["path"], receive, send)
        elif scope["path"] == worker_calls.ORIGIN_PATH and scope["method"] == "POST":
            await self._tell_origin(receive, send)
        elif scope["path"] == worker_calls.HANDOVER_PATH and scope["method"] == "POST":
            await self._hand_over(receive, send)
        elif scope["path"] == worker_calls.CANARY_PATH and scope["method"] == "POST":
            await self._canary(scope["app"].state.engine_client, receive, send)
        elif scope["path"] == worker_calls.CROSS_CHECK_PATH and scope["method"] == "POST":
            await self._cross_check(scope, receive, send)
        else:
            await self._serve(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        ours = {
            name.decode("latin-1"): value.decode("latin-1")
            for name, value in scope["headers"]
            if name.startswith(h.PREFIX_BYTES)
        }
        if not ours:
            await self._app(scope, receive, send)
            return
        wanted = ours.get(h.INCARNATION, "")
        if wanted and wanted != str(self._identity.incarnation):
            await _send_error(send, 409, "stale incarnation", self._identity.incarnation)
            return
        headers = [(k, v) for k, v in scope["headers"] if not k.startswith(h.PREFIX_BYTES)]
        if h.REQUEST not in ours or scope["path"] not in FRAMED:
            await self._app({**scope, "headers": headers}, receive, send)
            return
        if failpoint_client.active:
            point, name = Failpoint.ENGINE_REQUEST, ours[h.REQUEST]
            await failpoint_client.reach_async(point, request=name)
        try:
            generation, receive, headers = await _open(ours, headers, receive, scope)
        except HeaderError as malformed:
            await _send_error(send, 400, str(malformed))
            return
        scope = {**scope, "headers": headers}
        if h.GRACE in ours:
            await self._run_buffered(scope, receive, send, generation, ours)
        else:
            await self._run(scope, receive, send, generation, ours)

    async def _run_buffered(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        generation: Generation,
        ours: dict[str, str],
    ) -> None:
        """Run a request whose stream outlives its connection."""
        try:
            bounds = h.Grace.parse(ours[h.GRACE])
            sources = h.parse_endpoints(h.ENVELOPE, ours.get(h.ENVELOPE, ""))
            body = await _read(receive)
        except HeaderError as malformed:
            await _send_error(send, 400, str(malformed))
            return
        if sources:
            envelope = await self._recalled(generation.request, sources)
            if envelope is None:
                await _send_error(send, 424, "no holder has the request any more")
                return
            scope = {**scope, "headers": envelope.headers(scope["headers"])}
            ours = {**ours, h.CREATED: envelope.created}
            origin = ours.get(h.ORIGIN, envelope.origin)
            envelope = msgspec.structs.replace(envelope, origin=origin)
        else:
            response_id = dict(scope["headers"])[b"x-request-id"].decode("latin-1")
            created = ours.get(h.CREATED, "")
            origin = ours.get(h.ORIGIN, "")
            envelope = Envelope(scope["path"], response_id, created, body, origin)
        packed = envelope.pack()
        buffer = self._buffers.keep(generation, bounds, ours.get(h.CLAIM, ""), packed)
        if sources:
            buffer.preface = frames.encode_envelope(packed)
        if self._envelopes is not None and generation.checkpoint:
            keeping = self._envelopes.keep(*buffer.key, generation.checkpoint, packed)
            buffer.held_back = asyncio.create_task(keeping)
        buffer.begin(send)
        receive = buffer.receiving(_replayed(envelope.body, receive))
        try:
            await self._run(scope, receive, buffer.send, generation, ours)
        finally:
            await buffer.settled()

    async def _recalled(self, request: str, sources: tuple[str, ...]) -> Envelope | None:
        """The request as its client sent it, from one of its holders."""
        packed = await self._envelopes.recall(request, sources) if self._envelopes else b""
        return unpack(packed) if packed else None

    def _figures(self) -> dict[str, int]:
        """Statistics of buffered streams and envelopes, for the log."""
        links = self._envelopes.figures() if self._envelopes is not None else {}
        return {**self._buffers.figures(), **links}

    async def _attached(self, path: str, receive: Receive, send: Send) -> None:
        """Send a buffered stream to the client that resumes it, or erase it."""
        try:
            call = worker_calls.decode(await _read(receive), worker_calls.Attach)
            if call.incarnation != self._identity.incarnation:
                await _send_error(send, 409, "stale incarnation", self._identity.incarnation)
                return
            self._buffers.release(call.also)
            buffer = self._buffers.find(call.request, call.attempt, call.claim)
        except (HeaderError, CallError) as malformed:
            await _send_error(send, 400, str(malformed))
            return
        except StreamGone as gone:
            await _send_error(send, gone.status, str(gone))
            return
        if path == worker_calls.RELEASE_PATH:
            self._buffers.forget(buffer, RELEASED)
            await _send_json(send, 200, {"released": True})
            return
        carrying, sink = buffer.attach(send, call.tokens, call.log)
        watching = asyncio.create_task(_until_gone(receive))
        await asyncio.wait({carrying, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not carrying.done():
            buffer.lost(sink)
        watching.cancel()

    async def _run(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        generation: Generation,
        ours: dict[str, str],
    ) -> None:
        response = FramedResponse(generation, send, ours.get(h.CREATED, ""))
        generation.flush = response.flush
        token = CURRENT.set(generation)
        try:
            await self._app(scope, receive, response.send)
        except Exception as error:  # process edge: the gateway must hear why, then uvicorn
            refused = await response.fail(error)
            if not (refused or generation.moving):
                raise
        finally:
            CURRENT.reset(token)

    async def _retarget(self, receive: Receive, send: Send) -> None:
        """Other holders for a running attempt."""
        try:
            call = worker_calls.decode(await _read(receive), worker_calls.Retarget)
        except (HeaderError, CallError) as malformed:
            await _send_error(send, 400, str(malformed))
            return
        if call.incarnation != self._identity.incarnation:
            await _send_error(send, 409, "stale incarnation", self._identity.incarnation)
        elif await plugin.retarget(call.request, call.attempt, call.holders):
            envelope = self._buffers.envelope(call.request, call.attempt)
            if envelope and self._envelopes is not None:
                keeping = self._envelopes.keep(call.request, call.attempt, call.holders, envelope)
                self._buffers.spawn(keeping)
            await _send_json(send, 200, {"holders": call.holders})
        else:
            await _send_error(send, 404, "not here, or without checkpoints")

    async def _tell_origin(self, receive: Receive, send: Send) -> None:
        """Where a stream began, for a replica whose log does not name it."""
        try:
            call = worker_calls.decode(await _read(receive), worker_calls.OriginRequest)
        except (HeaderError, CallError) as malformed:
            await _send_error(send, 400, str(malformed))
            return
        if call.incarnation != self._identity.incarnation:
            await _send_error(send, 409, "stale incarnation", self._identity.incarnation)
            return
        found = self._buffers.origin(call.request)
        if found is None and call.holders:
            try:
                envelope = await self._recalled(call.request, call.holders)
            except EnvelopeError:
                envelope = None
            origin = envelope.origin if envelope is not None else ""
            found = worker_calls.OriginAnswered(origin, log_of(origin)) if origin else None
        if found is None:
            await _send_error(send, 404, "this stream is not here, or began before origins")
        else:
            await _send_json(send, 200, msgspec.structs.asdict(found))

    async def _hand_over(self, receive: Receive, send: Send) -> None:
        try:
            body = await _read(receive)
        except HeaderError:
            return  # there is no client to answer
        incarnation = self._identity.incarnation
        await _send_json(send, *await handover.answer(body, incarnation, plugin.hand_over))

    async def _canary(self, engine: Any, receive: Receive, send: Send) -> None:
        """A canary of the agent."""
        try:
            body = await _read(receive)
        except HeaderError:
            return  # there is no client to answer
        incarnation = self._identity.incarnation
        await _send_json(send, *await plugin.answer_canary(engine, body, incarnation))

    async def _cross_check(self, scope: Scope, receive: Receive, send: Send) -> None:
        """A finished request, which a replica has answered again."""
        try:
            body = await _read(receive)
        except HeaderError:
            return  # there is no client to answer
        call = cross_check.parse(body, self._identity.incarnation, FRAMED)
        if isinstance(call, str):
            is_stale = call == cross_check.STALE
            await _send_error(send, 409 if is_stale else 400, call, self._identity.incarnation)
            return
        receive = _replayed(call.body.encode(), receive)
        answer = await cross_check.answer(self._app, scope, receive, call)
        await _send_json(send, 200, msgspec.structs.asdict(answer))

    async def _turned(self) -> None:
        """Wait for a turn of the engine's loop. Probes share one: those to an engine that hangs
        must not pile up."""
        if self._turning is None or self._turning.done():
            self._turning = asyncio.create_task(plugin.turn())
        await asyncio.shield(self._turning)

    def _state(self) -> dict[str, Any]:
        return {
            "worker": self._identity.worker,
            "incarnation": self._identity.incarnation,
            **plugin.state(),
            "kept": self._buffers.figures(),
        }

    def _watching_startup(self, scope: Scope, send: Send) -> Send:
        async def watch(message: Message) -> None:
            if message["type"] == "lifespan.startup.complete":
                state = scope["app"].state
                self._envelopes = EnvelopeLinks.of(state.vllm_config)
                report = BufferReport(self._identity.incarnation, self._figures)
                self._companion = asyncio.create_task(_accompany(state, self._buffers, report))
            await send(message)

        return watch


async def _accompany(state: Any, buffers: StreamBuffers, report: BufferReport) -> None:
    """Reports to the agent when the server listens, and the buffered streams; ends the process when
    the engine dies: vLLM's own watchdog needs up to five seconds, in which it would refuse
    requests."""
    try:
        await _announce(state)
    except Exception:  # process edge: an engine that cannot report must not linger
        logger.exception("the engine did not become ready")
        os._exit(ENGINE_DEAD_EXIT)
    while state.engine_client.is_running:
        await asyncio.sleep(ENGINE_POLL_S)
        report.look(time.monotonic())
        if state.server.should_exit:
            buffers.close()
    await asyncio.sleep(LAST_WORDS_S)
    os._exit(0 if state.server.should_exit else ENGINE_DEAD_EXIT)


async def _announce(state: Any) -> None:
    """uvicorn says that it listens by a flag only."""
    while not getattr(getattr(state, "server", None), "started", False):
        await asyncio.sleep(0.005)
    await plugin.test_exactness(state.engine_client)
    config, args = state.vllm_config, state.args
    names = args.served_model_name or [args.model]
    plugin.announce(
        Ready(
            port=args.port,
            max_model_len=config.model_config.max_model_len,
            block_size=config.cache_config.block_size,
            kv_blocks=config.cache_config.num_gpu_blocks or 0,
            model=names[0],
            vllm=plugin.vllm_version(),
            exact=plugin.exact(),
            hardware=plugin.hardware(config.parallel_config.world_size),
            step_tokens=config.scheduler_config.max_num_batched_tokens,
            max_seqs=config.scheduler_config.max_num_seqs,
        )
    )


async def _open(
    ours: dict[str, str], headers: list[tuple[bytes, bytes]], receive: Receive, scope: Scope
) -> tuple[Generation, Receive, list[tuple[bytes, bytes]]]:
    """The generation the headers describe, and receive and headers for the stock handler.

    Raises HeaderError.
    """
    request = h.parse_request(ours[h.REQUEST])
    attempt = h.parse_number(h.ATTEMPT, ours.get(h.ATTEMPT, "1"))
    cached_tokens = h.parse_number(h.CACHED, ours.get(h.CACHED, "0"))
    dispatch = h.decode_dispatch(ours.get(h.DISPATCH, ""))
    resume, parsed = None, False
    if h.RESUME in ours:
        resume, body = parse_resume(ours[h.RESUME], await _read(receive))
        parsed = plugin.parses_output(scope, body)
        receive, headers = _with_body(body, receive, headers)
    if not any(key == b"x-request-id" for key, _ in headers):
        headers.append((b"x-request-id", request.encode()))
    next_event = -1
    if scope["path"] == responses.ROUTE:
        if h.NEXT_EVENT in ours:
            next_event = h.parse_number(h.NEXT_EVENT, ours[h.NEXT_EVENT])
        response_id = dict(headers)[b"x-request-id"].decode("latin-1")
        body = responses.named(await _read(receive), response_id)
        receive, headers = _with_body(body, receive, headers)
    generation = Generation(
        request=request,
        attempt=attempt,
        dispatch=dispatch,
        resume=resume,
        cached_tokens=cached_tokens,
        checkpoint=h.parse_endpoints(h.CHECKPOINT, ours.get(h.CHECKPOINT, "")),
        restore=h.parse_endpoints(h.RESTORE, ours.get(h.RESTORE, "")),
        priority=h.parse_number(h.PRIORITY, ours.get(h.PRIORITY, "1")),
    )
    generation.stepwise = parsed or (scope["path"] == responses.ROUTE and next_event < 0)
    generation.next_event = next_event
    generation.keeps_blocks = plugin.keeps_blocks()
    generation.uncached = ours.get(h.UNCACHED) == "1"
    return generation, receive, headers


def _with_body(
    body: bytes, receive: Receive, headers: list[tuple[bytes, bytes]]
) -> tuple[Receive, list[tuple[bytes, bytes]]]:
    """`receive` and headers of the call with another body."""
    others = [(k, v) for k, v in headers if k != b"content-length"]
    return _replayed(body, receive), [*others, (b"content-length", b"%d" % len(body))]


async def _read(receive: Receive) -> bytes:
    """The whole request body. Raises HeaderError when the client leaves before its end."""
    parts = []
    while True:
        message = await receive()
        if message["type"] != "http.request":
            raise HeaderError("body", "the connection closed inside the body")
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(parts)


async def _until_gone(receive: Receive) -> None:
    """Wait until the connection is lost or its answer is complete."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _replayed(body: bytes, receive: Receive) -> Receive:
    """`receive` that gives `body` first: later calls still see the client disconnect."""
    unread = [body]

    async def replay() -> Message:
        if unread:
            return {"type": "http.request", "body": unread.pop(), "more_body": False}
        return await receive()

    return replay


async def _send_json(send: Send, status: int, content: dict[str, Any]) -> None:
    body = json.dumps(content).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _send_error(send: Send, status: int, message: str, incarnation: int = 0) -> None:
    error = {"message": message, "type": "relume", "code": status, "param": None}
    await _send_json(send, status, {"error": error, "incarnation": incarnation})
