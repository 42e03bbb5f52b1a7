"""An archive without room: nothing leaves etcd that is not kept, and all goes on with room."""

from __future__ import annotations

from pathlib import Path

import pytest
from structlog.testing import capture_logs

from relume.controlplane.history.archive import MANIFEST, Archive
from relume.controlplane.history.files import write_whole
from relume.events.etcd.factory import EtcdLog
from relume.events.etcd.keys import Keys
from relume.events.etcd.maintenance import Maintenance
from relume.events.etcd.reader.scan import Scan
from tests.etcd_server import EtcdServer
from tests.full_disk import full_disk
from tests.history.checks import history_is_whole
from tests.history.stage import replica_on, traffic_on, until
from tests.history.test_files import story


def scan_of(log: EtcdLog) -> Scan:
    return Scan(log.client, Keys(log.client.config.prefix), 0)


def test_a_file_is_whole_or_not_there(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for kept in (b"", b"first"):
        with full_disk(100), pytest.raises(OSError, match="too large"):
            write_whole(path, b"x" * 200)
        left = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
        assert left == ({"file": kept} if kept else {})
        write_whole(path, b"first")


def test_a_file_whose_line_finds_no_room_is_not_archived(tmp_path: Path) -> None:
    """Room ends within the manifest's line: the write is short, and no error by itself."""
    archive = Archive(tmp_path, "log")
    groups = story(40)
    for start in range(0, 36, 4):
        file = archive.begin("1")
        file.add(groups[start : start + 4])
        file.seal(groups[start + 3].revision)
    sealed = archive.last
    manifest = tmp_path / MANIFEST
    files = sorted(tmp_path.glob("*.rla"))
    assert manifest.stat().st_size > max(f.stat().st_size for f in files) + 1000
    for room in (0, 10):
        file = archive.begin("1")
        file.add(groups[36:])
        with (
            full_disk(manifest.stat().st_size + room),
            pytest.raises(OSError, match="too large"),
        ):
            file.seal(groups[-1].revision)
        file.discard()
        assert archive.last == Archive(tmp_path, "log").last == sealed
        assert sorted(tmp_path.glob("*.rla")) == files, "and no file that nothing names"
    file = archive.begin("1")
    file.add(groups[36:])
    file.seal(groups[-1].revision)
    assert list(Archive(tmp_path, "log").read()) == groups


def test_what_is_given_up_leaves_nothing_on_a_full_disk(tmp_path: Path) -> None:
    file = Archive(tmp_path, "log").begin("1")
    with full_disk():
        file.add(story(3))
        file.discard()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.etcd
async def test_nothing_is_trimmed_while_the_archive_has_no_room(
    etcd: EtcdServer, tmp_path: Path
) -> None:
    async with replica_on(etcd, tmp_path) as stage:
        stage.keeper.retry_s = 0.05
        status = stage.keeper.status
        await stage.leads()
        async with traffic_on(stage.log) as traffic:
            while status.rounds < 3:
                await traffic.steps(24)
            with capture_logs() as said, full_disk():
                await until(lambda: status.failures)
                archived, scan = status.archived, scan_of(stage.log)
                first = (await scan.extent(traffic.writer.stream)).first
                while status.failures < 4:
                    await traffic.steps(8)
                assert "too large" in status.failing
                assert status.archived == archived
                assert (await scan.extent(traffic.writer.stream)).first == first
                await until(lambda: not list(tmp_path.glob("*/.*")))  # no rests take what is left
            assert "make room" in next(e for e in said if e["log_level"] == "error")["remedy"]
            rounds = status.rounds
            while status.rounds < rounds + 2:
                await traffic.steps(24)
            assert status.failing == "" and status.trimmed > archived
            assert (await Maintenance(stage.log.client).manifests()) != {}
            await history_is_whole(stage.log, tmp_path, traffic)
