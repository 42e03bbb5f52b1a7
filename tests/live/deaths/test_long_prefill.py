"""A long prefill is not a stall, and a stop within one is."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import aiohttp
import msgspec
import pytest

from relume.chaos.traffic import WORDS, Stream
from relume.controlplane.local.local_fleet import FleetOptions
from relume.events import vocabulary as v
from tests.live.conftest import Scene, same, scene_of, whole
from tests.processes import cpu_time, starved
from tests.signals import stop
from tests.suite.outcomes import inconclusive

BOUND_MS = 300
ARGS = ("--max-model-len", "8192", "--max-num-batched-tokens", "32768")


def padding(step: int) -> str:
    """About 7,400 tokens; others for another `step`, so that no cache knows them."""
    return " ".join(WORDS[(step * k + k // 37) % len(WORDS)] for k in range(2_520))


async def test_long_prefills_move_nothing_and_a_stop_in_one_does(
    options: FleetOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    for bound in ("FLOOR", "CAP"):
        monkeypatch.setenv(f"RELUME_STALL_{bound}_MS", str(BOUND_MS))
    options = msgspec.structs.replace(options, engine_args=(*options.engine_args, *ARGS))
    async with scene_of(options) as scene:
        engines = [w["engine_pid"] for w in await scene.fleet.workers()]
        since = cpu_time(engines)
        calm = await _left_alone(scene, lambda: starved(since, cpu_time(engines)))
        await _stopped(scene, calm)
        verdict = await scene.sound()
        assert verdict.stalls > 1


async def _left_alone(scene: Scene, engines_starved: Callable[[], bool]) -> dict[str, Stream]:
    """Several prompts fill one step that takes far longer than the bound."""
    calm = await scene.streams(8, 24, "calm", padding=padding(7))
    if whole(calm) and engines_starved():
        inconclusive(f"engines that waited for processors could show no work: {whole(calm)}")
    assert not whole(calm)
    assert min(s.usage["prompt_tokens"] for s in calm.values()) > 7_000
    first_s = [s.first - s.started for s in calm.values()]
    print(f"first tokens after {min(first_s):.2f} to {max(first_s):.2f} s")
    assert max(first_s) > 2 * BOUND_MS / 1000, "these prompts are too short to test anything"
    judged = [e for e in await scene.events() if type(e) is v.StallJudged]
    assert judged, "nobody was silent for longer than the bound"
    hung = [e for e in judged if e.hung]
    if hung and engines_starved():
        inconclusive(f"engines that waited for processors could show no work: {hung}")
    assert not hung
    assert await scene.unharmed() == []
    assert {len(made) for made in (await scene.routes(calm)).values()} == {1}
    return calm


async def _stopped(scene: Scene, calm: dict) -> None:
    """The engine is stopped while it computes such prompts: they go elsewhere."""
    victim = await scene.worker("w0")
    other = await scene.worker("w1")
    pid, since = victim["engine_pid"], cpu_time([other["engine_pid"]])
    cut: set[str] = set()

    async def stop_it(streams: dict[str, Stream]) -> None:
        while not all((places := await scene.routes(streams)).values()):
            await asyncio.sleep(0.02)
        mine = [s for name, s in streams.items() if places[name][-1].worker == "w0"]
        async with aiohttp.ClientSession() as session:
            while await _step_age_us(session, victim) < 50_000 and not all(s.tokens for s in mine):
                await asyncio.sleep(0.01)
        await asyncio.to_thread(stop, pid)
        cut.update(s.request for s in mine if not s.tokens)

    began = time.monotonic()
    try:
        hit = await scene.streams(8, 24, "stopped", stop_it, padding=padding(5))
    finally:
        os.kill(pid, signal.SIGCONT)
    assert not whole(hit)
    paths = await scene.routes(hit)
    moved = [r for r, made in paths.items() if len(made) > 1]
    if not cut:
        inconclusive("the prefills on w0 were over before it was stopped")
    if {paths[r][0].worker for r in moved} != {"w0"} and starved(
        since, cpu_time([other["engine_pid"]])
    ):
        inconclusive("w1 waited for processors and was judged hung too")
    assert moved and {paths[r][0].worker for r in moved} == {"w0"}
    print(f"{len(moved)} moved; all answered after {time.monotonic() - began:.2f} s")
    await scene.until_serving("w0")
    again = await scene.streams(8, 24, "again", padding=padding(7))
    assert same(calm, again) == []


async def _step_age_us(session: aiohttp.ClientSession, worker: dict[str, Any]) -> int:
    """For how long an engine has been computing its present step."""
    async with session.get(f"http://127.0.0.1:{worker['port']}/relume/state") as answer:
        return (await answer.json())["step_age_us"]
