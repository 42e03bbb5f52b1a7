"""Routes relayed as they are: methods, what a worker may not be blamed for."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.gateway.peers import Behaviour

JSON_OK = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 15\r\n\r\n"


async def test_head_asks_the_worker_with_get_and_drops_the_body(rig):
    async with rig(engines=1) as r:
        r.engines[0].default = Behaviour(raw=JSON_OK + b'{"version":"1"}')
        async with r.client() as client:
            for _ in range(2):  # the connection stays usable for the next request
                async with asyncio.timeout(3):
                    answer = await client.ask("/version", method="HEAD")
                assert answer.status == 200
                assert answer.headers["content-type"] == "application/json"
            after = await client.ask("/version", method="GET")
        assert json.loads(after.body) == {"version": "1"}
        assert r.engines[0].methods == ["GET", "GET", "GET"]
        assert {e[0] for e in r.scheduler.endings()} == {"completed"}


async def test_silence_on_a_relayed_route_is_no_silent_stream(rig):
    async with rig(engines=1) as r:
        r.engines[0].default = Behaviour(hang_at=0)
        async with r.client() as client:
            client.send("/tokenize", b'{"prompt":"x"}')
            async with asyncio.timeout(20):
                while not r.engines[0].seen:
                    await asyncio.sleep(0.01)
            assert [a.open_streams for a in r.gateway.activity.values()] == [0]


async def test_workers_that_are_all_full_are_503_also_on_relayed_routes(rig):
    async with rig(engines=3) as r:
        for engine in r.engines:
            engine.default = Behaviour(status=503)
        answer = await r.ask("/tokenize", b'{"prompt":"x"}')
        assert answer.status == 503
        assert int(answer.headers["retry-after"]) > 0


FORGED = {"kv_transfer_params": {"remote_block_ids": [1]}, "ec_transfer_params": {"a": 1}}


@pytest.mark.parametrize(
    "route", ["/v1/responses/render", "/v1/messages/count_tokens", "/inference/v1/generate"]
)
@pytest.mark.parametrize("kind", ["application/json", "application/vnd.x+JSON; charset=utf-8", ""])
async def test_clients_cannot_name_kv_blocks_on_relayed_routes(rig, route, kind):
    body = json.dumps({"model": "m", "input": "hi", **FORGED}).encode()
    async with rig(engines=1) as r:
        async with r.client() as client:
            typed = f"content-type: {kind}\r\n" if kind else ""
            client.writer.write(
                f"POST {route} HTTP/1.1\r\nhost: x\r\n{typed}"
                f"content-length: {len(body)}\r\n\r\n".encode()
                + body
            )
            assert (await client.answer()).status == 200
        assert json.loads(r.engines[0].seen[0].body) == {"model": "m", "input": "hi"}


async def test_a_relayed_json_body_that_the_gateway_cannot_read_is_400(rig):
    async with rig(engines=1) as r:
        for bad in (b'{"model":"m",', b"[1]", b'{"temperature": NaN, "kv_transfer_params": {}}'):
            answer = await r.ask("/v1/responses/render", bad)
            assert answer.status == 400
            assert answer.json()["error"]["code"] == "invalid_json"
        assert not r.engines[0].seen


async def test_honest_relayed_bodies_pass_unchanged(rig):
    body = b'{ "model" : "m",  "prompt": "h\\u00e9" }'
    async with rig(engines=1) as r:
        assert (await r.ask("/tokenize", body)).status == 200
        assert r.engines[0].seen[0].body == body
