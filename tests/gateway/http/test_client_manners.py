"""HTTP as clients really speak it; clients that read slowly, stop reading or leave."""

from __future__ import annotations

import asyncio

from tests.gateway.client_requests import TEXT, stream_body, text_body, until
from tests.gateway.peers import Behaviour, Engine, expected_stream


def buffered_for(connection) -> int:
    """Bytes that a connection of the gateway holds because its client reads too slowly."""
    return connection._transport.get_write_buffer_size()


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
        r.gateway.service.metrics = lambda: b"m" * 100_000
        async with r.client() as client:
            client.writer.transport.pause_reading()
            await until(lambda: r.gateway.service.clients)
            connection = next(iter(r.gateway.service.clients))
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


# --- slow and leaving clients


async def held_back(r, worker: str, engine: Engine) -> None:
    """Wait until `engine` can write no more, since the client of the only stream reads nothing."""

    def stands() -> bool:
        for connection in r.gateway.service.clients:
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
                await until(lambda: any(map(buffered_for, r.gateway.service.clients)), 20)
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


async def test_an_accept_header_alone_does_not_say_that_the_client_can_return(rig):
    async with rig(engines=1) as r:
        r.engines[0].default = Behaviour(tokens=2000, pause_s=0.005)
        async with r.client() as client:
            client.send(TEXT, stream_body(), headers="accept: text/event-stream\r\n")
            head = await client.reader.readuntil(b"\r\n\r\n")
            await client.reader.readuntil(b"data: ")
        assert b"x-relume-resumable" not in head.lower()
        await until(lambda: r.engines[0].seen[0].gone)
        await until(lambda: r.scheduler.endings())
        assert r.scheduler.endings()[0][:2] == ("cancelled", 499)
        assert not r.gateway._streams.open


async def test_client_that_leaves_before_its_body_is_complete(rig):
    async with rig() as r:
        async with r.client() as client:
            client.writer.write(
                b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 500\r\n\r\nabc"
            )
            await until(lambda: r.gateway.service.bodies_bytes == 500)
        await until(lambda: r.gateway.service.bodies_bytes == 0)
        assert not r.scheduler.log
