"""Builds of two feature levels beside each other: what a replica may write, and when it ends."""

from __future__ import annotations

import asyncio

import pytest

from relume.controlplane.replica.leader import Leadership
from relume.controlplane.replica.loop import Replica, ReplicaConfig
from relume.controlplane.replica.serve import _explain
from relume.events import vocabulary as v
from relume.events.log.feature_levels import LEVEL, AboveFeatureLevel
from relume.events.log.memory import MemoryLog, MemoryWriter
from relume.policies.leader.feature_level import SETTING, FleetTooNew, in_force
from relume.policies.state.fleet import Fleet
from tests.mixed_versions.next_build import NEXT, OLD, WeatherReported, next_build

RAISED = v.FeatureLevelRaised(level=NEXT, was=OLD, replicas=("r0",))
WEATHER = WeatherReported(sky="grey")


def replica_of(log: MemoryLog, writer: MemoryWriter, level: int) -> Replica:
    config = ReplicaConfig(name=writer.stream[2:], feature_level=level)
    return Replica(config, log, writer, log.writer)


async def raise_level(log: MemoryLog) -> None:
    async with log.writer("fleet") as leader:
        leader.append(RAISED)


def test_a_replica_announces_the_level_of_its_build() -> None:
    assert ReplicaConfig().feature_level == LEVEL


async def test_an_older_replica_refuses_to_start_and_writes_nothing() -> None:
    log = MemoryLog()
    await raise_level(log)
    async with log.writer("r.r1") as writer:
        with pytest.raises(FleetTooNew, match=f"feature level {NEXT}") as refused:
            await replica_of(log, writer, OLD).catch_up()
        assert writer.position == 0
        replica = replica_of(log, writer, NEXT)
        await replica.catch_up()
        assert replica.view.setting(SETTING, "") == str(NEXT)
    assert _explain(refused.value) == 1


async def test_an_older_replica_that_runs_ends_when_the_level_is_raised() -> None:
    """It came while the leader decided."""
    log = MemoryLog()
    async with log.writer("r.r1") as writer:
        replica = replica_of(log, writer, OLD)
        await replica.catch_up()
        following = asyncio.create_task(replica._follow())
        await raise_level(log)
        async with asyncio.timeout(5):
            with pytest.raises(FleetTooNew):
                await following


async def test_a_replica_writes_a_newer_event_only_after_the_raise() -> None:
    log = MemoryLog()
    with next_build():
        async with log.writer("r.r1") as writer:
            replica = replica_of(log, writer, NEXT)
            await replica.catch_up()
            before = writer.position
            with pytest.raises(AboveFeatureLevel):
                replica.scheduler.emit(WEATHER)
            assert writer.position == before
            following = asyncio.create_task(replica._follow())
            await raise_level(log)
            async with asyncio.timeout(5):
                while in_force(replica.fleet) < NEXT:
                    await asyncio.sleep(0)
            replica.scheduler.emit(WEATHER)
            assert writer.position > before
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)


async def test_a_leader_writes_a_newer_event_only_after_the_raise() -> None:
    log, fleet = MemoryLog(), Fleet()
    leader = Leadership(log.writer, fleet, "r0", "b1", tick_s=60.0)
    running = asyncio.create_task(leader.run())
    try:
        async with asyncio.timeout(5):
            while not leader.leading:
                await asyncio.sleep(0)
        with pytest.raises(AboveFeatureLevel):
            leader.append(WEATHER)
        fleet.feature_level = NEXT
        leader.append(WEATHER)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
