"""The end of a resumable stream: when it is over, and what its engine is told."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
from types import SimpleNamespace
from typing import Any

import pytest

from relume.controlplane.gateway import deliveries
from relume.controlplane.stream.stream_events import Owned
from tests.gateway.client_requests import CHAT, chat_body
from tests.gateway.peers import Behaviour, expected_stream, frames
from tests.gateway.streams.test_away import until

TOKENS = 300
BYTES = 1000
RESUMABLE = "x-relume-resumable: 1\r\n"


def post(body: bytes) -> bytes:
    lines = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n{RESUMABLE}"
    return f"{lines}content-length: {len(body)}\r\n\r\n".encode() + body


def released(engine) -> set[str]:
    """Requests whose streams the engine was told to forget."""
    told = [json.loads(s.body) for s in engine.seen if s.path == "/relume/release"]
    return {t["request"] for t in told} | {also[0] for t in told for also in t.get("also", ())}


def ids_and_data(answer: bytes) -> tuple[list[str], list[bytes]]:
    ids = [line.decode() for line in re.findall(rb"^id: (\S+)$", answer, re.M)]
    return ids, re.findall(rb"^data: .*$", answer, re.M)


async def test_streams_that_were_delivered_are_over_and_released(rig):
    async with rig(engines=1) as r:
        body = chat_body()
        async with asyncio.TaskGroup() as asking:
            for _ in range(4):
                asking.create_task(r.ask(CHAT, body, headers=RESUMABLE))
        asked = {s.headers["x-relume-request"] for s in r.engines[0].seen if s.path == CHAT}
        assert len(asked) == 4
        await until(lambda: len(r.scheduler.endings()) == 4)
        assert {e[:3] for e in r.scheduler.endings()} == {("completed", 200, 12)}
        await until(lambda: released(r.engines[0]) == asked)


async def test_a_client_with_a_new_request_has_the_last_answer(rig):
    """Its end is written of ahead of what comes next, whatever TCP has said by then."""
    async with rig(engines=1) as r:
        async with r.client() as client:
            for _ in range(3):
                await client.ask(CHAT, chat_body(), headers=RESUMABLE)
        await until(lambda: len(r.scheduler.endings()) == 3)
        assert [entry[0] for entry in r.scheduler.log] == ["assign", "ended"] * 3
        assert not r.gateway._streams.open


async def unread(r) -> tuple[socket.socket, bytes, Any]:
    """A client that has stopped reading after three events, of a stream that is all written. Its
    connection, what it has, its session."""
    engine = r.engines[0]
    engine.script.append(Behaviour(tokens=TOKENS, text_bytes=BYTES))
    lazy = socket.socket()
    lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    lazy.connect(("127.0.0.1", r.gateway.port))
    lazy.sendall(post(chat_body()))
    lazy.setblocking(False)
    loop = asyncio.get_running_loop()
    early = b""
    async with asyncio.timeout(20):
        while early.count(b"\n\n") < 3:
            early += await loop.sock_recv(lazy, 1024)
    await until(lambda: engine.seen[0].finished)
    session = r.gateway._streams.open[engine.seen[0].headers["x-relume-request"]]
    await until(lambda: session.delivering)
    assert not r.scheduler.endings() and not session.stream.is_absent
    return lazy, early[: early.rindex(b"\n\n") + 2], session


async def test_another_replica_takes_a_stream_whose_last_bytes_arrive(rig):
    """The end is recorded for the replica that owns it now, which also releases it."""
    async with rig(engines=1) as r:
        lazy, _, session = await unread(r)
        request = session.arrival.request
        r.gateway.let_go(request)
        assert session.is_taken and not r.scheduler.endings()
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(20):
            while not r.scheduler.endings():
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(loop.sock_recv(lazy, 1 << 16), 0.1)
        assert r.scheduler.endings()[0][:3] == ("completed", 200, TOKENS)
        assert request not in r.gateway._streams.open
        r.gateway._streams.releases.flush(r.gateway._context)
        await asyncio.sleep(0)
        assert released(r.engines[0]) == set()
        lazy.close()


async def test_a_client_returns_to_a_stream_that_another_replica_took(rig):
    """It is adopted like any other replica's, though the last bytes are still on their way here."""
    async with rig(engines=1) as r:
        lazy, early, session = await unread(r)
        adopted = []
        arrival = session.arrival
        r.gateway.let_go(arrival.request)

        async def owned(request: str, timeout_s: float) -> Owned:
            return Owned(False)

        r.scheduler.returns = SimpleNamespace(
            known=lambda request: (arrival, arrival.resumable), is_moving=lambda request: False,
            adopt=lambda *given: adopted.append(given[1:]), owned=owned,
        )  # fmt: skip
        ids, _ = ids_and_data(early)
        answer = await r.ask(CHAT, b"", headers=f"{RESUMABLE}last-event-id: {ids[-1]}\r\n")
        assert answer.status == 410
        assert adopted == [(int(ids[-1].rsplit(":", 1)[1]), 0)]
        assert not r.gateway._streams.open and not r.scheduler.endings()
        lazy.close()


@pytest.mark.parametrize(("is_behind", "status"), [(True, 503), (False, 410)])
async def test_a_replica_that_lags_behind_the_log_has_a_client_return_again(rig, is_behind, status):
    """It may lack the stream: only one that knows the log says that there is none."""
    async with rig(engines=1) as r:
        lazy, early, session = await unread(r)
        r.gateway.let_go(session.arrival.request)
        lazy.close()
        await until(lambda: not r.gateway._streams.open)
        r.scheduler.returns = SimpleNamespace(
            known=lambda request: None, is_behind=is_behind, is_sought=lambda request: False
        )
        ids, _ = ids_and_data(early)
        answer = await r.ask(CHAT, b"", headers=f"{RESUMABLE}last-event-id: {ids[-1]}\r\n")
        assert answer.status == status
        assert ("retry-after" in answer.headers) == is_behind


@pytest.mark.parametrize("is_lost", [True, False])
async def test_last_bytes_that_were_lost_are_had_again_where_the_stream_is_kept(rig, is_lost):
    """The client has stopped reading; all is written, and its connection breaks. Or it breaks when
    the client has returned, and says nothing of the new connection."""
    async with rig(engines=1) as r:
        engine, body = r.engines[0], chat_body()
        r.scheduler.returns = SimpleNamespace(came_back=lambda *at: None)
        lazy, early, session = await unread(r)
        request = session.arrival.request
        if is_lost:
            lazy.close()
            await until(lambda: session.stream.is_absent)

        response_id = "chatcmpl-" + engine.seen[0].headers["x-request-id"]
        created = engine.seen[0].headers["x-relume-created"]
        envelope = json.dumps({"path": CHAT, "id": response_id[9:], "created": created}).encode()
        envelope += b"\n" + body
        known = frames(
            body=body,
            response_id=response_id,
            created=created,
            n=TOKENS,
            start=0,
            chat=True,
            stream=True,
            size=BYTES,
        )
        answer = b":v %d\n%b" % (len(envelope), envelope) + b"".join(known)
        start = (
            b"HTTP/1.1 200 OK\r\ncontent-type: application/x-relume-frames\r\n"
            b"x-relume-from: 0\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        raw = b"%b%x\r\n%b\r\n0\r\n\r\n" % (start, len(answer), answer)
        engine.script.append(Behaviour(raw=raw, before_s=4 * deliveries.LOOK_S))
        ids, data = ids_and_data(early)
        again = f"{RESUMABLE}last-event-id: {ids[-1]}\r\n"
        asking = asyncio.create_task(r.ask(CHAT, b"", headers=again))
        await until(lambda: engine.seen[-1].path == "/relume/attach")
        lazy.close()
        rest = await asking
        assert rest.status == 200, rest
        (attached,) = [json.loads(s.body) for s in engine.seen if s.path == "/relume/attach"]
        assert attached["tokens"] == int(ids[-1].rsplit(":", 1)[1]) > 0
        whole = expected_stream(body, response_id, created, TOKENS, True, BYTES)
        assert data + ids_and_data(rest.body)[1] == ids_and_data(whole)[1]
        await until(lambda: r.scheduler.endings())
        assert r.scheduler.endings()[0][:3] == ("completed", 200, TOKENS)
        await until(lambda: released(engine) == {request})


async def test_a_gateway_that_stops_records_the_answers_that_have_arrived(rig, monkeypatch):
    """Its next look at its connections would come too late."""
    monkeypatch.setattr(deliveries, "LOOK_S", 600.0)
    async with rig(engines=1) as r, r.client() as client:
        assert (await client.ask(CHAT, chat_body(), headers=RESUMABLE)).complete
        assert not r.scheduler.endings()
        await r.gateway.stop()
        assert r.scheduler.endings()[0][:3] == ("completed", 200, 12)
