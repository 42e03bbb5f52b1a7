"""A long prefill is not a stall, and a stop within one is."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import msgspec
import pytest

from relume.chaos.traffic import WORDS
from relume.controlplane.local_fleet import FleetOptions
from relume.events import vocabulary as v
from tests.live.conftest import Scene, same, scene_of, whole

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
        calm = await _left_alone(scene)
        await _stopped(scene, calm)
        verdict = await scene.sound()
        assert verdict.stalls > 1


async def _left_alone(scene: Scene) -> dict:
    """Several prompts fill one step that takes far longer than the bound."""
    calm = await scene.streams(8, 24, "calm", padding=padding(7))
    assert not whole(calm)
    assert min(s.usage["prompt_tokens"] for s in calm.values()) > 7_000
    first_s = [s.first - s.started for s in calm.values()]
    print(f"first tokens after {min(first_s):.2f} to {max(first_s):.2f} s")
    assert max(first_s) > 2 * BOUND_MS / 1000, "these prompts are too short to test anything"
    judged = [e for e in await scene.events() if type(e) is v.StallJudged]
    assert judged, "nobody was silent for longer than the bound"
    assert not [e for e in judged if e.hung]
    assert await scene.unharmed() == []
    assert {len(made) for made in (await scene.routes(calm)).values()} == {1}
    return calm


async def _stopped(scene: Scene, calm: dict) -> None:
    """The engine is stopped while it computes such prompts: they go elsewhere."""
    victim = await scene.worker("w0")
    pid = victim["engine_pid"]

    async def stop(streams: dict) -> None:
        while not all((await scene.routes(streams)).values()):
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.2)
        os.kill(pid, signal.SIGSTOP)

    began = time.monotonic()
    try:
        hit = await scene.streams(8, 24, "stopped", stop, padding=padding(5))
    finally:
        os.kill(pid, signal.SIGCONT)
    assert not whole(hit)
    paths = await scene.routes(hit)
    moved = [r for r, made in paths.items() if len(made) > 1]
    assert moved and all(made[0].worker == "w0" for r, made in paths.items() if r in moved)
    print(f"{len(moved)} moved; all answered after {time.monotonic() - began:.2f} s")
    await scene.until_cleared("w0")
    again = await scene.streams(8, 24, "again", padding=padding(7))
    assert same(calm, again) == []
