"""An allocator of extents in a fixed range of bytes: best fit, with coalescing.

Every extent is rounded up to whole pages, so what it accounts is what the host really
gives: a page belongs to one extent only. No I/O; the range may be memory or a file.
"""

from __future__ import annotations

from bisect import bisect_left, insort

PAGE = 4096


def rounded(length: int) -> int:
    """Bytes an extent of `length` really takes."""
    return -(-length // PAGE) * PAGE


class Extents:
    """Free and used ranges of `[0, capacity)`; capacity is rounded down to pages."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity // PAGE * PAGE
        self.used = 0
        self._by_start: dict[int, int] = {}
        self._by_end: dict[int, int] = {}
        self._by_size: list[tuple[int, int]] = []
        self._lengths: dict[int, int] = {}
        if self.capacity:
            self._add_free(0, self.capacity)

    @property
    def free(self) -> int:
        return self.capacity - self.used

    @property
    def largest_free(self) -> int:
        return self._by_size[-1][0] if self._by_size else 0

    def allocate(self, length: int) -> int | None:
        """Offset of a new extent; None when no free range is long enough."""
        need = rounded(length)
        at = bisect_left(self._by_size, (need, 0))
        if need <= 0 or at == len(self._by_size):
            return None
        size, start = self._by_size[at]
        self._remove_free(start, size)
        if size > need:
            self._add_free(start + need, size - need)
        self._lengths[start] = need
        self.used += need
        return start

    def release(self, start: int) -> int:
        """Frees the extent at `start`; bytes that are free again. Raises KeyError for what
        is none: a double free would hand out the same bytes twice."""
        length = self._lengths.pop(start)
        self.used -= length
        low, high = start, start + length
        if low in self._by_end:
            before = self._by_end[low]
            self._remove_free(before, low - before)
            low = before
        if high in self._by_start:
            after = self._by_start[high]
            self._remove_free(high, after)
            high += after
        self._add_free(low, high - low)
        return length

    def free_ranges(self) -> list[tuple[int, int]]:
        """(start, length) of all that is free."""
        return sorted(self._by_start.items())

    def _add_free(self, start: int, length: int) -> None:
        self._by_start[start] = length
        self._by_end[start + length] = start
        insort(self._by_size, (length, start))

    def _remove_free(self, start: int, length: int) -> None:
        del self._by_start[start]
        del self._by_end[start + length]
        del self._by_size[bisect_left(self._by_size, (length, start))]
