"""Reading the log: everything up to a revision, then every transaction as it comes.

`follow(0)` reads all segments pinned at the present revision R and then watches from
R+1; `follow(after)` watches from `after` + 1, so it sees every change since. What is
yielded has passed its crc and continues its stream's hash chain.

A segment of a worker's stream that is damaged or does not continue it is skipped, and so are stray keys
in any stream (`damaged_segment`).

etcd may still hold the segments of a former log at revisions before this one began (`new_log`). So nothing
is read at a revision before the log got its id.

Owner changes before R are found as `owners` describes, so that reading late shows the same
groups as having watched. (One exception: a life in which nothing was written.)
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import aclosing
from itertools import groupby
from typing import Any

from relume.events.etcd.client.connection import EtcdClient
from relume.events.etcd.client.watch import Watch
from relume.events.etcd.config import BACKOFF_MIN_MS
from relume.events.etcd.keys import Keys, after_prefix
from relume.events.etcd.owners import Life, OwnerHistory
from relume.events.etcd.reader.scan import PlacedSegment, Scan, placed
from relume.events.log.damaged_segment import (
    DamagedSegment,
    OnDamage,
    continues,
    is_stray,
    may_be_skipped,
)
from relume.events.log.errors import BrokenChain, CorruptSegment, LogUnavailable
from relume.events.log.interface import Heads, RevisionGroup
from relume.events.log.segment import Chain, Segment

_DELETE = 1
_BREATH = 2_048  # groups verified between two turns of the event loop


class LogChain(Chain):
    """The chain check for a log whose beginning may be trimmed, plus order of epochs.

    With `adopt`, the first segment seen of an unknown stream is taken as its head.
    """

    def __init__(self, heads: Heads, adopt: bool) -> None:
        super().__init__()
        self.heads.update(heads)
        self._adopt = adopt
        self._epochs: dict[str, int] = {}

    @property
    def adopts(self) -> bool:
        """Whether a stream may begin anywhere."""
        return self._adopt

    def may_skip(self, stream: str, seq: int) -> bool:
        """Whether the stream can be read without what was just written there and is no segment."""
        if may_be_skipped(stream):
            return True
        is_known = stream in self.heads or not self._adopt
        return is_known and is_stray(seq, self.heads.get(stream, (0, b"", 1))[0])

    def check(self, segment: Segment) -> None:
        """Accept the next segment of its stream, or raise BrokenChain."""
        is_fenced = segment.epoch < self._epochs.get(segment.stream, 0)
        if is_fenced and not may_be_skipped(segment.stream):  # who begins later cannot know
            raise BrokenChain(segment.stream, segment.seq, f"epoch {segment.epoch} is fenced")
        if self._adopt and segment.stream not in self.heads:
            before = segment.seq - 1, segment.previous, segment.first
            self.heads[segment.stream] = before
        super().check(segment)
        self._epochs[segment.stream] = segment.epoch


class EtcdReader:
    """A LogReader on etcd.

    `heads`: ends of the streams where this reader begins, from a snapshot, unless a call gives others;
    without them the chain is checked from the first segment it sees, which must be a stream's first
    unless the log has been trimmed.
    """

    def __init__(self, client: EtcdClient, heads: Heads | None = None) -> None:
        self._client = client
        self._keys = Keys(client.config.prefix)
        self._heads = heads
        self._watch: Watch | None = None
        self.on_foreign_key: Callable[[bytes], None] = lambda _key: None
        """Called with each key found in the log's prefix that Relume does not write; it is ignored."""
        self.on_damage: Callable[[DamagedSegment], None] = lambda _damaged: None
        """Called with each segment that is skipped, perhaps several times."""
        self.revision = 0
        """The last revision `follow` has looked at."""

    @property
    def healthy(self) -> bool:
        """Whether `follow` is in touch with a cluster that answers (False before it is)."""
        return self._watch is not None and self._watch.healthy

    async def owners(self) -> dict[str, int]:
        """Streams that have a living owner now, with its epoch. Raises LogUnavailable."""
        answer = await self._client.range(self._keys.own, after_prefix(self._keys.own))
        return self._owned(answer.kvs)

    async def read(
        self, after: int = 0, until: int = 0, heads: Heads | None = None
    ) -> list[RevisionGroup]:
        """The groups in (after, until]; `until=0` means up to the present revision.

        Raises Compacted, BrokenChain, CorruptSegment, LogUnavailable.
        """
        chain = await self._chain(after, heads)
        _, groups = await self._read(after, until, chain)
        return groups

    async def follow(
        self, after: int = 0, heads: Heads | None = None
    ) -> AsyncIterator[RevisionGroup]:
        """Every group with revision > `after`, in order, for ever.

        Reconnects by itself. Raises Compacted, BrokenChain, CorruptSegment, LogWentBack,
        AccessRefused.
        """
        chain, reached, groups = await self._begin(after, heads)
        for group in groups:
            self.revision = group.revision
            yield group
        del groups
        self.revision = reached
        root = self._keys.root
        self._watch = Watch(self._client, root, after_prefix(root), reached)
        async with aclosing(self._watch.revisions()) as revisions:
            async for revision, events in revisions:
                self.revision = revision
                seen = self._group(revision, events, chain)
                if seen is not None:
                    yield seen

    # --- inside ------------------------------------------------------------------------

    async def _begin(
        self, after: int, heads: Heads | None
    ) -> tuple[LogChain, int, list[RevisionGroup]]:
        """The chain, the revision to watch from, and what comes before it."""
        config = self._client.config
        pause = BACKOFF_MIN_MS / 1000
        while True:
            try:
                chain = await self._chain(after, heads)
                if after:
                    return chain, after, []
                return chain, *await self._read(0, 0, chain)
            except LogUnavailable:
                await asyncio.sleep(pause)
                pause = min(2 * pause, config.backoff_max_ms / 1000)

    async def _chain(self, after: int, heads: Heads | None) -> LogChain:
        """First segments are trusted only where a beginning may be missing."""
        heads = heads if heads is not None else self._heads
        adopt = bool(after) and heads is None
        if not after and not heads:
            snap = self._keys.snap
            answer = await self._client.range(snap, after_prefix(snap), keys_only=True)
            adopt = any(map(self._is_ours, (kv.key for kv in answer.kvs)))
        return LogChain(heads or {}, adopt)

    async def _read(
        self, after: int, until: int, chain: LogChain
    ) -> tuple[int, list[RevisionGroup]]:
        answer, revision = await self._owners_at(until)
        until = until or revision
        if after >= min(until, revision):
            return revision, []
        # Also refuses when `after` is compacted: then deletions since are unknown.
        floor = await self._floor(after)
        owned = self._owned(answer.kvs)
        skipped: list[tuple[str, int, str]] = []
        scan = Scan(
            self._client,
            self._keys,
            revision,
            self.on_foreign_key,
            lambda *at: skipped.append(at),
            None if chain.adopts else chain.heads,
            after,
        )
        whole = await scan.extents(owned)
        extents = [await scan.since(extent) for extent in whole]
        segments = await scan.segments(extents)
        lives = [Life(p.segment.stream, p.segment.epoch, p.revision) for p in segments]
        lives += [Life(extent.stream, 0, 0) for extent in whole]
        lives += [Life(stream, epoch, epoch) for stream, epoch in owned.items()]
        changes = await OwnerHistory(self._client, self._keys, floor, revision).changes(lives)
        groups = await self._grouped(segments, changes, chain, lambda *at: skipped.append(at))
        for stream, seq, reason in sorted(skipped):
            self._skip(chain, stream, seq, reason)
        return revision, [group for group in groups if group.revision <= until]

    async def _owners_at(self, until: int) -> tuple[Any, int]:
        """Owner keys, and the revision to read at: the present one, or with `until` the earliest that
        shows all of this log up to there, and nothing of a former log. Raises Compacted."""
        own, end = self._keys.own, after_prefix(self._keys.own)
        answer = await self._client.range(own, end)
        revision = int(answer.header.revision)
        if not until or until >= revision:
            return answer, revision
        answer = await self._client.range(own, end, revision=until)
        named = await self._client.range(self._keys.identity, keys_only=True)
        began = max((kv.mod_revision for kv in named.kvs), default=0)
        if began <= until:
            return answer, until
        return await self._client.range(own, end, revision=began), began

    def _owned(self, kvs: Iterable[Any]) -> dict[str, int]:
        """Stream to epoch, of owner keys."""
        ours = [kv for kv in kvs if self._is_ours(kv.key)]
        return {self._keys.owned_stream(kv.key): kv.create_revision for kv in ours}

    def _is_ours(self, key: bytes) -> bool:
        if self._keys.is_ours(key):
            return True
        self.on_foreign_key(key)
        return False

    async def _floor(self, after: int) -> int:
        """The revision from which on history can be read; `after` unless that is 0."""
        if after:
            await self._client.range(self._keys.own, count_only=True, revision=after)
            return after
        return await self._client.compacted_revision(self._keys.own)

    async def _grouped(
        self,
        segments: list[PlacedSegment],
        changes: list[tuple[int, str, int]],
        chain: LogChain,
        on_damage: OnDamage,
    ) -> list[RevisionGroup]:
        owners = {
            revision: tuple((stream, epoch) for _, stream, epoch in group)
            for revision, group in groupby(changes, key=lambda c: c[0])
        }
        written = {
            revision: tuple(p.segment for p in group)
            for revision, group in groupby(segments, key=lambda p: p.revision)
        }
        groups = []
        for number, revision in enumerate(sorted(written.keys() | owners.keys())):
            found = tuple(s for s in written.get(revision, ()) if continues(chain, s, on_damage))
            if not found and revision not in owners:
                continue
            groups.append(RevisionGroup(revision, found, owners.get(revision, ())))
            if number % _BREATH == _BREATH - 1:
                await asyncio.sleep(0)
        return groups

    def _group(self, revision: int, events: Iterable[Any], chain: LogChain) -> RevisionGroup | None:
        """What one transaction did to segments and owners; None when nothing.

        Deleted segments are trimming, not facts.
        """
        segments: list[Segment] = []
        owners: list[tuple[str, int]] = []
        on_damage = functools.partial(self._skip, chain)
        for event in events:
            kv = event.kv
            if not kv.key.startswith((self._keys.own, self._keys.log)):
                continue
            if not self._is_ours(kv.key):
                continue
            if kv.key.startswith(self._keys.own):
                stream = self._keys.owned_stream(kv.key)
                if event.type == _DELETE:
                    owners.append((stream, 0))
                elif kv.create_revision == revision:  # else only its lease was renewed
                    owners.append((stream, revision))
            elif event.type != _DELETE:
                if (segment := self._segment(kv, chain)) is not None:
                    segments.append(segment)
        segments.sort(key=lambda s: (s.stream, s.seq))
        segments = [segment for segment in segments if continues(chain, segment, on_damage)]
        if not segments and not owners:
            return None
        return RevisionGroup(revision, tuple(segments), tuple(sorted(owners)))

    def _segment(self, kv: Any, chain: LogChain) -> Segment | None:
        """What was just written; None if it is skipped. Raises CorruptSegment, BrokenChain."""
        try:
            return placed(self._keys, kv).segment
        except (CorruptSegment, BrokenChain) as error:
            stream, seq = self._keys.segment_of(kv.key)
            if not chain.may_skip(stream, seq):
                raise
            self._skip(chain, stream, seq, error.detail)
            return None

    def _skip(self, chain: LogChain, stream: str, seq: int, reason: str) -> None:
        after = chain.heads.get(stream, (0, b"", 1))[0]
        self.on_damage(DamagedSegment(stream=stream, seq=seq, after=after, reason=reason))
