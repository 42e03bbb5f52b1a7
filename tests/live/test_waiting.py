"""Arrivals wait at the gateway while the only engine has all that it is to have."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import aiohttp
import msgspec
import pytest

from relume.chaos.traffic import Stream
from relume.controlplane.local.local_fleet import FleetOptions
from relume.controlplane.replay.rendering import lines_of
from relume.controlplane.replay.why import why
from relume.events import vocabulary as v
from tests.live.conftest import HANG_S, Scene, scene_of, whole
from tests.signals import stop

pytestmark = pytest.mark.usefixtures("patient")


async def held(scene: Scene) -> list[v.RequestHeld]:
    return [e for e in await scene.events() if type(e) is v.RequestHeld]


async def test_a_busy_engine_gets_no_more_and_who_waits_is_answered_in_turn_or_refused(
    options: FleetOptions,
) -> None:
    limits = ("--waiting-limits", "queued=2")
    async with scene_of(msgspec.structs.replace(options, workers=1, replica_args=limits)) as scene:
        calm = await scene.streams(1, 24, "calm")
        assert not whole(calm)
        assert not await held(scene)
        pid = (await scene.worker("w0"))["engine_pid"]
        refused: list[tuple[int, str, dict]] = []

        async def meanwhile(streams: dict[str, Stream]) -> None:
            """Nothing ends before the engine goes on."""
            deadline = time.monotonic() + HANG_S
            while len(await held(scene)) < 6:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.05)
            body = {"model": "tiny", "prompt": "late", "max_tokens": 4}
            async with aiohttp.ClientSession() as session:
                url = f"{scene.url}/v1/completions"
                late = {"x-slo-ttft-ms": "100", "x-relume-tier": "interactive"}
                async with session.post(url, json=body, headers=late) as answer:
                    refused.append(
                        (answer.status, answer.headers["retry-after"], await answer.json())
                    )
                async with session.get(f"{scene.url}/metrics") as page:
                    text = await page.text()
                assert 'relume_room_requests{tier="standard"} 6.0' in text
            os.kill(pid, signal.SIGCONT)

        stop(pid)
        busy = await scene.streams(8, 24, "busy", on_start=meanwhile)
        assert not whole(busy), "who waited has a whole answer"
        ((status, retry_s, error),) = refused
        assert (status, error["error"]["code"]) == (429, "deadline_exceeded")
        assert int(retry_s) >= 1
        events = await held(scene)
        assert {e.cause for e in events} == {"saturated", "behind"}
        sheds = [e for e in await scene.events() if type(e) is v.RequestShed]
        assert [(e.reason, e.tier, e.retry_after_s) for e in sheds] == [
            ("expired", "interactive", int(retry_s))
        ]
        verdict = await scene.sound(but=("I7", "I10"))  # one worker is no choice
        assert verdict.waits >= 13, "each held and each called"
        waited = [why(await scene.log(), name) for name in busy]
        assert sum("queued: " in "\n".join(lines_of(one)) for one in waited if one) == 6
