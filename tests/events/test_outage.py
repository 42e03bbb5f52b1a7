"""The writer through outages of a real etcd: unknown outcomes, lapsed leases, spools."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from aetcd import rpc

from relume.events.etcd.client.connection import EtcdClient
from relume.events.etcd.client.lease import Lease
from relume.events.etcd.config import EtcdConfig
from relume.events.etcd.errors import CallFailed
from relume.events.etcd.factory import EtcdLog
from relume.events.etcd.keys import Keys
from relume.events.etcd.writer.appends import Append, Outcome, Shape
from relume.events.etcd.writer.stream_writer import EtcdWriter
from relume.events.log.codec import encode
from relume.events.log.errors import Fenced, LogFull, StreamOwned
from relume.events.log.interface import LandedSegment
from relume.events.vocabulary import StreamResumed
from tests.etcd_server import EtcdServer
from tests.events.conftest import config_for
from tests.events.support import events_of, following, numbers, positions, tick, until
from tests.pace import paced
from tests.suite.outcomes import inconclusive

pytestmark = pytest.mark.etcd

STREAM = "w.w0"


async def written(log: EtcdLog) -> list[int]:
    return numbers(await log.reader().read(), STREAM)


async def lapse(log: EtcdLog, stream: str = STREAM) -> None:
    """Take the ownership away as a lapsed lease does: the lease and its key go."""
    answer = await log.client.range(b"/relume/v1/own/" + stream.encode())
    await log.client.lease_revoke(answer.kvs[0].lease)


async def assert_resumed(log: EtcdLog, writer: EtcdWriter, old_epoch: int, expected: int) -> None:
    """All ticks are there once and in order, and the new epoch is announced behind them."""
    groups = await log.reader().read()
    assert numbers(groups, STREAM) == list(range(expected))
    assert positions(groups, STREAM) == list(range(1, writer.position + 1))
    resumed = [e for e in events_of(groups, STREAM) if isinstance(e, StreamResumed)]
    assert [(r.old_epoch, r.new_epoch) for r in resumed] == [(old_epoch, writer.epoch)]
    spooled = [
        record
        for g in groups
        for s in g.segments
        if s.stream == STREAM and s.epoch == writer.epoch
        for record in s.records
    ]
    assert spooled.index(encode(resumed[0])) == resumed[0].spooled


@pytest.mark.parametrize("fault", ["kill", "stop"])
async def test_short_outage_keeps_the_epoch_and_lands_everything(
    etcd: EtcdServer, log: EtcdLog, fault: str
) -> None:
    async with log.writer(STREAM) as writer:
        epoch = writer.epoch
        writer.append(tick(0))
        await writer.flush(5)
        etcd.stop() if fault == "stop" else etcd.kill9()
        async for n in paced(range(1, 20), 0.03):
            writer.append(tick(n))
        await until(lambda: not writer.healthy, 2)
        etcd.cont() if fault == "stop" else etcd.restart()
        await writer.flush(5)
        await until(lambda: writer.healthy, 3)
        assert writer.epoch == epoch
        assert await written(log) == list(range(20))


@pytest.mark.parametrize("fault", ["kill", "stop"])
async def test_outage_beyond_the_lease_resumes_under_a_new_epoch(
    etcd: EtcdServer, log: EtcdLog, fault: str
) -> None:
    async with log.writer(STREAM) as writer:
        epoch = writer.epoch
        ttl_s = writer._own.lease.ttl_s
        writer.append(tick(0))
        await writer.flush(5)
        etcd.stop() if fault == "stop" else etcd.kill9()
        for n in range(1, 21):
            assert writer.append(tick(n)) == n + 1
            await asyncio.sleep(2 * ttl_s / 20)
        assert not writer.healthy
        etcd.cont() if fault == "stop" else etcd.restart()
        await writer.flush(10)
        await until(lambda: writer.healthy, 5)
        await writer.flush(5)
        if writer.epoch == epoch:
            # A restarted etcd gives leases their whole TTL again: nothing was lost then.
            assert await log.reader().owners() == {STREAM: epoch}
            assert await written(log) == list(range(21))
            if fault == "stop":
                inconclusive(
                    "etcd went on with the lease, although it was stopped for twice its TTL"
                )
        else:
            await assert_resumed(log, writer, epoch, 21)


async def test_lease_lost_while_etcd_is_well_is_regained_by_an_idle_writer(log: EtcdLog) -> None:
    async with log.writer(STREAM) as writer:
        epoch = writer.epoch
        writer.append(tick(0))
        await writer.flush(5)
        await lapse(log)
        await until(lambda: writer.epoch != epoch, 5)
        writer.append(tick(1))
        await writer.flush(5)
        groups = await log.reader().read()
        resumed = [e for e in events_of(groups, STREAM) if isinstance(e, StreamResumed)]
        assert resumed == [StreamResumed(epoch, writer.epoch, 0)]
        assert numbers(groups, STREAM) == [0, 1]
        assert await log.reader().owners() == {STREAM: writer.epoch}


async def test_append_that_meets_a_lapsed_lease_is_written_under_the_new_epoch(
    log: EtcdLog,
) -> None:
    async with log.writer(STREAM) as writer:
        epoch = writer.epoch
        await lapse(log)
        writer.append(tick(0))
        await writer.flush(5)
        await until(lambda: writer.healthy, 5)
        await writer.flush(5)
        await assert_resumed(log, writer, epoch, 1)


async def test_another_owner_meanwhile_fences(etcd: EtcdServer, log: EtcdLog) -> None:
    async with EtcdLog(config_for(etcd), name="other") as others:
        async with log.writer(STREAM) as writer:
            writer.append(tick(0))
            await writer.flush(5)
            # Keep the first writer from noticing before the other one is in.
            pump, keeper = writer._workers[0], writer._keeper
            pump.cancel()
            keeper.cancel()
            await asyncio.sleep(0)
            await lapse(log)
            async with others.writer(STREAM, wait_s=5) as other:
                other.append(tick(1))
                await other.flush(5)
                writer.append(tick(666))
                again = asyncio.ensure_future(writer._land_for_ever())
                async with asyncio.timeout(5):
                    await writer.fenced()
                await again
                assert writer.state == "fenced"
                with pytest.raises(Fenced):
                    writer.append(tick(667))
                with pytest.raises(Fenced):
                    await writer.flush(1)
                assert await written(log) == [0, 1]


async def test_owner_that_came_and_went_with_segments_fences(
    etcd: EtcdServer, log: EtcdLog
) -> None:
    async with EtcdLog(config_for(etcd), name="other") as others, log.writer(STREAM) as writer:
        writer.append(tick(0))
        await writer.flush(5)
        writer._workers[0].cancel()
        writer._keeper.cancel()
        await asyncio.sleep(0)
        await lapse(log)
        async with others.writer(STREAM) as other:
            other.append(tick(1))
        again = asyncio.ensure_future(writer._land_for_ever())
        writer._lapsed = True
        writer._wake.set()
        async with asyncio.timeout(5):
            await writer.fenced()
        await again
        assert await log.reader().owners() == {}, "it did not take the stream before it knew"


async def test_living_owner_refuses_a_second_writer_and_is_waited_for(log: EtcdLog) -> None:
    async with log.writer(STREAM) as first:
        with pytest.raises(StreamOwned) as refused:
            async with log.writer(STREAM):
                pass
        assert refused.value.owner == "test"
        first.append(tick(0))

        async def wait_for_it() -> int:
            async with log.writer(STREAM, wait_s=5) as second:
                return second.append(tick(1))

        waiting = asyncio.ensure_future(wait_for_it())
        for n in range(5):  # a stream without an owner is taken meanwhile, five times
            async with log.writer("w.free", wait_s=5) as free:
                free.append(tick(n))
        assert not waiting.done()
    assert await waiting == 2
    assert await written(log) == [0, 1]


async def test_zombie_appends_are_all_refused(etcd: EtcdServer, log: EtcdLog) -> None:
    async with log.writer(STREAM) as zombie:
        zombie.append(tick(0))
        await zombie.flush(5)
        tail, epoch = zombie._tail, zombie.epoch
        await lapse(log)
        shape = Shape(Keys(log.config.prefix), STREAM, epoch)
        refused = 0
        for n in range(50):
            append = Append(shape, tail, [encode(tick(n))], 0)
            try:
                outcome, _ = append.judge(await log.client.txn(append.request))
                assert outcome is Outcome.LAPSED
            except Fenced:
                pass
            refused += 1
        assert refused == 50
        assert await written(log) == [0]


async def test_a_former_owner_appends_nothing_to_the_stream_of_the_next(log: EtcdLog) -> None:
    """Neither before nor after the next one's first segment, and it learns so."""
    async with log.writer(STREAM) as former:
        former.append(tick(0))
        await former.flush(5)
    append = Append(
        Shape(Keys(log.config.prefix), STREAM, former.epoch), former._tail, [encode(tick(666))], 0
    )
    async with log.writer(STREAM) as owner:
        with pytest.raises(Fenced, match="owns it"):
            append.judge(await log.client.txn(append.request))
        owner.append(tick(1))
        await owner.flush(5)
        with pytest.raises(Fenced, match="is another's"):
            append.judge(await log.client.txn(append.request))
    assert await written(log) == [0, 1]


async def test_segment_that_landed_without_an_answer_is_not_written_twice(
    etcd: EtcdServer, log: EtcdLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """etcd applies the append, but its answer is lost three times over. Others write meanwhile, and the
    writer says at which revision its segment is (I13)."""
    real = log.client.txn
    lost = 0
    landed: list[LandedSegment] = []

    async def losing(request: object, timeout_s: float = 0.0) -> object:
        nonlocal lost
        answer = await real(request)
        if lost < 3:
            lost += 1
            await log.client.put(b"/elsewhere", b"")
            raise CallFailed("Txn", "", "UNAVAILABLE", "answer lost")
        return answer

    async with log.writer(STREAM) as writer:
        writer.on_landed(landed.append)
        monkeypatch.setattr(log.client, "txn", losing)
        writer.append(tick(0))
        await writer.flush(5)
        writer.append(tick(1))
        await writer.flush(5)
        assert lost == 3
    assert await written(log) == [0, 1]
    there = [(s.seq, g.revision) for g in await log.reader().read() for s in g.segments]
    assert [(one.seq, one.revision) for one in landed] == there


async def test_owner_key_created_without_an_answer_is_recognized(
    log: EtcdLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = log.client.txn
    lost = 0

    async def losing(request: object, timeout_s: float = 0.0) -> object:
        nonlocal lost
        answer = await real(request)
        if lost < 1:
            lost += 1
            raise CallFailed("Txn", "", "UNAVAILABLE", "answer lost")
        return answer

    monkeypatch.setattr(log.client, "txn", losing)
    async with log.writer(STREAM) as writer:
        writer.append(tick(0))
        await writer.flush(5)
        assert lost == 1
        epoch = writer.epoch
        lost = 0
        await lapse(log)
        await until(lambda: writer.epoch != epoch and writer.healthy, 5)
        writer.append(tick(1))
        await writer.flush(5)
    assert await written(log) == [0, 1]


@pytest.mark.parametrize("key_stays", [True, False])
async def test_lease_that_lapses_before_it_is_bound_is_replaced(
    log: EtcdLog, monkeypatch: pytest.MonkeyPatch, key_stays: bool
) -> None:
    """etcd took longer than a TTL between the grant and the transaction with it."""
    real, gone = Lease.grant, 0

    async def grant_and_lose(client: EtcdClient, ttl_s: int, timeout_s: float) -> Lease:
        nonlocal gone
        lease = await real(client, ttl_s, timeout_s)
        if gone < 3:
            gone += 1
            await client.lease_revoke(lease.id)
        return lease

    async with log.writer(STREAM) as writer:
        epoch = writer.epoch
        monkeypatch.setattr(Lease, "grant", grant_and_lose)
        if key_stays:
            writer._own.lease.lost.set()
            writer._wake.set()
        else:
            await lapse(log)
        await until(lambda: gone == 3 and writer.healthy, 5)
        assert (writer.epoch == epoch) is key_stays
        writer.append(tick(0))
        await writer.flush(5)
        gone = 0
        async with log.writer("w.other", wait_s=1) as other:
            assert gone == 3
            other.append(tick(1))
            await other.flush(5)
    assert await written(log) == [0]


class SlowCall:
    """A keepalive stream whose answer comes later than the request was sent."""

    sent_at = 0.0

    async def write(self, request: rpc.LeaseKeepAliveRequest) -> None:
        self.sent_at = asyncio.get_running_loop().time()

    async def read(self) -> rpc.LeaseKeepAliveResponse:
        while asyncio.get_running_loop().time() <= self.sent_at:
            await asyncio.sleep(0)
        return rpc.LeaseKeepAliveResponse(ID=7, TTL=10)


async def test_a_lease_counts_from_the_request_to_keep_it_alive() -> None:
    """etcd counts from a later time, so that it believes in the lease for longer than its owner."""
    lease, call = Lease(EtcdClient(EtcdConfig()), 7, 10, 0.0), SlowCall()
    async with asyncio.timeout(60) as until_deadline:
        await lease._renew(call, "", until_deadline)
    assert lease.deadline <= call.sent_at + 10


async def test_spool_on_disk_outlives_the_process_and_lands_first(
    etcd: EtcdServer, tmp_path: Path
) -> None:
    """The writer leaves during the outage; the next one lands what it left behind."""
    config = config_for(etcd, spool_dir=str(tmp_path), memory_limit_bytes=2_000, spool_sync_ms=5)
    async with EtcdLog(config) as log:
        async with log.writer(STREAM) as writer:
            epoch = writer.epoch
            writer.append(tick(0))
            await writer.flush(5)
            etcd.kill9()
            async for first in paced(range(1, 1000, 50), 0.01):
                for n in range(first, min(first + 50, 1000)):
                    writer.append(tick(n))
            await until(lambda: not writer.healthy, 3)
        assert [p.suffix for p in tmp_path.iterdir()] == [".spool"]
        etcd.restart()
        async with log.writer(STREAM, wait_s=5) as successor:
            assert successor.position == 1001
            assert successor.append(tick(1000)) == 1002
            await successor.flush(5)
            await until(lambda: not list(tmp_path.iterdir()), 5)
        groups = await log.reader().read()
        assert numbers(groups, STREAM) == list(range(1001))
        resumed = [e for e in events_of(groups, STREAM) if isinstance(e, StreamResumed)]
        assert resumed == [StreamResumed(epoch, successor.epoch, 999)]


async def test_spool_beyond_memory_lands_in_order_after_the_outage(
    etcd: EtcdServer, tmp_path: Path
) -> None:
    config = config_for(etcd, spool_dir=str(tmp_path), memory_limit_bytes=20_000, spool_sync_ms=5)
    async with EtcdLog(config) as log, log.writer(STREAM) as writer:
        etcd.kill9()
        async for first in paced(range(0, 20_000, 200), 0.002):
            for n in range(first, first + 200):
                writer.append(tick(n))
        etcd.restart()
        async for n in paced(range(20_000, 20_100), 0.002):
            writer.append(tick(n))
        await writer.flush(10)
        await until(lambda: not list(tmp_path.iterdir()), 5)
        assert await written(log) == list(range(20_100))


async def test_spool_is_bounded(etcd: EtcdServer, tmp_path: Path) -> None:
    config = config_for(
        etcd,
        spool_dir=str(tmp_path),
        memory_limit_bytes=10_000,
        spool_limit_bytes=50_000,
        spool_sync_ms=5,
    )
    async with EtcdLog(config) as log, log.writer(STREAM) as writer:
        etcd.kill9()
        taken = 0
        with pytest.raises(LogFull) as full:
            async for first in paced(range(0, 100_000, 50), 0.01):
                for n in range(first, first + 50):
                    writer.append(tick(n))
                    taken += 1
        assert full.value.limit_bytes == 50_000
        writer.append(tick(taken), beyond_limit=True)
        taken += 1
        assert 30_000 < writer.waiting_bytes <= 50_000 + 20_000
        assert sum(p.stat().st_size for p in tmp_path.iterdir()) < 100_000
        etcd.restart()
        await writer.flush(10)
        assert await written(log) == list(range(taken))


async def test_memory_is_bounded_without_a_spool(etcd: EtcdServer) -> None:
    async with EtcdLog(config_for(etcd, memory_limit_bytes=10_000)) as log:
        async with log.writer(STREAM) as writer:
            etcd.kill9()
            with pytest.raises(LogFull):
                for n in range(100_000):
                    writer.append(tick(n))
            etcd.restart()
            await writer.flush(10)


async def test_spool_of_a_writer_overtaken_by_another_is_set_aside(
    etcd: EtcdServer, tmp_path: Path
) -> None:
    """Another host's writer wrote meanwhile: what was spooled here is refused, and kept."""
    async with EtcdLog(config_for(etcd, spool_dir=str(tmp_path / "a"))) as here:
        async with here.writer(STREAM) as writer:
            writer.append(tick(0))
            await writer.flush(5)
            etcd.stop()
            writer.append(tick(666))
            await until(lambda: not writer.healthy, 3)
        etcd.cont()
        etcd.wait_healthy()
        async with EtcdLog(config_for(etcd, spool_dir=str(tmp_path / "b"))) as elsewhere:
            async with elsewhere.writer(STREAM, wait_s=5) as other:
                # The append under way may have landed in etcd before the writer left.
                expected = await written(elsewhere)
                other.append(tick(1))
        async with here.writer(STREAM, wait_s=5) as again:
            again.append(tick(2))
        assert await written(here) == [*expected, 1, 2]
        kept = [p.name for p in (tmp_path / "a").iterdir()]
        assert kept == ([] if 666 in expected else [f"{STREAM}.refused"])


async def test_follower_sees_the_whole_resumption(etcd: EtcdServer, log: EtcdLog) -> None:
    async with following(log.reader()) as seen, log.writer(STREAM) as writer:
        writer.append(tick(0))
        await writer.flush(5)
        first = writer.epoch
        await lapse(log)
        await until(lambda: writer.epoch != first, 5)
        writer.append(tick(1))
        await writer.flush(5)
        await until(lambda: numbers(seen.groups, STREAM) == [0, 1])
        owners = [o for g in seen.groups for o in g.owners]
        assert owners == [(STREAM, first), (STREAM, 0), (STREAM, writer.epoch)]
