"""How far a rank is that reads the files of its model, and at which rate it does."""

from __future__ import annotations

import time
from collections.abc import Callable


class ReadPace:
    """Of files of `size` bytes in all. `limit_mb_s`: MiB per second at most, 0: no limit. `report` gets the
    size and what was read of it."""

    def __init__(
        self,
        size: int,
        limit_mb_s: int,
        report: Callable[[int, int], None] | None,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._size = size
        self._limit = limit_mb_s << 20
        self._report: Callable[[int, int], None] = report or _reported_by_another
        self._now, self._sleep = now, sleep
        self._began = now()
        self._read = 0
        self._report(size, 0)

    def read(self, count: int) -> None:
        """So many bytes more are read; waits where that was too fast."""
        self._read += count
        # Tensors that are unpacked are larger than their part of the file.
        self._report(self._size, min(self._read, self._size))
        if self._limit:
            early_s = self._began + self._read / self._limit - self._now()
            if early_s > 0:
                self._sleep(early_s)

    def done(self) -> None:
        """All of them are read."""
        self._report(self._size, self._size)


def _reported_by_another(size: int, read: int) -> None:
    """Another rank does."""
