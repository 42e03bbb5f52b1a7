"""Fleets to look at: real replicas over scripted workers, with an admin server; and a large one."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from relume.controlplane.admin.admin_server import AdminServer
from relume.controlplane.serve_settings import ServeConfig
from relume.events import vocabulary as v
from relume.events.log.memory import MemoryLog
from tests.admin.scene import TOKENS
from tests.admin.scene import Scene as AdminScene
from tests.etcd_server import free_port
from tests.replay.scene import Scene


@asynccontextmanager
async def busy_fleet(
    tokens: dict[str, str] | None = None,
) -> AsyncIterator[tuple[Scene, AdminServer]]:
    """Two replicas and four workers that serve requests until the end; the first has the server."""
    log = MemoryLog(clock_ms=lambda: time.time_ns() // 1_000_000)
    async with Scene(seed=7, workers=4, tokens=(300, 1500), log=log) as scene:
        replica = scene.replicas["r0"]
        config = ServeConfig(
            name="r0",
            admin_port=free_port(),
            admin_tokens=TOKENS if tokens is None else tokens,
            archive_dir="/nowhere",
        )
        async with AdminServer(replica, config, scene.log) as admin:
            serving = asyncio.create_task(_traffic(scene))
            try:
                yield scene, admin
            finally:
                serving.cancel()
                await asyncio.gather(serving, return_exceptions=True)


async def _traffic(scene: Scene) -> None:
    for number in itertools.count(1):
        await scene.traffic(200, prefix=f"chat-{number}-", at_once=12)


async def kill_one(scene: Scene, admin: AdminServer, name: str = "w1") -> None:
    """Kill a busy engine, and wait until its streams continue elsewhere."""
    fleet, incidents = scene.replicas["r0"].fleet, scene.replicas["r0"].incidents
    await scene.until(
        lambda: len(fleet.workers[name].attempts) >= 2 and scene.running_covered(name), 20.0
    )
    scene.workers[name].die()
    await scene.until(
        lambda: any(
            i.name == name and i.streams and i.continued == i.streams for i in incidents.incidents
        ),
        20.0,
    )


async def fill(scene: AdminScene, count: int) -> None:
    """Workers w0, w1, ...: all are ready, a few died or were drained, and each has some load."""
    fleet = scene.replica.fleet
    for at in range(count):
        name = f"w{at}"
        writer = await scene._stack.enter_async_context(scene.log.writer(f"w.{name}"))
        scene.worker_writers[name] = writer
        writer.append(
            v.WorkerRegistered(
                worker=name, domain=f"rack-{at // 20}", agent_pid=1000 + at, agent_url=""
            ),
            v.EngineStarted(name, 1, 5000 + at, 1),
            v.EngineReady(
                worker=name, incarnation=1, host="127.0.0.1", port=9000, model="tiny",
                max_model_len=2048, block_size=32, kv_blocks=100,
            ),
        )  # fmt: skip
        if at % 137 == 50:
            writer.append(v.EngineDied(name, 1, "killed"))
        if at % 50 == 0:
            await asyncio.sleep(0)
    load(scene, 1)
    last = f"w{count - 1}"
    await scene.until(lambda: last in fleet.workers and fleet.workers[last].step, 120.0)


def load(scene: AdminScene, step: int) -> None:
    """Each engine makes a step: all lanes differ from those before."""
    for at, writer in enumerate(scene.worker_writers.values()):
        changes = tuple(v.RequestQueued(f"q{at}-{step}-{n}", 1, 40) for n in range((at + step) % 5))
        writer.append(
            v.EngineStep(
                incarnation=1, step=step, duration_us=9000, batch=8, sum_context=64,
                prefill_tokens=0, waiting=at % 3, kv_used=(at * 7 + step) % 100, changes=changes,
            )
        )  # fmt: skip
