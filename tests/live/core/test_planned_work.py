"""Planned work on workers: an agent is told to stop, engines are restarted one after the other."""

from __future__ import annotations

import asyncio
import os
import signal
import time

from msgspec import UNSET

from relume.chaos.traffic import Stream
from relume.events import vocabulary as v
from relume.events.failpoints.points import Failpoint
from relume.events.vocabulary.enums import DeathReason, RolloutStage
from tests.live.conftest import HANG_S, same, whole
from tests.live.core.core_fleet import CORE, WORKERS, CoreFleet

pytestmark = CORE
TOKENS = 96


async def test_streams_leave_before_a_terminated_agent_stops_its_engine(fleet: CoreFleet) -> None:
    calm = await fleet.calm(4, TOKENS)
    before = await fleet.worker("w0")

    async def terminate(streams: dict[str, Stream]) -> None:
        await point.reached()
        await fleet.open_all()
        os.kill(before["agent_pid"], signal.SIGTERM)
        deadline = time.monotonic() + HANG_S
        while fleet.state.workers["w0"].leaving is UNSET:
            assert time.monotonic() < deadline, "the agent does not say that it leaves"
            await asyncio.sleep(0.02)
        await point.release()

    async with fleet.at(Failpoint.ENGINE_DECODE, "w0", tokens=20) as point:
        struck = await fleet.streams(4, TOKENS, fleet.named("terminated"), terminate)
    assert not whole(struck)
    assert same(calm, struck) == []
    agent = fleet.fleet.children["w0"]
    assert await asyncio.to_thread(agent.process.wait, HANG_S) == 0
    fleet.fleet.restart("w0")
    await fleet.until_ready("w0", before["incarnation"] + 1)
    happened = await fleet.events()
    assert {e.kind for e in happened if type(e) is v.TransportObserved} == {"moved"}
    died = [e for e in happened if type(e) is v.EngineDied]
    assert [(e.worker, e.reason) for e in died] == [("w0", DeathReason.STOPPED)]


async def test_no_client_notices_a_rolling_restart(fleet: CoreFleet) -> None:
    """It goes on after both replicas were killed, while no client had a stream."""
    calm = await fleet.calm(4, TOKENS)
    before = {name: (await fleet.worker(name))["incarnation"] for name in WORKERS}
    answer = await fleet.fleet.admin("rollout", "POST", body={"model": "tiny"})
    assert answer["state"] == "decided", answer
    deadline, rounds, is_active = time.monotonic() + HANG_S, 0, True
    while is_active:
        assert time.monotonic() < deadline, await fleet.fleet.admin("rollout")
        is_active = (await fleet.fleet.admin("rollout"))["active"]
        rounds += 1
        struck = await fleet.streams(4, TOKENS, fleet.named(f"roll{rounds}"))
        assert not whole(struck)
        assert same(calm, struck) == []
        if rounds == 1:
            assert is_active, "the kill comes too late"
            await replace_replicas(fleet)
    happened = await fleet.events()
    assert {e.kind for e in happened if type(e) is v.TransportObserved} <= {"moved"}
    stages = [e for e in happened if type(e) is v.RolloutDecided]
    assert stages[-1].stage == RolloutStage.DONE
    restarted = [e.workers for e in stages if e.stage == RolloutStage.RESTARTING]
    assert sorted(restarted) == [(name,) for name in WORKERS], "one failure domain at a time"
    for name in WORKERS:
        assert (await fleet.worker(name))["incarnation"] == before[name] + 1


async def replace_replicas(fleet: CoreFleet) -> None:
    """Kill all replicas at once, start them again, and wait until each of them has the workers."""
    names = [f"r{number}" for number in range(fleet.fleet.options.replicas)]
    for name in names:
        fleet.fleet.children[name].kill()
    for name in names:
        fleet.fleet.restart(name)
    deadline = time.monotonic() + HANG_S
    while not all([await fleet.fleet.workers(number) for number in range(len(names))]):
        assert time.monotonic() < deadline, "the replicas do not return"
        await asyncio.sleep(0.1)
