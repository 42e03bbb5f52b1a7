"""A running request gets other holders when its own drain, are lost, or come to be; the
engine that runs it is told."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiohttp import web

from relume.controlplane.replica.holder_watch import HolderWatch
from relume.controlplane.stream.arrival import Arrival
from relume.events import vocabulary as v
from tests.admin.scene import Scene
from tests.policies.story import engine_step, queued

NAMES = ("w0", "w1", "w2")


def daemon(name: str, boot: str = "b1") -> v.StateDaemonStarted:
    return v.StateDaemonStarted(
        worker=name, boot=boot, epoch=1, address=f"tcp://{name}:1", budget_bytes=1 << 20, family="f"
    )


class Engines:
    """Takes what the engines of all workers are told."""

    def __init__(self) -> None:
        self.told: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.deaf = 0
        """So many calls more are not answered."""

    async def __aenter__(self) -> Engines:
        app = web.Application()
        app.router.add_post("/relume/checkpoint", self._take)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.port = self._runner.addresses[0][1]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def _take(self, request: web.Request) -> web.Response:
        if self.deaf:
            self.deaf -= 1
            request.transport.abort()
            return web.Response()
        self.told.put_nowait(await request.json())
        return web.json_response({})

    async def next(self) -> dict[str, Any]:
        async with asyncio.timeout(10):
            return await self.told.get()


async def running(scene: Scene, engines: Engines) -> tuple[str, str, str]:
    """A request that runs: (its worker, its holder, the third one)."""
    for name in NAMES:
        writer = await scene.worker(name)
        ready = v.EngineReady(
            worker=name,
            incarnation=1,
            host="127.0.0.1",
            port=engines.port,
            model="tiny",
            max_model_len=2048,
            block_size=16,
            kv_blocks=100,
            family="f",
            block_bytes=100,
        )
        writer.append(ready, daemon(name))
    fleet, scheduler = scene.replica.fleet, scene.replica.scheduler
    await scene.until(lambda: len(fleet.holders) == 3 and fleet.workers["w2"].block_bytes)
    scheduler.arrived(
        Arrival(
            request="q",
            model="tiny",
            route="completions",
            stream=True,
            prompt_tokens=40,
            max_tokens=16,
            verdict="exact",
        )
    )
    given = scheduler.assign("q", "arrival", 0)
    await scene.until(lambda: "q" in fleet.placed)
    (holder,) = fleet.placed["q"].holders
    (third,) = {*NAMES} - {given.worker, holder}
    return given.worker, holder, third


async def test_a_draining_holder_and_a_lost_one_are_replaced():
    async with Engines() as engines, Scene() as scene:
        worker, holder, third = await running(scene, engines)
        placed = scene.replica.fleet.placed
        assert (await scene.call(f"workers/{holder}/drain", "POST"))[0] in (200, 202)
        told = await engines.next()
        asked = {"request": "q", "attempt": 1, "incarnation": 1}
        assert told == {**asked, "holders": [f"tcp://{third}:1"]}
        await scene.until(lambda: placed["q"].holders == (third,))
        scene.worker_writers[third].append(v.StateDaemonLost(third, "b1", "killed"))
        assert await engines.next() == {**asked, "holders": []}, "the other one drains"
        await scene.until(lambda: placed["q"].holders == ())
        scene.worker_writers[third].append(daemon(third, "b2"))
        assert await engines.next() == {**asked, "holders": [f"tcp://{third}:1"]}
        await scene.until(lambda: placed["q"].holders == (third,))
        assert worker not in placed["q"].holders


async def test_what_its_engine_has_finished_gets_no_other_holder():
    """Composed 110042: of a stream that waited for its client, a holder was chosen at each drain."""
    async with Engines() as engines, Scene() as scene:
        worker, holder, third = await running(scene, engines)
        fleet = scene.replica.fleet
        finished = v.EngineFinished("q", 1, "length", 16)
        scene.worker_writers[worker].append(engine_step(queued("q"), finished))
        await scene.until(lambda: "q/1" not in fleet.workers[worker].attempts)
        scene.worker_writers[holder].append(v.StateDaemonLost(holder, "b1", "killed"))
        await scene.until(lambda: not fleet.holders[holder].alive)
        scene.worker_writers[third].append(v.StateDaemonLost(third, "b1", "killed"))
        await scene.until(lambda: not fleet.holders[third].alive)
        assert fleet.placed["q"].holders == (holder,) and engines.told.empty()


async def test_what_drains_itself_keeps_its_holder():
    async with Engines() as engines, Scene() as scene:
        worker, holder, _ = await running(scene, engines)
        assert (await scene.call(f"workers/{worker}/drain", "POST"))[0] in (200, 202)
        await scene.until(lambda: scene.replica.fleet.workers[worker].draining)
        assert scene.replica.fleet.placed["q"].holders == (holder,)
        assert engines.told.empty()


@pytest.mark.full
async def test_a_silent_engine_is_informed_again_of_the_newest_only(
    monkeypatch: pytest.MonkeyPatch,
):
    again: list[int] = []
    put = HolderWatch._put

    def noted(self: HolderWatch, told: Any, turn: int) -> None:
        put(self, told, turn)
        if turn > 1:
            again.append(turn)

    monkeypatch.setattr(HolderWatch, "_put", noted)
    async with Engines() as engines, Scene() as scene:
        _, holder, third = await running(scene, engines)
        engines.deaf = 1
        assert (await scene.call(f"workers/{holder}/drain", "POST"))[0] in (200, 202)
        assert (await engines.next())["holders"] == [f"tcp://{third}:1"]
        assert engines.deaf == 0
        engines.deaf = 1
        scene.worker_writers[third].append(v.StateDaemonLost(third, "b1", "killed"))
        await scene.until(lambda: not engines.deaf)
        scene.worker_writers[third].append(daemon(third, "b2"))
        assert (await engines.next())["holders"] == [f"tcp://{third}:1"]
        await scene.until(lambda: again == [2, 2])  # the overtaken one's turn came, too
        scene.worker_writers[third].append(daemon(third, "b3"))
        assert (await engines.next())["holders"] == [f"tcp://{third}:1"]
        assert engines.told.empty(), "what is overtaken is not told"
