"""An engine that idles between its steps: the log says so, and the fleet sees that it is slow."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from statistics import median

import msgspec
import pytest

from relume.chaos.live.failpoint_server import FailpointServer
from relume.chaos.traffic import Stream
from relume.chaos.validators.records import events_of
from relume.controlplane.local.local_fleet import FleetOptions
from relume.events import vocabulary as v
from relume.events.failpoints.failpoint_client import ENVIRONMENT
from relume.events.failpoints.points import Action, Failpoint
from relume.events.vocabulary.enums import FailureClass, HealthState
from relume.policies.state.step_times import FIRST_STEPS
from tests.live.conftest import EVENLY, HANG_S, Scene, same, scene_of, whole

PAUSE_S = 0.06
TOKENS = FIRST_STEPS + 100
"""More steps than those that all teach step times."""


async def steps_of(scene: Scene, worker: str) -> list[v.EngineStep]:
    found = await scene.events(f"w.{worker}")
    return [e for e in found if type(e) is v.EngineStep and e.duration_us]


async def test_an_engine_that_idles_before_each_step_is_judged_slow(
    options: FleetOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = msgspec.structs.replace(options, replica_args=EVENLY)
    async with FailpointServer(tmp_path / "failpoints.sock") as failpoints:
        monkeypatch.setenv(ENVIRONMENT, str(failpoints.path))
        async with scene_of(options) as scene:
            calm = await scene.streams(6, TOKENS, "calm")
            assert not whole(calm)
            healthy = {name: await steps_of(scene, name) for name in ("w0", "w1")}
            for name, steps in healthy.items():
                gaps, took = ([getattr(s, f) for s in steps] for f in ("gap_us", "duration_us"))
                print(
                    f"{name}: {len(steps)} steps, median gap {median(gaps)} us, {median(took)} us"
                )
                assert len(steps) > FIRST_STEPS and median(gaps) < PAUSE_S * 1e6 / 4
            slow = await _judged_slow(scene, failpoints, len(healthy["w0"]))
            assert same(calm, slow) == []
            await scene.sound()


async def _judged_slow(scene: Scene, failpoints: FailpointServer, before: int) -> dict[str, Stream]:
    """Streams beside a pause before each step of w0, until w0 is judged slow."""

    async def judged(streams: dict[str, Stream]) -> None:
        deadline = time.monotonic() + HANG_S
        while (worker := await scene.worker("w0"))["failure"] != FailureClass.SLOW:
            assert time.monotonic() < deadline, "w0 is not judged slow"
            await asyncio.sleep(0.05)
        assert worker["health"] == HealthState.SUSPECT
        assert "times those of its peers" in worker["evidence"]
        await pausing.release()

    pausing_of_w0 = failpoints.armed(
        Failpoint.ENGINE_STEP, Action.DELAY, process="engine w0", times=0, seconds=PAUSE_S
    )
    async with pausing_of_w0 as pausing:
        slow = await scene.streams(6, TOKENS, "slow", judged)
    assert not whole(slow)
    first, last = await _paused_and_judged_ms(scene)
    paused = [s.gap_us for s in (await steps_of(scene, "w0"))[before:] if s.gap_us >= PAUSE_S * 1e6]
    print(f"judged slow {last - first} ms after its first pause; {len(paused)} steps with pauses")
    assert len(paused) > 20 and median(paused) < 1.5 * PAUSE_S * 1e6
    return slow


async def _paused_and_judged_ms(scene: Scene) -> tuple[int, int]:
    """When the log had the first paused step of w0, and that it is slow; only w0 was judged so."""
    paused = judged = 0
    for at in events_of(await scene.log()):
        event = at.event
        if type(event) is v.EngineStep and at.stream == "w.w0" and event.gap_us >= PAUSE_S * 1e6:
            paused = paused or at.at_ms
        elif type(event) is v.HealthDecided and event.failure == FailureClass.SLOW:
            assert event.worker == "w0", event
            judged = judged or at.at_ms
    assert 0 < paused < judged
    return paused, judged
