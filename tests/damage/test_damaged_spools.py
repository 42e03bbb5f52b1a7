"""A damaged spool ends no process, and loses nothing without a word."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from relume.events.etcd.client.connection import EtcdClient
from relume.events.etcd.config import EtcdConfig
from relume.events.etcd.writer.ownership import Tail
from relume.events.etcd.writer.spool import SPOOL_VERSION, Spool, SpoolHead, framed, path_for
from relume.events.etcd.writer.spool_recovery import CHECK_DISK, Loss, recover
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
HEAD_FRAME = framed(msgspec.msgpack.encode(HEAD))
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


@settings(deadline=None, max_examples=400)
@given(records, damage())
def test_the_next_writer_lands_what_is_whole_and_says_what_is_not(
    written: list[bytes], damaged: Damage
) -> None:
    """All records before the first damaged byte land. Each byte of the file lands or is set aside. A loss
    has a name, unless the file has whole records alone: it looks as if the others had never been written."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = spooled(folder, written)
        whole = path.read_bytes()
        data = damaged(whole)
        path.write_bytes(data)
        found, losses = asyncio.run(recovered(folder))
        assert is_subsequence(found, written)
        sound = records_before(first_difference(whole, data), written)
        assert found[:sound] == written[:sound]
        landed = file_of(found) if found or data.startswith(HEAD_FRAME) else b""
        if data != landed:
            (loss,) = losses
            assert landed + loss.path.read_bytes() == data
        else:
            assert not losses


@settings(deadline=None, max_examples=200)
@given(records, st.data())
def test_a_torn_last_record_has_a_name(written: list[bytes], data: st.DataObject) -> None:
    """A crash in the middle of a write leaves it. No caller heard that these records are durable; a disk
    that loses acknowledged ones looks the same, so the next writer names both."""
    with tempfile.TemporaryDirectory() as name:
        path = spooled(Path(name), written)
        whole = path.read_bytes()
        torn = data.draw(st.integers(1, len(framed(written[-1])) - 1))
        path.write_bytes(whole[:-torn])
        found, losses = asyncio.run(recovered(Path(name)))
        assert found == written[:-1]
        assert [loss.path.read_bytes() for loss in losses] == [framed(written[-1])[:-torn]]
        assert losses[0].remedy == CHECK_DISK


def file_of(found: list[bytes]) -> bytes:
    """The spool file with these records."""
    return HEAD_FRAME + b"".join(map(framed, found))


def first_difference(one: bytes, other: bytes) -> int:
    pairs = zip(one, other, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def records_before(at: int, written: list[bytes]) -> int:
    """How many records of a spool end at or before this byte."""
    return sum(len(file_of(written[: count + 1])) <= at for count in range(len(written)))


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
