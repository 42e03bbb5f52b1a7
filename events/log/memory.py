"""The log in memory, by the same rules as on etcd: ownership, fencing, chain, groups.

For tests and simulation. Everything is immediate: an append is durable when it returns, unless
`pause` stopped the log, and readers see it when they next run.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, Self

from relume.events.log.codec import encode
from relume.events.log.errors import Compacted, Fenced, LogReplaced, StreamOwned
from relume.events.log.interface import Heads, LandedSegment, RevisionGroup
from relume.events.log.segment import GENESIS, pack, unpack


class MemoryLog:
    """A log of this process. `trim(revision)` deletes, as compaction does. `clock_ms`: the wall
    clock of its writers; by default their segments have no time."""

    def __init__(self, clock_ms: Callable[[], int] = lambda: 0) -> None:
        self.clock_ms = clock_ms
        self.revision = self.generation = 0
        self.groups: list[RevisionGroup] = []
        self.owner_epochs: dict[str, int] = {}
        self.heads: dict[str, tuple[int, bytes, int]] = {}
        self.paused = False
        self._trimmed = 0
        self._news = asyncio.Event()
        self._waiting: list[MemoryWriter] = []

    def writer(self, stream: str) -> MemoryWriter:
        """A writer for `stream`; entering its context takes the ownership."""
        return MemoryWriter(self, stream)

    def pause(self) -> None:
        """Accept appends without making them durable, as in an outage."""
        self.paused = True

    def resume(self) -> None:
        """Continue, and land what was accepted meanwhile."""
        self.paused = False
        waiting, self._waiting = self._waiting, []
        for writer in waiting:
            writer.land()

    def lapse(self, stream: str) -> None:
        """Let the ownership of `stream` lapse, as a lease does."""
        if self.owner_epochs.pop(stream, 0):
            self.commit(RevisionGroup(self.revision + 1, owners=((stream, 0),)))

    def trim(self, revision: int) -> None:
        """Delete the groups up to `revision`."""
        self.groups = [g for g in self.groups if g.revision > revision]
        self._trimmed = max(self._trimmed, revision)

    def replace(self) -> None:
        """Begin a new log in place of this one, as in an etcd that was restored or wiped. Writers of
        the old one notice it when they append."""
        self.revision, self.generation = 0, self.generation + 1
        self.groups, self.owner_epochs, self.heads, self._waiting = [], {}, {}, []
        self._trimmed = 0

    def commit(self, group: RevisionGroup) -> None:
        """Make `group` the next transaction."""
        self.revision = group.revision
        self.groups.append(group)
        news, self._news = self._news, asyncio.Event()
        news.set()

    async def follow(
        self, after: int = 0, heads: Heads | None = None
    ) -> AsyncIterator[RevisionGroup]:
        """See relume.events.log.interface.LogReader.follow."""
        while True:
            news = self._news
            for group in await self.read(after):
                after = group.revision
                yield group
            if after >= self.revision:
                await news.wait()

    async def read(
        self, after: int = 0, until: int = 0, heads: Heads | None = None
    ) -> list[RevisionGroup]:
        """See relume.events.log.interface.LogReader.read."""
        if after and after < self._trimmed:
            raise Compacted(after, self._trimmed + 1)
        last = until or self.revision
        return [g for g in self.groups if after < g.revision <= last]

    async def identity(self) -> str:
        """The log's id; another one after `replace`."""
        return f"log{self.generation}"

    async def is_empty(self) -> bool:
        """Whether no segment was written."""
        return not self.heads

    async def owners(self) -> dict[str, int]:
        """See relume.events.log.interface.LogReader.owners."""
        return dict(self.owner_epochs)


class MemoryWriter:
    """A StreamWriter on a MemoryLog."""

    def __init__(self, log: MemoryLog, stream: str) -> None:
        self.stream = stream
        self.epoch = 0
        self.fence: Fenced | None = None
        self._log = log
        self._generation = log.generation
        self._taken: list[bytes] = []
        self._position = 0
        self._durable = 0
        self._callbacks: list[Callable[[LandedSegment], None]] = []
        self._fenced = asyncio.Event()

    async def __aenter__(self) -> Self:
        log = self._log
        if self.stream in log.owner_epochs:
            raise StreamOwned(self.stream, f"epoch {log.owner_epochs[self.stream]}")
        self.epoch = log.revision + 1
        log.owner_epochs[self.stream] = self.epoch
        self._position = self._durable = log.heads.get(self.stream, (0, GENESIS, 1))[2] - 1
        log.commit(RevisionGroup(self.epoch, owners=((self.stream, self.epoch),)))
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._is_owner():
            self._log.lapse(self.stream)

    @property
    def position(self) -> int:
        return self._position

    @property
    def durable(self) -> int:
        return self._durable

    @property
    def healthy(self) -> bool:
        return not self._log.paused

    def on_landed(self, callback: Callable[[LandedSegment], None]) -> None:
        self._callbacks.append(callback)

    def append(self, *events: Any, beyond_limit: bool = False) -> int:
        if not self._is_owner():
            raise self.fence or Fenced(self.stream, self.epoch)
        self._taken.extend(e if isinstance(e, bytes) else encode(e) for e in events)
        self._position += len(events)
        if self._log.paused:
            if self not in self._log._waiting:
                self._log._waiting.append(self)
        else:
            self.land()
        return self._position

    def _is_owner(self) -> bool:
        log = self._log
        if self.fence is None and self._generation != log.generation:
            self.fence = LogReplaced(self.stream, self.epoch, self._durable)
        elif self.fence is None and log.owner_epochs.get(self.stream) != self.epoch:
            self.fence = Fenced(self.stream, self.epoch)
        if self.fence is not None:
            self._fenced.set()
        return self.fence is None

    def land(self) -> None:
        """Make what was accepted durable as one segment."""
        log, records = self._log, self._taken
        if not records:
            return
        if not self._is_owner():
            return
        self._taken = []
        seq, previous, first = log.heads.get(self.stream, (0, GENESIS, 1))
        at_ms = log.clock_ms()
        segment = unpack(pack(self.stream, self.epoch, seq + 1, first, previous, records, at_ms))
        log.heads[self.stream] = (segment.seq, segment.hash, segment.last + 1)
        log.commit(RevisionGroup(log.revision + 1, (segment,)))
        self._durable = segment.last
        landed = LandedSegment(
            stream=self.stream,
            revision=log.revision,
            seq=segment.seq,
            first=segment.first,
            last=segment.last,
        )
        for callback in self._callbacks:
            callback(landed)

    def hurry(self, within_s: float = 0.0) -> None:
        pass

    async def flush(self, timeout_s: float) -> None:
        async with asyncio.timeout(timeout_s):
            while self._durable < self._position:
                await asyncio.sleep(0.001)

    async def fenced(self) -> None:
        await self._fenced.wait()
