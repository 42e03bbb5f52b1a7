"""Reading and following a real etcd: order, pinning, history, damage, reconnection."""

from __future__ import annotations

import asyncio

import pytest
from aetcd import rpc

from relume.engine_shim.agent.stream_reader import FleetReader
from relume.events.etcd.client.connection import EtcdClient
from relume.events.etcd.client.watch import Watch
from relume.events.etcd.errors import LogWentBack
from relume.events.etcd.factory import EtcdLog
from relume.events.etcd.keys import Keys
from relume.events.etcd.maintenance import Maintenance
from relume.events.etcd.reader.scan import Scan
from relume.events.log.errors import BrokenChain, Compacted, CorruptSegment, LogUnavailable
from relume.events.log.segment import GENESIS, pack, unpack
from tests.etcd_server import EtcdServer
from tests.events.conftest import config_for
from tests.events.support import following, numbers, positions, tick, until
from tests.pace import paced

pytestmark = pytest.mark.etcd

KEYS = Keys("/relume/v1")


def segments_of(stream: str, epoch: int, count: int, size: int = 20) -> list[bytes]:
    """`count` chained segments, packed."""
    made, previous = [], GENESIS
    for seq in range(1, count + 1):
        data = pack(stream, epoch, seq, seq, previous, [b"\x92\xa6tick/1" + bytes(size)])
        made.append(data)
        previous = unpack(data).hash
    return made


async def put_all(client: EtcdClient, stream: str, made: list[bytes], per_txn: int = 1) -> None:
    """Write packed segments as they are, some in each transaction."""
    keyed = [(KEYS.segment(stream, seq), data) for seq, data in enumerate(made, 1)]
    for at in range(0, len(keyed), per_txn):
        puts = [
            rpc.RequestOp(request_put=rpc.PutRequest(key=key, value=data))
            for key, data in keyed[at : at + per_txn]
        ]
        await client.txn(rpc.TxnRequest(success=puts))


async def test_total_order_over_streams_and_pinning(log: EtcdLog) -> None:
    async with log.writer("w.w0") as one, log.writer("r.r0") as two, log.writer("fleet") as three:
        for n in range(30):
            (one, two, three)[n % 3].append(tick(n))
            await asyncio.gather(*(w.flush(5) for w in (one, two, three)))
        reader = log.reader()
        groups = await reader.read()
        revisions = [g.revision for g in groups]
        assert revisions == sorted(set(revisions))
        told = [r for g in groups for s in g.segments for r in s.records]
        assert len(told) == 30
        for cut in (revisions[0], revisions[10], revisions[-1]):
            head, rest = await reader.read(until=cut), await reader.read(after=cut)
            assert head + rest == groups
            assert await reader.read(after=cut, until=cut) == []
        assert await reader.read(until=revisions[-1] + 1000) == groups
        assert await reader.owners() == {"w.w0": one.epoch, "r.r0": two.epoch, "fleet": three.epoch}


async def test_reading_late_shows_the_same_groups_as_having_watched(log: EtcdLog) -> None:
    """Also owners that are gone by now, at the revisions of their coming and going."""
    async with following(log.reader()) as seen:
        for life in range(3):
            for stream in ("w.w0", "w.w1"):
                async with log.writer(stream) as writer:
                    for n in range(3):
                        writer.append(tick(n))
                        await writer.flush(5)
                    if life == 1 and stream == "w.w0":
                        epoch = writer.epoch
                        await log.client.lease_revoke(writer._own.lease.id)
                        await until(lambda w=writer, e=epoch: w.epoch != e)
        async with log.writer("fleet") as writer:
            writer.append(tick(99))
            await writer.flush(5)
            present = await log.reader().read()
            await until(lambda: numbers(seen.groups, "fleet") == [99])
            assert present == seen.groups
            for cut in [g.revision for g in present[::5]]:
                late = await log.reader().read(after=cut)
                assert late == [g for g in present if g.revision > cut]
                early = await log.reader().read(until=cut)
                assert early == [g for g in present if g.revision <= cut]


async def test_a_stream_with_a_renewed_lease_has_the_owner_it_had(log: EtcdLog) -> None:
    async with following(log.reader()) as seen, log.writer("w.w0") as writer:
        assert await writer._own.regain(writer._tail) is None
        writer.append(tick(0))
        await writer.flush(5)
        await until(lambda: numbers(seen.groups, "w.w0") == [0])
        assert [owner for g in seen.groups for owner in g.owners] == [("w.w0", writer.epoch)]
        assert await log.reader().read() == seen.groups


async def test_follow_begins_with_what_is_there_and_continues(log: EtcdLog) -> None:
    async with log.writer("w.w0") as writer:
        for n in range(10):
            writer.append(tick(n))
            await writer.flush(5)
        async with following(log.reader()) as seen:
            for n in range(10, 20):
                writer.append(tick(n))
            await writer.flush(5)
            await until(lambda: len(numbers(seen.groups, "w.w0")) == 20)
        middle = seen.groups[5].revision
        async with following(log.reader(), middle) as later:
            await until(lambda: len(later.groups) == len(seen.groups) - 6)
            assert later.groups == seen.groups[6:]


@pytest.mark.parametrize("fault", ["kill", "stop"])
async def test_follow_misses_and_repeats_nothing_over_a_restart(
    etcd: EtcdServer, log: EtcdLog, fault: str
) -> None:
    reader = log.reader()
    async with following(reader) as seen, log.writer("w.w0") as writer:
        async for n in paced(range(200), 0.005):
            writer.append(tick(n))
            if n == 80:
                etcd.stop() if fault == "stop" else etcd.kill9()
            if n == 150:
                etcd.cont() if fault == "stop" else etcd.restart()
        await writer.flush(10)
        await until(lambda: len(numbers(seen.groups, "w.w0")) >= 200)
        assert numbers(seen.groups, "w.w0") == list(range(200))
        listed = positions(seen.groups, "w.w0")
        assert listed == list(range(1, len(listed) + 1))
        await until(lambda: reader.healthy, 5)


async def test_hung_etcd_is_noticed_within_a_bound(etcd: EtcdServer, log: EtcdLog) -> None:
    """An idle follower and an idle writer: nothing but asking can tell."""
    loop = asyncio.get_running_loop()
    reader = log.reader()
    async with following(reader), log.writer("w.w0") as writer:
        await until(lambda: reader.healthy)
        etcd.stop()
        stopped = loop.time()
        await until(lambda: not reader.healthy, 5)
        # silence 0.5 s, then one call of 0.4 s per attempt
        assert loop.time() - stopped < 0.5 + 0.4 + 0.7
        await until(lambda: not writer.healthy, 5)
        assert loop.time() - stopped < writer._own.lease.ttl_s
        etcd.cont()
        await until(lambda: reader.healthy and writer.healthy, 5)


async def test_idle_log_is_healthy_all_the_time(log: EtcdLog) -> None:
    """Also while it is asked, and while others write elsewhere in etcd."""
    reader = log.reader()
    async with following(reader), log.writer("w.w0") as writer:
        await until(lambda: reader.healthy)
        async for n in paced(range(250), 0.01):
            assert reader.healthy and writer.healthy
            if n % 50 == 0:
                await log.client.put(b"/elsewhere", b"")


async def test_compacted_history_is_refused(log: EtcdLog) -> None:
    async with log.writer("w.w0") as writer:
        for n in range(20):
            writer.append(tick(n))
            await writer.flush(5)
        groups = await log.reader().read()
        middle, last = groups[10].revision, groups[-1].revision
        await log.client.compact(last)
        with pytest.raises(Compacted):
            await log.reader().read(after=middle)
        with pytest.raises(Compacted) as refused:
            async with asyncio.timeout(5):
                async for _ in log.reader().follow(middle):
                    pass
        assert (refused.value.requested, refused.value.available) == (middle, last)
        # Compaction alone deletes no segment: reading from the beginning still works.
        assert numbers(await log.reader().read(), "w.w0") == list(range(20))


async def test_trimmed_beginning_is_accepted_behind_a_snapshot_only(log: EtcdLog) -> None:
    async with log.writer("r.r0") as writer:
        for n in range(20):
            writer.append(tick(n))
            await writer.flush(5)
        whole = await log.reader().read()
        await log.client.delete(KEYS.segment("r.r0", 1), KEYS.segment("r.r0", 11))
        with pytest.raises(BrokenChain):
            await log.reader().read()
        await log.client.put(KEYS.snapshot(whole[10].revision), b"manifest")
        assert numbers(await log.reader().read(), "r.r0") == list(range(10, 20))
        head = whole[10].segments[0]
        heads = {"r.r0": (head.seq, head.hash, head.last + 1)}
        assert numbers(await log.reader(heads).read(), "r.r0") == list(range(10, 20))
        wrong = {"r.r0": (head.seq, bytes(16), head.last + 1)}
        with pytest.raises(BrokenChain):
            await log.reader(wrong).read()
        after = whole[5].revision
        with pytest.raises(Compacted):
            await log.reader().read(after=after)


async def test_trimming_is_no_event(log: EtcdLog) -> None:
    async with log.writer("w.w0") as writer, following(log.reader()) as seen:
        for n in range(5):
            writer.append(tick(n))
            await writer.flush(5)
        await log.client.delete(KEYS.segment("w.w0", 1), KEYS.segment("w.w0", 3))
        writer.append(tick(5))
        await writer.flush(5)
        await until(lambda: numbers(seen.groups, "w.w0") == list(range(6)))
        assert all(g.segments or g.owners for g in seen.groups)


async def test_damage_in_etcd_is_found(log: EtcdLog) -> None:
    made = segments_of("r.r0", 1, 6)
    await put_all(log.client, "r.r0", made)
    assert len(await log.reader().read()) == 6
    flipped = bytearray(made[3])
    flipped[-1] ^= 1
    await log.client.put(KEYS.segment("r.r0", 4), bytes(flipped))
    with pytest.raises(CorruptSegment):
        await log.reader().read()
    other = pack("r.r0", 1, 4, 4, unpack(made[2]).hash, [b"another"])
    await log.client.put(KEYS.segment("r.r0", 4), other)
    with pytest.raises(BrokenChain):
        await log.reader().read()
    await log.client.put(KEYS.segment("r.r0", 4), made[4])
    with pytest.raises(BrokenChain, match="holds segment 5"):
        await log.reader().read()
    await log.client.delete(KEYS.segment("r.r0", 4))
    with pytest.raises(BrokenChain):
        await log.reader().read()


async def test_segment_of_a_fenced_epoch_behind_a_newer_one_is_found(log: EtcdLog) -> None:
    one = pack("r.r0", 7, 1, 1, GENESIS, [b"a"])
    two = pack("r.r0", 6, 2, 2, unpack(one).hash, [b"b"])
    await put_all(log.client, "r.r0", [one, two])
    with pytest.raises(BrokenChain, match="fenced"):
        await log.reader().read()


async def test_large_history_comes_in_fragments_and_whole_groups(log: EtcdLog) -> None:
    """24 MB behind, five segments in each transaction, answers cut at about 2 MB."""
    made = segments_of("w.w0", 1, 100, 240_000)
    await put_all(log.client, "w.w0", made, per_txn=5)
    watch = Watch(log.client, KEYS.log, KEYS.log[:-1] + b"0", 1)
    sizes = []
    async with asyncio.timeout(20):
        async for _, events in watch.revisions():
            sizes.append(len(events))
            if len(sizes) == 20:
                break
    assert sizes == [5] * 20
    groups = await log.reader().read()
    assert [len(g.segments) for g in groups] == [5] * 20


async def test_pages_adapt_to_large_segments(etcd: EtcdServer) -> None:
    """Answers stay below a small message limit, small segments before large ones."""
    config = config_for(etcd, receive_limit_bytes=4 * 1024 * 1024)
    async with EtcdLog(config) as log:
        made, previous = [], GENESIS
        for seq in range(1, 1201):
            size = 20 if seq < 1000 else 100_000
            data = pack("w.w0", 1, seq, seq, previous, [bytes(size)])
            made.append(data)
            previous = unpack(data).hash
        await put_all(log.client, "w.w0", made, per_txn=10)
        groups = await log.reader().read()
        assert sum(len(g.segments) for g in groups) == 1200


async def test_streams_without_owner_are_discovered(log: EtcdLog) -> None:
    for name in ("a", "a.b", "a-b", "fleet", "w.w0", "w.w01", "z"):
        await put_all(log.client, name, segments_of(name, 1, 3))
    extents = await Scan(log.client, KEYS, 0).extents(["fleet", "nobody"])
    assert [(e.stream, e.first, e.last) for e in extents] == [
        (name, 1, 3) for name in sorted(("a", "a.b", "a-b", "fleet", "w.w0", "w.w01", "z"))
    ]


FOREIGN = (
    KEYS.log + b"note",
    KEYS.log + b"0",
    KEYS.log + b"w w/0000000000000001",
    KEYS.log + b"w.w0/!",
    KEYS.log + b"w.w0/0000000000000002x",
    KEYS.log + b"w.w0/000000000000000A",
    KEYS.log + b"w.w0/zz",
    KEYS.log + b"w.w1/else",
    KEYS.log + b"w.w9/\xff",
    KEYS.own + b"w.w0/old",
    KEYS.own + b"\xff\xfe",
    KEYS.snap + b"latest",
    KEYS.root + b"note",
)


async def put_foreign(log: EtcdLog) -> set[bytes]:
    """Keys that Relume does not write; returned are those in a folder of the log."""
    for key in FOREIGN:
        await log.client.put(key, b"x")
    return set(FOREIGN) - {KEYS.root + b"note"}


async def test_foreign_keys_are_ignored_and_named(log: EtcdLog) -> None:
    foreign = await put_foreign(log)
    async with log.writer("w.w0") as writer:
        for number in range(5):
            writer.append(tick(number))
            await writer.flush(5)
    async with log.writer("w.w0") as writer:  # which found the end of its stream again
        writer.append(tick(5))
        await writer.flush(5)
        reader = log.reader()
        named: set[bytes] = set()
        reader.on_foreign_key = named.add
        groups = await reader.read()
        assert numbers(groups, "w.w0") == list(range(6))
        assert positions(groups, "w.w0") == list(range(1, 7))
        assert named == foreign
        middle = [g.revision for g in groups if g.segments][2]
        assert numbers(await reader.read(middle), "w.w0") == [3, 4, 5]
        assert await reader.owners() == {"w.w0": writer.epoch}


async def test_a_foreign_key_after_the_last_segment_does_not_move_the_end(log: EtcdLog) -> None:
    async with log.writer("w.w0") as writer:
        writer.append(tick(0))
        await writer.flush(5)
    await log.client.put(KEYS.log + b"w.w0/zz", b"x")
    async with asyncio.timeout(20), log.writer("w.w0") as writer:
        writer.append(tick(1))
        await writer.flush(5)
    assert positions(await log.reader().read(), "w.w0") == [1, 2]


async def test_foreign_keys_end_no_watch(log: EtcdLog) -> None:
    async with log.writer("w.w0") as writer:
        reader = log.reader()
        named: set[bytes] = set()
        reader.on_foreign_key = named.add
        async with following(reader) as seen:
            writer.append(tick(0))
            await until(lambda: numbers(seen.groups, "w.w0") == [0])
            foreign = await put_foreign(log)
            await log.client.delete(KEYS.own + b"w.w0/old")
            writer.append(tick(1))
            await until(lambda: numbers(seen.groups, "w.w0") == [0, 1])
            assert {stream for g in seen.groups for stream, _ in g.owners} == {"w.w0"}
            assert foreign - named <= {KEYS.snap + b"latest"}


async def test_foreign_keys_end_no_agents_reader(log: EtcdLog) -> None:
    reader = FleetReader(log.client, ("fleet", "w.w0"))
    foreign = (KEYS.log + b"fleet/!", KEYS.log + b"fleet/note")
    async with log.writer("fleet") as leader:
        leader.append(tick(0))
        await leader.flush(5)
        await log.client.put(foreign[0], b"x")
        assert numbers(await reader.read(), "fleet") == [0]
        async with following(reader) as seen:
            await until(lambda: numbers(seen.groups, "fleet") == [0])
            await log.client.put(foreign[1], b"x")
            leader.append(tick(1))
            await until(lambda: numbers(seen.groups, "fleet") == [0, 1])


async def test_upkeep_passes_over_foreign_keys(log: EtcdLog) -> None:
    await put_foreign(log)
    async with log.writer("w.w0") as writer:
        for number in range(4):
            writer.append(tick(number))
            await writer.flush(5)
        upkeep = Maintenance(log.client)
        assert await upkeep.manifests() == {}
        assert await upkeep.whole()
        assert (await upkeep.trim({"w.w0": 3}, 0))[0] >= 2
        assert not await upkeep.whole()
        reader = log.reader({"w.w0": (2, unpack(await segment(log, 3)).previous, 3)})
        assert numbers(await reader.read(), "w.w0") == [2, 3]


async def segment(log: EtcdLog, seq: int) -> bytes:
    """The bytes of that segment of w.w0."""
    return (await log.client.range(KEYS.segment("w.w0", seq))).kvs[0].value


async def test_cluster_that_lost_its_history_is_refused(log: EtcdLog) -> None:
    with pytest.raises(LogWentBack):
        async with asyncio.timeout(5):
            async for _ in log.reader().follow(1_000_000):
                pass


async def test_reader_waits_for_an_etcd_that_is_not_there_yet(etcd: EtcdServer) -> None:
    etcd.kill9()
    async with EtcdLog(config_for(etcd)) as log, following(log.reader()) as seen:
        with pytest.raises(LogUnavailable):
            await log.client.range(b"/")
        etcd.restart()
        async with log.writer("w.w0") as writer:
            writer.append(tick(0))
            await until(lambda: numbers(seen.groups, "w.w0") == [0])
