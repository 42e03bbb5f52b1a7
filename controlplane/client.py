"""Streams of OpenAI's Python client that survive their connection and their gateway.

    from openai import OpenAI
    from relume.controlplane.client import stream

    client = OpenAI(base_url="http://a:8000/v1", api_key="-")
    for chunk in stream(client, replicas=["http://b:8000/v1"], model="tiny", messages=[...]):
        ...

`stream` and `astream` (with `AsyncOpenAI`) yield the chunks that `create(stream=True)` would,
each once and in order. A lost connection is opened again, at the next replica, with the id of
the last event; what goes wrong otherwise is raised as OpenAI's client raises it. A stream that
is left early runs on at its worker until its grace is over.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import json
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from relume.events.wire.headers import RESUMABLE

if TYPE_CHECKING:
    import openai

ATTEMPTS = 8
"""Connections in a row that may bring nothing before the last error is raised. There may be more until the
grace time of the stream is over."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 2.0
RETRIED = frozenset({429, 503})
"""Answers to a resumption that ask the client to try again."""


@functools.cache
def _lost() -> tuple[type[Exception], ...]:
    """What connecting and reading raise; the name of OpenAI's transport depends on the
    version. OpenAI's package is an extra (`relume[client]`), so it is imported here."""
    import openai

    found: list[type[Exception]] = [openai.APIConnectionError, openai.APIStatusError, OSError]
    for name in ("httpx", "httpx2"):
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue
        found += [module.TransportError, module.StreamError]
    return tuple(found)


class _ResumedStream:
    """One stream over all its connections: what was received, and what comes next."""

    def __init__(self, client: Any, replicas: Sequence[str], request: dict[str, Any]) -> None:
        self._urls = [str(client.base_url), *replicas]
        self._client = client
        self._request = {**request, "stream": True}
        self._headers = dict(self._request.pop("extra_headers", None) or {})
        self._chat = "messages" in request
        self._turn = 0
        self._fruitless = 0
        self._heard_at = time.monotonic()
        self._grace_s = 0
        self._last_id = ""
        self._shown = ""
        self.done = False

    def connect(self) -> Any:
        """The next connection's context manager."""
        url = self._urls[self._turn % len(self._urls)]
        headers = {**self._headers, "accept": "text/event-stream", RESUMABLE: "1"}
        client = self._client
        if self._last_id:
            headers["last-event-id"] = self._last_id
            client = client.with_options(max_retries=0)
        client = client.with_options(base_url=url)
        resource = client.chat.completions if self._chat else client.completions
        return resource.with_streaming_response.create(**self._request, extra_headers=headers)

    def take(self, line: str, answer: Any) -> Any:
        """The chunk that `line` of the answer completes, or None. Raises openai.APIError."""
        import openai
        from openai.types import Completion
        from openai.types.chat import ChatCompletionChunk

        if line.startswith("id:"):
            self._shown = line[3:].strip()
            return None
        if not line.startswith("data:"):
            return None
        data = line[5:].strip()
        self._last_id, self._shown = self._shown or self._last_id, ""
        self._fruitless, self._heard_at = 0, time.monotonic()
        grace = answer.headers.get(RESUMABLE, "")
        self._grace_s = int(grace) if grace.isdecimal() else 0
        if data == "[DONE]":
            self.done = True
            return None
        event = json.loads(data)
        if error := event.get("error"):
            message = error.get("message") or "the stream failed"
            raise openai.APIError(message, request=answer.http_request, body=error)
        return (ChatCompletionChunk if self._chat else Completion).construct(**event)

    def lost(self, error: Exception | None) -> float:
        """The connection ended early; seconds to wait before the next. Raises `error` if a retry is
        useless or the retries are used up."""
        import openai

        if isinstance(error, openai.APIStatusError):
            if not self._last_id or error.status_code not in RETRIED:
                raise error
        self._turn += 1
        self._fruitless += 1
        waited_s = time.monotonic() - self._heard_at
        if self._fruitless >= ATTEMPTS and waited_s >= self._grace_s:
            raise error or ConnectionError("the stream ends early again and again")
        return min(FIRST_PAUSE_S * 2 ** (self._fruitless - 1), LONGEST_PAUSE_S)


def stream(client: openai.OpenAI, *, replicas: Sequence[str] = (), **request: Any) -> Iterator[Any]:
    """Chunks of a completion (with `prompt`) or a chat (with `messages`), as `create` gives
    them. `replicas`: base URLs of further control plane replicas. Raises openai.OpenAIError,
    and the transport's error after ATTEMPTS connections without an event and the grace time."""
    course = _ResumedStream(client, replicas, request)
    while not course.done:
        try:
            with course.connect() as answer:
                for line in answer.iter_lines():
                    if (chunk := course.take(line, answer)) is not None:
                        yield chunk
                    if course.done:
                        return
            pause_s = course.lost(None)
        except _lost() as error:
            pause_s = course.lost(error)
        time.sleep(pause_s)


async def astream(
    client: openai.AsyncOpenAI, *, replicas: Sequence[str] = (), **request: Any
) -> AsyncIterator[Any]:
    """`stream` for `AsyncOpenAI`."""
    course = _ResumedStream(client, replicas, request)
    while not course.done:
        try:
            async with course.connect() as answer:
                async for line in answer.iter_lines():
                    if (chunk := course.take(line, answer)) is not None:
                        yield chunk
                    if course.done:
                        return
            pause_s = course.lost(None)
        except _lost() as error:
            pause_s = course.lost(error)
        await asyncio.sleep(pause_s)
