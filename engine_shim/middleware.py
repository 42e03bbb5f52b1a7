"""The worker protocol on top of vLLM's own HTTP handlers, as pure ASGI middleware.

Loaded with `vllm serve --middleware engine_shim.middleware.RelumeMiddleware`. Requests
without x-relume headers pass through untouched. The others run through the stock
handler, and what it answers is cut into frames (ARCHITECTURE.md, "Worker protocol").
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

from relume.engine_shim import frames, handover, identity, plugin
from relume.engine_shim.checkpointing import endpoints
from relume.engine_shim.detached import Bounds
from relume.engine_shim.envelope import Envelope, unpacked
from relume.engine_shim.envelope_links import EnvelopeLinks
from relume.engine_shim.framing import FramedResponse
from relume.engine_shim.generation import (
    CURRENT,
    Generation,
    MalformedDispatch,
    dispatch_record,
    number,
    parse_resume,
    request_id,
)
from relume.engine_shim.kept_report import KeptReport
from relume.engine_shim.reports import Ready
from relume.engine_shim.shelf import RELEASED, Gone, Shelf

logger = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

FRAMED = ("/v1/completions", "/v1/chat/completions")
STATE_PATH = "/relume/state"
CHECKPOINT_PATH = "/relume/checkpoint"
ATTACH_PATH = "/relume/attach"
RELEASE_PATH = "/relume/release"
PREFIX = b"x-relume-"

ENGINE_DEAD_EXIT = 71
ENGINE_POLL_S = 0.05
LAST_WORDS_S = 0.5
"""Between the engine's death and the process's: broken streams get their `:x` frame."""


class Retarget(msgspec.Struct, frozen=True):
    """Body of `POST /relume/checkpoint`."""

    request: str
    attempt: int
    incarnation: int
    holders: tuple[str, ...] = ()


class Attach(msgspec.Struct, frozen=True):
    """Body of `POST /relume/attach` and `/relume/release`: a kept stream, and the first token
    that is wanted of it. `also`: request, attempt and claim of others to be released."""

    request: str
    attempt: int
    incarnation: int
    claim: str
    tokens: int = 0
    also: tuple[tuple[str, int, str], ...] = ()


class RelumeMiddleware:
    """Outermost middleware of the engine's HTTP server."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self._app = app
        self._identity = identity.from_environment()
        self._companion: asyncio.Task[None] | None = None
        self._shelf = Shelf()
        self._envelopes: EnvelopeLinks | None = None
        plugin.register()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, self._watching_startup(scope, send))
        elif scope["type"] != "http":
            await self._app(scope, receive, send)
        elif scope["path"] == STATE_PATH:
            await _send_json(send, 200, self._state())
        elif scope["path"] == CHECKPOINT_PATH and scope["method"] == "POST":
            await self._retarget(receive, send)
        elif scope["path"] in (ATTACH_PATH, RELEASE_PATH) and scope["method"] == "POST":
            await self._kept(scope["path"], receive, send)
        elif scope["path"] == handover.PATH and scope["method"] == "POST":
            await self._hand_over(receive, send)
        else:
            await self._serve(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        ours = {k: v.decode("latin-1") for k, v in scope["headers"] if k.startswith(PREFIX)}
        if not ours:
            await self._app(scope, receive, send)
            return
        wanted = ours.get(b"x-relume-incarnation", "")
        if wanted and wanted != str(self._identity.incarnation):
            await _send_error(send, 409, "stale incarnation", self._identity.incarnation)
            return
        headers = [(k, v) for k, v in scope["headers"] if not k.startswith(PREFIX)]
        if b"x-relume-request" not in ours or scope["path"] not in FRAMED:
            await self._app({**scope, "headers": headers}, receive, send)
            return
        try:
            generation, receive, headers = await _open(ours, headers, receive, scope)
        except MalformedDispatch as malformed:
            await _send_error(send, 400, str(malformed))
            return
        scope = {**scope, "headers": headers}
        if b"x-relume-grace" in ours:
            await self._run_kept(scope, receive, send, generation, ours)
        else:
            await self._run(scope, receive, send, generation, ours)

    async def _run_kept(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        generation: Generation,
        ours: dict[bytes, str],
    ) -> None:
        """Run a request whose stream outlives its connection."""
        try:
            bounds = Bounds.of(ours[b"x-relume-grace"])
            sources = endpoints("envelope", ours.get(b"x-relume-envelope", ""))
            body = await _read(receive)
        except MalformedDispatch as malformed:
            await _send_error(send, 400, str(malformed))
            return
        if sources:
            envelope = await self._recalled(generation.request, sources)
            if envelope is None:
                await _send_error(send, 424, "nobody has the request any more")
                return
            scope = {**scope, "headers": envelope.headers(scope["headers"])}
            ours = {**ours, b"x-relume-created": envelope.created}
        else:
            response_id = dict(scope["headers"])[b"x-request-id"].decode("latin-1")
            created = ours.get(b"x-relume-created", "")
            envelope = Envelope(scope["path"], response_id, created, body)
        packed = envelope.packed()
        kept = self._shelf.keep(generation, bounds, ours.get(b"x-relume-claim", ""), packed)
        if sources:
            kept.preface = frames.envelope(packed)
        if self._envelopes is not None and generation.checkpoint:
            keeping = self._envelopes.keep(*kept.key, generation.checkpoint, packed)
            kept.held_back = asyncio.create_task(keeping)
        kept.begin(send)
        receive = kept.receiving(_replayed(envelope.body, receive))
        try:
            await self._run(scope, receive, kept.send, generation, ours)
        finally:
            await kept.settled()

    async def _recalled(self, request: str, sources: tuple[str, ...]) -> Envelope | None:
        """The request as its client sent it, from one of its holders."""
        packed = await self._envelopes.recall(request, sources) if self._envelopes else b""
        return unpacked(packed) if packed else None

    def _figures(self) -> dict[str, int]:
        """Of kept streams and envelopes, for the log."""
        links = self._envelopes.figures() if self._envelopes is not None else {}
        return {**self._shelf.figures(), **links}

    async def _kept(self, path: str, receive: Receive, send: Send) -> None:
        """Carry a kept stream to who asks for it, or erase it."""
        try:
            asked = msgspec.json.decode(await _read(receive), type=Attach)
            if asked.incarnation != self._identity.incarnation:
                await _send_error(send, 409, "stale incarnation", self._identity.incarnation)
                return
            self._shelf.release(asked.also)
            kept = self._shelf.find(asked.request, asked.attempt, asked.claim)
        except (MalformedDispatch, msgspec.MsgspecError) as malformed:
            await _send_error(send, 400, str(malformed))
            return
        except Gone as gone:
            await _send_error(send, gone.status, str(gone))
            return
        if path == RELEASE_PATH:
            self._shelf.forget(kept, RELEASED)
            await _send_json(send, 200, {"released": True})
            return
        carrying, sink = kept.attach(send, asked.tokens)
        watching = asyncio.create_task(_until_gone(receive))
        await asyncio.wait({carrying, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not carrying.done():
            kept.lost(sink)
        watching.cancel()

    async def _run(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        generation: Generation,
        ours: dict[bytes, str],
    ) -> None:
        response = FramedResponse(generation, send, ours.get(b"x-relume-created", ""))
        generation.flush = response.flush
        token = CURRENT.set(generation)
        try:
            await self._app(scope, receive, response.send)
        except Exception as error:  # process edge: the gateway must hear why, then uvicorn
            await response.fail(error)
            if not generation.moving:
                raise
        finally:
            CURRENT.reset(token)

    async def _retarget(self, receive: Receive, send: Send) -> None:
        """Other holders for a running attempt."""
        try:
            asked = msgspec.json.decode(await _read(receive), type=Retarget)
            request_id(asked.request)
            holders = endpoints("checkpoint", ",".join(asked.holders))
        except (MalformedDispatch, msgspec.MsgspecError) as malformed:
            await _send_error(send, 400, str(malformed))
            return
        if asked.incarnation != self._identity.incarnation:
            await _send_error(send, 409, "stale incarnation", self._identity.incarnation)
        elif await plugin.retarget(asked.request, asked.attempt, holders):
            envelope = self._shelf.envelope(asked.request, asked.attempt)
            if envelope and self._envelopes is not None:
                keeping = self._envelopes.keep(asked.request, asked.attempt, holders, envelope)
                self._shelf.spawn(keeping)
            await _send_json(send, 200, {"holders": holders})
        else:
            await _send_error(send, 404, "not here, or without checkpoints")

    async def _hand_over(self, receive: Receive, send: Send) -> None:
        try:
            body = await _read(receive)
        except MalformedDispatch:
            return  # nobody is there to be answered
        incarnation = self._identity.incarnation
        await _send_json(send, *await handover.answer(body, incarnation, plugin.hand_over))

    def _state(self) -> dict[str, Any]:
        return {
            "worker": self._identity.worker,
            "incarnation": self._identity.incarnation,
            **plugin.state(),
            "kept": self._shelf.figures(),
        }

    def _watching_startup(self, scope: Scope, send: Send) -> Send:
        async def watch(message: Message) -> None:
            if message["type"] == "lifespan.startup.complete":
                state = scope["app"].state
                self._envelopes = EnvelopeLinks.of(state.vllm_config)
                report = KeptReport(self._identity.incarnation, self._figures)
                self._companion = asyncio.create_task(_accompany(state, self._shelf, report))
            await send(message)

        return watch


async def _accompany(state: Any, shelf: Shelf, report: KeptReport) -> None:
    """Tells the agent once the server listens, and of kept streams; ends the process when the
    engine dies: vLLM's own watchdog needs up to five seconds, in which it would refuse
    requests."""
    try:
        await _announce(state)
    except Exception:  # process edge: an engine nobody hears of must not linger
        logger.exception("the engine did not become ready")
        os._exit(ENGINE_DEAD_EXIT)
    while state.engine_client.is_running:
        await asyncio.sleep(ENGINE_POLL_S)
        report.look(time.monotonic())
        if state.server.should_exit:
            shelf.close()
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
        )
    )


async def _open(
    ours: dict[bytes, str], headers: list[tuple[bytes, bytes]], receive: Receive, scope: Scope
) -> tuple[Generation, Receive, list[tuple[bytes, bytes]]]:
    """The generation the headers describe, and receive and headers for the stock handler.

    Raises MalformedDispatch.
    """
    request = request_id(ours[b"x-relume-request"])
    attempt = number("attempt", ours.get(b"x-relume-attempt", "1"))
    cached_tokens = number("cached", ours.get(b"x-relume-cached", "0"))
    dispatch = dispatch_record(ours.get(b"x-relume-dispatch", ""))
    resume, parsed = None, False
    if b"x-relume-resume" in ours:
        resume, body = parse_resume(ours[b"x-relume-resume"], await _read(receive))
        parsed = plugin.parses_output(scope, body)
        receive = _replayed(body, receive)
        headers = [(k, v) for k, v in headers if k != b"content-length"]
        headers.append((b"content-length", str(len(body)).encode()))
    if not any(key == b"x-request-id" for key, _ in headers):
        headers.append((b"x-request-id", request.encode()))
    generation = Generation(
        request,
        attempt,
        dispatch,
        resume,
        cached_tokens,
        endpoints("checkpoint", ours.get(b"x-relume-checkpoint", "")),
        endpoints("restore", ours.get(b"x-relume-restore", "")),
        number("priority", ours.get(b"x-relume-priority", "1")),
    )
    generation.stepwise = parsed
    generation.keeps_blocks = plugin.keeps_blocks()
    return generation, receive, headers


async def _read(receive: Receive) -> bytes:
    """The whole request body. Raises MalformedDispatch when the client leaves before its end."""
    parts = []
    while True:
        message = await receive()
        if message["type"] != "http.request":
            raise MalformedDispatch("resume", "the connection closed inside the body")
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
