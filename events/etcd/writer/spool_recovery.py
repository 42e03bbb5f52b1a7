"""What an earlier writer of a stream spooled and did not land before it died.

Its file continues a segment it names by hash. It is adopted if that segment is in the log and every
later segment holds exactly the file's records at these positions: then the file's rest is the
stream's true continuation, and this writer lands it. Anything else means that another writer has
written to the stream since; the file is set aside. So are bytes after the last whole record, and a
file whose head is damaged. Each is a `Loss`, so no byte of a spool is dropped without a word.

Bytes that are not in the file any more are noticed if the file ends, or continues, within a record. If a
disk loses whole records, the file looks as if they had never been written; only another copy could
show that, and there is none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct

from relume.events.etcd.client.connection import EtcdClient
from relume.events.etcd.keys import Keys
from relume.events.etcd.reader.scan import Extent, Scan
from relume.events.etcd.writer.ownership import Tail
from relume.events.etcd.writer.spool import (
    DAMAGED,
    SPOOL_VERSION,
    CorruptSpool,
    Spool,
    leftovers,
)

_BATCH = 32  # segments compared at once
_READ_BYTES = 1024 * 1024
_ALL = 1 << 60


class OrphanedRecords(Struct, frozen=True):
    """`spool` has `count` records of `size` bytes from `offset` on."""

    spool: Spool
    offset: int
    count: int
    size: int


CHECK_DISK = (
    "check the disk, unless the process or host died while etcd was away; then delete the file"
)
CHECK_OWNERS = "look for a second process with this name or spool directory; then delete the file"


class Loss(Struct, frozen=True):
    """Part of a spool that this writer cannot land. `path`: where it is set aside."""

    path: Path
    why: str
    remedy: str = CHECK_DISK

    def __str__(self) -> str:
        return f"{self.path}: {self.why}"


OTHERS = "another writer has written to the stream since"
SECOND = "an older spool of the stream is written first"


async def recover(
    client: EtcdClient,
    directory: str,
    cluster: int,
    stream: str,
    tail: Tail,
    on_loss: Callable[[Loss], None] = lambda _: None,
) -> OrphanedRecords | None:
    """The unlanded rest of an earlier writer's spool, if there is one.

    Call it as the stream's owner. Removes files that have landed whole, sets aside
    those that are refused, and damaged ones; calls `on_loss` for each. Raises LogUnavailable,
    OSError.
    """
    adopted: OrphanedRecords | None = None
    for path in await asyncio.to_thread(leftovers, directory, stream):
        spool = await asyncio.to_thread(_open, path, on_loss)
        if spool is None:
            continue
        offset = await _continues(client, cluster, stream, spool, tail)
        if offset < 0:
            on_loss(Loss(await asyncio.to_thread(spool.refuse), OTHERS, CHECK_OWNERS))
            continue
        count, size, end = await asyncio.to_thread(_measure, spool, offset)
        if count and adopted is not None:
            on_loss(Loss(await asyncio.to_thread(spool.refuse), SECOND, CHECK_OWNERS))
            continue
        await asyncio.to_thread(_set_rest_aside, spool, end, on_loss)
        if not count:
            await asyncio.to_thread(spool.discard)
        else:
            await asyncio.to_thread(spool.cut_off, end)
            adopted = OrphanedRecords(spool, offset, count, size)
    return adopted


async def _continues(
    client: EtcdClient, cluster: int, stream: str, spool: Spool, tail: Tail
) -> int:
    """Where in the file the unlanded records begin; -1 when it is not `tail`'s."""
    head = spool.head
    origin = head.version, head.cluster, head.prefix, head.stream
    if origin != (SPOOL_VERSION, cluster, client.config.prefix, stream) or head.seq > tail.seq:
        return -1
    scan = Scan(client, Keys(client.config.prefix), 0)
    if head.seq:
        if (await scan.extent(stream)).first > head.seq:
            return -1  # trimmed: it can no longer be checked
        if (await scan.segment(stream, head.seq)).segment.hash != head.hash:
            return -1
    offset = spool.begin
    for low in range(head.seq + 1, tail.seq + 1, _BATCH):
        batch = Extent(stream, low, min(low + _BATCH - 1, tail.seq))
        for placed in await scan.segments([batch]):
            wanted = list(placed.segment.records)
            found, offset = await asyncio.to_thread(_read_exactly, spool, offset, len(wanted))
            if found != wanted[: len(found)]:
                return -1
            if len(found) < len(wanted):
                return offset  # all of the file has landed, and more since
    return offset


def _set_rest_aside(spool: Spool, end: int, on_loss: Callable[[Loss], None]) -> None:
    """What follows the last whole record. A full disk does not keep the stream from its next writer."""
    why = f"{spool.size - end} bytes after the last whole record"
    try:
        aside = spool.set_aside(end)
    except OSError as error:
        on_loss(Loss(spool.path, f"{why}, which could not be set aside: {error}"))
    else:
        if aside is not None:
            on_loss(Loss(aside, why))


def _open(path: Path, on_loss: Callable[[Loss], None]) -> Spool | None:
    """None if its writer lives, or its head cannot be read. An empty file has lost nothing: its writer
    died while making it."""
    try:
        return Spool.adopt(path)
    except CorruptSpool as error:
        if path.stat().st_size:
            aside = path.replace(path.with_suffix(DAMAGED))
            on_loss(Loss(aside, str(error)))
        else:
            path.unlink(missing_ok=True)
        return None


def _read_exactly(spool: Spool, offset: int, count: int) -> tuple[list[bytes], int]:
    records: list[bytes] = []
    while len(records) < count:
        more, offset = spool.read(offset, count - len(records), _READ_BYTES)
        if not more:
            break
        records.extend(more)
    return records, offset


def _measure(spool: Spool, offset: int) -> tuple[int, int, int]:
    """(records, their bytes, end) of the sound part of the file from `offset` on."""
    count = size = 0
    while True:
        records, offset = spool.read(offset, _ALL, _READ_BYTES)
        if not records:
            return count, size, offset
        count += len(records)
        size += sum(map(len, records))
