"""OpenAI's Responses through the gateway: numbers of events, errors, and what is kept nowhere."""

from __future__ import annotations

import json

import pytest

from tests.gateway.peers import Behaviour, raw_response, token_ids

ROUTE = "/v1/responses"
HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: application/x-relume-frames\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)


def body(**extra: object) -> bytes:
    return json.dumps({"model": "m", "input": "hi", "temperature": 0, **extra}).encode()


def event(number: int, **content: object) -> bytes:
    data = json.dumps({**content, "sequence_number": number, "type": "x"}, separators=(",", ":"))
    return b"event: x\ndata: " + data.encode() + b"\n\n"


def frame(start: int, token: int, shown: bytes) -> bytes:
    content = b":r %d %d %d\n%b" % (start, len(shown), token, shown)
    return b"%x\r\n%b\r\n" % (len(content), content)


def numbered(request_body: bytes) -> list[bytes]:
    """Three tokens; the first comes with the response's first event."""
    first = event(0, response={"id": "r", "created_at": 1700000017}) + event(1)
    ids = token_ids(request_body, 3)
    return [HEAD, frame(0, ids[0], first), frame(1, ids[1], event(2)), frame(2, ids[2], event(3))]


async def test_the_next_worker_hears_the_number_of_the_next_event(rig):
    request_body = body(stream=True)
    async with rig() as r:
        r.engines[0].default = Behaviour(raw=numbered(request_body), cut_after=4, pause_s=0.02)
        answer = await r.ask(ROUTE, request_body)
        assert answer.complete
        (seen,) = r.engines[1].seen
        assert seen.resume == "continue 3"
        assert seen.headers["x-relume-next-event"] == "4"
        assert seen.headers["x-relume-created"] == "1700000017"


async def test_a_broken_stream_ends_with_a_numbered_error_event(rig):
    request_body = body(stream=True)
    async with rig(engines=1, wait_timeout_s=0.2) as r:
        r.engines[0].script.append(Behaviour(raw=numbered(request_body), cut_after=4))
        r.engines[0].default = Behaviour(status=500)
        answer = await r.ask(ROUTE, request_body)
        name, data = answer.body.rsplit(b"\n\n", 2)[1].split(b"\n")
        error = json.loads(data.removeprefix(b"data: "))
        assert name == b"event: error"
        assert (error["type"], error["sequence_number"], error["param"]) == ("error", 4, None)
        assert error["message"] and error["code"] and b"[DONE]" not in answer.body


@pytest.mark.parametrize(
    "extra",
    [{"previous_response_id": "resp_1"}, {"background": True}, {"conversation": "conv_1"}],
    ids=str,
)
async def test_what_needs_a_stored_response_is_refused_with_its_remedy(rig, extra):
    async with rig(engines=1) as r:
        answer = await r.ask(ROUTE, body(**extra))
        (name,) = extra
        assert answer.status == 400
        error = answer.json()["error"]
        assert (error["param"], error["code"]) == (name, "unsupported_parameter")
        assert "stored" in error["message"]
        assert not r.engines[0].seen


@pytest.mark.parametrize(
    "extra", [{"store": True}, {"store": False}, {"background": False}], ids=str
)
async def test_a_request_that_only_may_be_stored_is_served(rig, extra):
    async with rig(engines=1) as r:
        answer = await r.ask(ROUTE, body(**extra))
        assert answer.status == 200 and answer.headers["x-relume-verdict"] == "exact"


async def test_tools_that_the_worker_runs_are_relayed(rig):
    """It generates several times then, with calls of tools between them."""
    request_body = body(tools=[{"type": "web_search_preview"}], stream=True)
    async with rig(engines=1) as r:
        answer = await r.ask(ROUTE, request_body)
        assert (answer.status, answer.body) == (200, b"{}")
        assert answer.headers["x-relume-protected"] == "no"
        assert "x-relume-request" not in r.engines[0].seen[0].headers


async def test_a_refusal_keeps_openais_shape(rig):
    async with rig(engines=1) as r:
        answer = await r.ask(ROUTE, b'{"model":"m","input":5}')
        assert answer.status == 400
        assert answer.json()["error"]["message"].startswith("'input' must be a string or an array")


async def test_an_engine_of_an_earlier_build_is_relayed(rig):
    async with rig(engines=1) as r:
        sent = b'{"object":"response"}'
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        r.engines[0].default = Behaviour(raw=head % len(sent) + sent)
        answer = await r.ask(ROUTE, body())
        assert (answer.status, answer.body) == (200, sent)
        assert answer.headers["x-relume-protected"] == "no"


def test_the_scripted_head_is_that_of_other_engines():
    assert raw_response(b"", "x")[0] == HEAD
