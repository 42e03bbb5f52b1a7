"""Segments of a worker's stream that cannot be read are skipped and named; others end the reading."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from relume.controlplane.history.replica_restore import load_history
from relume.events.etcd.factory import EtcdLog
from relume.events.etcd.keys import Keys
from relume.events.etcd.maintenance import Maintenance
from relume.events.etcd.reader.scan import Scan
from relume.events.log.damaged_segment import DamagedSegment
from relume.events.log.errors import BrokenChain, CorruptSegment, LogError
from relume.events.log.segment import GENESIS, pack
from tests.etcd_server import EtcdServer
from tests.events.support import following, numbers, tick, until
from tests.history.stage import folded, replica_on, traffic_on

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
        for (named,) in (seen, found):
            assert (named.stream, named.seq, named.after) == ("w.w0", seq, 4)
        await log.client.delete(key)
        await written(log, "w.w0", 4)
        await until(lambda: numbers(follower.groups, "w.w0") == list(range(8)))
        later = await log.reader().read()
        await until(lambda: follower.groups == later)
    assert len(seen) == 1


async def test_what_follows_a_damaged_segment_is_skipped_and_named_once(log: EtcdLog) -> None:
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
    assert [d.after for d in found] == [2], "nothing continues segment 2"


async def test_a_trimmed_stream_is_read_beside_a_segment_before_its_beginning(
    log: EtcdLog,
) -> None:
    await written(log, "w.w0", 0, 8)
    whole = await log.reader().read()
    await log.client.delete(KEYS.segment("w.w0", 1), KEYS.segment("w.w0", 4))
    await log.client.put(KEYS.snapshot(whole[3].revision), b"manifest")
    await log.client.put(KEYS.segment("w.w0", 2), b"no segment")
    reader, seen = log.reader(), list[DamagedSegment]()
    reader.on_damage = seen.append
    assert numbers(await reader.read(), "w.w0") == list(range(3, 8))
    assert [(damaged.seq, damaged.after) for damaged in seen] == [(2, 8)]


@pytest.mark.parametrize("stream", ["r.r0", "fleet"])
@pytest.mark.parametrize("damage", ["bytes", "chain", "gap"])
async def test_of_a_replica_or_the_leader_it_ends_the_reading(
    log: EtcdLog, stream: str, damage: str
) -> None:
    seq, value = DAMAGE[damage]
    await written(log, stream, 0)
    await log.client.put(KEYS.segment(stream, seq), value(stream))
    with pytest.raises((BrokenChain, CorruptSegment), match=f"segment (5|9)|{stream}"):
        await log.reader().read()


async def test_the_owner_of_the_stream_says_which_segment_it_is(log: EtcdLog) -> None:
    await written(log, "w.w0", 0)
    await log.client.put(KEYS.segment("w.w0", 5), b"x")
    with pytest.raises(LogError, match=r"segment 5 of w\.w0"):
        async with log.writer("w.w0"):
            pass


async def test_a_replica_that_begins_at_a_snapshot_passes_over_it(
    etcd: EtcdServer, log: EtcdLog, tmp_path: Path
) -> None:
    """It is the first segment of the stream that the replica meets, and whole."""
    async with traffic_on(log) as traffic:
        async with replica_on(etcd, tmp_path) as stage:
            while not stage.keeper.status.trimmed:
                await traffic.steps(16)
            rounds = stage.keeper.status.rounds
            await until(lambda: stage.keeper.status.rounds > rounds + 1)
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
    assert known[0] == "w.w0" and known[1].after == last
