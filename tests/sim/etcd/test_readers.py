"""The log's real reader and watch on simulated etcd, whose members are struck."""

import asyncio

import pytest

from relume.events import vocabulary as v
from relume.events.etcd.client.watch import Watch
from relume.events.etcd.keys import Keys, after_prefix
from relume.events.log.codec import decode_all
from tests.sim.etcd.cluster import ticks


@pytest.mark.parametrize("fault", ["silence", "isolate"])
def test_a_reader_whose_member_sends_no_events_reads_from_another(world, fault):
    w = world(members=3)
    found = []

    async def read(process):
        async for group in w.etcd.reader(process).follow(0):
            found.extend((w.loop.time(), e) for s in group.segments for e in decode_all(s.records))

    async def work(process):
        reading = process.spawn(read(process))
        other = w.loop.process("r1")

        async def write():
            async with w.etcd.writer("r.r1", other) as writer:
                writer.append(v.Tick(0, 0))
                await writer.flush(5)
                getattr(w.etcd, fault)("e0")
                for number in range(1, 20):
                    writer.append(v.Tick(number, 0))
                    await writer.flush(10)
                    await asyncio.sleep(1)

        await other.spawn(write())
        reading.cancel()

    w.run("r0", work)
    assert ticks(e for _, e in found)[-1] == 19
    struck_s = found[0][0]
    assert next(at_s for at_s, e in found[1:]) - struck_s < 8


def test_a_watch_that_reconnects_shows_each_revision_once(world):
    w = world()
    shown = []

    async def watch(process):
        keys = Keys("/relume/v1")
        end = after_prefix(keys.root)
        async for revision, _ in Watch(w.etcd.log(process).client, keys.root, end, 0).revisions():
            shown.append(revision)

    async def work(process):
        watching = process.spawn(watch(process))
        async with w.etcd.writer("r.r0", process) as writer:
            for number in range(40):
                writer.append(v.Tick(number, 0))
                if number % 10 == 9:
                    w.etcd.kill("e0")
                    w.loop.call_later(1, w.etcd.start, "e0")
                await asyncio.sleep(0.3)
            await writer.flush(30)
        await asyncio.sleep(20)
        watching.cancel()

    w.run("r0", work)
    assert shown == sorted(set(shown)), "each once, in order"
    assert {group.revision for group in w.etcd.groups()} <= set(shown)
