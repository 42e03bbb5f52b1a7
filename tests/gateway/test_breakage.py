"""A bug of ours is one request's failure, never the worker's; one in the gateway is told."""

from __future__ import annotations

import asyncio
import json

import pytest
from structlog.testing import capture_logs

from relume.controlplane.gateway.client_effects import TO_CLIENT
from relume.controlplane.gateway.request_session import RequestSession
from relume.controlplane.stream import stream_effects as do
from relume.controlplane.stream.handlers import attempts
from relume.controlplane.stream.stream_data import Stream
from tests.gateway.peers import Behaviour

TEXT = "/v1/completions"
BODY = json.dumps({"model": "m", "prompt": "hi", "temperature": 0}).encode()


class Bug(RuntimeError):
    pass


async def test_an_exception_in_one_exchanges_task_is_that_exchanges_500(rig, monkeypatch):
    async with rig() as r:
        r.scheduler.serving = False

        async def capacity(request, timeout_s):
            raise Bug

        monkeypatch.setattr(r.scheduler, "capacity", capacity)
        answer = await r.ask(TEXT, BODY)
        assert answer.status == 500
        assert r.scheduler.endings() == [("failed", 500, 0, "-")]
        r.scheduler.serving = True
        assert (await r.ask(TEXT, BODY)).status == 200
        assert (await r.ask("/live", method="GET")).status == 200


async def test_a_broken_connect_task_is_a_500_too(rig, monkeypatch):
    async with rig() as r:

        async def broken(to):
            raise Bug

        with monkeypatch.context() as patch:
            patch.setattr(r.gateway._pool, "open", broken)
            assert (await r.ask(TEXT, BODY)).status == 500
        assert (await r.ask(TEXT, BODY)).status == 200


async def test_join_raises_what_broke_the_gateway_and_live_says_so(rig, monkeypatch):
    async with rig() as r:
        joined = asyncio.create_task(r.gateway.join())

        def broken(now):
            raise Bug

        monkeypatch.setattr(r.gateway._pool, "sweep", broken)
        with pytest.raises(ExceptionGroup) as raised:
            async with asyncio.timeout(5):
                await joined
        assert raised.group_contains(Bug)
        assert (await r.ask("/live", method="GET")).status == 503


async def test_join_ends_when_the_gateway_is_stopped(rig):
    async with rig() as r:
        joined = asyncio.create_task(r.gateway.join())
        assert (await r.ask("/live", method="GET")).status == 200
        assert not joined.done()
        await r.gateway.stop()
        async with asyncio.timeout(5):
            await joined


TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
TRACED = f"traceparent: {TRACE}\r\n"
STREAM = json.dumps({"model": "m", "prompt": "hi", "temperature": 0, "stream": True}).encode()


def observed(r) -> list[tuple]:
    return [entry for entry in r.scheduler.log if entry[0] == "observed"]


def raising(*_args, **_kwargs):
    raise Bug


@pytest.mark.parametrize("hook", ["send", "on_head", "on_data", "on_complete"])
async def test_a_bug_before_the_first_byte_is_a_500_and_not_the_workers(rig, monkeypatch, hook):
    async with rig() as r:
        if hook == "on_complete":
            r.engines[0].script.append(Behaviour(status=400))
        with monkeypatch.context() as patch, capture_logs() as lines:
            if hook == "send":
                patch.setattr(attempts, "dispatch_request", raising)
            else:
                patch.setattr(RequestSession, hook, raising)
            answer = await r.ask(TEXT, STREAM, headers=f"x-request-id: mine\r\n{TRACED}")
        assert answer.status == 500
        assert answer.json()["error"]["type"] == "internal_server_error"
        assert r.scheduler.endings() == [("failed", 500, 0, "-")]
        assert not observed(r)
        (line,) = [line for line in lines if line["event"] == "request_broke"]
        error = line["exc_info"]  # the parser wraps what its callbacks raise
        assert Bug in (type(error), type(error.__context__)) and line["log_level"] == "error"
        assert line["request"] == answer.headers["x-relume-request"]
        assert (line["client_id"], line["trace"]) == ("mine", TRACE)
        assert (await r.ask(TEXT, STREAM)).complete


@pytest.mark.parametrize("hook", ["take_chunk", "on_data"])
async def test_a_bug_in_midstream_ends_that_stream_with_an_error_event(rig, monkeypatch, hook):
    async with rig(engines=1) as r:
        r.engines[0].script.append(Behaviour(pause_s=0.01, tokens=40))
        if hook == "on_data":  # what `take_chunk` leaves to it
            monkeypatch.setattr(RequestSession, "take_chunk", lambda *_args: False)
        async with r.client() as client:
            client.send(TEXT, STREAM)
            await client.reader.readuntil(b'"index":3')
            with monkeypatch.context() as patch:
                patch.setattr(RequestSession, hook, raising)
                async with asyncio.timeout(20):
                    rest = await client.reader.read()
        assert b'"type":"internal_server_error"' in rest
        assert rest.count(b"}\n\ndata: [DONE]\n\n") == 1, "in HTTP chunks"
        [(outcome, status, tokens, _)] = r.scheduler.endings()
        assert (outcome, status) == ("failed", 500) and tokens >= 4
        assert not observed(r)
        assert (await r.ask(TEXT, STREAM)).complete


async def test_a_bug_while_a_lost_attempt_is_moved_ends_that_request(rig, monkeypatch):
    async with rig() as r:
        r.engines[0].script.append(Behaviour(cut_at=0))
        monkeypatch.setattr(r.scheduler, "observed", raising)
        assert (await r.ask(TEXT, STREAM)).status == 500
        assert r.scheduler.endings() == [("failed", 500, 0, "-")]


async def test_a_bug_while_a_stalled_stream_is_moved_leaves_the_others_to_be_moved(
    rig, monkeypatch
):
    async with rig() as r:
        r.engines[0].script += [Behaviour(hang_at=0), Behaviour(hang_at=0)]
        asked = [asyncio.create_task(r.ask(TEXT, STREAM)) for _ in range(2)]
        async with asyncio.timeout(10):
            while len(r.engines[0].seen) < 2:
                await asyncio.sleep(0.01)
        tell, told = r.scheduler.observed, []

        def once(*args):
            told.append(args)
            if len(told) == 1:
                raise Bug
            tell(*args)

        monkeypatch.setattr(r.scheduler, "observed", once)
        assert r.gateway.break_streams("w0", 3, "stall") == 2
        answers = await asyncio.gather(*asked)
        assert sorted(a.status for a in answers) == [200, 500]


async def test_a_bug_after_the_terminal_event_does_not_leave_the_client_waiting(rig, monkeypatch):
    async with rig() as r:
        monkeypatch.setitem(TO_CLIENT, do.Reply, raising)
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await r.ask(TEXT, BODY)
        assert r.scheduler.endings() == [("completed", 200, 12, "stop")]


async def test_a_request_whose_failure_cannot_be_told_ends_all_the_same(rig, monkeypatch):
    """The machine fails on it, and fails again while it ends it."""
    async with rig() as r:
        with monkeypatch.context() as patch:
            patch.setattr(Stream, "reply_headers", raising)
            with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
                await r.ask(TEXT, BODY)
        assert r.scheduler.endings() == [("failed", 500, 12, "-")]
        assert (await r.ask(TEXT, BODY)).status == 200


@pytest.mark.parametrize("method", ["admit", "serve"])
async def test_a_bug_at_the_door_is_a_500(rig, monkeypatch, method):
    async with rig() as r:
        with monkeypatch.context() as patch:
            patch.setattr(r.gateway.service, method, raising)
            answer = await r.ask(TEXT, BODY)
        assert answer.status == 500
        assert answer.json()["error"]["message"] == "the gateway failed on this request"
        assert not r.scheduler.log
        assert (await r.ask(TEXT, BODY)).status == 200


async def test_a_bug_once_a_request_is_accepted_ends_it(rig, monkeypatch):
    async with rig() as r:
        with monkeypatch.context() as patch:
            patch.setattr(r.scheduler, "assign", raising)
            assert (await r.ask(TEXT, BODY)).status == 500
        assert r.scheduler.endings() == [("failed", 500, 0, "-")]
        assert (await r.ask(TEXT, BODY)).status == 200
