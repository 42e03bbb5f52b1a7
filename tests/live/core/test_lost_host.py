"""A host is lost while the engines of its model are restarted one after the other.

Not `core`: it waits for a lease that lapses and for the start of two engines, and the budget of `make test`
is spent.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from relume.events import vocabulary as v
from relume.events.failpoints.points import Action, Failpoint
from relume.events.vocabulary.enums import RolloutStage
from tests.live.checkpoints.test_checkpoints import daemon_of
from tests.live.conftest import HANG_S, same, whole
from tests.live.core.core_fleet import WORKERS, CoreFleet
from tests.suite.outcomes import inconclusive

pytestmark = pytest.mark.asyncio(loop_scope="session")
TOKENS = 96
STEP_S = 0.2
"""Of each engine at first, so that streams run until the host is known to be lost: they take 19 s, and a
lease lapses after 4 s."""


async def test_a_rolling_restart_waits_for_a_host_that_is_lost_meanwhile(fleet: CoreFleet) -> None:
    """Two workers have to stay open. While w0 drains, w1 is lost with its agent, engine and state
    daemon: w0 serves again. When w1 is back, w0 is restarted."""
    calm = await fleet.calm(4, TOKENS)
    before = fleet.state.workers["w0"].incarnation
    async with two_stay_open(fleet), slow_steps(fleet) as quicken:
        on_w0 = fleet.named("drained")
        spread = fleet.named("spread")
        await fleet.only("w0")
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(fleet.streams(4, TOKENS, on_w0))]
            await fleet.until_routed(f"{on_w0}-{number}" for number in range(4))
            await fleet.open_all()
            running.append(tasks.create_task(fleet.streams(4, TOKENS, spread)))
            places = await fleet.until_routed(f"{spread}-{number}" for number in range(4))
            answer = await fleet.fleet.admin("rollout", "POST", body={"model": "tiny"})
            assert answer["state"] == "decided", answer
            await until_decided(fleet, RolloutStage.DRAINING)
            if not any(routes[-1].worker == "w1" for routes in places.values()):
                inconclusive("no stream was on the host that is lost")
            await lose_host(fleet, "w1")
            await until_decided(fleet, RolloutStage.PAUSED, "w1: host lost")
            assert not any(task.done() for task in running), "streams ran meanwhile"
            quicken.set()
        for struck in (task.result() for task in running):
            assert not whole(struck)
            assert same(calm, struck) == []
        begun, draining, returned, *paused = await decisions(fleet)
        assert (begun.stage, begun.workers) == (RolloutStage.BEGUN, WORKERS)
        assert (draining.stage, draining.workers) == (RolloutStage.DRAINING, ("w0",))
        assert (returned.stage, returned.workers) == (RolloutStage.RETURNED, ("w0",))
        assert returned.reason == "too few workers of tiny are open without w0"
        assert {e.stage for e in paused} == {RolloutStage.PAUSED}
        fleet.fleet.restart("w1")
        rounds, deadline = 0, time.monotonic() + HANG_S
        while not any(e.stage == RolloutStage.CHECKING for e in await decisions(fleet)):
            assert time.monotonic() < deadline, await decisions(fleet)
            rounds += 1
            during = await fleet.streams(4, TOKENS, fleet.named(f"roll{rounds}"))
            assert not whole(during)
            assert same(calm, during) == []
        assert fleet.state.workers["w0"].incarnation == before + 1
        await fleet.fleet.admin("rollout/cancel", "POST")
        await until_decided(fleet, RolloutStage.CANCELLED)


@asynccontextmanager
async def two_stay_open(fleet: CoreFleet) -> AsyncIterator[None]:
    """Inside, two workers have to stay open, and what drains has no other place: it runs to its end."""
    await fleet.configure("migration", moves="off", drain_floor="2")
    try:
        yield
    finally:
        await fleet.configure("migration", moves="drain", drain_floor="1")


@asynccontextmanager
async def slow_steps(fleet: CoreFleet) -> AsyncIterator[asyncio.Event]:
    """Engines take at least `STEP_S` for a step until the event is set."""
    quicken = asyncio.Event()
    slow = fleet.failpoints.armed(
        Failpoint.ENGINE_STEP, Action.DELAY, process="engine *", times=0, seconds=STEP_S
    )

    async def release() -> None:
        await quicken.wait()
        await point.release()

    async with slow as point:
        releasing = asyncio.create_task(release())
        try:
            yield quicken
        finally:
            releasing.cancel()


async def lose_host(fleet: CoreFleet, name: str) -> None:
    """Kill all its processes at once."""
    worker = await fleet.worker(name)
    for pid in (worker["agent_pid"], worker["engine_pid"], daemon_of(fleet, name)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    await asyncio.to_thread(fleet.fleet.children[name].process.wait)


async def decisions(fleet: CoreFleet) -> list[v.RolloutDecided]:
    """Those of the rollout so far."""
    return [e for e in await fleet.events() if type(e) is v.RolloutDecided]


async def until_decided(fleet: CoreFleet, stage: RolloutStage, reason: str = "") -> None:
    """Wait for that stage of the rollout, with such a reason."""
    async with asyncio.timeout(HANG_S):
        while not any(e.stage == stage and reason in e.reason for e in await decisions(fleet)):
            await asyncio.sleep(0.02)
