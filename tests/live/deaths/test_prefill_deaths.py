"""Engines killed before the first token: in prefill, and before they even read the request."""

from __future__ import annotations

import asyncio
import os
import signal

import msgspec

from relume.controlplane.local.local_fleet import FleetOptions
from relume.events import vocabulary as v
from tests.live.conftest import Scene, let_run, same, scene_of, whole
from tests.signals import stop

LONG = " ".join(f"word{n} and" for n in range(330))


async def test_kills_before_the_first_token(options: FleetOptions) -> None:
    args = (*options.engine_args, "--max-num-batched-tokens", "64")
    options = msgspec.structs.replace(options, engine_args=args)
    async with scene_of(options) as scene:
        hit = await _killed_in_prefill(scene)
        calm = await scene.streams(8, 24, "calm", padding=LONG)
        assert not whole(calm)
        assert same(calm, hit) == []
        await _killed_before_reading(scene, calm)
        await scene.sound()


async def _killed_in_prefill(scene: Scene) -> dict:
    """Before any other run: a prefix cache would leave nothing to prefill."""
    victim = await scene.worker("w0")

    async def kill(streams: dict) -> None:
        stop(victim["engine_pid"])
        while not all((places := await scene.routes(streams)).values()):
            await asyncio.sleep(0.02)
        ours = {made[-1].request for made in places.values()}
        while not ours & await _prefilling(scene, victim):
            await asyncio.to_thread(let_run, victim["engine_pid"])
        os.kill(victim["engine_pid"], signal.SIGKILL)

    hit = await scene.streams(8, 24, "prefill", kill, padding=LONG)
    assert not whole(hit)
    again = [d for made in (await scene.routes(hit)).values() for d in made if d.attempt == 2]
    assert any(d.delivered == 0 and d.mode == "new" for d in again)
    await scene.until_ready("w0", victim["incarnation"] + 1)
    return hit


async def _prefilling(scene: Scene, victim: dict) -> set[str]:
    """Requests of whose prompt the engine has computed a chunk."""
    return {
        c.request
        for e in await scene.events("w.w0")
        if type(e) is v.EngineStep and e.incarnation == victim["incarnation"]
        for c in e.changes
        if type(c) is v.PrefillChunkDone
    }


async def _killed_before_reading(scene: Scene, calm: dict) -> None:
    """The engine is stopped when the requests are sent to it, then killed."""
    victim = await scene.worker("w0")
    stop(victim["engine_pid"])

    async def kill(streams: dict) -> None:
        while not all((await scene.routes(streams)).values()):
            await asyncio.sleep(0.02)
        os.kill(victim["engine_pid"], signal.SIGKILL)

    hit = await scene.streams(8, 24, "unread", kill, padding=LONG)
    assert not whole(hit)
    assert same(calm, hit) == []
    again = [d for made in (await scene.routes(hit)).values() for d in made if d.attempt == 2]
    assert again and all(d.cause in ("engine_dead", "reset", "refused", "stall") for d in again)
    await scene.until_ready("w0", victim["incarnation"] + 1)
