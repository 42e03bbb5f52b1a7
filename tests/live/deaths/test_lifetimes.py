"""Hung engines, slow engines, dead agents, absent etcd: nothing restarts that need not."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

from relume.controlplane.local.local_fleet import FleetOptions
from relume.events import vocabulary as v
from relume.policies.liveness import stall
from tests.live.conftest import HANG_S, Scene, same, scene_of, whole
from tests.pace import outlast
from tests.processes import cpu_time, starved
from tests.signals import stop
from tests.suite.outcomes import inconclusive


async def test_hung_slow_and_orphaned_engines(options: FleetOptions) -> None:
    async with scene_of(options) as scene:
        calm = await scene.streams(6, 500, "calm")
        assert not whole(calm)
        await _slow_engine_is_left_alone(scene, calm)
        await _hung_engine_is_rescued_and_rejoins(scene, calm)
        await _agent_killed(scene, calm)
        verdict = await scene.sound()
        assert verdict.stalls == sum(type(e) is v.StallJudged for e in await scene.events())


async def _slow_engine_is_left_alone(scene: Scene, calm: dict) -> None:
    """Stopped nine tenths of the time it still progresses: no stream leaves it."""
    victim = await scene.worker("w0")
    pid = victim["engine_pid"]
    engines = [w["engine_pid"] for w in await scene.fleet.workers()]
    since = cpu_time(engines)

    async def slow(streams: dict) -> None:
        await scene.ripe(streams, 4)
        until = time.monotonic() + 4
        while time.monotonic() < until:
            os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(0.09)
            os.kill(pid, signal.SIGCONT)
            await asyncio.sleep(0.01)

    hit = await scene.streams(6, 500, "slow", slow)
    assert not whole(hit)
    assert same(calm, hit) == []
    attempts = {len(made) for made in (await scene.routes(hit)).values()}
    if attempts != {1} and starved(since, cpu_time(engines)):
        inconclusive(f"engines waited for processors, and streams left one: {attempts} attempts")
    assert attempts == {1}
    assert (await scene.worker("w0"))["incarnation"] == victim["incarnation"]


async def _hung_engine_is_rescued_and_rejoins(scene: Scene, calm: dict) -> None:
    """Judged within the cap; continued while the moved streams still run, it adds nothing."""
    victim = await scene.worker("w0")
    pid = victim["engine_pid"]
    await scene.only("w0")
    other = [(await scene.worker("w1"))["engine_pid"]]
    since = cpu_time(other)

    async def hang(streams: dict) -> None:
        await scene.paced(streams, 16, "w0", pid)
        deadline = time.monotonic() + HANG_S
        while not await scene.hung():
            assert time.monotonic() < deadline, "nobody noticed"
            await asyncio.sleep(0.02)
        os.kill(pid, signal.SIGCONT)

    try:
        hit = await scene.streams(6, 500, "hung", hang)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert not whole(hit)
    assert same(calm, hit) == []
    judged = await scene.hung()
    if "w1" in {e.worker for e in judged} and starved(since, cpu_time(other)):
        inconclusive(f"w1 got no processor and was judged hung too: {judged}")
    assert {e.worker for e in judged} == {"w0"}
    cap_us = stall.StallConfig().cap_us
    assert all(e.bound_us <= cap_us for e in judged if type(e) is v.StallJudged)
    assert judged[0].silent_us <= cap_us + 1_000_000
    await scene.until_serving("w0")
    assert (await scene.worker("w0"))["incarnation"] == victim["incarnation"]
    await _gets_streams_again(scene, "w0", calm)


async def _gets_streams_again(scene: Scene, name: str, calm: dict) -> None:
    deadline, number, used = time.monotonic() + HANG_S, 0, set[str]()
    while name not in used:
        assert time.monotonic() < deadline, f"{name} rejoined and gets nothing"
        again = await scene.streams(6, 500, f"rejoined{number}")
        assert same(calm, again) == []
        used |= {d.worker for made in (await scene.routes(again)).values() for d in made}
        number += 1


async def _agent_killed(scene: Scene, calm: dict) -> None:
    """An agent dies: its engine follows, streams move, a new agent starts another
    incarnation."""
    victim = await scene.worker("w0")
    await scene.only("w0")
    child = scene.fleet.children["w0"]

    async def kill(streams: dict) -> None:
        await scene.paced(streams, 16, "w0", victim["engine_pid"])
        child.kill()
        os.kill(victim["engine_pid"], signal.SIGCONT)

    hit = await scene.streams(6, 500, "agent", kill)
    assert not whole(hit)
    assert same(calm, hit) == []
    deadline = time.monotonic() + HANG_S
    while Path(f"/proc/{victim['engine_pid']}").exists():
        assert time.monotonic() < deadline, "the engine outlives its agent"
        await asyncio.sleep(0.05)
    child.process.wait()
    scene.fleet.restart("w0")
    await scene.until_ready("w0", victim["incarnation"] + 1)


async def test_etcd_away_longer_than_leases_restarts_nothing(options: FleetOptions) -> None:
    """etcd stopped for more than a TTL, then killed and restarted: streams go on, spools
    land, the log verifies, every incarnation is the one of before."""
    async with scene_of(options) as scene:
        calm = await scene.streams(4, 400, "calm")
        before = {w["name"]: w["incarnation"] for w in await scene.fleet.workers()}
        etcd = scene.fleet.children["etcd"]
        stop(etcd.pid)
        try:
            started = time.monotonic()
            number = 0
            while time.monotonic() - started < 6:
                hit = await scene.streams(4, 400, f"stopped{number}")
                number += 1
                assert not whole(hit)
                assert same(calm, hit) == []
        finally:
            os.kill(etcd.pid, signal.SIGCONT)
        await _log_is_back(scene)
        etcd.kill()
        etcd.process.wait()
        hit = await scene.streams(4, 400, "killed")
        assert not whole(hit)
        scene.fleet.restart("etcd")
        await _log_is_back(scene)
        after = {w["name"]: w["incarnation"] for w in await scene.fleet.workers()}
        assert after == before
        await outlast(6.0, "the time after which a worker that etcd forgot would be lost")
        after = {w["name"]: w["incarnation"] for w in await scene.fleet.workers()}
        assert after == before
        ended = await scene.ended()
        assert {f"stopped{number - 1}-0", "killed-3"} <= set(ended)
        assert [e for e in await scene.events() if type(e) is v.WorkerLost] == []
        await scene.sound()


async def _log_is_back(scene: Scene) -> None:
    """A new request's terminal event reaches etcd."""
    deadline = time.monotonic() + HANG_S
    name = f"probe{time.monotonic_ns()}"
    await scene.streams(1, 4, name)
    while True:
        try:
            async with asyncio.timeout(5):
                ended = await scene.ended()
            if f"{name}-0" in ended:
                return
        except (TimeoutError, OSError, RuntimeError):
            pass
        except Exception as error:  # the log's client says in its own words that etcd is away
            print(f"not yet: {error}")
        assert time.monotonic() < deadline, "the log did not come back"
        await asyncio.sleep(0.3)
