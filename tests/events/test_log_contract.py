"""What `relume.events.log.interface` promises, of the log in memory and of the log on etcd alike."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from relume.events.etcd.factory import EtcdLog
from relume.events.log.codec import encode
from relume.events.log.errors import StreamOwned
from relume.events.log.interface import LandedSegment, LogReader, StreamWriter
from relume.events.log.memory import MemoryLog
from relume.events.log.segment import Chain
from tests.etcd_server import EtcdServer, etcd_binary
from tests.events.conftest import config_for
from tests.events.support import following, numbers, positions, tick, until


class Log:
    """Either log behind one face."""

    def __init__(self, log: MemoryLog | EtcdLog) -> None:
        self._log = log

    def writer(self, stream: str) -> StreamWriter:
        return self._log.writer(stream)

    @property
    def reader(self) -> LogReader:
        return self._log if isinstance(self._log, MemoryLog) else self._log.reader()


@pytest.fixture(params=["memory", pytest.param("etcd", marks=pytest.mark.etcd)])
async def any_log(request: pytest.FixtureRequest) -> AsyncIterator[Log]:
    if request.param == "memory":
        yield Log(MemoryLog())
        return
    if etcd_binary() is None:
        pytest.skip("no etcd on PATH")
    async with EtcdServer() as server, EtcdLog(config_for(server)) as log:
        yield Log(log)


async def test_positions_count_events_from_one_over_all_lives(any_log: Log) -> None:
    async with any_log.writer("w.w0") as writer:
        assert writer.position == writer.durable == 0
        assert writer.append(tick(0)) == 1
        assert writer.append(tick(1), tick(2)) == 3
        assert writer.append(encode(tick(3))) == 4
        assert writer.append() == 4
        await writer.flush(5)
        assert writer.durable == 4
        first = writer.epoch
    async with any_log.writer("w.w0") as writer:
        assert writer.position == 4
        assert writer.epoch > first
        assert writer.append(tick(4)) == 5
        await writer.flush(5)
    groups = await any_log.reader.read()
    assert numbers(groups, "w.w0") == [0, 1, 2, 3, 4]
    assert positions(groups, "w.w0") == [1, 2, 3, 4, 5]


async def test_chain_holds_over_streams_and_lives(any_log: Log) -> None:
    for _ in range(2):
        async with any_log.writer("w.w0") as one, any_log.writer("w.w1") as two:
            for n in range(10):
                one.append(tick(n))
                two.append(tick(n), tick(n))
                await asyncio.gather(one.flush(5), two.flush(5))
    chain = Chain()
    for group in await any_log.reader.read():
        for segment in group.segments:
            chain.check(segment)
    assert chain.heads["w.w0"][2] == 21
    assert chain.heads["w.w1"][2] == 41


async def test_only_one_owner_at_a_time(any_log: Log) -> None:
    async with any_log.writer("fleet") as writer:
        with pytest.raises(StreamOwned):
            async with any_log.writer("fleet"):
                pass
        assert await any_log.reader.owners() == {"fleet": writer.epoch}
    assert await any_log.reader.owners() == {}
    async with any_log.writer("fleet"):
        pass


async def test_landed_is_called_once_for_every_event_in_order(any_log: Log) -> None:
    landed: list[LandedSegment] = []
    async with any_log.writer("r.r0") as writer:
        writer.on_landed(landed.append)
        for n in range(50):
            writer.append(tick(n))
            await asyncio.sleep(0)
        await writer.flush(5)
    told = [p for e in landed for p in range(e.first, e.last + 1)]
    assert told == list(range(1, 51))
    assert [e.seq for e in landed] == list(range(1, len(landed) + 1))
    groups = await any_log.reader.read()
    there = [(s.seq, g.revision) for g in groups for s in g.segments]
    assert there == [(e.seq, e.revision) for e in landed]


async def test_followers_see_owners_and_segments_in_one_order(any_log: Log) -> None:
    async with following(any_log.reader) as seen:
        async with any_log.writer("w.w0") as writer:
            epoch = writer.epoch
            writer.append(tick(0))
            await writer.flush(5)
        await until(lambda: ("w.w0", 0) in [o for g in seen.groups for o in g.owners])
        created, written, gone = seen.groups
        assert created.owners == (("w.w0", epoch),) and created.revision == epoch
        assert [s.epoch for s in written.segments] == [epoch]
        assert gone.owners == (("w.w0", 0),)
        assert created.revision < written.revision < gone.revision


async def test_follow_from_a_revision_repeats_nothing(any_log: Log) -> None:
    async with any_log.writer("w.w0") as writer:
        for n in range(6):
            writer.append(tick(n))
            await writer.flush(5)
        groups = await any_log.reader.read()
        after = groups[3].revision
        async with following(any_log.reader, after) as seen:
            writer.append(tick(6))
            await writer.flush(5)
            await until(lambda: numbers(seen.groups, "w.w0")[-1:] == [6])
            assert numbers(seen.groups, "w.w0") == [3, 4, 5, 6]
        assert numbers(await any_log.reader.read(after), "w.w0") == [3, 4, 5, 6]
        assert await any_log.reader.read(0, after) == groups[:4]


async def test_flush_has_a_bound_and_an_empty_one_returns(any_log: Log) -> None:
    async with any_log.writer("w.w0") as writer:
        await writer.flush(0.5)
        assert writer.healthy


async def test_leaving_lands_what_was_taken(any_log: Log) -> None:
    async with any_log.writer("w.w0") as writer:
        for n in range(100):
            writer.append(tick(n))
    assert numbers(await any_log.reader.read(), "w.w0") == list(range(100))


async def test_fenced_does_not_return_while_the_stream_is_ours(any_log: Log) -> None:
    async with any_log.writer("w.w0") as writer:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await writer.fenced()


@pytest.mark.etcd
async def test_records_beyond_a_segment_are_refused_and_large_ones_split(
    etcd: EtcdServer, log: EtcdLog
) -> None:
    from relume.events.etcd.errors import RecordTooLarge

    big = b"\x92\xa6tick/1" + bytes(100_000)
    async with log.writer("w.w0") as writer:
        with pytest.raises(RecordTooLarge):
            writer.append(tick(0), bytes(300_000))
        assert writer.position == 0
        for _ in range(10):
            writer.append(big)
        await writer.flush(10)
    groups = await log.reader().read()
    segments = [s for g in groups for s in g.segments]
    assert [r for s in segments for r in s.records] == [big] * 10
    assert max(sum(map(len, s.records)) for s in segments) <= 256 * 1024
