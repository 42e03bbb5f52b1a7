"""The client's side: HTTP as clients really speak it, limits, and bad manners."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import openai
import pytest

from relume.controlplane.gateway.config import GatewayConfig
from relume.controlplane.gateway.endpoint import Gateway
from relume.controlplane.gateway.errors import UnsafeBind
from relume.controlplane.gateway.http.replies import Reply
from tests.gateway.peers import Behaviour, Engine, FakeScheduler, RawClient, expected_stream

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"


def text_body(**extra) -> bytes:
    return json.dumps({"model": "m", "prompt": "hi", "temperature": 0, **extra}).encode()


def stream_body(**extra) -> bytes:
    return text_body(stream=True, **extra)


async def until(condition, timeout_s=5.0):
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)


def is_openai_error(answer, status, code=None):
    error = answer.json()["error"]
    assert answer.status == status
    assert error["message"] and error["type"] and "param" in error
    assert answer.headers["x-request-id"]
    assert answer.headers["content-type"] == "application/json"
    return code is None or error["code"] == code


# --- routes


async def test_models_health_live_and_unknown_routes(rig):
    async with rig() as r:
        models = await r.ask("/v1/models", method="GET")
        assert [m["id"] for m in models.json()["data"]] == ["m"]
        assert (await r.ask("/v1/models/m", method="GET")).json()["object"] == "model"
        assert is_openai_error(await r.ask("/v1/models/x", method="GET"), 404, "model_not_found")
        assert (await r.ask("/health", method="GET")).status == 200
        assert (await r.ask("/live", method="GET")).status == 200
        r.scheduler.serving = False
        unwell = await r.ask("/health", method="GET")
        assert is_openai_error(unwell, 503) and int(unwell.headers["retry-after"]) > 0
        assert (await r.ask("/live", method="GET")).status == 200
        for path in ("/", "/sleep", "/relume/state", "/collective_rpc", "/v1/load_lora_adapter"):
            assert is_openai_error(await r.ask(path, b"{}"), 404, "not_found")
        wrong = await r.ask(TEXT, method="GET")
        assert is_openai_error(wrong, 405) and wrong.headers["allow"] == "POST, OPTIONS"


async def test_head_and_options(rig):
    async with rig() as r:
        async with r.client() as client:
            head = await client.ask("/v1/models", method="HEAD")
            assert head.status == 200 and head.body == b""
            assert int(head.headers["content-length"]) > 10
            options = await client.ask(CHAT, method="OPTIONS")
            assert (options.status, options.headers["allow"]) == (204, "POST, OPTIONS")


async def test_metrics_are_delegated(rig):
    async with rig(
        delegates={
            "/other": lambda request: Reply(status=200, body=b"x", content_type="text/plain")
        }
    ) as r:
        assert (await r.ask("/metrics", method="GET")).status == 404
        r.gateway.metrics = lambda: b"relume_up 1\n"
        answer = await r.ask("/metrics", method="GET")
        assert answer.body == b"relume_up 1\n"
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        assert (await r.ask("/other", method="GET")).body == b"x"


async def test_other_vllm_routes_are_relayed_as_they_are_and_say_so(rig):
    async with rig() as r:
        r.engines[0].script.append(Behaviour(status=200, body=b'{"tokens":[1]}'))
        body = b'{"model":"m","prompt":"hi"}'
        answer = await r.ask("/tokenize?x=1", body, headers="authorization: Bearer secret\r\n")
        assert (answer.status, answer.body) == (200, b'{"tokens":[1]}')
        assert answer.headers["x-relume-protected"] == "no"
        seen = r.engines[0].seen[0]
        assert (seen.path, seen.body) == ("/tokenize?x=1", body)
        assert "x-relume-request" not in seen.headers and "authorization" not in seen.headers
        r.engines[0].script.append(Behaviour(status=422, body=b'{"error":1}'))
        assert (await r.ask("/v1/embeddings", body)).status == 422
        assert not [e for e in r.scheduler.log if e[0] == "observed"]
        r.engines[0].script.append(Behaviour(cut_at=20))
        assert (await r.ask("/v1/embeddings", body)).status == 200
        assert len(r.engines[1].seen) == 1


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
        assert r.gateway.bodies_bytes == 0


async def test_client_that_sends_its_100_mb_before_it_listens_still_reads_413(rig):
    async with rig() as r:
        status, _sent = await flood(r.gateway.port, 100 << 20)
        assert status == 413
        assert r.gateway.bodies_bytes == 0


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
        for header in ("", "authorization: Bearer no\r\n", "authorization: Basic k1\r\n"):
            answer = await r.ask(TEXT, text_body(), headers=header)
            assert is_openai_error(answer, 401, "invalid_api_key")
        assert not r.scheduler.log
        for key in ("k1", "k2"):
            good = await r.ask(TEXT, text_body(), headers=f"authorization: Bearer {key}\r\n")
            assert good.status == 200
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


# --- how clients send


async def test_keep_alive_serves_many_requests_on_one_connection(rig):
    async with rig() as r:
        async with r.client() as client:
            for i in range(30):
                body = stream_body() if i % 2 else text_body()
                assert (await client.ask(TEXT, body)).status == 200
        assert r.gateway.counters.clients == 1
        assert r.engines[0].accepted == 1


async def test_pipelined_requests_are_answered_in_order(rig):
    async with rig() as r:
        r.engines[0].default = Behaviour(pause_s=0.001)
        async with r.client() as client:
            bodies = [stream_body(user=f"u{i}") for i in range(6)]
            for i, body in enumerate(bodies):
                client.send(TEXT, body, headers=f"x-request-id: p{i}\r\n")
            client.send("/live", method="GET")
            client.send(TEXT, b"{", headers="x-request-id: bad\r\n")
            for i, body in enumerate(bodies):
                answer = await client.answer()
                want = expected_stream(body, f"cmpl-p{i}", "1700000000", 12, False)
                assert answer.body == want
            assert (await client.answer()).status == 200
            assert (await client.answer()).status == 400


async def test_pipeline_is_bounded(rig):
    async with rig(max_pipelined=5) as r, r.client() as client:
        client.writer.write(b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n" * 500)
        answers = 0
        while True:
            answer = await client.answer()
            answers += 1
            if answer.headers.get("connection") == "close":
                break
        assert answers < 500
        assert await client.reader.read() == b""


async def test_pipelining_client_that_never_reads_is_not_buffered_without_end(rig):
    async with rig(stream_buffer_bytes=64 << 10) as r:
        r.gateway.metrics = lambda: b"m" * 100_000
        async with r.client() as client:
            client.writer.transport.pause_reading()
            await until(lambda: r.gateway.clients)
            connection = next(iter(r.gateway.clients))
            for _ in range(50):
                client.writer.write(b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n" * 20)
                await asyncio.sleep(0)
                assert buffered_for(connection) < 500_000
            await until(lambda: buffered_for(connection) > 64 << 10)
            for _ in range(200):  # turns of the loop in which the gateway could read on
                await asyncio.sleep(0)
                assert buffered_for(connection) < 500_000
                assert len(connection._waiting) <= 64


async def test_chunked_request_body(rig):
    async with rig() as r, r.client() as client:
        body = stream_body()
        client.writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"transfer-encoding: chunked\r\nx-request-id: q\r\n\r\n"
        )
        for at in range(0, len(body), 7):
            client.writer.write(b"%x\r\n%b\r\n" % (len(body[at : at + 7]), body[at : at + 7]))
            await asyncio.sleep(0)
        client.writer.write(b"0\r\n\r\n")
        answer = await client.answer()
        assert answer.body == expected_stream(body, "cmpl-q", "1700000000", 12, False)
        assert r.engines[0].seen[0].body == body


async def test_expect_100_continue(rig):
    async with rig() as r, r.client() as client:
        body = text_body()
        head = (
            f"POST {TEXT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nexpect: 100-continue\r\n\r\n"
        ).encode()
        for _ in range(2):
            client.writer.write(head)
            interim = await client.reader.readuntil(b"\r\n\r\n")
            assert interim == b"HTTP/1.1 100 Continue\r\n\r\n"
            client.writer.write(body)
            assert (await client.answer()).status == 200
        client.writer.write(head.replace(str(len(body)).encode(), b"99999999"))
        assert (await client.reader.readline()).startswith(b"HTTP/1.1 413")


async def test_body_byte_by_byte(rig):
    async with rig() as r, r.client() as client:
        body = text_body()
        raw = (
            f"POST {TEXT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n\r\n"
        ).encode() + body
        for byte in raw:
            client.writer.write(bytes([byte]))
            await asyncio.sleep(0)
        assert (await client.answer()).status == 200


async def test_http_1_0_and_connection_close(rig):
    async with rig() as r:
        body = stream_body()
        async with r.client() as client:
            client.writer.write(
                b"POST /v1/completions HTTP/1.0\r\ncontent-type: application/json\r\n"
                b"x-request-id: q\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
            )
            answer = await client.answer()
            assert "transfer-encoding" not in answer.headers
            assert answer.body == expected_stream(body, "cmpl-q", "1700000000", 12, False)
        async with r.client() as client:
            answer = await client.ask(TEXT, text_body(), headers="connection: close\r\n")
            assert answer.headers["connection"] == "close"
            assert await client.reader.read() == b""


async def test_absolute_form_target(rig):
    async with rig() as r, r.client() as client:
        client.writer.write(b"GET http://x.example/live HTTP/1.1\r\nhost: x\r\n\r\n")
        assert (await client.answer()).status == 200


# --- time


async def test_slow_headers_and_bodies_are_bounded(rig):
    async with rig(header_timeout_s=0.2, body_timeout_s=0.4, linger_timeout_s=0.2) as r:
        async with r.client() as client:
            client.writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n")
            drip = asyncio.create_task(dribble(client, b"x-a: b\r\n", 0.05))
            assert is_openai_error(await client.answer(), 408)
            drip.cancel()
        async with r.client() as client:
            client.writer.write(
                b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 500\r\n\r\n"
            )
            drip = asyncio.create_task(dribble(client, b"x", 0.05))
            assert is_openai_error(await client.answer(), 408)
            drip.cancel()
        await until(lambda: not r.gateway.clients)


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
        await until(lambda: not r.gateway.clients)


async def test_1000_idle_connections_cost_little_and_delay_no_request(rig):
    async with rig() as r:
        before = rss_bytes()
        clients = [r.client() for _ in range(1000)]
        for client in clients:
            await client.__aenter__()
        await until(lambda: len(r.gateway.clients) == 1000)
        answer = await r.ask(TEXT, stream_body(), headers="x-request-id: q\r\n")
        assert answer.body.endswith(b"[DONE]\n\n")
        assert (rss_bytes() - before) / 1000 < 60_000  # both ends live in this process
        for client in clients:
            await client.__aexit__()
        await until(lambda: not r.gateway.clients)


def rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def test_connections_beyond_the_limit_are_turned_away(rig):
    async with rig(max_clients=3) as r:
        clients = [r.client() for _ in range(3)]
        for client in clients:
            await client.__aenter__()
        await until(lambda: len(r.gateway.clients) == 3)
        async with r.client() as fourth:
            assert is_openai_error(await fourth.answer(), 503)
        for client in clients:
            await client.__aexit__()


# --- slow and leaving clients


def buffered_for(connection) -> int:
    """Bytes that a connection of the gateway holds because its client reads too slowly."""
    return connection._transport.get_write_buffer_size()


async def held_back(r, worker: str, engine: Engine) -> None:
    """Wait until `engine` can write no more, since the client of the only stream reads nothing."""

    def stands() -> bool:
        for connection in r.gateway.clients:
            assert buffered_for(connection) < 1 << 20, "memory is bounded all the while"
        activity = r.gateway.activity.get((worker, 3))
        reads = activity is None or activity.open_streams > 0
        return not reads and any(not c.can_write.is_set() for c in engine.connections)

    await until(stands, 60.0)


async def test_slow_reader_holds_the_engine_back_with_bounded_memory(rig):
    async with rig(engines=1, stream_buffer_bytes=64 << 10) as r:
        r.engines[0].default = Behaviour(tokens=3000, text_bytes=8000)
        async with r.client() as client:
            client.writer.transport.pause_reading()
            client.send(TEXT, stream_body(), headers="x-request-id: q\r\n")
            # The gateway waits for no bytes then (`open_streams`): no stall is suspected.
            await held_back(r, "w0", r.engines[0])
            client.writer.transport.resume_reading()
            async with asyncio.timeout(30):
                answer = await client.answer()
            want = expected_stream(
                r.engines[0].seen[0].body, "cmpl-q", "1700000000", 3000, False, 8000
            )
            assert answer.body == want


async def test_failover_while_the_client_is_slow(rig):
    async with rig(engines=2, stream_buffer_bytes=64 << 10) as r:
        for engine in r.engines:
            engine.default = Behaviour(tokens=2000, text_bytes=4000)
        async with r.client() as client:
            client.writer.transport.pause_reading()
            client.send(TEXT, stream_body(), headers="x-request-id: q\r\n")
            async with asyncio.timeout(20):
                await until(lambda: any(map(buffered_for, r.gateway.clients)), 20)
                assert r.gateway.break_streams("w0", 3, "stall") == 1
                while not r.engines[1].seen:
                    await asyncio.sleep(0.01)
            client.writer.transport.resume_reading()
            async with asyncio.timeout(30):
                answer = await client.answer()
            want = expected_stream(
                r.engines[0].seen[0].body, "cmpl-q", "1700000000", 2000, False, 4000
            )
            assert answer.body == want
        assert r.engines[1].seen[0].resume.startswith("continue ")


async def test_client_that_stops_reading_for_good_is_cut_off(rig):
    async with rig(engines=1, stream_buffer_bytes=64 << 10, client_stall_timeout_s=0.3) as r:
        r.engines[0].default = Behaviour(tokens=3000, text_bytes=8000)
        async with r.client() as client:
            client.writer.transport.pause_reading()
            client.send(TEXT, stream_body())
            await until(lambda: r.scheduler.endings())
            assert r.scheduler.endings()[0][:2] == ("cancelled", 499)
            await until(lambda: r.engines[0].seen[0].gone)


async def test_client_that_leaves_stops_the_engine(rig):
    async with rig(engines=1) as r:
        r.engines[0].default = Behaviour(tokens=2000, pause_s=0.005)
        async with r.client() as client:
            client.send(TEXT, stream_body())
            await client.reader.readuntil(b"data: ")
        await until(lambda: r.engines[0].seen[0].gone)
        await until(lambda: r.scheduler.endings())
        assert r.scheduler.endings()[0][:2] == ("cancelled", 499)


async def test_client_that_leaves_before_its_body_is_complete(rig):
    async with rig() as r:
        async with r.client() as client:
            client.writer.write(
                b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 500\r\n\r\nabc"
            )
            await until(lambda: r.gateway.bodies_bytes == 500)
        await until(lambda: r.gateway.bodies_bytes == 0)
        assert not r.scheduler.log


# --- draining


async def test_drain_lets_streams_finish_and_takes_nothing_new(rig):
    async with rig(engines=1) as r:
        r.engines[0].default = Behaviour(pause_s=0.02)
        async with r.client() as busy, r.client() as idle:
            await idle.ask("/live", method="GET")
            busy.send(TEXT, stream_body(), headers="x-request-id: q\r\n")
            await until(lambda: r.gateway.counters.in_flight == 1)
            assert not await r.gateway.drain(0.05)
            drained = asyncio.create_task(r.gateway.drain(10))
            answer = await busy.answer()
            assert answer.body.endswith(b"[DONE]\n\n")
            assert await drained
            assert await idle.reader.read() == b""
            with pytest.raises(OSError):
                async with r.client():
                    pass


async def test_stop_ends_every_request_in_the_log(rig):
    async with rig(engines=1) as r:
        r.engines[0].default = Behaviour(hang_at=300)
        async with r.client() as client:
            client.send(TEXT, stream_body())
            await until(lambda: r.gateway.counters.in_flight == 1)
            await r.gateway.stop()
        assert [e[:2] for e in r.scheduler.endings()] == [("failed", 503)]


# --- the real client


async def test_the_openai_client_streams_across_a_kill(rig):
    async with rig() as r:
        client = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{r.gateway.port}/v1", api_key="x")
        r.engines[0].script.append(Behaviour(cut_at=900, cut="rst"))
        stream = await client.completions.create(
            model="m", prompt="hi", temperature=0, stream=True, max_tokens=12
        )
        ids, indices = set(), []
        async for event in stream:
            ids.add((event.id, event.created))
            if hasattr(event, "index"):
                indices.append(event.index)
        assert len(ids) == 1
        assert indices == list(range(12))
        assert len(r.engines[1].seen) == 1
        assert [m.id async for m in await client.models.list()] == ["m"]
        await client.close()


async def test_the_openai_client_understands_our_errors(rig):
    async with rig(api_keys=frozenset({"right"}), wait_timeout_s=0.1) as r:
        url = f"http://127.0.0.1:{r.gateway.port}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="wrong", max_retries=0) as client:
            with pytest.raises(openai.AuthenticationError):
                await client.models.list()
        async with openai.AsyncOpenAI(base_url=url, api_key="right", max_retries=0) as client:
            with pytest.raises(openai.BadRequestError) as caught:
                await client.completions.create(model="m", prompt="x", temperature=7)
            assert caught.value.param == "temperature"
            with pytest.raises(openai.APIStatusError) as too_large:
                await client.completions.create(model="m", prompt="x" * (9 << 20))
            assert too_large.value.status_code == 413
            r.engines[0].script.append(Behaviour(hang_at=600))
            stream = await client.completions.create(
                model="m", prompt="x", temperature=0, stream=True
            )
            await anext(stream)
            r.scheduler.serving = False
            r.gateway.break_streams("w0", 3, "stall")
            with pytest.raises(openai.APIError, match="no worker"):
                async for _ in stream:
                    pass
            with pytest.raises(openai.InternalServerError):
                await client.completions.create(model="m", prompt="x", temperature=0)
