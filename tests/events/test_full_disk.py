"""Spools and the disk. Without room events wait in memory, and nothing is in the way later. The
backlog returns records in their order, and a spool has what it promised and nothing else."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from relume.events.etcd.client.connection import EtcdClient
from relume.events.etcd.config import EtcdConfig
from relume.events.etcd.factory import EtcdLog
from relume.events.etcd.writer.backlog import Backlog
from relume.events.etcd.writer.ownership import Tail
from relume.events.etcd.writer.spool import SPOOL_VERSION, Spool, SpoolHead, path_for
from relume.events.etcd.writer.spool_recovery import OrphanedRecords, recover
from relume.events.log.disk import SteadyOutput, is_full
from tests.etcd_server import EtcdServer
from tests.events.conftest import config_for
from tests.events.support import tick, until
from tests.events.test_outage import written
from tests.full_disk import full_disk

STREAM = "w.w0"
HEAD = SpoolHead(
    version=SPOOL_VERSION,
    cluster=1,
    prefix="/x",
    stream=STREAM,
    epoch=2,
    seq=0,
    hash=b"",
    position=1,
)


def test_a_spool_that_finds_no_room_leaves_nothing_in_the_way_of_the_next(tmp_path: Path) -> None:
    path = tmp_path / "w.w0.1.spool"
    for most in (0, 5):
        with full_disk(most), pytest.raises(OSError, match="too large") as refused:
            Spool.create(path, HEAD)
        assert is_full(refused.value) and not path.exists()
    spool = Spool.create(path, HEAD)
    spool.write([b"one"])
    with full_disk(spool.size + 20), pytest.raises(OSError, match="too large"):
        spool.write([b"two", b"x" * 100])
    spool.write([b"three"])
    assert spool.read(spool.begin, 9, 1 << 20)[0] == [b"one", b"three"]
    spool.discard()


@pytest.mark.etcd
async def test_what_the_spool_has_no_room_for_lands_from_memory_and_the_next_outage_spools(
    etcd: EtcdServer, tmp_path: Path
) -> None:
    config = config_for(etcd, spool_dir=str(tmp_path), spool_sync_ms=5)
    async with EtcdLog(config) as log, log.writer(STREAM) as writer:
        with full_disk():
            etcd.kill9()
            for n in range(100):
                writer.append(tick(n))
            await until(lambda: writer.spool_trouble, 5)
            assert "too large" in writer.spool_trouble and not list(tmp_path.iterdir())
        etcd.restart()
        await writer.flush(10)
        await until(lambda: not writer.spool_trouble, 5)
        etcd.kill9()
        for n in range(100, 200):
            writer.append(tick(n))
        await until(lambda: any(p.stat().st_size > 500 for p in tmp_path.iterdir()), 5)
        etcd.restart()
        await writer.flush(10)
        assert await written(log) == list(range(200))


def spooling(create: Callable[[SpoolHead], Spool]) -> Backlog:
    """Without memory: what comes in an outage is only in the file."""
    return Backlog(memory_limit_bytes=0, total_limit_bytes=1 << 20, sync_s=0.0, create=create)


async def drained(backlog: Backlog) -> list[bytes]:
    """All that it has, as a writer takes it."""
    records = []
    async with asyncio.timeout(5):
        while backlog.count:
            await backlog.refill()
            records += backlog.cut(1)
    return records


async def test_records_that_come_while_the_disk_fails_are_written_from_memory() -> None:
    creating, filled = threading.Event(), threading.Event()

    def create(head: SpoolHead) -> Spool:
        creating.set()
        filled.wait(5)
        raise OSError("no space")

    backlog = spooling(create)
    backlog.journal((), HEAD)
    backlog.add([b"one"], 3)
    writing = asyncio.create_task(backlog.write())
    await asyncio.to_thread(creating.wait, 5)
    backlog.add([b"two"], 3)
    filled.set()
    await writing
    assert await drained(backlog) == [b"one", b"two"]


async def test_each_outage_has_a_file_of_its_own(tmp_path: Path) -> None:
    backlog = spooling(lambda head: Spool.create(tmp_path / "spool", head))
    for _ in range(2):
        backlog.journal((), HEAD)
        backlog.add([b"one", b"two"], 6)
        await backlog.write()
        assert await drained(backlog) == [b"one", b"two"]
        await backlog.settle()
        assert not list(tmp_path.iterdir())


async def test_records_that_did_not_land_return_to_their_place() -> None:
    backlog = Backlog(1 << 20, 1 << 20, 0.0, None)
    backlog.add([b"one", b"two"], 6)
    backlog.put_back(backlog.cut(1 << 20))
    backlog.add([b"three"], 5)
    assert await drained(backlog) == [b"one", b"two", b"three"]


def test_a_damaged_record_ends_a_spool(tmp_path: Path) -> None:
    spool = Spool.create(tmp_path / "spool", HEAD)
    spool.write([b"one", b"two"])
    with spool.path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"!")
    assert spool.read(spool.begin, 9, 1 << 20)[0] == [b"one"]
    spool.discard()


def test_records_are_on_the_disk_when_they_count_as_spooled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or the death of the host would lose them."""
    synced: list[int] = []
    monkeypatch.setattr(os, "fdatasync", lambda fd: synced.append(os.fstat(fd).st_size))
    spool = Spool.create(tmp_path / "spool", HEAD)
    spool.write([b"one"])
    assert synced == [spool.begin, spool.size]
    spool.discard()


async def recovered(folder: Path, cluster: int) -> OrphanedRecords | None:
    """What the next writer finds, before the stream has a segment."""
    client = EtcdClient(EtcdConfig(prefix=HEAD.prefix))  # it is not connected
    return await recover(client, str(folder), cluster, STREAM, Tail())


async def test_the_spool_of_a_cluster_that_was_wiped_is_set_aside(tmp_path: Path) -> None:
    spool = Spool.create(path_for(str(tmp_path), STREAM, "1"), HEAD)
    spool.write([b"one"])
    spool.close()
    assert await recovered(tmp_path, HEAD.cluster + 1) is None
    assert [path.name for path in tmp_path.iterdir()] == [f"{STREAM}.refused"]


async def test_what_is_spooled_after_a_torn_record_can_be_read(tmp_path: Path) -> None:
    """Its writer died while it wrote; the next one continues the file."""
    spool = Spool.create(path_for(str(tmp_path), STREAM, "1"), HEAD)
    spool.write([b"one"])
    spool.close()
    with spool.path.open("ab") as file:
        file.write(b"torn")
    left = await recovered(tmp_path, HEAD.cluster)
    assert left is not None and left.count == 1
    left.spool.write([b"two"])
    assert left.spool.read(left.offset, 9, 1 << 20)[0] == [b"one", b"two"]
    left.spool.discard()


def test_lines_are_counted_where_they_cannot_be_written(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("w") as stream:
        output = SteadyOutput(stream, lambda count: f"{count} refused\n")
        output.write("before\n")
        with full_disk():
            for _ in range(3):
                output.write("x" * 10_000 + "\n")
            assert output.refused == 3
        output.write("after\n")
        output.write("later\n")
        assert output.refused == 0
    lines = path.read_text().splitlines()
    assert lines[0] == "before" and lines[-3:] == ["3 refused", "after", "later"]


def test_a_closed_or_missing_stream_costs_the_lines_alone(tmp_path: Path) -> None:
    closed = (tmp_path / "log").open("w")
    closed.close()
    for stream in (closed, None):
        output = SteadyOutput(stream, lambda count: f"{count} refused\n")
        assert output.write("one\n") == output.write("two\n") == 4
        assert output.refused == 2 and not output.isatty()


def test_a_text_that_the_stream_cannot_encode_costs_that_line_alone(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("w", encoding="ascii") as stream:
        output = SteadyOutput(stream, lambda count: f"{count} refused\n")
        output.write("größe\n")
        output.write("after\n")
    assert path.read_text().splitlines() == ["1 refused", "after"]
