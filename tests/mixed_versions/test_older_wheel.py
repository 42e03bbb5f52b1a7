"""A replica of a real older build beside one of the next build, on real etcd: under load, with a kill of
an engine, through the upgrade of the older one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from relume.controlplane.replay.verify import verify
from relume.events import vocabulary as v
from relume.events.etcd.factory import EtcdLog
from relume.events.etcd.writer.stream_writer import EtcdWriter
from relume.events.vocabulary.enums import DeathReason
from tests.etcd_server import EtcdServer
from tests.gateway.peers import Behaviour, Engine
from tests.history.stage import config_for
from tests.mixed_versions.next_build import NEXT, OLD, WeatherReported, next_build
from tests.mixed_versions.processes import (
    NEXT_BUILD,
    THIS_BUILD,
    Build,
    Fleet,
    newer_than,
    verified_by,
)

pytestmark = [pytest.mark.etcd, pytest.mark.full]

CLIENTS = 8


def start_engine(writer: EtcdWriter, engine: Engine, incarnation: int) -> None:
    engine.incarnation = incarnation
    writer.append(
        v.EngineStarted(engine.name, incarnation, 2, 3),
        v.EngineReady(
            worker=engine.name, incarnation=incarnation, host="127.0.0.1", port=engine.port,
            model="m", max_model_len=4096, block_size=16, kv_blocks=512,
        ),
    )  # fmt: skip


@asynccontextmanager
async def fleet_of(etcd: EtcdServer, folder: Path) -> AsyncIterator[tuple[Fleet, Any]]:
    async with AsyncExitStack() as stack:
        log = await stack.enter_async_context(EtcdLog(config_for(etcd), name="test"))
        workers = []
        for name in ("w0", "w1"):
            engine = await stack.enter_async_context(Engine(name))
            engine.default = Behaviour(pause_s=0.02)
            writer = await stack.enter_async_context(log.writer(f"w.{name}"))
            writer.append(v.WorkerRegistered(worker=name, domain=name, agent_pid=1))
            start_engine(writer, engine, 1)
            workers.append((writer, engine))
        yield Fleet(etcd, folder, log, stack), workers


async def test_an_older_build_is_upgraded_under_load_and_no_stream_breaks(
    etcd: EtcdServer, older: Build, tmp_path: Path
) -> None:
    async with fleet_of(etcd, tmp_path) as (fleet, workers), asyncio.timeout(200):
        # At once: a newer replica that was alone for a lease would raise the level.
        await asyncio.gather(fleet.replica("r0", NEXT_BUILD), fleet.replica("r1", older))
        clients = [asyncio.create_task(fleet.client()) for _ in range(CLIENTS)]
        try:
            await fleet.more(100)
            writer, engine = workers[0]
            engine.stop()  # as a kill does
            writer.append(v.EngineDied("w0", 1, DeathReason.KILLED))
            await fleet.more(60)
            engine.port = 0
            await fleet.stack.enter_async_context(engine)
            start_engine(writer, engine, 2)
            await fleet.more(100)
            assert await fleet.events(v.FeatureLevelRaised) == [], "the older build cannot read it"
            at = await fleet.revision()
            by_older, verdict = [
                await asyncio.to_thread(verified_by, build, etcd, at)
                for build in (older, THIS_BUILD)
            ]
            assert verdict["complete"] and verdict["decisions"] > 250 and verdict["hashes"] > 5
            assert by_older["untaken"].keys() <= newer_than(older)
            differs = {k: (by_older[k], verdict[k]) for k in verdict if by_older[k] != verdict[k]}
            assert differs.keys() <= {"untaken", "complete", "answers"}, differs

            await fleet.stop("r1")
            await fleet.replica("r1", NEXT_BUILD)
            await fleet.more(100)
            with next_build():
                while True:
                    weather = {stream for stream, _ in await fleet.events(WeatherReported)}
                    if weather == {"r.r0", "r.r1"}:
                        break
                    await asyncio.sleep(0.2)
            raised = [e for _, e in await fleet.events(v.FeatureLevelRaised) if e.level > e.was]
            assert [(e.level, e.was) for e in raised] == [(NEXT, OLD)]
            seen = [type(e) for _, e in await fleet.events(v.ReplicaStopped, v.FeatureLevelRaised)]
            assert seen[:2] == [v.ReplicaStopped, v.FeatureLevelRaised]
            await fleet.more(60)
        finally:
            for task in clients:
                task.cancel()
            await asyncio.gather(*clients, return_exceptions=True)
        with next_build():
            verdict = verify(await fleet.log.reader().read())
        assert not verdict.divergences and not verdict.unreadable and verdict.hashes > 5
        with pytest.raises(AssertionError, match="build_too_old"):
            await fleet.replica("r2", THIS_BUILD)
