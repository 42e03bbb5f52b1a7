"""Stock `vllm serve` with our plugin beside a forked engine: its engine core is killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from relume.chaos.live.failpoint_server import FailpointServer
from relume.chaos.traffic import Stream
from relume.controlplane.local.local_fleet import LocalFleet
from relume.events import vocabulary as v
from relume.events.failpoints.failpoint_client import ENVIRONMENT
from relume.events.failpoints.points import Failpoint
from tests.live.conftest import same, scene_of, small_fleet, whole
from tests.processes import family

pytestmark = [pytest.mark.core, pytest.mark.timeout(300)]


class MixedFleet(LocalFleet):
    """w0 runs stock `vllm serve`."""

    def agent_flags(self, index: int) -> list[str]:
        return ["--host-kind", "serve"] if index == 0 else []


async def test_streams_of_stock_vllm_serve_continue_elsewhere_and_it_comes_back(
    zygote: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with FailpointServer(tmp_path / "failpoints.sock") as failpoints:
        monkeypatch.setenv(ENVIRONMENT, str(failpoints.path))
        options = small_fleet(tmp_path, zygote=zygote, ready_timeout_s=200.0)
        async with scene_of(options, MixedFleet) as scene:
            calm = await scene.streams(4, 96, "calm")
            await scene.only("w0")
            before = await scene.worker("w0")

            async def kill(streams: dict[str, Stream]) -> None:
                hit = await point.reached()
                await scene.drain("w1", "undrain")
                assert hit.pid == family(before["engine_pid"])["core"]
                os.kill(hit.pid, signal.SIGKILL)

            at = failpoints.armed(Failpoint.ENGINE_DECODE, process="engine w0", tokens=20)
            async with at as point:
                struck = await scene.streams(4, 96, "stock", kill)
            assert not whole(calm) and not whole(struck)
            await scene.until_ended(struck)
            assert same(calm, struck) == []
            routes = await scene.routes(struck)
            assert {tuple(d.worker for d in made) for made in routes.values()} == {("w0", "w1")}
            died = [e for e in await scene.events("w.w0") if type(e) is v.EngineDied]
            assert [(e.reason, e.detail.split()[0]) for e in died] == [("killed", "core")], died
            await scene.until_ready("w0", before["incarnation"] + 1)
            await scene.sound()
