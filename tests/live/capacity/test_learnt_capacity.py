"""The capacity that the leader learns from steps, beside what a saturated engine completes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from statistics import fmean

import aiohttp
import msgspec

from relume.chaos.traffic import Stream, complete, prompts
from relume.controlplane.local.local_fleet import FleetOptions
from tests.live.conftest import HANG_S, Scene, scene_of

SEQUENCES, CLIENTS, TOKENS = 8, 64, 16
"""So many requests run at once, and the others wait in the engine."""
SETTLE_S, MEASURED_S, PERIOD_S = 40.0, 60.0, 2.0
MOST_OFF = 1.5
"""Both figures move with the load of the machine, and the learnt one follows later."""


async def test_learnt_capacity_is_what_a_saturated_engine_completes(options: FleetOptions) -> None:
    options = msgspec.structs.replace(
        options,
        workers=1,
        tokenizer=True,
        replica_args=("--degradation", "observe"),
        engine_args=(*options.engine_args, "--max-num-seqs", str(SEQUENCES)),
    )
    learnt: list[float] = []
    async with scene_of(options) as scene, saturated(scene) as completed:
        began = time.monotonic()
        while time.monotonic() - began < SETTLE_S or not await learnt_requests_s(scene):
            assert time.monotonic() - began < HANG_S, "the capacity is not known"
            await asyncio.sleep(PERIOD_S)
        began, before = time.monotonic(), len(completed)
        while (seconds := time.monotonic() - began) < MEASURED_S:
            learnt.append(await learnt_requests_s(scene))
            await asyncio.sleep(PERIOD_S)
        real = (len(completed) - before) / seconds
        failed = [s for s in completed if not s.whole]
    ratio = fmean(learnt) / real
    print(f"learnt {fmean(learnt):.2f}, completed {real:.2f} requests/s: ratio {ratio:.2f}")
    assert not failed, failed[0].error
    assert 1 / MOST_OFF < ratio < MOST_OFF


async def learnt_requests_s(scene: Scene) -> float:
    """Requests per second that the fleet could serve; 0: unknown."""
    models = (await scene.fleet.admin("degradation"))["models"]
    return sum(found["requests_s"] for found in models)


@asynccontextmanager
async def saturated(scene: Scene) -> AsyncIterator[list[Stream]]:
    """Inside, `CLIENTS` requests are open at any time; those that are over."""
    over: list[Stream] = []
    numbers, texts = count(), prompts(2000)

    async def client(session: aiohttp.ClientSession) -> None:
        while True:
            number = next(numbers)
            stream = Stream(request=f"load-{number}", prompt=texts[number % len(texts)])
            await complete(session, scene.url, stream, TOKENS, ignore_eos=True)
            over.append(stream)

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        clients = [asyncio.create_task(client(session)) for _ in range(CLIENTS)]
        try:
            yield over
        finally:
            for task in clients:
                task.cancel()
            await asyncio.gather(*clients, return_exceptions=True)
