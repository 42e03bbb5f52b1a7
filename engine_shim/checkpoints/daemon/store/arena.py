"""The hot tier: block images in one shared-memory file (memfd) of the budget's size.

Engines of this host map it read-only and copy blocks straight from it. The host provides pages when
they are first written, and given back by `trim`; they are locked into DRAM where the process may,
and where it may not a host with swap is refused.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
from collections.abc import Iterator
from itertools import islice

from relume.engine_shim.checkpoints.daemon.errors import CannotHold
from relume.engine_shim.checkpoints.daemon.store import host_memory
from relume.engine_shim.checkpoints.daemon.store.extents import Extents, rounded

CHECK_EVERY_BYTES = 16 << 20
F_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def overlaps(
    free: list[tuple[int, int]], dirty: list[tuple[int, int]]
) -> Iterator[tuple[int, int]]:
    """(start, end) of what both lists of (start, length) hold; both are sorted, `free`
    without overlaps."""
    at = 0
    for start, length in dirty:
        end = start + length
        while at < len(free) and free[at][0] + free[at][1] <= start:
            at += 1
        for low, size in islice(free, at, None):
            if low >= end:
                break
            yield max(low, start), min(low + size, end)


class Arena:
    """`budget` bytes at most, never more; `reserve` bytes of the host's memory are left to
    others: below that nothing new is allocated."""

    name = "memory"

    def __init__(self, budget: int, reserve: int = 0, allow_unlocked: bool = False) -> None:
        """Raises CannotHold when the host has not so much to spare."""
        self._extents = Extents(budget)
        if not self._extents.capacity:
            raise CannotHold(f"a budget of {budget} bytes is not one page")
        spare = host_memory.available() - reserve
        if self._extents.capacity > spare:
            raise CannotHold(f"budget of {budget} bytes, but only {spare} can be spared")
        self._reserve = reserve
        self._limit = self._extents.capacity
        self._fd = os.memfd_create("relume-checkpoints", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self._fd, self._extents.capacity)
        fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, F_SEALS)
        self._map = mmap.mmap(self._fd, self._extents.capacity)
        self.unlocked = host_memory.lock_on_fault(self._map, self._extents.capacity)
        if self.unlocked and host_memory.swap_bytes() and not allow_unlocked:
            raise CannotHold(f"the host has swap, and memory cannot be locked: {self.unlocked}")
        self._view = memoryview(self._map)
        self._fresh = CHECK_EVERY_BYTES
        self._dirty: dict[int, int] = {}
        self._spare = True

    @property
    def used(self) -> int:
        """Bytes allocated, page rounding included."""
        return self._extents.used

    @property
    def budget(self) -> int:
        return self._limit

    def keep_to(self, share: float) -> None:
        """Allocate at most this share of the original budget; what is allocated stays."""
        self._limit = int(self._extents.capacity * min(max(share, 0.0), 1.0))

    def readable_fd(self) -> int:
        """A new descriptor by which others can map the arena for reading only."""
        return os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_CLOEXEC)

    def fits(self, length: int) -> bool:
        """Whether `allocate` can succeed as far as the budget goes."""
        need = rounded(length)
        return self._extents.largest_free >= need and self.used + need <= self._limit

    def host_short(self) -> bool:
        """The host is short of memory: nothing new is allocated, and `trim` returns pages."""
        return host_memory.available() < self._reserve

    def allocate(self, length: int) -> int | None:
        """Offset, or None: the budget is used up, or the host has too little left."""
        self._fresh += length
        if self._fresh >= CHECK_EVERY_BYTES:
            self._fresh = 0
            self._spare = not self.host_short()
        if not self._spare or self.used + rounded(length) > self._limit:
            return None
        return self._extents.allocate(length)

    def view(self, offset: int, length: int) -> memoryview:
        return self._view[offset : offset + length]

    def read(self, offset: int, length: int) -> memoryview:
        """The bytes of an extent; a view, valid until it is released."""
        return self._view[offset : offset + length]

    def release(self, offset: int) -> int:
        """Bytes freed. Their pages stay with us until `trim`."""
        length = self._extents.release(offset)
        self._dirty[offset] = max(length, self._dirty.get(offset, 0))
        return length

    def trim(self) -> int:
        """Gives the pages of freed extents back to the host; bytes given back."""
        given = 0
        for start, end in overlaps(self._extents.free_ranges(), sorted(self._dirty.items())):
            host_memory.punch(self._fd, start, end - start)
            given += end - start
        self._dirty.clear()
        self._spare = not self.host_short()
        return given

    def resident(self) -> int:
        """Bytes of the file that are resident now."""
        return os.fstat(self._fd).st_blocks * 512

    def close(self) -> None:
        self._view.release()
        with contextlib.suppress(BufferError):  # ZeroMQ may still read; the process ends
            self._map.close()
        os.close(self._fd)
