"""A damaged spool ends no process, and loses nothing without a word."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from relume.events.etcd.client.connection import EtcdClient
from relume.events.etcd.config import EtcdConfig
from relume.events.etcd.writer.ownership import Tail
from relume.events.etcd.writer.spool import SPOOL_VERSION, Spool, SpoolHead, path_for
from relume.events.etcd.writer.spool_recovery import Loss, recover
from tests.damage.damaged_bytes import Damage, damage

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
records = st.lists(st.binary(min_size=1, max_size=60), min_size=1, max_size=12)


async def recovered(folder: Path) -> tuple[list[bytes], list[Loss]]:
    """The records that the next writer lands, and what it says it cannot."""
    losses: list[Loss] = []
    client = EtcdClient(EtcdConfig(prefix=HEAD.prefix))  # it is not connected
    left = await recover(client, str(folder), HEAD.cluster, STREAM, Tail(), losses.append)
    if left is None:
        return [], losses
    found, end = left.spool.read(left.offset, 1 << 20, 1 << 20)
    assert end == left.spool.size and len(found) == left.count
    left.spool.write([b"later"])
    again, _ = left.spool.read(left.offset, 1 << 20, 1 << 20)
    assert again == [*found, b"later"]
    left.spool.discard()
    return found, losses


def spooled(folder: Path, written: list[bytes]) -> Path:
    spool = Spool.create(path_for(str(folder), STREAM, "1"), HEAD)
    spool.write(written)
    spool.close()
    return spool.path


@settings(deadline=None, max_examples=300)
@given(records, damage())
def test_the_next_writer_lands_what_is_whole_and_says_what_is_not(
    written: list[bytes], damaged: Damage
) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = spooled(folder, written)
        whole = path.read_bytes()
        path.write_bytes(damaged(whole))
        is_shorter = path.stat().st_size < len(whole)
        found, losses = asyncio.run(recovered(folder))
        assert is_subsequence(found, written)
        if len(found) < len(written):
            assert losses or is_shorter, "records are lost without a word"
        assert all(loss.path.exists() for loss in losses)


def is_subsequence(found: list[bytes], written: list[bytes]) -> bool:
    """Whether `found` is `written` without some records: a file that lost bytes between two frames lacks
    whole records, which no checksum of a record can notice."""
    rest = iter(written)
    return all(any(one == other for other in rest) for one in found)


def test_zeros_after_the_last_record_are_no_records() -> None:
    """A file system leaves them where a batch was under way when the power failed."""
    with tempfile.TemporaryDirectory() as name:
        path = spooled(Path(name), [b"one"])
        path.write_bytes(path.read_bytes() + bytes(64))
        found, losses = asyncio.run(recovered(Path(name)))
        assert found == [b"one"]
        assert "64 bytes after the last whole record" in str(losses[0])


def test_records_after_a_damaged_head_are_set_aside() -> None:
    with tempfile.TemporaryDirectory() as name:
        path = spooled(Path(name), [b"one", b"two"])
        data = bytearray(path.read_bytes())
        data[12] ^= 1
        path.write_bytes(data)
        found, losses = asyncio.run(recovered(Path(name)))
        assert not found and len(losses) == 1
        assert losses[0].path.read_bytes() == data
        assert "no head" in losses[0].why


def test_records_after_a_damaged_one_are_set_aside() -> None:
    with tempfile.TemporaryDirectory() as name:
        path = spooled(Path(name), [b"one", b"two", b"three"])
        data = path.read_bytes().replace(b"two", b"twO")
        path.write_bytes(data)
        found, losses = asyncio.run(recovered(Path(name)))
        assert found == [b"one"] and len(losses) == 1
        assert losses[0].path.read_bytes() == data[data.index(b"one") + 3 :]
