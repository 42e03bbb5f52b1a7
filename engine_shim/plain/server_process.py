"""A worker whose engine is any OpenAI-compatible server, without our plugin in it.

`python -m relume.engine_shim.agent --host-kind plain --backend URL ...` runs this process in the engine's
place: it serves the worker protocol to gateways, forwards requests to the server, and reports what
of their course it can see (`observed_load`). It serves when the server names the model, and ends,
as an engine that died, when the server is not to be reached.

The server needs nothing of Relume: vLLM, SGLang, TGI or another fleet. Limits: its streams cannot
resume elsewhere once the client has a part of them, it cannot continue those of others, and it has
no checkpoints.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from aiohttp import web

from relume.engine_shim import identity
from relume.engine_shim.engine.progress import Progress
from relume.engine_shim.engine.reporter import Reporter
from relume.engine_shim.plain.observed_load import PlainAccount
from relume.engine_shim.plain.stream_frames import EventTooLong, PlainStream
from relume.events.decode_errors import UNREADABLE
from relume.events.log import codec
from relume.events.log.errors import LogError
from relume.events.vocabulary import EngineStep, RouteDecided
from relume.events.vocabulary.enums import EngineKind
from relume.events.wire import frames
from relume.events.wire import headers as h
from relume.events.wire.engine_environment import EngineIdentity
from relume.events.wire.errors import HeaderError
from relume.events.wire.reports import Hello, Ready, frame, ready_frame, with_lost

FRAMED = ("/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses")
HEALTH = ("/health", "/v1/models")
LOOK_S = 1.0
ANSWER_S = 3.0
GONE_AFTER = 3
"""Looks in a row without an answer."""
GONE_EXIT = 71
MAX_BODY_BYTES = 64 << 20
PASSED_ON = ("content-type", "accept", "x-request-id", "traceparent", "tracestate")
UNREPEATED = ("transfer-encoding", "content-length", "connection", "keep-alive")


class BackendUnusable(RuntimeError):
    """The server answers, but cannot serve what it is to serve."""


class Backend:
    """The plain server: its address, its credentials, whether it is there."""

    def __init__(self, url: str, key: str = "") -> None:
        self.url = url.rstrip("/")
        self.headers = {"authorization": f"Bearer {key}"} if key else {}
        self._health = ""
        self._session: aiohttp.ClientSession | None = None

    @property
    def session(self) -> aiohttp.ClientSession:
        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=ANSWER_S)
            connector = aiohttp.TCPConnector(limit=0)
            self._session = aiohttp.ClientSession(
                timeout=timeout, connector=connector, auto_decompress=False
            )
        return self._session

    async def model(self, wanted: str) -> dict[str, Any]:
        """What the server says of the model. Raises BackendUnusable, aiohttp.ClientError,
        TimeoutError."""
        url = f"{self.url}/v1/models"
        limit = aiohttp.ClientTimeout(total=ANSWER_S)
        async with self.session.get(url, headers=self.headers, timeout=limit) as answer:
            if answer.status in (401, 403):
                raise BackendUnusable(f"{url} answers {answer.status}: give --backend-key-file")
            if answer.status != 200:
                raise aiohttp.ClientError(f"{url} answers {answer.status}")
            try:
                served = json.loads(await answer.read())["data"]
                named = {str(model["id"]): model for model in served}
            except (ValueError, KeyError, TypeError) as error:
                raise BackendUnusable(f"{url} gives no list of models: {error!r}") from None
        if wanted not in named:
            raise BackendUnusable(
                f"{url} serves {', '.join(sorted(named)) or 'nothing'}, not {wanted!r}: name one "
                "of these by --served-model-name"
            )
        return dict(named[wanted])

    async def answers(self) -> bool:
        """Whether it answers a health check; an unknown path is replaced by another check."""
        limit = aiohttp.ClientTimeout(total=ANSWER_S)
        for path in (self._health,) if self._health else HEALTH:
            try:
                url = self.url + path
                async with self.session.get(url, headers=self.headers, timeout=limit) as answer:
                    if answer.status < 400:
                        self._health = path
                        return True
            except (aiohttp.ClientError, TimeoutError, OSError):
                return False
        return False

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()


class PlainWorker:
    """Serves the worker protocol in front of one `Backend`."""

    def __init__(
        self, me: EngineIdentity, backend: Backend, account: PlainAccount, page: Progress
    ) -> None:
        """`page`: where the agent requests a statement of all requests."""
        self._me = me
        self._page = page
        self._statements = page.statements()
        self._backend = backend
        self._account = account
        self._alive_us = 0
        self._alive_at = time.monotonic()

    def application(self) -> web.Application:
        """All its routes."""
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.router.add_get("/relume/state", self._state)
        for path in FRAMED:
            app.router.add_post(path, self._serve)
        app.router.add_route("*", "/relume/{rest:.*}", _not_here)
        app.router.add_route("*", "/{rest:.*}", self._pass_on)
        return app

    async def _state(self, request: web.Request) -> web.Response:
        """The stall watch's probe is forwarded: the time while the server answers replaces the CPU
        time of an engine, since nothing else shows that it works."""
        if await self._backend.answers():
            now = time.monotonic()
            self._alive_us += max(int((now - self._alive_at) * 1e6), 1)
            self._alive_at = now
        account = self._account
        return web.json_response(
            {
                "worker": self._me.worker,
                "incarnation": self._me.incarnation,
                "steps": account.records,
                "step_age_us": 0,
                "cpu_us": self._alive_us,
                "running": account.running,
                "waiting": account.waiting,
                "kv_used": 0,
                "unfinished": account.running + account.waiting,
                "exact": {},
            }
        )

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        ours = {k.lower(): v for k, v in request.headers.items() if k.lower().startswith(h.PREFIX)}
        if h.REQUEST not in ours:
            return await self._pass_on(request)
        if ours.get(h.INCARNATION, "") not in ("", str(self._me.incarnation)):
            return _error(409, "stale incarnation")
        if h.RESUME in ours or h.ENVELOPE in ours:
            return _error(422, "a plain server cannot continue a request that began elsewhere")
        try:
            dispatch = h.decode_dispatch(ours.get(h.DISPATCH, ""))
            attempt = h.parse_number(h.ATTEMPT, ours.get(h.ATTEMPT, "1"))
        except HeaderError as error:
            return _error(400, str(error))
        body = await request.read()
        number = self._account.begin(ours[h.REQUEST], attempt, _prompt_tokens(dispatch), dispatch)
        reason = "abort"
        try:
            response, reason = await self._forward(request, body, number)
            return response
        finally:
            self._account.end(number, reason)

    async def _forward(
        self, request: web.Request, body: bytes, number: int
    ) -> tuple[web.StreamResponse, str]:
        """The server's answer, framed, and how the request ended."""
        response: web.StreamResponse | None = None
        try:
            url = self._backend.url + request.rel_url.path_qs
            headers = {**_passed_on(request), **self._backend.headers}
            async with self._backend.session.post(url, data=body, headers=headers) as answer:
                if answer.status != 200:
                    return _plain_response(answer, await answer.read()), "error"
                kind = answer.headers.get("content-type", "")
                response = web.StreamResponse(
                    headers={"content-type": frames.CONTENT_TYPE.decode()}
                )
                if not kind.startswith("text/event-stream"):
                    whole = await answer.read()
                    self._account.stream(number, _token_count(whole))
                    reason = _finish_reason(whole)
                    await response.prepare(request)
                    await response.write(
                        frames.encode_response(200, whole) + frames.encode_end(reason)
                    )
                    return response, reason
                await response.prepare(request)
                reason = await self._relay(answer, response, number)
                await response.write(frames.encode_end(reason))
                return response, reason
        except (aiohttp.ClientError, TimeoutError, OSError, EventTooLong) as error:
            error_text = f"the plain server: {error!r}"[:200]
            if response is None or not response.prepared:
                return _error(502, error_text), "error"
            await response.write(frames.encode_failure(frames.FailureKind.ENGINE, error_text))
            return response, "error"

    async def _relay(
        self, answer: aiohttp.ClientResponse, response: web.StreamResponse, number: int
    ) -> str:
        """All events to the gateway; the finish reason. Raises ClientError for a cut stream."""
        stream = PlainStream()
        async for data in answer.content.iter_any():
            framed, tokens = stream.feed(data)
            self._account.stream(number, tokens)
            if framed:
                await response.write(framed)
        if not stream.complete:
            raise aiohttp.ClientPayloadError("its stream broke off")
        return stream.finish or "-"

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        """A request that is not framed, as it is."""
        url = self._backend.url + request.rel_url.path_qs
        headers = {**_passed_on(request), **self._backend.headers}
        try:
            async with self._backend.session.request(
                request.method, url, data=await request.read(), headers=headers
            ) as answer:
                response = web.StreamResponse(status=answer.status, headers=_repeated(answer))
                await response.prepare(request)
                async for data in answer.content.iter_any():
                    await response.write(data)
                return response
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            return _error(502, f"the plain server: {error!r}"[:200])

    async def watch(self) -> None:
        """Returns when the server was not to be reached for GONE_AFTER looks in a row."""
        missed = 0
        while missed < GONE_AFTER:
            await asyncio.sleep(LOOK_S)
            self._state_again()
            missed = 0 if await self._backend.answers() else missed + 1

    def _state_again(self) -> None:
        """Report all requests if the agent requests it."""
        before, self._statements = self._statements, self._page.statements()
        if self._statements != before:
            self._account.state_again()


async def _not_here(request: web.Request) -> web.Response:
    return _error(404, "a plain server keeps no streams and takes part in no checkpoints")


def _error(status: int, message: str) -> web.Response:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return web.json_response(
        {"error": {"message": message, "type": kind, "param": None, "code": None}}, status=status
    )


def _passed_on(request: web.Request) -> dict[str, str]:
    return {k: v for k, v in request.headers.items() if k.lower() in PASSED_ON}


def _repeated(answer: aiohttp.ClientResponse) -> dict[str, str]:
    return {k: v for k, v in answer.headers.items() if k.lower() not in UNREPEATED}


def _plain_response(answer: aiohttp.ClientResponse, body: bytes) -> web.Response:
    return web.Response(status=answer.status, body=body, headers=_repeated(answer))


def _prompt_tokens(dispatch: bytes) -> int:
    """The gateway's count of prompt tokens, from the decision that sent it; 0: unknown."""
    try:
        decided = codec.decode(dispatch)
    except LogError:
        return 0
    return decided.prompt_tokens if isinstance(decided, RouteDecided) else 0


class _Usage(msgspec.Struct):
    """Of any API: the other one's count is 0."""

    completion_tokens: int = 0
    output_tokens: int = 0


class _Choice(msgspec.Struct):
    finish_reason: str | None = None


class _Answer(msgspec.Struct):
    usage: _Usage | None = None
    choices: list[_Choice] = []
    stop_reason: str | None = None
    status: str | None = None


def _read(body: bytes) -> _Answer:
    try:
        return msgspec.json.decode(body, type=_Answer)
    except UNREADABLE:
        return _Answer()


def _token_count(body: bytes) -> int:
    usage = _read(body).usage
    return usage.completion_tokens or usage.output_tokens if usage is not None else 1


def _finish_reason(body: bytes) -> str:
    answer = _read(body)
    reasons = [c.finish_reason or "-" for c in answer.choices]
    if len(reasons) > 1:
        return "multi"
    return reasons[0] if reasons else answer.stop_reason or answer.status or "-"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m relume.engine_shim.plain.server_process",
        description="Represents an OpenAI-compatible server as an engine, without Relume's "
        "plugin. Started by an agent with --host-kind plain.",
    )
    parser.add_argument("--backend", required=True, metavar="URL", help="the server's base URL")
    parser.add_argument("--api-key-file", type=Path, metavar="FILE", help="its bearer token")
    parser.add_argument("--model", required=True, help="the model's name at the server")
    parser.add_argument("--served-model-name", default="", help="the same, when --model is a path")
    parser.add_argument(
        "--max-model-len", type=int, default=0, help="if the server does not report it"
    )
    parser.add_argument("--host", default="127.0.0.1", help="where gateways reach this process")
    parser.add_argument("--port", type=int, required=True)
    return parser


async def serve(args: argparse.Namespace) -> int:
    """Run until the server is gone; the exit status."""
    me = identity.from_environment()
    key = args.api_key_file.read_text().strip() if args.api_key_file else ""
    backend = Backend(args.backend, key)
    reporter = Reporter(me.agent_socket, Hello(os.getpid(), "core", me.incarnation))
    account = PlainAccount(me.incarnation, lambda step: _report(reporter, step), time.monotonic)
    worker = PlainWorker(me, backend, account, Progress(me.progress))
    runner = web.AppRunner(worker.application(), handler_cancellation=True, access_log=None)
    try:
        name = args.served_model_name or args.model
        model = await _found(backend, name)
        await runner.setup()
        await web.TCPSite(runner, args.host, args.port).start()
        limit = model.get("max_model_len") or args.max_model_len or 1 << 20
        reporter.send(
            ready_frame(
                Ready(
                    port=args.port,
                    max_model_len=int(limit),
                    block_size=16,
                    kv_blocks=0,
                    model=name,
                    vllm="",
                    exact={},
                    kind=EngineKind.PLAIN,
                )
            )
        )
        await worker.watch()
        print(f"{backend.url} does not answer any more", file=sys.stderr)
        return GONE_EXIT
    finally:
        await runner.cleanup()
        await backend.close()


def _report(reporter: Reporter, step: EngineStep) -> None:
    lost = reporter.take_lost()
    reporter.send(frame(codec.encode(with_lost(step, lost))), lost)


async def _found(backend: Backend, name: str) -> dict[str, Any]:
    """What the server says of the model, as soon as it answers; the agent bounds the wait."""
    error_text = ""
    while True:
        try:
            return await backend.model(name)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            if str(error) != error_text:
                error_text = str(error)
                print(f"waiting for {backend.url}: {error!r}", file=sys.stderr, flush=True)
        await asyncio.sleep(LOOK_S)


def main() -> None:
    args = _parser().parse_args()
    try:
        status = asyncio.run(serve(args))
    except (BackendUnusable, OSError) as error:
        print(error, file=sys.stderr)
        status = 1
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
