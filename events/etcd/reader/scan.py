"""Reading the whole log at one revision, fast.

A range over everything, paged, makes etcd walk the rest of the index for every page
(26-96 s for 100,000 segments). Segments of a stream are numbered without gaps, so one key and one
count give a stream's extent, and bounded ranges of sequence numbers are read concurrently instead.
All requests are pinned at one revision.

Keys that are no segments are ignored. One in the folder of a stream makes its count too large. Then
segments are missing at its end, and the folder is listed key by key. In a worker's stream there may be
segments with other numbers too, before its beginning or after its end (`damaged_segment`). Its segments
are those that follow what was read of it. In any other stream only stray keys may be there too. A key is
one if the segment before it did not exist when it was created: etcd's revisions say so.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, NamedTuple, TypeVar

from aetcd import rpc
from msgspec import Struct

from relume.events.etcd.client.connection import EtcdClient
from relume.events.etcd.errors import ResponseTooLarge
from relume.events.etcd.keys import BadKey, Keys, after_prefix
from relume.events.log.damaged_segment import OnDamage, may_be_skipped
from relume.events.log.errors import BrokenChain, Compacted, CorruptSegment
from relume.events.log.interface import Heads
from relume.events.log.segment import MAX_SEGMENT_BYTES, Segment, unpack

T = TypeVar("T")

_LARGEST = (1 << 64) - 1
"""The largest number of a segment."""
# A unit of concurrent work, in segments.
_CHUNK = 2_048
# Pages aim at this size; the first one of a chunk is safe whatever the segments' size.
_PAGE_BYTES = 4 * 1024 * 1024
_PAGE_MOST = 1_024
_POINT_READS = 100
_LISTED = 1_024  # keys in a page of a listing
_NAMED = 16  # other segments without a gap that are named one by one
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


class _Folder(Struct, frozen=True):
    """How many keys the folder of `stream` has. `first`: the segment at the first of them; 0: that
    key is none, or there is no key."""

    stream: str
    keys: int
    first: int


class PlacedSegment(Struct, frozen=True, gc=False):
    """A segment and the revision at which it was written."""

    revision: int
    segment: Segment


class _Unreadable(NamedTuple):
    """A key of a segment that holds none, and the revision at which the key was created."""

    stream: str
    seq: int
    created: int
    error: CorruptSegment | BrokenChain


class _Read(NamedTuple):
    """Segments, and what stands where segments should."""

    placed: list[PlacedSegment]
    unreadable: list[_Unreadable]


class Scan:
    """Reads at `revision`, which must not be compacted. `on_foreign_key` is called with each key of
    the log's prefix that it meets and that is no segment. `on_damage` is called with each segment that
    is skipped (`damaged_segment`); without it none is. `heads`: where each stream ends that was read
    before; None: a stream may begin anywhere. `after`: the log was read up to that revision."""

    def __init__(
        self,
        client: EtcdClient,
        keys: Keys,
        revision: int,
        on_foreign_key: Callable[[bytes], None] = lambda _key: None,
        on_damage: OnDamage | None = None,
        heads: Heads | None = None,
        after: int = 0,
    ) -> None:
        self.revision = revision
        self._after = after
        self._on_damage = on_damage
        self._heads = heads
        self._on_foreign_key = on_foreign_key
        self._client = client
        self._keys = keys
        limit = client.config.receive_limit_bytes
        self._page_least = max(1, limit // (MAX_SEGMENT_BYTES + 8192) // 2)

    async def extent(self, stream: str) -> Extent:
        """Which segments of `stream` exist; those at the end may not, if its folder has other keys.
        Raises BrokenChain."""
        return await self._extent_of(await self._folder(stream))

    async def last(self, stream: str) -> PlacedSegment | None:
        """The last segment of `stream`; None if it has none. Raises BrokenChain, CorruptSegment."""
        extent = await self.extent(stream)
        try:
            return await self.segment(stream, extent.last) if extent.count else None
        except (BrokenChain, CorruptSegment):
            extent = await self.listed(stream)
        return await self.segment(stream, extent.last) if extent.count else None

    async def extents(self, owned: Iterable[str]) -> list[Extent]:
        """All streams that hold segments, by name. `owned`: names known beforehand.

        Looks for the others by skipping from stream to stream, as long as the counts
        say that some are missing. Raises BrokenChain.
        """
        everything = after_prefix(self._keys.log)
        answer = await self._client.range(
            self._keys.log, everything, limit=1, keys_only=True, revision=self.revision
        )
        missing = answer.count
        found: dict[str, _Folder] = {}
        for folder in await together(self._folder(s) for s in sorted(owned)):
            found[folder.stream] = folder
            missing -= folder.keys
        while missing and answer.kvs:
            key = answer.kvs[0].key
            try:
                stream = self._keys.folder_of(key)
            except BadKey:
                self._on_foreign_key(key)
                missing -= 1
                behind = key + b"\0"
            else:
                if stream not in found:
                    found[stream] = await self._folder(stream)
                    missing -= found[stream].keys
                behind = after_prefix(self._keys.stream(stream))
            answer = await self._client.range(
                behind, everything, limit=1, keys_only=True, revision=self.revision
            )
        extents = [await self._extent_of(found[stream]) for stream in sorted(found)]
        return [extent for extent in extents if extent.count]

    async def _folder(self, stream: str) -> _Folder:
        prefix = self._keys.stream(stream)
        answer = await self._client.range(
            prefix, after_prefix(prefix), limit=1, keys_only=True, revision=self.revision
        )
        first = 0
        if answer.kvs and self._keys.is_ours(answer.kvs[0].key):
            first = self._keys.segment_of(answer.kvs[0].key)[1]
        return _Folder(stream, answer.count, first)

    async def _extent_of(self, folder: _Folder) -> Extent:
        if folder.keys and not folder.first:
            return await self.listed(folder.stream)
        first = folder.first or 1
        return Extent(folder.stream, first, first + folder.keys - 1)

    async def listed(self, stream: str) -> Extent:
        """The extent of a stream whose folder has other keys too. Where segments are skipped, it is the
        part that follows what was read; if it may begin anywhere, the longest. In other streams it is
        the first part, if all others are stray keys. Raises BrokenChain, CorruptSegment."""
        parts, expected = await self._parts(stream), self._expected(stream)
        if not self._skips(stream):
            for part in parts[1:]:
                await self._pass_over_strays(part, parts[0].last + 1)
            return parts[0]
        if expected is None:
            chosen = max(parts, key=lambda part: part.count)
        else:
            following = (part for part in parts if part.first <= expected <= part.last)
            chosen = next(following, Extent(stream, expected, expected - 1))
        for part in parts:
            if part.last > chosen.last or (part.last < chosen.first and expected is None):
                self._name(part)
        if expected is None or not chosen.count:
            return chosen
        return Extent(stream, expected, chosen.last)

    async def _parts(self, stream: str) -> list[Extent]:
        """The numbers in a folder, without gaps in each part. Raises BrokenChain if there are gaps, and
        none may be."""
        start, end = self._keys.stream(stream), after_prefix(self._keys.stream(stream))
        parts, revision, more = [Extent(stream, 1, 0)], self.revision, True
        while more:
            answer = await self._client.range(
                start, end, limit=_LISTED, keys_only=True, revision=revision
            )
            revision = revision or answer.header.revision
            for kv in answer.kvs:
                if not self._keys.is_ours(kv.key):
                    self._on_foreign_key(kv.key)
                    continue
                seq, last = self._keys.segment_of(kv.key)[1], parts[-1]
                if not seq and self._on_damage is not None:
                    self._name(Extent(stream, 0, 0))
                elif not last.count:
                    parts[-1] = Extent(stream, seq, seq)
                elif seq == last.last + 1:
                    parts[-1] = Extent(stream, last.first, seq)
                elif self._on_damage is not None:
                    parts.append(Extent(stream, seq, seq))
                else:
                    raise _gap(stream, last.last + 1, seq)
            more = bool(answer.more)
            if answer.kvs:
                start = answer.kvs[-1].key + b"\0"
        return parts

    async def _pass_over_strays(self, part: Extent, missing: int) -> None:
        """Name stray keys after a gap in the numbers, which begins at `missing`. Raises BrokenChain if
        one is a segment."""
        for low in range(part.first, part.last + 1, _CHUNK):
            found = _Read([], [])
            await self._chunk(Extent(part.stream, low, min(low + _CHUNK - 1, part.last)), found)
            if found.placed:
                raise _gap(part.stream, missing, min(p.segment.seq for p in found.placed))
            await self._pass_over(found.unreadable)

    async def _pass_over(self, unreadable: Iterable[_Unreadable]) -> None:
        """Name what is skipped. Raises CorruptSegment or BrokenChain where a segment may have stood."""
        skipped = set[tuple[str, int]]()
        for stream, seq, created, error in sorted(unreadable, key=lambda found: found[:2]):
            is_skipped = may_be_skipped(stream) or (stream, seq - 1) in skipped
            is_past = created <= self._after
            if not (is_skipped or is_past or await self._is_stray(stream, seq, created)):
                raise error
            skipped.add((stream, seq))
            if self._on_damage is not None:
                self._on_damage(stream, seq, error.detail)

    async def _is_stray(self, stream: str, seq: int, created: int) -> bool:
        """Whether the segment before key `seq` did not exist when that key was created. If etcd does not
        remember, and it is missing: whether the stream has others before it."""
        if seq < 2:
            return not seq
        before = self._keys.segment(stream, seq - 1)
        answer = await self._client.range(before, keys_only=True, revision=self.revision)
        if answer.kvs:
            return bool(answer.kvs[0].create_revision >= created)
        try:
            return not (await self._client.range(before, keys_only=True, revision=created)).kvs
        except Compacted:
            return seq > (await self._parts(stream))[0].first

    def _name(self, part: Extent) -> None:
        """Name segments that are not of their stream, although they may be whole."""
        if self._on_damage is not None:
            for seq in range(part.first, min(part.last + 1, part.first + _NAMED)):
                self._on_damage(part.stream, seq, "its number does not continue the stream")

    def _skips(self, stream: str) -> bool:
        return self._on_damage is not None and may_be_skipped(stream)

    def _expected(self, stream: str) -> int | None:
        """The number that continues a stream in which segments may be skipped; None: any."""
        if self._heads is None or not self._skips(stream):
            return None
        return self._heads.get(stream, (0, b"", 1))[0] + 1

    async def since(self, extent: Extent) -> Extent:
        """The part of `extent` written after revision `after`, or that follows what was read.

        Raises Compacted when some of that part has been deleted, BrokenChain.
        """
        if (expected := self._expected(extent.stream)) is not None:
            # The folder has no more segments than keys, however far away one of them is.
            last = min(extent.last, expected + extent.count - 1)
            return Extent(extent.stream, expected, max(last, expected - 1))
        if not self._after:
            return extent
        try:
            return await self._since(extent, self._after)
        except BrokenChain:
            return await self._since(await self.listed(extent.stream), self._after)

    async def _since(self, extent: Extent, after: int) -> Extent:
        last = await self._last_segment(extent)
        low, high = extent.first, last + 1  # the first seq > after is in [low, high]
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
        if low == extent.first > 1 and low <= last and not self._skips(extent.stream):
            key = self._keys.segment(extent.stream, low - 1)
            before = await self._client.range(key, keys_only=True, revision=after)
            if not before.kvs:
                raise Compacted(after, (await self._written(extent.stream, [low]))[0])
        return Extent(extent.stream, low, extent.last)

    async def _last_segment(self, extent: Extent) -> int:
        """The last number of `extent` that holds a segment: up to there, revisions rise with numbers."""
        last = extent.last
        if self._on_damage is None or self._skips(extent.stream):
            return last
        while last >= extent.first:
            answer = await self._client.range(
                self._keys.segment(extent.stream, last), revision=self.revision
            )
            if not answer.kvs:
                raise BrokenChain(extent.stream, last, "missing")
            found = _Read([], [])
            self._take(answer.kvs[0], found)
            if found.placed:
                break
            last -= 1
        return last

    async def segment(self, stream: str, seq: int) -> PlacedSegment:
        """One segment. Raises BrokenChain when it is not there, CorruptSegment."""
        answer = await self._client.range(self._keys.segment(stream, seq), revision=self.revision)
        if not answer.kvs:
            raise BrokenChain(stream, seq, "missing")
        return placed(self._keys, answer.kvs[0])

    async def segments(self, extents: Iterable[Extent]) -> list[PlacedSegment]:
        """The segments of all extents, in total order. Raises BrokenChain, CorruptSegment."""
        wanted = list(extents)
        found = await self._read(wanted)
        there = Counter(p.segment.stream for p in found.placed)
        there.update(unreadable.stream for unreadable in found.unreadable)
        again = []
        for extent in wanted:
            if there[extent.stream] != extent.count:
                listed = await self.listed(extent.stream)
                if self._on_damage is not None:
                    again.append(
                        Extent(extent.stream, max(extent.first, listed.first), listed.last)
                    )
        if again:
            others = {extent.stream for extent in again}
            placed = [p for p in found.placed if p.segment.stream not in others]
            found = await self._read(again)
            found.placed.extend(placed)
        return sorted(found.placed, key=lambda p: (p.revision, p.segment.stream, p.segment.seq))

    async def _read(self, extents: list[Extent]) -> _Read:
        """What stands at the numbers of `extents`, and of the streams in which segments may be skipped
        at the number after the last, which nothing is to stand at."""
        chunks = deque(
            Extent(e.stream, low, min(low + _CHUNK - 1, last))
            for e in extents
            for last in (min(e.last + self._skips(e.stream), _LARGEST),)
            for low in range(e.first, last + 1, _CHUNK)
        )
        found = _Read([], [])

        async def worker() -> None:
            while chunks:
                await self._chunk(chunks.popleft(), found)

        workers = min(len(chunks), READ_CONCURRENCY)
        await together(worker() for _ in range(workers))
        await self._pass_over(found.unreadable)
        return found

    async def _chunk(self, extent: Extent, found: _Read) -> None:
        low, page = extent.first, self._page_least
        folder = self._keys.stream(extent.stream)
        while low <= extent.last:
            end = min(low + page, extent.last + 1)
            behind = self._keys.segment(extent.stream, end) if end <= _LARGEST else b""
            try:
                answer = await self._client.range(
                    self._keys.segment(extent.stream, low),
                    behind or after_prefix(folder),
                    revision=self.revision,
                )
            except ResponseTooLarge:
                if page == 1:
                    raise
                page = max(1, page // 4)
                continue
            size = sum(len(kv.value) for kv in answer.kvs)
            for kv in answer.kvs:
                if not self._keys.is_ours(kv.key):
                    self._on_foreign_key(kv.key)
                else:
                    self._take(kv, found)
            average = max(64, size // max(1, len(answer.kvs)))
            page = max(self._page_least, min(_PAGE_MOST, _PAGE_BYTES // average))
            low = end

    def _take(self, kv: Any, found: _Read) -> None:
        try:
            found.placed.append(placed(self._keys, kv))
        except (CorruptSegment, BrokenChain) as error:
            if self._on_damage is None:
                raise
            stream, seq = self._keys.segment_of(kv.key)
            found.unreadable.append(_Unreadable(stream, seq, kv.create_revision, error))

    async def _written(self, stream: str, seqs: list[int]) -> list[int]:
        """The revisions at which segments were written. Raises BrokenChain."""
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
    stream, seq = keys.segment_of(kv.key)
    try:
        segment = unpack(kv.value)
    except CorruptSegment as error:
        raise CorruptSegment(error.detail, f"{seq} of {stream}") from None
    if (segment.stream, segment.seq) != (stream, seq):
        raise BrokenChain(stream, seq, f"holds segment {segment.seq} of {segment.stream}")
    return PlacedSegment(kv.mod_revision, segment)


def _gap(stream: str, missing: int, seq: int) -> BrokenChain:
    return BrokenChain(stream, missing, f"missing, though there is segment {seq}")
