"""All engines of a model die at once, on a busy machine: requests wait for them. Restarts are faster
here than `--wait-for-worker-s`; `tests/sim/fleets/test_restarts.py` has slower ones."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time

import aiohttp
import msgspec
import pytest

from relume.chaos.traffic import Stream
from relume.controlplane.local.local_fleet import FleetOptions
from tests.live.conftest import HANG_S, Scene, same, scene_of, whole

WORKERS = ("w0", "w1", "w2")


@pytest.mark.usefixtures("patient")
async def test_no_request_fails_while_all_engines_restart_beside_a_busy_process(
    options: FleetOptions,
) -> None:
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        async with scene_of(msgspec.structs.replace(options, workers=len(WORKERS))) as scene:
            struck, late = await _all_killed(scene)
            assert not whole(struck) and not whole(late)
            assert same(await scene.streams(6, 400, "calm-struck"), struck) == []
            assert same(await scene.streams(6, 50, "calm-late"), late) == []
            await scene.sound()
    finally:
        busy.kill()
        busy.wait()


async def _all_killed(scene: Scene) -> tuple[dict[str, Stream], dict[str, Stream]]:
    """Streams that were running, and those that came while no engine served."""
    workers = [await scene.until_ready(name) for name in WORKERS]

    async def kill(streams: dict[str, Stream]) -> None:
        for worker in workers:
            os.kill(worker["engine_pid"], signal.SIGKILL)

    begun = time.monotonic()
    struck, late = await asyncio.gather(
        scene.streams(6, 400, "struck", kill), _ask_later(scene, begun)
    )
    for worker in workers:
        await scene.until_ready(worker["name"], worker["incarnation"] + 1)
    print(f"all engines are ready again after {time.monotonic() - begun:.1f} s")
    return struck, late


async def _ask_later(scene: Scene, begun: float) -> dict[str, Stream]:
    """Requests that arrive while no engine serves."""
    async with aiohttp.ClientSession() as session:
        status = 200
        while status != 503:
            assert time.monotonic() - begun < HANG_S, "some engine serves"
            await asyncio.sleep(0.02)
            async with session.get(f"{scene.url}/health") as answer:
                status = answer.status
    return await scene.streams(6, 50, "late")
