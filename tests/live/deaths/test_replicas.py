"""Two control plane replicas: either serves, one leads, and the death of one is its own."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from contextlib import AsyncExitStack, ExitStack

import msgspec

from relume.controlplane.local.local_fleet import FleetOptions
from relume.controlplane.replay.why import why
from relume.events import vocabulary as v
from tests.etcd_server import EtcdServer
from tests.live.conftest import HANG_S, Scene, read_log, same, scene_of, whole
from tests.live.proxy import CutProxy
from tests.signals import slowed


async def _leader(scene: Scene) -> str:
    elected = [e for e in await scene.events() if type(e) is v.LeaderElected]
    return elected[-1].replica if elected else ""


async def test_leader_killed_while_the_other_serves(options: FleetOptions) -> None:
    options = msgspec.structs.replace(options, replicas=2)
    async with scene_of(options) as scene:
        first, second = scene.fleet.gateways
        calm = await scene.streams(6, 128, "calm", url=first)
        other = await scene.streams(6, 128, "other", url=second)
        assert not whole(calm) and same(calm, other) == []
        leader = await _leader(scene)
        index = int(leader[1:])
        mine, survivor = scene.fleet.gateways[index], scene.fleet.gateways[1 - index]

        slow = ExitStack()  # no doomed stream is to end before its gateway is killed

        async def kill(streams: dict) -> None:
            await scene.ripe(streams, 8)
            await scene.until_routed(f"doomed-{i}" for i in range(4))
            scene.fleet.children[leader].kill()
            slow.close()

        with slow:
            for worker in await scene.fleet.workers():
                slow.enter_context(slowed(worker["engine_pid"]))
            lost = scene.streams(4, 1500, "doomed", url=mine, ignore_eos=True)
            doomed = asyncio.create_task(lost)
            kept = await scene.streams(6, 400, "kept", kill, url=survivor)
            broken = await doomed
        assert not whole(kept), "the other replica's streams must not notice"
        assert len(whole(broken)) == 4, "streams of the killed gateway break with its sockets"
        await _led_by(scene, f"r{1 - index}")
        await _orphans_ended(scene, list(broken))
        assert {w["incarnation"] for w in await scene.fleet.workers(1 - index)} == {1}
        scene.fleet.children[leader].process.wait()
        scene.fleet.restart(leader)
        await _serves(scene, mine)
        await scene.sound()


async def _led_by(scene: Scene, name: str) -> None:
    deadline = time.monotonic() + HANG_S
    while await _leader(scene) != name:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.2)


async def _orphans_ended(scene: Scene, client_ids: list[str]) -> None:
    """The new leader writes the one terminal event of each orphan (I1)."""
    deadline = time.monotonic() + HANG_S
    while True:
        ended = await scene.ended()
        if all(i in ended for i in client_ids):
            break
        assert time.monotonic() < deadline, sorted(ended)
        await asyncio.sleep(0.5)
    assert {ended[i].outcome for i in client_ids} == {"failed"}


async def _serves(scene: Scene, url: str) -> None:
    deadline = time.monotonic() + HANG_S
    number = 0
    while True:
        number += 1
        found = await scene.streams(1, 8, f"again{number}", url=url)
        if not whole(found):
            return
        assert time.monotonic() < deadline, whole(found)
        await asyncio.sleep(0.5)


async def test_why_answers_though_the_gateway_died_before_its_append(
    options: FleetOptions,
) -> None:
    """The gateway is cut off from etcd, decides, sends, and is killed: its decision is in
    the log nevertheless, journalled by the worker that took the request."""
    async with AsyncExitStack() as stack:
        etcd = await stack.enter_async_context(EtcdServer())
        proxy = await stack.enter_async_context(CutProxy(etcd.endpoints[0]))
        options = msgspec.structs.replace(
            options, etcd=etcd.endpoints[0], replica_args=("--etcd", proxy.endpoint)
        )
        scene = await stack.enter_async_context(scene_of(options))
        await _serves(scene, scene.url)
        await stack.enter_async_context(asyncio.timeout(120))
        while not await scene.ended() or await _journalled(scene):
            await asyncio.sleep(0.05)  # the first request's decision and end come first
        proxy.cut()
        doomed = asyncio.create_task(scene.streams(1, 300, "cut-off"))
        started = time.monotonic()
        while not (journalled := await _journalled(scene)):
            assert time.monotonic() - started < 20
            await asyncio.sleep(0.05)
        os.kill(scene.fleet.children["r0"].pid, signal.SIGKILL)
        await doomed
        request = journalled[0].request
        assert not [e for e in await scene.events()
                    if type(e) is v.RouteDecided and e.request == request]  # fmt: skip
        answer = why(await read_log(scene.etcd), request)
        assert "predicted_ttft" in json.dumps(msgspec.to_builtins(answer))


async def _journalled(scene: Scene) -> list[v.RequestQueued]:
    """Admissions that carry a decision whose replica never wrote it."""
    events = await scene.events()
    decided = {(e.request, e.attempt) for e in events if type(e) is v.RouteDecided}
    return [
        c
        for e in events
        if type(e) is v.EngineStep
        for c in e.changes
        if type(c) is v.RequestQueued and c.dispatch and (c.request, c.attempt) not in decided
    ]
