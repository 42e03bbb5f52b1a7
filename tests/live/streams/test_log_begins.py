"""etcd loses the end of the log, and another begins in its place, whatever else is lost. Full: each has a
fleet of its own, and takes about half a minute."""

from __future__ import annotations

import asyncio
import os
import signal

import aiohttp
import msgspec
import pytest

from relume.controlplane.local.local_fleet import FleetOptions
from tests.live.conftest import scene_of, whole
from tests.live.resuming import Reader
from tests.live.streams.new_log import (
    BODY,
    TOKENS,
    Disaster,
    before_the_log,
    returned,
    running,
    slow_steps,
    streams_continue,
)
from tests.live.streams.test_resumable import LONG_GRACE, assert_resumed

pytestmark = pytest.mark.usefixtures("patient")


async def test_streams_of_a_killed_replica_continue_token_for_token(
    options: FleetOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    await streams_continue(options, "killed", monkeypatch)


async def test_what_holders_have_of_a_stream_outlives_its_log_replica_and_engine(
    options: FleetOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is generated again from there, and its client gets the rest."""
    options = msgspec.structs.replace(options, checkpoint_mb=64, replica_args=LONG_GRACE)
    async with (
        slow_steps(options, monkeypatch) as slow,
        scene_of(options) as scene,
        aiohttp.ClientSession() as session,
    ):
        url = f"{scene.url}/v1/completions"
        calm = Reader(name="calm")
        await calm.read(session, url, BODY)
        disaster = Disaster(scene)
        former = await disaster.back_up()
        torn = [Reader(name=f"torn-{i}") for i in range(3)]
        engines = {w["name"]: w["engine_pid"] for w in await scene.fleet.workers()}
        async with slow:
            reading = [asyncio.create_task(r.read(session, url, BODY)) for r in torn]
            await running(torn, reading)
            scene.fleet.children["r0"].kill()
            await disaster.restore()
            for pid in engines.values():
                os.kill(pid, signal.SIGKILL)
        await asyncio.gather(*reading)
        await disaster.left("r0")
        present = await disaster.begin(former)
        scene.fleet.restart("r0")
        await asyncio.gather(*(returned(r, session, url) for r in torn))
        for reader in torn:
            assert_resumed(scene, calm, reader, TOKENS)
        routes = await present.routes([r.name for r in torn])
        firsts = [made[0] for made in routes.values()]
        assert all(d.attempt > 1 and d.mode == "new" for d in firsts), firsts
        present.records = [before_the_log(r) if r.request == "calm" else r for r in scene.records]
        later = await present.streams(4, 60, "later")
        assert not whole(later)
        await present.sound(but=("I10",))  # all engines had to start anew
