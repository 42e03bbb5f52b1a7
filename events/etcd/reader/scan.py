"""Reading the whole log at one revision, fast.

A range over everything, paged, makes etcd walk the rest of the index for every page
(26-96 s for 100,000 segments). Segments of a stream are numbered without gaps, so one key and one
count give a stream's extent, and bounded ranges of sequence numbers are read concurrently instead.
All requests are pinned at one revision.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

from aetcd import rpc
from msgspec import Struct

from relume.events.etcd.client.connection import EtcdClient
from relume.events.etcd.errors import ResponseTooLarge
from relume.events.etcd.keys import Keys, after_prefix
from relume.events.log.errors import BrokenChain, Compacted
from relume.events.log.segment import MAX_SEGMENT_BYTES, Segment, unpack

T = TypeVar("T")

# A unit of concurrent work, in segments.
_CHUNK = 2_048
# Pages aim at this size; the first one of a chunk is safe whatever the segments' size.
_PAGE_BYTES = 4 * 1024 * 1024
_PAGE_MOST = 1_024
_POINT_READS = 100
READ_CONCURRENCY = 8
"""Maximum number of reads at the same time."""


class Extent(Struct, frozen=True):
    """Segments `first..last` of a stream exist; first > last: none do."""

    stream: str
    first: int
    last: int

    @property
    def count(self) -> int:
        return self.last - self.first + 1


class PlacedSegment(Struct, frozen=True, gc=False):
    """A segment and the revision at which it was written."""

    revision: int
    segment: Segment


class Scan:
    """Reads at `revision`, which must not be compacted."""

    def __init__(self, client: EtcdClient, keys: Keys, revision: int) -> None:
        self.revision = revision
        self._client = client
        self._keys = keys
        limit = client.config.receive_limit_bytes
        self._page_least = max(1, limit // (MAX_SEGMENT_BYTES + 8192) // 2)

    async def extent(self, stream: str) -> Extent:
        """Which segments of `stream` exist."""
        prefix = self._keys.stream(stream)
        answer = await self._client.range(
            prefix, after_prefix(prefix), limit=1, keys_only=True, revision=self.revision
        )
        if not answer.kvs:
            return Extent(stream, 1, 0)
        first = self._keys.segment_of(answer.kvs[0].key)[1]
        return Extent(stream, first, first + answer.count - 1)

    async def extents(self, owned: Iterable[str]) -> list[Extent]:
        """All streams that hold segments, by name. `owned`: names known beforehand.

        Looks for the others by skipping from stream to stream, as long as the counts
        say that some are missing.
        """
        everything = after_prefix(self._keys.log)
        answer = await self._client.range(
            self._keys.log, everything, limit=1, keys_only=True, revision=self.revision
        )
        missing = answer.count
        found: dict[str, Extent] = {}
        for extent in await together(self.extent(s) for s in sorted(owned)):
            if extent.count:
                found[extent.stream] = extent
                missing -= extent.count
        while missing and answer.kvs:
            stream = self._keys.segment_of(answer.kvs[0].key)[0]
            if stream not in found:
                found[stream] = await self.extent(stream)
                missing -= found[stream].count
            behind = after_prefix(self._keys.stream(stream))
            answer = await self._client.range(
                behind, everything, limit=1, keys_only=True, revision=self.revision
            )
        return [found[stream] for stream in sorted(found)]

    async def since(self, extent: Extent, after: int) -> Extent:
        """The part of `extent` written after revision `after`.

        Raises Compacted when some of that part has been deleted.
        """
        low, high = extent.first, extent.last + 1  # the first seq > after is in [low, high]
        while low < high:
            step = max(1, (high - low) // (_POINT_READS + 1))
            probes = list(range(low, high, step))[:_POINT_READS]
            for seq, written in zip(
                probes, await self._written(extent.stream, probes), strict=True
            ):
                if written > after:
                    high = min(high, seq)
                else:
                    low = max(low, seq + 1)
        if low == extent.first > 1 and low <= extent.last:
            key = self._keys.segment(extent.stream, low - 1)
            before = await self._client.range(key, keys_only=True, revision=after)
            if not before.kvs:
                raise Compacted(after, (await self._written(extent.stream, [low]))[0])
        return Extent(extent.stream, low, extent.last)

    async def segment(self, stream: str, seq: int) -> PlacedSegment:
        """One segment. Raises BrokenChain when it is not there, CorruptSegment."""
        answer = await self._client.range(self._keys.segment(stream, seq), revision=self.revision)
        if not answer.kvs:
            raise BrokenChain(stream, seq, "missing")
        return placed(self._keys, answer.kvs[0])

    async def segments(self, extents: Iterable[Extent]) -> list[PlacedSegment]:
        """The segments of all extents, in total order."""
        chunks = deque(
            Extent(e.stream, low, min(low + _CHUNK - 1, e.last))
            for e in extents
            for low in range(e.first, e.last + 1, _CHUNK)
        )
        found: list[PlacedSegment] = []

        async def worker() -> None:
            while chunks:
                await self._chunk(chunks.popleft(), found)

        workers = min(len(chunks), READ_CONCURRENCY)
        await together(worker() for _ in range(workers))
        found.sort(key=lambda p: (p.revision, p.segment.stream, p.segment.seq))
        return found

    async def _chunk(self, extent: Extent, found: list[PlacedSegment]) -> None:
        low, page = extent.first, self._page_least
        while low <= extent.last:
            end = min(low + page, extent.last + 1)
            try:
                answer = await self._client.range(
                    self._keys.segment(extent.stream, low),
                    self._keys.segment(extent.stream, end),
                    revision=self.revision,
                )
            except ResponseTooLarge:
                if page == 1:
                    raise
                page = max(1, page // 4)
                continue
            size = sum(len(kv.value) for kv in answer.kvs)
            found.extend(placed(self._keys, kv) for kv in answer.kvs)
            average = max(64, size // max(1, len(answer.kvs)))
            page = max(self._page_least, min(_PAGE_MOST, _PAGE_BYTES // average))
            low = end

    async def _written(self, stream: str, seqs: list[int]) -> list[int]:
        """The revisions at which segments were written."""
        ops = [
            rpc.RequestOp(
                request_range=rpc.RangeRequest(
                    key=self._keys.segment(stream, seq), keys_only=True, revision=self.revision
                )
            )
            for seq in seqs
        ]
        answer = await self._client.read_txn(rpc.TxnRequest(success=ops))
        written = []
        for seq, op in zip(seqs, answer.responses, strict=True):
            if not op.response_range.kvs:
                raise BrokenChain(stream, seq, "missing")
            written.append(op.response_range.kvs[0].mod_revision)
        return written


async def together(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run all at once; results in order, or the first error once all have ended."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(each) for each in work]
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]


def placed(keys: Keys, kv: Any) -> PlacedSegment:
    """Decode one segment's key and value. Raises CorruptSegment, BrokenChain, BadKey."""
    segment = unpack(kv.value)
    stream, seq = keys.segment_of(kv.key)
    if (segment.stream, segment.seq) != (stream, seq):
        raise BrokenChain(stream, seq, f"holds segment {segment.seq} of {segment.stream}")
    return PlacedSegment(kv.mod_revision, segment)
