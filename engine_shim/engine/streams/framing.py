"""Rewrites the answer of a stock handler into frames.

Bytes of a streaming answer are held until the handler requests the next output (or ends): then
everything it rendered from one engine output leaves as one frame with the tokens of that output. On
a resumed stream, output for tokens that the client already has is dropped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from relume.engine_shim.engine.streams.responses import EventNumbers
from relume.engine_shim.generation import Generation, TokenRun
from relume.events.failpoints import failpoint_client
from relume.events.failpoints.points import Failpoint
from relume.events.wire import frames
from relume.events.wire.headers import CACHED_BYTES

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]

_CREATED = re.compile(rb'("created(?:_at)?":)\d+')
_ERROR_EVENTS = (b'data: {"error"', b"event: error\n")


class FramedResponse:
    """The `send` given to the stock handler of one request, and what it does to it."""

    def __init__(self, generation: Generation, send: Send, created: str) -> None:
        """`created`: unix seconds to show instead of the handler's own; empty keeps those."""
        self._generation = generation
        self._send = send
        self._created = rb"\g<1>" + created.encode() if created.isdecimal() else b""
        first = generation.next_event
        self._numbers = EventNumbers(first) if first >= 0 else None
        self._start: Message | None = None
        self._started = False
        self._ended = False
        self._plain = False
        self._streaming = False
        self._held: list[bytes] = []
        self._error_event = b""

    async def send(self, message: Message) -> None:
        """ASGI send for the handler."""
        if message["type"] == "http.response.start":
            await self._on_start(message)
        elif message["type"] == "http.response.body":
            if self._plain:
                await self._send(message)
                return
            if body := message.get("body", b""):
                self._hold(body)
            if not message.get("more_body"):
                await self._finish()

    async def flush(self) -> None:
        """The handler requests the next engine output: frame what it made of the last."""
        if frame := self._drain():
            await self._write(frame)

    def _drain(self) -> bytes:
        """The frames of what was rendered since the last one; may be empty."""
        generation = self._generation
        unsent = generation.unsent()
        payload = b""
        if self._streaming:
            payload = b"".join(self._held)
            self._held.clear()
        if not self._streaming:
            new = (t for t in unsent if t.start >= generation.known(t.choice))
            return b"".join(self._frame(t, t.note) for t in new)
        if not generation.caught_up:
            return b""
        if payload and self._numbers is not None:
            payload = self._numbers.renumber(payload)
        if not unsent:
            unsent = [TokenRun(generation.choice, generation.taken(generation.choice), [])]
            if not payload:
                return b""
        # The handler renders one choice's output before it takes another's.
        *before, last = unsent
        early = b"".join(self._frame(t, b"") for t in before if generation.new_of(t.choice))
        return early + self._frame(last, payload)

    def _frame(self, taken: TokenRun, payload: bytes) -> bytes:
        choice = taken.choice if self._generation.multiple else -1
        return frames.encode_tokens(taken.start, taken.ids, payload, choice)

    async def fail(self, error: BaseException) -> bool:
        """The handler itself raised. Whether it only refused the request."""
        if self._ended:
            return False
        if kind := self._generation.failure:
            await self._write(frames.encode_failure(kind, self._generation.error), last=True)
        elif self._started:
            await self._write(
                frames.encode_failure(frames.FailureKind.INTERNAL, type(error).__name__), last=True
            )
        elif self._generation.refused is not None:
            await self._refuse(*self._generation.refused)
            return True
        return False

    async def _on_start(self, message: Message) -> None:
        self._start = message
        if self._generation.failure:
            return
        if message["status"] != 200 and not self._started:
            self._plain = True
            await self._send(message)
            return
        kinds = [v for k, v in message["headers"] if k.lower() == b"content-type"]
        self._streaming = bool(kinds) and kinds[0].startswith(b"text/event-stream")

    def _hold(self, body: bytes) -> None:
        if self._streaming and body.startswith(_ERROR_EVENTS):
            # vLLM puts an error into the stream; the client must not see it.
            self._error_event = body
        elif not self._error_event:
            self._held.append(_CREATED.sub(self._created, body, 1) if self._created else body)

    async def _finish(self) -> None:
        if self._ended:
            return
        generation = self._generation
        if generation.failure:
            await self._write(
                frames.encode_failure(generation.failure, generation.error), last=True
            )
        elif self._error_event:
            await self._finish_with_error_event()
        elif self._streaming:
            await self._write(self._drain() + frames.encode_end(self._reason()), last=True)
        else:
            await self._finish_whole()

    async def _finish_with_error_event(self) -> None:
        """An error inside the stream: a plain refusal if nothing was generated yet."""
        event = self._error_event.removeprefix(b"event: error\n")
        body = event.split(b"\n", 1)[0].removeprefix(b"data: ")
        error = json.loads(body)["error"]
        if self._generation.outputs or self._started:
            await self._write(
                frames.encode_failure(frames.FailureKind.INTERNAL, error["message"]), last=True
            )
        elif isinstance(error.get("code"), int):
            await self._refuse(error["code"], body)
        else:
            await self._refuse(*(self._generation.refused or (500, body)))

    async def _refuse(self, status: int, body: bytes) -> None:
        self._ended = True
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        start = {"type": "http.response.start", "status": status, "headers": headers}
        await self._send(start)
        await self._send({"type": "http.response.body", "body": body})

    async def _finish_whole(self) -> None:
        assert self._start is not None
        status = self._start["status"]
        body = b"".join(self._held)
        if status != 200:
            await self._write(
                frames.encode_failure(frames.FailureKind.INTERNAL, f"status {status}"), last=True
            )
            return
        answer = frames.encode_response(status, body) + frames.encode_end(self._reason())
        await self._write(self._drain() + answer, last=True)

    def _reason(self) -> str:
        return "multi" if self._generation.multiple else self._generation.finish

    async def _write(self, data: bytes, last: bool = False) -> None:
        if failpoint_client.active:
            generation = self._generation
            tokens = generation.taken(generation.choice)
            point, request = Failpoint.ENGINE_FRAME, generation.request
            await failpoint_client.reach_async(point, request=request, tokens=tokens)
        if not self._started:
            self._started = True
            ours = self._start["headers"] if self._start else []
            dropped = (b"content-type", b"content-length")
            headers = [(k, v) for k, v in ours if k.lower() not in dropped]
            headers.append((b"content-type", frames.CONTENT_TYPE))
            if cached := self._generation.cached_tokens:
                headers.append((CACHED_BYTES, b"%d" % cached))
            start = {"type": "http.response.start", "status": 200, "headers": headers}
            await self._send(start)
        self._ended = self._ended or last
        await self._send({"type": "http.response.body", "body": data, "more_body": not last})
