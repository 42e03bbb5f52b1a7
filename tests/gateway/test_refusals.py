"""Workers that cannot be reached, are full, or refuse a request that was moved to them."""

from __future__ import annotations

import json
import socket
from contextlib import ExitStack, contextmanager

import pytest

from relume.events.vocabulary.enums import TransportKind
from relume.policies.liveness.suspicious import SUSPICIOUS
from tests.gateway.client_requests import ends_as_vllm
from tests.gateway.peers import Behaviour, expected_stream

TEXT = "/v1/completions"
ERROR = b'{"error":{"message":"no","code":"400"}}'


def body(**extra) -> bytes:
    return json.dumps({"model": "m", "prompt": "hi", "temperature": 0, **extra}).encode()


def observed(r) -> list[str]:
    return [entry[1] for entry in r.scheduler.log if entry[0] == "observed"]


@contextmanager
def full_listener():
    """A port whose queue of connections is full: the kernel drops what else would connect."""
    with socket.socket() as listener, ExitStack() as clients:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(4):
            client = clients.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(listener.getsockname())
        yield listener.getsockname()[1]


async def test_a_worker_that_swallows_connections_is_unreachable_and_suspicious(rig):
    async with rig(connect_timeout_s=0.1) as r:
        with full_listener() as port:
            r.engines[0].port = port
            answer = await r.ask(TEXT, body())
        assert answer.status == 200
        assert observed(r) == ["unreachable"]
        assert ("assign", "unreachable", 0) in r.scheduler.log
    assert TransportKind.UNREACHABLE in SUSPICIOUS


@pytest.mark.parametrize("statuses,told", [((503, 503, 503), 503), ((429, 429, 429), 429)])
async def test_workers_that_are_all_full_ask_the_client_to_come_again(rig, statuses, told):
    async with rig(engines=3) as r:
        for engine, status in zip(r.engines, statuses, strict=True):
            engine.default = Behaviour(status=status)
        answer = await r.ask(TEXT, body())
        assert answer.status == told
        assert int(answer.headers["retry-after"]) > 0


async def test_one_real_error_among_full_workers_is_502(rig):
    async with rig(engines=3) as r:
        for engine, status in zip(r.engines, (503, 500, 429), strict=True):
            engine.default = Behaviour(status=status)
        answer = await r.ask(TEXT, body())
        assert answer.status == 502


async def test_a_full_worker_is_not_asked_twice_while_another_is_free(rig):
    async with rig() as r:
        r.engines[0].default = Behaviour(status=429)
        assert (await r.ask(TEXT, body())).status == 200


async def test_a_4xx_on_the_first_attempt_is_the_clients(rig):
    async with rig() as r:
        r.engines[0].default = Behaviour(status=400, body=ERROR)
        answer = await r.ask(TEXT, body())
        assert (answer.status, answer.body) == (400, ERROR)
        assert not r.engines[1].seen and not observed(r)


async def test_a_4xx_to_a_moved_stream_asks_the_next_worker(rig):
    asked = body(stream=True)
    async with rig(engines=3) as r:
        r.engines[0].default = Behaviour(cut_at=900)
        r.engines[1].default = Behaviour(status=422, body=ERROR)
        answer = await r.ask(TEXT, asked, headers="x-request-id: q\r\n")
        assert answer.complete
        assert answer.body == expected_stream(asked, "cmpl-q", "1700000000", 12, False)
        assert observed(r) == ["eof", "declined"]
        assert r.engines[2].seen[0].resume.startswith("continue ")
    assert TransportKind.DECLINED not in SUSPICIOUS


async def test_a_moved_stream_that_everybody_declines_ends_with_an_error_event(rig):
    async with rig(engines=3, wait_timeout_s=30) as r:
        r.engines[0].default = Behaviour(cut_at=900)
        for engine in r.engines[1:]:
            engine.default = Behaviour(status=422, body=ERROR)
        answer = await r.ask(TEXT, body(stream=True))
        assert ends_as_vllm(answer.body)["code"] == "502"
        assert r.scheduler.endings()[-1][:2] == ("failed", 502)


async def test_a_moved_request_that_no_worker_began_keeps_the_4xx_of_all(rig):
    async with rig(engines=3) as r:
        r.engines[0].stop()
        for engine in r.engines[1:]:
            engine.default = Behaviour(status=400, body=ERROR)
        answer = await r.ask(TEXT, body())
        assert (answer.status, answer.body) == (400, ERROR)
        assert all(len(engine.seen) == 1 for engine in r.engines[1:])
        assert r.scheduler.endings() == [("rejected", 400, 0, "-")]


async def test_a_whole_answer_that_a_worker_began_and_the_others_decline_is_502(rig):
    """Of a request that one worker computed tokens for, a 4xx is not its client's error."""
    async with rig(engines=3) as r:
        r.engines[0].default = Behaviour(cut_after=5)
        for engine in r.engines[1:]:
            engine.default = Behaviour(status=400, body=ERROR)
        answer = await r.ask(TEXT, body())
        assert answer.status == 502 and answer.json()["error"]["type"] == "bad_gateway_error"
        [(outcome, status, tokens, _)] = r.scheduler.endings()
        assert (outcome, status) == ("failed", 502) and tokens > 0


async def test_a_request_that_fails_alike_on_two_idle_workers_is_its_clients_error(rig):
    """It is not tried on the third, and no worker is to blame."""
    async with rig(engines=3) as r:
        for engine in r.engines:
            engine.default = Behaviour(status=500)
        answer = await r.ask(TEXT, body(stream=True))
        assert answer.status == 400
        assert b"2 idle workers failed on this request alike (answered 500)" in answer.body
        assert b"invalid_request_error" in answer.body
        assert [len(engine.seen) for engine in r.engines] == [1, 1, 0]
        assert ("ended", "rejected", 400, 0, "-") in r.scheduler.log


@pytest.mark.parametrize(
    ("statuses", "busy"),
    [((500, 500, 200), {"w0"}), ((500, 502, 200), set()), ((503, 503, 200), set())],
    ids=["other requests run there", "they fail unlike", "they are full"],
)
async def test_workers_that_fail_otherwise_leave_the_request_to_the_next(rig, statuses, busy):
    async with rig(engines=3) as r:
        r.scheduler.busy = busy
        for engine, status in zip(r.engines, statuses, strict=True):
            if status != 200:
                engine.default = Behaviour(status=status)
        answer = await r.ask(TEXT, body())
        assert answer.status == 200
        assert observed(r) == ["engine_error"] * 2


async def test_a_request_is_limited_while_capacity_is_short_and_its_answer_says_so(rig):
    async with rig() as r:
        r.scheduler.waiting.limit = 5
        answer = await r.ask(TEXT, body(max_tokens=50))
        assert answer.headers["x-relume-max-tokens"] == "5"
        assert json.loads(r.engines[0].seen[-1].body)["max_tokens"] == 5
        within = await r.ask(TEXT, body(max_tokens=4))
        assert "x-relume-max-tokens" not in within.headers
