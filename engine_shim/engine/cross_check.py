"""Answers a finished request again, for a replica that compares the tokens.

The request runs through the stock handler as its client sent it. Nothing of it is reported to the
agent, nothing is read from the prefix cache, and no block is checkpointed. Only its token ids are
returned. It ends when the replica closes the connection.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, MutableMapping
from itertools import count
from typing import Any

from relume.engine_shim.engine.streams.framing import FramedResponse
from relume.engine_shim.generation import CURRENT, UNREPORTED, Generation
from relume.events.wire import frames, worker_calls
from relume.events.wire.errors import CallError

logger = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
App = Callable[[Scope, Receive, Callable[[Message], Awaitable[None]]], Awaitable[None]]

MOST_TOKENS = 1_000_000
STALE = "stale incarnation"

_numbers = count(1)


class Collected:
    """The `send` of one request: its token ids, or why there are none."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.error = ""
        self._reader = frames.FrameReader()
        self._is_framed = False
        self._status = 0

    async def send(self, message: Message) -> None:
        """ASGI send."""
        if message["type"] == "http.response.start":
            self._status = message["status"]
            self._is_framed = any(value == frames.CONTENT_TYPE for _, value in message["headers"])
        elif not self._is_framed:
            self.error = self.error or f"status {self._status}"
        elif body := message.get("body", b""):
            for frame in self._reader.feed(body):
                self._take(frame)

    def _take(self, frame: frames.Frame) -> None:
        if isinstance(frame, frames.Failure):
            self.error = f"{frame.kind}: {frame.message}"[:200]
        elif isinstance(frame, frames.Tokens):
            if frame.choice >= 0:
                self.error = "it has several choices"
            elif len(self.tokens) + len(frame.ids) > MOST_TOKENS:
                self.error = "its answer is too long"
            else:
                self.tokens += frame.ids


async def answer(
    app: App, scope: Scope, receive: Receive, check: worker_calls.CrossCheckRequest
) -> worker_calls.CrossCheckAnswered:
    """The tokens of the request, from vLLM's own application `app`. `receive` gives the request's
    body first, and later shows that the replica is gone."""
    generation, collected = Generation(UNREPORTED, 1), Collected()
    generation.uncached = True
    response = FramedResponse(generation, collected.send, "")
    generation.flush = response.flush
    name = f"check-{next(_numbers)}-{check.request}"
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(check.body.encode())).encode()),
        (b"x-request-id", name.encode()),
    ]
    inner = {**scope, "path": check.path, "raw_path": check.path.encode(), "headers": headers}
    began, token = time.monotonic(), CURRENT.set(generation)
    try:
        await app(inner, receive, response.send)
    except Exception as error:  # process edge: whatever vLLM makes of it is an answer
        logger.warning("cross-check of %s: %s", check.request, error)
        collected.error = collected.error or f"{type(error).__name__}: {error}"[:200]
    finally:
        CURRENT.reset(token)
    took_us = int((time.monotonic() - began) * 1e6)
    if collected.error:
        return worker_calls.CrossCheckAnswered(took_us=took_us, error=collected.error)
    return worker_calls.CrossCheckAnswered(tokens=tuple(collected.tokens), took_us=took_us)


def parse(
    body: bytes, incarnation: int, paths: tuple[str, ...]
) -> worker_calls.CrossCheckRequest | str:
    """The call in `body`, or why it is not answered."""
    try:
        check = worker_calls.decode(body, worker_calls.CrossCheckRequest)
    except CallError as malformed:
        return str(malformed)
    if check.incarnation != incarnation:
        return STALE
    return check if check.path in paths else "no such path"
