"""What the gateway refuses without a worker, and the limits in bytes, connections and time."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest

from relume.controlplane.gateway.config import GatewayConfig
from relume.controlplane.gateway.endpoint import Gateway
from relume.controlplane.gateway.errors import UnsafeBind
from tests.gateway.client_requests import TEXT, stream_body, text_body, until
from tests.gateway.peers import Behaviour, FakeScheduler
from tests.gateway.raw_client import RawClient, is_openai_error

# --- refusals that never reach a worker


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'{"prompt":1}',
        text_body(temperature=-1),
        text_body(n=0),
        text_body(max_tokens=-5),
    ],
)
async def test_bad_bodies_are_400_and_the_connection_lives(rig, body):
    async with rig() as r:
        async with r.client() as client:
            assert is_openai_error(await client.ask(TEXT, body), 400)
            assert (await client.ask(TEXT, text_body())).status == 200
        assert len(r.engines[0].seen) == 1
        assert len(r.scheduler.endings()) == 1


async def test_wrong_content_type_and_encoding(rig):
    async with rig() as r:
        async with r.client() as client:
            client.writer.write(
                b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: text/plain\r\n"
                b"content-length: 2\r\n\r\n{}"
            )
            assert is_openai_error(await client.answer(), 415)
            compressed = await client.ask(TEXT, b"xx", headers="content-encoding: gzip\r\n")
            assert is_openai_error(compressed, 415)


async def test_100_mb_body_is_refused_unread(rig):
    async with rig() as r:
        async with r.client() as client:
            client.writer.write(
                b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
                b"content-length: 104857600\r\n\r\n"
            )
            answer = await client.answer()
            assert is_openai_error(answer, 413, "body_too_large")
            assert answer.headers["connection"] == "close"
        assert r.gateway.service.bodies_bytes == 0


async def test_client_that_sends_its_100_mb_before_it_listens_still_reads_413(rig):
    async with rig() as r:
        status, _sent = await flood(r.gateway.port, 100 << 20)
        assert status == 413
        assert r.gateway.service.bodies_bytes == 0


async def test_refused_body_is_cut_off_in_the_end(rig):
    async with rig(linger_bytes=10 << 20) as r:
        _status, sent = await flood(r.gateway.port, 100 << 20)
        assert sent < 60 << 20  # what was thrown away, and socket buffers


async def flood(port: int, size: int) -> tuple[int, int]:
    """Send a body as fast as it is taken, then listen: (status, 0 for none; bytes sent)."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"POST {TEXT} HTTP/1.1\r\nhost: x\r\ncontent-length: {size}\r\n\r\n".encode())
    sent = status = 0
    try:
        async with asyncio.timeout(20):
            while sent < size:
                writer.write(b"x" * 65536)
                await writer.drain()
                sent += 65536
            status = int((await reader.readline()).split()[1])
    except ConnectionError:
        pass
    writer.transport.abort()
    return status, sent


async def test_endless_chunked_body_is_refused_at_the_limit(rig):
    async with rig(max_body_bytes=100_000) as r:
        async with r.client() as client:
            client.writer.write(
                b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
                + b"fff0\r\n%b\r\n" % (b"x" * 0xFFF0) * 2
            )
            assert is_openai_error(await client.answer(), 413)
            assert await client.reader.read() == b""


async def test_headers_beyond_the_limit_are_431(rig):
    async with rig() as r:
        async with r.client() as client:
            answer = await client.ask(TEXT, text_body(), headers=f"x-a: {'a' * 70_000}\r\n")
            assert is_openai_error(answer, 431)
        async with r.client() as client:  # one endless header
            client.writer.write(b"GET /live HTTP/1.1\r\nhost: x\r\nx-a: ")
            for _ in range(40):
                client.writer.write(b"a" * 4096)
                await asyncio.sleep(0)
            assert is_openai_error(await client.answer(), 431)
        async with r.client() as client:  # many small ones, and just below the limit
            many = "".join(f"x-{i}: {'b' * 40}\r\n" for i in range(2000))
            assert is_openai_error(await client.ask(TEXT, text_body(), headers=many), 431)
            assert (await r.ask(TEXT, text_body(), headers=f"x: {'a' * 60_000}\r\n")).status == 200


@pytest.mark.parametrize(
    "raw",
    [
        b"nonsense\r\n\r\n",
        b"GET /live HTTP/1.1\r\nbad header\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: -1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n"
        b"transfer-encoding: chunked\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET / HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n",
    ],
)
async def test_broken_http_is_400_and_closed(rig, raw):
    async with rig() as r, r.client() as client:
        client.writer.write(raw)
        async with asyncio.timeout(5):
            answer = await client.answer()
            assert is_openai_error(
                answer, 404 if b"upgrade" in raw and answer.status == 404 else 400
            )
            assert await client.reader.read() == b""


async def test_api_keys(rig):
    async with rig(api_keys=frozenset({"k1", "k2"})) as r:
        wrong = ("authorization: Bearer no\r\n", "authorization: Basic k1\r\n", "x-api-key: no\r\n")
        for header in ("", *wrong, "authorization: Bearer no\r\nx-api-key: k1\r\n"):
            answer = await r.ask(TEXT, text_body(), headers=header)
            assert is_openai_error(answer, 401, "invalid_api_key")
        assert not r.scheduler.log
        for key in ("k1", "k2"):
            good = await r.ask(TEXT, text_body(), headers=f"authorization: Bearer {key}\r\n")
            assert good.status == 200
            good = await r.ask(TEXT, text_body(), headers=f"x-api-key: {key}\r\n")
            assert good.status == 200, "as clients of /v1/messages send it"
        assert (await r.ask("/v1/models", method="GET")).status == 401
        for path in ("/health", "/live"):
            assert (await r.ask(path, method="GET")).status == 200


async def test_tenant_names_the_key_without_giving_it_away(rig):
    async with rig(api_keys=frozenset({"secret-1"})) as r:
        arrivals = []
        arrived = r.scheduler.arrived
        r.scheduler.arrived = lambda arrival: arrivals.append(arrival) or arrived(arrival)
        await r.ask(TEXT, text_body(), headers="authorization: Bearer secret-1\r\n")
        assert arrivals[0].tenant and "secret" not in arrivals[0].tenant


def test_listening_beyond_loopback_needs_keys():
    for host in ("0.0.0.0", "::", "10.0.0.1", "example.org", ""):
        with pytest.raises(UnsafeBind):
            Gateway(None, GatewayConfig(host=host))
    for host in ("127.0.0.1", "::1", "localhost", "127.9.9.9"):
        Gateway(FakeScheduler.__new__(FakeScheduler), GatewayConfig(host=host))
    Gateway(None, GatewayConfig(host="0.0.0.0", api_keys=frozenset({"k"})))


async def test_request_id_is_honoured_if_usable(rig):
    async with rig() as r:
        good = await r.ask(TEXT, text_body(), headers="x-request-id: my-id_1.x\r\n")
        assert good.headers["x-request-id"] == "my-id_1.x"
        for bad in ("a b", "x" * 65, "ä", 'a"b'):
            answer = await r.ask(TEXT, text_body(), headers=f"x-request-id: {bad}\r\n")
            assert answer.headers["x-request-id"] not in (bad, "")
        requests = {s.headers["x-relume-request"] for s in r.engines[0].seen}
        assert len(requests) == 5
        twice = [await r.ask(TEXT, text_body(), headers="x-request-id: t\r\n") for _ in range(2)]
        assert len({a.headers["x-relume-request"] for a in twice}) == 2


async def test_model_is_optional_with_one_and_required_with_several(rig):
    async with rig() as r:
        body = json.dumps({"prompt": "hi", "temperature": 0}).encode()
        assert (await r.ask(TEXT, body)).status == 200
        r.scheduler.names = ["a", "b"]
        assert is_openai_error(await r.ask(TEXT, body), 400)


async def test_too_many_requests_are_shed(rig):
    async with rig(max_requests=2) as r:
        r.engines[0].default = Behaviour(hang_at=300)
        clients = [r.client() for _ in range(2)]
        for client in clients:
            await client.__aenter__()
            client.send(TEXT, stream_body())
        await until(lambda: r.gateway.counters.in_flight == 2)
        answer = await r.ask(TEXT, text_body())
        assert is_openai_error(answer, 429) and int(answer.headers["retry-after"]) > 0
        assert (await r.ask("/health", method="GET")).status == 200
        for client in clients:
            await client.__aexit__()
        await until(lambda: not r.gateway.counters.in_flight)


# --- time


async def test_slow_headers_and_bodies_are_bounded(rig):
    async with rig(header_timeout_s=0.1, body_timeout_s=0.2, linger_timeout_s=0.1) as r:
        async with r.client() as client:
            client.writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n")
            drip = asyncio.create_task(dribble(client, b"x-a: b\r\n", 0.02))
            assert is_openai_error(await client.answer(), 408)
            drip.cancel()
        async with r.client() as client:
            client.writer.write(
                b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 500\r\n\r\n"
            )
            drip = asyncio.create_task(dribble(client, b"x", 0.02))
            assert is_openai_error(await client.answer(), 408)
            drip.cancel()
        await until(lambda: not r.gateway.service.clients)


async def dribble(client: RawClient, data: bytes, pause_s: float) -> None:
    while True:
        client.writer.write(data)
        await asyncio.sleep(pause_s)


async def test_idle_connections_are_closed_after_their_time(rig):
    async with rig(keepalive_timeout_s=0.2, linger_timeout_s=0.2) as r:
        async with r.client() as client:
            await client.ask("/live", method="GET")
            async with asyncio.timeout(5):
                assert await client.reader.read() == b""
        await until(lambda: not r.gateway.service.clients)


async def test_1000_idle_connections_cost_little_and_delay_no_request(rig):
    async with rig() as r:
        before = rss_bytes()
        clients = [r.client() for _ in range(1000)]
        for client in clients:
            await client.__aenter__()
        await until(lambda: len(r.gateway.service.clients) == 1000)
        answer = await r.ask(TEXT, stream_body(), headers="x-request-id: q\r\n")
        assert answer.body.endswith(b"[DONE]\n\n")
        assert (rss_bytes() - before) / 1000 < 60_000  # both ends live in this process
        for client in clients:
            await client.__aexit__()
        await until(lambda: not r.gateway.service.clients)


def rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def test_connections_beyond_the_limit_are_turned_away(rig):
    async with rig(max_clients=3) as r:
        clients = [r.client() for _ in range(3)]
        for client in clients:
            await client.__aenter__()
        await until(lambda: len(r.gateway.service.clients) == 3)
        async with r.client() as fourth:
            assert is_openai_error(await fourth.answer(), 503)
        for client in clients:
            await client.__aexit__()
