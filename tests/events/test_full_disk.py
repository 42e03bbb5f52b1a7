"""A writer whose spool has no room: events wait in memory, and nothing is in the way later."""

from __future__ import annotations

from pathlib import Path

import pytest

from relume.events.etcd.factory import EtcdLog
from relume.events.etcd.writer.spool import SPOOL_VERSION, Spool, SpoolHead
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
