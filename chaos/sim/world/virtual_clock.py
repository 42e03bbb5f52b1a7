"""Virtual time: due times in one order."""

from __future__ import annotations

import heapq
from typing import Generic, TypeVar

Who = TypeVar("Who")


class Clock(Generic[Who]):
    """One due time per key; the earliest comes first, among equal ones the one set first. `set` and
    `next` are O(log n)."""

    def __init__(self) -> None:
        self.now_ns = 0
        self._heap: list[tuple[int, int, Who]] = []
        self._valid: dict[Who, int] = {}
        self._set = 0

    def set(self, who: Who, at_ns: int | None) -> None:
        """Set the next due time of `who`; None: remove it. Raises ValueError for a past time."""
        if at_ns is None:
            self._valid.pop(who, None)
            return
        if at_ns < self.now_ns:
            raise ValueError(f"{who} at {at_ns}, which is before {self.now_ns}")
        self._set += 1
        self._valid[who] = self._set
        heapq.heappush(self._heap, (at_ns, self._set, who))

    def next(self) -> Who | None:
        """Advance to the next due time and return its key; None: there is none."""
        while self._heap:
            at_ns, number, who = heapq.heappop(self._heap)
            if self._valid.get(who) == number:
                del self._valid[who]
                self.now_ns = at_ns
                return who
        return None
