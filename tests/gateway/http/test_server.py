"""Routes of the gateway, how it drains and stops, and how OpenAI's own client sees it."""

from __future__ import annotations

import asyncio

import openai
import pytest

from relume.controlplane.gateway.http.replies import Reply
from tests.gateway.client_requests import CHAT, TEXT, stream_body, until
from tests.gateway.peers import Behaviour
from tests.gateway.raw_client import is_openai_error

# --- routes


async def test_models_health_live_and_unknown_routes(rig):
    async with rig() as r:
        models = await r.ask("/v1/models", method="GET")
        assert [m["id"] for m in models.json()["data"]] == ["m"]
        one = (await r.ask("/v1/models/m", method="GET")).json()
        assert one == models.json()["data"][0]
        assert (one["object"], one["root"], one["parent"], one["max_model_len"]) == (
            "model",
            "m",
            None,
            4096,
        )
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
        r.gateway.service.metrics = lambda: b"relume_up 1\n"
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


async def test_readiness_fails_before_new_connections_are_refused(rig):
    async with rig(engines=1) as r:
        r.engines[0].default = Behaviour(pause_s=0.02)
        assert (await r.ask("/ready", method="GET")).status == 200
        began = r.gateway.clock()
        draining = asyncio.create_task(r.gateway.drain(20, announce_s=1.0))
        await until(lambda: r.gateway.draining)
        for path, status in (("/ready", 503), ("/health", 503), ("/live", 200)):
            assert (await r.ask(path, method="GET")).status == status
        answer = await r.ask(TEXT, stream_body())
        assert answer.complete and answer.body.endswith(b"[DONE]\n\n")
        assert answer.headers["connection"] == "close", "its next request goes elsewhere"
        # a timer may end a moment before its time by another clock
        assert await draining and r.gateway.clock() - began >= 0.99
        with pytest.raises(OSError):
            async with r.client():
                pass
        counts = await r.gateway.stop()
        assert (counts.ended, counts.moved, counts.cut) == (1, 0, 0)


async def test_at_the_end_of_the_drain_resumable_streams_move_and_others_are_cut(rig):
    async with rig(engines=1) as r:
        r.engines[0].script += [Behaviour(), *2 * [Behaviour(tokens=4000, pause_s=0.01)]]
        assert (await r.ask(TEXT, stream_body())).complete
        async with r.client() as plain, r.client() as resumable:
            plain.send(TEXT, stream_body())
            await plain.reader.readuntil(b"data: ")
            resumable.send(TEXT, stream_body(), headers="x-relume-resumable: 1\r\n")
            await resumable.reader.readuntil(b"data: ")
            assert not await r.gateway.drain(0.2, announce_s=0.1)
            counts = await r.gateway.stop()
            assert (counts.ended, counts.moved, counts.cut) == (0, 1, 1)
            ended = await plain.reader.read()
            assert b'"code":"stopping"' in ended and b"data: [DONE]" in ended
            left = await resumable.reader.read()
            assert b"error" not in left and b"[DONE]" not in left, "its client returns elsewhere"
        assert [e[:2] for e in r.scheduler.endings()] == [("completed", 200), ("failed", 503)]


async def test_a_drain_does_not_wait_for_a_client_that_left(rig):
    async with rig(engines=1) as r:
        r.engines[0].default = Behaviour(tokens=4000, pause_s=0.01)
        async with r.client() as client:
            client.send(TEXT, stream_body(), headers="x-relume-resumable: 1\r\n")
            await client.reader.readuntil(b"data: ")
            draining = asyncio.create_task(r.gateway.drain(600))
            await until(lambda: r.gateway.draining)
            assert r.gateway.counters.in_flight == 1
        async with asyncio.timeout(20):
            assert await draining
        counts = await r.gateway.stop()
        assert (counts.ended, counts.moved, counts.cut) == (0, 1, 0)
        assert not r.scheduler.endings(), "another replica continues it"


async def test_a_gateway_that_stops_takes_over_no_stream(rig):
    async with rig(engines=1) as r:
        draining = asyncio.create_task(r.gateway.drain(10, announce_s=0.5))
        await until(lambda: r.gateway.draining)
        shown = f"last-event-id: other-1:{'ab' * 11}:3\r\n"
        answer = await r.ask(TEXT, stream_body(), headers=shown)
        assert is_openai_error(answer, 503, "stopping"), "the client helper tries the next replica"
        assert await draining


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
