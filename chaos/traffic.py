"""Streaming clients that record what they received and when."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from typing import Any

import aiohttp
from msgspec import Struct, field

from relume.events.wire.headers import REASON, VERDICT

WORDS = (
    "river lantern harbor winter engine signal garden copper meadow thunder paper velvet "
    "orchard compass marble whisper ladder island candle anchor forest mirror bridge feather "
    "castle desert ribbon hammer glacier pepper violin saddle magnet canyon button falcon"
).split()


def prompts(count: int, words: int = 24) -> list[str]:
    """`count` different prompts of about `words` words, always the same ones."""
    texts = []
    for index in range(count):
        picked = [WORDS[(index * 7 + k * (2 * index + 3)) % len(WORDS)] for k in range(words)]
        texts.append(f"Story {index}: " + " ".join(picked))
    return texts


class Stream(Struct, kw_only=True):
    """One request as its client saw it. `gaps_s` are times between tokens' chunks.

    `text`, `tokens`, `finish`, `stop_reason` and `logprobs` are the first choice's, put
    together from all chunks; `others` and `other_tokens` hold those of further choices, `calls`
    tool calls (by choice and index: id, name, arguments) and `reasoning` the reasoning text.
    `response_ids` and `created` list the distinct values, so a stable answer has one of each.
    `answer` is the JSON of an answer that did not stream. `verdict` and `reason` are the
    response's headers.
    """

    request: str
    prompt: str
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish: str = ""
    status: int = 0
    error: str = ""
    done: bool = False
    started: float = 0.0
    first: float = 0.0
    ended: float = 0.0
    last: float = 0.0
    longest_gap_s: float = 0.0
    usage: dict[str, Any] = field(default_factory=dict)
    response_ids: list[str] = field(default_factory=list)
    created: list[int] = field(default_factory=list)
    stop_reason: Any = None
    logprobs: list[Any] = field(default_factory=list)
    others: dict[int, str] = field(default_factory=dict)
    other_tokens: dict[int, list[int]] = field(default_factory=dict)
    calls: dict[tuple[int, int], tuple[str, str, str]] = field(default_factory=dict)
    reasoning: str = ""
    answer: dict[str, Any] = field(default_factory=dict)
    verdict: str = ""
    reason: str = ""

    @property
    def whole(self) -> bool:
        """Whether it ended well: finish reason, [DONE] if it streams, no error."""
        return self.done and not self.error and bool(self.finish)


async def complete(
    session: aiohttp.ClientSession,
    url: str,
    stream: Stream,
    max_tokens: int,
    model: str = "tiny",
    on_token: Callable[[Stream], None] | None = None,
    timeout_s: float = 120.0,
    headers: Mapping[str, str] = {},
    **extra: Any,
) -> Stream:
    """Send one streaming greedy completion and record it, as `ask` does."""
    body = {
        "model": model,
        "prompt": stream.prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        **extra,
    }
    return await ask(session, f"{url}/v1/completions", stream, body, on_token, timeout_s, headers)


async def ask(
    session: aiohttp.ClientSession,
    url: str,
    stream: Stream,
    body: dict[str, Any],
    on_token: Callable[[Stream], None] | None = None,
    timeout_s: float = 120.0,
    headers: Mapping[str, str] = {},
) -> Stream:
    """Post `body` to a completions or chat `url` and record the answer, streamed or whole.
    No behaviour of the server raises."""
    stream.started = stream.last = time.monotonic()
    try:
        async with asyncio.timeout(timeout_s):
            head = {"x-request-id": stream.request, **headers}
            async with session.post(url, json=body, headers=head) as answer:
                stream.status = answer.status
                stream.verdict = answer.headers.get(VERDICT, "")
                stream.reason = answer.headers.get(REASON, "")
                if answer.status != 200:
                    stream.error = (await answer.text())[:300]
                elif answer.content_type == "text/event-stream":
                    await _read(answer, stream, on_token)
                else:
                    stream.answer = await answer.json()
                    take_event(stream, stream.answer)
                    stream.done = True
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        stream.error = f"{type(error).__name__}: {error}"
    stream.ended = time.monotonic()
    return stream


async def _read(
    answer: aiohttp.ClientResponse, stream: Stream, on_token: Callable[[Stream], None] | None
) -> None:
    async for line in answer.content:
        if not line.startswith(b"data: "):
            continue
        data = line[6:].strip()
        if data == b"[DONE]":
            stream.done = True
            continue
        event = json.loads(data)
        if "error" in event:
            stream.error = str(event["error"])[:300]
            continue
        take_event(stream, event)
        if on_token is not None:
            on_token(stream)


def take_event(stream: Stream, event: dict[str, Any]) -> None:
    """Add one chunk, or a whole answer, to `stream`."""
    if event["id"] not in stream.response_ids:
        stream.response_ids.append(event["id"])
    if event["created"] not in stream.created:
        stream.created.append(event["created"])
    if event.get("usage"):
        stream.usage = event["usage"]
    for choice in event["choices"]:
        _take(stream, choice)


def _take(stream: Stream, choice: dict[str, Any]) -> None:
    shown = choice.get("delta") or choice.get("message") or choice
    text = shown.get("content") or shown.get("text") or ""
    for at, call in enumerate(shown.get("tool_calls") or ()):
        _take_call(stream, (choice["index"], call.get("index", at)), call)
    if index := choice.get("index", 0):
        stream.others[index] = stream.others.get(index, "") + text
        stream.other_tokens.setdefault(index, []).extend(choice.get("token_ids") or ())
        return
    stream.text += text
    stream.reasoning += shown.get("reasoning") or ""
    ids = choice.get("token_ids") or []
    if ids:
        now = time.monotonic()
        if stream.tokens:
            stream.longest_gap_s = max(stream.longest_gap_s, now - stream.last)
        else:
            stream.first = now
        stream.last = now
        stream.tokens += ids
    if choice.get("logprobs"):
        stream.logprobs += _logprobs(choice["logprobs"])
    if choice.get("finish_reason"):
        stream.finish = choice["finish_reason"]
        stream.stop_reason = choice.get("stop_reason")


def _take_call(stream: Stream, place: tuple[int, int], call: dict[str, Any]) -> None:
    known, function = stream.calls.get(place, ("", "", "")), call.get("function") or {}
    new = call.get("id"), function.get("name"), function.get("arguments")
    name, function_name, arguments = (a + (b or "") for a, b in zip(known, new, strict=True))
    stream.calls[place] = name, function_name, arguments


def _logprobs(found: dict[str, Any]) -> list[Any]:
    """(token, log probability, alternatives) of each token, from either API's form."""
    if "content" in found:
        return [
            (c["token"], c["logprob"], [(a["token"], a["logprob"]) for a in c["top_logprobs"]])
            for c in found["content"]
        ]
    alternatives = found["top_logprobs"] or [{}] * len(found["tokens"])
    pairs = zip(found["tokens"], found["token_logprobs"], alternatives, strict=True)
    return [(t, p, sorted((a or {}).items())) for t, p, a in pairs]
