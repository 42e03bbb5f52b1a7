"""etcd restored from a backup, or empty: who says so, and with what remedy."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path
from typing import Any

import pytest

from relume.controlplane import serve_settings
from relume.controlplane.cli.doctor import check_log
from relume.controlplane.cli.relume_command import main
from relume.controlplane.history.archive import Archive
from relume.controlplane.history.continuity.last_seen import LastSeen
from relume.controlplane.history.continuity.lost_log import archived_logs
from relume.controlplane.history.errors import EtcdLostSegments
from relume.controlplane.history.replica_restore import check_chain, load_history, read_archive
from relume.controlplane.replay.verify import verify
from relume.events.etcd.factory import EtcdLog
from relume.events.etcd.keys import Keys, after_prefix
from relume.events.etcd.maintenance import Maintenance
from relume.events.etcd.new_log import AnotherLog, RemovedKeys, begin_log
from relume.events.etcd.reader.scan import Scan
from relume.events.log.errors import LogReplaced, first_cause
from relume.events.log.interface import RevisionGroup
from relume.events.log.segment import Chain
from relume.policies.state.fleet import Fleet
from relume.policies.state.fold import apply_group
from tests.etcd_server import EtcdServer
from tests.events.support import tick
from tests.history.stage import config_for, replica_on, traffic_on, until

pytestmark = pytest.mark.etcd


async def archived_past_a_backup(etcd: EtcdServer, root: Path, others: int = 0) -> None:
    """A log of which the archive has more than the backup. `others`: so many revisions are of other
    users of etcd."""
    async with EtcdLog(config_for(etcd), name="test") as log, traffic_on(log) as traffic:
        async with replica_on(etcd, root) as stage:
            while stage.keeper.status.rounds < 1:
                await traffic.steps(16)
            for _ in range(others):
                await log.client.put(b"/other", b"")
            etcd.back_up()
            rounds = stage.keeper.status.rounds
            while stage.keeper.status.rounds < rounds + 2:
                await traffic.steps(16)


async def more_revisions(etcd: EtcdServer, count: int) -> None:
    """As `--bump-revision` and `--mark-compacted` do: nobody can read what was before."""
    async with EtcdLog(config_for(etcd), name="other") as log:
        for _ in range(count):
            revision = (await log.client.put(b"/other", b"")).header.revision
        await log.client.compact(revision)


async def diagnosis(etcd: EtcdServer, root: Path, archive: bool = True) -> Any:
    """What the doctor finds."""
    flags = {"etcd": etcd.endpoints[0], "archive_dir": str(root) if archive else ""}
    flags["spool_dir"] = str(root / "spool")
    config = serve_settings.load(vars(argparse.Namespace(**flags)), {}, None)
    async with EtcdLog(config_for(etcd)) as log:
        return await check_log(log, config)


async def grown_again(etcd: EtcdServer, root: Path) -> None:
    """Agents went on in the older log: each stream there is longer than in the archive."""
    (archive,) = [Archive(root / name, name) for name in archived_logs(root)]
    async with EtcdLog(config_for(etcd), name="test") as log:
        for stream, (seq, _, _) in archive.heads().items():
            async with log.writer(stream, wait_s=10) as writer:
                have = (await Scan(log.client, Keys(log.config.prefix), 0).extent(stream)).last
                for number in range(seq - have + 1):
                    writer.append(tick(number))
                    await writer.flush(5)


@pytest.mark.parametrize("then", ["nothing", "bumped", "grown"])
async def test_a_replica_refuses_an_etcd_restored_from_a_backup(
    etcd: EtcdServer, tmp_path: Path, then: str
) -> None:
    await archived_past_a_backup(etcd, tmp_path)
    assert (await diagnosis(etcd, tmp_path)).level == "ok"
    etcd.restore()
    if then == "bumped":
        await more_revisions(etcd, 1000)
    elif then == "grown":
        await grown_again(etcd, tmp_path)
    with pytest.raises(ExceptionGroup) as refused:
        async with replica_on(etcd, tmp_path):
            pass
    assert isinstance(first_cause(refused.value), EtcdLostSegments)
    found = await diagnosis(etcd, tmp_path)
    assert (found.level, found.check) == ("fail", "log")
    assert "restored from a backup" in found.text and "relume log begin" in found.remedy


async def test_the_doctor_says_that_etcd_is_empty_though_the_archive_is_not(
    etcd: EtcdServer, tmp_path: Path
) -> None:
    assert (await diagnosis(etcd, tmp_path)).level == "ok"
    await archived_past_a_backup(etcd, tmp_path)
    await drop_backup(etcd)
    etcd.restore()
    found = await diagnosis(etcd, tmp_path)
    assert found.level == "warn" and "etcd is empty, but the archive has log" in found.text
    async with replica_on(etcd, tmp_path) as stage:
        await stage.leads()
        assert stage.fleet.replicas.keys() == {"r0"}


@pytest.mark.parametrize("others", [0, 600])  # 600: the new log does not begin in the first read
async def test_a_new_log_begins_on_a_restored_etcd_and_the_former_stays_readable(
    etcd: EtcdServer, tmp_path: Path, capsys, others: int
) -> None:
    await archived_past_a_backup(etcd, tmp_path, others)
    etcd.restore()
    (former,) = archived_logs(tmp_path)
    begin = ["log", "begin", "--etcd", etcd.endpoints[0], "--archive-dir", str(tmp_path)]
    assert await asyncio.to_thread(main, begin) == 2
    assert f"to confirm, add --replace {former}" in capsys.readouterr().err
    assert await asyncio.to_thread(main, [*begin, "--replace", "another"]) == 1
    assert "nothing more was changed" in capsys.readouterr().err
    assert (await diagnosis(etcd, tmp_path)).level == "fail"
    assert await asyncio.to_thread(main, [*begin, "--replace", former]) == 0
    said = capsys.readouterr().out
    assert f"relume replay --verify --log {tmp_path}/{former}" in said
    assert (await diagnosis(etcd, tmp_path)).level == "ok"
    async with replica_on(etcd, tmp_path) as stage:
        await stage.leads()
        await until(lambda: stage.keeper.status.rounds)
        assert stage.fleet.replicas.keys() == {"r0"} and not stage.fleet.workers
        fresh = await Maintenance(stage.log.client).identity()
        present = await load_history(tmp_path, stage.log.reader(), fresh)
    assert {s.stream for group in present for s in group.segments} == {"fleet", "r.r0"}
    assert not verify(present).divergences
    assert archived_logs(tmp_path).keys() == {former, fresh} and fresh != former
    groups, _ = read_archive(tmp_path, former)
    assert not verify(groups).divergences and len(groups) > 50


async def test_a_new_log_removes_every_key_of_the_former_in_bounded_transactions(
    etcd: EtcdServer, log: EtcdLog, monkeypatch
) -> None:
    monkeypatch.setattr("relume.events.etcd.new_log._PAGE", 3)
    keys = Keys(log.config.prefix)
    await log.client.put(keys.identity, b"former")
    await log.client.put(b"/other/key", b"")
    await log.client.put(keys.snapshot(4), b"")
    async with log.writer("w.w0") as writer:
        for number in range(10):
            writer.append(tick(number))
            await writer.flush(5)
        removed = await begin_log(log.client, "former", "fresh")
        assert removed == RemovedKeys(owners=1, segments=10, manifests=1)
        writer.append(tick(10))
        async with asyncio.timeout(5):
            await writer.fenced()
        assert isinstance(writer.fence, LogReplaced)
    assert await Maintenance(log.client).identity() == "fresh"
    assert (await log.client.range(keys.root, after_prefix(keys.root), count_only=True)).count == 1
    assert (await log.client.range(b"/other/key")).kvs
    with pytest.raises(AnotherLog):
        await begin_log(log.client, "former", "again")


async def by_steps(log: EtcdLog, step: int) -> list[RevisionGroup]:
    """The log, read `step` revisions at once."""
    groups: list[RevisionGroup] = []
    chain = Chain()
    for after in range(0, await Maintenance(log.client).revision(), step):
        more = await log.reader().read(after, after + step, dict(chain.heads))
        check_chain(more, chain)
        groups += more
    return groups


async def written(log: EtcdLog, count: int) -> None:
    """A life of a worker's agent."""
    async with log.writer("w.w0", wait_s=10) as writer:
        for number in range(count):
            writer.append(tick(number))
            await writer.flush(5)


async def test_at_no_revision_is_a_former_log_read(log: EtcdLog) -> None:
    await written(log, 10)
    assert [g.revision for g in await log.reader().read(0, 5)] == [2, 3, 4, 5]
    await begin_log(log.client, "", "fresh")
    begun = await Maintenance(log.client).revision()
    assert not await by_steps(log, 4)
    await written(log, 6)
    for step in (1, 4, begun):
        assert [g for g in await by_steps(log, step) if g.segments] == [
            g for g in await log.reader().read() if g.segments
        ]


async def test_a_log_that_got_its_id_late_is_read_from_its_beginning(log: EtcdLog) -> None:
    await written(log, 6)
    await Maintenance(log.client).name_unnamed("late")
    await written(log, 6)
    whole = await log.reader().read()
    assert len([g for g in whole if g.segments]) >= 12
    for step in (1, 4, 100):
        assert await by_steps(log, step) == whole


async def drop_backup(etcd: EtcdServer) -> None:
    """Restoring then starts with nothing."""
    (etcd.data_dir / "m0.backup").rename(etcd.data_dir / "unused")


async def test_a_replica_without_an_archive_knows_what_it_has_read(
    etcd: EtcdServer, log: EtcdLog, tmp_path: Path
) -> None:
    maintenance = Maintenance(log.client)
    seen = LastSeen.of_replica(str(tmp_path / "spool"), "r0", maintenance)
    await seen.check()
    async with log.writer("r.r0") as writer:
        writer.append(tick(0))
        await writer.flush(5)
        await maintenance.name_unnamed("former")
        await maintenance.name_unnamed("another")
        etcd.back_up()
        writer.append(tick(1))
        await writer.flush(5)
        fleet = Fleet()
        for group in await log.reader().read():
            apply_group(fleet, group)
        await seen.note(fleet)
        await seen.check()
    assert (await diagnosis(etcd, tmp_path, archive=False)).level == "ok"
    etcd.restore()
    with pytest.raises(EtcdLostSegments, match="up to segment 1, this replica has read it up to 2"):
        await seen.check()
    found = await diagnosis(etcd, tmp_path, archive=False)
    assert found.level == "fail" and "--replace former" in found.remedy
    await begin_log(log.client, "former", "fresh")
    await seen.check()
    (tmp_path / "spool/r0/seen.json").write_text("{")
    await seen.check()
