"""Snapshot, archive and trim on a running leader."""

from __future__ import annotations

from pathlib import Path

import pytest

from relume.controlplane.history.replica_restore import History, load_history
from relume.events.etcd.factory import EtcdLog
from relume.events.etcd.maintenance import Maintenance
from relume.events.etcd.reader.scan import Scan
from relume.events.log.errors import Compacted
from relume.policies.state.fleet import state_hash
from tests.etcd_server import EtcdServer
from tests.history.stage import config_for, folded, replica_on, traffic_on, until

pytestmark = pytest.mark.etcd


async def test_a_fresh_replica_has_the_state_of_one_that_read_everything(
    etcd: EtcdServer, tmp_path: Path
) -> None:
    async with replica_on(etcd, tmp_path) as first:
        await first.leads()
        async with traffic_on(first.log) as traffic:
            for _ in range(6):
                await traffic.steps(40)
            await until(lambda: first.keeper.status.trimmed)
            await traffic.steps(24)
            async with replica_on(etcd, tmp_path, "r1") as fresh:
                assert fresh.replica.covered >= first.keeper.status.trimmed > 0
                await until(lambda: fresh.fleet.revision == first.fleet.revision)
                assert state_hash(fresh.fleet) == state_hash(first.fleet)
        groups = await load_history(tmp_path, first.log.reader())
        whole = folded(groups)
        last = groups[-1].revision
        await until(lambda: first.fleet.revision >= last)
        if first.fleet.revision == last:
            assert state_hash(whole) == state_hash(first.fleet)
        assert whole.workers["w0"].step == len(traffic.taken)
        with pytest.raises(Compacted):
            await first.log.reader().read(2)


async def test_the_newest_segment_of_a_quiet_stream_stays_and_its_writer_continues(
    etcd: EtcdServer, tmp_path: Path
) -> None:
    async with replica_on(etcd, tmp_path) as stage:
        await stage.leads()
        async with traffic_on(stage.log, "w1") as quiet, traffic_on(stage.log) as busy:
            await quiet.steps(20)
            while stage.keeper.status.rounds < 4:
                await busy.steps(40)
            scan = Scan(stage.log.client, Maintenance(stage.log.client)._keys, 0)
            assert (await scan.extent("w.w1")).count == 1
            assert (await scan.extent("w.w0")).first > 1
            await quiet.steps(1)
            await until(lambda: stage.fleet.workers["w1"].step == len(quiet.taken))


async def test_snapshot_taken_says_hash_and_trim(etcd: EtcdServer, tmp_path: Path) -> None:
    async with replica_on(etcd, tmp_path) as stage:
        await stage.leads()
        async with traffic_on(stage.log) as traffic:
            while stage.keeper.status.rounds < 3:
                await traffic.steps(40)
    from relume.events.etcd.factory import EtcdLog
    from relume.events.log.codec import decode
    from relume.events.vocabulary import SnapshotTaken
    from tests.history.stage import config_for

    async with EtcdLog(config_for(etcd)) as log:
        groups = await load_history(tmp_path, log.reader())
        taken = [
            (g.revision, event)
            for g in groups
            for s in g.segments
            if s.stream == "fleet"
            for event in map(decode, s.records)
            if isinstance(event, SnapshotTaken)
        ]
        assert len(taken) >= 3
        for revision, event in taken:
            assert event.trimmed <= event.revision < revision
            before = [g for g in groups if g.revision <= event.revision]
            assert state_hash(folded(before)) == event.hash
        restored = await History(tmp_path, Maintenance(log.client)).restore()
        assert restored.covers >= taken[-1][1].revision


async def test_a_log_that_begins_in_an_etcd_others_have_compacted_is_kept_whole(
    etcd: EtcdServer, tmp_path: Path
) -> None:
    """Found by etcd-full 1 on real processes: two fleets one after the other in one etcd."""
    async with EtcdLog(config_for(etcd)) as other:
        for _ in range(30):
            await other.client.put(b"/others/key", b"x")
        await Maintenance(other.client).compact(25)
    async with replica_on(etcd, tmp_path, every_s=1e6, every_revisions=10**6) as stage:
        await stage.leads()
        async with traffic_on(stage.log) as traffic:
            await traffic.steps(8)
            maintenance = Maintenance(stage.log.client)
            while not await maintenance.identity():
                await traffic.steps(8)
            assert not await maintenance.manifests()
            async with replica_on(etcd, tmp_path, "r1") as second:
                await until(lambda: "w0" in second.fleet.workers)
            await maintenance.compact(await maintenance.revision())  # by others, beside it
            async with replica_on(etcd, tmp_path, "r2") as third:
                await until(lambda: "w0" in third.fleet.workers)
    async with replica_on(etcd, tmp_path) as stage, traffic_on(stage.log, "w1") as traffic:
        while not stage.keeper.status.trimmed:
            await traffic.steps(40)
        assert not await Maintenance(stage.log.client).whole()
        groups = await load_history(tmp_path, stage.log.reader())
    assert {s.stream for g in groups for s in g.segments if s.seq == 1} >= {"r.r0", "w.w0", "w.w1"}
