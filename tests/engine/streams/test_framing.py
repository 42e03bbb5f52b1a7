"""A stock handler's answer becomes frames: every way it can begin, go on and end."""

from __future__ import annotations

import json
from typing import Any

import pytest

from relume.engine_shim.engine.streams.framing import FramedResponse
from relume.engine_shim.generation import (
    Generation,
)
from relume.events.wire import frames
from relume.events.wire.errors import HeaderError
from relume.events.wire.frames import End, Failure, Response, Tokens
from relume.events.wire.resumption import DeliveredChoice, Resume, parse_resume

SSE = [(b"content-type", b"text/event-stream; charset=utf-8")]
JSON = [(b"content-type", b"application/json"), (b"content-length", b"2")]


class Server:
    """Takes what the middleware sends."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self.bodies: list[bytes] = []
        self.ended = False

    async def send(self, message: Any) -> None:
        assert not self.ended, message
        if message["type"] == "http.response.start":
            assert not self.status, "one start"
            self.status = message["status"]
            self.headers = dict(message["headers"])
        else:
            assert self.status, "start before body"
            self.bodies.append(message.get("body", b""))
            self.ended = not message.get("more_body")

    @property
    def frames(self) -> list[frames.Frame]:
        return frames.FrameReader().feed(b"".join(self.bodies))


class Handler:
    """A stock handler, step by step."""

    def __init__(self, tail: tuple[int, ...] = (), created: str = "") -> None:
        self.server = Server()
        resume = Resume.of("continue", tail) if tail else None
        self.generation = Generation("r", 1, resume=resume)
        self.generation.calls = 1
        self.response = FramedResponse(self.generation, self.server.send, created)

    async def start(self, headers: Any = SSE, status: int = 200) -> None:
        message = {"type": "http.response.start", "status": status, "headers": headers}
        await self.response.send(message)

    async def body(self, data: bytes, more: bool = True) -> None:
        message = {"type": "http.response.body", "body": data, "more_body": more}
        await self.response.send(message)

    async def output(self, *ids: int, shown: bytes = b"", finish: str = "") -> None:
        """Takes an engine output, renders it, and asks for the next unless it is the last."""
        self.generation.take(ids)
        if shown:
            await self.body(shown)
        if finish:
            self.generation.finish = finish
        else:
            await self.response.flush()


async def test_events_of_one_output_leave_in_one_frame() -> None:
    handler = Handler()
    await handler.start()
    handler.generation.take([7])
    await handler.body(b"data: role\n\n")
    await handler.body(b"data: a\n\n")
    assert not handler.server.bodies, "held until the next output is asked for"
    await handler.response.flush()
    await handler.output(8, 9, shown=b"data: b\n\n")
    await handler.output(10, shown=b"data: c\n\n", finish="stop")
    await handler.body(b"data: usage\n\n")
    await handler.body(b"data: [DONE]\n\n")
    await handler.body(b"", more=False)
    assert handler.server.frames == [
        Tokens(0, (7,), b"data: role\n\ndata: a\n\n"),
        Tokens(1, (8, 9), b"data: b\n\n"),
        Tokens(3, (10,), b"data: c\n\ndata: usage\n\ndata: [DONE]\n\n"),
        End("stop"),
    ]
    assert handler.server.headers[b"content-type"] == frames.CONTENT_TYPE
    assert len(handler.server.bodies) == 3, "the end travels with the last frame"


async def test_token_that_shows_nothing_is_still_told() -> None:
    handler = Handler()
    await handler.start()
    await handler.output(7)
    assert handler.server.frames == [Tokens(0, (7,), b"")]


async def test_resumed_stream_drops_what_the_client_has() -> None:
    handler = Handler(tail=(1, 2, 3), created="1700000000")
    await handler.start()
    await handler.body(b'data: {"created":5,"role"}\n\n')
    await handler.output(1, 2, 3, shown=b'data: {"created":5,"x":"\\"created\\":6"}\n\n')
    assert not handler.server.bodies
    await handler.output(4, shown=b'data: {"id":"i","created":5,"y":"created\\":6"}\n\n')
    await handler.output(5, shown=b"data: e\n\n", finish="length")
    await handler.body(b"", more=False)
    assert handler.server.frames == [
        Tokens(3, (4,), b'data: {"id":"i","created":1700000000,"y":"created\\":6"}\n\n'),
        Tokens(4, (5,), b"data: e\n\n"),
        End("length"),
    ]


async def test_tail_that_ended_the_request_leaves_only_the_end() -> None:
    handler = Handler(tail=(1, 2))
    await handler.start()
    await handler.output(1, 2, shown=b"data: x\n\n", finish="stop")
    await handler.body(b"data: [DONE]\n\n")
    await handler.body(b"", more=False)
    assert handler.server.frames == [End("stop")]


async def test_answer_in_one_piece_has_progress_before_it() -> None:
    handler = Handler()
    await handler.output(7)
    assert handler.server.frames == [Tokens(0, (7,), b"")]
    await handler.output(8, finish="length")
    await handler.start(JSON)
    await handler.body(b"{}", more=False)
    assert handler.server.frames == [
        Tokens(0, (7,), b""),
        Tokens(1, (8,), b""),
        Response(200, b"{}"),
        End("length"),
    ]


async def test_refusal_passes_as_it_is() -> None:
    handler = Handler()
    await handler.start(JSON, status=400)
    await handler.body(b"no", more=False)
    assert (handler.server.status, handler.server.bodies) == (400, [b"no"])
    assert handler.server.headers[b"content-type"] == b"application/json"


async def test_refusal_told_inside_a_stream_becomes_a_plain_one() -> None:
    handler = Handler()
    await handler.start()
    error = {"error": {"message": "too long", "code": 422}}
    await handler.body(b"data: " + json.dumps(error).encode() + b"\n\n")
    await handler.body(b"data: [DONE]\n\n")
    await handler.body(b"", more=False)
    assert handler.server.status == 422
    assert json.loads(handler.server.bodies[0]) == error


REFUSAL = 422, b'{"error":{"message":"cannot resume","code":422}}'
BARE = b'event: error\ndata: {"type":"error","error":{"type":"internal_error","message":"m"}}\n\n'


@pytest.mark.parametrize("refused", (None, REFUSAL))
async def test_an_error_event_without_a_status_has_that_of_its_cause(refused: Any) -> None:
    """Of Anthropic's API: the event itself only says that something was wrong."""
    handler = Handler()
    await handler.start()
    handler.generation.refused = refused
    await handler.body(BARE)
    await handler.body(b"", more=False)
    status, body = refused or (
        500,
        b'{"type":"error","error":{"type":"internal_error","message":"m"}}',
    )
    assert (handler.server.status, handler.server.bodies) == (status, [body])


async def test_a_handler_that_raises_a_refusal_is_answered_with_it() -> None:
    handler = Handler()
    await handler.start()
    handler.generation.refused = REFUSAL
    assert await handler.response.fail(ValueError("cannot resume"))
    assert (handler.server.status, handler.server.bodies) == (422, [REFUSAL[1]])


async def test_a_bare_error_event_after_tokens_is_not_shown() -> None:
    handler = Handler()
    await handler.start()
    await handler.output(7, shown=b"event: a\ndata: {}\n\n")
    await handler.body(BARE)
    await handler.body(b"", more=False)
    assert handler.server.frames[-1] == Failure("internal", "m")
    assert len(handler.server.frames) == 2


async def test_error_event_after_tokens_is_not_shown() -> None:
    handler = Handler()
    await handler.start()
    await handler.output(7, shown=b"data: a\n\n")
    await handler.body(b'data: {"error": {"message": "boom", "code": 500}}\n\n')
    await handler.body(b"data: [DONE]\n\n", more=False)
    assert handler.server.frames == [Tokens(0, (7,), b"data: a\n\n"), Failure("internal", "boom")]


@pytest.mark.parametrize("kind", ("engine", "mismatch", "internal"))
@pytest.mark.parametrize("headers", (SSE, JSON))
@pytest.mark.parametrize("tokens", (0, 1))
async def test_broken_generation_ends_with_its_kind(kind: str, headers: Any, tokens: int) -> None:
    handler = Handler()
    if headers is SSE:
        await handler.start()
    if tokens:
        await handler.output(7)
    handler.generation.failure, handler.generation.error = kind, "why"
    if headers is JSON:
        await handler.start(JSON, status=500)
    await handler.body(b'data: {"error": {"message": "x", "code": 500}}\n\n')
    await handler.body(b"", more=False)
    assert handler.server.status == 200
    assert handler.server.frames[-1] == Failure(kind, "why")
    assert len(handler.server.frames) == 1 + tokens


async def test_handler_that_raises_is_reported_once_begun() -> None:
    handler = Handler()
    await handler.response.fail(KeyError("x"))
    assert not handler.server.status, "not begun: the server answers 500 itself"
    await handler.start()
    await handler.output(7)
    await handler.response.fail(KeyError("x"))
    assert handler.server.frames[-1] == Failure("internal", "KeyError")
    assert handler.server.ended


def test_tail_is_split_off_the_body() -> None:
    tail = bytes([1, 0, 0, 0, 255, 255, 255, 255])
    resume, body = parse_resume("replay 2", b'{"a":1}' + tail)
    assert (resume, body) == (Resume.of("replay", (1, 0xFFFFFFFF)), b'{"a":1}')
    assert parse_resume("continue 0", b"{}")[1] == b"{}"
    with pytest.raises(HeaderError):
        parse_resume("continue 3", bytes(11))


def test_tails_and_notes_of_several_choices_are_split_off() -> None:
    tail = bytes([1, 0, 0, 0]) + bytes([2, 0, 0, 0, 3, 0, 0, 0]) + b"note"
    resume, body = parse_resume("continue 1,2:4,0", b"{}" + tail)
    assert resume.choices == (
        DeliveredChoice((1,)),
        DeliveredChoice((2, 3), b"note"),
        DeliveredChoice(),
    )
    assert body == b"{}"
    for malformed in ("continue 1,", "continue 1:x", "continue 1,99"):
        with pytest.raises(HeaderError):
            parse_resume(malformed, b"{}" + tail)
