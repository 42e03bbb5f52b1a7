"""Keys that never were a segment end no reader of a replica's stream or of the leader's."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from relume.controlplane.cli.doctor import check_segments
from relume.controlplane.history.replica_restore import load_history
from relume.engine_shim.agent.stream_reader import FleetReader
from relume.events.etcd.factory import EtcdLog
from relume.events.etcd.keys import Keys
from relume.events.etcd.maintenance import Maintenance
from relume.events.etcd.reader.scan import Scan
from relume.events.log.damaged_segment import DamagedSegment
from relume.events.log.errors import BrokenChain, CorruptSegment, Fenced
from relume.events.log.interface import RevisionGroup
from relume.events.log.segment import GENESIS, pack
from tests.etcd_server import EtcdServer
from tests.events.support import following, numbers, tick, until
from tests.history.stage import Stage, Traffic, folded, replica_on, traffic_on

pytestmark = pytest.mark.etcd

KEYS = Keys("/relume/v1")
STREAMS = pytest.mark.parametrize("stream", ["r.r0", "fleet"])


async def written(log: EtcdLog, stream: str, first: int, count: int = 4) -> None:
    """The stream's owner writes so many segments."""
    async with log.writer(stream) as writer:
        for number in range(first, first + count):
            writer.append(tick(number))
            await writer.flush(5)


async def value_of(log: EtcdLog, key: bytes) -> bytes:
    return (await log.client.range(key)).kvs[0].value


async def all_reads(log: EtcdLog, stream: str, count: int) -> list[DamagedSegment]:
    """Every way to read finds segments 1 to `count`; what they skip."""
    seen = list[DamagedSegment]()

    async def read(after: int = 0, **heads: object) -> list[RevisionGroup]:
        reader = log.reader()
        reader.on_damage = seen.append
        return await reader.read(after, **heads)  # type: ignore[arg-type]

    groups = [g for g in await read() if g.segments]
    assert numbers(groups, stream) == list(range(count))
    for at, group in enumerate(groups, 1):
        last = group.segments[0]
        heads = {stream: (last.seq, last.hash, last.last + 1)}
        rest = list(range(at, count))
        assert numbers(await read(group.revision), stream) == rest
        assert numbers(await read(group.revision, heads=heads), stream) == rest
    agent = FleetReader(log.client, (stream,))
    assert numbers(await agent.read(), stream) == list(range(count))
    return seen


@STREAMS
@pytest.mark.parametrize("stray", [0, 6, 9, 2**64 - 1])
async def test_all_readers_pass_over_one_and_its_writer_continues(
    log: EtcdLog, stream: str, stray: int
) -> None:
    key = KEYS.segment(stream, stray)
    await written(log, stream, 0)
    live, seen = log.reader(), list[DamagedSegment]()
    live.on_damage = seen.append
    async with (
        following(live) as follower,
        following(FleetReader(log.client, (stream,))) as agent,
    ):
        await until(lambda: numbers(follower.groups, stream) == [0, 1, 2, 3])
        await until(lambda: numbers(agent.groups, stream) == [0, 1, 2, 3])
        await log.client.put(key, b"no segment")
        await until(lambda: [(d.stream, d.seq, d.after) for d in seen] == [(stream, stray, 4)])
        assert {(d.stream, d.seq) for d in await all_reads(log, stream, 4)} == {(stream, stray)}
        await written(log, stream, 4, 1)
        await until(lambda: numbers(follower.groups, stream) == list(range(5)))
        await until(lambda: numbers(agent.groups, stream) == list(range(5)))
        assert {(d.stream, d.seq) for d in await all_reads(log, stream, 5)} == {(stream, stray)}
        (line,) = await check_segments(log)
        assert line.text.startswith(f"segment {stray} of {stream} is skipped")
        assert line.remedy.startswith(f"etcdctl del {key.decode()}; then ")
        await log.client.delete(key)
        assert await check_segments(log) == []


@STREAMS
async def test_one_that_its_writer_comes_to_ends_that_writer_alone(
    log: EtcdLog, stream: str
) -> None:
    """Readers know it by etcd's revisions: it was there before the segment before it."""
    await written(log, stream, 0)
    strays = [KEYS.segment(stream, seq) for seq in (7, 8)]
    async with following(log.reader()) as follower:
        await until(lambda: numbers(follower.groups, stream) == [0, 1, 2, 3])
        for key in strays:
            await log.client.put(key, b"no segment")
        async with log.writer(stream) as writer:
            for number in range(4, 6):
                writer.append(tick(number))
                await writer.flush(5)
            writer.append(tick(6))
            with pytest.raises(Fenced, match="segment 7 stands a key that is no segment: relume"):
                await writer.flush(5)
        with pytest.raises(CorruptSegment, match=f"8 of {stream}"):
            await written(log, stream, 6)
        await until(lambda: numbers(follower.groups, stream) == list(range(6)))
        seen = {(d.stream, d.seq) for d in await all_reads(log, stream, 6)}
        assert seen == {(stream, 7), (stream, 8)}
        await log.client.compact((await log.reader().read())[-1].revision)
        assert numbers(await log.reader().read(), stream) == list(range(6))
        (line,) = await check_segments(log)
        assert all(key.decode() in line.remedy for key in strays)
        await log.client.delete(strays[0])
        await log.client.delete(strays[-1])
        await written(log, stream, 6)
        await until(lambda: numbers(follower.groups, stream) == list(range(10)))
        later = [g for g in await log.reader().read() if g.segments]
    assert [(g.revision, g.segments) for g in follower.groups if g.segments] == [
        (g.revision, g.segments) for g in later
    ]


@STREAMS
async def test_its_writer_opens_beside_several(log: EtcdLog, stream: str) -> None:
    """Although a key stands at the number of keys."""
    await written(log, stream, 0)
    for seq in (6, 7, 40):
        await log.client.put(KEYS.segment(stream, seq), b"no segment")
    await written(log, stream, 4, 1)
    seen = await all_reads(log, stream, 5)
    assert {d.seq for d in seen} == {6, 7, 40}


async def test_a_stream_of_nothing_but_strays_is_none(log: EtcdLog) -> None:
    await written(log, "r.r0", 0)
    revision = (await log.reader().read())[-1].revision
    for seq in (5, 6):
        await log.client.put(KEYS.segment("r.new", seq), b"x")
    for after, heads in ((0, None), (revision, {}), (revision, None)):
        reader, seen = log.reader(), list[DamagedSegment]()
        reader.on_damage = seen.append
        assert numbers(await reader.read(after, heads=heads), "r.new") == []
        assert {(d.stream, d.seq) for d in seen} == {("r.new", 5), ("r.new", 6)}


async def cut(log: EtcdLog, stream: str) -> None:
    """Segment 8 is damaged, and 6 and 7 are gone."""
    await log.client.put(KEYS.segment(stream, 8), b"no segment")
    await log.client.delete(KEYS.segment(stream, 6), KEYS.segment(stream, 8))


async def damaged_inside(log: EtcdLog, stream: str) -> None:
    await log.client.put(KEYS.segment(stream, 5), b"no segment")


async def damaged_at_the_end(log: EtcdLog, stream: str) -> None:
    await log.client.put(KEYS.segment(stream, 8), b"no segment")


async def next_number(log: EtcdLog, stream: str) -> None:
    await log.client.put(KEYS.segment(stream, 9), b"no segment")


async def whole_after_a_gap(log: EtcdLog, stream: str) -> None:
    await log.client.put(KEYS.segment(stream, 11), pack(stream, 9, 11, 11, GENESIS, [b"x"]))


async def whole_among_strays(log: EtcdLog, stream: str) -> None:
    for seq in range(11, 40):
        await log.client.put(KEYS.segment(stream, seq), b"no segment")
    await log.client.put(KEYS.segment(stream, 40), pack(stream, 9, 40, 40, GENESIS, [b"x"]))


async def missing_inside(log: EtcdLog, stream: str) -> None:
    await log.client.delete(KEYS.segment(stream, 5))


@STREAMS
@pytest.mark.parametrize(
    "change",
    [
        cut,
        damaged_inside,
        damaged_at_the_end,
        next_number,
        whole_after_a_gap,
        whole_among_strays,
        missing_inside,
    ],
)
async def test_where_a_segment_may_have_stood_the_reading_ends(
    log: EtcdLog, stream: str, change: object
) -> None:
    await written(log, stream, 0, 8)
    groups = [g for g in await log.reader().read() if g.segments]
    await change(log, stream)  # type: ignore[operator]
    with pytest.raises((BrokenChain, CorruptSegment), match=stream):
        await log.reader().read()
    (line,) = await check_segments(log)
    assert line.text.startswith("no replica can read it")
    third = groups[2].segments[0]
    heads = {stream: (third.seq, third.hash, third.last + 1)}
    for given in (heads, None):
        with pytest.raises((BrokenChain, CorruptSegment), match=stream):
            await log.reader().read(groups[2].revision, heads=given)


@STREAMS
async def test_a_trimmed_stream_is_read_beside_one(log: EtcdLog, stream: str) -> None:
    """Also if etcd remembers nothing of the time when it was written."""
    await written(log, stream, 0, 8)
    whole = [g for g in await log.reader().read() if g.segments]
    await log.client.put(KEYS.segment(stream, 40), b"no segment")
    await log.client.delete(KEYS.segment(stream, 1), KEYS.segment(stream, 5))
    await log.client.put(KEYS.snapshot(whole[3].revision), b"manifest")
    await log.client.compact((await log.client.range(KEYS.identity)).header.revision)
    reader, seen = log.reader(), list[DamagedSegment]()
    reader.on_damage = seen.append
    assert numbers(await reader.read(), stream) == list(range(4, 8))
    assert {(d.seq, d.after) for d in seen} == {(40, 8)}
    await log.client.delete(KEYS.segment(stream, 5), KEYS.segment(stream, 8))
    await log.client.put(KEYS.segment(stream, 8), b"no segment")
    with pytest.raises(CorruptSegment, match=f"8 of {stream}"):
        await log.reader().read()


async def test_a_replica_lives_and_starts_beside_them(
    etcd: EtcdServer, log: EtcdLog, tmp_path: Path
) -> None:
    """It leads, archives and trims, also when it starts again; the log says what is skipped."""
    strays = {"fleet": 1 << 40, "r.r0": 1 << 40, "r.new": 5}

    async def archived(stage: Stage, traffic: Traffic) -> None:
        rounds = stage.keeper.status.rounds
        async with asyncio.timeout(60):
            while stage.keeper.status.rounds <= rounds + 1 or not stage.keeper.status.trimmed:
                await traffic.steps(16)

    async with traffic_on(log) as traffic:
        async with replica_on(etcd, tmp_path) as stage:
            await stage.leads()
            for stream, seq in strays.items():
                await log.client.put(KEYS.segment(stream, seq), b"no segment")
            await until(lambda: set(stage.fleet.unreadable or ()) == set(strays))
            await archived(stage, traffic)
        async with replica_on(etcd, tmp_path) as stage:
            assert stage.replica.covered, "it began at a snapshot"
            await stage.leads()
            await archived(stage, traffic)
            await until(lambda: stage.fleet.workers["w0"].step == len(traffic.taken))
    groups = await load_history(tmp_path, log.reader(), await Maintenance(log.client).identity())
    unreadable = folded(groups).unreadable
    assert {stream: known.segment for stream, known in unreadable.items()} == strays  # type: ignore[union-attr]


async def test_replicas_continue_without_a_leader_until_its_stray_key_is_deleted(
    etcd: EtcdServer, log: EtcdLog, tmp_path: Path
) -> None:
    async with replica_on(etcd, tmp_path) as first, replica_on(etcd, tmp_path, "r1") as second:
        await first.leads()
        last = (await Scan(log.client, KEYS, 0).extent("fleet")).last
        key = KEYS.segment("fleet", last + 20)
        await log.client.put(key, b"no segment")
        await until(lambda: first.fleet.unreadable and second.fleet.unreadable)
        await until(
            lambda: not (first.replica.leadership.leading or second.replica.leadership.leading)
        )
        async with replica_on(etcd, tmp_path, "r2") as third:
            await written(log, "r.other", 0)
            stages = first, second, third
            await until(lambda: all("r.other" in stage.fleet.streams for stage in stages))
            (line,) = await check_segments(log)
            assert line.remedy == f"etcdctl del {key.decode()}; then a replica leads, if none does"
            await log.client.delete(key)
            await until(lambda: any(stage.replica.leadership.leading for stage in stages))
