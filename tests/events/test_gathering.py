"""A writer that gathers sends late, but only while nobody waits for it."""

from __future__ import annotations

import pytest

from relume.events.etcd.factory import EtcdLog
from tests.etcd_server import etcd_binary
from tests.events.support import numbers, tick, until

pytestmark = [
    pytest.mark.etcd,
    pytest.mark.skipif(etcd_binary() is None, reason="no etcd on PATH"),
]


async def segments(log: EtcdLog) -> list[int]:
    """How many records each segment of the stream holds."""
    groups = await log.reader().read()
    return [len(s.records) for g in groups for s in g.segments if s.stream == "r.r0"]


async def others_land(log: EtcdLog) -> None:
    """By then, events of ours that were sent at once would have landed as well."""
    async with log.writer("r.other", wait_s=10) as other:
        other.append(tick(0))
        await other.flush(10)


async def test_events_are_gathered_until_a_caller_hurries(log: EtcdLog) -> None:
    async with log.writer("r.r0", gather_s=60) as writer:
        for n in range(3):
            writer.append(tick(n))
            await others_land(log)
        assert writer.durable == 0
        writer.hurry()
        await until(lambda: writer.durable == 3)
        writer.append(tick(3))
        await others_land(log)
        assert writer.durable == 3
        await writer.flush(10)
        writer.append(tick(4))
    assert await segments(log) == [3, 1, 1]
    assert numbers(await log.reader().read(), "r.r0") == [0, 1, 2, 3, 4]


async def test_who_hurries_a_little_sends_what_came_until_then(log: EtcdLog) -> None:
    async with log.writer("r.r0", gather_s=60) as writer:
        writer.append(tick(0))
        writer.hurry(0.2)
        writer.append(tick(1))
        writer.hurry(30)  # no later than it was to be
        assert writer.durable == 0
        await until(lambda: writer.durable == 2)
        writer.append(tick(2))
        writer.hurry(30)
        writer.hurry()
        await until(lambda: writer.durable == 3)
    assert await segments(log) == [2, 1]


async def test_gathering_ends_by_itself_and_by_size(log: EtcdLog) -> None:
    async with log.writer("r.r0", gather_s=0.2) as writer:
        writer.append(tick(0))
        writer.append(tick(1))
        await until(lambda: writer.durable == 2)
    async with log.writer("r.r0", gather_s=60) as writer:
        writer.append(tick(2))
        size = log.config.linger_bytes
        writer.append(*(tick(n) for n in range(size // 4)))
        await until(lambda: writer.durable == writer.position)
    assert (await segments(log))[0] == 2
