"""A bug in one request's task is that request's 500; one in the gateway itself is told."""

from __future__ import annotations

import asyncio
import json

import pytest

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
        await asyncio.sleep(0.1)
        assert not joined.done()
        await r.gateway.stop()
        async with asyncio.timeout(5):
            await joined
