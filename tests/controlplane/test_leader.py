"""A leader whose log takes nothing more."""

from __future__ import annotations

from typing import Any

import pytest

from relume.events import vocabulary as v
from relume.events.log.codec import decode
from relume.events.log.errors import LogFull
from relume.events.log.memory import MemoryLog, MemoryWriter
from tests.replay.scene import Scene


def of_fleet(log: MemoryLog, kind: type) -> list[Any]:
    segments = (s for g in log.groups for s in g.segments if s.stream == "fleet")
    return [e for s in segments for e in map(decode, s.records) if type(e) is kind]


async def test_what_found_no_room_is_owed_by_the_next_leader(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The effects of a command are refused by a full spool; another election carries it out."""
    append, refused = MemoryWriter.append, []

    def full_for_effects(self: MemoryWriter, *events: Any, beyond_limit: bool = False) -> int:
        if not refused and any(type(e) is v.EffectsDecided for e in events):
            refused.append(self.epoch)
            raise LogFull(self.stream, 1)
        return append(self, *events, beyond_limit=beyond_limit)

    monkeypatch.setattr(MemoryWriter, "append", full_for_effects)
    async with Scene(81, workers=1, replicas=1) as scene:
        command = v.AdminCommanded(
            command_id="r0.1", principal="someone", command="drain", target="w0", force=True
        )
        scene.replicas["r0"].scheduler.emit(command)
        await scene.until(lambda: of_fleet(scene.log, v.EffectsDecided))
        assert len(refused) == 1
        assert scene.replicas["r0"].leadership.epoch > refused[0]
        await scene.settled()
    (decided,) = [e for e in of_fleet(scene.log, v.EffectsDecided) if e.again < 0]
    assert decided.effects == (v.Effect("drain", "w0", 0, ""),)
    assert len(of_fleet(scene.log, v.LeaderElected)) == 2


async def test_a_tick_waits_for_the_one_before_to_be_folded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ticks kept while etcd stalls would land at once, and prove a health there was not."""
    taken: list[int] = []
    append = MemoryWriter.append

    def noted(self: MemoryWriter, *events: Any, beyond_limit: bool = False) -> int:
        taken.extend(e.number for e in events if type(e) is v.Tick)
        return append(self, *events, beyond_limit=beyond_limit)

    monkeypatch.setattr(MemoryWriter, "append", noted)
    looks: list[None] = []
    healthy = property(lambda self: looks.append(None) or True)  # as long as no call has failed
    monkeypatch.setattr(MemoryWriter, "healthy", healthy)
    async with Scene(82, workers=1, replicas=1, tick_s=0.01) as scene:
        await scene.until(lambda: scene.replicas["r0"].fleet.tick > 2)
        scene.log.pause()
        landed = scene.replicas["r0"].fleet.tick
        looked = len(looks)
        await scene.until(lambda: len(looks) > looked + 50)
        assert len([n for n in taken if n > landed]) <= 2
        scene.log.resume()
        await scene.settled()
    assert taken == sorted(set(taken)), "no number twice"
