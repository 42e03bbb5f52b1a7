"""A reader of a few streams only.

An agent needs the leader's effects and, once, its own past. The whole log holds every
step of every engine; reading and watching it from every agent would cost the fleet the
square of its size.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from itertools import groupby
from typing import Any

from relume.events.etcd.client.connection import EtcdClient
from relume.events.etcd.client.watch import Watch
from relume.events.etcd.keys import Keys, after_prefix
from relume.events.etcd.maintenance import Maintenance
from relume.events.etcd.reader.scan import PlacedSegment, Scan, placed
from relume.events.log.damaged_segment import is_stray, unless_skipped
from relume.events.log.errors import BrokenChain, CorruptSegment
from relume.events.log.interface import RevisionGroup
from relume.events.log.segment import Segment

_PUT = 0


class FleetReader:
    """Reads `streams`; follows the first of them alone.

    The chain of hashes is not checked here (the control plane's readers do that), the
    crc of each segment is. Stray keys are ignored (`relume.events.log.damaged_segment`), but for those
    in a worker's stream: its agent could not write there.
    """

    def __init__(self, client: EtcdClient, streams: Sequence[str]) -> None:
        self._client = client
        self._keys = Keys(client.config.prefix)
        self._streams = tuple(streams)
        self._maintenance = Maintenance(client)

    async def identity(self) -> str:
        """The id of the log that etcd holds; empty: it has none yet. Raises LogUnavailable."""
        return await self._maintenance.identity()

    async def is_empty(self) -> bool:
        """Whether etcd holds no segment of any stream. Raises LogUnavailable."""
        return await self._maintenance.is_empty()

    async def read(self) -> list[RevisionGroup]:
        """What the log holds of all streams now, in order. Raises LogUnavailable."""
        return (await self._read(self._streams))[1]

    async def follow(self, after: int = 0) -> AsyncIterator[RevisionGroup]:
        """The first stream's groups with revision > `after`, for ever.

        `after=0` begins at the beginning of what the log holds. Reconnects by itself.
        Raises Compacted, LogWentBack, AccessRefused; at first also LogUnavailable.
        """
        last: int | None = None
        if not after:
            after, groups = await self._read(self._streams[:1])
            last = max((s.seq for group in groups for s in group.segments), default=0)
            for group in groups:
                yield group
        prefix = self._keys.stream(self._streams[0])
        watch = Watch(self._client, prefix, after_prefix(prefix), after)
        async with aclosing(watch.revisions()) as revisions:
            async for revision, events in revisions:
                segments = []
                for kv in (e.kv for e in events if e.type == _PUT and self._keys.is_ours(e.kv.key)):
                    if (segment := self._segment(kv, last)) is not None:
                        segments.append(segment)
                        last = segment.seq
                if segments:
                    yield RevisionGroup(revision, tuple(segments))

    def _segment(self, kv: Any, last: int | None) -> Segment | None:
        """What was written after segment `last` (None: unknown); None for a stray key. Raises
        CorruptSegment, BrokenChain."""
        try:
            return placed(self._keys, kv).segment
        except (CorruptSegment, BrokenChain):
            if last is None or not is_stray(self._keys.segment_of(kv.key)[1], last):
                raise
            return None

    async def _read(self, streams: Sequence[str]) -> tuple[int, list[RevisionGroup]]:
        # Any key that this worker's user of etcd may read tells the revision.
        answer = await self._client.range(self._keys.stream(self._streams[0]), count_only=True)
        revision, found = answer.header.revision, list[PlacedSegment]()
        for stream in streams:
            scan = Scan(self._client, self._keys, revision, on_damage=unless_skipped(stream))
            found += await scan.segments([await scan.extent(stream)])
        found.sort(key=lambda p: (p.revision, p.segment.stream, p.segment.seq))
        return revision, [
            RevisionGroup(at, tuple(p.segment for p in group))
            for at, group in groupby(found, key=lambda p: p.revision)
        ]
