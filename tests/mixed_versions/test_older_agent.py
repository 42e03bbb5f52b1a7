"""Agents and replicas of a real older build and of the next one in one fleet, on real etcd: each kills
and outlives the other under load, down to the older build and up again."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from relume.controlplane.replay.verify import verify
from relume.events import vocabulary as v
from relume.events.etcd.factory import EtcdLog
from tests.etcd_server import EtcdServer
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
MORE = 40
"""Requests that are answered before the next thing happens."""


@asynccontextmanager
async def loaded(etcd: EtcdServer, folder: Path) -> AsyncIterator[tuple[Fleet, Any]]:
    """A fleet, and how to begin its load."""
    async with AsyncExitStack() as stack, asyncio.timeout(400):
        log = await stack.enter_async_context(EtcdLog(config_for(etcd), name="test"))
        fleet = Fleet(etcd, folder, log, stack)
        clients: list[asyncio.Task[None]] = []

        def begin() -> None:
            clients.extend(asyncio.create_task(fleet.returning_client()) for _ in range(CLIENTS))

        try:
            yield fleet, begin
        finally:
            for task in clients:
                task.cancel()
            await asyncio.gather(*clients, return_exceptions=True)


async def ready(fleet: Fleet, worker: str, count: int) -> None:
    """Wait for the n-th engine of the worker."""
    await fleet.logged(
        lambda events: len([e for _, e in events if e.worker == worker]) >= count, v.EngineReady
    )


async def leads(fleet: Fleet, name: str) -> None:
    await fleet.logged(lambda events: events and events[-1][1].replica == name, v.LeaderElected)


async def resign(fleet: Fleet, name: str) -> None:
    done = await asyncio.to_thread(
        subprocess.run,
        [*THIS_BUILD.relume, "leader", "resign", "--admin", f"127.0.0.1:{fleet.admins[name]}"],
        capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done


async def agent_killed(fleet: Fleet, worker: str, build: Build, engines: int) -> None:
    """kill -9, and one of that build in its place; its engine is the n-th."""
    await fleet.kill(worker)
    await fleet.agent(worker, build)
    await ready(fleet, worker, engines)
    await fleet.more(MORE)


async def engine_killed(fleet: Fleet, worker: str, engines: int) -> None:
    """kill -9; its agent starts the n-th."""
    fleet.kill_engine(worker)
    await ready(fleet, worker, engines)
    await fleet.more(MORE)


async def replica_killed(fleet: Fleet, name: str, heir: str) -> None:
    """kill -9 of the leader: the other replica leads, and has its clients. Its own streams are whole."""
    before = fleet.resumed, fleet.unbegun
    await fleet.begun(name, 2)
    cut = fleet.busy[name]
    await fleet.kill(name)
    await fleet.more(MORE)
    await leads(fleet, heir)
    await fleet.until(lambda: fleet.resumed >= before[0] + 2 or fleet.broken)
    resumed, unbegun = fleet.resumed - before[0], fleet.unbegun - before[1]
    assert not fleet.broken and resumed + unbegun <= cut, (fleet.broken, resumed, unbegun, cut)


async def no_newer_events(fleet: Fleet) -> None:
    with next_build():
        assert await fleet.events(v.FeatureLevelRaised, WeatherReported) == []


async def verified(fleet: Fleet, older: Build) -> None:
    """Both builds read the same in the log, and no event of the next one."""
    at = await fleet.revision()
    by_older, verdict = [
        await asyncio.to_thread(verified_by, build, fleet.etcd, at) for build in (older, THIS_BUILD)
    ]
    assert verdict["complete"] and verdict["decisions"] > 250 and verdict["hashes"] > 5
    assert by_older["untaken"].keys() <= newer_than(older)
    differs = {k: (by_older[k], verdict[k]) for k in verdict if by_older[k] != verdict[k]}
    assert differs.keys() <= {"untaken", "complete", "answers", "decisions"}, differs
    not_taken = verdict["decisions"] - by_older["decisions"]  # it counts the cross-checks apart
    assert 0 <= not_taken <= sum(by_older["untaken"].values()), differs
    await no_newer_events(fleet)


async def newer_events_of(fleet: Fleet, *streams: str) -> None:
    with next_build():
        await fleet.logged(
            lambda events: {stream for stream, _ in events} == set(streams), WeatherReported
        )


async def test_builds_are_mixed_killed_and_exchanged_both_ways_and_no_stream_breaks(
    etcd: EtcdServer, older: Build, tmp_path: Path
) -> None:
    async with loaded(etcd, tmp_path) as (fleet, begin):
        await fleet.replica("r1", older)
        await asyncio.gather(
            fleet.replica("r0", NEXT_BUILD), fleet.agent("w0", older), fleet.agent("w1", NEXT_BUILD)
        )
        await ready(fleet, "w0", 1)
        await ready(fleet, "w1", 1)
        begin()
        await fleet.more(MORE)
        await engine_killed(fleet, "w0", 2)
        await engine_killed(fleet, "w1", 2)
        await leads(fleet, "r1")
        await resign(fleet, "r1")
        await leads(fleet, "r0")
        await fleet.more(MORE)  # for some ticks it could raise the level, were it alone
        await no_newer_events(fleet)
        await replica_killed(fleet, "r0", heir="r1")

        await fleet.replica("r0", older)
        await agent_killed(fleet, "w1", older, 3)
        await fleet.stop("r0")
        await fleet.replica("r0", NEXT_BUILD)
        await agent_killed(fleet, "w1", NEXT_BUILD, 4)
        await verified(fleet, older)

        await leads(fleet, "r1")
        await replica_killed(fleet, "r1", heir="r0")
        await newer_events_of(fleet, "r.r0", "w.w1")
        (raised,) = [e for _, e in await fleet.events(v.FeatureLevelRaised) if e.level > e.was]
        assert (raised.level, raised.was, raised.replicas) == (NEXT, OLD, ("r0",))
        await engine_killed(fleet, "w0", 3)

        await fleet.replica("r1", NEXT_BUILD)
        await agent_killed(fleet, "w0", NEXT_BUILD, 4)
        await newer_events_of(fleet, "r.r0", "r.r1", "w.w0", "w.w1")
        assert fleet.broken == []
        with next_build():
            verdict = verify(await fleet.log.reader().read())
        assert not verdict.divergences and not verdict.unreadable and verdict.hashes > 5
        print(f"streams {fleet.answered}, broken {len(fleet.broken)}, continued at the other replica "
              f"{fleet.resumed}, replica killed before the first event {fleet.unbegun}")  # fmt: skip
