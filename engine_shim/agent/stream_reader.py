"""A reader of a few streams only.

An agent needs the leader's effects and, once, its own past. The whole log holds every
step of every engine; reading and watching it from every agent would cost the fleet the
square of its size.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from itertools import groupby

from relume.events.etcd.client.connection import EtcdClient
from relume.events.etcd.client.watch import Watch
from relume.events.etcd.keys import Keys, after_prefix
from relume.events.etcd.maintenance import Maintenance
from relume.events.etcd.reader.scan import PlacedSegment, Scan, placed
from relume.events.log.interface import RevisionGroup

_PUT = 0


class FleetReader:
    """Reads `streams`; follows the first of them alone.

    The chain of hashes is not checked here (the control plane's readers do that), the
    crc of each segment is.
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
        if not after:
            after, groups = await self._read(self._streams[:1])
            for group in groups:
                yield group
        prefix = self._keys.stream(self._streams[0])
        watch = Watch(self._client, prefix, after_prefix(prefix), after)
        async with aclosing(watch.revisions()) as revisions:
            async for revision, events in revisions:
                puts = [e.kv for e in events if e.type == _PUT and self._keys.is_ours(e.kv.key)]
                segments = tuple(placed(self._keys, kv).segment for kv in puts)
                if segments:
                    yield RevisionGroup(revision, segments)

    async def _read(self, streams: Sequence[str]) -> tuple[int, list[RevisionGroup]]:
        # Any key that this worker's user of etcd may read tells the revision.
        answer = await self._client.range(self._keys.stream(self._streams[0]), count_only=True)
        scan = Scan(self._client, self._keys, answer.header.revision)
        extents = [await scan.extent(stream) for stream in streams]
        found: list[PlacedSegment] = await scan.segments(extents)
        return scan.revision, [
            RevisionGroup(revision, tuple(p.segment for p in group))
            for revision, group in groupby(found, key=lambda p: p.revision)
        ]
