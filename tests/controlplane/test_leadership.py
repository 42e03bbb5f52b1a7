"""From when on a replica decides and a leader acts, and what it does when it missed something."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from relume.controlplane.replica.leader import Leadership
from relume.controlplane.replica.loop import Replica, ReplicaConfig
from relume.events import vocabulary as v
from relume.events.log.errors import Compacted
from relume.events.log.interface import Heads, RevisionGroup
from relume.events.log.memory import MemoryLog
from relume.policies.leader.duties import LATE
from relume.policies.state.fleet import Fleet
from relume.policies.state.fold import apply_group
from tests.controlplane.test_leader import of_fleet
from tests.policies.story import Story
from tests.replay.scene import Scene

DRAIN = v.AdminCommanded(
    command_id="r1.1", principal="someone", command="drain", target="w0", force=True
)


async def test_a_leader_acts_from_its_own_election_on_and_not_from_that_of_a_former_life() -> None:
    """By then it has what its predecessor wrote, so that nothing is done twice."""
    story, log = Story(), MemoryLog()
    story.worker()
    story.replica("r0", "b2")
    leader = Leadership(log.writer, story.fleet, "r0", "b2", tick_s=60.0)
    task = asyncio.create_task(leader.run())
    try:
        async with asyncio.timeout(5):
            while not leader.leading:
                await asyncio.sleep(0)
        for event, decided in (
            (v.LeaderElected("r0", "b1"), 0),
            (DRAIN, 0),
            (v.LeaderElected("r0", "b2"), 1),
        ):
            story.tell("fleet" if event is not DRAIN else "r.r1", event)
            leader.seen("", 0, event)
            assert len(of_fleet(log, v.EffectsDecided)) == decided
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize(("silent_s", "refused"), [(50, False), (70, True)])
@pytest.mark.parametrize("event", [DRAIN, v.LeaderElected("r0", "b2")], ids=["command", "election"])
async def test_a_leader_refuses_commands_that_land_after_a_minute_without_ticks(
    silent_s: int, refused: bool, event: Any
) -> None:
    story, log = Story(), MemoryLog()
    for name in ("w0", "w1"):
        story.worker(name)
    story.replica("r0", "b2")
    story.tell("fleet", v.LeaderElected("r0", "b2"))
    story.tell("fleet", v.Tick(1, time.time_ns() // 1_000_000 - 1000 * silent_s))
    story.lapse("fleet")
    leader = Leadership(log.writer, story.fleet, "r0", "b2", tick_s=60.0)
    task = asyncio.create_task(leader.run())
    try:
        async with asyncio.timeout(5):
            while not leader.leading:
                await asyncio.sleep(0)
        if event is DRAIN:
            leader.seen("", 0, v.LeaderElected("r0", "b2"))
        story.tell("r.r1", DRAIN)
        leader.seen("", 0, event)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert len(of_fleet(log, v.EffectsDecided)) == (not refused)
    assert of_fleet(log, v.ConfigChanged) == [v.ConfigChanged("", LATE, "r1.1")] * refused


async def test_a_replica_decides_once_it_has_folded_what_its_predecessor_left_in_the_spool() -> (
    None
):
    """Replay has the spool in every view of the successor."""
    log = MemoryLog()
    async with log.writer("r.r0") as writer:
        log.pause()
        last = writer.append(DRAIN)
        replica = Replica(ReplicaConfig(name="r0"), log, writer, log.writer)
        starting = asyncio.create_task(replica.catch_up())
        async with asyncio.timeout(5):
            while replica.fleet.revision < writer.epoch:
                await asyncio.sleep(0)
            for _ in range(20):  # turns in which it could decide
                await asyncio.sleep(0)
            assert writer.position == last and not starting.done()
            log.resume()
            await starting
        assert replica.fleet.streams["r.r0"].position == last < writer.position


class TrimmedLog(MemoryLog):
    """A log of which one group is trimmed before its follower reads it, once."""

    trims = False

    async def follow(
        self, after: int = 0, heads: Heads | None = None
    ) -> AsyncIterator[RevisionGroup]:
        async for group in super().follow(after):
            if self.trims:
                self.trims = False
                raise Compacted(after, group.revision)
            yield group


class History:
    """Folds of a whole log."""

    def __init__(self, log: MemoryLog) -> None:
        self._log = log

    async def restore(self) -> Any:
        fleet = Fleet()
        for group in self._log.groups:
            apply_group(fleet, group)
        return SimpleNamespace(fleet=fleet, covers=self._log.revision)


async def test_a_leader_that_missed_events_leaves_what_they_ask_for_to_the_next_election() -> None:
    log = TrimmedLog()
    async with Scene(83, workers=1, replicas=1, log=log) as scene:
        replica = scene.replicas["r0"]
        await scene.until(lambda: replica.fleet.tick > 2)
        replica._history = History(log)
        log.trims = True
        async with log.writer("r.r1") as writer:
            writer.append(DRAIN)
            await scene.until(lambda: of_fleet(log, v.EffectsDecided))
        await scene.settled()
    assert not log.trims and len(of_fleet(log, v.LeaderElected)) == 2
