"""A client of the worker protocol, small enough to be beyond doubt."""

from __future__ import annotations

import array
import http.client
import itertools
import json
import re
import uuid
from collections.abc import Sequence
from typing import Any, NamedTuple

from relume.events.wire import frames

TIMEOUT_S = 60.0
_CREATED = re.compile(rb'"created":\d+')


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes


class Framed(NamedTuple):
    """An answer in frames, sorted."""

    tokens: list[frames.Tokens]
    whole: frames.Response | None
    last: frames.Frame

    @property
    def ids(self) -> list[int]:
        return [i for frame in self.tokens for i in frame.ids]

    def ids_of(self, choice: int) -> list[int]:
        return [i for frame in self.tokens if frame.choice == choice for i in frame.ids]

    @property
    def payload(self) -> bytes:
        return b"".join(frame.payload for frame in self.tokens)

    def after(self, delivered: int) -> bytes:
        """Payload of frames that start at or after `delivered`."""
        return b"".join(f.payload for f in self.tokens if f.start >= delivered)


def connect(port: int) -> http.client.HTTPConnection:
    return http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)


def get(port: int, path: str) -> Answer:
    connection = connect(port)
    try:
        connection.request("GET", path)
        return _answer(connection.getresponse())
    finally:
        connection.close()


def _answer(response: http.client.HTTPResponse) -> Answer:
    headers = {k.lower(): v for k, v in response.getheaders()}
    return Answer(response.status, headers, response.read())


def headers_for(
    request: str = "",
    attempt: int = 1,
    incarnation: int = 1,
    resume: tuple[str, Sequence[int]] | None = None,
    created: bytes = b"",
    response_id: str = "",
    **more: str,
) -> dict[str, str]:
    """x-relume headers; `more` by name without the prefix."""
    request = request or uuid.uuid4().hex
    headers = {
        "content-type": "application/json",
        "x-relume-request": request,
        "x-relume-attempt": str(attempt),
        "x-relume-incarnation": str(incarnation),
        "x-request-id": response_id or request,
    }
    if resume is not None:
        headers["x-relume-resume"] = f"{resume[0]} {len(resume[1])}"
    if created:
        headers["x-relume-created"] = created.decode()
    return headers | {f"x-relume-{name}": value for name, value in more.items()}


def open_stream(
    port: int,
    path: str,
    body: dict[str, Any],
    headers: dict[str, str] | None = None,
    tail: Sequence[int] = (),
) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    """Sends a request and returns with its answer's head read."""
    connection = connect(port)
    content = json.dumps(body).encode() + array.array("I", tail).tobytes()
    connection.request("POST", path, content, headers or {"content-type": "application/json"})
    return connection, connection.getresponse()


def begin(
    port: int, path: str, body: dict[str, Any], headers: dict[str, str]
) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    """Sends a request and returns once its answer has begun."""
    connection, response = open_stream(port, path, body, headers)
    assert response.status == 200 and response.read(64), response.status
    return connection, response


def post(port: int, path: str, body: dict[str, Any], **options: Any) -> Answer:
    """The whole answer."""
    connection, response = open_stream(port, path, body, **options)
    try:
        return _answer(response)
    finally:
        connection.close()


def ask(
    port: int,
    path: str,
    body: dict[str, Any],
    resume: tuple[str, Sequence[int]] | None = None,
    **options: Any,
) -> Framed:
    """A dispatched request, to its end."""
    headers = headers_for(resume=resume, **options)
    answer = post(port, path, body, headers=headers, tail=resume[1] if resume else ())
    assert answer.status == 200, answer.body
    assert answer.headers["content-type"] == "application/x-relume-frames"
    return sort_frames(answer.body)


def sort_frames(body: bytes) -> Framed:
    """Checks the order of frames: tokens in sequence, one end, nothing behind it."""
    reader = frames.FrameReader()
    all_frames = reader.feed(body)
    assert all_frames, body
    tokens = [f for f in all_frames if isinstance(f, frames.Tokens)]
    wholes = [f for f in all_frames if isinstance(f, frames.Response)]
    assert isinstance(all_frames[-1], frames.End | frames.Failure), all_frames[-1]
    assert len(tokens) + len(wholes) + 1 == len(all_frames)
    for choice in {f.choice for f in tokens}:
        mine = [f for f in tokens if f.choice == choice]
        for before, after in itertools.pairwise(mine):
            assert after.start == before.start + len(before.ids)
    return Framed(tokens, wholes[0] if wholes else None, all_frames[-1])


def created_of(payload: bytes) -> bytes:
    """The unix seconds an answer shows as `created`."""
    match = _CREATED.search(payload)
    assert match is not None, payload
    return match[0].split(b":")[1]


def without_created(payload: bytes) -> bytes:
    return _CREATED.sub(b'"created":0', payload)


def text_of(payload: bytes) -> str:
    """The text an SSE payload shows, of either route."""
    pieces = []
    for event in payload.split(b"\n\n"):
        if event and event != b"data: [DONE]":
            for choice in json.loads(event.removeprefix(b"data: "))["choices"]:
                pieces.append(choice.get("text") or choice.get("delta", {}).get("content") or "")
    return "".join(pieces)
