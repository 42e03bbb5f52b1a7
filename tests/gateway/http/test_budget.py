"""The budget of all bodies together, and requests that offer another protocol."""

from __future__ import annotations

import asyncio
import json

import pytest

from relume.controlplane.gateway.config import GatewayConfig

TEXT = "/v1/completions"
BODY = json.dumps({"model": "m", "prompt": "hi", "temperature": 0}).encode()


async def until(condition, timeout_s: float = 5.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)


def head(length: int | None) -> bytes:
    sized = f"content-length: {length}" if length is not None else "transfer-encoding: chunked"
    return (
        f"POST {TEXT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n{sized}\r\n\r\n"
    ).encode()


async def test_a_declared_body_is_reserved_before_it_arrives(rig):
    async with rig(max_bodies_bytes=1000) as r:
        async with r.client() as slow:
            slow.writer.write(head(900) + b"x")
            await until(lambda: r.gateway.service.bodies_bytes == 900)
            async with r.client() as second:
                second.send(TEXT, b"y" * 200)
                answer = await second.answer()
            assert answer.status == 503
            assert int(answer.headers["retry-after"]) > 0
            assert (await r.ask(TEXT, BODY)).status == 200  # what fits is served
        await until(lambda: r.gateway.service.bodies_bytes == 0)
        assert (await r.ask(TEXT, BODY + b" " * 500)).status == 200


async def test_chunked_bodies_are_counted_as_they_arrive(rig):
    async with rig(max_bodies_bytes=1000) as r:
        async with r.client() as first, r.client() as second:
            first.writer.write(head(None) + b"258\r\n" + b"x" * 600)
            await until(lambda: r.gateway.service.bodies_bytes == 600)
            second.writer.write(head(None) + b"258\r\n" + b"x" * 600)
            answer = await second.answer()
            assert answer.status == 503
            assert int(answer.headers["retry-after"]) > 0
            assert r.gateway.service.bodies_bytes == 600
        await until(lambda: r.gateway.service.bodies_bytes == 0)


async def test_a_chunked_body_beyond_its_own_limit_is_413(rig):
    async with rig(max_body_bytes=500) as r:
        async with r.client() as client:
            client.writer.write(head(None) + b"258\r\n" + b"x" * 600)
            assert (await client.answer()).status == 413


OFFER = "connection: upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABk\r\n"


@pytest.mark.parametrize("piece", [1, 7, 1 << 20])
async def test_an_offered_upgrade_is_ignored_and_the_body_kept(rig, piece):
    async with rig(engines=1) as r:
        chunked = b"".join(b"%x\r\n%b\r\n" % (len(p), p) for p in (BODY[:9], BODY[9:]))
        start = f"POST {TEXT} HTTP/1.1\r\nhost: x\r\n{OFFER}content-type: application/json\r\n"
        sized = f"content-length: {len(BODY)}\r\n\r\n".encode() + BODY
        raw = start.encode() + sized
        raw += start.encode() + b"transfer-encoding: chunked\r\n\r\n" + chunked + b"0\r\n\r\n"
        raw += f"GET /live HTTP/1.1\r\nhost: x\r\n{OFFER}\r\n".encode()
        async with r.client() as client:
            for at in range(0, len(raw), piece):
                client.writer.write(raw[at : at + piece])
                if piece < 100:
                    await asyncio.sleep(0)
            async with asyncio.timeout(10):
                answers = [await client.answer() for _ in range(3)]
        assert [a.status for a in answers] == [200, 200, 200]
        assert [seen.body for seen in r.engines[0].seen] == [BODY, BODY]


async def test_an_offer_keeps_connection_close_and_the_limit_of_headers(rig):
    async with rig() as r:
        async with r.client() as client:
            closing = OFFER.replace("upgrade,", "upgrade, close,")
            client.send("/live", method="GET", headers=closing)
            answer = await client.answer()
            assert answer.headers["connection"] == "close"
            assert await client.reader.read() == b""
        limit = GatewayConfig().max_header_bytes
        long = OFFER + "".join(f"x-{i}: {'y' * 4000}\r\n" for i in range(limit // 4000 + 1))
        assert (await r.ask("/live", method="GET", headers=long)).status == 431


async def test_connect_is_refused(rig):
    async with rig() as r:
        async with r.client() as client:
            client.writer.write(b"CONNECT x:443 HTTP/1.1\r\nhost: x\r\n\r\n")
            assert (await client.answer()).status in (400, 404, 405)
