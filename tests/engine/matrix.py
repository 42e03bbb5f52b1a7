"""Runs a request whole, cuts it at a frame and joins both parts, as a gateway would.

A cut is a number of frames the client had; what the gateway holds then is in those frames:
the ids of each choice, and the notes of an answer in one piece. `seen` is what a client
makes of the answer, so two of them can be compared field by field.
"""

from __future__ import annotations

import array
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from relume.events.wire import frames
from tests.engine import client
from tests.engine.fleet import Engine

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
BLOCK = 32
LOGPROB_TOLERANCE = 1e-3


@dataclass(kw_only=True)
class Choice:
    """One choice as its client has it."""

    content: str = ""
    reasoning: str = ""
    tools: list[dict[str, str]] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    finish: str | None = None
    stop: Any = None


@dataclass
class Seen:
    """An answer as its client has it."""

    choices: dict[int, Choice] = field(default_factory=dict)
    usage: dict[str, Any] | None = None
    end: Any = None


def seen(run: client.Framed) -> Seen:
    """What the client makes of an answer, streamed or not."""
    result = Seen(end=run.last)
    if run.whole is not None:
        _take(result, json.loads(run.whole.payload))
    else:
        for event in run.payload.split(b"\n\n"):
            if event.startswith(b"data: {"):
                _take(result, json.loads(event.removeprefix(b"data: ")))
    for frame in run.tokens:
        result.choices.setdefault(choice_of(frame), Choice()).ids += frame.ids
    return result


def _take(result: Seen, event: dict[str, Any]) -> None:
    if event.get("usage"):
        result.usage = {k: v for k, v in event["usage"].items() if k != "prompt_tokens_details"}
    for shown in event["choices"]:
        choice = result.choices.setdefault(shown["index"], Choice())
        message = shown.get("delta") or shown.get("message") or {"content": shown.get("text")}
        choice.content += message.get("content") or ""
        choice.reasoning += message.get("reasoning") or ""
        for call in message.get("tool_calls") or ():
            _take_call(choice.tools, call)
        choice.logprobs += _logprobs(shown.get("logprobs") or {})
        choice.finish = shown.get("finish_reason") or choice.finish
        choice.stop = shown.get("stop_reason") or choice.stop


def _take_call(tools: list[dict[str, str]], call: dict[str, Any]) -> None:
    index = call.get("index", len(tools))
    while len(tools) <= index:
        tools.append({"id": "", "name": "", "arguments": ""})
    tool, function = tools[index], call.get("function") or {}
    tool["id"] += call.get("id") or ""
    tool["name"] += function.get("name") or ""
    tool["arguments"] += function.get("arguments") or ""


def _logprobs(shown: dict[str, Any]) -> list[Any]:
    """One entry a token, of either route's shape."""
    if "content" in shown:
        return [
            (e["token"], e["logprob"], [(t["token"], t["logprob"]) for t in e["top_logprobs"]])
            for e in shown["content"] or ()
        ]
    columns = [shown.get(name) or [] for name in ("tokens", "token_logprobs", "text_offset")]
    tops = [sorted(t.items()) for t in shown.get("top_logprobs") or [] if t]
    return [*zip(*columns, strict=True), *tops]


def close(ours: Any, theirs: Any) -> bool:
    """Equal, up to the last bits of log probabilities."""
    if isinstance(ours, float) and isinstance(theirs, float):
        return abs(ours - theirs) < LOGPROB_TOLERANCE
    if isinstance(ours, list | tuple) and isinstance(theirs, list | tuple):
        return len(ours) == len(theirs) and all(map(close, ours, theirs))
    return ours == theirs


def differences(expected: Seen, actual: Seen) -> list[str]:
    """What a client could tell; empty when nothing."""
    found = []
    for name in ("usage", "end"):
        if (ours := getattr(expected, name)) != (theirs := getattr(actual, name)):
            found.append(f"{name}: {ours} became {theirs}")
    for index in sorted({*expected.choices, *actual.choices}):
        ours, theirs = (s.choices.get(index, Choice()) for s in (expected, actual))
        for name in Choice.__dataclass_fields__:
            a, b = getattr(ours, name), getattr(theirs, name)
            if not close(a, b):
                found.append(f"choice {index}: {name}: {a!r} became {b!r}")
    return found


def run(engine: Engine, path: str, body: dict[str, Any], name: str) -> client.Framed:
    """The request, not cut."""
    return client.ask(engine.port, path, body, request=name)


def cuts(whole: client.Framed, prompt_tokens: int) -> list[int]:
    """Numbers of frames: none, the first token, amid a block, at its edge, up to the last."""
    total = len(whole.tokens)
    edge = -prompt_tokens % BLOCK or BLOCK
    return sorted({0, 1, min(edge + 5, total - 1), min(edge, total - 1), total - 1})


def choice_of(frame: frames.Tokens) -> int:
    """Which choice a frame is of. A `:r` frame is of a request with one choice and numbers none."""
    return max(frame.choice, 0)


def continued(
    engine: Engine,
    path: str,
    body: dict[str, Any],
    name: str,
    had: Sequence[frames.Tokens],
    created: bytes,
    mode: str = "continue",
    **more: str,
) -> client.Framed:
    """What the client has in the end when it had `had` and `engine` took the request up;
    `more`: further headers, by name without the prefix."""
    choices = range(1 + max(map(choice_of, had), default=0))
    ids = [[i for f in had if choice_of(f) == c for i in f.ids] for c in choices]
    notes = [b"".join(f.payload for f in had if choice_of(f) == c) for c in choices]
    if body.get("stream"):
        notes = [b""] * len(notes)
    headers = client.headers_for(request=name, attempt=2, created=created, **more)
    tail = b""
    if any(ids):
        counts = ",".join(f"{len(i)}:{len(n)}" for i, n in zip(ids, notes, strict=True))
        headers["x-relume-resume"] = f"{mode} {counts}"
        tail = b"".join(array.array("I", i).tobytes() for i in ids) + b"".join(notes)
    connection = client.connect(engine.port)
    try:
        connection.request("POST", path, json.dumps(body).encode() + tail, headers)
        response = connection.getresponse()
        content = response.read()
    finally:
        connection.close()
    assert response.status == 200, content
    rest = client.sort_frames(content)
    return client.Framed([*had, *rest.tokens], rest.whole, rest.last)
