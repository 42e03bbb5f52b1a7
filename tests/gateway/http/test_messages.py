"""Anthropic's Messages through the gateway: failover, and errors as its clients read them."""

from __future__ import annotations

import json

import pytest

from tests.gateway.client_requests import until
from tests.gateway.peers import Behaviour, expected_stream, raw_response

ROUTE = "/v1/messages"
REFUSED = b'{"error":{"message":"Field required","type":"Bad Request","param":null,"code":400}}'
REFUSED_BY_HANDLER = b'{"type":"error","error":{"type":"BadRequestError","message":"too long"}}'


def body(**extra: object) -> bytes:
    request_body = {"model": "m", "max_tokens": 20, "messages": [{"role": "user", "content": "hi"}]}
    return json.dumps({**request_body, "temperature": 0, **extra}).encode()


def error_of(content: bytes) -> dict[str, str]:
    found = json.loads(content)
    assert set(found) == {"type", "error"} and found["type"] == "error"
    assert set(found["error"]) == {"type", "message"}
    return dict(found["error"])


async def test_a_stream_of_messages_continues_on_another_worker(rig):
    request_body = body(stream=True)
    async with rig() as r:
        r.engines[0].default = Behaviour(cut_at=900)
        answer = await r.ask(ROUTE, request_body, headers="x-request-id: q\r\n")
        assert answer.complete
        assert answer.body == expected_stream(request_body, "cmpl-q", "1700000000", 12, False)
        assert answer.headers["x-relume-verdict"] == "exact"
        assert r.engines[1].seen[0].resume.startswith("continue ")
        assert r.scheduler.endings() == [("completed", 200, 12, "length")]


@pytest.mark.parametrize(
    ("how", "status", "kind"),
    [
        (Behaviour(status=400, body=REFUSED), 400, "invalid_request_error"),
        (Behaviour(status=404, body=b"Not Found"), 404, "not_found_error"),
        (Behaviour(status=400, body=REFUSED_BY_HANDLER), 400, "BadRequestError"),
        (Behaviour(status=503), 503, "overloaded_error"),
    ],
)
async def test_errors_have_the_shape_of_messages(rig, how, status, kind):
    async with rig(engines=1, wait_timeout_s=0.2) as r:
        r.engines[0].default = how
        answer = await r.ask(ROUTE, body())
        assert (answer.status, error_of(answer.body)["type"]) == (status, kind)


async def test_so_have_those_of_the_gateway_itself(rig):
    async with rig(api_keys=frozenset({"k"})) as r:
        for path in (ROUTE, f"{ROUTE}/count_tokens"):
            answer = await r.ask(path, body())
            assert (answer.status, error_of(answer.body)["type"]) == (401, "authentication_error")
        answer = await r.ask(ROUTE, b'{"model":"m"}', headers="x-api-key: k\r\n")
        assert answer.status == 400
        assert error_of(answer.body)["message"] == "'messages' is required"


async def test_a_broken_stream_ends_with_an_error_event_of_messages(rig):
    request_body = body(stream=True)
    async with rig(engines=1, wait_timeout_s=0.2) as r:
        cut_at = len(b"".join(raw_response(request_body, "cmpl-q")[:5]))
        r.engines[0].script.append(Behaviour(cut_at=cut_at))
        r.engines[0].default = Behaviour(status=500)
        answer = await r.ask(ROUTE, request_body, headers="x-request-id: q\r\n")
        event, data = answer.body.rsplit(b"\n\n", 2)[1].split(b"\n")
        assert event == b"event: error"
        assert error_of(data.removeprefix(b"data: "))["type"] in ("api_error", "overloaded_error")
        assert b"[DONE]" not in answer.body


RELAYED = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
EVENT = b'event: ping\ndata: {"type": "ping"}\n\n'
PIECES = [RELAYED, b"%x\r\n%b\r\n" % (len(EVENT), EVENT), b"0\r\n\r\n"]


@pytest.mark.parametrize("headers", ["", "x-relume-resumable: 1\r\n"])
async def test_an_engine_of_an_earlier_build_is_relayed(rig, headers):
    """It answers without frames. What it sends passes as it comes, unprotected."""
    async with rig(engines=1) as r:
        r.engines[0].default = Behaviour(raw=PIECES)
        answer = await r.ask(ROUTE, body(stream=True), headers=headers)
        assert (answer.status, answer.body) == (200, EVENT)
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.headers["x-relume-protected"] == "no"
        assert "x-relume-resumable" not in answer.headers
        assert r.scheduler.endings() == [("completed", 200, 0, "-")]


async def test_its_client_that_leaves_does_not_return(rig):
    async with rig(engines=1) as r:
        r.engines[0].default = Behaviour(raw=PIECES[:2], hang_at=sum(map(len, PIECES[:2])))
        async with r.client() as client:
            client.send(ROUTE, body(stream=True), headers="x-relume-resumable: 1\r\n")
            await client.reader.readuntil(b"ping")
        await until(lambda: r.scheduler.endings())
        assert r.scheduler.endings()[0][:2] == ("cancelled", 499)


async def test_no_engine_without_frames_continues_a_stream(rig):
    async with rig(wait_timeout_s=0.2) as r:
        r.engines[0].default = Behaviour(cut_at=900)
        r.engines[1].default = Behaviour(raw=PIECES)
        answer = await r.ask(ROUTE, body(stream=True))
        assert b"ping" not in answer.body
        assert b"event: error\n" in answer.body
