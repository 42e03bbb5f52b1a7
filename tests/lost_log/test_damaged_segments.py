"""Segments of a worker's stream that cannot be read are skipped and named; others end the reading."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from math import inf
from pathlib import Path

import pytest

from relume.controlplane.cli.doctor import check_segments
from relume.controlplane.history.archive import Archive
from relume.controlplane.history.replica_restore import load_history
from relume.events.etcd.factory import EtcdLog
from relume.events.etcd.keys import Keys
from relume.events.etcd.maintenance import Maintenance
from relume.events.etcd.reader.scan import Scan
from relume.events.log.codec import encode
from relume.events.log.damaged_segment import DamagedSegment
from relume.events.log.errors import BrokenChain, CorruptSegment, LogError
from relume.events.log.segment import GENESIS, pack
from tests.etcd_server import EtcdServer
from tests.events.support import following, numbers, tick, until
from tests.history.stage import Stage, Traffic, folded, replica_on, traffic_on

pytestmark = pytest.mark.etcd

KEYS = Keys("/relume/v1")


def flipped(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


def no_successor(stream: str, seq: int = 5) -> bytes:
    """A whole segment that names another predecessor."""
    return pack(stream, 1 << 40, seq, seq, GENESIS, [b"x"])


DAMAGE: dict[str, tuple[int, Callable[[str], bytes]]] = {
    "bytes": (5, lambda stream: b"no segment"),
    "chain": (5, no_successor),
    "gap": (9, lambda stream: b"x"),
    "far": (2**64 - 1, lambda stream: b"x"),
    "nought": (0, lambda stream: b"x"),
}
"""What stands in etcd beside segments 1 to 4: its number, and its bytes."""


async def written(log: EtcdLog, stream: str, first: int, count: int = 4) -> None:
    """The stream's owner writes so many segments."""
    async with log.writer(stream) as writer:
        for number in range(first, first + count):
            writer.append(tick(number))
            await writer.flush(5)


@pytest.mark.parametrize("damage", DAMAGE)
async def test_it_is_skipped_by_all_readers_until_it_is_deleted(log: EtcdLog, damage: str) -> None:
    seq, value = DAMAGE[damage]
    key = KEYS.segment("w.w0", seq)
    await written(log, "w.w0", 0)
    live, seen = log.reader(), list[DamagedSegment]()
    live.on_damage = seen.append
    async with following(live) as follower:
        await until(lambda: numbers(follower.groups, "w.w0") == [0, 1, 2, 3])
        await log.client.put(key, value("w.w0"))
        await until(lambda: seen)
        await written(log, "w.w1", 0)
        await until(lambda: numbers(follower.groups, "w.w1") == [0, 1, 2, 3])
        late, found = log.reader(), list[DamagedSegment]()
        late.on_damage = found.append
        groups = await late.read()
        assert numbers(groups, "w.w0") == numbers(groups, "w.w1") == [0, 1, 2, 3]
        middle = [g.revision for g in groups if g.segments][1]
        assert numbers(await log.reader().read(middle), "w.w0") == [2, 3]
        assert {(d.stream, d.seq, d.after) for d in (*seen, *found)} == {("w.w0", seq, 4)}
        assert seen and found
        await log.client.delete(key)
        await written(log, "w.w0", 4)
        await until(lambda: numbers(follower.groups, "w.w0") == list(range(8)))
        later = await log.reader().read()
        await until(lambda: follower.groups == later)


async def test_what_follows_a_damaged_segment_is_skipped(log: EtcdLog) -> None:
    await written(log, "w.w0", 0, 8)
    key = KEYS.segment("w.w0", 3)
    data = (await log.client.range(key)).kvs[0].value
    reader, seen = log.reader(), list[DamagedSegment]()
    reader.on_damage = seen.append
    async with following(reader) as follower:
        await until(lambda: numbers(follower.groups, "w.w0") == list(range(8)))
        await log.client.put(key, flipped(data))
        await written(log, "w.w0", 8)
        await until(lambda: numbers(follower.groups, "w.w0") == list(range(12)))
    assert [(d.seq, d.after) for d in seen] == [(3, 8)], "what was read before stays read"
    late, found = log.reader(), list[DamagedSegment]()
    late.on_damage = found.append
    assert numbers(await late.read(), "w.w0") == [0, 1]
    assert [d.seq for d in found] == [3, *range(4, 13)] and {d.after for d in found} == {2}
    (line,) = await check_segments(log)
    assert line.text.startswith("segment 3 of w.w0 is skipped: crc mismatch; so are 9 more")
    assert "reads it up to segment 2 only" in line.text and "relume log begin" in line.remedy


async def test_the_doctor_names_all_keys_that_nothing_needs(log: EtcdLog) -> None:
    await written(log, "w.w0", 0)
    for seq, value in ((5, b"x"), (6, b"x"), (0, b"x"), (9, no_successor("w.w0", 9))):
        await log.client.put(KEYS.segment("w.w0", seq), value)
    (line,) = await check_segments(log)
    deletions = [KEYS.segment("w.w0", seq).decode() for seq in (0, 5, 6, 9)]
    commands = "; ".join(f"etcdctl del {key}" for key in deletions)
    assert line.remedy == f"{commands}; then restart the agent, and relume trust w0"
    for key in deletions:
        await log.client.delete(key.encode())
    assert await check_segments(log) == []


@pytest.mark.parametrize("stray", [0, 3, 40, 2**64 - 1])
async def test_what_follows_is_read_after_any_revision(log: EtcdLog, stray: int) -> None:
    """Whatever stands beside it: numbers and revisions do not rise together then."""
    async with log.writer("w.w0") as writer:
        for number in range(8):
            writer.append(tick(number))
            await writer.flush(5)
        groups = await log.reader().read()
        middle = next(g for g in groups for s in g.segments if s.seq == 6)
        heads = {"w.w0": (6, middle.segments[0].hash, 7)}
        await log.client.delete(KEYS.segment("w.w0", 1), KEYS.segment("w.w0", 5))
        await log.client.put(KEYS.segment("w.w0", stray), no_successor("w.w0", stray))
        for number in (8, 9):
            writer.append(tick(number))
            await writer.flush(5)
    reader, seen = log.reader(), list[DamagedSegment]()
    reader.on_damage = seen.append
    found = await reader.read(middle.revision, heads=heads)
    assert numbers(found, "w.w0") == [6, 7, 8, 9]
    assert {d.seq for d in seen} == ({stray} - {3})
    assert numbers(await reader.read(middle.revision, heads={}), "w.w0") == []


@pytest.mark.parametrize("first", [1, 3, 2**64 - 2])
async def test_a_stream_of_nothing_but_strays_is_none(log: EtcdLog, first: int) -> None:
    await written(log, "w.w1", 0)
    revision = (await log.reader().read())[-1].revision
    for seq in (first, first + 1):
        await log.client.put(KEYS.segment("w.new", seq), b"x")
    for after, heads in ((0, None), (revision, {}), (revision, None)):
        reader, seen = log.reader(), list[DamagedSegment]()
        reader.on_damage = seen.append
        assert numbers(await reader.read(after, heads=heads), "w.new") == []
        assert {(d.stream, d.seq) for d in seen} == {("w.new", first), ("w.new", first + 1)}


async def test_a_segment_of_an_older_epoch_is_the_same_to_all(log: EtcdLog) -> None:
    await written(log, "w.w0", 0)
    groups = await log.reader().read()
    last = [s for g in groups for s in g.segments][-1]
    async with following(log.reader()) as follower:
        await until(lambda: numbers(follower.groups, "w.w0") == [0, 1, 2, 3])
        older = pack("w.w0", 1, 5, 5, last.hash, [encode(tick(4))])
        await log.client.put(KEYS.segment("w.w0", 5), older)
        await until(lambda: numbers(follower.groups, "w.w0") == [0, 1, 2, 3, 4])
    heads = {"w.w0": (4, last.hash, 5)}
    later = await log.reader().read(groups[-1].revision, heads=heads)
    assert numbers(later, "w.w0") == [4]


async def test_upkeep_passes_over_them(log: EtcdLog) -> None:
    await written(log, "w.w0", 0, 8)
    await log.client.put(KEYS.log + b"w.w0/!", b"x")
    await log.client.put(KEYS.segment("w.w0", 40), b"x")
    upkeep = Maintenance(log.client)
    assert await upkeep.whole()
    async with log.writer("fleet") as leader:
        assert (await upkeep.trim({"w.w0": 5}, leader.epoch))[0] == 4


async def test_a_trimmed_stream_is_read_beside_a_segment_before_its_beginning(
    log: EtcdLog,
) -> None:
    await written(log, "w.w0", 0, 8)
    whole = await log.reader().read()
    await log.client.delete(KEYS.segment("w.w0", 1), KEYS.segment("w.w0", 5))
    await log.client.put(KEYS.snapshot(whole[3].revision), b"manifest")
    await log.client.put(KEYS.segment("w.w0", 2), b"no segment")
    reader, seen = log.reader(), list[DamagedSegment]()
    reader.on_damage = seen.append
    assert numbers(await reader.read(), "w.w0") == list(range(4, 8))
    assert {(damaged.seq, damaged.after) for damaged in seen} == {(2, 8)}


@pytest.mark.parametrize("stream", ["r.r0", "fleet"])
@pytest.mark.parametrize("damage", ["bytes", "chain"])
async def test_of_a_replica_or_the_leader_it_ends_the_reading(
    log: EtcdLog, stream: str, damage: str
) -> None:
    seq, value = DAMAGE[damage]
    await written(log, stream, 0)
    await log.client.put(KEYS.segment(stream, seq), value(stream))
    with pytest.raises((BrokenChain, CorruptSegment), match=f"segment 5|{stream}"):
        await log.reader().read()


async def test_the_owner_of_the_stream_says_which_segment_it_is(log: EtcdLog) -> None:
    await written(log, "w.w0", 0)
    await log.client.put(KEYS.segment("w.w0", 5), b"x")
    with pytest.raises(LogError, match=r"segment 5 of w\.w0"):
        async with log.writer("w.w0"):
            pass


async def all_archived(stage: Stage, traffic: Traffic) -> None:
    """A trimmed log, with a snapshot of all that the worker wrote."""
    while not stage.keeper.status.trimmed:
        await traffic.steps(16)
    rounds = stage.keeper.status.rounds
    await until(lambda: stage.keeper.status.rounds > rounds + 1)


async def test_a_replica_that_begins_at_a_snapshot_passes_over_it(
    etcd: EtcdServer, log: EtcdLog, tmp_path: Path
) -> None:
    """It is the first segment of the stream that the replica meets, and whole."""
    async with traffic_on(log) as traffic:
        async with replica_on(etcd, tmp_path) as stage:
            await all_archived(stage, traffic)
        last = (await Scan(log.client, KEYS, 0).extent("w.w0")).last
        await log.client.put(KEYS.segment("w.w0", last + 3), no_successor("w.w0", last + 3))
        await traffic.steps(1)
        steps = len(traffic.taken)
        async with replica_on(etcd, tmp_path) as stage:
            assert stage.replica.covered, "it began at a snapshot"
            await stage.leads()
            worker = stage.fleet.workers["w0"]
            await until(lambda: worker.step == steps and stage.fleet.unreadable)
            rounds = stage.keeper.status.rounds
            await until(lambda: stage.keeper.status.rounds > rounds)
    groups = await load_history(tmp_path, log.reader(), await Maintenance(log.client).identity())
    assert folded(groups).workers["w0"].step == steps
    (known,) = folded(groups).unreadable.items()  # type: ignore[union-attr]
    assert known[0] == "w.w0" and known[1].segment == last + 3


async def test_an_unknown_stream_after_a_snapshot_begins_at_its_beginning(
    etcd: EtcdServer, log: EtcdLog, tmp_path: Path
) -> None:
    """A segment of an unknown worker ends no replica, neither now nor at a restart."""
    async with traffic_on(log) as traffic:
        async with replica_on(etcd, tmp_path) as stage:
            while not stage.keeper.status.trimmed:
                await traffic.steps(16)
    await log.client.put(KEYS.segment("w.new", 5), no_successor("w.new"))
    for _ in range(2):
        async with replica_on(etcd, tmp_path) as stage:
            await stage.leads()
            await until(lambda: stage.fleet.unreadable)
            await until(lambda: stage.keeper.status.rounds > 1)
        assert "w.new" not in stage.fleet.streams
        assert stage.fleet.unreadable["w.new"].count == 1  # type: ignore[index]


async def test_history_is_stored_although_a_segment_was_damaged_before_it_was_archived(
    etcd: EtcdServer, log: EtcdLog, tmp_path: Path
) -> None:
    """The fold of the next leader has it; the archive has the worker's stream up to there."""
    async with traffic_on(log) as traffic, replica_on(etcd, tmp_path) as first:
        await first.leads()
        async with replica_on(etcd, tmp_path, "r1") as second:
            while not first.keeper.status.trimmed:
                await traffic.steps(16)
            first.replica.leadership._abstain_until = inf
            first.replica.leadership.resign("test")
            await traffic.steps(1)
            last = (await Scan(log.client, KEYS, 0).extent("w.w0")).last
            await until(lambda: second.fleet.streams["w.w0"].seq == last)
            key = KEYS.segment("w.w0", last)
            await log.client.put(key, flipped((await log.client.range(key)).kvs[0].value))
            await second.leads()
            rounds = second.keeper.status.rounds
            async with asyncio.timeout(30):
                while second.keeper.status.rounds <= rounds + 1:
                    await traffic.steps(8)
            await until(lambda: second.fleet.workers["w0"].step == len(traffic.taken))
    log_id = await Maintenance(log.client).identity()
    archive = Archive(tmp_path / log_id, log_id)
    assert archive.heads()["w.w0"][0] == last - 1


async def test_a_worker_that_deletes_its_segments_ends_no_replica(
    etcd: EtcdServer, log: EtcdLog, tmp_path: Path
) -> None:
    """The archive has more of its stream than etcd: that alone is no etcd that was restored."""
    async with traffic_on(log) as traffic:
        async with replica_on(etcd, tmp_path) as stage:
            await all_archived(stage, traffic)
    last = (await Scan(log.client, KEYS, 0).extent("w.w0")).last
    await log.client.delete(KEYS.segment("w.w0", last))
    async with replica_on(etcd, tmp_path) as stage:
        await stage.leads()
        assert stage.fleet.streams["w.w0"].seq == last
        assert stage.fleet.workers["w0"].step == len(traffic.taken)
