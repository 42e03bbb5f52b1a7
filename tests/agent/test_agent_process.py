"""The agent as a process on a real etcd: killed, stopped, fenced, cut off, asked to leave."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from relume.engine_shim.agent.engine_process.process_identity import is_alive
from relume.events import vocabulary as v
from relume.events.etcd.config import EtcdConfig
from relume.events.etcd.factory import EtcdLog
from tests.agent.host import Host, left, until
from tests.agent.stage import ENGINE, environment, weight_of_session
from tests.etcd_server import EtcdServer
from tests.live.proxy import CutProxy
from tests.pace import outlast
from tests.signals import stop

pytestmark = pytest.mark.etcd
T = TypeVar("T")


@pytest.fixture
def etcd() -> Iterator[EtcdServer]:
    with EtcdServer() as server:
        yield server


@pytest.fixture
async def host(tmp_path: Path, etcd: EtcdServer) -> AsyncIterator[Host]:
    async with EtcdLog(EtcdConfig(endpoints=(etcd.url.removeprefix("http://"),))) as log:
        found = Host(tmp_path, etcd, log)
        found.spawn("zygote", *ENGINE, "--as", "zygote", str(tmp_path / "z.sock"))
        try:
            yield found
        finally:
            await found.stop()


async def test_killed_agent_is_followed_by_one_with_another_incarnation(host: Host) -> None:
    agent = host.agent("--steps", "2")
    await host.nth(v.EngineReady, 1)
    engine = host.engine
    agent.kill()
    await until(lambda: not is_alive(engine), timeout_s=2)
    agent.wait()
    began = time.monotonic()
    host.agent("--steps", "2")
    await host.nth(v.EngineReady, 2)
    assert time.monotonic() - began < 10
    told = await host.events(v.WorkerRegistered, v.EngineStarted, v.EngineDied)
    assert [type(e) for e in told] == [
        *(v.WorkerRegistered, v.EngineStarted),
        *(v.WorkerRegistered, v.EngineDied, v.EngineStarted),
    ]
    assert [e.incarnation for e in told if type(e) is v.EngineStarted] == [1, 2]
    assert told[3].incarnation == 1


async def test_niceness_of_the_zygote_weighs_in_the_sessions_of_its_engines(host: Host) -> None:
    own = os.getpriority(os.PRIO_PROCESS, 0)
    path = str(host.path / "nice.sock")
    host.spawn("nice-zygote", "nice", "-n", "3", *ENGINE, "--as", "zygote", path)
    host.settings["zygote"] = path
    host.agent()
    await host.nth(v.EngineReady, 1)
    pid = host.engine.pid
    assert os.getpriority(os.PRIO_PROCESS, pid) == min(19, own + 3)
    assert weight_of_session(pid) in (None, min(19, own + 3))


async def test_stopped_orphan_is_killed_before_its_successor_starts(host: Host) -> None:
    agent = host.agent()
    await host.nth(v.EngineReady, 1)
    orphan = host.engine
    stop(orphan.pid)
    agent.kill()
    agent.wait()
    assert is_alive(orphan)
    host.agent()
    died = await host.nth(v.EngineDied, 1)
    assert not is_alive(orphan)
    assert (died.incarnation, died.reason) == (1, "killed")
    assert "orphan" in died.detail
    assert (await host.nth(v.EngineReady, 2)).incarnation == 2


async def test_a_reused_pid_is_not_mistaken_for_the_orphan(host: Host) -> None:
    innocent = subprocess.Popen(["sleep", "60"])
    try:
        (host.path / "run").mkdir()
        record = {"incarnation": 4, "engine": {"incarnation": 4, "process": [innocent.pid, 1]}}
        (host.path / "run" / "state.json").write_text(json.dumps(record))
        host.agent()
        assert (await host.nth(v.EngineDied, 1)).incarnation == 4
        assert (await host.nth(v.EngineStarted, 1)).incarnation == 5
        assert innocent.poll() is None
    finally:
        innocent.kill()
        innocent.wait()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_asked_to_leave_it_leaves_nothing(host: Host, number: signal.Signals) -> None:
    agent = host.agent()
    await host.nth(v.EngineReady, 1)
    engine = host.engine
    agent.send_signal(number)
    assert await left(agent) == 0, host.words()
    assert not is_alive(engine)
    assert host.state["engine"] is None
    told = [type(e) for e in await host.events()]
    assert told[-2:] == [v.EngineDied, v.WorkerDeregistered]
    assert "w.w0" not in await host.log.reader().owners()


async def test_asked_to_leave_while_it_waits(host: Host) -> None:
    async with host.log.writer("w.w0"):
        agent = host.agent()
        await until(lambda: "waiting for the worker's stream" in host.words())
        agent.send_signal(signal.SIGTERM)
        assert await left(agent) == 0


@pytest.mark.full
async def test_second_agent_of_a_living_worker_gives_up(host: Host) -> None:
    host.agent()
    await host.nth(v.EngineReady, 1)
    second = host.agent(directory="elsewhere")
    assert await left(second, timeout_s=30) == 4
    assert "another agent of this worker is alive" in host.words()
    third = host.agent()
    assert await left(third) == 2
    assert len(await host.events(v.EngineStarted)) == 1


async def test_fenced_agent_kills_its_engine_and_says_so(host: Host) -> None:
    agent = host.agent()
    await host.nth(v.EngineReady, 1)
    engine = host.engine
    stop(agent.pid)
    async with host.log.writer("w.w0", wait_s=20) as usurper:
        usurper.append(v.WorkerRegistered(worker="w0", domain="elsewhere", agent_pid=1))
        await usurper.flush(5)
        os.kill(agent.pid, signal.SIGCONT)
        assert await left(agent, timeout_s=30) == 3, host.words()
    assert not is_alive(engine)
    assert "another agent took stream w.w0" in host.words()


async def test_etcd_away_for_longer_than_the_lease_stops_nothing(host: Host) -> None:
    """The agent is cut off: etcd runs, so the lease ends for certain. (An etcd that was stopped may
    read a waiting renewal before it looks for leases that are over.)"""
    async with CutProxy(host.etcd.url.removeprefix("http://")) as proxy:
        host.settings["etcd"] = f"http://{proxy.endpoint}"
        agent = host.agent("--steps", "1")
        ready = await host.nth(v.EngineReady, 1)
        proxy.cut()
        os.kill(host.engine.pid, signal.SIGKILL)
        await until(lambda: host.state["incarnation"] == 2 and host.state["engine"])
        await outlast(4.0, "the agent's lease of 2 s")
        state = await asyncio.to_thread(host.status)
        assert state["engine"]["phase"] == "ready"
        assert not state["log"]["healthy"] and state["log"]["spooled_bytes"] > 0
        proxy.mend()
        again = await host.nth(v.EngineReady, 2)
        assert (ready.incarnation, again.incarnation) == (1, 2)
        await host.nth(v.StreamResumed, 1)
        assert agent.poll() is None
        engine = host.engine
        agent.kill()
        agent.wait()
        host.agent()
        assert (await host.nth(v.EngineReady, 3)).incarnation == 3
        assert not is_alive(engine)


async def test_agent_waits_for_etcd_at_its_start(host: Host) -> None:
    host.etcd.stop()
    agent = host.agent()
    await until(lambda: "waiting for the worker's stream" in host.words())
    assert agent.poll() is None
    host.etcd.cont()
    await host.nth(v.EngineReady, 1)


async def test_effects_over_etcd(host: Host) -> None:
    host.agent()
    await host.nth(v.EngineReady, 1)
    async with host.log.writer("fleet") as leader:
        effects = (v.Effect("restart", "w0", 1),)
        leader.append(
            v.EffectsDecided(decision="d1", basis=v.Basis(1, 0), cause="admin", effects=effects)
        )
        await leader.flush(5)
        assert (await host.nth(v.EffectApplied, 1)).outcome == "applied"
        await host.nth(v.EngineReady, 2)
        leader.append(
            v.Tick(1, 1),
            v.EffectsDecided(decision="d1", basis=v.Basis(1, 0), cause="admin", effects=effects),
        )
        leader.append(
            v.EffectsDecided(decision="d2", basis=v.Basis(1, 0), cause="admin", effects=effects)
        )
        refused = await host.nth(v.EffectApplied, 2)
        assert refused.outcome == "refused: stale incarnation 1, now 2"


async def test_it_loads_neither_vllm_nor_torch(host: Host) -> None:
    code = "import relume.engine_shim.agent, sys; print([m for m in ('vllm', 'torch') if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True)
    assert found.stdout.strip() == b"[]"
