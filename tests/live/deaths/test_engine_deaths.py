"""Engines die; clients do not notice."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import aiohttp
import msgspec
import pytest

from relume.controlplane.local.local_fleet import FleetOptions
from relume.events import vocabulary as v
from tests.live.conftest import HANG_S, Scene, same, scene_of, whole
from tests.suite.outcomes import inconclusive


async def test_streams_survive_kills_of_their_engine_token_for_token(options: FleetOptions) -> None:
    """One fleet, several deaths in a row: in decode, twice for one request, all workers."""
    async with scene_of(options) as scene:
        calm = await scene.streams(8, 128, "calm")
        assert not whole(calm)
        await _killed_in_decode(scene, calm)
        await _killed_twice_in_a_row(scene, calm)
        await _all_dead_then_back(scene)
        await _client_leaves(scene)
        verdict = await scene.sound()
        assert verdict.contested > 0


async def _killed_in_decode(scene: Scene, calm: dict) -> None:
    victim = await scene.worker("w0")
    await scene.only("w0")

    async def kill(streams: dict) -> None:
        await scene.paced(streams, 16, "w0", victim["engine_pid"])
        os.kill(victim["engine_pid"], signal.SIGKILL)

    hit = await scene.streams(8, 128, "decode", kill)
    assert not whole(hit)
    assert same(calm, hit) == []
    assert min(len(set(s.tokens)) for s in hit.values()) >= 30
    assert all(len(s.response_ids) == 1 for s in hit.values())
    if (moved := sum(len(made) > 1 for made in (await scene.routes(hit)).values())) < 2:
        inconclusive(f"{moved} streams were under way on w0 at the kill")
    await scene.until_ready("w0", victim["incarnation"] + 1)


async def _killed_twice_in_a_row(scene: Scene, calm: dict) -> None:
    """The first kill moves streams to the other worker; then that one dies as well."""
    first, second = await scene.worker("w0"), await scene.worker("w1")

    async def kill(streams: dict) -> None:
        await scene.paced(streams, 12, "w0", first["engine_pid"])
        os.kill(first["engine_pid"], signal.SIGKILL)
        await scene.until_ready("w0", first["incarnation"] + 1)
        os.kill(second["engine_pid"], signal.SIGKILL)

    long_calm = await scene.streams(4, 1200, "calm-long")
    await scene.only("w0")  # it has just come back, and may be expected to be slower
    hit = await scene.streams(4, 1200, "twice", kill)
    assert not whole(hit)
    assert same(long_calm, hit) == []
    await scene.until_ready("w1", second["incarnation"] + 1)


async def _all_dead_then_back(scene: Scene) -> None:
    """With no engine up a request waits, then completes on one that came back."""
    workers = await scene.fleet.workers()
    for worker in workers:
        os.kill(worker["engine_pid"], signal.SIGKILL)
    found = await scene.streams(4, 16, "no-worker")
    assert not whole(found)
    for worker in workers:
        await scene.until_ready(worker["name"], worker["incarnation"] + 1)


async def _client_leaves(scene: Scene) -> None:
    """The worker stops computing for a client that left, and the log says 499."""
    async with aiohttp.ClientSession() as session:
        answer = await session.post(
            f"{scene.url}/v1/completions",
            json={"model": "tiny", "prompt": "a", "max_tokens": 1900, "stream": True,
                  "temperature": 0, "ignore_eos": True},
            headers={"x-request-id": "leaver"},
        )  # fmt: skip
        await answer.content.readline()
        answer.close()
    deadline = time.monotonic() + HANG_S
    while True:
        mine = (await scene.ended()).get("leaver")
        finished = [
            change
            for event in await scene.events()
            if type(event) is v.EngineStep
            for change in event.changes
            if type(change) is v.EngineFinished and mine and change.request == mine.request
        ]
        if finished:
            break
        assert time.monotonic() < deadline, mine
        await asyncio.sleep(0.1)
    assert mine is not None
    assert (mine.outcome, mine.status) == ("cancelled", 499)
    assert [c.reason for c in finished] == ["abort"]


async def test_request_waits_bounded_when_no_worker_ever_comes(
    options: FleetOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing serves anything yet: 503 with Retry-After after the bound."""
    monkeypatch.setenv("RELUME_WAIT_FOR_WORKER_S", "2")
    options = msgspec.structs.replace(options, workers=0)
    async with scene_of(options) as scene, aiohttp.ClientSession() as session:
        body = {"model": "tiny", "prompt": "a", "max_tokens": 4}
        began = time.monotonic()
        async with session.post(f"{scene.url}/v1/completions", json=body) as answer:
            error = (await answer.json())["error"]
            assert answer.status == 503
            assert int(answer.headers["retry-after"]) > 0
        assert 1.5 < time.monotonic() - began < 10
        assert error["type"] == "service_unavailable_error"
        assert error["message"]
