"""Engines of a fleet find their weights in the memory of their host's state daemon."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import msgspec
import pytest

from relume.controlplane.incidents.incident_fold import incidents_of
from relume.controlplane.local.local_fleet import FleetOptions, LocalFleet
from relume.events import vocabulary as v
from relume.events.vocabulary.enums import FailedPart, RecoveryTier
from tests.live.checkpoints.test_checkpoints import daemon_of, until_daemons
from tests.live.conftest import HANG_S, Scene, same, scene_of, whole

pytestmark = pytest.mark.full
POOL = "relume-pool"


class KeepingFleet(LocalFleet):
    def agent_flags(self, index: int) -> list[str]:
        return ["--keep-weights-mb", "64", "--weights-load-mb-s", "1"]


async def test_an_engine_finds_the_weights_of_the_one_before(options: FleetOptions) -> None:
    """Also when the state daemon died with it: then the next engine reads the files and leaves them.
    Full: a fleet that no other test can use."""
    more = msgspec.structs.replace(options, checkpoint_mb=64)
    async with scene_of(more, KeepingFleet) as scene:
        await until_daemons(scene, 2)
        calm = await scene.streams(4, 64, "calm")
        assert not whole(calm)
        first = await _loaded(scene, 1)
        assert first.read_bytes == first.bytes > 1 << 20 and first.ranks == 1
        await _restarted(scene, 2)
        second = await _loaded(scene, 2)
        assert second.read_bytes == 0 and second.bytes == first.bytes
        os.kill(daemon_of(scene, "w0"), signal.SIGKILL)
        await _restarted(scene, 3)
        third = await _loaded(scene, 3)
        assert third.read_bytes == first.bytes
        assert third.took_ms >= 1000 * (first.bytes >> 20), "at most 1 MiB per second"
        loading = [e for e in await scene.events("w.w0") if type(e) is v.WeightsLoading]
        of_third = [e for e in loading if e.incarnation == 3]
        assert of_third and 0 < of_third[-1].read_bytes <= of_third[-1].bytes
        assert not [e for e in loading if e.incarnation == 2], "it reads no file"
        assert (await scene.worker("w0"))["weights_read_bytes"] == first.bytes
        assert same(calm, await scene.streams(4, 64, "again")) == []
        recovered = [r for r in incidents_of(await scene.log()) if r.part == FailedPart.WORKER]
        found = [(r.name, r.tier, r.reloaded_bytes, r.reused_bytes) for r in recovered]
        assert found == [
            ("w0", RecoveryTier.SOFTWARE_CRASH, 0, first.bytes),
            ("w0", RecoveryTier.COLD, first.bytes, 0),
        ]
        assert recovered[-1].first_token_ms >= recovered[-1].capacity_back_ms
        await scene.sound()


async def _restarted(scene: Scene, incarnation: int) -> None:
    """kill -9 of w0's engine; the next one has its weights in a pool."""
    worker = await scene.worker("w0")
    os.kill(worker["engine_pid"], signal.SIGKILL)
    await scene.until_ready("w0", incarnation)
    worker = await scene.worker("w0")
    assert POOL in Path(f"/proc/{worker['engine_pid']}/maps").read_text()


async def _loaded(scene: Scene, incarnation: int) -> v.WeightsLoaded:
    """Where that engine of w0 had its weights from, as the log says."""

    def found(events: list) -> v.WeightsLoaded | None:
        of_it = (e for e in events if type(e) is v.WeightsLoaded and e.worker == "w0")
        return next((e for e in of_it if e.incarnation == incarnation), None)

    deadline = time.monotonic() + HANG_S
    while (event := found(await scene.events())) is None:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.1)
    return event
