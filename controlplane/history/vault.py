"""One log's stored files as an event loop sees them: every blocking step in a thread.

The one process that may store history opens a vault: the leader, or without one a replica that relieves etcd.
Groups go in by `add` in the log's order; `seal` makes all so far durable as a file of the archive
and begins the next.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Self

from relume.controlplane.history import snapshots
from relume.controlplane.history.archive import Archive, ArchiveFile
from relume.controlplane.history.snapshots import Manifest
from relume.events.log.interface import Heads, LogReader, RevisionGroup

_STEP = 512  # revisions read at once when filling up from etcd; more would hold up the loop


class Vault:
    """Use `await Vault.open(...)`, and `close` it. Not for use by two tasks at once."""

    def __init__(self, directory: Path, archive: Archive, author: str, replica: str) -> None:
        self.directory = directory
        self.archive = archive
        self.last = archive.last
        """Everything up to this revision is in sealed files or was added since."""
        self._author = author
        self._replica = replica
        self._file: ArchiveFile | None = None
        self._waiting: list[RevisionGroup] = []
        self._waiting_bytes = 0

    @classmethod
    async def open(cls, root: Path, log_id: str, author: str, replica: str = "") -> Self:
        """The vault of log `log_id` under `root`. `author` must differ between any two
        that may write at the same time. Raises OSError."""
        directory = root / log_id
        archive = await asyncio.to_thread(Archive, directory, log_id)
        return cls(directory, archive, author, replica)

    def add(self, group: RevisionGroup) -> None:
        """Take the next group; one that is held already is ignored. Does not block."""
        if group.revision > self.last:
            self.last = group.revision
            self._waiting.append(group)
            self._waiting_bytes += _size(group)

    @property
    def waiting_bytes(self) -> int:
        """What waits in memory to be written."""
        return self._waiting_bytes

    async def flush(self) -> None:
        """Write what is waiting into the open file (not durable yet). Raises OSError."""
        await self._write(self._take_waiting(self.last))

    async def seal(self, covers: int) -> None:
        """Make everything up to revision `covers` durable; later groups keep waiting.

        Raises OSError, BrokenChain.
        """
        groups = self._take_waiting(covers)
        if covers <= self.archive.last:
            return
        await self._write(groups)
        file, self._file = self._file, None
        assert file is not None
        try:
            await asyncio.to_thread(file.seal, covers)
        except OSError:
            await asyncio.to_thread(file.discard)
            raise
        self.last = max(self.last, covers)

    def _take_waiting(self, until: int) -> list[RevisionGroup]:
        taken = [g for g in self._waiting if g.revision <= until]
        self._waiting = [g for g in self._waiting if g.revision > until]
        self._waiting_bytes = sum(map(_size, self._waiting))
        return taken

    async def _write(self, groups: list[RevisionGroup]) -> None:
        if self._file is None:
            self._file = await asyncio.to_thread(self.archive.begin, self._author)
        await asyncio.to_thread(self._file.add, groups)

    async def skip_to(self, after: int) -> None:
        """Continue after a gap that ends at revision `after`. Raises OSError."""
        self._file = await asyncio.to_thread(self.archive.begin, self._author, after)
        self.last = after

    async def fill(self, reader: LogReader, until: int) -> None:
        """Add what the log holds in (last, until]. Raises Compacted, LogUnavailable."""
        while self.last < until:
            end = min(self.last + _STEP, until)
            for group in await reader.read(self.last, end, self._heads()):
                self.add(group)
            await self.flush()
            self.last = end

    def _heads(self) -> Heads | None:
        """Where each stream ends here; None where a part of the log is missing before."""
        if self._file is not None:
            return None if self._file.adopted else self._file.heads()
        entries = self.archive.entries
        return None if entries and entries[-1].adopted else self.archive.heads()

    async def fill_from_whole(self, reader: LogReader, until: int) -> None:
        """As `fill`, of a log of which nothing was deleted though etcd was compacted: read at
        once, from its beginning. Raises LogUnavailable."""
        for group in await reader.read(0, until):
            self.add(group)
        await self.flush()
        self.last = until

    async def snapshot(self, dumped: bytes, covers: int) -> Manifest:
        """Write the fold `dumped` as the snapshot that covers `covers`. Raises OSError."""
        write = snapshots.write
        log_id = self.archive.log_id
        return await asyncio.to_thread(write, self.directory, log_id, dumped, covers, self._replica)

    def holds_snapshot(self, covers: int) -> bool:
        """Whether the snapshot's file is here."""
        return snapshots.path_of(self.directory, covers).exists()

    async def prune_snapshots(self, before: int) -> None:
        """Delete the files of snapshots that cover less than `before`. Raises OSError."""

        def prune() -> None:
            for covers in snapshots.present(self.directory):
                if covers < before:
                    snapshots.path_of(self.directory, covers).unlink(missing_ok=True)

        await asyncio.to_thread(prune)

    async def close(self) -> None:
        """Give up what is not sealed: etcd still holds it, the next leader archives it."""
        file, self._file = self._file, None
        if file is not None:
            await asyncio.to_thread(file.discard)


def _size(group: RevisionGroup) -> int:
    return sum(len(record) for segment in group.segments for record in segment.records)
