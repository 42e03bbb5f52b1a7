"""Records accepted but not landed, in order: first in memory, past a limit on disk only.

    taken -> [ memory | only in the spool file | late ] -> landed

`add` never waits. While journaling (an outage, or memory is full), every record also
goes to the spool file, in batches written by `write_for_ever` in a thread; once memory
is full, new records go there alone, and come back by `refill` when memory is drained.
When the disk fails, new records are held in memory (`late`) after those on disk, within
the memory limit, and journaling ends until all has landed.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Sequence

from relume.events.etcd.writer.spool import CorruptSpool, Spool, SpoolHead, frame_bytes

_FRAME = 4  # what a record costs in a segment beside its bytes
_REFILL_BYTES = 1024 * 1024
_UNWRITTEN_BYTES = 8 * 1024 * 1024  # in memory too, until the disk has them


class Backlog:
    """A queue of records with its size in segment bytes.

    `limits`: of memory, and of everything when there is a disk to spool to.
    `create` makes the spool file, in a thread; None: there is no disk.
    """

    def __init__(
        self,
        memory_limit_bytes: int,
        total_limit_bytes: int,
        sync_s: float,
        create: Callable[[SpoolHead], Spool] | None,
    ) -> None:
        self.count = 0
        self.bytes = 0
        self.disk_error: OSError | None = None
        """Why the spool is not used any more."""
        self._memory: deque[bytes] = deque()
        self._memory_bytes = 0
        self._memory_limit = memory_limit_bytes
        self._total_limit = total_limit_bytes
        self._sync_s = sync_s
        self._create = create
        self._spool: Spool | None = None
        self._head: SpoolHead | None = None  # set: journaling
        # Accepted for the file, not yet in it; True: it is in memory nowhere else.
        self._unwritten: list[tuple[bytes, bool]] = []
        self._unwritten_bytes = 0
        self._on_disk = 0  # records only in the file or about to be, after `_memory`
        self._planned = 0  # where the next record will be, from the file's begin
        self._read_at = 0  # where the first of `_on_disk` is, from the file's begin
        self._late: deque[bytes] = deque()
        self._written = asyncio.Event()
        self._news = asyncio.Event()
        self._writing = asyncio.Lock()

    # --- taking and giving -------------------------------------------------------------

    @property
    def limit_bytes(self) -> int:
        """What it may hold now."""
        usable = self._create is not None and self.disk_error is None
        return self._total_limit if usable else self._memory_limit

    def has_space(self, size: int) -> bool:
        """Whether records of `size` bytes may be added."""
        if self.bytes + size <= self._memory_limit:
            return True
        if self._unwritten_bytes + size > _UNWRITTEN_BYTES:
            return False  # the disk does not keep up
        return self.bytes + size <= self.limit_bytes

    def passes_memory(self, size: int) -> bool:
        """Whether `size` bytes more do not fit memory: time to journal."""
        return self._memory_bytes + size > self._memory_limit

    def add(self, records: Sequence[bytes], size: int) -> None:
        """Take records, room or not; `size` is their sum of bytes."""
        size += _FRAME * len(records)
        self.count += len(records)
        self.bytes += size
        journaling = self._head is not None
        if self._late or (self._on_disk and not journaling):
            self._late.extend(records)
        elif journaling and (self._on_disk or self.passes_memory(size)):
            if not self._on_disk:
                self._read_at = self._planned
            self._on_disk += len(records)
            self._to_file(records, size, only=True)
        else:
            self._memory.extend(records)
            self._memory_bytes += size
            if journaling:
                self._to_file(records, size, only=False)

    def cut(self, limit_bytes: int) -> list[bytes]:
        """Remove and return the oldest records in memory, at least one when there is
        one, up to `limit_bytes`."""
        if self._memory_bytes <= limit_bytes:
            cut, self._memory = list(self._memory), deque()
            size = self._memory_bytes
        else:
            cut, size = [], 0
            while self._memory:
                cost = len(self._memory[0]) + _FRAME
                if cut and size + cost > limit_bytes:
                    break
                cut.append(self._memory.popleft())
                size += cost
        self._memory_bytes -= size
        self.count -= len(cut)
        self.bytes -= size
        return cut

    def put_back(self, records: Sequence[bytes]) -> None:
        """Return what was cut last to the head of the queue."""
        size = sum(map(len, records)) + _FRAME * len(records)
        self._memory.extendleft(reversed(records))
        self._memory_bytes += size
        self.count += len(records)
        self.bytes += size

    # --- the disk ----------------------------------------------------------------------

    @property
    def settled(self) -> bool:
        """Whether no file is in use."""
        return self._head is None and self._spool is None and self.disk_error is None

    @property
    def in_memory(self) -> bool:
        """Whether all of it is in memory."""
        return not self._on_disk and not self._late

    def journal(self, before: Sequence[bytes], head: SpoolHead) -> None:
        """Write what is held, and all that comes, to the file too.

        `before`: records cut but not landed, which precede what is held; `head` says
        where the first of all these continues the stream.
        """
        if self._head is not None or self._create is None or self.disk_error is not None:
            return
        self._head = head
        held = [*before, *self._memory]
        self._to_file(held, sum(map(len, held)) + _FRAME * len(held), only=False)

    def adopt(self, spool: Spool, offset: int, count: int, size: int) -> None:
        """Begin with the `count` records, `size` bytes in all, from `offset` to the end of an
        earlier writer's file."""
        self._spool = spool
        self._head = spool.head
        self._planned = spool.size - spool.begin
        self._read_at = offset - spool.begin
        self._on_disk = count
        self.count += count
        self.bytes += size + _FRAME * count

    async def refill(self) -> None:
        """Bring the oldest records on disk into memory, when memory is empty.

        Raises CorruptSpool: what was promised is lost.
        """
        while not self._memory and self._on_disk:
            spool = self._spool
            if spool is None or spool.begin + self._read_at >= spool.size:
                self._written.clear()
                await self._written.wait()
                continue
            at = spool.begin + self._read_at
            records, end = await asyncio.to_thread(spool.read, at, self._on_disk, _REFILL_BYTES)
            if not records:
                raise CorruptSpool(spool.path, f"damaged at byte {at}")
            self._read_at = end - spool.begin
            self._on_disk -= len(records)
            self._into_memory(records)
        if not self._memory and self._late:
            late, self._late = self._late, deque()
            self._into_memory(late)

    async def write_for_ever(self) -> None:
        """Write batches to the file while there is something to write."""
        while True:
            await self._news.wait()
            await asyncio.sleep(self._sync_s)
            # A thread cannot be cancelled: let a batch that is being written be finished,
            # so that the next writer waits for it.
            await asyncio.shield(self.write())

    async def write(self) -> None:
        """Write what waits for the file now, and make it durable."""
        async with self._writing:
            self._news.clear()
            batch, self._unwritten = self._unwritten, []
            self._unwritten_bytes = 0
            if not batch or self._head is None or self._create is None:
                return
            try:
                if self._spool is None:
                    self._spool = await asyncio.to_thread(self._create, self._head)
                await asyncio.to_thread(self._spool.write, [record for record, _ in batch])
            except OSError as error:
                self._disk_failed(error, batch)
            self._written.set()

    async def settle(self) -> None:
        """Landing goes well again and the rest is in memory: remove the file."""
        async with self._writing:
            if not self.in_memory:
                return
            self._head = self.disk_error = None
            self._unwritten, self._unwritten_bytes = [], 0
            self._planned = self._read_at = 0
            spool, self._spool = self._spool, None
            if spool is not None:
                await asyncio.to_thread(spool.discard)

    async def close(self, refused: bool = False) -> None:
        """Leave the file for the next writer, or set it aside when the stream is lost."""
        if not refused:
            await self.write()
        spool, self._spool = self._spool, None
        if spool is not None:
            await asyncio.to_thread(spool.refuse if refused else spool.close)

    # --- inside ------------------------------------------------------------------------

    def _into_memory(self, records: Sequence[bytes] | deque[bytes]) -> None:
        self._memory.extend(records)
        self._memory_bytes += sum(map(len, records)) + _FRAME * len(records)

    def _to_file(self, records: Sequence[bytes], size: int, only: bool) -> None:
        self._unwritten.extend(zip(records, itertools.repeat(only)))
        self._unwritten_bytes += size
        self._planned += sum(map(frame_bytes, records))
        self._news.set()

    def _disk_failed(self, error: OSError, batch: list[tuple[bytes, bool]]) -> None:
        self.disk_error = error
        self._head = None
        rest, self._unwritten = self._unwritten, []
        self._unwritten_bytes = 0
        late = [record for record, only in itertools.chain(batch, rest) if only]
        self._on_disk -= len(late)
        self._late.extend(late)
